/* The CPU sampler: a few vector passes over a row of logits and no sort of the vocabulary.
 * sampling/reference.py is the same law in torch. */
#include "row.h"

enum { BINS = 1024, MOST = 64, MORE = 16, SHARED = 8192 };
#define LEAST -3.0e38f                                        /* below it a token is forbidden */
typedef struct { float temperature; double min_p; long top_k; double top_p; } Law;
typedef struct { float *logit, *mass; int32_t *id; long n; } Items;          /* candidates; mass = exp(logit - best) */
typedef double vd __attribute__((vector_size(VL * 8), aligned(8)));

typedef uint64_t vl __attribute__((vector_size(VL * 4), aligned(8)));                /* half as many as there are floats in a vector */
typedef int32_t hi __attribute__((vector_size(VL * 2), aligned(4), may_alias));
typedef uint32_t hu __attribute__((vector_size(VL * 2), aligned(4), may_alias));

#define GOLDEN 0x9e3779b97f4a7c15u
INLINE hu bits(vl z) {                                        /* 24 of them, of z = key + (token + 1) * GOLDEN: as `mix` */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return __builtin_convertvector((z ^ (z >> 31)) >> 40, hu);
}
INLINE vl place(uint64_t key, hi token) { return key + (__builtin_convertvector(token, vl) + 1) * GOLDEN; }
INLINE float gumbel(uint32_t u) { return (float)-log(-log((u + 0.5) * 0x1p-24)); }
INLINE vf bound(vu u) {                                       /* -log(-log u) <= -log(1 - u), from the exponent of 1 - u alone, rounded up */
    const vf rest = __builtin_convertvector((vi)((1u << 24) - u), vf);
    return 0.6931473f * __builtin_convertvector(25 + 127 - ((vi)rest >> 23), vf);
}
static const float REACH = 0.6931473f * 25;                   /* no noise is more */

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
static float floor_of(const float *l, const float *mass, long n, float best, double target) {
    static const float steps[] = {1, 2, 3, 4, 6, 8, 11, 15, 20, 30};
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++)
        if (mass_above(l, mass, n, best - steps[i]) >= target) return best - steps[i];
    return LEAST;
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

/* The best so far: by score, and of equal ones the lower id. */
typedef struct { long k, n; float score[MOST]; int32_t id[MOST]; } Best;
INLINE float worst_of(const Best *best) { return best->n < best->k ? -INFINITY : best->score[best->k - 1]; }

static void enter(Best *best, float score, int32_t id) {
    long at = best->n < best->k ? best->n++ : best->k;
    for (; at > 0 && (best->score[at - 1] < score || (best->score[at - 1] == score && best->id[at - 1] > id)); at--)
        if (at < best->k) { best->score[at] = best->score[at - 1]; best->id[at] = best->id[at - 1]; }
    if (at < best->k) { best->score[at] = score; best->id[at] = id; }
}

/* Enters what can win of m <= BLOCK logits: entries ids[j] of their row, or first + j.  map: the token of an entry, whose noise it gets.
 * least: nothing below it wins. */
INLINE void consider(const float *l, long m, const int32_t *ids, int32_t first, const int32_t *map, int noisy, uint64_t key, float least,
                     Best *best) {
    uint32_t u[BLOCK];
    float upper[BLOCK];
    const float worst = worst_of(best) > least ? worst_of(best) : least;
    int hits = 0;
    if (!noisy) memcpy(upper, l, sizeof upper);
    else {
        int32_t token[BLOCK] = {0};
        const long listed = ids || map ? m : VL / 2;          /* otherwise tokens follow each other, and so do their places */
        for (int32_t j = 0; j < listed; j++) { token[j] = ids ? ids[j] : first + j; if (map) token[j] = map[token[j]]; }
        vl z = place(key, *(const hi *)token);
        for (long j = 0; j < BLOCK; j += VL / 2) {
            *(hu *)(u + j) = bits(z);
            if (j + VL / 2 < BLOCK) z = ids || map ? place(key, *(const hi *)(token + j + VL / 2)) : z + VL / 2 * GOLDEN;
        }
        for (long j = 0; j < BLOCK; j += VL) *(vf *)(upper + j) = *(const vf *)(l + j) + bound(*(const vu *)(u + j));
    }
    for (long j = 0; j < BLOCK; j++) hits += upper[j] >= worst;
    if (hits) for (int32_t j = 0; j < m; j++)                 /* noise is drawn only where it can win */
        if (upper[j] >= worst && upper[j] >= worst_of(best) && l[j] > -INFINITY)
            enter(best, noisy ? l[j] + gumbel(u[j]) : l[j], ids ? ids[j] : first + j);
}

