/* The CPU sampler: a few vector passes over a row of logits and no sort of the vocabulary.
 * sampling/reference.py is the same law in torch. */
#include "cut.h"

enum { MOST = 64, MORE = 16, SHARED = 8192 };     /* from SHARED logits on threads share a row */

typedef uint64_t vl __attribute__((vector_size(VL * 4), aligned(8)));                /* half as many as there are floats in a vector */
typedef int32_t hi __attribute__((vector_size(VL * 2), aligned(4), may_alias));
typedef uint32_t hu __attribute__((vector_size(VL * 2), aligned(4), may_alias));

#define GOLDEN 0x9e3779b97f4a7c15u
INLINE vl scatter(vl z) {                                     /* of z = key + (token + 1) * GOLDEN; its upper 24 bits are those of `mix` */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    return (z ^ (z >> 27)) * 0x94d049bb133111ebu;
}
INLINE hu bits(vl z) { return __builtin_convertvector(scatter(z) >> 40, hu); }
INLINE vl place(uint64_t key, hi token) { return key + (__builtin_convertvector(token, vl) + 1) * GOLDEN; }
INLINE float gumbel(uint32_t u) { return (float)-log(-log((u + 0.5) * 0x1p-24)); }
INLINE vf bound(vu u) {                                       /* -log(-log u) <= -log(1 - u), from the exponent of 1 - u alone, rounded up */
    const vf rest = __builtin_convertvector((vi)((1u << 24) - u), vf);
    return 0.6931473f * __builtin_convertvector(25 + 127 - ((vi)rest >> 23), vf);
}
static const float REACH = 0.6931473f * 25;                   /* no noise is more */

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

/* Of VL blocks whose highest logits lie `top` below the best: the least noise, in 24 bits, that could lift one to `worst`.  -log(-log u) is
 * that high with a probability below exp(-height), and rounding gets its margin. */
INLINE void least_noise(vf top, float worst, int32_t *least) {
    const vi some = __builtin_convertvector(larger(0x1p24f - 2.0f - vexp(top - worst) * (0x1p24f * 1.0001f), (vf){0}), vi);
    memcpy(least, &some, sizeof some);
}
/* Enters what of a block's tokens has that much noise; z: the places of the first ones. */
INLINE void glance(const Row *r, long first, vl z, uint64_t least, Best *best) {
    uint64_t word[BLOCK], any = 0;
    vl hits = {0};
    for (long j = 0; j < BLOCK; j += VL / 2, z += VL / 2 * GOLDEN) {
        const vl w = scatter(z);
        memcpy(word + j, &w, sizeof w);
        hits |= (vl)(w >= least);
    }
    for (int j = 0; j < VL / 2; j++) any |= hits[j];
    const long m = any ? r->n - first < BLOCK ? r->n - first : BLOCK : 0;
    for (long j = 0; j < m; j++) if (word[j] >= least && r->l[first + j] > -INFINITY) {
        const volatile float below = BELOW(r, r->l[first + j]);      /* rounded, as everywhere: not fused with the sum */
        enter(best, below + gumbel((uint32_t)(word[j] >> 40)), (int32_t)(first + j));
    }
}

INLINE void consider_block(const Row *r, long b, const int32_t *map, int noisy, uint64_t key, float least, Best *best) {
    float score[BLOCK];
    const float *l = block_at(r, b);
    for (long j = 0; j < BLOCK; j++) score[j] = noisy ? BELOW(r, l[j]) : l[j];
    consider(score, r->n - b * BLOCK < BLOCK ? r->n - b * BLOCK : BLOCK, 0, (int32_t)(b * BLOCK), map, noisy, key, least, best);
}

/* The k best of a row, greedily or by what they weigh and their noise.  First come the blocks that hold its k highest logits; then most
 * of the others cannot win: whatever their noise, or with what they get, of which a glance tells enough. */
static void choose(const Row *r, const float *top, const int32_t *map, int noisy, uint64_t key, int alone, Best *best) {
    Best tops = {best->k, 0, {0}, {0}};
    for (long b = 0; b < r->blocks; b++) if (top[b] > worst_of(&tops)) enter(&tops, top[b], (int32_t)b);
    const float first = worst_of(&tops);
    for (long b = 0; b < r->blocks; b++)
        if (top[b] >= first && top[b] > -INFINITY) consider_block(r, b, map, noisy, key, noisy ? -INFINITY : first, best);
    if (!noisy) return;
    const Best known = *best;
    int32_t token[VL / 2];
    for (int j = 0; j < VL / 2; j++) token[j] = j;
    const vl start = place(key, *(const hi *)token);
    #pragma omp parallel if (alone)
    {
        Best own = known;
        #pragma omp for schedule(static) nowait
        for (long g = 0; g < r->blocks; g += VL) {
            int32_t least[VL];
            const vf below = BELOW(r, *(const vf *)(top + g));
            least_noise(below, worst_of(&own), least);
            for (long i = 0; i < VL; i++) {
                if (top[g + i] >= first || top[g + i] == -INFINITY || below[i] + REACH < worst_of(&own)) continue;
                if (map) consider_block(r, g + i, map, 1, key, -INFINITY, &own);
                else glance(r, (g + i) * BLOCK, start + (uint64_t)(g + i) * (BLOCK * GOLDEN), (uint64_t)least[i] << 40, &own);
            }
        }
        #pragma omp critical
        for (long i = 0; i < own.n; i++) {
            int there = 0;
            for (long j = 0; j < known.n; j++) there |= known.id[j] == own.id[i];
            if (!there) enter(best, own.score[i], own.id[i]);
        }
    }
}

