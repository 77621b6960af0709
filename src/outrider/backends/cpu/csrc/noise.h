/* Gumbel noise of (key, token): a splitmix64 hash, of which the upper 24 bits are the uniform.
 * core/noise.py computes the same numbers.
 *
 * The state of a token is key + (token + 1) * GOLDEN.  States of consecutive tokens therefore follow each
 * other by addition. */
#pragma once
#include "simd.h"

#define GOLDEN 0x9e3779b97f4a7c15u
enum { HASH_LANES = LANES / 2 }; /* 64-bit numbers in a vector */

typedef uint64_t vhash __attribute__((vector_size(LANES * 4), aligned(8)));
typedef int32_t vtoken __attribute__((vector_size(LANES * 2), aligned(4), may_alias));
typedef uint32_t vuniform __attribute__((vector_size(LANES * 2), aligned(4), may_alias));

INLINE vhash hash_state(uint64_t key, vtoken token) {
    return key + (__builtin_convertvector(token, vhash) + 1) * GOLDEN;
}

/* splitmix64 without its last shift, which leaves the upper 24 bits alone. */
INLINE vhash hash(vhash state) {
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
    return (state ^ (state >> 27)) * 0x94d049bb133111ebu;
}
INLINE vuniform uniform_bits(vhash state) { return __builtin_convertvector(hash(state) >> 40, vuniform); }

INLINE float gumbel(uint32_t uniform) { return (float)-log(-log((uniform + 0.5) * 0x1p-24)); }

/* An upper bound of the noise: -log(-log u) <= -log(1 - u), from the exponent of 1 - u alone, rounded up. */
INLINE vfloat gumbel_bound(vuint uniform) {
    const vfloat rest = __builtin_convertvector((vint)((1u << 24) - uniform), vfloat);
    return 0.6931473f * __builtin_convertvector(25 + 127 - ((vint)rest >> 23), vfloat);
}
static const float MAX_GUMBEL = 0.6931473f * 25;

/* The smallest uniform whose noise can lift a logit `below` the maximum to the score `needed`.  -log(-log u)
 * is that high with a probability below exp(-height); rounding gets its margin. */
INLINE void min_uniforms(vfloat below, float needed, int32_t *uniforms) {
    const vfloat bound = 0x1p24f - 2.0f - vexp(below - needed) * (0x1p24f * 1.0001f);
    const vint result = __builtin_convertvector(max_lanes(bound, (vfloat){0}), vint);
    memcpy(uniforms, &result, sizeof result);
}
