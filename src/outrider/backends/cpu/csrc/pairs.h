/* Products of bfloat16 pairs, as the instruction vdpbf16ps of AVX512-BF16 computes them.
 *
 * Computed: sum + a.odd * b.odd, then + a.even * b.even, in float32.  Each addition is fused with its
 * product and rounded to nearest, ties to even.
 * Numbers below the smallest normal float, about 1e-38, count as zeros with their sign, in a, b and sums.
 * Exact: processors without the instruction follow the same definition; those with AMX that of tiles.h.
 * Its product is exact in float32, so it does not matter whether a compiler fuses it, unless
 * |sum| < 2^-102.
 *
 * NEON's instruction bfdot computes sum + (a.even * b.even + a.odd * b.odd).  Both additions are rounded to
 * odd: cut off, and the last bit is set unless that was exact.  Numbers below the smallest normal float count
 * as zeros here, too.  The floating-point mode of the thread has no influence, unless FPCR.EBF is set, which
 * systems leave clear. */
#pragma once
#include "simd.h"

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
enum { HAS_BFDOT = 1 };
#else
enum { HAS_BFDOT = 0 };
#endif

typedef uint32_t bfloat16_pair __attribute__((may_alias)); /* two bfloat16, the even one low */

INLINE vfloat even_bfloat16(vuint pairs) { return (vfloat)(pairs << 16); }
INLINE vfloat odd_bfloat16(vuint pairs) { return (vfloat)(pairs & 0xffff0000u); }

INLINE vfloat flush_denormals(vfloat v) {
    const vuint is_normal = (vuint)(((vint)v & 0x7f800000) != 0);
    return (vfloat)((vuint)v & (is_normal | 0x80000000u));
}

INLINE vfloat dot_pairs(vfloat sums, vuint a, vuint b) {
#ifdef __AVX512BF16__
    return (vfloat)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)b);
#elif defined __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (vfloat)vbfdotq_f32((float32x4_t)sums, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
    sums = flush_denormals(sums + flush_denormals(odd_bfloat16(a)) * flush_denormals(odd_bfloat16(b)));
    return flush_denormals(sums + flush_denormals(even_bfloat16(a)) * flush_denormals(even_bfloat16(b)));
#endif
}

/* to [inputs rounded up to an even number] = x in bfloat16, and a zero where inputs is odd. */
INLINE void round_pairs(const float *x, int64_t inputs, bfloat16 *to) {
    for (int64_t i = 0; i < inputs; i++) to[i] = round_bfloat16(x[i]);
    if (inputs & 1) to[inputs] = 0;
}
