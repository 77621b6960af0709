/* Attention over a paged KV pool, and the step before it: head norms, rotary embedding, writing of K and V.
 *
 * Computed: scores = q k^T * scale for all keys of a row, score modifier, softmax, then the sum of
 * weight * v.
 * Order: keys by position (table, then path), wherever they lie in the pool.  A dot product is one vector
 * accumulator for the even and one for the odd half of a head, added across lanes by a fixed tree.  The sum
 * over v takes one key after the other.
 * Exact: a tree node sees the same keys in the same order as the token that plain decoding computes there.
 * Query heads of a group share the loads of K and V, and nothing else; threads share (row, K/V head)
 * pairs. */
#include "attention.h"
#include "elementwise.h"
#include "memory.h"

INLINE bfloat16 round_bfloat16(float x) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bfloat16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static int64_t pool_row_bytes(int kind, int64_t padded_dim) {
    return kind == INT8 ? padded_dim + 4 : kind == BFLOAT16 ? padded_dim * 2 : padded_dim * 4;
}

/* ---- rotary embedding and writing */

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

void rope_store(const Attention *a, const Rows *rows, const float *qkv, float *q) {
    const int64_t D = a->head_dim, heads = a->heads, kv_heads = a->kv_heads;
    #pragma omp parallel for schedule(static) if (rows->num_rows > 8)
    for (int64_t r = 0; r < rows->num_rows; r++) {
        const float *table = a->rotary + rows->positions[r] * a->rotary_dim;
        const float *from = qkv + r * (heads + 2 * kv_heads) * D;
        float head[MAX_HEAD_DIM];
        for (int64_t h = 0; h < heads; h++, from += D) {
            norm_and_rotate(a, from, a->q_norm, table, head);
            store_head_float32(head, D, a->padded_dim, q + (r * heads + h) * a->padded_dim);
        }
        for (int64_t h = 0; h < kv_heads; h++, from += D) {
            norm_and_rotate(a, from, a->k_norm, table, head);
            store_head(a, head, a->keys, h, rows->slots[r]);
        }
        for (int64_t h = 0; h < kv_heads; h++, from += D) store_head(a, from, a->values, h, rows->slots[r]);
    }
}

/* ---- attention */

/* Two vectors of a pool row, at vectors c and half + c of it in the order in which q is held: float32 in the
 * order of the elements, bfloat16 the even elements of a head before the odd ones, which is how widening
 * leaves them. */
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

/* Element i of a head in that order: vector and lane. */
INLINE int64_t vector_of(const int is_bfloat16, int64_t i, int64_t half) {
    return is_bfloat16 ? i % 2 * half + i / 2 / LANES : i / LANES;
}
INLINE int64_t lane_of(const int is_bfloat16, int64_t i) { return is_bfloat16 ? i / 2 % LANES : i % LANES; }

/* scores [group][keys] = q k^T * scale. */
INLINE void head_scores(const int is_bfloat16, const int64_t padded_dim, const int group, const HeadTask *t) {
    const int64_t vectors = padded_dim / LANES, half = vectors / 2;
    vfloat q[MAX_HEAD_DIM / LANES]; /* [group][vectors] */
    for (int g = 0; g < group; g++)
        for (int64_t c = 0; c < vectors; c++) {
            if (!is_bfloat16)
                q[g * vectors + c] = load(t->q + g * padded_dim + c * LANES);
            else
                for (int i = 0; i < LANES; i++)
                    q[g * vectors + c][i] = t->q[g * padded_dim + (c % half * LANES + i) * 2 + c / half];
        }
    for (int64_t j = 0; j < t->keys.count; j++) {
        const int64_t row = key_slot(&t->keys, j) * padded_dim;
        vfloat low[MAX_GROUP], high[MAX_GROUP];
        for (int g = 0; g < group; g++) low[g] = high[g] = (vfloat){0};
        for (int64_t c = 0; c < half; c++) {
            const VectorPair k = load_pair(is_bfloat16, t->key_rows, row, c, half);
            for (int g = 0; g < group; g++) {
                low[g] += q[g * vectors + c] * k.low;
                high[g] += q[g * vectors + half + c] * k.high;
            }
        }
        for (int g = 0; g < group; g++)
            t->scores[g * t->scores_stride + j] = sum_lanes(low[g] + high[g]) * t->scale;
    }
}

/* out [group][head_dim] = (sum over keys of weight * v) * inverse_sum. */
INLINE void head_values(const int is_bfloat16, const int64_t padded_dim, const int group, const HeadTask *t,
                        const float *inverse_sums) {
    const int64_t vectors = padded_dim / LANES, half = vectors / 2;
    vfloat sums[MAX_HEAD_DIM / LANES]; /* [group][vectors] */
    for (int64_t i = 0; i < group * vectors; i++) sums[i] = (vfloat){0};
    for (int64_t j = 0; j < t->keys.count; j++) {
        const int64_t row = key_slot(&t->keys, j) * padded_dim;
        for (int64_t c = 0; c < half; c++) {
            const VectorPair v = load_pair(is_bfloat16, t->value_rows, row, c, half);
            for (int g = 0; g < group; g++) {
                const float weight = t->scores[g * t->scores_stride + j];
                sums[g * vectors + c] += v.low * weight;
                sums[g * vectors + half + c] += v.high * weight;
            }
        }
    }
    for (int g = 0; g < group; g++)
        for (int64_t i = 0; i < t->head_dim; i++)
            t->out[g * t->head_dim + i] =
                inverse_sums[g] *
                sums[g * vectors + vector_of(is_bfloat16, i, half)][lane_of(is_bfloat16, i)];
}

