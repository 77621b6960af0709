/* Scores of a block: q k^T * scale.
 *
 * Computed, in PAIRS: LANES words of LANES keys are transposed in registers, so that a vector has one word of
 * all these keys; then every query multiplies its own words with these vectors, one after the other.
 * In WIDE and HALF, where transposing costs more than it saves: the elements of a key lie in the lanes; their
 * products with a query are added across lanes, for LANES keys at a time.
 * Order, in PAIRS: words of a head ascending, in one accumulator a key, which waits in memory between LANES
 * words and the next.  Otherwise one accumulator a lane for each half of a head (HALF: its even and its odd
 * elements), added across lanes by a fixed tree.
 * Exact: a score depends on one query and one key alone, whichever lane the key is in. */
#include "attention_block.h"

#define SHUFFLE_WORDS(a, b, ...) ((vuint)SHUFFLE((vint)(a), (vint)(b), __VA_ARGS__))

/* ---- PAIRS */

/* Queries that are multiplied together: LANES vectors of keys lie in registers beside their sums. */
enum { MOST_QUERIES = LANES == 8 ? 4 : 8 };

/* v[4 * k + c] = quarter k of v[c], quarter k of v[4 + c] ... for c < 4 and every quarter k. */
INLINE void gather_quarters(vuint *v) {
#ifdef __AVX512F__
    for (int c = 0; c < 4; c++) {
        const vuint a = v[c], b = v[4 + c], d = v[8 + c], e = v[12 + c];
        const vuint even_ab = SHUFFLE_WORDS(a, b, EVEN_QUARTERS), odd_ab = SHUFFLE_WORDS(a, b, ODD_QUARTERS),
                    even_de = SHUFFLE_WORDS(d, e, EVEN_QUARTERS), odd_de = SHUFFLE_WORDS(d, e, ODD_QUARTERS);
        v[c] = SHUFFLE_WORDS(even_ab, even_de, EVEN_QUARTERS);
        v[4 + c] = SHUFFLE_WORDS(odd_ab, odd_de, EVEN_QUARTERS);
        v[8 + c] = SHUFFLE_WORDS(even_ab, even_de, ODD_QUARTERS);
        v[12 + c] = SHUFFLE_WORDS(odd_ab, odd_de, ODD_QUARTERS);
    }
#elif defined __ARM_NEON
    (void)v; /* a vector is one quarter */
#else
    for (int c = 0; c < 4; c++) {
        const vuint a = v[c], b = v[4 + c];
        v[c] = SHUFFLE_WORDS(a, b, EVEN_QUARTERS);
        v[4 + c] = SHUFFLE_WORDS(a, b, ODD_QUARTERS);
    }
#endif
}

/* v [LANES]: v[w] has word w of every row.  rows [LANES], LANES words each. */
INLINE void transpose(const word *const *rows, vuint *v) {
    for (int i = 0; i < LANES; i += 4) { /* four rows, by squares of four words */
        const vuint a = *(const vuint *)rows[i], b = *(const vuint *)rows[i + 1],
                    c = *(const vuint *)rows[i + 2], d = *(const vuint *)rows[i + 3];
        const vuint even_ab = SHUFFLE_WORDS(a, b, EVEN_IN_QUARTERS),
                    odd_ab = SHUFFLE_WORDS(a, b, ODD_IN_QUARTERS),
                    even_cd = SHUFFLE_WORDS(c, d, EVEN_IN_QUARTERS),
                    odd_cd = SHUFFLE_WORDS(c, d, ODD_IN_QUARTERS);
        v[i] = SHUFFLE_WORDS(even_ab, even_cd, EVEN_IN_QUARTERS);
        v[i + 1] = SHUFFLE_WORDS(odd_ab, odd_cd, EVEN_IN_QUARTERS);
        v[i + 2] = SHUFFLE_WORDS(even_ab, even_cd, ODD_IN_QUARTERS);
        v[i + 3] = SHUFFLE_WORDS(odd_ab, odd_cd, ODD_IN_QUARTERS);
    }
    gather_quarters(v);
}

