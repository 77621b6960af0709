/* LoRA: y += scale * b (a x) for the rows that use an adapter, after a linear of the decoder.
 *
 * Computed: t = scale * a x, one vector accumulator for each (row, rank), added across lanes by a fixed
 * tree; then y += b t, one accumulator for each (row, output), ranks in ascending order.
 * Exact: tiles share loads of a and b between rows and ranks, and never split or reorder a sum.  Adapters
 * are float32: they are small. */
#include "linear.h"
#include "memory.h"

enum { TILE = 4, INPUT_ALIGN = 16 }; /* rows, and ranks, that share loads; padding of the inputs in a */

INLINE int64_t padded_inputs(int64_t inputs) { return divide_up(inputs, INPUT_ALIGN) * INPUT_ALIGN; }

/* t [rows,ranks] = scale * a x; the rows of t are t_stride apart. */
INLINE void multiply_a(const int rows, const int ranks, const float *a, const float *x, int64_t inputs,
                       float scale, float *t, int64_t t_stride) {
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
        for (int k = 0; k < ranks; k++) t[r * t_stride + k] = sum_lanes(sums[r][k]) * scale;
}

/* y [rows, up to TILE_VECTORS vectors of outputs, `left` of them real] += b t. */
INLINE void multiply_b(const int rows, const float *b, int64_t rank, const float *t, int64_t t_stride,
                       float *y, int64_t outputs, int64_t left) {
    vfloat sums[TILE][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < TILE_VECTORS; c++) sums[r][c] = (vfloat){0};
    for (int64_t k = 0; k < rank; k++, b += PANEL)
        for (int c = 0; c < TILE_VECTORS; c++) {
            const vfloat v = load(b + c * LANES);
            for (int r = 0; r < rows; r++) sums[r][c] += v * t[r * t_stride + k];
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

/* t = scale * a x for one part of a run.  Called by all threads, which share the tiles and do not wait at
 * the end. */
static void apply_a(const LoraRun *run, const LoraPart *part, const float *x, int64_t inputs, float *t,
                    int64_t t_stride) {
    const int64_t end = run->first_row + run->num_rows, a_stride = padded_inputs(inputs);
    #pragma omp for collapse(2) schedule(static) nowait
    for (int64_t first = run->first_row; first < end; first += TILE)
        for (int64_t k = 0; k < part->rank; k += TILE) {
            const float *a = part->a + k * a_stride, scale = part->scale;
            const int64_t ranks = min64(part->rank - k, TILE);
            if (end - first >= TILE && ranks == TILE) {
                multiply_a(TILE, TILE, a, x + first * inputs, inputs, scale, t + first * t_stride + k,
                           t_stride);
                continue;
            }
            for (int64_t r = first; r < min64(end, first + TILE); r++) {
                float *to = t + r * t_stride + k;
                if (ranks == TILE)
                    multiply_a(1, TILE, a, x + r * inputs, inputs, scale, to, t_stride);
                else
                    for (int64_t i = 0; i < ranks; i++)
                        multiply_a(1, 1, a + i * a_stride, x + r * inputs, inputs, scale, to + i, t_stride);
            }
        }
}

/* y += b t for one part of a run, shared as in apply_a. */
static void apply_b(const LoraRun *run, const LoraPart *part, const float *t, int64_t t_stride, float *y,
                    int64_t outputs) {
    const int64_t end = run->first_row + run->num_rows;
    #pragma omp for collapse(2) schedule(static) nowait
    for (int64_t first = run->first_row; first < end; first += TILE)
        for (int64_t c = 0; c < part->outputs; c += TILE_VECTORS * LANES) {
            const float *b = part->b + c / PANEL * part->rank * PANEL + c % PANEL,
                        *from = t + first * t_stride;
            const int64_t left = part->outputs - c;
            float *to = y + first * outputs + part->start + c;
            if (end - first >= TILE) {
                multiply_b(TILE, b, part->rank, from, t_stride, to, outputs, left);
                continue;
            }
            for (int64_t r = first; r < end; r++, from += t_stride, to += outputs)
                multiply_b(1, b, part->rank, from, t_stride, to, outputs, left);
        }
}

/* The most ranks that the parts of one run have together. */
static int64_t max_ranks(const LoraRun *runs, int64_t num_runs, int64_t first_part, int64_t num_parts) {
    int64_t most = 0;
    for (const LoraRun *run = runs; run < runs + num_runs; run++) {
        int64_t sum = 0;
        for (int64_t p = first_part; p < first_part + num_parts; p++) sum += run->parts[p].rank;
        most = sum > most ? sum : most;
    }
    return most;
}

void add_lora(const LoraRun *runs, int64_t num_runs, int64_t first_part, int64_t num_parts, const float *x,
              int64_t inputs, float *y, int64_t outputs) {
    const LoraRun *end = runs + num_runs;
    const int64_t end_part = first_part + num_parts,
                  stride = max_ranks(runs, num_runs, first_part, num_parts);
    if (!stride) return;
    float *t =
        allocate((end[-1].first_row + end[-1].num_rows) * stride * 4); /* a row's ranks, part after part */
    #pragma omp parallel
    {
        for (const LoraRun *run = runs; run < end; run++)
            for (int64_t p = first_part, at = 0; p < end_part; at += run->parts[p++].rank)
                apply_a(run, run->parts + p, x, inputs, t + at, stride);
        #pragma omp barrier
        for (const LoraRun *run = runs; run < end; run++)
            for (int64_t p = first_part, at = 0; p < end_part; at += run->parts[p++].rank)
                if (run->parts[p].rank) apply_b(run, run->parts + p, t + at, stride, y, outputs);
    }
    free(t);
}