INLINE void attend_heads(const int is_bfloat16, const int64_t padded_dim, const int group,
                         const HeadTask *task) {
    const HeadTask t = *task; /* a copy that no store can alias */
    float inverse_sums[MAX_GROUP];
    head_scores(is_bfloat16, padded_dim, group, &t);
    for (int g = 0; g < group; g++) {
        float *scores = t.scores + g * t.scores_stride;
        inverse_sums[g] = softmax(scores, modify_scores(t.modifier, t.first_head + g, &t.keys, scores));
    }
    head_values(is_bfloat16, padded_dim, group, &t, inverse_sums);
}

/* Constant sizes keep the sums in registers. */
INLINE void attend_group(const int is_bfloat16, const int64_t padded_dim, int64_t group,
                         const HeadTask *task) {
    switch (group) {
        case 1: attend_heads(is_bfloat16, padded_dim, 1, task); break;
        case 2: attend_heads(is_bfloat16, padded_dim, 2, task); break;
        case 3: attend_heads(is_bfloat16, padded_dim, 3, task); break;
        case 4: attend_heads(is_bfloat16, padded_dim, 4, task); break;
    }
}

static void attend_float32(int64_t group, int64_t padded_dim, const HeadTask *task) {
    attend_group(0, padded_dim, group, task);
}
static void attend_bfloat16(int64_t group, int64_t padded_dim, const HeadTask *task) {
    if (padded_dim == 64)
        attend_group(1, 64, group, task);
    else if (padded_dim == 128)
        attend_group(1, 128, group, task);
    else
        attend_group(1, padded_dim, group, task);
}

/* The first key that a row sees through the layer's window.  `end`: the keys of the row without a window.
 * window > 0: the latest `window` positions.  window < 0: the row's chunk, positions being cut into chunks
 * of -window.
 * Rows of a block draft see later keys as well and have no shift. */
static int64_t first_key(int64_t end, int64_t position, int64_t window, int64_t pinned) {
    const int64_t oldest = window < 0 ? position / -window * -window : position + 1 - window;
    if (!window || oldest <= 0) return 0;
    if (oldest < pinned) return oldest;
    const int64_t first =
        end > position + 1 ? oldest : oldest + end - position - 1; /* position to entry of the view */
    return first > pinned ? first : pinned;
}

static KeyList keys_of_row(const Rows *rows, int64_t r, int64_t window) {
    const int64_t length = rows->table_lengths[r], end = length + rows->path_lengths[r],
                  position = rows->positions[r];
    const int64_t first = first_key(end, position, window, rows->pinned);
    return (KeyList){
        rows->tables[r],    rows->paths + r * rows->path_width, length, first, end - first, rows->pinned,
        position + 1 - end,
    };
}

/* Query heads whose sums fit into registers. */
static int64_t group_size(int64_t padded_dim) { return padded_dim <= 64 ? 4 : padded_dim <= 128 ? 2 : 1; }

/* All query heads of row r that share K/V head h, a group at a time. */
static void attend_row(const Attention *a, const Rows *rows, int64_t r, int64_t h, const float *q,
                       HeadTask *task, float *out) {
    const int64_t per_kv_head = a->heads / a->kv_heads, end = (h + 1) * per_kv_head,
                  step = group_size(a->padded_dim);
    task->keys = keys_of_row(rows, r, a->window);
    task->key_rows = (const char *)a->keys + h * a->head_bytes;
    task->value_rows = (const char *)a->values + h * a->head_bytes;
    for (int64_t head = h * per_kv_head; head < end; head += step) {
        const int64_t group = min64(end - head, step);
        task->first_head = head;
        task->q = q + (r * a->heads + head) * a->padded_dim;
        task->out = out + (r * a->heads + head) * a->head_dim;
        if (a->kind == INT8)
            attend_int8(group, a->padded_dim, task);
        else if (a->kind == BFLOAT16)
            attend_bfloat16(group, a->padded_dim, task);
        else
            attend_float32(group, a->padded_dim, task);
    }
}

void attend(const Attention *a, const Rows *rows, const float *q, const ScoreModifier *modifier, float *out) {
    const int64_t stride =
        (rows->longest + 2 * LANES - 1) / LANES * LANES; /* scores of a head, a sink, padding */
    #pragma omp parallel if (rows->num_rows * a->heads > 1)
    {
        HeadTask task = {
            .modifier = modifier,
            .scores_stride = stride,
            .head_dim = a->head_dim,
            .scale = a->scale,
            .scores = allocate(group_size(a->padded_dim) * stride * 4),
        };
        #pragma omp for collapse(2) schedule(dynamic, 1)
        for (int64_t r = 0; r < rows->num_rows; r++)
            for (int64_t h = 0; h < a->kv_heads; h++) attend_row(a, rows, r, h, q, &task, out);
        free(task.scores);
    }
}
