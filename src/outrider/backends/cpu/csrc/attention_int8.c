/* Attention over an int8 KV pool.  A head is padded_dim bytes, then the float that one step of them counts.
 *
 * Computed: q is rounded to 8 bits per head; scores = integer dot products * both steps * scale; softmax;
 * then the sum of weight * step * v in float32.
 * Order: keys by position.  Scores are computed LANES keys at a time, one key a lane; values one key after
 * the other.
 * Exact: the dot products are integers, so their order does not matter.  Everything else is a fixed sequence
 * for a row and a head. */
#include "attention.h"
#include "int8.h"

/* One row and `group` query heads that share a K/V head.  scores: space for [group,scores_stride]. */
typedef struct {
    KeyList keys;
    const float *q;                    /* [group,padded_dim] */
    const void *key_rows, *value_rows; /* of the K/V head */
    const ScoreModifier *modifier;     /* or null */
    int64_t first_head, scores_stride, head_dim;
    float *scores, *out; /* out [group,head_dim] */
    float scale;
} HeadTask;

/* The largest magnitude of x [n], or NaN.  n: a multiple of LANES. */
INLINE float max_magnitude(const float *x, int64_t n) {
    vint v = max_magnitudes(x, n);
    for (int i = LANES; i > 1; i /= 2) v = max_ints(SHUFFLE(v, v, EVEN_LANES), SHUFFLE(v, v, ODD_LANES));
    return ((vfloat)v)[0];
}

/* to [n] = 127 x / magnitude, rounded to integers; returns their sum. */
INLINE int32_t quantize(const float *x, int64_t n, float magnitude, int8_t *to) {
    vint v = round_bytes(x, n, magnitude > LEAST_MAGNITUDE ? 127.0f / magnitude : 0, to);
    for (int i = LANES; i > 1; i /= 2) v = add_neighbours(v, v);
    return v[0];
}

void store_head_int8(const float *x, int64_t head_dim, int64_t padded_dim, int8_t *to) {
    float padded[MAX_HEAD_DIM + LANES] = {0};
    memcpy(padded, x, (size_t)head_dim * 4);
    const float magnitude = max_magnitude(padded, padded_dim), step = magnitude / 127.0f;
    quantize(padded, padded_dim, magnitude, to);
    memcpy(to + padded_dim, &step, 4);
}

/* Fetches LANES pool rows from key j + KEYS_AHEAD on; they are neighbours, as a rule. */
INLINE void prefetch_keys(const int64_t padded_dim, const KeyList *keys, int64_t j, const int8_t *rows) {
    if (j + KEYS_AHEAD >= keys->count) return;
    rows += key_slot(keys, j + KEYS_AHEAD) * (padded_dim + 4);
    for (int64_t c = 0; c < LANES * (padded_dim + 4); c += 64) __builtin_prefetch(rows + c);
}

/* Query heads in 8 bits, padded with zeros to whole vectors.
 * The dot products take k + 128 as unsigned bytes; see BYTE_START (int8.h). */
typedef struct {
    _Alignas(64) int8_t bytes[MAX_GROUP][MAX_HEAD_DIM + 4 * LANES];
    int32_t start[MAX_GROUP];
    float step[MAX_GROUP]; /* times the attention scale */
} QuantizedQueries;

INLINE void quantize_queries(const int64_t padded_dim, const int group, const HeadTask *t,
                             QuantizedQueries *q) {
    for (int g = 0; g < group; g++) {
        const float *x = t->q + g * padded_dim, magnitude = max_magnitude(x, padded_dim);
        memset(q->bytes[g] + padded_dim, 0, 4 * LANES);
        const uint32_t sum = (uint32_t)quantize(x, padded_dim, magnitude, q->bytes[g]);
        q->start[g] = (int32_t)(sum * (uint32_t)BYTE_START);
        q->step[g] = magnitude / 127.0f * t->scale;
    }
}

/* scores [group][keys].  Keys are read in whole vectors: what lies past a key meets zeros of q, and the pool
 * has slack at its end. */
