/* Vectors of LANES numbers in GCC's vector extensions, and the functions on them that several kernels
 * share. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "kernels.h"
#ifdef __ARM_NEON
#include <arm_neon.h>
#elif defined __x86_64__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#elif defined __ARM_NEON
enum { LANES = 4 }; /* gcc keeps vectors in memory that are wider than a register */
#else
enum { LANES = 8 };
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t bfloat16;

#define INLINE static inline __attribute__((always_inline))

/* SHUFFLE(a, b, EVEN_LANES): the even lanes of a, then those of b.  A quarter has four lanes; LOW_PAIRS,
 * HIGH_PAIRS and ..._IN_QUARTERS take two lanes of each quarter of a, then two of the same quarter of b. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vint){__VA_ARGS__})
#endif
#ifdef __AVX512F__
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define EVEN_IN_QUARTERS 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define ODD_IN_QUARTERS 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#define LOW_PAIRS 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_PAIRS 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define EVEN_QUARTERS 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define ODD_QUARTERS 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
#elif defined __ARM_NEON
#define EVEN_LANES 0, 2, 4, 6
#define ODD_LANES 1, 3, 5, 7
#define EVEN_IN_QUARTERS EVEN_LANES
#define ODD_IN_QUARTERS ODD_LANES
#define LOW_PAIRS 0, 1, 4, 5
#define HIGH_PAIRS 2, 3, 6, 7
#else
#define EVEN_LANES 0, 2, 4, 6, 8, 10, 12, 14
#define ODD_LANES 1, 3, 5, 7, 9, 11, 13, 15
#define EVEN_IN_QUARTERS 0, 2, 8, 10, 4, 6, 12, 14
#define ODD_IN_QUARTERS 1, 3, 9, 11, 5, 7, 13, 15
#define LOW_PAIRS 0, 1, 8, 9, 4, 5, 12, 13
#define HIGH_PAIRS 2, 3, 10, 11, 6, 7, 14, 15
#define EVEN_QUARTERS 0, 1, 2, 3, 8, 9, 10, 11
#define ODD_QUARTERS 4, 5, 6, 7, 12, 13, 14, 15
#endif

#define ROUND_MAGIC 12582912.0f /* 1.5 * 2^23: x + ROUND_MAGIC rounds x to an integer, ties to even */

INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE vfloat broadcast(float x) { return (vfloat){0} + x; }
INLINE vfloat load(const float *from) { return *(const vfloat *)from; }
INLINE void store(float *to, vfloat v) { *(vfloat *)to = v; }

/* a * b + c with one rounding where the processor can.  Compilers may fuse the same expression in one place
 * and not in another. */
INLINE vfloat multiply_add(vfloat a, vfloat b, vfloat c) {
#ifdef __AVX512F__
    return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined __ARM_NEON
    return (vfloat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

/* The first `count` < LANES floats, then zeros. */
INLINE vfloat load_part(const float *from, int64_t count) {
    vfloat v = {0};
    memcpy(&v, from, (size_t)count * 4);
    return v;
}

/* The same, and its reverse, for any positive count: all lanes from LANES on. */
INLINE vfloat load_at(const float *from, int64_t count) {
    return count < LANES ? load_part(from, count) : load(from);
}
INLINE void store_at(float *to, vfloat v, int64_t count) {
    if (count < LANES)
        memcpy(to, &v, (size_t)count * 4);
    else
        store(to, v);
}

/* Lane by lane: a where the mask is set, otherwise b. */
INLINE vfloat select_lanes(vint mask, vfloat a, vfloat b) {
    return (vfloat)(((vint)a & mask) | ((vint)b & ~mask));
}
/* Lane by lane a > b ? a : b, so b where one of them is NaN. */
INLINE vfloat max_lanes(vfloat a, vfloat b) {
#ifdef __AVX512F__
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX__
    return (vfloat)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return select_lanes(a > b, a, b);
#endif
}

/* To nearest, ties to even; NaN stays NaN. */
INLINE bfloat16 round_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return (bfloat16)((x == x ? rounded : bits | 0x400000) >> 16);
}

/* Sum of all lanes, always by the same tree of additions: halves onto halves. */
INLINE float sum_lanes(vfloat v) {
    typedef float quad __attribute__((vector_size(16), aligned(4)));
    quad q[LANES / 4];
    memcpy(q, &v, sizeof v);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++) q[i] += q[i + n];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}

#ifndef __ARM_NEON
INLINE vfloat add_quarters(vfloat a, vfloat b) {
    return SHUFFLE(a, b, EVEN_QUARTERS) + SHUFFLE(a, b, ODD_QUARTERS);
}
#endif

/* Quarter k: the quarters of v[4 k] added, for k below LANES / 4. */
INLINE vfloat sum_quarters(const vfloat *v) {
#ifdef __AVX512F__
    return add_quarters(add_quarters(v[0], v[4]), add_quarters(v[8], v[12]));
#elif defined __ARM_NEON
    return v[0]; /* has one */
#else
    return add_quarters(v[0], v[4]);
#endif
}

/* exp(x) within 2 ulp; 0 below -87, exp(88) above 88.  Splits x into n ln 2 + r and evaluates a polynomial
 * of degree 6 in r. */
INLINE vfloat vexp(vfloat x) {
    const vint underflow = x < -87.0f;
    x = -max_lanes(broadcast(-88.0f), -max_lanes(broadcast(-87.0f), x)); /* NaN stays */
    const vfloat n = (x * 1.44269504f + ROUND_MAGIC) - ROUND_MAGIC;
    const vfloat r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const vint exponent = (__builtin_convertvector(n, vint) + 127) << 23;
    return (vfloat)((vint)(p * (vfloat)exponent) & ~underflow);
}

/* The finalizer of splitmix64. */
INLINE uint64_t splitmix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
