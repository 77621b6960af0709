/* The CPU sampler: a few vector passes over a row of logits and no sort of the vocabulary.
 * sampling/reference.py is the same law in torch. */
#include "simd.h"

enum { BINS = 1024, BLOCK = 64, MOST = 64 };
typedef struct { float *logit, *mass; int32_t *id; long n; } Items;          /* candidates; mass = exp(logit - best) */
typedef double vd __attribute__((vector_size(VL * 8), aligned(8)));

INLINE uint32_t bits(uint64_t key, int32_t token) { return (uint32_t)(mix(key + (uint64_t)(token + 1) * 0x9e3779b97f4a7c15u) >> 40); }
INLINE float gumbel(uint32_t u) { return (float)-log(-log((u + 0.5) * 0x1p-24)); }
INLINE float bound(uint32_t u) {                              /* -log(-log u) <= -log(1 - u), from the exponent of 1 - u alone */
    return 0.6931472f * (float)(25 - (31 - __builtin_clz((1u << 24) - u)));
}

static float maximum(const float *l, long n) {                /* n is a multiple of VL; NaN if there is one */
    vf top = *(const vf *)l;
    vi bad = {0};
    for (long i = 0; i < n; i += VL) {
        const vf v = *(const vf *)(l + i);
        const vi m = v > top;
        top = (vf)(((vi)v & m) | ((vi)top & ~m));
        bad |= v != v;
    }
    for (int i = 0; i < VL; i++) if (bad[i]) return NAN;
    float best = top[0];
    for (int i = 1; i < VL; i++) best = top[i] > best ? top[i] : best;
    return best;
}
static long first_best(const float *l, long n, int32_t *out) {                         /* greedy; reads the row where it lies */
    const long whole = n / VL * VL;
    float best = whole ? maximum(l, whole) : -INFINITY;
    for (long i = whole; i < n; i++) if (best == best && !(l[i] <= best)) best = l[i];   /* NaN wins, and stays */
    if (!isfinite(best)) return 0;
    long i = 0;
    while (l[i] != best) i++;
    out[0] = (int32_t)i;
    return 1;
}
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

static double mass_of(const float *l, long n, float best) {   /* of all: what mass_above sums, nothing kept */
    vd sum = {0};
    for (long i = 0; i < n; i += VL) {
        const vf v = *(const vf *)(l + i), m = vexp(v - best);
        sum += __builtin_convertvector((vf)((vi)m & (v >= -3.0e38f)), vd);
    }
    double all = 0;
    for (int i = 0; i < VL; i++) all += sum[i];
    return all;
}

/* A bound below the last item that is needed to collect `target`: steps down from the best until enough lies above. */
static float floor_of(const float *l, const float *mass, long n, float best, double target) {
    static const float steps[] = {1, 2, 3, 4, 6, 8, 11, 15, 20, 30};
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        if (mass_above(l, mass, n, best - steps[i]) >= target) return best - steps[i];
    return -3.0e38f;
}

static int descending(const void *a, const void *b) {
    const float x = ((const float *)a)[0], y = ((const float *)b)[0];
    return (x < y) - (x > y);
}

INLINE void bins_of(Items t, long i, float best, float scale, int32_t *bin) {          /* of one block; past the end: none */
    const long m = t.n - i < BLOCK ? t.n - i : BLOCK;
    for (long j = 0; j < m; j++) bin[j] = (int32_t)((best - t.logit[i + j]) * scale);
    for (long j = m; j < BLOCK; j++) bin[j] = -1;
}

