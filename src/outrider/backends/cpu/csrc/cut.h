/* What a law allows of a row, found by a few passes over all of it: the slow way, for rows where a look at the best does not tell. */
#pragma once
#include "row.h"

enum { BINS = 1024 };
#define LEAST -3.0e38f                                        /* below it a token is forbidden */
typedef struct { float *logit, *mass; int32_t *id; long n; } Items;          /* candidates: how far below the best, and exp of it */
typedef double vd __attribute__((vector_size(VL * 8), aligned(8)));

static double mass_above(const float *l, const float *mass, long n, float least) {    /* without mass: how many */
    vd sum = {0};
    for (long i = 0; i < n; i += VL) {
        const vi in = *(const vf *)(l + i) >= least;
        vf m = (vf){0} + 1.0f;
        if (mass) m = *(const vf *)(mass + i);
        sum += __builtin_convertvector((vf)((vi)m & in), vd);
    }
    double all = 0;
    for (int i = 0; i < VL; i++) all += sum[i];
    return all;
}

/* A bound below the last item that is needed to collect `target`: steps down from the best until enough lies above. */
static float floor_of(const float *l, const float *mass, long n, double target) {
    static const float steps[] = {1, 2, 3, 4, 6, 8, 11, 15, 20, 30};
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        if (mass_above(l, mass, n, -steps[i]) >= target) return -steps[i];
    return LEAST;
}

static int descending(const void *a, const void *b) {
    const float x = ((const float *)a)[0], y = ((const float *)b)[0];
    return (x < y) - (x > y);
}

INLINE void bins_of(Items t, long i, float scale, int32_t *bin) {          /* of one block; past the end: none */
    const long m = t.n - i < BLOCK ? t.n - i : BLOCK;
    for (long j = 0; j < m; j++) bin[j] = (int32_t)(-t.logit[i + j] * scale);
    for (long j = m; j < BLOCK; j++) bin[j] = -1;
}

/* The logit of the last item, best first, before which less than `target` has been collected.  No item lies below `least`. */
static float cut_at(Items t, int counting, float least, double target) {
    double sums[BINS] = {0}, before = 0;
    const float scale = (BINS - 1) / (1e-6f - least);
    int32_t bin[BLOCK], last = 0;
    for (long i = 0; i < t.n; i += BLOCK) {
        bins_of(t, i, scale, bin);
        for (long j = 0; j < BLOCK && i + j < t.n; j++) sums[bin[j]] += counting ? 1 : t.mass[i + j];
    }
    while (last < BINS - 1 && before + sums[last] < target) before += sums[last++];
    float (*in)[2] = malloc((size_t)(t.n + 1) * sizeof *in);
    long n = 0;
    for (long i = 0; i < t.n; i += BLOCK) {
        int hits = 0;
        bins_of(t, i, scale, bin);
        for (long j = 0; j < BLOCK; j++) hits += bin[j] == last;
        if (hits) for (long j = 0; j < BLOCK; j++) if (bin[j] == last) { in[n][0] = t.logit[i + j]; in[n++][1] = counting ? 1 : t.mass[i + j]; }
    }
    qsort(in, (size_t)n, sizeof *in, descending);
    float cut = n ? in[0][0] : least;                         /* the target may be more than there is */
    for (long i = 0; i < n && before < target; i++) { cut = in[i][0]; before += in[i][1]; }
    free(in);
    return cut;
}

static Items keep(Items t, float least) {                     /* in place */
    long n = 0;
    for (long i = 0; i < t.n; i += BLOCK) {
        const long m = t.n - i < BLOCK ? t.n - i : BLOCK;
        int hits = 0;
        for (long j = i; j < i + m; j++) hits += t.logit[j] >= least;
        if (hits == m) {
            if (n != i) {
                memmove(t.logit + n, t.logit + i, (size_t)m * 4);
                memmove(t.mass + n, t.mass + i, (size_t)m * 4);
                memmove(t.id + n, t.id + i, (size_t)m * 4);
            }
            n += m;
        } else if (hits) for (long j = i; j < i + m; j++) if (t.logit[j] >= least) {
            t.logit[n] = t.logit[j]; t.mass[n] = t.mass[j]; t.id[n++] = t.id[j];
        }
    }
    t.n = n;
    return t;
}
static float lowest(Items t) {
    float least[BLOCK], all;
    for (int j = 0; j < BLOCK; j++) least[j] = t.logit[0];
    for (long i = 0; i < t.n; i += BLOCK) {
        const long m = t.n - i < BLOCK ? t.n - i : BLOCK;
        for (long j = 0; j < m; j++) least[j] = t.logit[i + j] < least[j] ? t.logit[i + j] : least[j];
    }
    all = least[0];
    for (int j = 1; j < BLOCK; j++) all = least[j] < all ? least[j] : all;
    return all;
}

/* What is left of t after min_p, top_k and top_p, in this order; `padded` as many as there is room for.  weighed: `mass` is wanted, and the sum
 * of it in *all. */
static Items allowed(Items t, long padded, const Law *law, int weighed, double *all) {
    const long V = t.n;
    const int nucleus = law->top_p < 1;
    *all = -1;
    if (nucleus || weighed) {
        for (long i = 0; i < padded; i += VL) *(vf *)(t.mass + i) = vexp(*(vf *)(t.logit + i));
        *all = mass_above(t.logit, t.mass, padded, LEAST);
    }
    if (law->min_p > 0) { t = keep(t, (float)log(law->min_p)); *all = -1; }
    if (law->top_k > 0 && law->top_k < t.n) {
        if (t.n == V) t = keep(t, floor_of(t.logit, 0, padded, (double)law->top_k));
        t = keep(t, cut_at(t, 1, lowest(t), (double)law->top_k));
        *all = -1;
    }
    if (nucleus) {
        if (*all < 0) { *all = 0; for (long i = 0; i < t.n; i++) *all += t.mass[i]; }
        if (t.n == V) t = keep(t, floor_of(t.logit, t.mass, padded, law->top_p * *all));
        t = keep(t, cut_at(t, 0, lowest(t), law->top_p * *all));
        *all = -1;
    }
    if (weighed && *all < 0) { *all = 0; for (long i = 0; i < t.n; i++) *all += t.mass[i]; }
    return t;
}
