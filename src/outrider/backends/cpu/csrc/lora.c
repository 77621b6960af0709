/* LoRA: y[rows, part] += scale * b (a x), after a linear of the decoder.  The rule of kernels.c holds: what is computed for a
 * row is a fixed sequence of operations on that row's data and its own adapter.  Everything is float: adapters are small. */
#include "simd.h"

enum { PANEL = 64, TILE = 4 };               /* outputs a panel of b; rows, and ranks, that share what was read */

typedef struct { const float *a, *b; long rank, start, outputs; float scale; } Low;   /* a [rank][K up to 16s], b [outputs/64][rank][64] */
typedef struct { long row, count; const Low *parts; } Run;                            /* rows that use one adapter */

/* t[rows, ranks] = scale * a x, one accumulator a value, whatever the tile */
INLINE void dots(const int rows, const int ranks, const float *a, const float *x, long K, float scale, float *t, long width) {
    vf acc[TILE][TILE];
    const long wide = (K + 15) / 16 * 16;
    for (int r = 0; r < rows; r++) for (int k = 0; k < ranks; k++) acc[r][k] = (vf){0};
    long i = 0;
    for (; i + VL <= K; i += VL) for (int k = 0; k < ranks; k++) {
        const vf v = *(const vf *)(a + k * wide + i);
        for (int r = 0; r < rows; r++) acc[r][k] += v * *(const vf *)(x + r * K + i);
    }
    if (i < K) for (int r = 0; r < rows; r++) {
        vf end = {0};
        memcpy(&end, x + r * K + i, (size_t)(K - i) * 4);
        for (int k = 0; k < ranks; k++) acc[r][k] += *(const vf *)(a + k * wide + i) * end;
    }
    for (int r = 0; r < rows; r++) for (int k = 0; k < ranks; k++) t[r * width + k] = total(acc[r][k]) * scale;
}

/* y[rows, NV * VL outputs, `left` of them real] += b t */
INLINE void spread(const int rows, const float *b, long rank, const float *t, long width, float *y, long O, long left) {
    vf acc[TILE][NV];
    for (int r = 0; r < rows; r++) for (int c = 0; c < NV; c++) acc[r][c] = (vf){0};
    for (long k = 0; k < rank; k++, b += PANEL) for (int c = 0; c < NV; c++) {
        const vf v = *(const vf *)(b + c * VL);
        for (int r = 0; r < rows; r++) acc[r][c] += v * t[r * width + k];
    }
    for (int r = 0; r < rows; r++) {
        float *to = y + r * O, sum[NV * VL];
        if (left >= NV * VL) for (int c = 0; c < NV; c++) *(vf *)(to + c * VL) += acc[r][c];
        else { memcpy(sum, acc[r], sizeof sum); for (long j = 0; j < left; j++) to[j] += sum[j]; }
    }
}

static void down(const Run *u, const Low *p, const float *x, long K, float *t, long width) {   /* work of all threads, unsynchronised */
    const long end = u->row + u->count, wide = (K + 15) / 16 * 16;
    #pragma omp for collapse(2) schedule(static) nowait
    for (long from = u->row; from < end; from += TILE) for (long k = 0; k < p->rank; k += TILE) {
        const float *a = p->a + k * wide;
        const long ranks = p->rank - k < TILE ? p->rank - k : TILE;
        if (end - from >= TILE && ranks == TILE) { dots(TILE, TILE, a, x + from * K, K, p->scale, t + from * width + k, width); continue; }
        for (long r = from; r < end && r < from + TILE; r++) {
            if (ranks == TILE) { dots(1, TILE, a, x + r * K, K, p->scale, t + r * width + k, width); continue; }
            for (long i = 0; i < ranks; i++) dots(1, 1, a + i * wide, x + r * K, K, p->scale, t + r * width + k + i, width);
        }
    }
}

static void up(const Run *u, const Low *p, const float *t, long width, float *y, long O) {
    const long end = u->row + u->count;
    #pragma omp for collapse(2) schedule(static) nowait
    for (long from = u->row; from < end; from += TILE) for (long c = 0; c < p->outputs; c += NV * VL) {
        const float *b = p->b + c / PANEL * p->rank * PANEL + c % PANEL;
        float *to = y + p->start + c;
        long r = from;
        if (end - from >= TILE) { spread(TILE, b, p->rank, t + r * width, width, to + r * O, O, p->outputs - c); continue; }
        for (; r < end; r++) spread(1, b, p->rank, t + r * width, width, to + r * O, O, p->outputs - c);
    }
}

/* `parts` parts of every run's adapter from `part` on: the projections of one fused linear x [.,K] -> y [.,O]. */
void adapt(const void *given, long count, long part, long parts, const float *x, long K, float *y, long O) {
    const Run *runs = given, *last = runs + count;
    long width = 0;                                           /* of t: a row's low-rank values, part after part */
    for (const Run *u = runs; u < last; u++) {
        long sum = 0;
        for (long p = part; p < part + parts; p++) sum += u->parts[p].rank;
        if (sum > width) width = sum;
    }
    if (!width) return;
    float *t = malloc((size_t)(last[-1].row + last[-1].count) * (size_t)width * 4);
    #pragma omp parallel
    {
        for (const Run *u = runs; u < last; u++)
            for (long p = part, at = 0; p < part + parts; at += u->parts[p++].rank) down(u, u->parts + p, x, K, t + at, width);
        #pragma omp barrier
        for (const Run *u = runs; u < last; u++)
            for (long p = part, at = 0; p < part + parts; at += u->parts[p++].rank)
                if (u->parts[p].rank) up(u, u->parts + p, t + at, width, y, O);
    }
    free(t);
}
