/* Linear layers with float32 and bfloat16 weights.
 *
 * Computed: y[r][o] = sum over k of x[r][k] * w[o][k], in one float32 accumulator, k = 0, 1, 2 ...; then the
 * bias, then the old y.  With `rounds_inputs`, x is rounded to bfloat16 once a linear, for one row as for
 * many, and k runs over pairs in the order 1, 0, 3, 2 ... (pairs.h), or as AMX tiles take it (tiles.h).
 * Order: panels of 64 outputs (shared by threads) > groups of rows > chunks of k > tiles of up to TILE_ROWS
 * rows > register tiles of outputs > k within the chunk.  So memory is read in one stream, and a chunk is
 * used by all rows while it is in the first cache.
 * Exact: lanes are outputs, so no sum crosses lanes, and every sum takes its k one after the other; between
 * chunks it waits in memory as the float32 that it is.  bfloat16 is widened to float32 without loss.
 * Compilers have to fuse every product with its addition, or none: tests compare all numbers of rows. */
#include "linear.h"
#include "blocks.h"
#include "memory.h"
#include "pairs.h"
#include "threads.h"
#include "tiles.h"

_Static_assert((int)PANEL == (int)BLOCK, "a panel's maximum is the maximum of a block of logits");

/* Lines of a chunk for many rows: sums are loaded and stored once a chunk. */
enum { MANY_ROWS = 24, LONG_CHUNK_LINES = LANES == 16 ? 128 : CHUNK_LINES };
enum { GROUP_ROWS = 48 };               /* rows whose sums are kept together in the first cache */
enum { FEW_ROWS = 5 };                  /* fewer rows keep their inputs in registers (add_line) */
enum { STREAM_ROWS = PANEL == TILE_VECTORS * LANES ? TILE_ROWS : 1 }; /* rows of a tile with all outputs */

/* For several tiles of rows the next chunk, or for the second cache the one behind it, so that all of them
 * wait for memory equally. */
INLINE void fetch_weights(const int vectors, const int fetches, const char *weights) {
    const int ahead = fetches == SECOND_CACHE ? 2 * AHEAD_BYTES : AHEAD_BYTES;
    for (int c = 0; c < vectors * LANES * 4; c += 64) fetch_line(fetches, weights + c + ahead);
}

typedef vfloat Tile[TILE_ROWS][PANEL / LANES];

/* sums += x [rows,inputs] * `vectors` vectors of outputs in a float32 panel. */
INLINE void multiply_float32(const int rows, const int vectors, const int fetches, TileTask t, Tile sums) {
    for (int64_t k = 0; k < t.inputs; k++, t.weights += LINE_BYTES) {
        fetch_weights(vectors, fetches, t.weights);
        for (int r = 0; r < rows; r++) {
            const float x = ((const float *)(t.x + r * t.row_bytes))[k];
            for (int c = 0; c < vectors; c++) sums[r][c] += load((const float *)t.weights + c * LANES) * x;
        }
    }
}

/* One vector of outputs of a line, for its even input or its odd one. */
INLINE vfloat widen_half(const int odd, const char *weights) {
    const vuint pairs = *(const vuint *)weights;
    return odd ? odd_bfloat16(pairs) : even_bfloat16(pairs);
}

/* sums += x * the even inputs of a line, or the odd ones.  For few rows their inputs stay in registers, for
 * many the weights. */
INLINE void add_line(const int rows, const int vectors, const int odd, TileTask t, int64_t k, Tile sums) {
    float x[TILE_ROWS];
    vfloat weights[PANEL / LANES];
    for (int r = 0; r < rows; r++) x[r] = ((const float *)(t.x + r * t.row_bytes))[k + odd];
    if (rows < FEW_ROWS) {
        for (int c = 0; c < vectors; c++) {
            const vfloat weight = widen_half(odd, t.weights + c * LANES * 4);
            for (int r = 0; r < rows; r++) sums[r][c] += weight * x[r];
        }
        return;
    }
    for (int c = 0; c < vectors; c++) weights[c] = widen_half(odd, t.weights + c * LANES * 4);
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) sums[r][c] += weights[c] * x[r];
}

