/* 8-bit arithmetic of linear_int.c and attention_int8.c. */
#pragma once
#include "simd.h"

typedef int8_t vbytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#if (defined __AVX2__ && !defined __AVX512F__) || defined __ARM_FEATURE_DOTPROD
enum { SIGNED_BYTES = 1 };
#else
enum { SIGNED_BYTES = 0 };
#endif
enum { BYTE_START = SIGNED_BYTES ? 0 : -128 }; /* BYTE_START times the sum of all s makes them n * s */

/* sum + four products in every lane.  u holds numbers n as unsigned bytes n + 128; s holds signed bytes of at
 * most 127 in magnitude.  The products are n * s with SIGNED_BYTES, otherwise (n + 128) * s: BYTE_START. */
INLINE vint dot_bytes(vint sum, vuint u, vint s) {
#ifdef __AVX512VNNI__
    return (vint)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#elif defined __AVX2__ && !defined __AVX512F__
    const __m256i centred = (__m256i)(u ^ 0x80808080u);
    const __m256i s_by_sign = _mm256_sign_epi8((__m256i)s, centred);
    /* 16 bits hold 2 * 128 * 127 */
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(centred), s_by_sign);
    return sum + (vint)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#elif defined __ARM_FEATURE_DOTPROD
    int32x4_t sums[LANES / 4];
    int8x16_t centred[LANES / 4], by[LANES / 4];
    const vuint from_zero = u ^ 0x80808080u;
    memcpy(sums, &sum, sizeof sum);
    memcpy(centred, &from_zero, sizeof from_zero);
    memcpy(by, &s, sizeof s);
    for (int i = 0; i < LANES / 4; i++) sums[i] = vdotq_s32(sums[i], centred[i], by[i]);
    memcpy(&sum, sums, sizeof sum);
    return sum;
#else
    for (int bit = 0; bit < 32; bit += 8) sum += (vint)(u >> bit & 255) * (s << (24 - bit) >> 24);
    return sum;
#endif
}

/* The same for bytes u below 16, which are multiplied as they are.  Their sums over 32 inputs fit into 16
 * bits: on AVX2 a lane holds two of them until sum_nibbles. */
INLINE vint dot_nibbles(vint sums, vuint u, vint s) {
#if defined __AVX2__ && !defined __AVX512F__
    return (vint)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)u, (__m256i)s));
#else
    return dot_bytes(sums, u ^ (SIGNED_BYTES ? 0x80808080u : 0), s);
#endif
}

INLINE vint sum_nibbles(vint sums) {
#if defined __AVX2__ && !defined __AVX512F__
    return (vint)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
    return sums;
#endif
}

/* LANES signed bytes as floats.  The general form compiles to single moves. */
INLINE vfloat widen_bytes(const int8_t *from) {
#ifdef __AVX512F__
    return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif defined __AVX2__
    return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    return __builtin_convertvector(*(const vbytes *)from, vfloat);
#endif
}

/* The largest magnitude of x [n], or NaN.  The bits of magnitudes order as the magnitudes do.  n: a multiple
 * of LANES. */
INLINE float max_magnitude(const float *x, int64_t n) {
    vint largest = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        const vint v = *(const vint *)(x + i) & 0x7fffffff, larger = v > largest;
        largest = (v & larger) | (largest & ~larger);
    }
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = largest[i] > bits ? largest[i] : bits;
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    return magnitude;
}

/* to [n] = 127 x / magnitude, rounded to integers; returns their sum. */
INLINE int32_t quantize(const float *x, int64_t n, float magnitude, int8_t *to) {
    const float inverse = magnitude > 0 ? 127.0f / magnitude : 0;
    vint sums = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        const vint v = (vint)(load(x + i) * inverse + ROUND_MAGIC) - 0x4b400000; /* the bits of ROUND_MAGIC */
        const vbytes bytes = __builtin_convertvector(v, vbytes);
        sums += __builtin_convertvector(bytes, vint); /* not v, whose sum can overflow where x is NaN */
        *(vbytes *)(to + i) = bytes;
    }
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}
