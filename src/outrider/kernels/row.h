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

INLINE float highest(const float *l) {                        /* of a block; NaN if there is one */
    typedef float v4 __attribute__((vector_size(16), aligned(4)));
    typedef int32_t i4 __attribute__((vector_size(16), aligned(4), may_alias));
    vf top = *(const vf *)l;
    vi bad = top != top;
    for (long j = VL; j < BLOCK; j += VL) {
        const vf v = *(const vf *)(l + j);
        const vi m = v > top;
        top = (vf)(((vi)v & m) | ((vi)top & ~m));
        bad |= v != v;
    }
    v4 t[VL / 4];
    i4 n[VL / 4];
    memcpy(t, &top, sizeof top);
    memcpy(n, &bad, sizeof bad);
    for (int i = 1; i < VL / 4; i++) {
        const i4 m = t[i] > t[0];
        t[0] = (v4)(((i4)t[i] & m) | ((i4)t[0] & ~m));
        n[0] |= n[i];
    }
    if (n[0][0] | n[0][1] | n[0][2] | n[0][3]) return NAN;
    const float a = t[0][0] > t[0][1] ? t[0][0] : t[0][1], b = t[0][2] > t[0][3] ? t[0][2] : t[0][3];
    return a > b ? a : b;
}

/* The highest logit of every block, and of all; NaN if there is one.  Unless it is 0, `scaled` gets the row over the temperature first. */
static float survey(Row *r, float temperature, float *scaled, float *top, int alone) {
    #pragma omp parallel for schedule(static) if (alone)
    for (long b = 0; b < r->blocks; b++) {
        const float *l = block_at(r, b);
        if (scaled) {
            for (long j = 0; j < BLOCK; j++) scaled[b * BLOCK + j] = l[j] / temperature;
            l = scaled + b * BLOCK;
        }
        top[b] = highest(l);
    }
    if (scaled) { r->l = scaled; r->whole = r->blocks; }
    float best = top[0];
    for (long b = 1; b < r->blocks; b++) if (top[b] > best || top[b] != top[b]) best = top[b];      /* NaN wins, and stays */
    return best;
}
