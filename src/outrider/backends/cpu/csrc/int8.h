/* 8-bit arithmetic of linear_int.c and attention_int8.c. */
#pragma once
#include "simd.h"

typedef int8_t vbytes __attribute__((vector_size(LANES), aligned(1), may_alias));

/* What sums byte products: vpdpbusd four of them in 32 bits, vpmaddubsw two of them in 16. */
#if defined __AVX512VNNI__ || (defined __AVXVNNI__ && !defined __AVX512F__)
#define HAS_DPBUSD
#elif defined __AVX2__
#define HAS_MADDUBS
#endif
#ifdef __AVX512F__
typedef __m512i vany;
#define WIDEST(operation) _mm512_##operation
#define DPBUSD _mm512_dpbusd_epi32
#elif defined __AVX2__
typedef __m256i vany;
#define WIDEST(operation) _mm256_##operation
#define DPBUSD _mm256_dpbusd_avx_epi32
#endif

#if defined HAS_MADDUBS || defined __ARM_FEATURE_DOTPROD
enum { SIGNED_BYTES = 1 };
#else
enum { SIGNED_BYTES = 0 };
#endif
enum { BYTE_START = SIGNED_BYTES ? 0 : -128 }; /* BYTE_START times the sum of all s makes them n * s */

#ifdef HAS_MADDUBS
/* Bytes s, negative where n is. */
INLINE vany negate_by(vany s, vany n) {
#ifdef __AVX512F__
    return _mm512_mask_sub_epi8(s, _mm512_movepi8_mask(n), _mm512_setzero_si512(), s);
#else
    return _mm256_sign_epi8(s, n);
#endif
}
#endif

/* sum + four products in every lane.  u holds numbers n as unsigned bytes n + 128; s holds signed bytes of at
 * most 127 in magnitude.  The products are n * s with SIGNED_BYTES, otherwise (n + 128) * s: BYTE_START. */
INLINE vint dot_bytes(vint sum, vuint u, vint s) {
#ifdef HAS_DPBUSD
    return (vint)DPBUSD((vany)sum, (vany)u, (vany)s);
#elif defined HAS_MADDUBS
    const vany n = (vany)(u ^ 0x80808080u);
    /* 16 bits hold 2 * 128 * 127 */
    const vany pairs = WIDEST(maddubs_epi16)(WIDEST(abs_epi8)(n), negate_by((vany)s, n));
    return sum + (vint)WIDEST(madd_epi16)(pairs, WIDEST(set1_epi16)(1));
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
 * bits: with vpmaddubsw a lane holds two of them until sum_nibbles. */
INLINE vint dot_nibbles(vint sums, vuint u, vint s) {
#ifdef HAS_MADDUBS
    return (vint)WIDEST(add_epi16)((vany)sums, WIDEST(maddubs_epi16)((vany)u, (vany)s));
#else
    return dot_bytes(sums, u ^ (SIGNED_BYTES ? 0x80808080u : 0), s);
#endif
}

INLINE vint sum_nibbles(vint sums) {
#ifdef HAS_MADDUBS
    return (vint)WIDEST(madd_epi16)((vany)sums, WIDEST(set1_epi16)(1));
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
