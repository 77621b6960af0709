/* Linear layers with int8 and int4 weights.
 *
 * Computed: activations are rounded to 8 bits, each row and group of inputs by itself.  The products of a
 * group are summed as integers; then y += group sum * (weight scale * activation scale) [+ offset * sum of
 * the activations] in float32.
 * Order: panels of 32 outputs (shared by threads) > tiles of rows > groups in ascending order.
 * Exact: integer sums do not depend on their order, and the float sum takes one group after the other.
 *
 * A weight [outputs,inputs] is packed as [outputs/32][inputs/group] blocks of
 *     values | 32 scales | 32 offsets, if it has any        scales and offsets in half precision, in
 *                                                           units of `unit`
 * Values are unsigned (+ 128 or + 8); four neighbouring inputs of an output lie side by side:
 *     int8  [group/4][32][4] bytes
 *     int4  [group/16][2][32][4] bytes, whose low halves are inputs 0-7 of 16 and whose high halves are
 *       inputs 8-15 */
#include "int8.h"
#include "linear.h"
#include "memory.h"

enum {
    OUTPUTS = 32,
    INT_VECTORS = 2,
    INT_ROWS = LANES == 16 ? 6 : 2
}; /* outputs of a block; vectors and rows of a tile */
enum { NEXT_PAGE = 4096 };

/* LANES numbers in half precision. */
INLINE vfloat load_half(const char *from) {
#ifdef __AVX512F__
    return (vfloat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined __F16C__
    return (vfloat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#else
    vfloat v;
    for (int i = 0; i < LANES; i++) {
        _Float16 half;
        memcpy(&half, from + 2 * i, 2);
        v[i] = (float)half;
    }
    return v;
#endif
}

INLINE float half_at(const char *from) {
    _Float16 half;
    memcpy(&half, from, 2);
    return (float)half;
}

INLINE int64_t values_bytes(const Weight *w) {
    return (int64_t)w->group * OUTPUTS / (w->kind == INT8 ? 1 : 2);
}
INLINE int64_t block_bytes(const Weight *w) { return values_bytes(w) + (w->has_offsets ? 4 : 2) * OUTPUTS; }

/* ---- rounded activations */

/* A rounded row: inputs bytes, then of every group
 *     scale [groups] float   what one step counts
 *     start [groups] int32   what a group's sum starts with, so that the weights count as signed
 *     mass  [groups] float   sum of the rounded activations, which the offsets multiply */
INLINE int64_t rounded_bytes(const Weight *w, int64_t inputs) { return inputs + 12 * (inputs / w->group); }

static void round_row(const float *x, int64_t inputs, const Weight *w, int8_t *to) {
    const int64_t groups = inputs / w->group;
    const int32_t zero_point = w->kind == INT8 ? 128 : 8;
    float *scale = (float *)(to + inputs), *start = scale + groups, *mass = start + groups;
    for (int64_t g = 0; g < groups; g++) {
        const float *from = x + g * w->group, magnitude = max_magnitude(from, w->group);
        const int32_t sum = quantize(from, w->group, magnitude, to + g * w->group),
                      group_start = -sum * zero_point;
        scale[g] = magnitude / 127.0f;
        mass[g] = scale[g] * (float)sum;
        memcpy(start + g, &group_start, 4);
    }
}

/* ---- a register tile: INT_VECTORS vectors of outputs for a few rows */

typedef struct {
    const Weight *weight;
    const char *blocks; /* the panel's blocks, of all groups */
    const int8_t *x;    /* rounded rows */
    const float *bias;  /* of the first output, or null */
    float *y;           /* of the first row and output */
    int64_t inputs, outputs, first_output,
        space; /* first_output: within the panel; space: as in store_outputs */
    int64_t prefetch_distance, prefetch_turn,
        prefetch_turns; /* every prefetch_turns-th block is fetched, from turn on */
    int add;
} IntTask;

typedef vint IntSums[INT_ROWS][INT_VECTORS];
typedef vfloat IntTile[INT_ROWS][INT_VECTORS];

/* sums += four inputs x of every row * the weights u of these inputs. */
INLINE void multiply_four(const int rows, const vuint *u, const int8_t *x, int64_t row_bytes, IntSums sums) {
    for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, x + r * row_bytes, 4);
        for (int c = 0; c < INT_VECTORS; c++) sums[r][c] = dot_bytes(sums[r][c], u[c], (vint){0} + four);
    }
}

