/* Blocks of 64 logits and their maxima: what a linear leaves for a pick. */
#pragma once
#include "simd.h"

enum { BLOCK = 64 };
enum { PART = 16 }; /* blocks that are processed together, a multiple of LANES */

/* The blocks of a row, rounded up to whole parts. */
INLINE int64_t row_blocks(int64_t vocab) { return divide_up(divide_up(vocab, BLOCK), PART) * PART; }

INLINE vfloat nan_to_infinity(vfloat v) { return select_lanes(v == v, v, broadcast(INFINITY)); }

/* LANES maxima of a block, one a lane; NaN counts as infinity. */
INLINE vfloat block_maxima(const float *block) {
    vfloat m = nan_to_infinity(load(block));
    for (int64_t j = LANES; j < BLOCK; j += LANES) m = max_lanes(nan_to_infinity(load(block + j)), m);
    return m;
}
INLINE float block_maximum(const float *block) {
    vfloat m = block_maxima(block);
    for (int n = LANES; n > 1; n /= 2) m = max_lanes(SHUFFLE(m, m, EVEN_LANES), SHUFFLE(m, m, ODD_LANES));
    return m[0];
}
