/* The step before attention: head norms, rotary embedding, writing of K and V to the pool.
 *
 * Computed: q and k of every head, normalized if the model does that, rotated by position; K and V rounded
 * to the pool's element type.
 * Order: within a head, as `rms_norm_row` and `rotate` say.
 * Exact: a row's q, k and v depend on that row alone.  Threads share rows. */
#include "attention_bytes.h"
#include "elementwise.h"
#include "threads.h"

static int64_t pool_row_bytes(int kind, int64_t padded_dim) {
    return kind == INT8 ? padded_dim + 4 : kind == BFLOAT16 ? padded_dim * 2 : padded_dim * 4;
}

/* Rotates the pairs (i, i + rotary_dim / 2) of a head.  table: cosines, then sines, of the row's position. */
INLINE void rotate(const float *x, const float *table, int64_t head_dim, int64_t rotary_dim, float *y) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], c = table[i], s = table[i + half];
        y[i] = a * c - b * s;
        y[i + half] = b * c + a * s;
    }
    for (int64_t i = rotary_dim; i < head_dim; i++) y[i] = x[i];
}

static void store_head_float32(const float *x, int64_t head_dim, int64_t padded_dim, float *to) {
    memcpy(to, x, (size_t)head_dim * 4);
    memset(to + head_dim, 0, (size_t)(padded_dim - head_dim) * 4);
}

static void store_head_bfloat16(const float *x, int64_t head_dim, int64_t padded_dim, bfloat16 *to) {
    for (int64_t i = 0; i < head_dim; i++) to[i] = round_bfloat16(x[i]);
    memset(to + head_dim, 0, (size_t)(padded_dim - head_dim) * 2);
}

static void store_head_int8(const float *x, int64_t head_dim, int64_t padded_dim, int8_t *to) {
    float padded[MAX_HEAD_DIM + LANES] = {0};
    memcpy(padded, x, (size_t)head_dim * 4);
    const float magnitude = max_magnitude(padded, padded_dim), step = magnitude / 127.0f;
    quantize(padded, padded_dim, magnitude, to);
    memcpy(to + padded_dim, &step, 4);
}

static void store_head(const Attention *a, const float *x, void *plane, int64_t kv_head, int64_t slot) {
    char *to = (char *)plane + kv_head * a->head_bytes + slot * pool_row_bytes(a->kind, a->padded_dim);
    if (a->kind == INT8)
        store_head_int8(x, a->head_dim, a->padded_dim, (int8_t *)to);
    else if (a->kind == BFLOAT16)
        store_head_bfloat16(x, a->head_dim, a->padded_dim, (bfloat16 *)to);
    else
        store_head_float32(x, a->head_dim, a->padded_dim, (float *)to);
}

/* Norm (or none) and rotation of one head of q or k; y [head_dim]. */
static void norm_and_rotate(const Attention *a, const float *x, const float *norm, const float *table,
                            float *y) {
    float normed[MAX_HEAD_DIM];
    if (norm) {
        rms_norm_row(x, norm, a->head_dim, a->eps, normed);
        x = normed;
    }
    rotate(x, table, a->head_dim, a->rotary_dim, y);
}

typedef struct {
    const Attention *attention;
    const Rows *rows;
    const float *qkv;
    float *q;
} RopeStore;

static void store_rows(const void *loop, int64_t first, int64_t end) {
    const RopeStore *s = loop;
    const Attention *a = s->attention;
    const Rows *rows = s->rows;
    const int64_t D = a->head_dim, heads = a->heads, kv_heads = a->kv_heads;
    for (int64_t r = first; r < end; r++) {
        const float *table = a->rotary + rows->positions[r] * a->rotary_dim;
        const float *from = s->qkv + r * (heads + 2 * kv_heads) * D;
        float head[MAX_HEAD_DIM];
        for (int64_t h = 0; h < heads; h++, from += D) {
            norm_and_rotate(a, from, a->q_norm, table, head);
            store_head_float32(head, D, a->padded_dim, s->q + (r * heads + h) * a->padded_dim);
        }
        for (int64_t h = 0; h < kv_heads; h++, from += D) {
            norm_and_rotate(a, from, a->k_norm, table, head);
            store_head(a, head, a->keys, h, rows->slots[r]);
        }
        for (int64_t h = 0; h < kv_heads; h++, from += D) store_head(a, from, a->values, h, rows->slots[r]);
    }
}

void rope_store(const Attention *a, const Rows *rows, const float *qkv, float *q) {
    parallel_for(rows->num_rows, 8, store_rows, &(RopeStore){a, rows, qkv, q});
}
