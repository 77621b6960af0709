/* Attention over a paged KV pool.
 *
 * Computed: scores = q k^T * scale for all keys of a row, score modifier, softmax, then the sum of
 * weight * v.
 * Order: keys by position (table, then path), wherever they lie in the pool; within a score and a sum as
 * attention_scores.c and attention_values.c say.
 * Exact: a score depends on one query and one key alone, and a row's keys come in the same order for a tree
 * node as for the token that plain decoding computes there.
 * Rows of one request make a block: they share the loads of K and V from the table, and nothing else.
 * Threads share (block, K/V head) pairs. */
#include "attention_block.h"
#include "memory.h"
#include "threads.h"

enum { LEAST_BLOCK_QUERIES = 16, CACHED_SCORES = 1 << 17 };

static int form_of(const Attention *a) {
    if (a->kind != BFLOAT16) return a->kind == FLOAT32 ? WIDE : BYTES;
    return a->rounds_inputs ? PAIRS : HALF;
}

/* weights [count], in place, to pairs of bfloat16 numbers.  Up to 2 LANES weights are read past the last. */
static void round_weights(float *weights, int64_t count) {
    word *to = (word *)weights;
    for (int64_t j = 0; j < count; j += 2 * LANES, to += LANES) {
        const vfloat a = load(weights + j), b = load(weights + j + LANES);
        const vuint even = (vuint)SHUFFLE(a, b, EVEN_LANES), odd = (vuint)SHUFFLE(a, b, ODD_LANES);
        const vuint low = (even + 0x7fffu + ((even >> 16) & 1u)) >> 16,
                    high = (odd + 0x7fffu + ((odd >> 16) & 1u)) & 0xffff0000u;
        *(vuint *)to = low | high;
    }
}

static void softmax_block(int form, Block *b, const ScoreModifier *modifier, int64_t first_head) {
    for (int64_t query = 0; query < b->num_queries; query++) {
        float *scores = b->scores + query * b->stride;
        const int64_t head = first_head + query % b->num_heads;
        const int64_t count = modify_scores(modifier, head, &b->keys[query / b->num_heads], scores);
        b->inverse_sums[query] = softmax(scores, count);
        if (form == PAIRS) round_weights(scores, count);
    }
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

/* Queries of a block, as far as one row does not have more.  In PAIRS and BYTES more of them share the work
 * of transposing K; fewer make more items for threads, and keep the scores in the second cache. */
static int64_t block_queries(const Attention *a, const Rows *rows, int64_t stride) {
    if (form_of(a) < PAIRS) return LEAST_BLOCK_QUERIES;
    const int64_t of_threads = divide_up(rows->num_rows * a->heads, 2 * most_threads());
    const int64_t most = min64(min64(of_threads, CACHED_SCORES / stride), MOST_BLOCK_QUERIES);
    return most > LEAST_BLOCK_QUERIES ? most : LEAST_BLOCK_QUERIES;
}

/* Rows of a block that begins at row r, up to `most`, but one at least. */
static int64_t block_rows(const Attention *a, const Rows *rows, int64_t r, int64_t most) {
    const int64_t first = keys_of_row(rows, r, a->window).first;
    int64_t count = 1;
    most = min64(rows->num_rows - r, most);
    while (count < most && rows->tables[r + count] == rows->tables[r] &&
           keys_of_row(rows, r + count, a->window).first == first)
        count++;
    return count;
}

/* All query heads of the block's rows that share K/V head h. */
static void attend_block(const Attention *a, const Rows *rows, int64_t first_row, int64_t num_rows, int64_t h,
                         const float *q, const ScoreModifier *modifier, Block *b, float *out) {
    const int form = form_of(a);
    const int64_t per_kv_head = a->heads / a->kv_heads, end = (h + 1) * per_kv_head;
    b->key_rows = (const char *)a->keys + h * a->head_bytes;
    b->value_rows = (const char *)a->values + h * a->head_bytes;
    b->num_rows = num_rows;
    b->longest = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        b->keys[i] = keys_of_row(rows, first_row + i, a->window);
        if (table_keys(&b->keys[i]) > table_keys(&b->keys[b->longest])) b->longest = i;
    }
    for (int64_t head = h * per_kv_head; head < end; head += b->most_queries) {
        b->num_heads = min64(end - head, b->most_queries);
        b->num_queries = num_rows * b->num_heads;
        for (int64_t query = 0; query < b->num_queries; query++) {
            const int64_t row = first_row + query / b->num_heads, at = head + query % b->num_heads;
            b->q[query] = q + (row * a->heads + at) * a->padded_dim;
        }
        score_block(form, b);
        softmax_block(form, b, modifier, head);
        add_block(form, b);
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
    int64_t queries;     /* of a block */
    int64_t *first_rows; /* [blocks+1] */
} AttendLoop;

static void attend_items(const void *loop, int64_t first, int64_t end) {
    const AttendLoop *l = loop;
    const Attention *a = l->attention;
    const int64_t query_floats = l->queries * a->padded_dim, tile_words = VALUE_LINES * a->padded_dim;
    const int64_t floats = 2 * query_floats + tile_words + (l->queries + 1) * l->stride;
    float *space = scratch_acquire(SCRATCH_ATTENTION, floats * 4);
    Block b = {
        .tile = (word *)space,
        .queries = (word *)(space + tile_words),
        .sums = space + tile_words + query_floats,
        .scores = space + tile_words + 2 * query_floats,
        .steps = space + floats - l->stride,
        .most_queries = l->queries,
        .padded_dim = a->padded_dim,
        .stride = l->stride,
        .scale = a->scale,
        .fetches = fetches_to(0),
    };
    for (int64_t i = first; i < end; i++) {
        const int64_t *r = l->first_rows + i / a->kv_heads, h = i % a->kv_heads;
        attend_block(a, l->rows, *r, r[1] - r[0], h, l->q, l->modifier, &b, l->out);
    }
    scratch_release(SCRATCH_ATTENTION);
}

void attend(const Attention *a, const Rows *rows, const float *q, const ScoreModifier *modifier, float *out) {
    const int64_t stride = (divide_up(rows->longest, 2 * LANES) + 1) * 2 * LANES; /* with sink and padding */
    const int64_t queries = block_queries(a, rows, stride), per_kv_head = a->heads / a->kv_heads;
    int64_t *first_rows = allocate((rows->num_rows + 1) * (int64_t)sizeof *first_rows), num_blocks = 0;
    for (int64_t r = 0; r < rows->num_rows; num_blocks++) {
        first_rows[num_blocks] = r;
        r += block_rows(a, rows, r, queries / per_kv_head);
    }
    first_rows[num_blocks] = rows->num_rows;
    parallel_for(num_blocks * a->kv_heads, 1, attend_items,
                 &(AttendLoop){a, rows, q, modifier, out, stride, queries, first_rows});
    release(first_rows);
}
