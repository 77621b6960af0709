/* Linear layers with float32 and bfloat16 weights.
 *
 * Computed: y[r][o] = sum over k of x[r][k] * w[o][k], in one float32 accumulator, k = 0, 1, 2 ...; then the
 * bias, then the old y.  With `rounds_inputs`, x is rounded to bfloat16 once a linear, for one row as for
 * many, and k runs over pairs in the order 1, 0, 3, 2 ... (pairs.h).
 * Order: panels of 64 outputs (shared by threads) > register tiles of outputs > tiles of up to TILE_ROWS
 * rows > k.
 * Exact: lanes are outputs, so no sum crosses lanes, and the tile sizes never split a sum over k.  How many
 * rows share a tile decides how often a weight is loaded, not what is added.  bfloat16 is widened to float32
 * without loss. */
#include "linear.h"
#include "blocks.h"
#include "memory.h"
#include "pairs.h"

_Static_assert((int)PANEL == (int)BLOCK, "a panel's maximum is the maximum of a block of logits");

enum { PREFETCH_BYTES = 4096 }; /* a page ahead: the hardware stops at its border (+15 %) */

INLINE void prefetch_weights(const void *weights) {
    for (int c = 0; c < TILE_VECTORS * LANES * 4; c += 64)
        __builtin_prefetch((const char *)weights + c + PREFETCH_BYTES);
}

typedef vfloat Tile[MAX_TILE_ROWS][TILE_VECTORS];

/* sums = x [rows,inputs] * TILE_VECTORS vectors of outputs in a float32 panel. */
INLINE void multiply_float32(const int rows, const float *weights, const float *x, int64_t inputs,
                             Tile sums) {
    for (int64_t k = 0; k < inputs; k++, weights += PANEL) {
        prefetch_weights(weights);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < TILE_VECTORS; c++)
                sums[r][c] += load(weights + c * LANES) * x[r * inputs + k];
    }
}

/* The same in a bfloat16 panel, two inputs a step. */
INLINE void multiply_bfloat16(const int rows, const uint32_t *weights, const float *x, int64_t inputs,
                              Tile sums) {
    for (int64_t k = 0; k + 1 < inputs; k += 2, weights += PANEL) {
        vfloat even[TILE_VECTORS], odd[TILE_VECTORS];
        prefetch_weights(weights);
        for (int c = 0; c < TILE_VECTORS; c++) {
            const vuint pairs = *(const vuint *)(weights + c * LANES);
            even[c] = even_bfloat16(pairs);
            odd[c] = odd_bfloat16(pairs);
        }
        for (int r = 0; r < rows; r++) {
            const float *at = x + r * inputs + k;
            for (int c = 0; c < TILE_VECTORS; c++) sums[r][c] += even[c] * at[0];
            for (int c = 0; c < TILE_VECTORS; c++) sums[r][c] += odd[c] * at[1];
        }
    }
    if (inputs & 1)
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < TILE_VECTORS; c++)
                sums[r][c] +=
                    even_bfloat16(*(const vuint *)(weights + c * LANES)) * x[r * inputs + inputs - 1];
}

/* The same for rounded inputs x [rows,pairs]. */
INLINE void multiply_pairs(const int rows, const uint32_t *weights, const bfloat16_pair *x, int64_t pairs,
                           Tile sums) {
    for (int64_t k = 0; k < pairs; k++, weights += PANEL) {
        vuint w[TILE_VECTORS];
        prefetch_weights(weights);
        for (int c = 0; c < TILE_VECTORS; c++) w[c] = *(const vuint *)(weights + c * LANES);
        for (int r = 0; r < rows; r++) {
            const vuint both = (vuint){0} + x[r * pairs + k];
            for (int c = 0; c < TILE_VECTORS; c++) sums[r][c] = dot_pairs(sums[r][c], w[c], both);
        }
    }
}

enum { WIDE, HALF, PAIRS }; /* float32; bfloat16 weights; bfloat16 weights and inputs */

INLINE int form_of(const Weight *weight) {
    return weight->kind == FLOAT32 ? WIDE : weight->rounds_inputs ? PAIRS : HALF;
}

/* One tile of outputs for a few rows. */
typedef struct {
    const void *weights, *x;        /* first output of the tile in its panel; first row */
    const float *bias;              /* of the first output, or null */
    float *y;                       /* of the first row and output */
    int64_t inputs, outputs, space; /* space: outputs from the first one to the end of a row */
    int add;
} TileTask;

