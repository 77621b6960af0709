#pragma once
#include "kernels.h"

/* Floats of the space that `delta_block` takes; of the largest layer. */
int64_t delta_floats(const Layer *layers, int64_t num_layers, const Rows *rows);

/* x [rows,hidden] += the gated delta rule of a layer, of its input [rows,hidden]. */
void delta_block(const Layer *layer, const Rows *rows, int64_t hidden, float eps, const float *input,
                 float *space, float *x);