/* The k best of a row.  First come the blocks that hold its k highest logits; then most of the others cannot win, whatever their noise. */
static void choose(const Row *r, const float *top, const int32_t *map, int noisy, uint64_t key, int alone, Best *best) {
    Best tops = {best->k, 0, {0}, {0}};
    for (long b = 0; b < r->blocks; b++) if (top[b] > worst_of(&tops)) enter(&tops, top[b], (int32_t)b);
    const float least = worst_of(&tops);
#define CONSIDER(to) consider(block_at(r, b), r->n - b * BLOCK < BLOCK ? r->n - b * BLOCK : BLOCK, 0, (int32_t)(b * BLOCK), map, noisy, key, noisy ? -INFINITY : least, to)
    for (long b = 0; b < r->blocks; b++) if (top[b] >= least && top[b] > -INFINITY) CONSIDER(best);
    if (!noisy) return;
    const Best known = *best;
    #pragma omp parallel if (alone)
    {
        Best own = known;
        #pragma omp for schedule(static) nowait
        for (long b = 0; b < r->blocks; b++) if (top[b] < least && top[b] + REACH >= worst_of(&own)) CONSIDER(&own);
        #pragma omp critical
        for (long i = 0; i < own.n; i++) {
            int there = 0;
            for (long j = 0; j < known.n; j++) there |= known.id[j] == own.id[i];
            if (!there) enter(best, own.score[i], own.id[i]);
        }
    }
}

/* What the logits from `least` on weigh, those of them above x, and how many these are.  Parts of a row are summed apart: so the number
 * of threads changes nothing. */
typedef struct { double all, above; long count; } Mass;
INLINE Mass part_of(const Row *r, long from, long to, float best, float least, float x, const int split) {
    vf all = {0}, above = {0};
    vi count = {0};
    for (long b = from; b < to; b++) {
        const float *l = block_at(r, b);
        for (long j = 0; j < BLOCK; j += VL) {
            const vf v = *(const vf *)(l + j), m = vexp(v - best);
            all += (vf)((vi)m & (v >= least));
            if (split) { above += (vf)((vi)m & (v > x)); count -= v > x; }
        }
    }
    Mass sum = {total(all), total(above), 0};
    for (int i = 0; i < VL; i++) sum.count += count[i];
    return sum;
}
static Mass mass_of(const Row *r, float best, float least, float x, int alone) {
    const long parts = parts_of(r);
    Mass of[parts], sum = {0};
    #pragma omp parallel for schedule(static) if (alone)
    for (long p = 0; p < parts; p++) {
        const long from = p * PART, to = from + PART < r->blocks ? from + PART : r->blocks;
        of[p] = x < INFINITY ? part_of(r, from, to, best, least, x, 1) : part_of(r, from, to, best, least, x, 0);
    }
    for (long p = 0; p < parts; p++) { sum.all += of[p].all; sum.above += of[p].above; sum.count += of[p].count; }
    return sum;
}

/* Whether the law allows the token with logit x, up to rounding; 0 if that takes more than one look.  What it allows is everything from
 * some logit on, so a token is inside unless those above it already are too many.  Saves most rows the search for the border. */
static int inside(const Row *r, float best, float x, const Law *law, int alone) {
    const int ranked = law->top_k > 0 && law->top_k < r->n;
    const float least = law->min_p > 0 ? best + (float)log(law->min_p) : LEAST;
    if (x == best) return 1;
    if (x < least) return 0;
    if (!ranked && law->top_p >= 1) return 1;
    const Mass mass = mass_of(r, best, least, x, alone);
    if (ranked && mass.count >= law->top_k) return 0;
    return law->top_p >= 1 || mass.above < law->top_p * (ranked ? mass.above + exp(x - best) : mass.all);      /* at least that much is inside */
}

/* The k best of a row that are inside, of some more that were chosen; 0 if that is not enough.  Only where `inside` is sure of all. */
static int sift(const Row *r, float best, const Law *law, int alone, Best *found, long k) {
    float in = INFINITY, out = -INFINITY;                     /* the lowest logit known to be inside, the highest known not to be */
    long n = 0;
    for (long i = 0; i < found->n && n < k; i++) {
        const float x = r->l[found->id[i]];
        if (x <= out) continue;
        if (x < in && !inside(r, best, x, law, alone)) { out = x; continue; }
        if (x < in) in = x;
        found->id[n++] = found->id[i];
    }
    found->n = n;
    return n == k;
}

/* The k best tokens of `logits` (k <= 64) into out, and their probabilities into prob unless it is 0.  Temperature 0 ranks by
 * logit, otherwise by log p + noise(key, token), where p is the law after min_p, top_k and top_p; equal logits stay or go together.
 * Returns how many there are: fewer than k where the law allows fewer, none where no logit is finite.  alone: threads may share the row. */
