/* A row of logits in blocks, and the highest logit of each: what a pick looks at first. */
#pragma once
#include "simd.h"

enum { BLOCK = 64 };

/* The whole blocks lie where the row does, what is left of it in `tail`, filled up with minus infinity. */
typedef struct { const float *l; long n, whole, blocks; float tail[BLOCK]; } Row;
INLINE const float *block_at(const Row *r, long b) { return b < r->whole ? r->l + b * BLOCK : r->tail; }

static Row row_of(const float *l, long n) {
    Row r = {l, n, n / BLOCK, (n + BLOCK - 1) / BLOCK, {0}};
    for (long j = 0; j < BLOCK; j++) r.tail[j] = r.whole * BLOCK + j < n ? l[r.whole * BLOCK + j] : -INFINITY;
    return r;
}

INLINE vf larger(vf a, vf b) { const vi m = a > b; return (vf)(((vi)a & m) | ((vi)b & ~m)); }
INLINE vf fold(vf *m) {                                       /* lane i: the largest lane of m[i], of VL vectors */
    for (int n = VL / 2; n; n /= 2) for (int i = 0; i < n; i++)
        m[i] = larger(PICK(m[2 * i], m[2 * i + 1], EVEN), PICK(m[2 * i], m[2 * i + 1], ODD));
    return m[0];
}

enum { PART = 16 };                                           /* blocks that are looked at together, a multiple of VL */
/* The highest logit of every block of a part into `top`, which has room for whole parts; returns the highest of all, NaN if there is one. */
static float tops(const Row *r, long from, float *top) {
    vf all = (vf){0} - INFINITY;
    vi bad = {0};
    for (long g = from; g < from + PART; g += VL) {
        vf m[VL];
        for (int i = 0; i < VL; i++) {
            if (g + i >= r->blocks) { m[i] = (vf){0} - INFINITY; continue; }
            const float *l = block_at(r, g + i);
            m[i] = *(const vf *)l;
            bad |= m[i] != m[i];
            for (long j = VL; j < BLOCK; j += VL) { const vf v = *(const vf *)(l + j); m[i] = larger(v, m[i]); bad |= v != v; }
        }
        const vf here = fold(m);
        *(vf *)(top + g) = here;
        all = larger(here, all);
    }
    float best = all[0];
    int32_t any = bad[0];
    for (int i = 1; i < VL; i++) { best = all[i] > best ? all[i] : best; any |= bad[i]; }
    return any ? NAN : best;
}
INLINE long parts_of(const Row *r) { return (r->blocks + PART - 1) / PART; }
INLINE float first_of(float best, float other) { return other > best || other != other ? other : best; }     /* NaN wins, and stays */

/* The highest logit of every block, and of all; NaN if there is one.  Unless it is 0, `scaled` gets the row over the temperature first. */
static float survey(Row *r, float temperature, float *scaled, float *top, int alone) {
    const long parts = parts_of(r);
    const Row from = *r;
    float of[parts], best = -INFINITY;
    if (scaled) { r->l = scaled; r->whole = r->blocks; }
    #pragma omp parallel for schedule(static) if (alone)
    for (long p = 0; p < parts; p++) {
        for (long b = p * PART; scaled && b < (p + 1) * PART && b < r->blocks; b++) {
            const float *l = block_at(&from, b);
            for (long j = 0; j < BLOCK; j++) scaled[b * BLOCK + j] = l[j] / temperature;
        }
        of[p] = tops(r, p * PART, top);
    }
    for (long p = 0; p < parts; p++) best = first_of(best, of[p]);
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

/* The same, and in *all what the whole row weighs: the sum of exp(l - highest).  A part is weighed against its own highest while it lies in
 * the cache. */
static float weigh(const Row *r, float *top, double *all, int alone) {
    const long parts = parts_of(r);
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
    for (long p = 0; p < parts; p++) best = first_of(best, of[p]);
    *all = 0;
    for (long p = 0; p < parts; p++) *all += mass[p] * exp((double)of[p] - best);
    return best;
}
