/* RMS norm, gated SiLU, and the input of a draft head.  Threads share rows; within a row the order of
 * operations is fixed. */
#include "elementwise.h"
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
    const float *x;
    int64_t width;
    float *y;
} Silu;

/* Lane by lane g * sigmoid(g) * u, the last lanes of a row through zero-padded vectors: no operation depends
 * on its lane. */
static void silu_rows(const void *loop, int64_t first, int64_t end) {
    const Silu *s = loop;
    const int64_t width = s->width;
    for (int64_t r = first; r < end; r++) {
        const float *gate = s->x + r * 2 * width, *up = gate + width;
        float *out = s->y + r * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            const vfloat g = load(gate + i), u = load(up + i);
            store(out + i, g / (1.0f + vexp(-g)) * u);
        }
        if (i < width) {
            const vfloat g = load_part(gate + i, width - i), u = load_part(up + i, width - i);
            const vfloat last = g / (1.0f + vexp(-g)) * u;
            memcpy(out + i, &last, (size_t)(width - i) * 4);
        }
    }
}

void silu_mul(const float *x, int64_t rows, int64_t width, float *y) {
    parallel_for(rows, 4, silu_rows, &(Silu){x, width, y});
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
