/* NEON's instructions in plain C, from Arm's definitions, for tests on x86-64.  Only what the kernels use.
 * Compile with -I of this folder and -D of __ARM_NEON and of the two __ARM_FEATURE_... below. */
#pragma once
#include <float.h>
#include <immintrin.h> /* of x86-64, for the pool of threads */
#include <math.h>
#include <stdint.h>
#include <string.h>

#ifndef EMULATED /* calls, -DEMULATED="static", compile faster */
#define EMULATED static inline __attribute__((always_inline))
#endif

typedef float float32x4_t __attribute__((vector_size(16)));
typedef int32_t int32x4_t __attribute__((vector_size(16)));
typedef int8_t int8x16_t __attribute__((vector_size(16)));
typedef uint8_t uint8x16_t __attribute__((vector_size(16)));

EMULATED float32x4_t vfmaq_f32(float32x4_t sum, float32x4_t a, float32x4_t b) {
    for (int i = 0; i < 4; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
    return sum;
}

EMULATED uint8x16_t vqtbl1q_u8(uint8x16_t table, uint8x16_t indices) {
    for (int i = 0; i < 16; i++) indices[i] = indices[i] < 16 ? table[indices[i]] : 0;
    return indices;
}

#ifdef __ARM_FEATURE_DOTPROD
EMULATED int32x4_t vdotq_s32(int32x4_t sum, int8x16_t a, int8x16_t b) {
    for (int i = 0; i < 16; i++) sum[i / 4] += a[i] * b[i];
    return sum;
}
#endif

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
typedef uint16_t bfloat16x8_t __attribute__((vector_size(16)));

EMULATED float emulated_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }

EMULATED float emulated_half(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return emulated_flush(x);
}

/* a + b, first in double, then in float.  Each time the last bit is set if bits were cut off. */
EMULATED float emulated_odd_sum(double a, double b) {
    double sum = a + b;
    if (!(fabs(sum) < 0x1p128)) return (float)sum; /* infinite, or NaN */
    const double part = sum - a, rest = (a - (sum - part)) + (b - part); /* sum + rest is exact */
    int64_t wide;
    memcpy(&wide, &sum, 8);
    if (rest != 0 && !(wide & 1)) wide += (rest > 0) == (sum > 0) ? 1 : -1;
    memcpy(&sum, &wide, 8);
    float result = (float)sum;
    int32_t narrow;
    memcpy(&narrow, &result, 4);
    if (fabs((double)result) > fabs(sum)) narrow--;
    if (result != sum) narrow |= 1;
    memcpy(&result, &narrow, 4);
    return emulated_flush(result);
}

/* A product of two bfloat16 has 16 bits, so it is exact in float unless it is too small or too large. */
EMULATED float32x4_t vbfdotq_f32(float32x4_t sum, bfloat16x8_t a, bfloat16x8_t b) {
    for (int i = 0; i < 4; i++) {
        float products[2];
        for (int j = 0; j < 2; j++)
            products[j] = emulated_flush(emulated_half(a[2 * i + j]) * emulated_half(b[2 * i + j]));
        sum[i] = emulated_odd_sum(emulated_flush(sum[i]), emulated_odd_sum(products[0], products[1]));
    }
    return sum;
}
#endif
