/* Attention over a paged KV pool.
 *
 * Computed: scores = q k^T * scale for all keys of a row, score modifier, softmax, then the sum of
 * weight * v.
 * Order: keys by position (table, then path), wherever they lie in the pool.  A dot product is
 * one vector accumulator for each half of a head (bfloat16: the even and the odd elements), added across
 * lanes by a fixed tree, for LANES keys at a time.  The sum over v takes one key after the other.
 * Exact: a score depends on one query and one key alone, and a row's keys come in the same order for a tree
 * node as for the token that plain decoding computes there.
 * Rows of one request make a block: they share the loads of K and V from the table, and nothing else.
 * Threads share (block, K/V head) pairs. */
#include "attention.h"
#include "memory.h"
#include "threads.h"

enum {
    BLOCK_QUERIES = 16, /* queries of a block, as far as one row does not have more */
    MAX_PAIRS = 4,      /* vector pairs of sums in registers */
    KEYS_AT_ONCE = 64,  /* keys whose V is added for one query group after the other */
};

/* Consecutive rows with the same first key of the same table, and some of the query heads of one K/V head.
 * Query i * num_heads + g is head g of row i. */
typedef struct {
    KeyList keys[BLOCK_QUERIES];
    const void *key_rows, *value_rows;
    int64_t num_rows, num_heads, num_queries;
    int64_t longest;               /* row with the longest part of the table */
    const float *q[BLOCK_QUERIES]; /* [padded_dim] each */
    float inverse_sums[BLOCK_QUERIES];
    float *ordered, *sums;         /* [num_queries,padded_dim], both in the order of load_pair */
    float *scores;                 /* [num_queries,stride] */
    int64_t stride;
    float scale;
} Block;

/* Keys of a row that are in its table. */
INLINE int64_t table_keys(const KeyList *keys) {
    const int64_t in_table = keys->table_length - keys->first;
    return in_table < 0 ? 0 : min64(in_table, keys->count);
}

/* ---- pool rows */

/* Two vectors of a pool row, c and half + c of the order in which sums are held: float32 in the order of the
 * elements, bfloat16 the even elements of a head before the odd ones, which is how widening leaves them. */
typedef struct {
    vfloat low, high;
} VectorPair;
INLINE VectorPair load_pair(const int is_bfloat16, const void *rows, int64_t row, int64_t c, int64_t half) {
    if (is_bfloat16) {
        const vuint pairs = *(const vuint *)((const bfloat16 *)rows + row + c * 2 * LANES);
        return (VectorPair){(vfloat)(pairs << 16), (vfloat)(pairs & 0xffff0000u)};
    }
    const float *at = (const float *)rows + row;
    return (VectorPair){load(at + c * LANES), load(at + (half + c) * LANES)};
}

/* Queries of a block in the order of `load_pair`: to [num_queries,padded_dim]. */
static void order_queries(int is_bfloat16, int64_t padded_dim, const Block *b, float *to) {
    for (int64_t i = 0; i < b->num_queries; i++, to += padded_dim)
        if (is_bfloat16)
            for (int64_t d = 0; d < padded_dim / 2; d++) {
                to[d] = b->q[i][2 * d];
                to[padded_dim / 2 + d] = b->q[i][2 * d + 1];
            }
        else
            memcpy(to, b->q[i], (size_t)padded_dim * 4);
}

/* ---- scores */

/* Lane i: the sum of the lanes of v[i], for LANES vectors and always by the same tree. */
INLINE vfloat sum_each(const vfloat *v) {
    vfloat w[4]; /* quarter k of w[c]: parts of the sum of v[4 k + c] */
    for (int c = 0; c < 4; c++) w[c] = sum_quarters(v + c);
    const vfloat y = SHUFFLE(w[0], w[1], LOW_PAIRS) + SHUFFLE(w[0], w[1], HIGH_PAIRS),
                 z = SHUFFLE(w[2], w[3], LOW_PAIRS) + SHUFFLE(w[2], w[3], HIGH_PAIRS);
    return SHUFFLE(y, z, EVEN_IN_QUARTERS) + SHUFFLE(y, z, ODD_IN_QUARTERS);
}