/* The same in a bfloat16 panel, two inputs a step. */
INLINE void multiply_bfloat16(const int rows, const int vectors, const int fetches, TileTask t, Tile sums) {
    int64_t k = 0;
    for (; k + 1 < t.inputs; k += 2, t.weights += LINE_BYTES) {
        fetch_weights(vectors, fetches, t.weights);
        add_line(rows, vectors, 0, t, k, sums);
        add_line(rows, vectors, 1, t, k, sums);
    }
    if (k < t.inputs) add_line(rows, vectors, 0, t, k, sums);
}

/* The same for rounded inputs x [rows,pairs]. */
INLINE void multiply_pairs(const int rows, const int vectors, const int fetches, TileTask t, Tile sums) {
    for (int64_t k = 0; k < t.inputs; k += 2, t.weights += LINE_BYTES) {
        vuint w[PANEL / LANES];
        fetch_weights(vectors, fetches, t.weights);
        for (int c = 0; c < vectors; c++) w[c] = *(const vuint *)(t.weights + c * LANES * 4);
        for (int r = 0; r < rows; r++) {
            const vuint both = (vuint){0} + ((const bfloat16_pair *)(t.x + r * t.row_bytes))[k / 2];
            for (int c = 0; c < vectors; c++) sums[r][c] = dot_pairs(sums[r][c], w[c], both);
        }
    }
}

/* float32; bfloat16 weights; bfloat16 weights and inputs, the latter two ways */
enum { WIDE, HALF, PAIRS, TILES };

INLINE int form_of(const Weight *weight) {
    if (weight->kind == FLOAT32) return WIDE;
    return !weight->rounds_inputs ? HALF : HAS_TILES ? TILES : PAIRS;
}

/* All outputs of the panel for a few rows, `vectors` of them at a time: few rows have registers for many. */
INLINE void multiply_rows(const int rows, const int form, const int fetches, TileTask t) {
    const int vectors = rows == 1 ? PANEL / LANES : rows < 4 ? 4 : TILE_VECTORS;
    for (int first = 0; first < PANEL / LANES; first += vectors) {
        Tile sums;
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) sums[r][c] = load(t.sums + r * PANEL + c * LANES);
        if (form == WIDE)
            multiply_float32(rows, vectors, fetches, t, sums);
        else if (form == HALF)
            multiply_bfloat16(rows, vectors, fetches, t, sums);
        else
            multiply_pairs(rows, vectors, fetches, t, sums);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) store(t.sums + r * PANEL + c * LANES, sums[r][c]);
        t.weights += vectors * LANES * 4;
        t.sums += vectors * LANES;
    }
}

/* A constant number of rows keeps the sums in registers. */
INLINE void multiply_tile(int64_t rows, const int form, const int fetches, TileTask t) {
    switch (rows) {
        case 1: multiply_rows(1, form, fetches, t); break;
        case 2: multiply_rows(2, form, fetches, t); break;
        case 3: multiply_rows(3, form, fetches, t); break;
        case 4: multiply_rows(4, form, fetches, t); break;
        case 5: multiply_rows(5, form, fetches, t); break;
#if defined __AVX512F__ || defined __ARM_NEON
        case 6: multiply_rows(6, form, fetches, t); break;
#endif
    }
}

/* Where weights are fetched to is a constant, too: a branch in the loop would take registers. */
INLINE void multiply_form(int64_t rows, const int form, int fetches, TileTask t) {
    switch (fetches) {
        case NOWHERE: multiply_tile(rows, form, NOWHERE, t); break;
        case FIRST_CACHE: multiply_tile(rows, form, FIRST_CACHE, t); break;
        default: multiply_tile(rows, form, SECOND_CACHE, t);
    }
}

/* One call of `linear`. */
typedef struct {
    const Weight *weight;
    const float *x;
    int64_t rows, inputs;
    char *rounded; /* the rows of x in bfloat16, for the forms PAIRS and TILES */
    float *y;
    int64_t outputs;
    int add;
    float *block_max; /* or null */
    int64_t block_max_stride;
} LinearCall;

/* The maximum of a panel's outputs in every row. */
static void panel_maxima(const LinearCall *l, int64_t panel) {
    const int64_t space = l->outputs - panel * PANEL;
    for (int64_t r = 0; r < l->rows; r++) {
        float padded[PANEL];
        const float *at = l->y + r * l->outputs + panel * PANEL;
        if (space < PANEL) {
            for (int64_t j = 0; j < PANEL; j++) padded[j] = j < space ? at[j] : -INFINITY;
            at = padded;
        }
        l->block_max[r * l->block_max_stride + panel] = block_maximum(at);
    }
}

