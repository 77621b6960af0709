/* Scores of a block: q k^T * scale.
 *
 * Computed: a vector has one word of LANES keys.  To that end LANES words of LANES keys are transposed in
 * registers; then every query multiplies its own words with these vectors, one after the other.
 * Order: words of a head ascending, in one accumulator a key; of a pair of bfloat16 numbers the odd one comes
 * first (PAIRS) or the even one (HALF).  Between LANES words and the next the sums wait in memory.
 * Exact: lanes are keys, so no sum crosses lanes: a score depends on one query and one key alone, whichever
 * lane the key is in. */
#include "attention_block.h"

#define SHUFFLE_WORDS(a, b, ...) ((vuint)SHUFFLE((vint)(a), (vint)(b), __VA_ARGS__))

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

/* sums + a word of LANES keys * that of a query; for HALF its even and its odd element are words. */
INLINE vfloat multiply_word(const int form, vfloat sums, vuint k, const word *q, const word *odd_q) {
    const vuint first = (vuint){0} + *q;
    if (form == PAIRS) return dot_pairs(sums, k, first);
    if (form == WIDE) return multiply_add((vfloat)k, (vfloat)first, sums);
    const vuint second = (vuint){0} + *odd_q;
    return multiply_add(odd_bfloat16(k), (vfloat)second, multiply_add(even_bfloat16(k), (vfloat)first, sums));
}

/* Part of the scores of LANES keys for `count` queries: words first ... first + LANES - 1. */
INLINE void score_queries(const int form, const int count, const Block *b, const vuint *k, int64_t first,
                          int64_t query, float *scores) {
    const int64_t dims = b->padded_dim, words = row_words(form, dims);
    const word *q = b->queries + query * dims + first;
    vfloat sums[MOST_QUERIES];
    scores += query * b->stride;
    for (int i = 0; i < count; i++) sums[i] = first ? load(scores + i * b->stride) : (vfloat){0};
    for (int w = 0; w < LANES; w++)
        for (int i = 0; i < count; i++)
            sums[i] = multiply_word(form, sums[i], k[w], q + i * dims + w, q + i * dims + words + w);
    const float factor = first + LANES < words ? 1 : b->scale;
    for (int i = 0; i < count; i++) store(scores + i * b->stride, sums[i] * factor);
}

/* Prefetches K of LANES keys from j + KEYS_AHEAD on.  The hardware does not know where the next rows of a
 * request lie. */
INLINE void prefetch_keys(const Block *b, const KeyList *keys, int64_t j, int64_t words) {
    const int64_t end = min64(j + KEYS_AHEAD + LANES, keys->count);
    for (int64_t i = j + KEYS_AHEAD; i < end; i++)
        for (int64_t w = 0; w < words; w += 16) /* a cache line */
            __builtin_prefetch(row_of_key(b->key_rows, keys, i, words) + w);
}

/* Scores of the keys j ... end - 1 for `queries` queries from `first_query` on.  Writes whole vectors: lanes
 * past the last key repeat it. */
INLINE void score_keys(const int form, const Block *b, const KeyList *keys, int64_t j, int64_t end,
                       int64_t first_query, int64_t queries) {
    const int64_t words = row_words(form, b->padded_dim);
    for (; j < end; j += LANES) {
        const word *rows[LANES];
        prefetch_keys(b, keys, j, words);
        for (int i = 0; i < LANES; i++) rows[i] = row_of_key(b->key_rows, keys, min64(j + i, end - 1), words);
        for (int64_t w = 0; w < words; w += LANES) {
            int64_t query = first_query, left = queries;
            float *scores = b->scores + j;
            vuint k[LANES];
            transpose(rows, k);
            for (int i = 0; i < LANES; i++) rows[i] += LANES;
            for (; left >= MOST_QUERIES; left -= MOST_QUERIES, query += MOST_QUERIES)
                score_queries(form, MOST_QUERIES, b, k, w, query, scores);
            if (left & 4) score_queries(form, 4, b, k, w, query, scores), query += 4;
            if (left & 2) score_queries(form, 2, b, k, w, query, scores), query += 2;
            if (left & 1) score_queries(form, 1, b, k, w, query, scores);
        }
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
INLINE void score_rows(const int form, const Block *b) {
    const KeyList *table = &b->keys[b->longest];
    score_keys(form, b, table, 0, table_keys(table), 0, b->num_queries);
    for (int64_t i = 0; i < b->num_rows; i++)
        score_keys(form, b, &b->keys[i], table_keys(&b->keys[i]), b->keys[i].count, i * b->num_heads,
                   b->num_heads);
}

void score_block(int form, const Block *b) {
    order_queries(form, b);
    switch (form) {
        case WIDE: score_rows(WIDE, b); break;
        case HALF: score_rows(HALF, b); break;
        case PAIRS: score_rows(PAIRS, b); break;
    }
}
