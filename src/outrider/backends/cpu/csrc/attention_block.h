/* A block of rows that attention.c computes together: what attention_scores.c and attention_values.c take.
 *
 * form            keys and values       what a score or a sum takes at a time
 * WIDE            float32               one product
 * HALF            bfloat16, widened     one product
 * PAIRS           bfloat16              a pair of products (pairs.h); queries and weights are rounded to
 *                                       bfloat16, for one row as for many
 * BYTES           int8, a step a head   scores: four products of integers, queries being rounded to 8 bits;
 *                                       sums: one product with the widened value
 *
 * A word is the 32 bits of a lane: a float32 number, a pair of bfloat16 numbers, or four bytes, the first one
 * in the low bits. */
#pragma once
#include "attention.h"
#include "fetch.h"
#include "pairs.h"

enum { WIDE, HALF, PAIRS, BYTES };
typedef uint32_t word __attribute__((may_alias));
typedef float float_word __attribute__((may_alias));
enum { MOST_BLOCK_QUERIES = 64 };
enum { VALUE_LINES = 32 }; /* of a tile of values: keys, for PAIRS two keys each */

/* Of a query in BYTES: what a sum of products begins with (int8.h), and what one step of it counts, times the
 * scale. */
typedef struct {
    int32_t start;
    float step;
} RoundedQuery;

/* Consecutive rows with the same first key of the same table, and some of the query heads of one K/V head.
 * Query i * num_heads + g is head g of row i. */
typedef struct {
    KeyList keys[MOST_BLOCK_QUERIES];
    const void *key_rows, *value_rows;
    int64_t num_rows, num_heads, num_queries;
    int64_t longest;                    /* row with the longest part of the table */
    const float *q[MOST_BLOCK_QUERIES]; /* [padded_dim] each */
    float inverse_sums[MOST_BLOCK_QUERIES];
    word *queries; /* space for [num_queries,padded_dim]: q as the form takes it */
    RoundedQuery rounded[MOST_BLOCK_QUERIES]; /* BYTES */
    word *tile;    /* space for [VALUE_LINES,padded_dim] */
    float *sums;   /* [num_queries,padded_dim]; bfloat16: even dimensions before odd ones */
    float *scores; /* [num_queries,stride] */
    float *steps;  /* space for [stride]: of V, BYTES */
    int64_t most_queries, padded_dim, stride;
    float scale;
    int fetches; /* where keys are fetched to (fetch.h) */
} Block;

/* Keys of a row that are in its table. */
INLINE int64_t table_keys(const KeyList *keys) {
    const int64_t in_table = keys->table_length - keys->first;
    return in_table < 0 ? 0 : min64(in_table, keys->count);
}

/* Words of a pool row. */
INLINE int64_t row_words(const int form, int64_t padded_dim) {
    return form == WIDE ? padded_dim : form == BYTES ? padded_dim / 4 : padded_dim / 2;
}

/* Words from a pool row to the next.  In BYTES the step of a row is the word behind it. */
INLINE int64_t row_stride(const int form, int64_t words) { return form == BYTES ? words + 1 : words; }

INLINE float step_of_row(const word *row, int64_t words) { return *(const float_word *)(row + words); }

/* The pool row of key j. */
INLINE const word *row_of_key(const int form, const void *rows, const KeyList *keys, int64_t j,
                              int64_t words) {
    return (const word *)rows + key_slot(keys, j) * row_stride(form, words);
}

/* attention_scores.c: scores of all queries, times the scale.  A row gets scores for keys of the table that
 * it does not see, too, and others past its last key, up to a multiple of LANES behind its table or its
 * path. */
void score_block(int form, Block *block);

/* attention_values.c: sums of all queries, for weights [num_queries,stride] in the place of the scores. */
void add_block(int form, const Block *block);