static int64_t panel_bytes(const Weight *weight, int64_t inputs) {
    return weight->kind == BFLOAT16 ? (inputs + 1) / 2 * PANEL * 4 : inputs * PANEL * 4;
}

/* Bytes from a row of inputs to the next.  Rows of an AMX tile are an odd number of cache lines apart, which
 * spreads them over the first cache. */
INLINE int64_t input_bytes(const Weight *weight, int64_t inputs) {
    switch (form_of(weight)) {
        case PAIRS: return (inputs + 1) / 2 * 4;
        case TILES: return (divide_up(inputs, TILE_INPUTS) | 1) * TILE_INPUTS * 2;
        default: return inputs * 4;
    }
}

/* Rows that are computed: more than one AMX tile of them are whole tiles. */
INLINE int64_t computed_rows(int form, int64_t rows) {
    return form == TILES && rows > MOST_TILE_ROWS ? divide_up(rows, MOST_TILE_ROWS) * MOST_TILE_ROWS : rows;
}

/* One chunk of k for all rows of a group, in AMX tiles.  One of them waits for memory, more do not. */
static void multiply_chunk_in_tiles(int64_t rows, TileTask t) {
    for (int64_t r = 0; r < rows; r += MOST_TILE_ROWS) {
        multiply_tiles(t, rows <= MOST_TILE_ROWS);
        t.x += MOST_TILE_ROWS * t.row_bytes;
        t.sums += MOST_TILE_ROWS * PANEL;
    }
}

/* One chunk of k for all rows of a group.  Tiles of rows have equal sizes: 8 rows are 4 + 4, not 6 + 2. */
static void multiply_chunk(const int form, int64_t rows, int fetches, TileTask t) {
    if (form == TILES) {
        multiply_chunk_in_tiles(rows, t);
        return;
    }
    const int64_t tiles = divide_up(rows, TILE_ROWS);
    for (int64_t i = 0; i < tiles; i++) {
        const int64_t r = i * rows / tiles, count = (i + 1) * rows / tiles - r;
        TileTask tile = t;
        tile.x += r * t.row_bytes;
        tile.sums += r * PANEL;
        if (form == WIDE)
            multiply_form(count, WIDE, fetches, tile);
        else if (form == HALF)
            multiply_form(count, HALF, fetches, tile);
        else
            multiply_form(count, PAIRS, fetches, tile);
    }
}

INLINE int64_t chunk_lines(int64_t rows) { return rows < MANY_ROWS ? CHUNK_LINES : LONG_CHUNK_LINES; }

/* Whether a chunk is all of k. */
INLINE int is_streamed(int form, int64_t rows) {
    return rows <= (form == TILES ? (int)MOST_TILE_ROWS : (int)STREAM_ROWS);
}

/* All rows of one panel. */
static void multiply_panel(const LinearCall *l, int64_t panel) {
    const Weight *weight = l->weight;
    const char *x = l->rounded ? l->rounded : (const char *)l->x;
    const int form = form_of(weight);
    const int64_t rows = l->rows, inputs = l->inputs, outputs = l->outputs;
    const int64_t row_bytes = input_bytes(weight, inputs), first = panel * PANEL;
    const int64_t lines = chunk_lines(rows);
    const int streams = is_streamed(form, rows), fetches = fetches_to(streams);
    const int64_t most = streams ? inputs : form == WIDE ? lines : 2 * lines;
    const float *bias = weight->bias ? weight->bias + first : 0;
    _Alignas(64) float sums[GROUP_ROWS * PANEL];
    for (int64_t r = 0; r < rows; r += GROUP_ROWS) {
        const int64_t group = min64(rows - r, GROUP_ROWS);
        const int64_t computed = computed_rows(form, group);
        TileTask t = {(const char *)weight->data + panel * panel_bytes(weight, inputs), x + r * row_bytes,
                      row_bytes, 0, sums};
        memset(sums, 0, (size_t)computed * PANEL * 4);
        for (int64_t k = 0; k < inputs; k += t.inputs) {
            t.inputs = min64(most, inputs - k);
            multiply_chunk(form, computed, fetches, t);
            t.weights += lines * LINE_BYTES;
            t.x += form == HALF ? t.inputs * 4 : lines * 4;
        }
        for (int64_t i = 0; i < group; i++)
            store_outputs((vfloat *)(sums + i * PANEL), PANEL / LANES, bias, l->y + (r + i) * outputs + first,
                          outputs - first, l->add);
    }
}

