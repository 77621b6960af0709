/* Linear layers with int8 and int4 weights.
 *
 * Computed: activations are rounded to 8 bits, each row and group of inputs by itself.  The products of a
 * group are summed as integers; then y += group sum * (weight scale * activation scale) [+ offset * sum of
 * the activations] in float32.
 * Order: panels of 32 outputs (shared by threads) > groups of rows > chunks of blocks > tiles of rows >
 * register tiles of outputs > groups of inputs, in ascending order.
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
#include "threads.h"

enum { OUTPUTS = 32, PANEL_VECTORS = OUTPUTS / LANES };      /* of a block */
#ifdef __AVX512F__
enum { INT_VECTORS = 2, INT_ROWS = 6 }; /* of a register tile */
#elif defined __AVX2__ || defined __ARM_NEON
enum { INT_VECTORS = 2, INT_ROWS = 4 };
#else
enum { INT_VECTORS = 2, INT_ROWS = 2 };
#endif
enum { CHUNK_BLOCKS = 8, INT_GROUP_ROWS = 48 };
enum { INT_STREAM_ROWS = INT_VECTORS == PANEL_VECTORS ? INT_ROWS : 1 }; /* rows of a tile with all outputs */

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
 *     start [groups] int32   what is added to a group's sum, so that the weights count as signed
 *     mass  [groups] float   sum of the rounded activations, which the offsets multiply */
INLINE int64_t rounded_bytes(const Weight *w, int64_t inputs) { return inputs + 12 * (inputs / w->group); }

static void round_row(const float *x, int64_t inputs, const Weight *w, int8_t *to) {
    const int64_t groups = inputs / w->group;
    const int32_t start = w->kind == INT8 ? BYTE_START : -8;
    float *scale = (float *)(to + inputs), *starts = scale + groups, *mass = starts + groups;
    for (int64_t g = 0; g < groups; g++) {
        const float *from = x + g * w->group, magnitude = max_magnitude(from, w->group);
        const int32_t sum = quantize(from, w->group, magnitude, to + g * w->group),
                      group_start = sum * start;
        scale[g] = magnitude / 127.0f;
        mass[g] = scale[g] * (float)sum;
        memcpy(starts + g, &group_start, 4);
    }
}

/* ---- a register tile: a few vectors of outputs for a few rows */

typedef struct {
    const Weight *weight;
    const char *blocks;   /* of the chunk */
    const int8_t *x;      /* rounded rows */
    int64_t inputs;       /* of a whole row */
    int64_t first_group, count; /* groups of the chunk */
    float *sums;          /* [rows,OUTPUTS], of the first row */
    int fetches;          /* whether it fetches the next chunk */
} IntTask;

typedef vint IntSums[INT_ROWS][PANEL_VECTORS];
typedef vfloat IntTile[INT_ROWS][PANEL_VECTORS];

/* sums += four inputs x of every row * the weights u of these inputs. */
INLINE void multiply_four(const int rows, const int vectors, const int bits, const vuint *u, const int8_t *x,
                          int64_t row_bytes, IntSums sums) {
    for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, x + r * row_bytes, 4);
        const vint s = (vint){0} + four;
        for (int c = 0; c < vectors; c++)
            sums[r][c] = bits == 8 ? dot_bytes(sums[r][c], u[c], s) : dot_nibbles(sums[r][c], u[c], s);
    }
}

/* sums = one group. */
INLINE void multiply_group(const int rows, const int vectors, const int bits, const char *values,
                           const int8_t *x, int64_t group, int64_t row_bytes, IntSums sums) {
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) sums[r][c] = (vint){0};
    for (int64_t chunk = 0; chunk < group / 16; chunk++, x += 16) {
        #pragma GCC unroll 4
        for (int s = 0; s < bits / 2; s++, values += OUTPUTS * 4) {
            vuint u[PANEL_VECTORS], half[PANEL_VECTORS];
            for (int c = 0; c < vectors; c++) u[c] = *(const vuint *)(values + c * LANES * 4);
            if (bits == 8) {
                multiply_four(rows, vectors, bits, u, x + 4 * s, row_bytes, sums);
                continue;
            }
            for (int c = 0; c < vectors; c++) half[c] = u[c] & 0x0f0f0f0f;
            multiply_four(rows, vectors, bits, half, x + 4 * s, row_bytes, sums);
            for (int c = 0; c < vectors; c++) half[c] = u[c] >> 4 & 0x0f0f0f0f;
            multiply_four(rows, vectors, bits, half, x + 4 * s + 8, row_bytes, sums);
        }
    }
    if (bits == 4)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) sums[r][c] = sum_nibbles(sums[r][c]);
}

/* tile += the group's integer sums, scaled.  meta: the scale of the group in the first row. */
INLINE void add_group(const int rows, const int vectors, const int bits, const char *scales, int has_offsets,
                      const int8_t *meta, int64_t groups, int64_t row_bytes, IntSums sums, IntTile tile) {
    vfloat weight_scale[PANEL_VECTORS], offset[PANEL_VECTORS];
    for (int c = 0; c < vectors; c++) {
        weight_scale[c] = load_half(scales + c * LANES * 2);
        if (has_offsets) offset[c] = load_half(scales + OUTPUTS * 2 + c * LANES * 2);
    }
    for (int r = 0; r < rows; r++, meta += row_bytes) {
        float scale, mass;
        int32_t start;
        memcpy(&scale, meta, 4);
        memcpy(&start, meta + 4 * groups, 4);
        memcpy(&mass, meta + 8 * groups, 4);
        for (int c = 0; c < vectors; c++) {
            vint sum = sums[r][c];
            if (bits == 4 || BYTE_START) sum += start;
            const vfloat by = weight_scale[c] * scale;
            tile[r][c] = multiply_add(__builtin_convertvector(sum, vfloat), by, tile[r][c]);
            if (has_offsets) tile[r][c] = multiply_add(offset[c], broadcast(mass), tile[r][c]);
        }
    }
}

