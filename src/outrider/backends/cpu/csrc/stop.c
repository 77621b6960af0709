/* Early end of a chain of draft tokens: decided from the distribution that a token was picked from, before
 * any filter, at the temperature of the request (1 if it is greedy).  core/stop_rule.py is the reference.
 *
 * Computed: the NUM_TOP largest logits in one pass over blocks, then sum of p and of p log p in one pass
 * over vectors.
 * Exact: one thread, a fixed order of additions; the result depends on the row alone. */
#include "simd.h"

enum { BLOCK = 64 };
static const float LOWEST = -100.0f; /* replaces minus infinity, so that 0 * log 0 is 0 */

INLINE vfloat at_least_lowest(vfloat x) { return select_lanes(x > LOWEST, x, broadcast(LOWEST)); }

/* The NUM_TOP largest logits, largest first. */
static void largest_logits(const float *logits, int64_t vocab, float *top) {
    for (int k = 0; k < NUM_TOP; k++) top[k] = -INFINITY;
    for (int64_t i = 0; i < vocab; i += BLOCK) {
        const int64_t n = min64(vocab - i, BLOCK);
        const float smallest = top[NUM_TOP - 1];
        int hits = 0;
        for (int64_t j = 0; j < n; j++) hits += logits[i + j] > smallest;
        for (int64_t j = i; hits && j < i + n; j++) {
            if (!(logits[j] > top[NUM_TOP - 1])) continue;
            int at = NUM_TOP - 1;
            for (; at > 0 && top[at - 1] < logits[j]; at--) top[at] = top[at - 1];
            top[at] = logits[j];
        }
    }
}

/* features: see should_stop in kernels.h. */
static void measure(const float *logits, int64_t vocab, float temperature, int32_t token, float *features) {
    const float inv_temperature = temperature > 0 ? 1.0f / temperature : 1.0f;
    float top[NUM_TOP];
    largest_logits(logits, vocab, top);
    vfloat mass = {0}, weighted = {0}; /* sums of p and p log p, unnormalized */
    for (int64_t i = 0; i < vocab; i += LANES) {
        vfloat v = broadcast(-INFINITY);
        if (i + LANES <= vocab)
            v = load(logits + i);
        else
            memcpy(&v, logits + i, (size_t)(vocab - i) * 4);
        const vfloat x = at_least_lowest((v - top[0]) * inv_temperature), p = vexp(x);
        mass += p;
        weighted += p * x;
    }
    const float total = sum_lanes(mass);
    float p[(NUM_TOP + LANES) / LANES * LANES] = {(logits[token] - top[0]) * inv_temperature};
    for (int k = 0; k < NUM_TOP; k++) p[k + 1] = (top[k] - top[0]) * inv_temperature;
    for (int i = 0; i <= NUM_TOP; i += LANES) store(p + i, vexp(at_least_lowest(load(p + i))));
    features[0] = p[0] / total;
    features[1] = logf(total) - sum_lanes(weighted) / total;
    for (int k = 0; k < NUM_TOP; k++) features[k + 2] = p[k + 1] / total;
}

/* The score of a network of one ReLU layer.  net: [hidden,NUM_FEATURES+1] weights for features and depth,
 * [hidden] biases, [hidden] weights, [1] bias. */
static float net_score(const StopRule *rule, const float *features, int64_t depth) {
    const float *weights = rule->net, *bias = weights + rule->hidden * (NUM_FEATURES + 1),
                *last = bias + rule->hidden;
    float score = last[rule->hidden];
    for (int64_t i = 0; i < rule->hidden; i++, weights += NUM_FEATURES + 1) {
        float x = bias[i] + weights[NUM_FEATURES] * (float)depth;
        for (int k = 0; k < NUM_FEATURES; k++) x += weights[k] * features[k];
        if (x > 0) score += x * last[i];
    }
    return score;
}

int should_stop(const StopRule *rule, const float *logits, int64_t vocab, float temperature, int32_t token,
                int64_t depth, float *features) {
    measure(logits, vocab, temperature, token, features);
    if (features[0] < rule->min_prob || features[1] > rule->max_entropy) return 1;
    return rule->net && net_score(rule, features, depth) < 0;
}
