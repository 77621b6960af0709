/* Rounded activations of linear_int.c.
 *
 * Computed: every group of a row in 8 bits, by its largest magnitude.
 * Order: LANES groups at a time: their magnitudes, their scales, then their bytes.  Threads share the rows,
 * or parts of their groups.
 * Exact: a row is rounded by itself.  Maxima and integer sums do not depend on their order.
 *
 * The rows of a register tile lie together, so that its kernel reads one stream.  A tile of n rows is
 * [inputs/group] blocks of
 *     values [n,group] int8
 *     scale  [n] float   what one step counts
 *     start  [n] int32   what a sum of products begins with, so that the weights count as signed
 *     mass   [n] float   sum of the rounded activations, which the offsets multiply */
#pragma once
#include "int8.h"

/* Of a row. */
INLINE int64_t rounded_bytes(int64_t inputs, int64_t group) { return inputs / group * (group + 12); }

/* One row of a tile. */
typedef struct {
    int8_t *tile;
    int64_t row, rows; /* of the tile */
} RowPlace;

/* Scales and reciprocal scales of LANES groups. */
typedef struct {
    float scale[LANES], inverse[LANES];
} GroupScales;

INLINE GroupScales scales_of(const float *x, const int64_t group, const int64_t count) {
    vint largest[LANES];
    GroupScales s;
    for (int64_t g = count; g < LANES; g++) largest[g] = (vint){0};
    #pragma GCC unroll 16
    for (int64_t g = 0; g < count; g++) largest[g] = max_magnitudes(x + g * group, group);
    const vfloat magnitude = (vfloat)max_each(largest);
    store(s.scale, magnitude / 127.0f);
    store(s.inverse, select_lanes(magnitude > LEAST_MAGNITUDE, 127.0f / magnitude, broadcast(0)));
    return s;
}

/* `count` <= LANES groups, from group `first` on.  is_bytes: weights go through dot_bytes. */
INLINE void round_groups(const float *x, const int64_t group, int is_bytes, int64_t first,
                         const int64_t count, RowPlace to) {
    const int64_t block = to.rows * (group + 12);
    const GroupScales scales = scales_of(x, group, count);
    int8_t *at = to.tile + first * block + to.row * group;
    vint sums[LANES];
    for (int64_t g = count; g < LANES; g++) sums[g] = (vint){0};
    #pragma GCC unroll 16
    for (int64_t g = 0; g < count; g++, at += block)
        sums[g] = round_bytes(x + g * group, group, scales.inverse[g], at);
    const vint sum = sum_each(sums);
    const vuint start = (vuint)sum * (uint32_t)(is_bytes ? BYTE_START : -8);
    const vfloat mass = load(scales.scale) * __builtin_convertvector(sum, vfloat);
    at = to.tile + first * block + to.rows * group + 4 * to.row;
    for (int64_t g = 0; g < count; g++, at += block) {
        memcpy(at, scales.scale + g, 4);
        memcpy(at + 4 * to.rows, (const char *)&start + 4 * g, 4);
        memcpy(at + 8 * to.rows, (const char *)&mass + 4 * g, 4);
    }
}

/* Constant groups, LANES of them, are unrolled. */
INLINE void round_constant(const float *x, int64_t inputs, const int64_t group, int is_bytes, RowPlace to) {
    const int64_t groups = inputs / group, whole = groups / LANES * LANES;
    for (int64_t g = 0; g < whole; g += LANES) round_groups(x + g * group, group, is_bytes, g, LANES, to);
    if (whole < groups) round_groups(x + whole * group, group, is_bytes, whole, groups - whole, to);
}

INLINE void round_row(const float *x, int64_t inputs, const Weight *w, RowPlace to) {
    const int is_bytes = w->kind == INT8 || w->levels;
    if (w->group == 32)
        round_constant(x, inputs, 32, is_bytes, to);
    else
        round_constant(x, inputs, 16, is_bytes, to);
}