INLINE void head_scores(const int64_t padded_dim, const int group, const HeadTask *t) {
    const int64_t vectors = (padded_dim + 4 * LANES - 1) / (4 * LANES);
    const int8_t *rows = t->key_rows;
    QuantizedQueries q;
    quantize_queries(padded_dim, group, t, &q);
    for (int64_t j = 0; j < t->keys.count; j += LANES) {
        const int8_t *key[LANES];
        float steps[LANES];
        prefetch_keys(padded_dim, &t->keys, j, rows);
        for (int i = 0; i < LANES; i++) { /* lanes past the end repeat the last key */
            key[i] = rows + key_slot(&t->keys, min64(j + i, t->keys.count - 1)) * (padded_dim + 4);
            memcpy(steps + i, key[i] + padded_dim, 4);
        }
        for (int g = 0; g < group; g++) {
            vint dots[LANES];
            #pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                dots[i] = (vint){0};
                for (int64_t c = 0; c < vectors; c++) {
                    const vuint k = *(const vuint *)(key[i] + c * 4 * LANES) ^ 0x80808080u; /* k + 128 */
                    dots[i] = dot_bytes(dots[i], k, *(const vint *)(q.bytes[g] + c * 4 * LANES));
                }
            }
            const vfloat dot = __builtin_convertvector(sum_each(dots) + q.start[g], vfloat);
            store(t->scores + g * t->scores_stride + j, dot * (load(steps) * q.step[g]));
        }
    }
}

/* out [group][head_dim] = (sum over keys of weight * step * v) * inverse_sum. */
INLINE void head_values(const int64_t padded_dim, const int group, const HeadTask *t,
                        const float *inverse_sums) {
    const int64_t vectors = padded_dim / LANES;
    vfloat sums[MAX_HEAD_DIM / LANES]; /* [group][vectors]; a constant size keeps them in registers */
    for (int64_t i = 0; i < group * vectors; i++) sums[i] = (vfloat){0};
    for (int64_t j = 0; j < t->keys.count; j++) {
        const int8_t *value = (const int8_t *)t->value_rows + key_slot(&t->keys, j) * (padded_dim + 4);
        if (j % LANES == 0) prefetch_keys(padded_dim, &t->keys, j, t->value_rows);
        float step;
        memcpy(&step, value + padded_dim, 4);
        for (int64_t c = 0; c < vectors; c++) {
            const vfloat v = widen_bytes(value + c * LANES);
            for (int g = 0; g < group; g++)
                sums[g * vectors + c] += v * (t->scores[g * t->scores_stride + j] * step);
        }
    }
    for (int g = 0; g < group; g++) {
        float padded[MAX_HEAD_DIM];
        for (int64_t c = 0; c < vectors; c++)
            store(padded + c * LANES, sums[g * vectors + c] * inverse_sums[g]);
        memcpy(t->out + g * t->head_dim, padded, (size_t)t->head_dim * 4);
    }
}

INLINE void attend_heads(const int64_t padded_dim, const int group, const HeadTask *task) {
    const HeadTask t = *task; /* a copy that no store can alias */
    float inverse_sums[MAX_GROUP];
    head_scores(padded_dim, group, &t);
    for (int g = 0; g < group; g++) {
        float *scores = t.scores + g * t.scores_stride;
        inverse_sums[g] = softmax(scores, modify_scores(t.modifier, t.first_head + g, &t.keys, scores));
    }
    head_values(padded_dim, group, &t, inverse_sums);
}

/* Constant sizes keep the sums in registers. */
INLINE void attend_group(const int64_t padded_dim, int64_t group, const HeadTask *task) {
    switch (group) {
        case 1: attend_heads(padded_dim, 1, task); break;
        case 2: attend_heads(padded_dim, 2, task); break;
        case 3: attend_heads(padded_dim, 3, task); break;
        case 4: attend_heads(padded_dim, 4, task); break;
    }
}

/* `group` query heads of a task. */
static void attend_int8(int64_t group, int64_t padded_dim, const HeadTask *task) {
    if (padded_dim == 64)
        attend_group(64, group, task);
    else if (padded_dim == 128)
        attend_group(128, group, task);
    else
        attend_group(padded_dim, group, task);
}

void attend_row_int8(const Attention *a, const Rows *rows, int64_t r, int64_t h, const float *q,
                     const ScoreModifier *modifier, float *scores, int64_t stride, float *out) {
    const int64_t per_kv_head = a->heads / a->kv_heads, end = (h + 1) * per_kv_head,
                  step = a->padded_dim <= 64 ? 4 : a->padded_dim <= 128 ? 2 : 1;
    HeadTask task = {
        .keys = keys_of_row(rows, r, a->window),
        .key_rows = (const char *)a->keys + h * a->head_bytes,
        .value_rows = (const char *)a->values + h * a->head_bytes,
        .modifier = modifier,
        .scores_stride = stride,
        .head_dim = a->head_dim,
        .scores = scores,
        .scale = a->scale,
    };
    for (int64_t head = h * per_kv_head; head < end; head += step) {
        task.first_head = head;
        task.q = q + (r * a->heads + head) * a->padded_dim;
        task.out = out + (r * a->heads + head) * a->head_dim;
        attend_int8(min64(end - head, step), a->padded_dim, &task);
    }
}