static long pick_mapped(const float *logits, long V, const Law *law, uint64_t key, const int32_t *map, long k, int alone,
                        int32_t *out, float *prob) {
    static _Thread_local float *scratch;
    static _Thread_local long size;
    const float temperature = law->temperature;
    const double min_p = law->min_p, top_p = law->top_p;
    const long top_k = law->top_k;
    Row r = row_of(logits, V);
    const long padded = r.blocks * BLOCK;
    const int noisy = temperature != 0, ranked = noisy && top_k > 0 && top_k < V, nucleus = noisy && top_p < 1;
    const int cut = ranked || nucleus || (noisy && min_p > 0);
    const long room = 3 * padded + parts_of(&r) * PART;
    if (size < room) { free(scratch); scratch = malloc((size_t)(size = room) * 4); }
    Items t = {scratch, scratch + padded, (int32_t *)(scratch + 2 * padded), V};
    float *top = scratch + 3 * padded;
    alone = alone && V >= SHARED;
    double all = -1;
    const float best = noisy || !prob ? survey(&r, temperature, noisy ? t.logit : 0, top, alone) : weigh(&r, top, &all, alone);
    if (!isfinite(best)) return 0;

    Best found = {k, 0, {0}, {0}};
    int done = 0;
    if (!cut || !prob) {                                      /* the best of all are the best inside, where they are inside */
        choose(&r, top, map, noisy, key, alone, &found);
        float x = INFINITY;
        for (long i = 0; cut && i < found.n; i++) x = t.logit[found.id[i]] < x ? t.logit[found.id[i]] : x;
        done = !cut || inside(&r, best, x, law, alone);
        if (!done && !(ranked && nucleus) && k + MORE <= MOST) {
            found = (Best){k + MORE, 0, {0}, {0}};
            choose(&r, top, map, noisy, key, alone, &found);
            done = sift(&r, best, law, alone, &found, k);
        }
        if (prob && noisy) all = mass_of(&r, best, LEAST, INFINITY, alone).all;
    }
    if (!done) {
        for (long i = 0; i < V; i++) t.id[i] = (int32_t)i;
        if (nucleus || prob) for (long i = 0; i < padded; i += VL) *(vf *)(t.mass + i) = vexp(*(vf *)(t.logit + i) - best);
        if (nucleus || prob) all = mass_above(t.logit, t.mass, padded, LEAST);
        if (min_p > 0) { t = keep(t, best + (float)log(min_p)); all = -1; }
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
        if (all < 0) { all = 0; for (long i = 0; i < t.n; i++) all += t.mass[i]; }
        found = (Best){k, 0, {0}, {0}};
        for (long i = 0; i < t.n; i += BLOCK) consider(t.logit + i, t.n - i < BLOCK ? t.n - i : BLOCK, t.id + i, 0, map, 1, key, -INFINITY, &found);
    }
    for (long i = 0; i < found.n; i++) {
        const vf p = (vf){0} + ((noisy ? logits[found.id[i]] / temperature : logits[found.id[i]]) - best);
        out[i] = found.id[i];
        if (prob) prob[i] = (float)(vexp(p)[0] / all);
    }
    return found.n;
}

long pick(const float *logits, long V, float temperature, double min_p, long top_k, double top_p, uint64_t key, long k,
          int32_t *out, float *prob) {
    const Law law = {temperature, min_p, top_k, top_p};
    return pick_mapped(logits, V, &law, key, 0, k, 1, out, prob);
}

/* What match says of a tree (see verify/match.py): the pick behind its root, then behind the child that holds it, as long as there is one.
 * logits: of the root and of every node, `wide` apart; the keys are those of the positions from `position` on.  path gets the accepted nodes,
 * said one token more.  Returns how many were said; -1 where one of the picks finds nothing. */
long follow(const float *logits, long wide, long V, float temperature, double min_p, long top_k, double top_p, uint64_t stream,
            uint64_t position, const int32_t *tokens, const int32_t *parents, long nodes, int32_t *path, int32_t *said) {
    const Law law = {temperature, min_p, top_k, top_p};
    for (long n = 0, node = -1; ; path[n++] = (int32_t)node) {
        if (!pick_mapped(logits + (node + 1) * wide, V, &law, mix(stream + position + (uint64_t)n), 0, 1, 1, said + n, 0)) return -1;
        long child = nodes - 1;                               /* of children that hold the same, the last */
        while (child > node && (parents[child] != node || tokens[child] != said[n])) child--;
        if (child == node) return n + 1;
        node = child;
    }
}

static void pick_row(const float *logits, long V, const Law *law, uint64_t key, const int32_t *map, long k, int alone,
                     int32_t *out, float *prob) {
    for (long i = pick_mapped(logits, V, law, key, map, k, alone, out, prob); i < k; i++) { out[i] = -1; if (prob) prob[i] = 0; }
}

/* The same for n rows of logits[n,V] at once, each with a key of its own.  map: the token of every entry of a row, 0 where they are
 * the same.  out and, unless it is 0, prob are [n,k]; where there are fewer than k the rest is -1 and 0. */
void picks(const float *logits, long n, long V, float temperature, double min_p, long top_k, double top_p, const uint64_t *keys,
           const int32_t *map, long k, int32_t *out, float *prob) {
    const Law law = {temperature, min_p, top_k, top_p};
    if (n == 1) { pick_row(logits, V, &law, keys[0], map, k, 1, out, prob); return; }  /* within a region threads would be made anew */
    #pragma omp parallel for schedule(dynamic, 1)
    for (long r = 0; r < n; r++) pick_row(logits + r * V, V, &law, keys[r], map, k, 0, out + r * k, prob ? prob + r * k : 0);
}
