/* Linear layers with int8 and int4 weights.
 *
 * Computed: activations are rounded to 8 bits, each row and group of inputs by itself.  The products of a
 * group are summed as integers; then y += group sum * (weight scale * activation scale) [+ offset * sum of
 * the activations] in float32.
 * Order: panels of 32 outputs (shared by threads) > GROUP_TILES tiles of rows > chunks of blocks > tiles of
 * rows > register tiles of outputs > groups of inputs, in ascending order.  One unpacked vector of weights is
 * multiplied by all rows of a tile.
 * Exact: integer sums do not depend on their order, and the float sum takes one group after the other.
 *
 * A weight [outputs,inputs] is packed as [outputs/32][inputs/group] blocks of
 *     values | 32 scales | 32 offsets, if it has any        scales and offsets in half precision, in
 *                                                           units of `unit`
 * Values are unsigned (+ 128 or + 8); four neighbouring inputs of an output lie side by side:
 *     int8  [group/4][32][4] bytes
 *     int4  [group/16][2][32][4] bytes, whose low halves are inputs 0-7 of 16 and whose high halves are
 *       inputs 8-15
 * With `levels` a value of int4 is an index of these signed bytes: groups of 32, without offsets. */
#include "linear.h"
#include "memory.h"
#include "rounded.h"
#include "threads.h"

enum { OUTPUTS = 32, PANEL_VECTORS = OUTPUTS / LANES };      /* of a block */
/* A register tile: its integer sums stay in registers, its float sums where there are some left. */
#ifdef __AVX512F__
enum { INT_VECTORS = 2, INT_ROWS = 8, CHUNK_BLOCKS = 16 };
#elif defined __AVX2__ || defined __ARM_NEON
enum { INT_VECTORS = 2, INT_ROWS = 4, CHUNK_BLOCKS = 8 };
#else
enum { INT_VECTORS = 2, INT_ROWS = 2, CHUNK_BLOCKS = 8 };
#endif
enum { GROUP_TILES = 48 / INT_ROWS };
enum { FEW_ROWS = 5 }; /* fewer rows wait for memory */
/* Rows of a tile with all outputs of a panel. */
enum { STREAM_ROWS = (int)INT_VECTORS == (int)PANEL_VECTORS ? INT_ROWS : 1 };

/* What the compiler knows of a weight. */
typedef struct {
    int bits, has_offsets;
    int64_t group;
    int has_levels;
} Form;

INLINE int64_t values_bytes(const Form form) { return form.group * OUTPUTS * form.bits / 8; }
INLINE int64_t block_bytes(const Form form) {
    return values_bytes(form) + (form.has_offsets ? 4 : 2) * OUTPUTS;
}

INLINE Form form_of(const Weight *w) {
    return (Form){w->kind == INT8 ? 8 : 4, w->has_offsets, w->group, w->levels != 0};
}

/* ---- a register tile: a few vectors of outputs for a few rows */

typedef struct {
    const char *blocks; /* of the chunk */
    const int8_t *x;    /* rounded rows of the tile, from the first group of the chunk on */
    int64_t count;      /* groups of the chunk */
    float *sums;        /* [rows,OUTPUTS] */
    vuint levels;       /* see load_levels */
    int fetches;        /* where the next chunk, or the one behind it, is fetched to */
} IntTask;

typedef vint IntSums[INT_ROWS][PANEL_VECTORS];
typedef vfloat IntTile[INT_ROWS][PANEL_VECTORS];

/* sums += four inputs x of every row * the weights u of these inputs. */
INLINE void multiply_four(const int rows, const int vectors, const Form form, const vuint *u, const int8_t *x,
                          IntSums sums) {
    for (int r = 0; r < rows; r++) {
        int32_t four;
        memcpy(&four, x + r * form.group, 4);
        const vint s = (vint){0} + four;
        for (int c = 0; c < vectors; c++)
            sums[r][c] = form.bits == 8 || form.has_levels ? dot_bytes(sums[r][c], u[c], s)
                                                           : dot_nibbles(sums[r][c], u[c], s);
    }
}

/* The numbers that 4-bit values are in products. */
INLINE vuint counted(const Form form, vuint levels, vuint values) {
    return form.has_levels ? look_up(levels, values) : values;
}

