/* Vectors and the exponential, shared by the kernels and the sampler. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { VL = 16, NV = 4, MR = 6 };            /* floats a vector, vectors and rows a register tile (6 x 4 of 32 registers) */
#else
enum { VL = 8, NV = 2, MR = 4 };
#endif

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t bf;
#define INLINE static inline __attribute__((always_inline))

INLINE vf vexp(vf x) {                                        /* within 2 ulp; 0 below -87, exp(88) above 88 */
    vi tiny = x < -87.0f, huge = x > 88.0f;
    const vf most = (vf){0} + 88.0f;
    x = (vf)(((vi)x & ~(tiny | huge)) | ((vi)most & huge));
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;     /* round to an integer by the magic constant */
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f; p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)e) & ~tiny);
}
