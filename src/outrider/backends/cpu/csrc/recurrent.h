/* Entry points of recurrent.c, short_conv.c and gates.c, which bindings.py reads as well.  Shapes and
 * formulas are in outrider/backends/recurrence.py; conventions in kernels.h.  And what delta.c reads. */
#pragma once
#include "kernels.h"

/* The rows of a recurrent forward, parents first. */
typedef struct {
    int64_t num_rows;
    const int32_t *parents; /* [num_rows]: the row before, -1: the state in the row's slot */
    const int32_t *slots, *saves, *fresh; /* [num_rows]; fresh: the slot is read as zeros */
    const int32_t *copies; /* [num_rows]: another slot that the state after the row is written to, or -1 */
} Forest;

/* The rows of a step through the recurrent layers of a decoder.  Replayed rows come before those of the step.
 *   replayed [num_replayed]: numbers of their inputs among the kept ones; drafted [num_drafted]: rows of the
 *   step whose inputs are kept, in this order
 *   by recurrent layer: tails [slots,num_taps-1,channels], states [slots,heads,dim,key_dim] and kept
 *   [drafted,channels+2*heads] */
typedef struct {
    Forest forest;
    int64_t num_replayed, num_drafted;
    const int32_t *replayed, *drafted;
    float *const *tails, *const *states, *const *kept;
} RecurrentRows;

/* A gated delta rule in place of attention, as `LayerDelta` of outrider/backends/layer.py has it.
 * channels = 2*key_heads*key_dim + heads*dim */
typedef struct {
    Weight qkvz, gates;                /* [channels+heads*dim,hidden], [2*heads,hidden] */
    const float *taps;                 /* [num_taps,channels] */
    const float *bias, *rates, *norm;  /* [heads], [heads], [heads*dim] */
    int64_t num_taps, key_heads, heads, key_dim, dim;
} LayerDelta;

/* Inputs [rows,heads,dim] of which row r begins at data + r * stride. */
typedef struct {
    const float *data;
    int64_t stride, heads, dim;
} RowInputs;

/* One recurrent layer over a forest.
 *   gated delta rule: keys k, reads q, values v, decays g [rows,heads,1 or dim], rates beta
 *   selective scan:   keys b, reads c, values x, decays a [heads,1 or dim], rates dt
 * values [rows,heads,height]; keys and reads [rows,groups,dim]; rates [rows,heads] */
typedef struct {
    RowInputs keys, reads, values, decays, rates;
    const float *skips; /* [heads]: d of the scan */
    float *states;      /* [slots,heads,height,dim] */
    float *out;         /* [rows,heads,height] */
} Recurrent;

void gated_delta(const Forest *forest, const Recurrent *layer);
void selective_scan(const Forest *forest, const Recurrent *layer);

/* out [rows,channels] of x; weight [taps,channels], bias [channels] or null, tails
 * [slots,taps-1,channels]. */
void short_conv(const Forest *forest, const RowInputs *x, const float *weight, const float *bias,
                int64_t taps, int is_silu, float *tails, float *out);

/* y [rows,width] = sigmoid(x); min(max(log(1 + exp(x + bias)), low), high) with bias [width]. */
void sigmoid_rows(const RowInputs *x, int64_t rows, float *y);
void softplus_rows(const RowInputs *x, int64_t rows, const float *bias, float low, float high, float *y);

/* y [rows,width] = x * act(z), act the sigmoid or, if `is_silu`, SiLU. */
void gate_rows(const RowInputs *x, const RowInputs *z, int64_t rows, int is_silu, float *y);

/* y [rows,width] = norm(x) * act(z), or norm(x * act(z)) if `is_first`; weight [width], norms of `group`. */
void gated_norm(const RowInputs *x, const RowInputs *z, int64_t rows, const float *weight, int64_t group,
                float eps, int is_silu, int is_first, float *y);
