/* RMS norm, gated SiLU, and the input of a draft head.  Threads share rows; within a row the order of
 * operations is fixed. */
#include "elementwise.h"

void rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *y) {
    #pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t r = 0; r < rows; r++) rms_norm_row(x + r * width, weight, width, eps, y + r * width);
}

/* Lane by lane g * sigmoid(g) * u, the last lanes of a row through zero-padded vectors: no operation depends
 * on its lane. */
void silu_mul(const float *x, int64_t rows, int64_t width, float *y) {
    #pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = x + r * 2 * width, *up = gate + width;
        float *out = y + r * width;
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

void pair(const Weight *embedding, const int64_t *ids, int64_t rows, int64_t inputs, const float *states,
          int64_t width, const float *norm_token, const float *norm_state, float eps, float *y) {
    #pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t r = 0; r < rows; r++) {
        float *token = y + r * (inputs + width), *state = token + inputs;
        embed(embedding, ids + r, 1, inputs, token);
        if (norm_token) rms_norm(token, norm_token, 1, inputs, eps, token);
        if (norm_state)
            rms_norm(states + r * width, norm_state, 1, width, eps, state);
        else
            memcpy(state, states + r * width, (size_t)width * 4);
    }
}