INLINE void multiply_rows(const int rows, const int form, TileTask t) {
    Tile sums;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < TILE_VECTORS; c++) sums[r][c] = (vfloat){0};
    if (form == WIDE)
        multiply_float32(rows, t.weights, t.x, t.inputs, sums);
    else if (form == HALF)
        multiply_bfloat16(rows, t.weights, t.x, t.inputs, sums);
    else
        multiply_pairs(rows, t.weights, t.x, (t.inputs + 1) / 2, sums);
    for (int r = 0; r < rows; r++)
        store_outputs(sums[r], TILE_VECTORS, t.bias, t.y + r * t.outputs, t.space, t.add);
}

/* A constant number of rows keeps the sums in registers. */
INLINE void multiply_tile(int64_t rows, const int form, TileTask t) {
    switch (rows) {
        case 1: multiply_rows(1, form, t); break;
        case 2: multiply_rows(2, form, t); break;
        case 3: multiply_rows(3, form, t); break;
        case 4: multiply_rows(4, form, t); break;
        case 5: multiply_rows(5, form, t); break;
        case 6: multiply_rows(6, form, t); break;
    }
}

/* The maximum of a panel's outputs in every row. */
static void panel_maxima(const float *y, int64_t rows, int64_t outputs, int64_t panel, float *block_max,
                         int64_t stride) {
    const int64_t space = outputs - panel * PANEL;
    for (int64_t r = 0; r < rows; r++) {
        float padded[PANEL];
        const float *at = y + r * outputs + panel * PANEL;
        if (space < PANEL) {
            for (int64_t j = 0; j < PANEL; j++) padded[j] = j < space ? at[j] : -INFINITY;
            at = padded;
        }
        block_max[r * stride + panel] = block_maximum(at);
    }
}

static int64_t panel_bytes(const Weight *weight, int64_t inputs) {
    return weight->kind == BFLOAT16 ? (inputs + 1) / 2 * PANEL * 4 : inputs * PANEL * 4;
}

INLINE int64_t input_bytes(const Weight *weight, int64_t inputs) {
    return form_of(weight) == PAIRS ? (inputs + 1) / 2 * 4 : inputs * 4;
}

/* All rows of one panel; x as its form holds it.  Tiles of rows have equal sizes: 8 rows are 4 + 4, not
 * 6 + 2. */
static void multiply_panel(const Weight *weight, int64_t panel, const char *x, int64_t rows, int64_t inputs,
                           float *y, int64_t outputs, int add) {
    const int64_t row_bytes = input_bytes(weight, inputs);
    const int form = form_of(weight);
    const char *weights = (const char *)weight->data + panel * panel_bytes(weight, inputs);
    const int64_t tiles = divide_up(rows, TILE_ROWS);
    for (int64_t c = 0; c < PANEL && panel * PANEL + c < outputs; c += TILE_VECTORS * LANES) {
        const int64_t first = panel * PANEL + c;
        const float *bias = weight->bias ? weight->bias + first : 0;
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t r = i * rows / tiles, count = (i + 1) * rows / tiles - r;
            const TileTask t = {
                weights + c * 4, x + r * row_bytes, bias, y + r * outputs + first,
                inputs,          outputs,           outputs - first, add,
            };
            if (form == WIDE)
                multiply_tile(count, WIDE, t);
            else if (form == HALF)
                multiply_tile(count, HALF, t);
            else
                multiply_tile(count, PAIRS, t);
        }
    }
}

/* x, or its rounded rows in scratch memory. */
static const char *hold_inputs(const Weight *weight, const float *x, int64_t rows, int64_t inputs) {
    if (form_of(weight) != PAIRS) return (const char *)x;
    const int64_t stride = input_bytes(weight, inputs) / 2;
    bfloat16 *rounded = scratch_acquire(SCRATCH_ACTIVATIONS, rows * stride * 2);
    #pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t r = 0; r < rows; r++) round_pairs(x + r * inputs, inputs, rounded + r * stride);
    return (const char *)rounded;
}

void linear_with_maxima(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y,
                        int64_t outputs, int add, float *block_max, int64_t block_max_stride) {
    const int64_t panels = divide_up(outputs, PANEL);
    if (weight->kind >= INT8) {
        linear_int(weight, x, rows, inputs, y, outputs, add);
        if (!block_max) return;
        #pragma omp parallel for schedule(static)
        for (int64_t p = 0; p < panels; p++) panel_maxima(y, rows, outputs, p, block_max, block_max_stride);
        return;
    }
    const char *held = hold_inputs(weight, x, rows, inputs);
    #pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++) {
        multiply_panel(weight, p, held, rows, inputs, y, outputs, add);
        if (block_max)
            panel_maxima(y, rows, outputs, p, block_max, block_max_stride); /* while the outputs are cached */
    }
    if (held != (const char *)x) scratch_release(SCRATCH_ACTIVATIONS);
}

void linear(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
            int add) {
    linear_with_maxima(weight, x, rows, inputs, y, outputs, add, 0, 0);
}

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
