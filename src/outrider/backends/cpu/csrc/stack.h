/* The blocks of a decoder, and a whole one.  structs.py mirrors these structs. */
#pragma once
#include "simd.h"

typedef struct {
    Weight qkv, o, gate_up, down;
    const float *norm_in, *norm_post, *q_norm, *k_norm;
    long window, skip;                                        /* skip: 1 the attention, 2 the MLP, 3 both */
} Layer;
typedef struct { long layers, hidden, inner, heads, kv_heads, head_dim, width, rot, kv; float eps, scale; const float *turn; } Shape;
typedef struct {
    long n, path, longest, pinned;
    const int64_t *positions, *slots, *seen, *depths;
    const int32_t *const *tables, *paths;
    long runs; const void *adapted;                           /* rows with LoRA adapters, see lora.c */
} Rows;
typedef struct { Weight embedding, head; const float *norm; long outputs; } Ends;

/* ---- kernels.c.  top [n,high], unless 0: gets the highest of every 64 outputs of a row */
void embed(const Weight *weight, const int64_t *ids, long n, long K, float *y);
void rms_norm(const float *x, const float *w, long n, long h, float eps, float *y);
void linear_crowned(const Weight *weight, const float *x, long n, long K, float *y, long O, int add, float *top, long high);
void stack(const Shape *s, const Layer *layers, const Rows *rows, char *pool, long plane, float *x, const float *u, long wide_u,
           float *const *taps);