/* The logit of the last item, best first, before which less than `target` has been collected.  No item lies below `least`. */
static float cut_at(Items t, int counting, float best, float least, double target) {
    double sums[BINS] = {0}, before = 0;
    const float scale = (BINS - 1) / (best - least + 1e-6f);
    int32_t bin[BLOCK], last = 0;
    for (long i = 0; i < t.n; i += BLOCK) {
        bins_of(t, i, best, scale, bin);
        for (long j = 0; j < BLOCK && i + j < t.n; j++) sums[bin[j]] += counting ? 1 : t.mass[i + j];
    }
    while (last < BINS - 1 && before + sums[last] < target) before += sums[last++];
    float (*in)[2] = malloc((size_t)(t.n + 1) * sizeof *in);
    long n = 0;
    for (long i = 0; i < t.n; i += BLOCK) {
        int hits = 0;
        bins_of(t, i, best, scale, bin);
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

static void insert(float score, int32_t id, long k, long *n, float *scores, int32_t *out) {   /* best first, ties by id */
    long at = *n < k ? (*n)++ : k - 1;
    for (; at > 0 && scores[at - 1] < score; at--) { scores[at] = scores[at - 1]; out[at] = out[at - 1]; }
    scores[at] = score; out[at] = id;
}

/* Without t.id item i is entry i of the row; without a map entry i is token i, whose noise it gets. */
static long choose(Items t, uint64_t key, const int32_t *map, int noisy, long k, int32_t *out) {
    float scores[MOST], upper[BLOCK];
    uint32_t u[BLOCK];
    long n = 0;
    for (long i = 0; i < t.n; i += BLOCK) {
        const long m = t.n - i < BLOCK ? t.n - i : BLOCK;
        const float worst = n < k ? -INFINITY : scores[k - 1];
        int hits = 0;
        if (noisy && map) for (long j = 0; j < m; j++) u[j] = bits(key, map[t.id ? t.id[i + j] : i + j]);
        else if (noisy && t.id) for (long j = 0; j < m; j++) u[j] = bits(key, t.id[i + j]);
        else if (noisy) for (long j = 0; j < m; j++) u[j] = bits(key, (int32_t)(i + j));
        for (long j = 0; j < m; j++) upper[j] = t.logit[i + j] + (noisy ? bound(u[j]) : 0);
        for (long j = 0; j < m; j++) hits += upper[j] > worst;
        if (hits) for (long j = 0; j < m; j++) {
            const float now = n < k ? -INFINITY : scores[k - 1];
            if (upper[j] <= now) continue;                    /* noise is drawn only where it can win */
            const float score = noisy ? t.logit[i + j] + gumbel(u[j]) : t.logit[i + j];
            if (score > now) insert(score, t.id ? t.id[i + j] : (int32_t)(i + j), k, &n, scores, out);
        }
    }
    return n;
}

/* Whether the law allows the token with logit x, top_k aside.  What it allows is everything from some logit on, so a token is
 * inside unless those above it already are too many.  Saves most rows the search for the border. */
static int inside(const float *l, long n, float best, float x, double min_p, double top_p) {
    const float least = min_p > 0 ? best + (float)log(min_p) : -3.0e38f;
    vd all = {0}, above = {0};
    if (x < least) return 0;
    if (top_p >= 1) return 1;
    for (long i = 0; i < n; i += VL) {
        const vf v = *(const vf *)(l + i), m = vexp(v - best);
        all += __builtin_convertvector((vf)((vi)m & (v >= least)), vd);
        above += __builtin_convertvector((vf)((vi)m & (v > x)), vd);
    }
    double sum = 0, more = 0;
    for (int i = 0; i < VL; i++) { sum += all[i]; more += above[i]; }
    return more < top_p * sum;
}

/* The k best tokens of `logits` (k <= 64) into out, and their probabilities into prob unless it is 0.  Temperature 0 ranks by
 * logit, otherwise by log p + noise(key, token), where p is the law after min_p, top_k and top_p; equal logits stay or go together.
 * Returns how many there are: fewer than k where the law allows fewer, none where no logit is finite. */
static long pick_mapped(const float *logits, long V, float temperature, double min_p, long top_k, double top_p, uint64_t key,
                        const int32_t *map, long k, int32_t *out, float *prob) {
    static _Thread_local float *scratch;
    static _Thread_local long size;
    const long padded = (V + VL - 1) / VL * VL;
    const int noisy = temperature != 0;
    if (size < 3 * padded) { free(scratch); scratch = malloc((size_t)(size = 3 * padded) * 4); }
    Items t = {scratch, scratch + padded, (int32_t *)(scratch + 2 * padded), V};
    if (!noisy && k == 1 && !prob) return first_best(logits, V, out);
    if (noisy) for (long i = 0; i < V; i++) t.logit[i] = logits[i] / temperature;
    else memcpy(t.logit, logits, (size_t)V * 4);
    for (long i = V; i < padded; i++) t.logit[i] = -INFINITY;
    const float best = maximum(t.logit, padded);
    if (!isfinite(best)) return 0;

    const int ranked = noisy && top_k > 0 && top_k < V, nucleus = noisy && top_p < 1;
    if (noisy && !ranked && !prob) {                          /* the best of all are the best inside, where they are inside */
        const long n = choose((Items){t.logit, 0, 0, V}, key, map, 1, k, out);
        float x = INFINITY;
        for (long i = 0; i < n; i++) x = t.logit[out[i]] < x ? t.logit[out[i]] : x;
        if (inside(t.logit, padded, best, x, min_p, top_p)) return n;
    }
    const int cut = ranked || nucleus || (noisy && min_p > 0);
    double all = 0;
    if (!cut) { t.id = 0; all = prob ? mass_of(t.logit, padded, best) : 0; }
    else {
        for (long i = 0; i < V; i++) t.id[i] = (int32_t)i;
        if (nucleus || prob) for (long i = 0; i < padded; i += VL) *(vf *)(t.mass + i) = vexp(*(vf *)(t.logit + i) - best);
        if (nucleus || prob) all = mass_above(t.logit, t.mass, padded, -3.0e38f);
    }
    if (noisy && min_p > 0) { t = keep(t, best + (float)log(min_p)); all = -1; }
    if (ranked && t.n > top_k) {
        if (t.n == V) t = keep(t, floor_of(t.logit, 0, padded, best, (double)top_k));
        t = keep(t, cut_at(t, 1, best, lowest(t), (double)top_k));
        all = -1;
    }
    if (nucleus) {
        if (all < 0) { all = 0; for (long i = 0; i < t.n; i++) all += t.mass[i]; }
        if (t.n == V) t = keep(t, floor_of(t.logit, t.mass, padded, best, top_p * all));
        t = keep(t, cut_at(t, 0, best, lowest(t), top_p * all));
        all = -1;
    }
    long n = choose(t, key, map, noisy, k, out);
    if (prob) {
        if (all < 0) { all = 0; for (long i = 0; i < t.n; i++) all += t.mass[i]; }
        for (long i = 0; i < n; i++) {
            const vf p = (vf){0} + ((noisy ? logits[out[i]] / temperature : logits[out[i]]) - best);
            prob[i] = (float)(vexp(p)[0] / all);
        }
    }
    return n;
}

long pick(const float *logits, long V, float temperature, double min_p, long top_k, double top_p, uint64_t key, long k,
          int32_t *out, float *prob) {
    return pick_mapped(logits, V, temperature, min_p, top_k, top_p, key, 0, k, out, prob);
}

/* The same for n rows of logits[n,V] at once, each with a key of its own.  map: the token of every entry of a row, 0 where they are
 * the same.  out and prob are [n,k]; where there are fewer than k the rest is -1 and 0. */
void picks(const float *logits, long n, long V, float temperature, double min_p, long top_k, double top_p, const uint64_t *keys,
           const int32_t *map, long k, int32_t *out, float *prob) {
    #pragma omp parallel for schedule(dynamic, 1) if (n > 1)
    for (long r = 0; r < n; r++) {
        long i = pick_mapped(logits + r * V, V, temperature, min_p, top_k, top_p, keys[r], map, k, out + r * k, prob + r * k);
        for (; i < k; i++) { out[r * k + i] = -1; prob[r * k + i] = 0; }
    }
}