/* `vectors` of the outputs in all blocks of a chunk. */
INLINE void multiply_blocks(const int rows, const int vectors, const int bits, int64_t first_output,
                            IntTask t) {
    const Weight *w = t.weight;
    const int64_t bytes = block_bytes(w), values = values_bytes(w), row_bytes = rounded_bytes(w, t.inputs);
    float *to = t.sums + first_output;
    IntTile tile;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) tile[r][c] = load(to + r * OUTPUTS + c * LANES);
    for (int64_t g = t.first_group; g < t.first_group + t.count; g++, t.blocks += bytes) {
        const int8_t *x = t.x + g * w->group, *meta = t.x + t.inputs + 4 * g;
        const char *scales = t.blocks + values + first_output * 2;
        IntSums sums;
        if (t.fetches && !first_output)
            for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(t.blocks + CHUNK_BLOCKS * bytes + i);
        multiply_group(rows, vectors, bits, t.blocks + first_output * 4, x, w->group, row_bytes, sums);
        add_group(rows, vectors, bits, scales, w->has_offsets, meta, t.inputs / w->group, row_bytes, sums,
                  tile);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) store(to + r * OUTPUTS + c * LANES, tile[r][c]);
}

INLINE void multiply_rows(const int rows, const int bits, IntTask t) {
    const int vectors = rows == 1 ? PANEL_VECTORS : INT_VECTORS;
    for (int first = 0; first < OUTPUTS; first += vectors * LANES)
        multiply_blocks(rows, vectors, bits, first, t);
}

/* A constant number of rows keeps the sums in registers. */
INLINE void multiply_tile(int64_t rows, const int bits, IntTask t) {
    switch (rows) {
        case 1: multiply_rows(1, bits, t); break;
        case 2: multiply_rows(2, bits, t); break;
#if defined __AVX2__ || defined __ARM_NEON
        case 3: multiply_rows(3, bits, t); break;
        case 4: multiply_rows(4, bits, t); break;
#endif
#ifdef __AVX512F__
        case 5: multiply_rows(5, bits, t); break;
        case 6: multiply_rows(6, bits, t); break;
#endif
    }
}

/* One chunk of groups for some rows. */
static void multiply_chunk(int64_t rows, IntTask t) {
    const int64_t tiles = divide_up(rows, INT_ROWS);
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t r = i * rows / tiles, count = (i + 1) * rows / tiles - r;
        IntTask tile = t;
        tile.x += r * rounded_bytes(t.weight, t.inputs);
        tile.sums += r * OUTPUTS;
        tile.fetches = !i;
        if (t.weight->kind == INT8)
            multiply_tile(count, 8, tile);
        else
            multiply_tile(count, 4, tile);
    }
}

/* One call of linear_int. */
typedef struct {
    const Weight *weight;
    const float *x;
    int64_t rows, inputs;
    int8_t *rounded; /* the rows of x, rounded_bytes each */
    float *y;
    int64_t outputs;
    int add;
} IntCall;

static void round_rows(const void *loop, int64_t first, int64_t end) {
    const IntCall *l = loop;
    for (int64_t r = first; r < end; r++)
        round_row(l->x + r * l->inputs, l->inputs, l->weight,
                  l->rounded + r * rounded_bytes(l->weight, l->inputs));
}

/* All rows of one panel. */
static void multiply_panel(const IntCall *l, int64_t panel) {
    const Weight *w = l->weight;
    const int64_t rows = l->rows, inputs = l->inputs, outputs = l->outputs;
    const int64_t groups = inputs / w->group, first = panel * OUTPUTS;
    const int64_t most = rows <= INT_STREAM_ROWS ? groups : CHUNK_BLOCKS;
    const float *bias = w->bias ? w->bias + first : 0;
    float sums[INT_GROUP_ROWS * OUTPUTS];
    for (int64_t r = 0; r < rows; r += INT_GROUP_ROWS) {
        const int64_t some = min64(rows - r, INT_GROUP_ROWS);
        IntTask t = {.weight = w, .inputs = inputs, .sums = sums};
        t.x = l->rounded + r * rounded_bytes(w, inputs);
        memset(sums, 0, (size_t)some * OUTPUTS * 4);
        for (; t.first_group < groups; t.first_group += t.count) {
            t.blocks = (const char *)w->data + (panel * groups + t.first_group) * block_bytes(w);
            t.count = min64(most, groups - t.first_group);
            multiply_chunk(some, t);
        }
        for (int64_t i = 0; i < some; i++) {
            float *row = sums + i * OUTPUTS;
            for (int64_t c = 0; c < OUTPUTS; c++) row[c] *= w->unit;
            store_outputs((const vfloat *)row, PANEL_VECTORS, bias, l->y + (r + i) * outputs + first,
                          outputs - first, l->add);
        }
    }
}

static void multiply_panels(const void *loop, int64_t first, int64_t end) {
    for (; first < end; first++) multiply_panel(loop, first);
}

void linear_int(const Weight *w, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
                int add) {
    int8_t *rounded = scratch_acquire(SCRATCH_ACTIVATIONS, rows * rounded_bytes(w, inputs));
    const IntCall call = {w, x, rows, inputs, rounded, y, outputs, add};
    parallel_for(rows, 4, round_rows, &call);
    parallel_for(divide_up(outputs, OUTPUTS), 1, multiply_panels, &call);
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