/* Scores of the keys j ... j + LANES - 1 for `group` queries; row: their places in the pool. */
INLINE void dot_group(const int is_bfloat16, const int64_t padded_dim, const int group, const Block *b,
                      int64_t query, const int64_t *row, int64_t j) {
    const int64_t half = padded_dim / LANES / 2;
    const float *q = b->ordered + query * padded_dim;
    vfloat dots[MAX_GROUP][LANES];
    for (int i = 0; i < LANES; i++) {
        vfloat low[MAX_GROUP], high[MAX_GROUP];
        for (int g = 0; g < group; g++) low[g] = high[g] = (vfloat){0};
        for (int64_t c = 0; c < half; c++) {
            const VectorPair k = load_pair(is_bfloat16, b->key_rows, row[i], c, half);
            for (int g = 0; g < group; g++) {
                low[g] += load(q + g * padded_dim + c * LANES) * k.low;
                high[g] += load(q + g * padded_dim + (half + c) * LANES) * k.high;
            }
        }
        for (int g = 0; g < group; g++) dots[g][i] = low[g] + high[g];
    }
    for (int g = 0; g < group; g++)
        store(b->scores + (query + g) * b->stride + j, sum_each(dots[g]) * b->scale);
}

/* Prefetches the rows of the keys j ... j + LANES - 1.  The hardware does not: rows of a request lie in short
 * pieces of the pool. */
INLINE void prefetch_keys(const void *rows, int64_t row_bytes, const KeyList *keys, int64_t j) {
    for (const int64_t end = min64(j + LANES, keys->count); j < end; j++)
        for (int64_t i = 0; i < row_bytes; i += 64)
            __builtin_prefetch((const char *)rows + key_slot(keys, j) * row_bytes + i);
}

/* Scores of the keys j ... end - 1 for `queries` queries from `query` on.  Writes whole vectors: lanes past
 * the last key repeat it. */
INLINE void score_keys(const int is_bfloat16, const int64_t padded_dim, const Block *b, const KeyList *keys,
                       int64_t j, int64_t end, int64_t first, int64_t queries) {
    const int64_t row_bytes = padded_dim * (is_bfloat16 ? 2 : 4);
    for (; j < end; j += LANES) {
        int64_t row[LANES], query = first, left = queries;
        prefetch_keys(b->key_rows, row_bytes, keys, j + KEYS_AHEAD);
        prefetch_keys(b->value_rows, row_bytes, keys, j);
        for (int i = 0; i < LANES; i++) row[i] = key_slot(keys, min64(j + i, end - 1)) * padded_dim;
        for (; left >= 4; left -= 4, query += 4) dot_group(is_bfloat16, padded_dim, 4, b, query, row, j);
        switch (left) {
            case 3: dot_group(is_bfloat16, padded_dim, 3, b, query, row, j); break;
            case 2: dot_group(is_bfloat16, padded_dim, 2, b, query, row, j); break;
            case 1: dot_group(is_bfloat16, padded_dim, 1, b, query, row, j); break;
        }
    }
}

/* Scores of all queries.  A row gets scores for keys of the table that it does not see, too: its path's
 * scores, or nothing, replace them. */
INLINE void score_block(const int is_bfloat16, const int64_t padded_dim, const Block *b) {
    const KeyList *table = &b->keys[b->longest];
    score_keys(is_bfloat16, padded_dim, b, table, 0, table_keys(table), 0, b->num_queries);
    for (int64_t i = 0; i < b->num_rows; i++)
        score_keys(is_bfloat16, padded_dim, b, &b->keys[i], table_keys(&b->keys[i]), b->keys[i].count,
                   i * b->num_heads, b->num_heads);
}

/* ---- values */

/* Adds weight * v of the keys j ... end - 1 to `pairs` vector pairs, from `c` on, of the sums of `group`
 * queries. */
