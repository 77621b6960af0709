/* min_p, top_k and top_p by a few passes over all candidates of a row.  The slow way: `sample.c` first tries
 * to decide by the best tokens alone.
 *
 * A filter keeps all candidates from some logit on.  That cut is found in two steps, without sorting the
 * vocabulary: a histogram over the logits tells which bin holds it, and only this bin is sorted.  Sums run
 * in the order of the tokens, one thread a row. */
#pragma once
#include "memory.h"
#include "row.h"

enum { BINS = 1024 };
static const float FORBIDDEN = -3.0e38f; /* a token below it has no probability */

/* Candidates: how far each lies below the best (see below_max), exp of it, and its token. */
typedef struct {
    float *logit, *mass;
    int32_t *token;
    int64_t count;
} Candidates;

typedef double vdouble __attribute__((vector_size(LANES * 8), aligned(8)));

/* The mass of all logits [count] >= cut, or their number if mass is null. */
static double mass_from(const float *logits, const float *mass, int64_t count, float cut) {
    vdouble sums = {0};
    for (int64_t i = 0; i < count; i += LANES) {
        const vint inside = load(logits + i) >= cut;
        const vfloat m = mass ? load(mass + i) : broadcast(1.0f);
        sums += __builtin_convertvector((vfloat)((vint)m & inside), vdouble);
    }
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

/* A lower bound of the cut above which `target` mass, or that many candidates if mass is null, lies. */
static float coarse_cut(const float *logits, const float *mass, int64_t count, double target) {
    static const float steps[] = {1, 2, 3, 4, 6, 8, 11, 15, 20, 30};
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        if (mass_from(logits, mass, count, -steps[i]) >= target) return -steps[i];
    return FORBIDDEN;
}

typedef struct {
    float logit, mass;
} BinEntry;
static int by_descending_logit(const void *a, const void *b) {
    const float x = ((const BinEntry *)a)->logit, y = ((const BinEntry *)b)->logit;
    return (x < y) - (x > y);
}

/* The bins of the candidates from i on, a block of them; -1 past the last. */
INLINE void bins_of(Candidates t, int64_t i, float scale, int32_t *bins) {
    const int64_t n = min64(t.count - i, BLOCK);
    for (int64_t j = 0; j < n; j++) bins[j] = (int32_t)(-t.logit[i + j] * scale);
    for (int64_t j = n; j < BLOCK; j++) bins[j] = -1;
}

/* The candidates of one bin, unsorted; returns how many. */
static int64_t collect_bin(Candidates t, int counting, float scale, int32_t bin, BinEntry *entries) {
    int64_t n = 0;
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        int32_t bins[BLOCK];
        int hits = 0;
        bins_of(t, i, scale, bins);
        for (int64_t j = 0; j < BLOCK; j++) hits += bins[j] == bin;
        if (!hits) continue;
        for (int64_t j = 0; j < BLOCK; j++)
            if (bins[j] == bin) entries[n++] = (BinEntry){t.logit[i + j], counting ? 1 : t.mass[i + j]};
    }
    return n;
}

/* The logit of the last candidate, best first, before which less than `target` has been collected: mass, or
 * candidates if `counting`.  lowest: the lowest logit of all. */
static float exact_cut(Candidates t, int counting, float lowest, double target) {
    double sums[BINS] = {0}, before = 0;
    const float scale = (BINS - 1) / (1e-6f - lowest);
    int32_t bins[BLOCK], bin = 0;
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        bins_of(t, i, scale, bins);
        for (int64_t j = 0; j < BLOCK && i + j < t.count; j++) sums[bins[j]] += counting ? 1 : t.mass[i + j];
    }
    while (bin < BINS - 1 && before + sums[bin] < target) before += sums[bin++];
    BinEntry *entries = allocate((t.count + 1) * (int64_t)sizeof *entries);
    const int64_t n = collect_bin(t, counting, scale, bin, entries);
    qsort(entries, (size_t)n, sizeof *entries, by_descending_logit);
    float cut = n ? entries[0].logit : lowest; /* the target may be more than there is */
    for (int64_t i = 0; i < n && before < target; i++) {
        cut = entries[i].logit;
        before += entries[i].mass;
    }
    release(entries);
    return cut;
}

/* Moves n candidates from place `from` to place `to` <= from. */
static void move_candidates(Candidates t, int64_t to, int64_t from, int64_t n) {
    if (to == from) return;
    memmove(t.logit + to, t.logit + from, (size_t)n * 4);
    memmove(t.mass + to, t.mass + from, (size_t)n * 4);
    memmove(t.token + to, t.token + from, (size_t)n * 4);
}

/* The candidates from the cut on, in place and in order. */
static Candidates keep_from(Candidates t, float cut) {
    int64_t kept = 0;
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        const int64_t n = min64(t.count - i, BLOCK);
        int hits = 0;
        for (int64_t j = i; j < i + n; j++) hits += t.logit[j] >= cut;
        if (hits == n) {
            move_candidates(t, kept, i, n);
            kept += n;
            continue;
        }
        for (int64_t j = i; hits && j < i + n; j++) {
            if (!(t.logit[j] >= cut)) continue;
            t.logit[kept] = t.logit[j];
            t.mass[kept] = t.mass[j];
            t.token[kept++] = t.token[j];
        }
    }
    t.count = kept;
    return t;
}

static float lowest_logit(Candidates t) {
    float lowest[BLOCK];
    for (int j = 0; j < BLOCK; j++) lowest[j] = t.logit[0];
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        const int64_t n = min64(t.count - i, BLOCK);
        for (int64_t j = 0; j < n; j++) lowest[j] = t.logit[i + j] < lowest[j] ? t.logit[i + j] : lowest[j];
    }
    float result = lowest[0];
    for (int j = 1; j < BLOCK; j++) result = lowest[j] < result ? lowest[j] : result;
    return result;
}

static double total_mass(Candidates t) {
    double mass = 0;
    for (int64_t i = 0; i < t.count; i++) mass += t.mass[i];
    return mass;
}

/* The candidates t that are left after min_p, top_k and top_p, in this order.  padded: t.count rounded up to
 * a multiple of BLOCK, the padding at minus infinity.  If want_mass, mass is set and *mass is the sum of
 * what is left. */
static Candidates apply_filters(Candidates t, int64_t padded, const DistributionParams *params, int want_mass,
                                double *mass) {
    const int64_t vocab = t.count;
    const int nucleus = params->top_p < 1;
    *mass = -1; /* not known */
    if (nucleus || want_mass) {
        for (int64_t i = 0; i < padded; i += LANES) store(t.mass + i, vexp(load(t.logit + i)));
        *mass = mass_from(t.logit, t.mass, padded, FORBIDDEN);
    }
    if (params->min_p > 0) {
        t = keep_from(t, (float)log(params->min_p));
        *mass = -1;
    }
    if (params->top_k > 0 && params->top_k < t.count) {
        const double target = (double)params->top_k;
        if (t.count == vocab) t = keep_from(t, coarse_cut(t.logit, 0, padded, target));
        t = keep_from(t, exact_cut(t, 1, lowest_logit(t), target));
        *mass = -1;
    }
    if (nucleus) {
        if (*mass < 0) *mass = total_mass(t);
        const double target = params->top_p * *mass;
        if (t.count == vocab) t = keep_from(t, coarse_cut(t.logit, t.mass, padded, target));
        t = keep_from(t, exact_cut(t, 0, lowest_logit(t), target));
        *mass = -1;
    }
    if (want_mass && *mass < 0) *mass = total_mass(t);
    return t;
}
