/* Sampling distributions: from logits to probabilities, differences, draws.
 *
 * Computed: exp in double of (logit - max) / temperature, as a float, where the filters leave a token.
 * Order: sums of blocks of 64 by a fixed tree of additions, then of blocks in order; threads share blocks.
 * backends/torch/sampling.py and sampling/random_streams.py are the reference.  They differ from it by the
 * rounding of double sums, about 1e-16. */
#include "distribution.h"
#include "filter.h"
#include "noise.h"

enum { WIDE = LANES / 2, THREAD_BLOCKS = THREAD_PARTS * PART };
typedef double vwide __attribute__((vector_size(WIDE * 8), aligned(8), may_alias));
typedef int64_t vwideint __attribute__((vector_size(WIDE * 8), aligned(8), may_alias));
typedef float vnarrow __attribute__((vector_size(WIDE * 4), aligned(4), may_alias));

double uniform(uint64_t stream, uint64_t purpose, uint64_t step, int64_t node) {
    const uint64_t key = splitmix64(splitmix64(stream ^ splitmix64(purpose * GOLDEN)) + step);
    return (double)(splitmix64(key + (uint64_t)(node + 2) * GOLDEN) >> 11) * 0x1p-53;
}

int64_t distribution_doubles(int64_t vocab) { return divide_up(vocab, BLOCK) * (BLOCK + 1); }

Distribution place_distribution(double *at, int64_t vocab) {
    const int64_t blocks = divide_up(vocab, BLOCK);
    return (Distribution){at, at + blocks * BLOCK, 0, vocab, blocks};
}

/* ---- passes over blocks */

/* exp(x) for x <= 0 within 2 ulp, 0 below -708.  Splits x into n ln 2 + r; a Taylor polynomial in r. */
INLINE vwide exp_wide(vwide x) {
    static const double factors[] = {
        1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
        1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0,
    };
    const vwideint valid = x >= -708.0;
    x = (vwide)((vwideint)x & valid);
    const vwide shifted = x * 1.4426950408889634 + 0x1.8p52, n = shifted - 0x1.8p52;
    const vwide r = x - n * 0x1.62e42fefa0000p-1 - n * 0x1.cf79abc9e3b3ap-40;
    vwide p = r * (1.0 / 6227020800) + factors[0];
    for (int i = 1; i < 13; i++) p = p * r + factors[i];
    return (vwide)(((vwideint)p + ((vwideint)shifted << 52)) & valid);
}

INLINE double sum_wide(vwide v) {
    double sum[WIDE];
    memcpy(sum, &v, sizeof sum);
    for (int n = WIDE / 2; n; n /= 2)
        for (int i = 0; i < n; i++) sum[i] += sum[i + n];
    return sum[0];
}

static void sum_blocks(Distribution *d) {
    d->total = 0;
    for (int64_t b = 0; b < d->blocks; b++) d->total += d->block_sum[b];
}

/* The sum of a block's masses. */
INLINE double block_mass(const double *mass) {
    vwide sum = {0};
    for (int64_t j = 0; j < BLOCK; j += WIDE) sum += *(const vwide *)(mass + j);
    return sum_wide(sum);
}

/* Block b of probs [vocab]: in place, or copied to `tail` and padded with zeros. */
INLINE const double *block_of_probs(const double *probs, int64_t vocab, int64_t b, double *tail) {
    const int64_t first = b * BLOCK;
    if (first + BLOCK <= vocab) return probs + first;
    for (int64_t j = 0; j < BLOCK; j++) tail[j] = first + j < vocab ? probs[first + j] : 0;
    return tail;
}

double sum_of(const double *probs, int64_t vocab) {
    double sum = 0, tail[BLOCK];
    for (int64_t b = 0; b * BLOCK < vocab; b++) sum += block_mass(block_of_probs(probs, vocab, b, tail));
    return sum;
}

/* ---- from logits */

/* Writes the masses of block b from `cut` on; returns their sum. */
INLINE double exp_block(const Row *row, int64_t b, float cut, double *mass) {
    const float *logits = block_at(row, b);
    for (int64_t j = 0; j < BLOCK; j += WIDE) {
        const vnarrow below = (*(const vnarrow *)(logits + j) - row->max) * row->inv_temperature;
        const vwide x = __builtin_convertvector(below, vwide);
        *(vwide *)(mass + j) = (vwide)((vwideint)exp_wide(x) & (x >= (double)cut));
    }
    return block_mass(mass);
}

typedef struct {
    const Row *row;
    const float *block_max;
    float cut;
    Distribution *to;
} ExpLoop;

