/* What a head reads: the embedding of a token and the state that it was said from, side by side. */
#include "stack.h"

/* y [n,K+h] = [norm(e(ids)); norm(g)]; a norm that is 0 is none. */
void pair(const Weight *embedding, const int64_t *ids, long n, long K, const float *g, long h, const float *norm_token,
          const float *norm_state, float eps, float *y) {
    #pragma omp parallel for schedule(static) if (n > 8)
    for (long r = 0; r < n; r++) {
        float *token = y + r * (K + h), *state = token + K;
        embed(embedding, ids + r, 1, K, token);
        if (norm_token) rms_norm(token, norm_token, 1, K, eps, token);
        if (norm_state) rms_norm(g + r * h, norm_state, 1, h, eps, state);
        else memcpy(state, g + r * h, (size_t)h * 4);
    }
}
