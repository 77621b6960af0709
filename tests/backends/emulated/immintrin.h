/* Instructions beyond AVX2 in plain C, from Intel's definitions, for tests on processors without them:
 *   EMULATE_AVX512                  AVX-512 F and BW
 *   EMULATE_VNNI                    with EMULATE_AVX512: AVX512-VNNI, otherwise AVX-VNNI
 *   EMULATE_AMX                     AMX tiles with products of bfloat16
 * Only what the kernels use.  Compile with -I of this folder and -march=x86-64-v3. */
#pragma once
#include_next <immintrin.h>
#include <string.h>

#ifndef EMULATED /* calls, -DEMULATED="static", compile faster */
#define EMULATED static inline __attribute__((always_inline))
#endif

typedef signed char bytes64 __attribute__((vector_size(64)));
typedef short words32 __attribute__((vector_size(64)));
typedef int ints16 __attribute__((vector_size(64)));

/* to [count] += the four products of unsigned bytes of a and signed bytes of b. */
EMULATED void emulate_dpbusd(int count, int *to, const void *a, const void *b) {
    for (int i = 0; i < 4 * count; i++)
        to[i / 4] += ((const unsigned char *)a)[i] * ((const signed char *)b)[i];
}

#ifdef EMULATE_AVX512
#define __AVX512F__ 1
#ifdef EMULATE_VNNI
#define __AVX512VNNI__ 1
#endif

