/* Heads in 8 bits: padded_dim bytes, of which one step counts the largest magnitude / 127. */
#pragma once
#include "int8.h"

/* The largest magnitude of x [n], or NaN.  n: a multiple of LANES. */
INLINE float max_magnitude(const float *x, int64_t n) {
    vint v = max_magnitudes(x, n);
    for (int i = LANES; i > 1; i /= 2) v = max_ints(SHUFFLE(v, v, EVEN_LANES), SHUFFLE(v, v, ODD_LANES));
    return ((vfloat)v)[0];
}

/* to [n] = 127 x / magnitude, rounded to integers; returns their sum. */
INLINE int32_t quantize(const float *x, int64_t n, float magnitude, int8_t *to) {
    vint v = round_bytes(x, n, magnitude > LEAST_MAGNITUDE ? 127.0f / magnitude : 0, to);
    for (int i = LANES; i > 1; i /= 2) v = add_neighbours(v, v);
    return v[0];
}