/* sums += the products of one group of x [rows,group]. */
INLINE void multiply_group(const int rows, const int vectors, const Form form, const char *values,
                           const int8_t *x, vuint levels, IntSums sums) {
    for (int64_t chunk = 0; chunk < form.group / 16; chunk++, x += 16) {
        #pragma GCC unroll 4
        for (int s = 0; s < form.bits / 2; s++, values += OUTPUTS * 4) {
            vuint u[PANEL_VECTORS], half[PANEL_VECTORS];
            for (int c = 0; c < vectors; c++) u[c] = *(const vuint *)(values + c * LANES * 4);
            if (form.bits == 8) {
                multiply_four(rows, vectors, form, u, x + 4 * s, sums);
                continue;
            }
            for (int c = 0; c < vectors; c++) half[c] = counted(form, levels, u[c] & 0x0f0f0f0f);
            multiply_four(rows, vectors, form, half, x + 4 * s, sums);
            for (int c = 0; c < vectors; c++) half[c] = counted(form, levels, u[c] >> 4 & 0x0f0f0f0f);
            multiply_four(rows, vectors, form, half, x + 4 * s + 8, sums);
        }
    }
}

/* sums = what makes the weights of a group count as signed, from starts [rows] (rounded.h). */
INLINE void start_group(const int rows, const int vectors, const int8_t *starts, IntSums sums) {
    for (int r = 0; r < rows; r++) {
        int32_t start;
        memcpy(&start, starts + 4 * r, 4);
        for (int c = 0; c < vectors; c++) sums[r][c] = (vint){0} + start;
    }
}

/* sums = one group of x [rows,group].  Sums that dot_nibbles keeps in 16 bits begin with 0. */
INLINE void sum_group(const int rows, const int vectors, const Form form, const char *values, const int8_t *x,
                      vuint levels, IntSums sums) {
    const int8_t *starts = x + rows * (form.group + 4);
    if (form.bits == 8 || form.has_levels || !NIBBLES_IN_PAIRS) {
        start_group(rows, vectors, starts, sums);
        multiply_group(rows, vectors, form, values, x, levels, sums);
        return;
    }
    IntSums pairs;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) pairs[r][c] = (vint){0};
    multiply_group(rows, vectors, form, values, x, levels, pairs);
    start_group(rows, vectors, starts, sums);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) sums[r][c] += sum_nibbles(pairs[r][c]);
}

/* tile += the group's integer sums, scaled.  activations: scale, start and mass [rows] of the group. */
INLINE void add_group(const int rows, const int vectors, const Form form, const char *scales,
                      const int8_t *activations, IntSums sums, IntTile tile) {
    vfloat weight_scale[PANEL_VECTORS], offset[PANEL_VECTORS];
    for (int c = 0; c < vectors; c++) {
        weight_scale[c] = load_half(scales + c * LANES * 2);
        if (form.has_offsets) offset[c] = load_half(scales + OUTPUTS * 2 + c * LANES * 2);
    }
    for (int r = 0; r < rows; r++, activations += 4) {
        float scale;
        int32_t bits; /* of the mass: 0 + float is an addition */
        memcpy(&scale, activations, 4);
        memcpy(&bits, activations + 8 * rows, 4);
        const vfloat mass = (vfloat)((vint){0} + bits);
        for (int c = 0; c < vectors; c++) {
            const vfloat by = weight_scale[c] * scale;
            tile[r][c] = multiply_add(__builtin_convertvector(sums[r][c], vfloat), by, tile[r][c]);
            if (form.has_offsets) tile[r][c] = multiply_add(offset[c], mass, tile[r][c]);
        }
    }
}

/* `vectors` of the outputs in all blocks of a chunk. */
INLINE void multiply_blocks(const int rows, const int vectors, const Form form, int64_t first_output,
                            IntTask t) {
    const int64_t bytes = block_bytes(form);
    const int64_t x_bytes = rows * rounded_bytes(form.group, form.group); /* of a group */
    const int64_t ahead = (t.fetches == SECOND_CACHE ? 2 : 1) * CHUNK_BLOCKS * bytes;
    float *to = t.sums + first_output;
    IntTile tile;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) tile[r][c] = load(to + r * OUTPUTS + c * LANES);
    for (int64_t g = 0; g < t.count; g++, t.blocks += bytes, t.x += x_bytes) {
        const char *values = t.blocks + first_output * 4,
                   *scales = t.blocks + values_bytes(form) + first_output * 2;
        IntSums sums;
        if (t.fetches && !first_output)
            for (int64_t i = 0; i < bytes; i += 64) fetch_line(t.fetches, t.blocks + ahead + i);
        sum_group(rows, vectors, form, values, t.x, t.levels, sums);
        add_group(rows, vectors, form, scales, t.x + rows * form.group, sums, tile);
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) store(to + r * OUTPUTS + c * LANES, tile[r][c]);
}

