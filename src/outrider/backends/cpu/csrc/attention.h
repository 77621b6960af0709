/* The keys of a row, the score modifier and the softmax. */
#pragma once
#include "simd.h"

enum { KEYS_AHEAD = 64 }; /* how many keys ahead K and V are fetched */

/* The keys of a row: entries first ... first + count - 1 of its table followed by its path.
 * Behind the first `pinned` entries, entry i has position i + shift. */
typedef struct {
    const int32_t *table, *path;
    int64_t table_length, first, count, pinned, shift;
} KeyList;

INLINE int64_t key_slot(const KeyList *keys, int64_t j) {
    const int64_t entry = keys->first + j;
    return entry < keys->table_length ? keys->table[entry] : keys->path[entry - keys->table_length];
}

/* Applies the score modifier to the scores [count] of one query head; returns how many scores there are,
 * with the sink. */
INLINE int64_t modify_scores(const ScoreModifier *modifier, int64_t head, const KeyList *keys,
                             float *scores) {
    int64_t count = keys->count;
    if (!modifier) return count;
    if (modifier->cap > 0)
        for (int64_t j = 0; j < count; j++) scores[j] = modifier->cap * tanhf(scores[j] / modifier->cap);
    if (modifier->slopes)
        for (int64_t j = 0; j < count; j++) { /* by distance in the text: the row is at the last key */
            const int64_t left_out = keys->first + j < keys->pinned ? keys->shift : 0;
            scores[j] += modifier->slopes[head] * (float)(j + 1 - count - left_out);
        }
    if (modifier->sinks) scores[count++] = modifier->sinks[head];
    return count;
}

/* scores [count] = exp(scores - maximum), in place; returns 1 / sum.  Needs space for the next multiple of
 * LANES.
 * The padding weighs 0, and the sum is taken lane by lane, then across lanes: its order depends on the
 * number of keys alone. */
INLINE float softmax(float *scores, int64_t count) {
    const int64_t padded = divide_up(count, LANES) * LANES;
    for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;
    vfloat largest = load(scores), sum = {0};
    for (int64_t j = LANES; j < padded; j += LANES) largest = max_lanes(load(scores + j), largest);
    float maximum = largest[0];
    for (int i = 1; i < LANES; i++) maximum = largest[i] > maximum ? largest[i] : maximum;
    for (int64_t j = 0; j < padded; j += LANES) {
        const vfloat weights = vexp(load(scores + j) - maximum);
        sum += weights;
        store(scores + j, weights);
    }
    return 1.0f / sum_lanes(sum);
}

/* Keys of row r behind a window, see Attention. */
KeyList keys_of_row(const Rows *rows, int64_t r, int64_t window);
