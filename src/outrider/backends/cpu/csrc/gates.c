/* Gates of recurrent layers: sigmoid, softplus, products with an activation, and gated norms.  Threads share
 * rows.  Exact: an element follows from its own inputs, a norm from those of its group, in a fixed order. */
#include "elementwise.h"
#include "recurrent.h"
#include "threads.h"

typedef struct {
    const RowInputs *x, *z;
    const float *weight, *bias;
    int64_t group;
    float eps, low, high;
    int is_silu, is_first;
    float *y;
} Gate;

static const float *row_of(const RowInputs *x, int64_t row) { return x->data + row * x->stride; }

static void sigmoid_range(const void *loop, int64_t first, int64_t end) {
    const Gate *g = loop;
    for (; first < end; first++)
        for (int64_t i = 0; i < g->x->dim; i += LANES) {
            const int64_t count = min64(g->x->dim - i, LANES);
            store_at(g->y + first * g->x->dim + i, sigmoid(load_at(row_of(g->x, first) + i, count)), count);
        }
}

void sigmoid_rows(const RowInputs *x, int64_t rows, float *y) {
    parallel_for(rows, 8, sigmoid_range, &(Gate){.x = x, .y = y});
}

/* log(1 + u) for 0 <= u <= 1: 2 atanh(s) for s = u / (2 + u), by its series. */
INLINE vfloat log_1_plus(vfloat u) {
    const vfloat s = u / (2.0f + u), q = s * s;
    vfloat p = multiply_add(q, broadcast(1.0f / 13), broadcast(1.0f / 11));
    p = multiply_add(p, q, broadcast(1.0f / 9));
    p = multiply_add(p, q, broadcast(1.0f / 7));
    p = multiply_add(p, q, broadcast(1.0f / 5));
    p = multiply_add(p, q, broadcast(1.0f / 3));
    return 2.0f * multiply_add(p * q, s, s);
}

static void softplus_range(const void *loop, int64_t first, int64_t end) {
    const Gate *g = loop;
    for (; first < end; first++)
        for (int64_t i = 0; i < g->x->dim; i += LANES) {
            const int64_t count = min64(g->x->dim - i, LANES);
            const vfloat x = load_at(row_of(g->x, first) + i, count) + load_at(g->bias + i, count);
            const vfloat positive = max_lanes(broadcast(0), x);
            const vfloat sum = positive + log_1_plus(vexp(-max_lanes(-x, x)));
            const vfloat least = max_lanes(broadcast(g->low), sum);
            store_at(g->y + first * g->x->dim + i, -max_lanes(broadcast(-g->high), -least), count);
        }
}

void softplus_rows(const RowInputs *x, int64_t rows, const float *bias, float low, float high, float *y) {
    parallel_for(rows, 8, softplus_range, &(Gate){.x = x, .bias = bias, .low = low, .high = high, .y = y});
}

/* y [width] = x * act(z); y may be x. */
static void multiply_gate(const Gate *g, const float *x, int64_t row, float *y) {
    const float *z = row_of(g->z, row);
    for (int64_t i = 0; i < g->z->dim; i += LANES) {
        const int64_t count = min64(g->z->dim - i, LANES);
        const vfloat gate = load_at(z + i, count);
        store_at(y + i, load_at(x + i, count) * (g->is_silu ? silu(gate) : sigmoid(gate)), count);
    }
}

static void gate_range(const void *loop, int64_t first, int64_t end) {
    const Gate *g = loop;
    for (; first < end; first++)
        multiply_gate(g, row_of(g->x, first), first, g->y + first * g->x->dim);
}

void gate_rows(const RowInputs *x, const RowInputs *z, int64_t rows, int is_silu, float *y) {
    parallel_for(rows, 8, gate_range, &(Gate){.x = x, .z = z, .is_silu = is_silu, .y = y});
}

static void norm_range(const void *loop, int64_t first, int64_t end) {
    const Gate *g = loop;
    for (; first < end; first++) {
        float *y = g->y + first * g->x->dim;
        const float *x = row_of(g->x, first);
        if (g->is_first) multiply_gate(g, x, first, y);
        for (int64_t i = 0; i < g->x->dim; i += g->group)
            rms_norm_row((g->is_first ? y : x) + i, g->weight + i, g->group, g->eps, y + i);
        if (!g->is_first) multiply_gate(g, y, first, y);
    }
}

void gated_norm(const RowInputs *x, const RowInputs *z, int64_t rows, const float *weight, int64_t group,
                float eps, int is_silu, int is_first, float *y) {
    parallel_for(rows, 8, norm_range,
                 &(Gate){.x = x, .z = z, .weight = weight, .group = group, .eps = eps, .is_silu = is_silu,
                         .is_first = is_first, .y = y});
}