INLINE void multiply_rows(const int rows, const Form form, IntTask t) {
    const int vectors = rows == 1 ? PANEL_VECTORS : INT_VECTORS;
    for (int first = 0; first < OUTPUTS; first += vectors * LANES)
        multiply_blocks(rows, vectors, form, first, t);
}

/* A constant number of rows keeps the sums in registers. */
INLINE void multiply_tile(int64_t rows, const Form form, IntTask t) {
    switch (rows) {
        case 1: multiply_rows(1, form, t); break;
        case 2: multiply_rows(2, form, t); break;
#if defined __AVX2__ || defined __ARM_NEON
        case 3: multiply_rows(3, form, t); break;
        case 4: multiply_rows(4, form, t); break;
#endif
#ifdef __AVX512F__
        case 5: multiply_rows(5, form, t); break;
        case 6: multiply_rows(6, form, t); break;
        case 7: multiply_rows(7, form, t); break;
        case 8: multiply_rows(8, form, t); break;
#endif
    }
}

/* A constant group is unrolled. */
INLINE void multiply_form(int64_t rows, const int bits, const int has_offsets, int64_t group, IntTask t) {
    if (group == 32)
        multiply_tile(rows, (Form){bits, has_offsets, 32, 0}, t);
    else
        multiply_tile(rows, (Form){bits, has_offsets, 16, 0}, t);
}

static void multiply_int8(int64_t rows, int has_offsets, int64_t group, IntTask t) {
    if (has_offsets)
        multiply_form(rows, 8, 1, group, t);
    else
        multiply_form(rows, 8, 0, group, t);
}

static void multiply_int4(int64_t rows, int has_offsets, int64_t group, IntTask t) {
    if (has_offsets)
        multiply_form(rows, 4, 1, group, t);
    else
        multiply_form(rows, 4, 0, group, t);
}

static void multiply_levels(int64_t rows, IntTask t) { multiply_tile(rows, (Form){4, 0, 32, 1}, t); }

/* ---- a linear */

/* One call of linear_int. */
typedef struct {
    const Weight *weight;
    Form form;
    const float *x;
    int64_t rows, inputs;
    int8_t *rounded; /* tiles of rows, see rounded.h */
    float *y;
    int64_t outputs;
    int add;
    int64_t parts; /* of a tile, whose groups threads round */
} IntCall;

/* Tiles of rows have equal sizes: 10 rows are 5 + 5, not 8 + 2. */
INLINE int64_t count_tiles(const IntCall *l) { return divide_up(l->rows, INT_ROWS); }
INLINE int64_t first_of_tile(const IntCall *l, int64_t tile) { return tile * l->rows / count_tiles(l); }

/* Rounds parts of tiles, which are contiguous: no two threads write to one line but at their borders. */
static void round_parts(const void *loop, int64_t part, int64_t end) {
    const IntCall *l = loop;
    const int64_t group = l->form.group, groups = l->inputs / group;
    for (; part < end; part++) {
        const int64_t tile = part / l->parts, first_row = first_of_tile(l, tile),
                      rows = first_of_tile(l, tile + 1) - first_row;
        const int64_t first_group = part % l->parts * groups / l->parts,
                      count = (part % l->parts + 1) * groups / l->parts - first_group;
        int8_t *at = l->rounded + first_row * rounded_bytes(l->inputs, group) +
                     rows * rounded_bytes(first_group * group, group);
        const float *x = l->x + first_row * l->inputs + first_group * group;
        for (int64_t r = 0; r < rows; r++, x += l->inputs)
            round_row(x, count * group, l->weight, (RowPlace){at, r, rows});
    }
}

/* One chunk of groups for the tiles [first_tile,end_tile). */
static void multiply_chunk(const IntCall *l, int64_t first_tile, int64_t end_tile, int64_t first_group,
                           IntTask t) {
    const Form form = l->form;
    for (int64_t i = first_tile; i < end_tile; i++) {
        const int64_t first = first_of_tile(l, i), rows = first_of_tile(l, i + 1) - first;
        IntTask tile = t;
        tile.x = l->rounded + first * rounded_bytes(l->inputs, form.group) +
                 rows * rounded_bytes(first_group * form.group, form.group);
        tile.fetches = i == first_tile ? t.fetches : NOWHERE;
        if (form.bits == 8)
            multiply_int8(rows, form.has_offsets, form.group, tile);
        else if (form.has_levels)
            multiply_levels(rows, tile);
        else
            multiply_int4(rows, form.has_offsets, form.group, tile);
        t.sums += rows * OUTPUTS;
    }
}

