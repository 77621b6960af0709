/* A row of logits in blocks, and the highest logit of each: what a pick looks at first. */
#pragma once
#include "simd.h"

enum { BLOCK = 64 };

/* The whole blocks lie where the row does, what is left of it in `tail`, filled up with minus infinity.  best: the highest logit, once it
 * is known; cool: 1 / temperature, or 1 where that is 0. */
typedef struct { const float *l; long n, whole, blocks; float best, cool, tail[BLOCK]; } Row;
INLINE const float *block_at(const Row *r, long b) { return b < r->whole ? r->l + b * BLOCK : r->tail; }
/* How far a logit lies below the best, at the temperature: the log of what it weighs.  For vectors and floats alike. */
#define BELOW(r, logit) (((logit) - (r)->best) * (r)->cool)

static Row row_of(const float *l, long n, float temperature) {
    Row r = {l, n, n / BLOCK, (n + BLOCK - 1) / BLOCK, 0, temperature > 0 ? 1 / temperature : 1, {0}};
    for (long j = 0; j < BLOCK; j++) r.tail[j] = r.whole * BLOCK + j < n ? l[r.whole * BLOCK + j] : -INFINITY;
    return r;
}

INLINE vf larger(vf a, vf b) { const vi m = a > b; return (vf)(((vi)a & m) | ((vi)b & ~m)); }
INLINE vf number(vf v) { const vi m = v == v; return (vf)(((vi)v & m) | ((vi)((vf){0} + INFINITY) & ~m)); }      /* NaN is infinity here */
INLINE vf highest_lanes(const float *block) {
    vf m = number(*(const vf *)block);
    for (long j = VL; j < BLOCK; j += VL) m = larger(number(*(const vf *)(block + j)), m);
    return m;
}
INLINE float highest(const float *block) {
    vf m = highest_lanes(block);
    for (int n = VL; n > 1; n /= 2) m = larger(PICK(m, m, EVEN), PICK(m, m, ODD));
    return m[0];
}
INLINE vf fold(vf *m) {                                       /* lane i: the largest lane of m[i], of VL vectors */
    for (int n = VL / 2; n; n /= 2) for (int i = 0; i < n; i++)
        m[i] = larger(PICK(m[2 * i], m[2 * i + 1], EVEN), PICK(m[2 * i], m[2 * i + 1], ODD));
    return m[0];
}

enum { PART = 16 };                                           /* blocks that are looked at together, a multiple of VL */
INLINE long parts_of(long blocks) { return (blocks + PART - 1) / PART; }
/* The highest logit of every block of a part into `top`, which has room for whole parts; returns the highest of all. */
static float tops(const Row *r, long from, float *top) {
    float best = -INFINITY;
    for (long g = from; g < from + PART; g += VL) {
        vf m[VL];
        for (int i = 0; i < VL; i++) {
            m[i] = (vf){0} - INFINITY;
            if (g + i < r->blocks) m[i] = highest_lanes(block_at(r, g + i));
        }
        *(vf *)(top + g) = fold(m);
        for (int i = 0; i < VL; i++) best = top[g + i] > best ? top[g + i] : best;
    }
    return best;
}

/* The highest logit of every block, into `top`, and of all; infinity if there is a NaN. */
static float survey(const Row *r, float *top, int alone) {
    const long parts = parts_of(r->blocks);
    float of[parts], best = -INFINITY;
    #pragma omp parallel for schedule(static) if (alone)
    for (long p = 0; p < parts; p++) of[p] = tops(r, p * PART, top);
    for (long p = 0; p < parts; p++) best = of[p] > best ? of[p] : best;
    return best;
}

/* The same where the linear that wrote the row has left them in `top` (see `crown`); it may have written more than the row has. */
static float surveyed(const Row *r, float *top) {
    float best = -INFINITY;
    for (long b = r->blocks; b < parts_of(r->blocks) * PART; b++) top[b] = -INFINITY;
    if (r->whole < r->blocks) top[r->whole] = highest(r->tail);
    for (long b = 0; b < r->blocks; b++) best = top[b] > best ? top[b] : best;
    return best;
}

INLINE vf softly(vf x) {                                      /* exp(x) for x <= 0, to 7e-6 of it and exact at 0, in half the time of vexp; never less than 1e-38 */
    const vf least = (vf){0} - 87.0f, magic = (vf){0} + 12582912.0f;
    x = larger(x, least);
    const vf n = x * 1.44269504f + magic, f = x * 1.44269504f - (n - magic);
    vf p = f * 9.6003955171e-3f + 5.5916893825e-2f;
    p = p * f + 2.4023718463e-1f; p = p * f + 6.9312199484e-1f; p = p * f + 1.0f;
    return (vf)((vi)p + ((vi)n << 23));
}

/* As `survey`, and in *all what the whole row weighs: the sum of exp(l - highest).  A part is weighed against its own highest while it lies in
 * the cache. */
static float weigh(const Row *r, float *top, double *all, int alone) {
    const long parts = parts_of(r->blocks);
    float of[parts], mass[parts], best = -INFINITY;
    #pragma omp parallel for schedule(static) if (alone)
    for (long p = 0; p < parts; p++) {
        of[p] = tops(r, p * PART, top);
        const float against = of[p] > -INFINITY ? of[p] : 0;
        vf sum = {0};
        for (long b = p * PART; b < (p + 1) * PART && b < r->blocks; b++)
            for (long j = 0; j < BLOCK; j += VL) sum += softly(*(const vf *)(block_at(r, b) + j) - against);
        mass[p] = total(sum);
    }
    for (long p = 0; p < parts; p++) best = of[p] > best ? of[p] : best;
    *all = 0;
    for (long p = 0; p < parts; p++) *all += mass[p] * exp((double)of[p] - best);
    return best;
}
