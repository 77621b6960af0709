/* Sampling distributions as doubles: draft tokens are sampled from them, and rules.c compares them.
 *
 * Masses need not sum to 1: a probability is mass / total.  Blocks without mass are skipped by every pass, so
 * that top_k, top_p and min_p make all of them cheap. */
#pragma once
#include <stdint.h>
#include "kernels.h"

typedef struct {
    double *mass;      /* [blocks*BLOCK]; undefined in blocks whose sum is 0 */
    double *block_sum; /* [blocks] */
    double total;
    int64_t vocab, blocks;
} Distribution;

/* What a draft token was sampled from: probs / total; null for a chosen token, which has probability 1. */
typedef struct {
    const double *probs; /* [vocab] */
    double total;
    int32_t token;
} Sampled;

enum { DRAW_STREAM = 1, ACCEPT_STREAM, EMIT_STREAM }; /* purposes of `uniform` */

/* Uniform in [0, 1) of 53 bits, a function of its arguments alone; core/noise.py computes the same. */
double uniform(uint64_t stream, uint64_t purpose, uint64_t step, int64_t node);

/* Doubles that a distribution over `vocab` tokens takes. */
int64_t distribution_doubles(int64_t vocab);
Distribution place_distribution(double *at, int64_t vocab);

/* The distribution of a token, from its logits [vocab].  block_max: as in pick_with_maxima, or null.
 * Returns 0 if no logit is finite. */
int make_distribution(const float *logits, const DistributionParams *params, float *block_max,
                      Distribution *out);

/* Their sum. */
double sum_of(const double *probs, int64_t vocab);

double probability(const Distribution *p, int32_t token);

/* out = max(scale * p - q, 0).  Returns its mass. */
double subtract(const Distribution *p, Sampled q, double scale, Distribution *out);

/* Inverse transform sampling. */
int32_t draw(const Distribution *p, double uniform);

/* Normalized probabilities into out [width], 0 behind the vocabulary. */
void write_probs(const Distribution *p, double *out, int64_t width);
