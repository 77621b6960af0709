/* The CPU sampler: one pass over a row of logits, no sort of the vocabulary.  sampling/reference.py is the same law in torch. */
#include "simd.h"

enum { BINS = 4096 };
typedef struct { float logit; int32_t id; } Item;
typedef struct { float logit; int32_t id; } Cut;              /* kept: logit above, or equal and id not above */

static _Thread_local float *scratch;
static _Thread_local long scratch_size;

static uint64_t mix(uint64_t z) {                             /* splitmix64's finaliser */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
static uint32_t bits(uint64_t key, long token) { return (uint32_t)(mix(key + (uint64_t)(token + 1) * 0x9e3779b97f4a7c15u) >> 40); }
static float gumbel(uint32_t u) { return (float)-log(-log((u + 0.5) * 0x1p-24)); }
static float bound(uint32_t u) {                              /* -log(-log u) <= -log(1 - u), from the exponent of 1 - u alone */
    return 0.6931472f * (float)(25 - (31 - __builtin_clz((1u << 24) - u)));
}

static int order(const void *a, const void *b) {
    const Item *x = a, *y = b;
    if (x->logit != y->logit) return x->logit < y->logit ? 1 : -1;
    return x->id < y->id ? -1 : x->id > y->id;
}
static int kept(Cut c, float logit, long id) { return logit > c.logit || (logit == c.logit && id <= c.id); }
static long bin(float best, float logit) { float d = (best - logit) * 128; return d < BINS - 1 ? (long)d : BINS - 1; }

/* The last item, best first, before which less than `target` has been summed (of mass, or of one an item if mass is 0). */
static Cut cut_at(const float *l, const float *mass, long V, float best, Cut now, double target) {
    static _Thread_local double sums[BINS];
    memset(sums, 0, sizeof sums);
    for (long i = 0; i < V; i++) if (kept(now, l[i], i)) sums[bin(best, l[i])] += mass ? mass[i] : 1;
    double before = 0;
    long b = 0;
    while (b < BINS && before + sums[b] < target) before += sums[b++];
    if (b == BINS) return now;
    long n = 0;
    for (long i = 0; i < V; i++) n += kept(now, l[i], i) && bin(best, l[i]) == b;
    Item *items = malloc((size_t)(n + 1) * sizeof *items);
    n = 0;
    for (long i = 0; i < V; i++) if (kept(now, l[i], i) && bin(best, l[i]) == b) items[n++] = (Item){l[i], (int32_t)i};
    qsort(items, (size_t)n, sizeof *items, order);
    long last = 0;
    for (long i = 0; i < n && before < target; i++) { last = i; before += mass ? mass[items[i].id] : 1; }
    Cut c = {items[last].logit, items[last].id};
    free(items);
    return c;
}

static void exps(const float *l, long V, float best, float *out) {
    long i = 0;
    for (; i + VL <= V; i += VL) *(vf *)(out + i) = vexp(*(const vf *)(l + i) - best);
    if (i < V) {
        vf rest = {0};
        memcpy(&rest, l + i, (size_t)(V - i) * 4);
        rest = vexp(rest - best);
        memcpy(out + i, &rest, (size_t)(V - i) * 4);
    }
}

static void keep_best(float score, int32_t id, long k, long *n, float *scores, int32_t *out) {   /* best first, ties by id */
    long at = *n < k ? (*n)++ : k - 1;
    for (; at > 0 && scores[at - 1] < score; at--) { scores[at] = scores[at - 1]; out[at] = out[at - 1]; }
    scores[at] = score; out[at] = id;
}

/* The k best tokens of `logits` (k <= 64) into out, and their probabilities into prob unless it is 0.  Temperature 0 ranks by
 * logit, otherwise by log p + noise(key, token), where p is the law after min_p, top_k and top_p.  Returns how many there are:
 * fewer than k where the law allows fewer, none where no logit is finite. */
long pick(const float *logits, long V, float temperature, double min_p, long top_k, double top_p, uint64_t key, long k,
          int32_t *out, float *prob) {
    if (scratch_size < 2 * V) { free(scratch); scratch = malloc((size_t)V * 8); scratch_size = 2 * V; }
    const int greedy = temperature == 0;
    float *mass = scratch + V, scores[64], best = -INFINITY;
    const float *l = greedy ? logits : scratch;
    long n = 0, top = -1;
    if (!greedy) for (long i = 0; i < V; i++) scratch[i] = logits[i] / temperature;
    float lanes[16];
    for (int j = 0; j < 16; j++) lanes[j] = -INFINITY;
    long i = 0;
    for (; i + 16 <= V; i += 16) for (int j = 0; j < 16; j++) lanes[j] = l[i + j] > lanes[j] ? l[i + j] : lanes[j];
    for (; i < V; i++) best = l[i] > best ? l[i] : best;
    for (int j = 0; j < 16; j++) best = lanes[j] > best ? lanes[j] : best;
    if (!isfinite(best)) return 0;
    for (top = 0; l[top] != best; top++) ;
    if (greedy && k == 1 && !prob) { out[0] = (int32_t)top; return 1; }

    Cut c = {-INFINITY, -1};                                  /* everything finite */
    const int nucleus = !greedy && top_p < 1;
    if (!greedy && min_p > 0) { c.logit = best + (float)log(min_p); c.id = INT32_MAX; }
    if (!greedy && top_k > 0 && top_k < V) { c = cut_at(l, 0, V, best, c, (double)top_k); c.id = INT32_MAX; }
    if (nucleus || prob) exps(l, V, best, mass);
    if (nucleus) {
        double sum = 0;
        for (i = 0; i < V; i++) if (kept(c, l[i], i)) sum += mass[i];
        c = cut_at(l, mass, V, best, c, top_p * sum);
    }
    keep_best(greedy ? best : best + gumbel(bits(key, top)), (int32_t)top, k, &n, scores, out);
    for (i = 0; i < V; i++) {
        if (i == top || !kept(c, l[i], i)) continue;
        const float worst = n < k ? -INFINITY : scores[k - 1];
        if (greedy) { if (l[i] > worst) keep_best(l[i], (int32_t)i, k, &n, scores, out); continue; }
        const uint32_t u = bits(key, i);
        if (l[i] + bound(u) < worst) continue;                /* noise is drawn only where it can win */
        const float score = l[i] + gumbel(u);
        if (score > worst) keep_best(score, (int32_t)i, k, &n, scores, out);
    }
    if (prob) {
        double sum = 0;
        for (i = 0; i < V; i++) if (kept(c, l[i], i)) sum += mass[i];
        for (i = 0; i < n; i++) prob[i] = (float)(mass[out[i]] / sum);
    }
    return n;
}
