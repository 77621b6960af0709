#pragma once
#include "kernels.h"

enum { MAX_EXPERTS = 1024 }; /* of a layer, as in limits.py */

/* Floats of the space that `mix_experts` takes for so many rows. */
int64_t experts_floats(const ModelShape *shape, int64_t rows);

/* x [rows,hidden] += the experts of a layer that each row of `input` [rows,hidden] has. */
void mix_experts(const ModelShape *shape, const Layer *layer, int64_t rows, const float *input, float *space,
                 float *x);
