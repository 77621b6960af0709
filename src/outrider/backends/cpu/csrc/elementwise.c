/* RMS norms, gated SiLU and GELU, clamped gates, soft cap, and the input of a draft head.  Threads share
 * rows, or blocks of 64 logits; the order of operations on a row is fixed. */
#include "elementwise.h"
#include "blocks.h"
#include "threads.h"

typedef struct {
    const float *x, *weight;
    int64_t width;
    float eps, *y;
} Norm;

static void norm_rows(const void *loop, int64_t first, int64_t end) {
    const Norm *n = loop;
    for (int64_t at = first * n->width; first < end; first++, at += n->width)
        rms_norm_row(n->x + at, n->weight, n->width, n->eps, n->y + at);
}

void rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *y) {
    parallel_for(rows, 8, norm_rows, &(Norm){x, weight, width, eps, y});
}

typedef struct {
    float *x, *y;
    const float *weight;
    int64_t width;
    float eps;
} NormedSum;

/* Lane by lane; a sum of two numbers is the same in a vector and alone. */
static void add_normed_rows(const void *loop, int64_t first, int64_t end) {
    const NormedSum *s = loop;
    const int64_t width = s->width;
    for (; first < end; first++) {
        float *x = s->x + first * width, *y = s->y + first * width;
        rms_norm_row(y, s->weight, width, s->eps, y);
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(x + i, load(x + i) + load(y + i));
        for (; i < width; i++) x[i] += y[i];
    }
}

void add_normed(float *x, float *y, const float *weight, int64_t rows, int64_t width, float eps) {
    parallel_for(rows, 8, add_normed_rows, &(NormedSum){x, y, weight, width, eps});
}

typedef struct {
    const float *x;
    int64_t width;
    float *y;
    float slope, limit; /* of clamped gates */
} Gated;

enum { SILU, GELU, CLAMPED };

/* g / 2 * (1 + tanh(u)) is g * sigmoid(2 u), where u = sqrt(2 / pi) * (g + 0.044715 g^3). */
INLINE vfloat gelu(vfloat g) { return g / (1.0f + vexp(g * (-1.5957691216f - 0.0713548162726f * g * g))); }

/* NaN stays NaN. */
INLINE vfloat clamped(const Gated *s, vfloat g, vfloat u) {
    const vfloat most = broadcast(s->limit), least = broadcast(-s->limit);
    g = select_lanes(g > most, most, g);
    u = select_lanes(u > most, most, select_lanes(u < least, least, u));
    return g / (1.0f + vexp(-s->slope * g)) * (u + 1.0f);
}

INLINE vfloat gate(const int kind, const Gated *s, vfloat g, vfloat u) {
    if (kind == CLAMPED) return clamped(s, g, u);
    return (kind == GELU ? gelu(g) : silu(g)) * u;
}

/* Lane by lane, the last lanes of a row through zero-padded vectors: no operation depends on its lane. */
INLINE void gated_rows(const int kind, const Gated *s, int64_t first, int64_t end) {
    const int64_t width = s->width;
    for (int64_t r = first; r < end; r++) {
        const float *gates = s->x + r * 2 * width, *ups = gates + width;
        float *out = s->y + r * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES)
            store(out + i, gate(kind, s, load(gates + i), load(ups + i)));
        if (i < width) {
            const vfloat g = load_part(gates + i, width - i), u = load_part(ups + i, width - i);
            const vfloat last = gate(kind, s, g, u);
            memcpy(out + i, &last, (size_t)(width - i) * 4);
        }
    }
}

static void silu_rows(const void *loop, int64_t first, int64_t end) { gated_rows(SILU, loop, first, end); }
static void gelu_rows(const void *loop, int64_t first, int64_t end) { gated_rows(GELU, loop, first, end); }
static void clamped_rows(const void *loop, int64_t first, int64_t end) {
    gated_rows(CLAMPED, loop, first, end);
}

void silu_mul(const float *x, int64_t rows, int64_t width, float *y) {
    parallel_for(rows, 4, silu_rows, &(Gated){x, width, y, 0, 0});
}

void gelu_mul(const float *x, int64_t rows, int64_t width, float *y) {
    parallel_for(rows, 4, gelu_rows, &(Gated){x, width, y, 0, 0});
}

void clamped_mul(const float *x, int64_t rows, int64_t width, float slope, float limit, float *y) {
    parallel_for(rows, 4, clamped_rows, &(Gated){x, width, y, slope, limit});
}

typedef struct {
    float *x;
    int64_t width;
    float cap, *block_max;
    int64_t stride, blocks; /* blocks: of a row */
} SoftCap;

/* Item i is block i % blocks of row i / blocks.  The last block goes through a padded copy. */
static void cap_blocks(const void *loop, int64_t item, int64_t end) {
    const SoftCap *s = loop;
    for (; item < end; item++) {
        const int64_t row = item / s->blocks, block = item % s->blocks;
        const int64_t left = min64(s->width - block * BLOCK, BLOCK);
        float *x = s->x + row * s->width + block * BLOCK, values[BLOCK];
        for (int64_t j = 0; j < BLOCK; j++) values[j] = j < left ? x[j] : -INFINITY;
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            const vfloat twice = load(values + j) * (2.0f / s->cap);
            store(values + j, s->cap - 2.0f * s->cap / (1.0f + vexp(twice)));
        }
        memcpy(x, values, (size_t)left * 4);
        if (s->block_max) s->block_max[row * s->stride + block] = block_maximum(values);
    }
}

void soft_cap(float *x, int64_t rows, int64_t width, float cap, float *block_max, int64_t block_max_stride) {
    const int64_t blocks = divide_up(width, BLOCK);
    parallel_for(rows * blocks, 64, cap_blocks,
                 &(SoftCap){x, width, cap, block_max, block_max_stride, blocks});
}

typedef struct {
    const Weight *embedding;
    const int64_t *ids;
    int64_t inputs, width;
    const float *states, *norm_token, *norm_state;
    float eps, *y;
} Pair;

static void pair_rows(const void *loop, int64_t first, int64_t end) {
    const Pair *p = loop;
    const int64_t inputs = p->inputs, width = p->width;
    for (int64_t r = first; r < end; r++) {
        const float *from = p->states + r * width;
        float *token = p->y + r * (inputs + width), *state = token + inputs;
        embed(p->embedding, p->ids + r, 1, inputs, token);
        if (p->norm_token) rms_norm_row(token, p->norm_token, inputs, p->eps, token);
        if (p->norm_state)
            rms_norm_row(from, p->norm_state, width, p->eps, state);
        else
            memcpy(state, from, (size_t)width * 4);
    }
}

void pair(const Weight *embedding, const int64_t *ids, int64_t rows, int64_t inputs, const float *states,
          int64_t width, const float *norm_token, const float *norm_state, float eps, float *y) {
    parallel_for(rows, 8, pair_rows,
                 &(Pair){embedding, ids, inputs, width, states, norm_token, norm_state, eps, y});
}