/* Part of the scores of LANES keys for `count` queries: words first ... first + LANES - 1, as k [LANES]. */
INLINE void add_words(const int count, const Block *b, const vuint *k, int64_t first, int64_t query,
                      float *scores) {
    const int64_t words = b->padded_dim / 2;
    const word *q = b->queries + query * b->padded_dim + first;
    vfloat sums[MOST_QUERIES];
    scores += query * b->stride;
    for (int i = 0; i < count; i++) sums[i] = first ? load(scores + i * b->stride) : (vfloat){0};
    for (int w = 0; w < LANES; w++)
        for (int i = 0; i < count; i++)
            sums[i] = dot_pairs(sums[i], k[w], (vuint){0} + q[i * b->padded_dim + w]);
    const float factor = first + LANES < words ? 1 : b->scale;
    for (int i = 0; i < count; i++) store(scores + i * b->stride, sums[i] * factor);
}

/* Scores of LANES keys by pairs. */
INLINE void multiply_pairs(const Block *b, const word *const *rows, int64_t query, int64_t left,
                           float *scores) {
    const word *at[LANES];
    memcpy(at, rows, sizeof at);
    for (int64_t first = 0; first < b->padded_dim / 2; first += LANES) {
        int64_t i = query, count = left;
        vuint k[LANES];
        transpose(at, k);
        for (int lane = 0; lane < LANES; lane++) at[lane] += LANES;
        for (; count >= MOST_QUERIES; count -= MOST_QUERIES, i += MOST_QUERIES)
            add_words(MOST_QUERIES, b, k, first, i, scores);
        if (count & 4) add_words(4, b, k, first, i, scores), i += 4;
        if (count & 2) add_words(2, b, k, first, i, scores), i += 2;
        if (count & 1) add_words(1, b, k, first, i, scores);
    }
}

/* ---- WIDE and HALF */

/* Two vectors of a row: c and half + c of the order that queries have. */
typedef struct {
    vfloat low, high;
} VectorPair;
INLINE VectorPair load_pair(const int form, const word *row, int64_t c, int64_t half) {
    if (form == WIDE) return (VectorPair){load((const float *)row + c * LANES),
                                          load((const float *)row + (half + c) * LANES)};
    const vuint pairs = *(const vuint *)(row + c * LANES);
    return (VectorPair){even_bfloat16(pairs), odd_bfloat16(pairs)};
}

/* Lane i: the sum of the lanes of v[i], for LANES vectors and always by the same tree. */
INLINE vfloat sum_each(const vfloat *v) {
    vfloat w[4]; /* quarter k of w[c]: parts of the sum of v[4 k + c] */
    for (int c = 0; c < 4; c++) w[c] = sum_quarters(v + c);
    const vfloat y = SHUFFLE(w[0], w[1], LOW_PAIRS) + SHUFFLE(w[0], w[1], HIGH_PAIRS),
                 z = SHUFFLE(w[2], w[3], LOW_PAIRS) + SHUFFLE(w[2], w[3], HIGH_PAIRS);
    return SHUFFLE(y, z, EVEN_IN_QUARTERS) + SHUFFLE(y, z, ODD_IN_QUARTERS);
}

/* Scores of LANES keys for `count` queries. */
INLINE void dot_group(const int form, const int64_t padded_dim, const int count, const Block *b,
                      const word *const *rows, int64_t query, float *scores) {
    const int64_t half = padded_dim / LANES / 2;
    const float *q = (const float *)b->queries + query * padded_dim;
    vfloat dots[MAX_GROUP][LANES];
    for (int i = 0; i < LANES; i++) {
        vfloat low[MAX_GROUP], high[MAX_GROUP];
        for (int g = 0; g < count; g++) low[g] = high[g] = (vfloat){0};
        for (int64_t c = 0; c < half; c++) {
            const VectorPair k = load_pair(form, rows[i], c, half);
            for (int g = 0; g < count; g++) {
                low[g] += load(q + g * padded_dim + c * LANES) * k.low;
                high[g] += load(q + g * padded_dim + (half + c) * LANES) * k.high;
            }
        }
        for (int g = 0; g < count; g++) dots[g][i] = low[g] + high[g];
    }
    for (int g = 0; g < count; g++) store(scores + (query + g) * b->stride, sum_each(dots[g]) * b->scale);
}