/* What the logits weigh that lie from `least` on (below the best, as all here), those of them above x, and how many these are.  Parts of
 * a row are summed apart: so the number of threads changes nothing. */
typedef struct { double all, above; long count; } Mass;
INLINE Mass part_of(const Row *r, long from, long to, float least, float x, const int split) {
    vf all = {0}, above = {0};
    vi count = {0};
    for (long b = from; b < to; b++) {
        const float *l = block_at(r, b);
        for (long j = 0; j < BLOCK; j += VL) {
            const vf v = BELOW(r, *(const vf *)(l + j)), m = softly(v);
            all += (vf)((vi)m & (v >= least));
            if (split) { above += (vf)((vi)m & (v > x)); count -= v > x; }
        }
    }
    Mass sum = {total(all), total(above), 0};
    for (int i = 0; i < VL; i++) sum.count += count[i];
    return sum;
}
static Mass mass_of(const Row *r, float least, float x, int alone) {
    const long parts = parts_of(r->blocks);
    Mass of[parts], sum = {0};
    #pragma omp parallel for schedule(static) if (alone)
    for (long p = 0; p < parts; p++) {
        const long from = p * PART, to = from + PART < r->blocks ? from + PART : r->blocks;
        of[p] = x < INFINITY ? part_of(r, from, to, least, x, 1) : part_of(r, from, to, least, x, 0);
    }
    for (long p = 0; p < parts; p++) { sum.all += of[p].all; sum.above += of[p].above; sum.count += of[p].count; }
    return sum;
}

/* Whether the law surely allows the token that lies x below the best; 0 if that takes more than one look.  What it allows is everything
 * from some logit on, so a token is inside unless those above it already are too many.  Saves most rows the search for the border. */
static int inside(const Row *r, float x, const Law *law, int alone) {
    const int ranked = law->top_k > 0 && law->top_k < r->n;
    const float least = law->min_p > 0 ? (float)log(law->min_p) : LEAST;
    if (x == 0) return 1;
    if (x < least) return 0;
    if (!ranked && law->top_p >= 1) return 1;
    const Mass mass = mass_of(r, least, x, alone);
    if (ranked && mass.count >= law->top_k) return 0;
    if (law->top_p >= 1) return 1;
    return mass.above * (1 + 1e-4) < law->top_p * (ranked ? mass.above + exp(x) : mass.all);     /* at least that much; `softly` needs the margin */
}

/* The k best of a row that are inside, of some more that were chosen; 0 if that is not enough.  Only where `inside` is sure of all. */
static int sift(const Row *r, const Law *law, int alone, Best *found, long k) {
    float in = INFINITY, out = -INFINITY;                     /* the lowest known to be inside, the highest known not to be */
    long n = 0;
    for (long i = 0; i < found->n && n < k; i++) {
        const float x = BELOW(r, r->l[found->id[i]]);
        if (x <= out) continue;
        if (x < in && !inside(r, x, law, alone)) { out = x; continue; }
        if (x < in) in = x;
        found->id[n++] = found->id[i];
    }
    found->n = n;
    return n == k;
}

/* The k best tokens of `logits` (k <= 64) into out, and their probabilities into prob unless it is 0.  Temperature 0 ranks by
 * logit, otherwise by log p + noise(key, token), where p is the law after min_p, top_k and top_p; equal logits stay or go together.
 * Returns how many there are: fewer than k where the law allows fewer, none where no logit is finite.  alone: threads may share the row.
 * known: the highest logits of its blocks, unless 0 (see `surveyed`). */