/* sums += one group. */
INLINE void multiply_group(const int rows, const int bits, const char *values, const int8_t *x, int64_t group,
                           int64_t row_bytes, IntSums sums) {
    for (int64_t chunk = 0; chunk < group / 16; chunk++, x += 16) {
        #pragma GCC unroll 4
        for (int s = 0; s < bits / 2; s++, values += OUTPUTS * 4) {
            vuint u[INT_VECTORS], low[INT_VECTORS], high[INT_VECTORS];
            for (int c = 0; c < INT_VECTORS; c++) u[c] = *(const vuint *)(values + c * LANES * 4);
            if (bits == 8) {
                multiply_four(rows, u, x + 4 * s, row_bytes, sums);
                continue;
            }
            for (int c = 0; c < INT_VECTORS; c++) {
                low[c] = u[c] & 0x0f0f0f0f;
                high[c] = u[c] >> 4 & 0x0f0f0f0f;
            }
            multiply_four(rows, low, x + 4 * s, row_bytes, sums);
            multiply_four(rows, high, x + 4 * s + 8, row_bytes, sums);
        }
    }
}

/* tile += the group's integer sums, scaled.  meta: the scale of the group in the first rounded row. */
INLINE void add_group(const int rows, const char *scales, int has_offsets, const int8_t *meta, int64_t groups,
                      int64_t row_bytes, IntSums sums, IntTile tile) {
    for (int c = 0; c < INT_VECTORS; c++) {
        const vfloat weight_scale = load_half(scales + c * LANES * 2);
        for (int r = 0; r < rows; r++) {
            float scale;
            memcpy(&scale, meta + r * row_bytes, 4);
            tile[r][c] += __builtin_convertvector(sums[r][c], vfloat) * (weight_scale * scale);
        }
        if (!has_offsets) continue;
        const vfloat offset = load_half(scales + OUTPUTS * 2 + c * LANES * 2);
        for (int r = 0; r < rows; r++) {
            float mass;
            memcpy(&mass, meta + r * row_bytes + 8 * groups, 4);
            tile[r][c] += offset * mass;
        }
    }
}

INLINE void multiply_blocks(const int rows, const int bits, const IntTask *t, IntTile tile) {
    const Weight *w = t->weight;
    const int64_t group = w->group, groups = t->inputs / group, row_bytes = rounded_bytes(w, t->inputs),
                  bytes = block_bytes(w);
    const int64_t values = group * OUTPUTS * bits / 8;
    const char *block = t->blocks;
    int64_t turn = t->prefetch_turn;
    for (int64_t g = 0; g < groups; g++, block += bytes) {
        const int8_t *x = t->x + g * group, *meta = t->x + t->inputs + 4 * g;
        IntSums sums;
        if (turn-- == 0) {
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(block + t->prefetch_distance + i);
            turn = t->prefetch_turns - 1;
        }
        for (int r = 0; r < rows; r++) {
            int32_t start;
            memcpy(&start, meta + r * row_bytes + 4 * groups, 4);
            for (int c = 0; c < INT_VECTORS; c++) sums[r][c] = (vint){0} + start;
        }
        multiply_group(rows, bits, block + t->first_output * 4, x, group, row_bytes, sums);
        add_group(rows, block + values + t->first_output * 2, w->has_offsets, meta, groups, row_bytes, sums,
                  tile);
    }
}