/* One panel of y for the rows [first_row,end_row). */
static void store_panel(const IntCall *l, int64_t panel, int64_t first_row, int64_t end_row, float *sums) {
    const int64_t first = panel * OUTPUTS;
    const float *bias = l->weight->bias ? l->weight->bias + first : 0;
    for (int64_t r = first_row; r < end_row; r++, sums += OUTPUTS) {
        for (int64_t c = 0; c < OUTPUTS; c++) sums[c] *= l->weight->unit;
        store_outputs((const vfloat *)sums, PANEL_VECTORS, bias, l->y + r * l->outputs + first,
                      l->outputs - first, l->add);
    }
}

/* All rows of one panel. */
static void multiply_panel(const IntCall *l, int64_t panel) {
    const int64_t groups = l->inputs / l->form.group, tiles = count_tiles(l);
    const int64_t most = l->rows <= STREAM_ROWS ? groups : CHUNK_BLOCKS;
    const char *blocks = (const char *)l->weight->data + panel * groups * block_bytes(l->form);
    const vuint levels = l->form.has_levels ? load_levels(l->weight->levels) : (vuint){0};
    _Alignas(64) float sums[GROUP_TILES * INT_ROWS * OUTPUTS];
    for (int64_t i = 0; i < tiles; i += GROUP_TILES) {
        const int64_t end = min64(i + GROUP_TILES, tiles), first_row = first_of_tile(l, i),
                      end_row = first_of_tile(l, end);
        memset(sums, 0, (size_t)(end_row - first_row) * OUTPUTS * 4);
        IntTask t = {.sums = sums, .levels = levels, .fetches = fetches_to(l->rows < FEW_ROWS)};
        for (int64_t g = 0; g < groups; g += t.count) {
            t.blocks = blocks + g * block_bytes(l->form);
            t.count = min64(most, groups - g);
            multiply_chunk(l, i, end, g, t);
        }
        store_panel(l, panel, first_row, end_row, sums);
    }
}

static void multiply_panels(const void *loop, int64_t first, int64_t end) {
    for (; first < end; first++) multiply_panel(loop, first);
}

void linear_int(const Weight *w, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
                int add) {
    int8_t *rounded = scratch_acquire(SCRATCH_ACTIVATIONS, rows * rounded_bytes(inputs, w->group));
    IntCall call = {w, form_of(w), x, rows, inputs, rounded, y, outputs, add, .parts = 1};
    if (rows > 1) call.parts = divide_up(most_threads(), count_tiles(&call)); /* one row is rounded at once */
    parallel_for(count_tiles(&call) * call.parts, 1, round_parts, &call);
    parallel_for(divide_up(outputs, OUTPUTS), 1, multiply_panels, &call);
    scratch_release(SCRATCH_ACTIVATIONS);
}

int64_t panel_bytes_int(const Weight *w, int64_t inputs) {
    return PANEL / OUTPUTS * (inputs / w->group) * block_bytes(form_of(w));
}

void embed_int(const Weight *w, const int64_t *ids, int64_t rows, int64_t inputs, float *y) {
    const int64_t group = w->group, groups = inputs / group, bytes = block_bytes(form_of(w)),
                  values = values_bytes(form_of(w));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < inputs; k++) {
            const int64_t output = ids[r] % OUTPUTS, i = k % group;
            const char *block = (const char *)w->data + (ids[r] / OUTPUTS * groups + k / group) * bytes;
            const char *scale = block + values + 2 * output;
            const int64_t quad = w->kind == INT8 ? i / 4 : i / 16 * 2 + i % 8 / 4; /* of four inputs */
            const int byte = (uint8_t)block[(quad * OUTPUTS + output) * 4 + i % 4];
            const int nibble = byte >> i % 16 / 8 * 4 & 15;
            const int value = w->kind == INT8 ? byte - 128 : w->levels ? w->levels[nibble] : nibble - 8;
            const float offset = w->has_offsets ? half_at(scale + 2 * OUTPUTS) : 0;
            y[r * inputs + k] = ((float)value * half_at(scale) + offset) * w->unit;
        }
}
