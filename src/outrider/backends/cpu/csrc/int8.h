/* 8-bit arithmetic of linear_int.c and of attention. */
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

#ifdef HAS_MADDUBS
enum { NIBBLES_IN_PAIRS = 1 }; /* dot_nibbles leaves pairs of sums to sum_nibbles */
#else
enum { NIBBLES_IN_PAIRS = 0 };
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
    return (vint)vdotq_s32((int32x4_t)sum, (int8x16_t)(u ^ 0x80808080u), (int8x16_t)s);
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

/* The bytes of a table [16] for indices below 16; the table is in every 16 bytes of its vector. */
INLINE vuint look_up(vuint table, vuint indices) {
#ifdef __AVX2__
    return (vuint)WIDEST(shuffle_epi8)((vany)table, (vany)indices);
#elif defined __ARM_NEON
    return (vuint)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
#else
    uint8_t from[LANES * 4], at[LANES * 4], found[LANES * 4];
    memcpy(from, &table, sizeof from);
    memcpy(at, &indices, sizeof at);
    for (int i = 0; i < LANES * 4; i++) found[i] = from[at[i] & 15];
    memcpy(&table, found, sizeof found);
    return table;
#endif
}

/* The table of levels [16] for look_up, as unsigned bytes n + 128. */
INLINE vuint load_levels(const int8_t *levels) {
    uint8_t bytes[LANES * 4];
    vuint table;
    for (int i = 0; i < LANES * 4; i++) bytes[i] = (uint8_t)(levels[i & 15] + 128);
    memcpy(&table, bytes, sizeof table);
    return table;
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

/* The low bytes of all lanes.  The general form takes lane by lane on x86. */
INLINE vbytes narrow_ints(vuint v) {
#ifdef __AVX512F__
    return (vbytes)_mm512_cvtepi32_epi8((vany)v);
#elif defined __AVX2__
    const __m256i low = (__m256i)(v & 255u), words = _mm256_packus_epi32(low, low);
    const __m128i halves = _mm_unpacklo_epi64(_mm256_castsi256_si128(words),
                                              _mm256_extracti128_si256(words, 1));
    return (vbytes)_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
#else
    return __builtin_convertvector((vint)v, vbytes);
#endif
}

/* Compilers take three instructions for the general form. */
INLINE vint max_ints(vint a, vint b) {
#ifdef __AVX2__
    return (vint)WIDEST(max_epi32)((vany)a, (vany)b);
#else
    const vint larger = a > b;
    return (a & larger) | (b & ~larger);
#endif
}

/* Lane by lane the largest magnitude of x [n], as bits, which order as magnitudes do; NaN is the largest.
 * n: a multiple of LANES. */
INLINE vint max_magnitudes(const float *x, int64_t n) {
    vint largest = {0};
    for (int64_t i = 0; i < n; i += LANES) largest = max_ints(largest, *(const vint *)(x + i) & 0x7fffffff);
    return largest;
}

/* Groups of smaller magnitude are rounded to zeros: the reciprocal of their scale can overflow. */
#define LEAST_MAGNITUDE 3.8e-37f

/* to [n] = inverse * x, rounded to integers; returns sums of them, which wrap where x is not finite. */
INLINE vint round_bytes(const float *x, int64_t n, float inverse, int8_t *to) {
    vuint sums = {0};
    for (int64_t i = 0; i < n; i += LANES) {
        const vfloat rounded = multiply_add(load(x + i), broadcast(inverse), broadcast(ROUND_MAGIC));
        const vuint v = (vuint)rounded - 0x4b400000u; /* the bits of ROUND_MAGIC */
        sums += v;
        *(vbytes *)(to + i) = narrow_ints(v);
    }
    return (vint)sums;
}

/* Sums of neighbouring lanes, of a, then of b.  They wrap, see round_bytes. */
INLINE vint add_neighbours(vint a, vint b) {
    return (vint)((vuint)SHUFFLE(a, b, EVEN_LANES) + (vuint)SHUFFLE(a, b, ODD_LANES));
}

/* Lane j: the sum of the lanes of v[j], for LANES vectors. */
INLINE vint sum_each(vint *v) {
    #pragma GCC unroll 4
    for (int n = LANES / 2; n; n /= 2)
        #pragma GCC unroll 8
        for (int i = 0; i < n; i++) v[i] = add_neighbours(v[2 * i], v[2 * i + 1]);
    return v[0];
}

/* The same for maxima. */
INLINE vint max_each(vint *v) {
    #pragma GCC unroll 4
    for (int n = LANES / 2; n; n /= 2)
        #pragma GCC unroll 8
        for (int i = 0; i < n; i++)
            v[i] = max_ints(SHUFFLE(v[2 * i], v[2 * i + 1], EVEN_LANES),
                            SHUFFLE(v[2 * i], v[2 * i + 1], ODD_LANES));
    return v[0];
}

/* A number in half precision.  Older compilers have no type for it on x86: gcc before 12, clang before 15. */
INLINE float half_at(const char *from) {
#if defined __ARM_NEON
    _Float16 half;
    memcpy(&half, from, 2);
    return (float)half;
#elif defined __F16C__
    uint16_t half;
    memcpy(&half, from, 2);
    return _cvtsh_ss(half);
#else
    uint16_t half;
    memcpy(&half, from, 2);
    const uint32_t magnitude = half & 0x7fff, rebias = (magnitude < 0x7c00 ? 112 : 224) << 23;
    const uint32_t bits = (magnitude << 13) + rebias;
    float value;
    memcpy(&value, &bits, 4);
    if (magnitude < 0x400) value = (float)magnitude * 0x1p-24f;
    return half & 0x8000 ? -value : value;
#endif
}

/* LANES numbers in half precision. */
INLINE vfloat load_half(const char *from) {
#ifdef __AVX512F__
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined __F16C__
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    vfloat v;
    for (int i = 0; i < LANES; i++) v[i] = half_at(from + 2 * i);
    return v;
#endif
}
