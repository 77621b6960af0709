/* What linear.c and linear_int.c share. */
#pragma once
#include "fetch.h"
#include "simd.h"

#if defined __AVX512F__ || defined __ARM_NEON
enum { TILE_VECTORS = 4, TILE_ROWS = 6 }; /* vectors and rows of a register tile: 24 of 32 registers */
#else
enum { TILE_VECTORS = 2, TILE_ROWS = 5 };
#endif
enum { PANEL = 64 }; /* outputs of a packed weight panel */

/* A line is what one step over k reads of a panel: 64 outputs of one input, or of a pair in bfloat16. */
enum { LINE_BYTES = PANEL * 4, CHUNK_LINES = 32, AHEAD_BYTES = CHUNK_LINES * LINE_BYTES };

/* One register tile: a few outputs of a few rows in one chunk. */
typedef struct {
    const char *weights; /* first output of the tile in the first line of the chunk */
    const char *x;       /* first input of the chunk in the first row */
    int64_t row_bytes;   /* from one row of x to the next */
    int64_t inputs;      /* of the chunk */
    float *sums;         /* [rows,PANEL], of the first output */
} TileTask;

/* Writes `vectors` vectors of outputs: sums + bias (or null) + the former y if `add`.  `space`: floats that
 * y has left. */
INLINE void store_outputs(const vfloat *sums, const int vectors, const float *bias, float *y, int64_t space,
                          int add) {
    float padded_y[PANEL], padded_bias[PANEL], *to = y;
    const size_t left = (size_t)space * 4;
    if (space < vectors * LANES) { /* the last outputs go through full-sized copies */
        memset(padded_y, 0, sizeof padded_y);
        memset(padded_bias, 0, sizeof padded_bias);
        if (add) memcpy(padded_y, y, left);
        if (bias) bias = memcpy(padded_bias, bias, left);
        to = padded_y;
    }
    for (int c = 0; c < vectors; c++) {
        vfloat sum = sums[c];
        if (bias) sum += load(bias + c * LANES);
        if (add) sum += load(to + c * LANES);
        store(to + c * LANES, sum);
    }
    if (to != y) memcpy(y, to, left);
}

/* linear_int.c: `linear` and `embed` for INT8 and INT4. */
void linear_int(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
                int add);
void embed_int(const Weight *weight, const int64_t *ids, int64_t rows, int64_t inputs, float *y);
int64_t panel_bytes_int(const Weight *weight, int64_t inputs); /* of PANEL outputs */

/* The outputs of a weight from first_output on, a multiple of PANEL. */
Weight outputs_from(const Weight *weight, int64_t inputs, int64_t first_output);