static void exp_blocks(const void *loop, int64_t first, int64_t end) {
    const ExpLoop *l = loop;
    for (int64_t b = first; b < end; b++) {
        const int any = below_max(l->row, l->block_max[b]) >= l->cut;
        l->to->block_sum[b] = any ? exp_block(l->row, b, l->cut, l->to->mass + b * BLOCK) : 0;
    }
}

static void exp_row(const Row *row, const float *block_max, float cut, Distribution *d) {
    parallel_for(d->blocks, THREAD_BLOCKS, exp_blocks, &(ExpLoop){row, block_max, cut, d});
    sum_blocks(d);
}

/* All mass on the first of the largest logits. */
static void make_point(const Row *row, const float *block_max, Distribution *d) {
    int64_t at = 0, j = 0;
    while (block_max[at] != row->max) at++;
    while (block_at(row, at)[j] != row->max) j++;
    memset(d->block_sum, 0, (size_t)d->blocks * 8);
    memset(d->mass + at * BLOCK, 0, BLOCK * 8);
    d->mass[at * BLOCK + j] = d->block_sum[at] = d->total = 1;
}

/* The candidates from the blocks that reach `least`, in order, padded to a multiple of BLOCK. */
static Candidates collect(const Row *row, const float *block_max, float least, Candidates t) {
    t.count = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        if (!(below_max(row, block_max[b]) >= least)) continue;
        const float *logits = block_at(row, b);
        for (int64_t j = 0; j < BLOCK; j++) {
            const float below = below_max(row, logits[j]);
            t.logit[t.count] = below;
            t.token[t.count] = (int32_t)(b * BLOCK + j);
            t.count += below >= least;
        }
    }
    const int64_t padded = divide_up(t.count, BLOCK) * BLOCK;
    for (int64_t i = t.count; i < padded; i++) t.logit[i] = -INFINITY;
    return t;
}

/* A lower bound of the k highest logits, from the maxima of blocks. */
static float bound_of_top(const Row *row, const float *block_max, int64_t k, Candidates space) {
    Candidates t = space;
    t.count = 0;
    for (int64_t b = 0; b < row->blocks; b++) {
        const float below = t.logit[t.count] = below_max(row, block_max[b]);
        t.count += below >= FORBIDDEN;
    }
    if (t.count < k) return FORBIDDEN;
    const int64_t count = t.count, padded = divide_up(count, BLOCK) * BLOCK;
    for (int64_t i = count; i < padded; i++) t.logit[i] = -INFINITY;
    t.count = count;
    return exact_cut(t, 1, lowest_logit(t), (double)k);
}

/* The logit, below the maximum, from which on min_p, top_k and top_p leave the tokens. */
static float find_cut(const Row *row, const float *block_max, const DistributionParams *params,
                      Candidates space) {
    const int top_k = params->top_k > 0 && params->top_k < row->vocab;
    float least = params->min_p > 0 ? (float)log(params->min_p) : FORBIDDEN;
    if (!top_k && !(params->top_p < 1)) return least;
    if (top_k) {
        const float bound = bound_of_top(row, block_max, params->top_k, space);
        least = bound > least ? bound : least;
    }
    Candidates t = collect(row, block_max, least, space);
    double mass;
    t = apply_filters(t, divide_up(t.count, BLOCK) * BLOCK, params, 0, &mass);
    return lowest_logit(t);
}

int make_distribution(const float *logits, const DistributionParams *params, float *block_max,
                      Distribution *out) {
    Row row = make_row(logits, out->vocab, params->temperature);
    const int64_t parts = parts_of(&row), padded = (row.blocks + 1) * BLOCK, maxima = row_blocks(out->vocab);
    PartResult *part_results = scratch_acquire(
        SCRATCH_SAMPLER, parts * (int64_t)sizeof(PartResult) + (maxima + 3 * padded) * 4);
    float *own_max = (float *)(part_results + parts), *floats = own_max + maxima;
    const Candidates space = {floats, floats + padded, (int32_t *)(floats + 2 * padded), 0};
    row.max = block_max ? known_maxima(&row, block_max)
                        : row_maxima(&row, own_max, part_results);
    if (!block_max) block_max = own_max;
    const int finite = isfinite(row.max);
    if (finite && params->temperature == 0)
        make_point(&row, block_max, out);
    else if (finite)
        exp_row(&row, block_max, find_cut(&row, block_max, params, space), out);
    scratch_release(SCRATCH_SAMPLER);
    return finite;
}

/* ---- use */

double probability(const Distribution *p, int32_t token) {
    return p->block_sum[token / BLOCK] > 0 ? p->mass[token] / p->total : 0;
}