EMULATED __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    for (int i = 0; i < 16; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
}
EMULATED __m512 emulated_cvtph_ps(__m256i halves) {
    __m512 floats;
    for (int i = 0; i < 2; i++) {
        const __m256 half = _mm256_cvtph_ps(((const __m128i *)&halves)[i]);
        memcpy((char *)&floats + 32 * i, &half, 32);
    }
    return floats;
}
EMULATED __m512i emulated_cvtepi8_epi32(__m128i bytes) {
    ints16 ints;
    for (int i = 0; i < 16; i++) ints[i] = ((const signed char *)&bytes)[i];
    return (__m512i)ints;
}
EMULATED __m128i emulated_cvtepi32_epi8(__m512i ints) {
    __m128i bytes;
    for (int i = 0; i < 16; i++) ((signed char *)&bytes)[i] = (signed char)((ints16)ints)[i];
    return bytes;
}
EMULATED __m512 emulated_cvtepi32_ps(__m512i ints) {
    return (__m512)__builtin_convertvector((ints16)ints, __m512);
}
EMULATED __m512i emulated_max_epi32(__m512i a, __m512i b) {
    const ints16 x = (ints16)a, y = (ints16)b, larger = x > y;
    return (__m512i)((x & larger) | (y & ~larger));
}
EMULATED __m512i emulated_abs_epi8(__m512i a) {
    const bytes64 bytes = (bytes64)a, negative = bytes < 0;
    return (__m512i)((bytes ^ negative) - negative);
}
EMULATED unsigned long long emulated_movepi8_mask(__m512i a) {
    unsigned long long mask = 0;
    for (int i = 0; i < 64; i++) mask |= (unsigned long long)(((bytes64)a)[i] < 0) << i;
    return mask;
}
EMULATED __m512i emulated_mask_sub_epi8(__m512i from, unsigned long long mask, __m512i a, __m512i b) {
    bytes64 to = (bytes64)from;
    for (int i = 0; i < 64; i++)
        if (mask >> i & 1) to[i] = (signed char)(((bytes64)a)[i] - ((bytes64)b)[i]);
    return (__m512i)to;
}
EMULATED __m512i emulated_maddubs_epi16(__m512i a, __m512i b) {
    words32 to;
    for (int i = 0; i < 32; i++) {
        int sum = 0;
        for (int j = 2 * i; j < 2 * i + 2; j++)
            sum += ((const unsigned char *)&a)[j] * ((const signed char *)&b)[j];
        to[i] = (short)(sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum);
    }
    return (__m512i)to;
}
EMULATED __m512i emulated_madd_epi16(__m512i a, __m512i b) {
    ints16 to;
    const words32 x = (words32)a, y = (words32)b;
    for (int i = 0; i < 16; i++) to[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return (__m512i)to;
}
EMULATED __m512i emulated_shuffle_epi8(__m512i table, __m512i indices) {
    bytes64 to = (bytes64)indices;
    for (int i = 0; i < 64; i++) to[i] = to[i] < 0 ? 0 : ((bytes64)table)[(i & 48) + (to[i] & 15)];
    return (__m512i)to;
}
EMULATED __m512i emulated_dpbusd_512(__m512i sum, __m512i a, __m512i b) {
    emulate_dpbusd(16, (int *)&sum, &a, &b);
    return sum;
}

#define _mm512_fmadd_ps emulated_fmadd_ps
#define _mm512_cvtph_ps emulated_cvtph_ps
#define _mm512_cvtepi8_epi32 emulated_cvtepi8_epi32
#define _mm512_cvtepi32_epi8 emulated_cvtepi32_epi8
#define _mm512_cvtepi32_ps emulated_cvtepi32_ps
#define _mm512_max_epi32 emulated_max_epi32
#define _mm512_abs_epi8 emulated_abs_epi8
#define _mm512_movepi8_mask emulated_movepi8_mask
#define _mm512_mask_sub_epi8 emulated_mask_sub_epi8
#define _mm512_setzero_si512() ((__m512i){0})
#define _mm512_set1_epi16(x) ((__m512i)((words32){0} + (short)(x)))
#define _mm512_add_epi16(a, b) ((__m512i)((words32)(a) + (words32)(b)))
#define _mm512_maddubs_epi16 emulated_maddubs_epi16
#define _mm512_madd_epi16 emulated_madd_epi16
#define _mm512_shuffle_epi8 emulated_shuffle_epi8
#define _mm512_dpbusd_epi32 emulated_dpbusd_512

#elif defined EMULATE_VNNI
#define __AVXVNNI__ 1

EMULATED __m256i emulated_dpbusd_256(__m256i sum, __m256i a, __m256i b) {
    emulate_dpbusd(8, (int *)&sum, &a, &b);
    return sum;
}

#define _mm256_dpbusd_avx_epi32 emulated_dpbusd_256
#endif

#ifdef EMULATE_AMX
#include <float.h>
#include <math.h>
#include <stdlib.h>
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

/* As in the file that ldtilecfg reads; no rows before it and after tilerelease. */
static _Thread_local struct {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
    char data[8][16][64];
} emulated_tiles;

EMULATED void emulated_tile_release(void) { memset(&emulated_tiles, 0, sizeof emulated_tiles); }
EMULATED void emulated_tile_loadconfig(const void *config) {
    emulated_tile_release();
    memcpy(&emulated_tiles, config, 64);
    if (emulated_tiles.palette != 1) abort();
}
EMULATED void emulated_tile_loadd(int tile, const void *from, long long stride) {
    if (!emulated_tiles.rows[tile]) abort();
    memset(emulated_tiles.data[tile], 0, sizeof emulated_tiles.data[tile]);
    for (int r = 0; r < emulated_tiles.rows[tile]; r++)
        memcpy(emulated_tiles.data[tile][r], (const char *)from + r * stride, emulated_tiles.row_bytes[tile]);
}
EMULATED void emulated_tile_stored(int tile, void *to, long long stride) {
    if (!emulated_tiles.rows[tile]) abort();
    for (int r = 0; r < emulated_tiles.rows[tile]; r++)
        memcpy((char *)to + r * stride, emulated_tiles.data[tile][r], emulated_tiles.row_bytes[tile]);
}
EMULATED float emulated_flush(float x) { return fabsf(x) < FLT_MIN ? copysignf(0, x) : x; }
/* One bfloat16 of a row of a tile. */
EMULATED float emulated_half(const char *row, int at) {
    unsigned short half;
    memcpy(&half, row + 2 * at, 2);
    const unsigned bits = (unsigned)half << 16;
    float x;
    memcpy(&x, &bits, 4);
    return emulated_flush(x);
}
/* a * b + c, rounded once.  It is flushed to zero if it is below the smallest normal float when it is rounded
 * to 24 bits, as if there were smaller exponents: so the exact result is compared where it is close. */
EMULATED float emulated_fused(float a, float b, float c) {
    const float result = fmaf(a, b, c);
    if (!(fabsf(result) <= FLT_MIN)) return result;
    const double product = (double)a * b, sum = product + c, part = sum - product;
    const double rest = (product - (sum - part)) + (c - part); /* sum + rest is exact */
    const double border = FLT_MIN * (1 - 0x1p-25), magnitude = fabs(sum);
    const int is_tiny = magnitude < border || (magnitude == border && rest * sum < 0);
    return is_tiny ? copysignf(0, result) : result;
}
EMULATED void emulated_tile_dpbf16ps(int sums, int a, int b) {
    for (int m = 0; m < emulated_tiles.rows[sums]; m++)
        for (int n = 0; n < emulated_tiles.row_bytes[sums] / 4; n++) {
            float even = 0, odd = 0, *const sum = (float *)emulated_tiles.data[sums][m] + n;
            for (int k = 0; k < emulated_tiles.row_bytes[a] / 4; k++) {
                const char *x = emulated_tiles.data[a][m], *w = emulated_tiles.data[b][k];
                even = emulated_fused(emulated_half(x, 2 * k), emulated_half(w, 2 * n), even);
                odd = emulated_fused(emulated_half(x, 2 * k + 1), emulated_half(w, 2 * n + 1), odd);
            }
            *sum = emulated_fused(1, emulated_fused(1, even, odd), emulated_flush(*sum));
        }
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated_tile_loadconfig
#define _tile_release emulated_tile_release
#define _tile_loadd emulated_tile_loadd
#define _tile_stored emulated_tile_stored
#define _tile_dpbf16ps emulated_tile_dpbf16ps
#endif
