/* When a chain of guesses ends before its last level: decided from the law that a token was picked from, as it is before any
 * filter, at the temperature of the request (1 where it is greedy).  kernels/chain.py is the same in torch. */
#include "simd.h"

enum { BLOCK = 64 };

INLINE vf at_least(vf x, float least) {                       /* a forbidden token, at minus infinity, weighs nothing: 0 * inf is no number */
    const vi in = x > least;
    return (vf)(((vi)x & in) | ((vi)((vf){0} + least) & ~in));
}

/* out = the token's probability, the entropy, the TOP largest probabilities */
static void measure(const float *l, long V, float temperature, int32_t token, float *out) {
    const float cold = temperature > 0 ? 1.0f / temperature : 1.0f;
    float best[TOP];
    for (int k = 0; k < TOP; k++) best[k] = -INFINITY;
    for (long i = 0; i < V; i += BLOCK) {
        const long m = V - i < BLOCK ? V - i : BLOCK;
        const float worst = best[TOP - 1];
        int hits = 0;
        for (long j = 0; j < m; j++) hits += l[i + j] > worst;
        if (hits) for (long j = i; j < i + m; j++) if (l[j] > best[TOP - 1]) {
            int at = TOP - 1;
            for (; at > 0 && best[at - 1] < l[j]; at--) best[at] = best[at - 1];
            best[at] = l[j];
        }
    }
    vf mass = {0}, sum = {0};
    for (long i = 0; i < V; i += VL) {
        vf v = (vf){0} - INFINITY;
        if (i + VL <= V) v = *(const vf *)(l + i); else memcpy(&v, l + i, (size_t)(V - i) * 4);
        const vf x = at_least((v - best[0]) * cold, -100.0f), p = vexp(x);
        mass += p; sum += p * x;
    }
    const float all = total(mass);
    vf x = (vf){0} - 100.0f;
    x[0] = (l[token] - best[0]) * cold;
    for (int k = 0; k < TOP; k++) x[k + 1] = (best[k] - best[0]) * cold;
    const vf p = vexp(at_least(x, -100.0f));
    out[0] = p[0] / all;
    out[1] = logf(all) - total(sum) / all;
    for (int k = 0; k < TOP; k++) out[k + 2] = p[k + 1] / all;
}

/* net = [hidden, TRAITS + 1] weights, [hidden] biases, [hidden] weights, [1] bias: below 0 it says that the token is wrong */
static int doubts(const Halt *h, const float *traits, long level) {
    const float *w = h->net, *bias = w + h->hidden * (TRAITS + 1), *last = bias + h->hidden;
    float sum = last[h->hidden];
    for (long i = 0; i < h->hidden; i++, w += TRAITS + 1) {
        float x = bias[i] + w[TRAITS] * (float)level;
        for (int k = 0; k < TRAITS; k++) x += w[k] * traits[k];
        if (x > 0) sum += x * last[i];
    }
    return sum < 0;
}

int should_stop(const Halt *h, const float *logits, long V, float temperature, int32_t token, long level, float *traits) {
    measure(logits, V, temperature, token, traits);
    return traits[0] < h->least || traits[1] > h->most || (h->net && doubts(h, traits, level));
}