INLINE void add_slice(const int is_bfloat16, const int64_t padded_dim, const int group, const int pairs,
                      const Block *b, const KeyList *keys, int64_t j, int64_t end, int64_t query, int64_t c) {
    const int64_t half = padded_dim / LANES / 2;
    const float *weights = b->scores + query * b->stride;
    float *low = b->sums + query * padded_dim + c * LANES, *high = low + half * LANES;
    VectorPair sums[MAX_GROUP][MAX_PAIRS];
    for (int g = 0; g < group; g++)
        for (int p = 0; p < pairs; p++)
            sums[g][p] = (VectorPair){load(low + g * padded_dim + p * LANES),
                                      load(high + g * padded_dim + p * LANES)};
    for (; j < end; j++) {
        const int64_t row = key_slot(keys, j) * padded_dim;
        for (int p = 0; p < pairs; p++) {
            const VectorPair v = load_pair(is_bfloat16, b->value_rows, row, c + p, half);
            for (int g = 0; g < group; g++) {
                sums[g][p].low += v.low * weights[g * b->stride + j];
                sums[g][p].high += v.high * weights[g * b->stride + j];
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (int p = 0; p < pairs; p++) {
            store(low + g * padded_dim + p * LANES, sums[g][p].low);
            store(high + g * padded_dim + p * LANES, sums[g][p].high);
        }
}

/* `pairs`: as many as registers hold the sums of. */
INLINE void add_group(const int is_bfloat16, const int64_t padded_dim, const int group, const int pairs,
                      const Block *b, const KeyList *keys, int64_t j, int64_t end, int64_t query) {
    const int64_t half = padded_dim / LANES / 2;
    int64_t c = 0;
    for (; c + pairs <= half; c += pairs)
        add_slice(is_bfloat16, padded_dim, group, pairs, b, keys, j, end, query, c);
    for (; c < half; c++) add_slice(is_bfloat16, padded_dim, group, 1, b, keys, j, end, query, c);
}

/* Adds weight * v of the keys j ... end - 1 to the sums of `queries` queries from `query` on. */
INLINE void add_keys(const int is_bfloat16, const int64_t padded_dim, const Block *b, const KeyList *keys,
                     int64_t j, int64_t end, int64_t query, int64_t queries) {
    if (j >= end) return;
    for (; queries >= 4; queries -= 4, query += 4)
        add_group(is_bfloat16, padded_dim, 4, LANES == 8 ? 1 : 2, b, keys, j, end, query);
    switch (queries) {
        case 3: add_group(is_bfloat16, padded_dim, 3, 2, b, keys, j, end, query); break;
        case 2: add_group(is_bfloat16, padded_dim, 2, 2, b, keys, j, end, query); break;
        case 1: add_group(is_bfloat16, padded_dim, 1, 4, b, keys, j, end, query); break;
    }
}

/* Sums of all queries: the keys of the table that every row sees, then each row's others. */
INLINE void add_block(const int is_bfloat16, const int64_t padded_dim, const Block *b) {
    int64_t shared = table_keys(&b->keys[0]);
    for (int64_t i = 1; i < b->num_rows; i++) shared = min64(shared, table_keys(&b->keys[i]));
    memset(b->sums, 0, (size_t)(b->num_queries * padded_dim) * 4);
    for (int64_t j = 0; j < shared; j += KEYS_AT_ONCE)
        add_keys(is_bfloat16, padded_dim, b, &b->keys[0], j, min64(j + KEYS_AT_ONCE, shared), 0,
                 b->num_queries);
    for (int64_t i = 0; i < b->num_rows; i++)
        add_keys(is_bfloat16, padded_dim, b, &b->keys[i], shared, b->keys[i].count, i * b->num_heads,
                 b->num_heads);
}

/* out [head_dim] = the sums of one query, back in the order of the elements, * inverse_sum. */
static void write_out(int is_bfloat16, int64_t padded_dim, const float *sums, float inverse_sum,
                      int64_t head_dim, float *out) {
    if (!is_bfloat16) {
        for (int64_t i = 0; i < head_dim; i++) out[i] = sums[i] * inverse_sum;
        return;
    }
    const float *odd = sums + padded_dim / 2;
    for (int64_t i = 0; i < head_dim / 2; i++) {
        out[2 * i] = sums[i] * inverse_sum;
        out[2 * i + 1] = odd[i] * inverse_sum;
    }
    if (head_dim % 2) out[head_dim - 1] = sums[head_dim / 2] * inverse_sum;
}

/* ---- blocks */

static void softmax_block(Block *b, const ScoreModifier *modifier, int64_t first_head) {
    for (int64_t query = 0; query < b->num_queries; query++) {
        float *scores = b->scores + query * b->stride;
        const int64_t head = first_head + query % b->num_heads;
        const int64_t count = modify_scores(modifier, head, &b->keys[query / b->num_heads], scores);
        b->inverse_sums[query] = softmax(scores, count);
    }
}

INLINE void compute(const int is_bfloat16, const int64_t padded_dim, Block *b, const ScoreModifier *modifier,
                    int64_t first_head) {
    order_queries(is_bfloat16, padded_dim, b, b->ordered);
    score_block(is_bfloat16, padded_dim, b);
    softmax_block(b, modifier, first_head);
    add_block(is_bfloat16, padded_dim, b);
}

/* Constant sizes keep the sums in registers. */
static void compute_float32(int64_t padded_dim, Block *b, const ScoreModifier *modifier, int64_t first_head) {
    compute(0, padded_dim, b, modifier, first_head);
}
static void compute_bfloat16(int64_t padded_dim, Block *b, const ScoreModifier *modifier,
                             int64_t first_head) {
    if (padded_dim == 64)
        compute(1, 64, b, modifier, first_head);
    else if (padded_dim == 128)
        compute(1, 128, b, modifier, first_head);
    else
        compute(1, padded_dim, b, modifier, first_head);
}

/* Rows of a block that begins at row r, as many as there are queries for. */
static int64_t block_rows(const Attention *a, const Rows *rows, int64_t r, int64_t per_kv_head) {
    const int64_t most = min64(rows->num_rows - r, BLOCK_QUERIES / per_kv_head);
    const int64_t first = keys_of_row(rows, r, a->window).first;
    int64_t count = 1;
    while (count < most && rows->tables[r + count] == rows->tables[r] &&
           keys_of_row(rows, r + count, a->window).first == first)
        count++;
    return count;
}

/* All query heads of the block's rows that share K/V head h. */
static void attend_block(const Attention *a, const Rows *rows, int64_t first_row, int64_t num_rows, int64_t h,
                         const float *q, const ScoreModifier *modifier, Block *b, float *out) {
    const int64_t per_kv_head = a->heads / a->kv_heads, end = (h + 1) * per_kv_head;
    b->key_rows = (const char *)a->keys + h * a->head_bytes;
    b->value_rows = (const char *)a->values + h * a->head_bytes;
    b->num_rows = num_rows;
    b->longest = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        b->keys[i] = keys_of_row(rows, first_row + i, a->window);
        if (table_keys(&b->keys[i]) > table_keys(&b->keys[b->longest])) b->longest = i;
    }
    for (int64_t head = h * per_kv_head; head < end; head += BLOCK_QUERIES) {
        b->num_heads = min64(end - head, BLOCK_QUERIES);
        b->num_queries = num_rows * b->num_heads;
        for (int64_t query = 0; query < b->num_queries; query++) {
            const int64_t row = first_row + query / b->num_heads, at = head + query % b->num_heads;
            b->q[query] = q + (row * a->heads + at) * a->padded_dim;
        }
        if (a->kind == BFLOAT16)
            compute_bfloat16(a->padded_dim, b, modifier, head);
        else
            compute_float32(a->padded_dim, b, modifier, head);
        for (int64_t query = 0; query < b->num_queries; query++) {
            const int64_t row = first_row + query / b->num_heads, at = head + query % b->num_heads;
            write_out(a->kind == BFLOAT16, a->padded_dim, b->sums + query * a->padded_dim,
                      b->inverse_sums[query], a->head_dim, out + (row * a->heads + at) * a->head_dim);
        }
    }
}

/* One call of `attend`.  Item i of its loop is K/V head i % kv_heads of block i / kv_heads. */
typedef struct {
    const Attention *attention;
    const Rows *rows;
    const float *q;
    const ScoreModifier *modifier;
    float *out;
    int64_t stride;      /* scores of a query */
    int64_t *first_rows; /* [blocks+1] */
} AttendLoop;

static void attend_items(const void *loop, int64_t first, int64_t end) {
    const AttendLoop *l = loop;
    const Attention *a = l->attention;
    const int64_t query_floats = BLOCK_QUERIES * a->padded_dim;
    float *space = scratch_acquire(SCRATCH_ATTENTION, (2 * query_floats + BLOCK_QUERIES * l->stride) * 4);
    Block b = {
        .ordered = space,
        .sums = space + query_floats,
        .scores = space + 2 * query_floats,
        .stride = l->stride,
        .scale = a->scale,
    };
    for (int64_t i = first; i < end; i++) {
        const int64_t *r = l->first_rows + i / a->kv_heads, h = i % a->kv_heads;
        if (a->kind == INT8)
            attend_row_int8(a, l->rows, *r, h, l->q, l->modifier, b.scores, l->stride, l->out);
        else
            attend_block(a, l->rows, *r, r[1] - r[0], h, l->q, l->modifier, &b, l->out);
    }
    scratch_release(SCRATCH_ATTENTION);
}

void attend(const Attention *a, const Rows *rows, const float *q, const ScoreModifier *modifier, float *out) {
    const int64_t stride = divide_up(rows->longest + LANES, LANES) * LANES; /* with a sink and padding */
    int64_t *first_rows = allocate((rows->num_rows + 1) * (int64_t)sizeof *first_rows), num_blocks = 0;
    for (int64_t r = 0; r < rows->num_rows; num_blocks++) {
        first_rows[num_blocks] = r;
        r += a->kind == INT8 ? 1 : block_rows(a, rows, r, a->heads / a->kv_heads);
    }
    first_rows[num_blocks] = rows->num_rows;
    parallel_for(num_blocks * a->kv_heads, 1, attend_items,
                 &(AttendLoop){a, rows, q, modifier, out, stride, first_rows});
    release(first_rows);
}