typedef struct {
    const Distribution *p;
    Sampled q;
    double p_factor, q_factor;
    Distribution *out;
} Difference;

static void subtract_blocks(const void *loop, int64_t first, int64_t end) {
    const Difference *d = loop;
    const Distribution *p = d->p, *out = d->out;
    const Sampled q = d->q;
    for (int64_t b = first; b < end; b++) {
        double tail[BLOCK] = {0}, *to = out->mass + b * BLOCK;
        const double *from = p->mass + b * BLOCK;
        const double *less = q.probs ? block_of_probs(q.probs, p->vocab, b, tail) : tail;
        out->block_sum[b] = 0;
        if (!(p->block_sum[b] > 0)) continue;
        for (int64_t j = 0; j < BLOCK; j += WIDE) {
            const vwide p_mass = *(const vwide *)(from + j), q_mass = *(const vwide *)(less + j);
            const vwide rest = p_mass * d->p_factor - q_mass * d->q_factor;
            *(vwide *)(to + j) = (vwide)((vwideint)rest & (rest > 0));
        }
        if (!q.probs && q.token / BLOCK == b) to[q.token % BLOCK] = fmax(to[q.token % BLOCK] - 1, 0);
        out->block_sum[b] = block_mass(to);
    }
}

double subtract(const Distribution *p, Sampled q, double scale, Distribution *out) {
    const double q_factor = q.probs ? 1 / q.total : 0;
    parallel_for(p->blocks, THREAD_BLOCKS, subtract_blocks,
                 &(Difference){p, q, scale / p->total, q_factor, out});
    sum_blocks(out);
    return out->total;
}

int32_t draw(const Distribution *p, double uniform) {
    const double target = p->total * uniform;
    double before = 0;
    int64_t b = 0, token = 0;
    for (int64_t next = 0; next < p->blocks; next++) { /* b: the block that holds the target */
        if (!(p->block_sum[next] > 0)) continue;
        if (next != b) before += p->block_sum[b] * (p->block_sum[b] > 0);
        b = next;
        if (before + p->block_sum[b] > target) break;
    }
    for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i++) { /* rounding may leave the last one */
        if (!(p->mass[i] > 0)) continue;
        token = i;
        if ((before += p->mass[i]) > target) break;
    }
    return (int32_t)token;
}

void write_probs(const Distribution *p, double *out, int64_t width) {
    const double factor = 1 / p->total;
    for (int64_t b = 0; b < p->blocks; b++) {
        const int64_t n = min64(p->vocab - b * BLOCK, BLOCK);
        double *to = out + b * BLOCK;
        const double *from = p->mass + b * BLOCK;
        if (p->block_sum[b] > 0)
            for (int64_t j = 0; j < n; j++) to[j] = from[j] * factor;
        else
            memset(to, 0, (size_t)n * 8);
    }
    if (width > p->vocab) memset(out + p->vocab, 0, (size_t)(width - p->vocab) * 8);
}

int64_t probabilities(const float *logits, int64_t vocab, float temperature, double min_p, int64_t top_k,
                      double top_p, double *out) {
    const DistributionParams params = {temperature, min_p, top_k, top_p};
    double *space = scratch_acquire(SCRATCH_RULES, distribution_doubles(vocab) * 8);
    Distribution p = place_distribution(space, vocab);
    const int finite = make_distribution(logits, &params, 0, &p);
    if (finite) write_probs(&p, out, vocab);
    scratch_release(SCRATCH_RULES);
    return finite;
}

int64_t sample_children(const double *probs, int64_t vocab, uint64_t stream, uint64_t step,
                        int64_t first_node, int64_t count, int repeats, int32_t *out) {
    double *space = scratch_acquire(SCRATCH_RULES, distribution_doubles(vocab) * 8);
    Distribution p = place_distribution(space, vocab);
    for (int64_t b = 0; b < p.blocks; b++) {
        double tail[BLOCK];
        memcpy(p.mass + b * BLOCK, block_of_probs(probs, vocab, b, tail), sizeof tail);
        p.block_sum[b] = block_mass(p.mass + b * BLOCK);
    }
    sum_blocks(&p);
    int64_t n = 0;
    for (; n < count && p.total > 0; n++) {
        out[n] = draw(&p, uniform(stream, DRAW_STREAM, step, first_node + n));
        if (repeats) continue;
        const int64_t b = out[n] / BLOCK;
        p.mass[out[n]] = 0;
        p.block_sum[b] = block_mass(p.mass + b * BLOCK);
        sum_blocks(&p);
    }
    scratch_release(SCRATCH_RULES);
    return n;
}