static void round_rows(const void *loop, int64_t first, int64_t end) {
    const LinearCall *l = loop;
    const int64_t row_bytes = input_bytes(l->weight, l->inputs);
    for (int64_t r = first; r < end; r++) {
        char *to = l->rounded + r * row_bytes;
        const int64_t bytes = r < l->rows ? (l->inputs + 1) / 2 * 4 : 0;
        if (bytes) round_pairs(l->x + r * l->inputs, l->inputs, (bfloat16 *)to);
        memset(to + bytes, 0, (size_t)(row_bytes - bytes));
    }
}

static void multiply_panels(const void *loop, int64_t first, int64_t end) {
    const LinearCall *l = loop;
    const int in_tiles = form_of(l->weight) == TILES;
    if (in_tiles) configure_tiles(min64(l->rows, MOST_TILE_ROWS));
    for (int64_t p = first; p < end; p++) {
        multiply_panel(l, p);
        if (l->block_max) panel_maxima(l, p); /* while the outputs are cached */
    }
    if (in_tiles) release_tiles();
}

static void maxima_of_panels(const void *loop, int64_t first, int64_t end) {
    for (; first < end; first++) panel_maxima(loop, first);
}

void linear_with_maxima(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y,
                        int64_t outputs, int add, float *block_max, int64_t block_max_stride) {
    if (rows == 0) return; /* tiles have a row at least */
    const int64_t panels = divide_up(outputs, PANEL);
    LinearCall call = {weight, x, rows, inputs, 0, y, outputs, add, block_max, block_max_stride};
    if (weight->kind >= INT8) {
        linear_int(weight, x, rows, inputs, y, outputs, add);
        if (block_max) parallel_for(panels, 16, maxima_of_panels, &call);
        return;
    }
    if (form_of(weight) >= PAIRS) {
        const int64_t computed = computed_rows(form_of(weight), rows);
        call.rounded = scratch_acquire(SCRATCH_ACTIVATIONS, computed * input_bytes(weight, inputs));
        parallel_for(computed, 4, round_rows, &call);
    }
    parallel_for(panels, 1, multiply_panels, &call);
    if (call.rounded) scratch_release(SCRATCH_ACTIVATIONS);
}

void linear(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
            int add) {
    linear_with_maxima(weight, x, rows, inputs, y, outputs, add, 0, 0);
}

Weight outputs_from(const Weight *weight, int64_t inputs, int64_t first_output) {
    const int is_int = weight->kind >= INT8;
    const int64_t bytes = is_int ? panel_bytes_int(weight, inputs) : panel_bytes(weight, inputs);
    Weight part = *weight;
    part.data = (const char *)weight->data + first_output / PANEL * bytes;
    if (part.bias) part.bias += first_output;
    return part;
}

int has_bfloat16_products(void) {
#ifdef __AVX512BF16__
    return 1;
#else
    return HAS_TILES || HAS_BFDOT;
#endif
}

int has_bfloat16_tiles(void) { return HAS_TILES; }

int has_bfdot(void) { return HAS_BFDOT; }

void embed(const Weight *weight, const int64_t *ids, int64_t rows, int64_t inputs, float *y) {
    if (weight->kind >= INT8) {
        embed_int(weight, ids, rows, inputs, y);
        return;
    }
    for (int64_t r = 0; r < rows; r++, y += inputs) {
        const char *panel = (const char *)weight->data + ids[r] / PANEL * panel_bytes(weight, inputs);
        const int64_t lane = ids[r] % PANEL;
        if (weight->kind == FLOAT32) {
            for (int64_t k = 0; k < inputs; k++) y[k] = ((const float *)panel)[k * PANEL + lane];
            continue;
        }
        for (int64_t k = 0; k < inputs; k++) {
            const uint32_t bits = (uint32_t)((const bfloat16 *)panel)[(k / 2 * PANEL + lane) * 2 + k % 2]
                                  << 16;
            memcpy(y + k, &bits, 4);
        }
    }
}