/* Scores of LANES keys by products across the lanes. */
INLINE void multiply_rows(const int form, const int64_t padded_dim, const Block *b, const word *const *rows,
                          int64_t query, int64_t left, float *scores) {
    for (; left >= 4; left -= 4, query += 4) dot_group(form, padded_dim, 4, b, rows, query, scores);
    switch (left) {
        case 3: dot_group(form, padded_dim, 3, b, rows, query, scores); break;
        case 2: dot_group(form, padded_dim, 2, b, rows, query, scores); break;
        case 1: dot_group(form, padded_dim, 1, b, rows, query, scores); break;
    }
}

/* ---- */

/* Prefetches K of LANES keys from j + KEYS_AHEAD on.  The hardware does not know where the next rows of a
 * request lie. */
INLINE void prefetch_keys(const Block *b, const KeyList *keys, int64_t j, int64_t words) {
    const int64_t end = min64(j + KEYS_AHEAD + LANES, keys->count);
    for (int64_t i = j + KEYS_AHEAD; i < end; i++)
        for (int64_t w = 0; w < words; w += 16) /* a cache line */
            __builtin_prefetch(row_of_key(b->key_rows, keys, i, words) + w);
}

/* Scores of the keys j ... end - 1 for `queries` queries from `query` on.  Writes whole vectors: lanes past
 * the last key repeat it. */
INLINE void score_keys(const int form, const int64_t padded_dim, const Block *b, const KeyList *keys,
                       int64_t j, int64_t end, int64_t query, int64_t queries) {
    const int64_t words = row_words(form, padded_dim);
    for (; j < end; j += LANES) {
        const word *rows[LANES];
        prefetch_keys(b, keys, j, words);
        for (int i = 0; i < LANES; i++) rows[i] = row_of_key(b->key_rows, keys, min64(j + i, end - 1), words);
        if (form == PAIRS)
            multiply_pairs(b, rows, query, queries, b->scores + j);
        else
            multiply_rows(form, padded_dim, b, rows, query, queries, b->scores + j);
    }
}

/* The queries as rows of words: [padded_dim]; even dimensions, then odd ones [padded_dim]; or pairs
 * [padded_dim/2]. */
static void order_queries(int form, const Block *b) {
    const int64_t dims = b->padded_dim;
    for (int64_t i = 0; i < b->num_queries; i++) {
        float *to = (float *)(b->queries + i * dims);
        if (form == WIDE)
            memcpy(to, b->q[i], (size_t)dims * 4);
        else if (form == PAIRS)
            round_pairs(b->q[i], dims, (bfloat16 *)to);
        else
            for (int64_t d = 0; d < dims / 2; d++) {
                to[d] = b->q[i][2 * d];
                to[dims / 2 + d] = b->q[i][2 * d + 1];
            }
    }
}

/* Keys of the table for all rows at once, then the path of each row. */
INLINE void score_rows(const int form, const int64_t padded_dim, const Block *b) {
    const KeyList *table = &b->keys[b->longest];
    score_keys(form, padded_dim, b, table, 0, table_keys(table), 0, b->num_queries);
    for (int64_t i = 0; i < b->num_rows; i++)
        score_keys(form, padded_dim, b, &b->keys[i], table_keys(&b->keys[i]), b->keys[i].count,
                   i * b->num_heads, b->num_heads);
}

/* Constant sizes keep queries in registers where they are multiplied across the lanes. */
void score_block(int form, const Block *b) {
    order_queries(form, b);
    if (form == PAIRS)
        score_rows(PAIRS, b->padded_dim, b);
    else if (form == WIDE)
        score_rows(WIDE, b->padded_dim, b);
    else if (b->padded_dim == 64)
        score_rows(HALF, 64, b);
    else if (b->padded_dim == 128)
        score_rows(HALF, 128, b);
    else
        score_rows(HALF, b->padded_dim, b);
}
