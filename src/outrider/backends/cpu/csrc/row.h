/* A row of logits in blocks of 64, and the maximum of each block: what a pick looks at first. */
#pragma once
#include "blocks.h"
#include "threads.h"

enum { THREAD_PARTS = 8 }; /* of a row of logits, that a thread takes at a time */

/* Complete blocks lie in the row itself; the last one is copied to `tail`, padded with minus infinity. */
typedef struct {
    const float *logits;
    int64_t vocab, full_blocks, blocks;
    float max, inv_temperature; /* the largest logit, once known; 1 at temperature 0 */
    float tail[BLOCK];
} Row;

static Row make_row(const float *logits, int64_t vocab, float temperature) {
    Row row = {
        logits, vocab, vocab / BLOCK, divide_up(vocab, BLOCK), 0, temperature > 0 ? 1 / temperature : 1, {0}};
    const int64_t first = row.full_blocks * BLOCK;
    for (int64_t j = 0; j < BLOCK; j++) row.tail[j] = first + j < vocab ? logits[first + j] : -INFINITY;
    return row;
}

INLINE const float *block_at(const Row *row, int64_t b) {
    return b < row->full_blocks ? row->logits + b * BLOCK : row->tail;
}
INLINE int64_t parts_of(const Row *row) { return divide_up(row->blocks, PART); }

/* log(p / p of the best token) = (logit - max) / temperature, which is <= 0. */
INLINE float below_max(const Row *row, float logit) { return (logit - row->max) * row->inv_temperature; }
INLINE vfloat below_max_lanes(const Row *row, vfloat logits) {
    return (logits - row->max) * row->inv_temperature;
}

/* Lane i: the largest lane of v[i], for LANES vectors. */
INLINE vfloat max_each(vfloat *v) {
    for (int n = LANES / 2; n; n /= 2)
        for (int i = 0; i < n; i++)
            v[i] = max_lanes(SHUFFLE(v[2 * i], v[2 * i + 1], EVEN_LANES),
                             SHUFFLE(v[2 * i], v[2 * i + 1], ODD_LANES));
    return v[0];
}

/* Writes the maxima of the blocks of one part, from `first` on, to block_max; returns the largest. */
static float part_maxima(const Row *row, int64_t first, float *block_max) {
    float max = -INFINITY;
    for (int64_t g = first; g < first + PART; g += LANES) {
        vfloat maxima[LANES];
        for (int i = 0; i < LANES; i++) {
            maxima[i] = broadcast(-INFINITY);
            if (g + i < row->blocks) maxima[i] = block_maxima(block_at(row, g + i));
        }
        store(block_max + g, max_each(maxima));
        for (int i = 0; i < LANES; i++) max = block_max[g + i] > max ? block_max[g + i] : max;
    }
    return max;
}

/* What one part of a row adds to a result over the row.  Parts are combined in order, so the number of
 * threads changes nothing. */
typedef struct {
    float max, mass;
} PartResult;

static float max_of_parts(const PartResult *parts, int64_t count) {
    float max = -INFINITY;
    for (int64_t p = 0; p < count; p++) max = parts[p].max > max ? parts[p].max : max;
    return max;
}

typedef struct {
    const Row *row;
    float *block_max;
    PartResult *parts;
} PartLoop;

static void maxima_of_parts(const void *loop, int64_t first, int64_t end) {
    const PartLoop *l = loop;
    for (int64_t p = first; p < end; p++) l->parts[p].max = part_maxima(l->row, p * PART, l->block_max);
}

/* Writes the maxima of all blocks to block_max [row_blocks(vocab)]; returns the largest, infinity if there
 * is a NaN.
 * parts: space for parts_of(row). */
static float row_maxima(const Row *row, float *block_max, PartResult *parts) {
    const int64_t count = parts_of(row);
    parallel_for(count, THREAD_PARTS, maxima_of_parts, &(PartLoop){row, block_max, parts});
    return max_of_parts(parts, count);
}

/* The same if the linear that wrote the row has left the maxima in block_max.  It may have written more than
 * `vocab` logits. */
static float known_maxima(const Row *row, float *block_max) {
    float max = -INFINITY;
    for (int64_t b = row->blocks; b < parts_of(row) * PART; b++) block_max[b] = -INFINITY;
    if (row->full_blocks < row->blocks) block_max[row->full_blocks] = block_maximum(row->tail);
    for (int64_t b = 0; b < row->blocks; b++) max = block_max[b] > max ? block_max[b] : max;
    return max;
}

/* exp(x) for x <= 0, with a relative error of 7e-6, exact at 0 and never below 1e-38, in half the time of
 * vexp.
 * Splits x / ln 2 into an integer and a rest, and evaluates a polynomial of degree 4 in the rest. */
INLINE vfloat vexp_fast(vfloat x) {
    x = max_lanes(x, broadcast(-87.0f));
    const vfloat n = x * 1.44269504f + ROUND_MAGIC, f = x * 1.44269504f - (n - ROUND_MAGIC);
    vfloat p = f * 9.6003955171e-3f + 5.5916893825e-2f;
    p = p * f + 2.4023718463e-1f;
    p = p * f + 6.9312199484e-1f;
    p = p * f + 1.0f;
    return (vfloat)((vint)p + ((vint)n << 23));
}