INLINE void multiply_rows(const int rows, const int bits, IntTask t) {
    IntTile tile;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < INT_VECTORS; c++) tile[r][c] = (vfloat){0};
    multiply_blocks(rows, bits, &t, tile);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < INT_VECTORS; c++) tile[r][c] *= t.weight->unit;
        store_outputs(tile[r], INT_VECTORS, t.bias, t.y + r * t.outputs, t.space, t.add);
    }
}

/* A constant number of rows keeps the sums in registers. */
INLINE void multiply_tile(int64_t rows, const int bits, IntTask t) {
    switch (rows) {
        case 1: multiply_rows(1, bits, t); break;
        case 2: multiply_rows(2, bits, t); break;
#ifdef __AVX512F__
        case 3: multiply_rows(3, bits, t); break;
        case 4: multiply_rows(4, bits, t); break;
        case 5: multiply_rows(5, bits, t); break;
        case 6: multiply_rows(6, bits, t); break;
#endif
    }
}

/* All rows of one panel.  While one tile of rows is computed, every tile fetches its share of the next
 * panel's blocks; a single tile fetches the next page. */
static void multiply_panel(const Weight *w, int64_t panel, const int8_t *x, int64_t rows, int64_t inputs,
                           float *y, int64_t outputs, int add) {
    const int64_t bytes = inputs / w->group * block_bytes(w), row_bytes = rounded_bytes(w, inputs);
    const int64_t tiles = divide_up(rows, INT_ROWS);
    for (int64_t c = 0; c < OUTPUTS && panel * OUTPUTS + c < outputs; c += INT_VECTORS * LANES) {
        const int64_t first = panel * OUTPUTS + c;
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t r = i * rows / tiles, count = (i + 1) * rows / tiles - r;
            const IntTask t = {
                .weight = w,
                .blocks = (const char *)w->data + panel * bytes,
                .x = x + r * row_bytes,
                .bias = w->bias ? w->bias + first : 0,
                .y = y + r * outputs + first,
                .inputs = inputs,
                .outputs = outputs,
                .first_output = c,
                .space = outputs - first,
                .prefetch_distance = tiles > 1 ? bytes : NEXT_PAGE,
                .prefetch_turn = i,
                .prefetch_turns = tiles,
                .add = add,
            };
            if (w->kind == INT8)
                multiply_tile(count, 8, t);
            else
                multiply_tile(count, 4, t);
        }
    }
}

void linear_int(const Weight *w, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
                int add) {
    const int64_t row_bytes = rounded_bytes(w, inputs), panels = divide_up(outputs, OUTPUTS);
    int8_t *rounded = scratch_acquire(SCRATCH_ACTIVATIONS, rows * row_bytes);
    #pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t r = 0; r < rows; r++) round_row(x + r * inputs, inputs, w, rounded + r * row_bytes);
    #pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) multiply_panel(w, p, rounded, rows, inputs, y, outputs, add);
    scratch_release(SCRATCH_ACTIVATIONS);
}

void embed_int(const Weight *w, const int64_t *ids, int64_t rows, int64_t inputs, float *y) {
    const int64_t group = w->group, groups = inputs / group, bytes = block_bytes(w), values = values_bytes(w);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < inputs; k++) {
            const int64_t output = ids[r] % OUTPUTS, i = k % group;
            const char *block = (const char *)w->data + (ids[r] / OUTPUTS * groups + k / group) * bytes;
            const char *scale = block + values + 2 * output;
            const int64_t quad = w->kind == INT8 ? i / 4 : i / 16 * 2 + i % 8 / 4; /* of four inputs */
            const int byte = (uint8_t)block[(quad * OUTPUTS + output) * 4 + i % 4];
            const int value = w->kind == INT8 ? byte - 128 : (byte >> i % 16 / 8 * 4 & 15) - 8;
            const float offset = w->has_offsets ? half_at(scale + 2 * OUTPUTS) : 0;
            y[r * inputs + k] = ((float)value * half_at(scale) + offset) * w->unit;
        }
}
