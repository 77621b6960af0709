/* What the kernels and the sampler share: vectors, the exponential, and the small steps that several of them take. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { VL = 16, NV = 4, MR = 6 };            /* floats a vector, vectors and rows a register tile (6 x 4 of 32 registers) */
#else
enum { VL = 8, NV = 2, MR = 4 };
#endif

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t bf;
#define INLINE static inline __attribute__((always_inline))

/* Lanes of two vectors, and which of them. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#ifdef __AVX512F__
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif

INLINE vf vexp(vf x) {                                        /* within 2 ulp; 0 below -87, exp(88) above 88 */
    vi tiny = x < -87.0f, huge = x > 88.0f;
    const vf most = (vf){0} + 88.0f;
    x = (vf)(((vi)x & ~(tiny | huge)) | ((vi)most & huge));
    vf n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;     /* round to an integer by the magic constant */
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f; p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi e = (__builtin_convertvector(n, vi) + 127) << 23;
    return (vf)((vi)(p * (vf)e) & ~tiny);
}

INLINE uint64_t mix(uint64_t z) {                             /* splitmix64's finaliser */
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

INLINE float total(vf v) {                                    /* always the same tree of additions: halves onto halves */
    typedef float v4 __attribute__((vector_size(16), aligned(4)));
    v4 q[VL / 4];
    memcpy(q, &v, sizeof v);
    for (int n = VL / 8; n; n /= 2) for (int i = 0; i < n; i++) q[i] += q[i + n];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}

/* ---- a linear's weight.  structs.py mirrors this struct, `Packed` in cpu.py tells the layouts. */
enum { FLOAT, BFLOAT, INT8, INT4 };                           /* also what K/V lies in: FLOAT, BFLOAT or INT8 */
typedef struct { const void *data; const float *bias; int kind, group, offsets; float unit; } Weight;

/* Writes `count` vectors of outputs (+ bias, + what stood there), as far as there is room: `room` floats. */
INLINE void put(const vf *v, const int count, const float *bias, float *y, long room, int add) {
    float part[2][NV * VL], *to = y;
    if (room < count * VL) {                                  /* the last outputs go through full-sized copies */
        memset(part, 0, sizeof part);
        if (add) memcpy(part[0], y, (size_t)room * 4);
        if (bias) bias = memcpy(part[1], bias, (size_t)room * 4);
        to = part[0];
    }
    for (int c = 0; c < count; c++) {
        vf o = v[c];
        if (bias) o += *(const vf *)(bias + c * VL);
        if (add) o += *(const vf *)(to + c * VL);
        *(vf *)(to + c * VL) = o;
    }
    if (to != y) memcpy(y, to, (size_t)room * 4);
}

/* ---- attention: the keys of a row, in the order of their positions, and the softmax over them */
typedef struct { const int32_t *table, *path; long seen, pinned, shift; } Keys;   /* a view's keys from `pinned` on stand `shift` further on */
INLINE long slot_of(Keys k, long j) { return j < k.seen ? k.table[j] : k.path[j - k.seen]; }
INLINE float softmax(float *s, long n) {                      /* in place, unnormalised; returns 1 / sum */
    const long padded = (n + VL - 1) / VL * VL;
    for (long j = n; j < padded; j++) s[j] = -INFINITY;
    vf top = *(vf *)s, sum = {0};
    for (long j = VL; j < padded; j += VL) { vf v = *(vf *)(s + j); vi m = v > top; top = (vf)(((vi)v & m) | ((vi)top & ~m)); }
    float best = top[0];
    for (int i = 1; i < VL; i++) best = top[i] > best ? top[i] : best;
    for (long j = 0; j < padded; j += VL) { vf e = vexp(*(vf *)(s + j) - best); sum += e; *(vf *)(s + j) = e; }
    return 1.0f / total(sum);
}

/* What some families do to a row's scores before the softmax: cap them, prefer near keys (ALiBi), add a key without a value (a
 * sink).  By query head; null and 0 mean no.  The row itself lies at the last of its n keys, which begin at key `from`; near and far are
 * positions, never how many keys lie between.  Returns how many scores there are. */
typedef struct { const float *slopes, *sinks; float cap; } Bend;
INLINE long bent(const Bend *b, long head, Keys k, long from, float *s, long n) {
    if (!b) return n;
    if (b->cap > 0) for (long j = 0; j < n; j++) s[j] = b->cap * tanhf(s[j] / b->cap);
    if (b->slopes) for (long j = 0; j < n; j++) s[j] += b->slopes[head] * (float)(j + 1 - n - (from + j < k.pinned ? k.shift : 0));
    if (b->sinks) s[n++] = b->sinks[head];
    return n;
}

/* ---- quantized.c, called from kernels.c */
void linear_quantised(const Weight *w, const float *x, long n, long K, float *y, long O, int add);
void embed_quantised(const Weight *w, const int64_t *ids, long n, long K, float *y);
void store_head(const float *x, long D, long Dp, int8_t *to);
void attend_heads(int size, Keys keys, long from, long n, const float *q, const int8_t *K, const int8_t *V, long Dp, float scale,
                  const Bend *bend, long first, float *s, long room, float *out, long D);

/* ---- sample.c, called from tree.c and fused.c.  top: the highest logit of every block of a row, as `crown` leaves them. */
typedef struct { float temperature; double min_p; long top_k; double top_p; } Law;
void picks(const float *logits, long n, long V, float temperature, double min_p, long top_k, double top_p, const uint64_t *keys,
           const int32_t *map, long k, int32_t *out, float *prob);
long pick_known(const float *logits, long V, const Law *law, uint64_t key, float *top, int32_t *out);
/* What match says of trees.  From trees[at] on stand the nodes' tokens and parents, then room for the accepted nodes, for what is said, and
 * for how much that is (-1: a pick found nothing).  root: the row of its logits; position: of the token behind it. */
typedef struct { long at, root, nodes, top_k; double min_p, top_p; uint64_t stream, position; float temperature; } Ask;
_Static_assert(sizeof(Ask) == 72, "picking.py packs them");
void follow(const float *logits, long wide, long V, float *top, long high, const Ask *asks, long count, int32_t *trees);

/* ---- stop.c, called from fused.c: when no guess is made behind a token.  chain.py mirrors the struct. */
enum { TOP = 4, TRAITS = TOP + 2 };
typedef struct { double least, most; const float *net; long hidden; } Halt;
int should_stop(const Halt *h, const float *logits, long V, float temperature, int32_t token, long level, float *traits);
