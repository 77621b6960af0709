/* Scores of a block: q k^T * scale.
 *
 * PAIRS and BYTES
 *   Computed: LANES words of LANES keys are transposed in registers, so that a vector has one word of all
 *   these keys; then every query multiplies its own words with these vectors, one after the other.
 *   Order: words of a head ascending, in one accumulator a key, which waits in memory between LANES words and
 *   the next.  In BYTES it is an integer, whose order does not matter.
 * WIDE and HALF, where transposing costs more than it saves
 *   Computed: products of a key with a query, one dimension a lane, and their sums, for LANES keys at a time.
 *   Order: one accumulator a lane for each half of a head (HALF: its even and its odd elements), then across
 *   lanes by a fixed tree.
 * Exact: a score depends on one query and one key alone, whichever lane the key is in. */
#include "attention_block.h"
#include "attention_bytes.h"

#define SHUFFLE_WORDS(a, b, ...) ((vuint)SHUFFLE((vint)(a), (vint)(b), __VA_ARGS__))

/* ---- PAIRS and BYTES */

/* Queries that are multiplied together: registers hold their sums beside LANES vectors of keys. */
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

/* LANES keys: LANES words of them, from `first` on, and in BYTES their steps. */
typedef struct {
    vuint words[LANES];
    float steps[LANES];
    int64_t first;
} Keys;

/* Part of the scores for `count` queries: what the words add to them. */
INLINE void add_words(const int form, const int count, const Block *b, const Keys *keys, int64_t query,
                      float *scores) {
    const int64_t dims = b->padded_dim, words = row_words(form, dims);
    const int is_last = keys->first + LANES >= words;
    const word *q = b->queries + query * dims + keys->first;
    vfloat sums[MOST_QUERIES]; /* integers in BYTES */
    scores += query * b->stride;
    for (int i = 0; i < count; i++) sums[i] = keys->first ? load(scores + i * b->stride) : (vfloat){0};
    for (int w = 0; w < LANES; w++)
        for (int i = 0; i < count; i++) {
            const vuint of_query = (vuint){0} + q[i * dims + w];
            sums[i] = form == PAIRS ? dot_pairs(sums[i], keys->words[w], of_query)
                                    : (vfloat)dot_bytes((vint)sums[i], keys->words[w], (vint)of_query);
        }
    for (int i = 0; i < count; i++) {
        const RoundedQuery *rounded = b->rounded + query + i;
        if (is_last && form == PAIRS) sums[i] *= b->scale;
        if (is_last && form == BYTES)
            sums[i] = __builtin_convertvector((vint)sums[i] + rounded->start, vfloat) *
                      (load(keys->steps) * rounded->step);
        store(scores + i * b->stride, sums[i]);
    }
}

/* Scores of LANES keys for `left` queries from `query` on.  In BYTES what lies behind a row meets zeros of
 * the queries: the pool has slack at its end. */
INLINE void multiply_words(const int form, const Block *b, const word *const *rows, int64_t query,
                           int64_t left, float *scores) {
    const int64_t words = row_words(form, b->padded_dim);
    const word *at[LANES];
    Keys keys;
    memcpy(at, rows, sizeof at);
    if (form == BYTES)
        for (int i = 0; i < LANES; i++) keys.steps[i] = step_of_row(rows[i], words);
    for (keys.first = 0; keys.first < words; keys.first += LANES) {
        int64_t i = query, count = left;
        transpose(at, keys.words);
        for (int lane = 0; lane < LANES; lane++) {
            at[lane] += LANES;
            if (form == BYTES) keys.words[lane] ^= 0x80808080u; /* as dot_bytes takes them */
        }
        for (; count >= MOST_QUERIES; count -= MOST_QUERIES, i += MOST_QUERIES)
            add_words(form, MOST_QUERIES, b, &keys, i, scores);
        if (count & 4) add_words(form, 4, b, &keys, i, scores), i += 4;
        if (count & 2) add_words(form, 2, b, &keys, i, scores), i += 2;
        if (count & 1) add_words(form, 1, b, &keys, i, scores);
    }
}

/* ---- WIDE and HALF */

