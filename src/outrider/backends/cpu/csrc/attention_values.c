/* Sums of a block: weight * v over the keys of each row.
 *
 * Computed: V of some keys is put into lines of words, one dimension a lane; then every query adds its weight
 * times each line.  A line is one key, for PAIRS two neighbours.
 * Order: keys by position, in one accumulator a dimension; of a pair the second key comes first.
 * Exact: lanes are dimensions, and pairs are counted from the first key of the row, so that the rows of a
 * block have the same ones. */
#include "attention_block.h"
#include "int8.h"

enum { MOST_QUERIES = 4 };                        /* that are added to together */
enum { SUM_VECTORS = LANES == 8 ? 2 : 4 };        /* vectors of a query's sums in registers */

/* Vector c of a line.  bfloat16: the vectors of even dimensions come before those of odd ones; in PAIRS the
 * line is that of two keys, `next` being null if there is no second one. */
INLINE vuint line_vector(const int form, const word *row, const word *next, int64_t words, int64_t c) {
    if (form == WIDE) return *(const vuint *)(row + c);
    if (form == BYTES) return (vuint)widen_bytes((const int8_t *)row + c);
    const int odd = c >= words;
    const vuint a = *(const vuint *)(row + c - odd * words);
    if (form == HALF) return odd ? (vuint)odd_bfloat16(a) : (vuint)even_bfloat16(a);
    const vuint b = next ? *(const vuint *)(next + c - odd * words) : (vuint){0};
    return odd ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
}

/* Values of up to VALUE_LINES lines: in the tile, or still in the pool. */
typedef struct {
    int64_t count;
    const word *tile; /* [count,padded_dim], or null */
    const word *rows[VALUE_LINES], *next[VALUE_LINES];
} Lines;

/* Lines of the keys j ... end - 1. */
INLINE void find_lines(const int form, const Block *b, const KeyList *keys, int64_t j, int64_t end,
                       Lines *lines) {
    const int64_t words = row_words(form, b->padded_dim);
    lines->tile = 0;
    for (lines->count = 0; j < end; lines->count++) {
        lines->rows[lines->count] = row_of_key(form, b->value_rows, keys, j++, words);
        lines->next[lines->count] = 0;
        if (form == PAIRS && j < end)
            lines->next[lines->count] = row_of_key(form, b->value_rows, keys, j++, words);
    }
}

/* Puts the lines into the tile. */
INLINE void fill_tile(const int form, const Block *b, Lines *lines) {
    const int64_t dims = b->padded_dim, words = row_words(form, dims);
    for (int64_t l = 0; l < lines->count; l++)
        for (int64_t c = 0; c < dims; c += LANES)
            *(vuint *)(b->tile + l * dims + c) = line_vector(form, lines->rows[l], lines->next[l], words, c);
    lines->tile = b->tile;
}

/* Adds the lines to the dimensions c ... c + vectors * LANES - 1 of the sums of `count` queries.  weights:
 * word of the first query for the first line. */
