#pragma once
#include "simd.h"

INLINE vfloat sigmoid(vfloat x) { return 1.0f / (1.0f + vexp(-x)); }
INLINE vfloat silu(vfloat x) { return x / (1.0f + vexp(-x)); }

/* RMS norm of one row.  The squares are summed in LANES partial sums, then across the lanes, then the rest
 * that fills no vector. */
INLINE void rms_norm_row(const float *x, const float *weight, int64_t width, float eps, float *y) {
    vfloat squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const vfloat v = load(x + i);
        squares += v * v;
    }
    for (; i < width; i++) rest += x[i] * x[i];
    const float scale = 1.0f / sqrtf((sum_lanes(squares) + rest) / (float)width + eps);
    for (i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}