static long pick_mapped(const float *logits, long V, const Law *law, uint64_t key, const int32_t *map, long k, int alone, float *known,
                        int32_t *out, float *prob) {
    static _Thread_local float *scratch;
    static _Thread_local long size;
    Row r = row_of(logits, V, law->temperature);
    const long padded = r.blocks * BLOCK, room = 3 * padded + parts_of(r.blocks) * PART;
    const int noisy = law->temperature != 0, ranked = noisy && law->top_k > 0 && law->top_k < V, nucleus = noisy && law->top_p < 1;
    const int cut = ranked || nucleus || (noisy && law->min_p > 0);
    if (size < room) { free(scratch); scratch = malloc((size_t)(size = room) * 4); }
    Items t = {scratch, scratch + padded, (int32_t *)(scratch + 2 * padded), V};
    float *top = known ? known : scratch + 3 * padded;
    alone = alone && V >= SHARED;
    double all = -1;
    r.best = known ? surveyed(&r, top) : noisy || !prob ? survey(&r, top, alone) : weigh(&r, top, &all, alone);
    if (!isfinite(r.best)) return 0;

    Best found = {k, 0, {0}, {0}};
    int done = 0;
    if (!cut || !prob) {                                      /* the best of all are the best inside, where they are inside */
        choose(&r, top, map, noisy, key, alone, &found);
        float x = INFINITY;
        for (long i = 0; cut && i < found.n; i++) { const float y = BELOW(&r, logits[found.id[i]]); x = y < x ? y : x; }
        done = !cut || inside(&r, x, law, alone);
        if (!done && !(ranked && nucleus) && k + MORE <= MOST) {
            found = (Best){k + MORE, 0, {0}, {0}};
            choose(&r, top, map, noisy, key, alone, &found);
            done = sift(&r, law, alone, &found, k);
        }
        if (prob && noisy) all = mass_of(&r, LEAST, INFINITY, alone).all;
    }
    if (!done) {
        for (long b = 0; b < r.blocks; b++) for (long j = 0; j < BLOCK; j++) t.logit[b * BLOCK + j] = BELOW(&r, block_at(&r, b)[j]);
        for (long i = 0; i < V; i++) t.id[i] = (int32_t)i;
        t = allowed(t, padded, law, prob != 0, &all);
        found = (Best){k, 0, {0}, {0}};
        for (long i = 0; i < t.n; i += BLOCK) consider(t.logit + i, t.n - i < BLOCK ? t.n - i : BLOCK, t.id + i, 0, map, 1, key, -INFINITY, &found);
    }
    for (long i = 0; i < found.n; i++) {
        out[i] = found.id[i];
        if (prob) prob[i] = (float)(vexp((vf){0} + BELOW(&r, logits[out[i]]))[0] / all);
    }
    return found.n;
}

long pick(const float *logits, long V, float temperature, double min_p, long top_k, double top_p, uint64_t key, long k,
          int32_t *out, float *prob) {
    const Law law = {temperature, min_p, top_k, top_p};
    return pick_mapped(logits, V, &law, key, 0, k, 1, 0, out, prob);
}

long pick_known(const float *logits, long V, const Law *law, uint64_t key, float *top, int32_t *out) {
    return pick_mapped(logits, V, law, key, 0, 1, 1, top, out, 0);
}

/* What match says of a tree (see verify/match.py): the pick behind its root, then behind the child that holds it, as long as there is one.
 * logits: of the root and of every node, `wide` apart; top: as `known` of a pick, `high` apart.  path gets the accepted nodes, said one token
 * more.  Returns how many were said; -1 where one of the picks finds nothing. */
static long walk(const float *logits, long wide, long V, float *top, long high, const Ask *ask, const int32_t *tokens, int32_t *path, int32_t *said) {
    const Law law = {ask->temperature, ask->min_p, ask->top_k, ask->top_p};
    const int32_t *parents = tokens + ask->nodes;
    for (long n = 0, node = -1; ; path[n++] = (int32_t)node) {
        const uint64_t key = mix(ask->stream + ask->position + (uint64_t)n);
        if (!pick_mapped(logits + (node + 1) * wide, V, &law, key, 0, 1, 1, top ? top + (node + 1) * high : 0, said + n, 0)) return -1;
        long child = ask->nodes - 1;                          /* of children that hold the same, the last */
        while (child > node && (parents[child] != node || tokens[child] != said[n])) child--;
        if (child == node) return n + 1;
        node = child;
    }
}

void follow(const float *logits, long wide, long V, float *top, long high, const Ask *asks, long count, int32_t *trees) {
    for (const Ask *k = asks; k < asks + count; k++) {
        int32_t *tree = trees + k->at, *path = tree + 2 * k->nodes, *said = path + k->nodes;
        said[k->nodes + 1] = (int32_t)walk(logits + k->root * wide, wide, V, top ? top + k->root * high : 0, high, k, tree, path, said);
    }
}

static void pick_row(const float *logits, long V, const Law *law, uint64_t key, const int32_t *map, long k, int alone,
                     int32_t *out, float *prob) {
    for (long i = pick_mapped(logits, V, law, key, map, k, alone, 0, out, prob); i < k; i++) { out[i] = -1; if (prob) prob[i] = 0; }
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