enum { GROUP = 4 }; /* queries that are multiplied together */

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
INLINE vfloat sum_floats(const vfloat *v) {
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
    vfloat dots[GROUP][LANES];
    for (int i = 0; i < LANES; i++) {
        vfloat low[GROUP], high[GROUP];
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
    for (int g = 0; g < count; g++) store(scores + (query + g) * b->stride, sum_floats(dots[g]) * b->scale);
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

/* ---- all forms */

/* Fetches K of LANES keys from j + KEYS_AHEAD on, as if they were neighbours, which they are as a rule. */
INLINE void fetch_keys(const int form, const Block *b, const KeyList *keys, int64_t j, int64_t words) {
    if (j + KEYS_AHEAD >= keys->count) return;
    const word *at = row_of_key(form, b->key_rows, keys, j + KEYS_AHEAD, words);
    for (int64_t w = 0; w < LANES * row_stride(form, words); w += 16) /* a cache line */
        fetch_line(b->fetches, at + w);
}

/* rows [LANES] of the keys j ...; those past `end` repeat the last one before it.  Whole vectors of the table
 * are the rule, and need no branch a key. */
INLINE void find_rows(const int form, const Block *b, const KeyList *keys, int64_t j, int64_t end,
                      int64_t words, const word **rows) {
    const int64_t entry = keys->first + j, stride = row_stride(form, words);
    if (j + LANES <= end && entry + LANES <= keys->table_length)
        for (int i = 0; i < LANES; i++) rows[i] = (const word *)b->key_rows + keys->table[entry + i] * stride;
    else
        for (int i = 0; i < LANES; i++)
            rows[i] = row_of_key(form, b->key_rows, keys, min64(j + i, end - 1), words);
}

/* Scores of the keys j ... end - 1 for `queries` queries from `query` on.  Writes whole vectors: lanes past
 * the last key repeat it. */
INLINE void score_keys(const int form, const int64_t padded_dim, const Block *b, const KeyList *keys,
                       int64_t j, int64_t end, int64_t query, int64_t queries) {
    const int64_t words = row_words(form, padded_dim);
    for (; j < end; j += LANES) {
        const word *rows[LANES];
        fetch_keys(form, b, keys, j, words);
        find_rows(form, b, keys, j, end, words, rows);
        if (form == PAIRS || form == BYTES)
            multiply_words(form, b, rows, query, queries, b->scores + j);
        else
            multiply_rows(form, padded_dim, b, rows, query, queries, b->scores + j);
    }
}

/* A query in 8 bits, padded with zeros to LANES words. */
static void round_query(const float *q, int64_t dims, float scale, int8_t *to, RoundedQuery *rounded) {
    const float magnitude = max_magnitude(q, dims);
    const uint32_t sum = (uint32_t)quantize(q, dims, magnitude, to);
    const int64_t bytes = divide_up(dims, 4 * LANES) * 4 * LANES;
    memset(to + dims, 0, (size_t)(bytes - dims));
    *rounded = (RoundedQuery){(int32_t)(sum * (uint32_t)BYTE_START), magnitude / 127.0f * scale};
}

/* The queries as rows of words: [padded_dim]; even dimensions, then odd ones [padded_dim]; pairs
 * [padded_dim/2]; or bytes [padded_dim/4]. */
static void order_queries(int form, Block *b) {
    const int64_t dims = b->padded_dim;
    for (int64_t i = 0; i < b->num_queries; i++) {
        float *to = (float *)(b->queries + i * dims);
        if (form == WIDE)
            memcpy(to, b->q[i], (size_t)dims * 4);
        else if (form == PAIRS)
            round_pairs(b->q[i], dims, (bfloat16 *)to);
        else if (form == BYTES)
            round_query(b->q[i], dims, b->scale, (int8_t *)to, b->rounded + i);
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
void score_block(int form, Block *b) {
    order_queries(form, b);
    if (form == PAIRS)
        score_rows(PAIRS, b->padded_dim, b);
    else if (form == BYTES)
        score_rows(BYTES, b->padded_dim, b);
    else if (form == WIDE)
        score_rows(WIDE, b->padded_dim, b);
    else if (b->padded_dim == 64)
        score_rows(HALF, 64, b);
    else if (b->padded_dim == 128)
        score_rows(HALF, 128, b);
    else
        score_rows(HALF, b->padded_dim, b);
}