INLINE void add_slice(const int form, const int in_tile, const int count, const int vectors, const Block *b,
                      const Lines *lines, const word *weights, float *sums_of_queries, int64_t c) {
    const int64_t dims = b->padded_dim, words = row_words(form, dims);
    float *to = sums_of_queries + c;
    vfloat sums[MOST_QUERIES][SUM_VECTORS];
    for (int i = 0; i < count; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = load(to + i * dims + v * LANES);
    for (int64_t l = 0; l < lines->count; l++) {
        vuint line[SUM_VECTORS];
        for (int v = 0; v < vectors; v++)
            line[v] = in_tile ? *(const vuint *)(lines->tile + l * dims + c + v * LANES)
                              : line_vector(form, lines->rows[l], lines->next[l], words, c + v * LANES);
        for (int i = 0; i < count; i++) {
            const vuint weight = (vuint){0} + weights[i * b->stride + l];
            for (int v = 0; v < vectors; v++)
                sums[i][v] = form == PAIRS ? dot_pairs(sums[i][v], line[v], weight)
                                           : multiply_add((vfloat)line[v], (vfloat)weight, sums[i][v]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int v = 0; v < vectors; v++) store(to + i * dims + v * LANES, sums[i][v]);
}

/* first_line: of the query, that of lines[0]. */
INLINE void add_lines(const int form, const int in_tile, const int count, const Block *b, const Lines *lines,
                      int64_t query, int64_t first_line) {
    const word *weights = (const word *)b->scores + query * b->stride + first_line;
    float *sums = b->sums + query * b->padded_dim;
    int64_t c = 0;
    for (; c + SUM_VECTORS * LANES <= b->padded_dim; c += SUM_VECTORS * LANES)
        add_slice(form, in_tile, count, SUM_VECTORS, b, lines, weights, sums, c);
    for (; c < b->padded_dim; c += LANES) add_slice(form, in_tile, count, 1, b, lines, weights, sums, c);
}

/* The last 1 to MOST_QUERIES queries of a group. */
INLINE void add_last(const int form, const int in_tile, int64_t count, const Block *b, const Lines *lines,
                     int64_t query, int64_t first_line) {
    switch (count) {
        case 4: add_lines(form, in_tile, 4, b, lines, query, first_line); break;
        case 3: add_lines(form, in_tile, 3, b, lines, query, first_line); break;
        case 2: add_lines(form, in_tile, 2, b, lines, query, first_line); break;
        case 1: add_lines(form, in_tile, 1, b, lines, query, first_line); break;
    }
}

/* Adds weight * v of the keys j ... end - 1 to the sums of `queries` queries from `query` on.  PAIRS: j is
 * even. */
INLINE void add_keys(const int form, const Block *b, const KeyList *keys, int64_t j, int64_t end,
                     int64_t query, int64_t queries) {
    const int tiles = form == PAIRS || form == BYTES; /* the others cost less than a tile */
    const int64_t line_keys = form == PAIRS ? 2 : 1, most = VALUE_LINES * line_keys;
    for (; j < end; j += most) {
        Lines lines;
        const int64_t at = j / line_keys, last = query + queries;
        find_lines(form, b, keys, j, min64(j + most, end), &lines);
        if (tiles && queries > MOST_QUERIES) fill_tile(form, b, &lines);
        int64_t next = query;
        for (; next + MOST_QUERIES < last; next += MOST_QUERIES)
            add_lines(form, tiles, MOST_QUERIES, b, &lines, next, at);
        if (lines.tile)
            add_last(form, 1, last - next, b, &lines, next, at);
        else
            add_last(form, 0, last - next, b, &lines, next, at);
    }
}

/* BYTES: the step of the value of key j. */
INLINE float value_step(const Block *b, const KeyList *keys, int64_t j) {
    const int64_t words = row_words(BYTES, b->padded_dim);
    return step_of_row(row_of_key(BYTES, b->value_rows, keys, j, words), words);
}

/* BYTES: weights *= the steps of the values.  The longest table is read once for all rows. */
static void weigh_steps(const Block *b) {
    const KeyList *longest = &b->keys[b->longest];
    const int64_t most = table_keys(longest);
    for (int64_t j = 0; j < most; j++) b->steps[j] = value_step(b, longest, j);
    for (int64_t query = 0; query < b->num_queries; query++) {
        const KeyList *keys = &b->keys[query / b->num_heads];
        const int64_t in_table = table_keys(keys), whole = in_table / LANES * LANES;
        float *weights = b->scores + query * b->stride;
        for (int64_t j = 0; j < whole; j += LANES) store(weights + j, load(weights + j) * load(b->steps + j));
        for (int64_t j = whole; j < in_table; j++) weights[j] *= b->steps[j];
        for (int64_t j = in_table; j < keys->count; j++) weights[j] *= value_step(b, keys, j);
    }
}

/* The keys of the table that every row sees, then each row's others. */
INLINE void add_rows(const int form, const Block *b) {
    int64_t shared = table_keys(&b->keys[0]);
    for (int64_t i = 1; i < b->num_rows; i++) shared = min64(shared, table_keys(&b->keys[i]));
    if (form == PAIRS) shared -= shared % 2;
    memset(b->sums, 0, (size_t)(b->num_queries * b->padded_dim) * 4);
    add_keys(form, b, &b->keys[0], 0, shared, 0, b->num_queries);
    for (int64_t i = 0; i < b->num_rows; i++)
        add_keys(form, b, &b->keys[i], shared, b->keys[i].count, i * b->num_heads, b->num_heads);
}

void add_block(int form, const Block *b) {
    switch (form) {
        case WIDE: add_rows(WIDE, b); break;
        case HALF: add_rows(HALF, b); break;
        case PAIRS: add_rows(PAIRS, b); break;
        case BYTES:
            weigh_steps(b);
            add_rows(BYTES, b);
            break;
    }
}
