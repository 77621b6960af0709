/* LoRA: y += scale * b (a x) for the rows that use an adapter, after a linear of the decoder.
 *
 * Computed: t = scale * a x, one vector accumulator for each (row, rank), added across lanes by a fixed
 * tree; then y += b t, one accumulator for each (row, output), ranks in ascending order.
 * Exact: tiles share loads of a and b between rows and ranks, and never split or reorder a sum.  Adapters
 * are float32: they are small. */
#include "linear.h"
#include "memory.h"
#include "threads.h"

enum { TILE = 4, INPUT_ALIGN = 16 };  /* rows, and ranks, that share loads; padding of the inputs in a */
enum { B_OUTPUTS = TILE_VECTORS * LANES, GRAIN = 1 << 16 }; /* outputs of a tile; products worth a thread */

INLINE int64_t padded_inputs(int64_t inputs) { return divide_up(inputs, INPUT_ALIGN) * INPUT_ALIGN; }

/* t [rows,ranks] = scale * a x; the rows of t are `rank` apart. */
INLINE void multiply_a(const int rows, const int ranks, const float *a, const float *x, int64_t inputs,
                       float scale, float *t, int64_t rank) {
    const int64_t a_stride = padded_inputs(inputs);
    vfloat sums[TILE][TILE];
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < ranks; k++) sums[r][k] = (vfloat){0};
    int64_t i = 0;
    for (; i + LANES <= inputs; i += LANES)
        for (int k = 0; k < ranks; k++) {
            const vfloat v = load(a + k * a_stride + i);
            for (int r = 0; r < rows; r++) sums[r][k] += v * load(x + r * inputs + i);
        }
    for (int r = 0; i < inputs && r < rows; r++) {
        const vfloat last = load_part(x + r * inputs + i, inputs - i);
        for (int k = 0; k < ranks; k++) sums[r][k] += load(a + k * a_stride + i) * last;
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < ranks; k++) t[r * rank + k] = sum_lanes(sums[r][k]) * scale;
}

/* y [rows, up to TILE_VECTORS vectors of outputs, `left` of them real] += b t. */
INLINE void multiply_b(const int rows, const float *b, int64_t rank, const float *t, float *y,
                       int64_t outputs, int64_t left) {
    vfloat sums[TILE][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < TILE_VECTORS; c++) sums[r][c] = (vfloat){0};
    for (int64_t k = 0; k < rank; k++, b += PANEL)
        for (int c = 0; c < TILE_VECTORS; c++) {
            const vfloat v = load(b + c * LANES);
            for (int r = 0; r < rows; r++) sums[r][c] += v * t[r * rank + k];
        }
    for (int r = 0; r < rows; r++) {
        float *to = y + r * outputs, last[TILE_VECTORS * LANES];
        if (left >= TILE_VECTORS * LANES) {
            for (int c = 0; c < TILE_VECTORS; c++) *(vfloat *)(to + c * LANES) += sums[r][c];
            continue;
        }
        memcpy(last, sums[r], sizeof last);
        for (int64_t j = 0; j < left; j++) to[j] += last[j];
    }
}

/* One part of a run.  An item of its loops is a tile of ranks, or of outputs, for all rows of the run. */
typedef struct {
    const LoraPart *part;
    const float *x; /* of the first row */
    float *t, *y;   /* [rows,rank]; y: of the first row and output */
    int64_t rows, inputs, outputs;
} PartOfRun;

/* Up to TILE ranks, from k on. */
static void apply_a_tile(const PartOfRun *l, int64_t k) {
    const int64_t rank = l->part->rank, inputs = l->inputs, stride = padded_inputs(inputs);
    const float *a = l->part->a + k * stride, scale = l->part->scale;
    int64_t r = 0;
    if (rank - k < TILE) {
        for (; r < l->rows; r++)
            for (int64_t i = 0; i < rank - k; i++) {
                const float *x = l->x + r * inputs;
                multiply_a(1, 1, a + i * stride, x, inputs, scale, l->t + r * rank + k + i, rank);
            }
        return;
    }
    for (; r + TILE <= l->rows; r += TILE)
        multiply_a(TILE, TILE, a, l->x + r * inputs, inputs, scale, l->t + r * rank + k, rank);
    for (; r < l->rows; r++)
        multiply_a(1, TILE, a, l->x + r * inputs, inputs, scale, l->t + r * rank + k, rank);
}

static void apply_a(const void *loop, int64_t first, int64_t end) {
    const PartOfRun *l = loop;
    for (int64_t k = first * TILE; k < min64(end * TILE, l->part->rank); k += TILE)
        apply_a_tile(l, k);
}

static void apply_b(const void *loop, int64_t first, int64_t end) {
    const PartOfRun *l = loop;
    const int64_t rank = l->part->rank;
    for (int64_t c = first * B_OUTPUTS; c < min64(end * B_OUTPUTS, l->part->outputs); c += B_OUTPUTS) {
        const float *b = l->part->b + c / PANEL * rank * PANEL + c % PANEL;
        const int64_t left = l->part->outputs - c;
        int64_t r = 0;
        for (; r + TILE <= l->rows; r += TILE)
            multiply_b(TILE, b, rank, l->t + r * rank, l->y + r * l->outputs + c, l->outputs, left);
        for (; r < l->rows; r++)
            multiply_b(1, b, rank, l->t + r * rank, l->y + r * l->outputs + c, l->outputs, left);
    }
}

void add_lora(const LoraRun *runs, int64_t num_runs, int64_t first_part, int64_t num_parts, const float *x,
              int64_t inputs, float *y, int64_t outputs) {
    for (const LoraRun *run = runs; run < runs + num_runs; run++)
        for (const LoraPart *part = run->parts + first_part; part < run->parts + first_part + num_parts;
             part++) {
            if (!part->rank || !run->num_rows) continue;
            const int64_t rows = run->num_rows, products = rows * part->rank;
            PartOfRun l = {part, x + run->first_row * inputs, 0, y + run->first_row * outputs + part->start,
                           rows, inputs, outputs};
            l.t = allocate(products * 4);
            parallel_for(divide_up(part->rank, TILE), divide_up(GRAIN, TILE * rows * inputs), apply_a, &l);
            parallel_for(divide_up(part->outputs, B_OUTPUTS), divide_up(GRAIN, B_OUTPUTS * products), apply_b,
                         &l);
            release(l.t);
        }
}
