/* Weights and K/V in integers.  Activations are rounded to 8 bits as well, every row by itself and group by group, so that the
 * products of a group are summed in integers: exactly, in any order.  What is left is one multiply-add a group in float, in
 * the order of the groups, and again nothing that a row computes depends on the rows beside it.
 *
 * A weight [O,K] is packed in blocks of 32 outputs by one group of inputs: [O/32][K/group] { values, 32 scales, 32 offsets or
 * none }, the last two in half precision and units of `unit`.  Values are unsigned (+ 128, + 8), four neighbouring inputs of an
 * output side by side: [group/4][32][4] bytes, or [group/16][2][32][4] for 4 bits, whose low halves are inputs 0-7 of 16. */
#include "simd.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { WIDE = 32, NQ = 2, RQ = VL == 16 ? 6 : 2 };            /* outputs a block; vectors and rows a register tile */
enum { AHEAD = 64 };                                          /* keys: so much earlier K and V are fetched */
typedef int8_t vb __attribute__((vector_size(VL), aligned(1), may_alias));

INLINE vi dot(vi sum, vu u, vi s) {                           /* + the four products unsigned x signed byte of every lane */
#ifdef __AVX512VNNI__
    return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#elif defined __AVX2__ && !defined __AVX512F__
    const __m256i w = (__m256i)u, x = (__m256i)s;
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
    return sum + (vi)even + (vi)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
#else
    for (int b = 0; b < 32; b += 8) sum += (vi)(u >> b & 255) * (s << (24 - b) >> 24);
    return sum;
#endif
}
INLINE vf halves(const char *p) {                             /* VL numbers in half precision */
#ifdef __AVX512F__
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined __F16C__
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf v;
    for (int i = 0; i < VL; i++) { _Float16 h; memcpy(&h, p + 2 * i, 2); v[i] = (float)h; }
    return v;
#endif
}
INLINE vf bytes(const int8_t *p) {                            /* VL signed bytes; compilers take the general form apart */
#ifdef __AVX512F__
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#elif defined __AVX2__
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#else
    return __builtin_convertvector(*(const vb *)p, vf);
#endif
}
INLINE float half_at(const char *p) { _Float16 h; memcpy(&h, p, 2); return (float)h; }

INLINE float peak(const float *x, long n) {                   /* the largest magnitude, or NaN: as integers their bits order the same */
    vi top = {0};
    for (long i = 0; i < n; i += VL) { const vi v = *(const vi *)(x + i) & 0x7fffffff, m = v > top; top = (v & m) | (top & ~m); }
    int32_t all = 0;
    for (int i = 0; i < VL; i++) all = top[i] > all ? top[i] : all;
    float f; memcpy(&f, &all, 4);
    return f;
}
INLINE int32_t to_bytes(const float *x, long n, float top, int8_t *to) {   /* 127 x / top in whole numbers; returns their sum */
    const float inverse = top > 0 ? 127.0f / top : 0;
    vi sum = {0};
    for (long i = 0; i < n; i += VL) {
        const vi v = (vi)(*(const vf *)(x + i) * inverse + 12582912.0f) - 0x4b400000;     /* rounds to even by the magic constant */
        const vb b = __builtin_convertvector(v, vb);
        sum += __builtin_convertvector(b, vi);               /* not v: where x is no number, v is any number, and sums of it overflow */
        *(vb *)(to + i) = b;
    }
    int32_t all = 0;
    for (int i = 0; i < VL; i++) all += sum[i];
    return all;
}

/* ---- linear */
INLINE long block_bytes(const Weight *w) { return w->group * WIDE / (w->kind == INT8 ? 1 : 2) + (w->offsets ? 4 : 2) * WIDE; }

/* A row as the tile wants it: K bytes, then for every group its scale, what its sum starts with to make the weights signed
 * again, and the sum of its numbers in float, which the offsets multiply. */
INLINE void round_row(const float *x, long K, const Weight *w, int8_t *to) {
    const long groups = K / w->group;
    float *scale = (float *)(to + K), *start = scale + groups, *mass = start + groups;
    for (long g = 0; g < groups; g++) {
        const float top = peak(x + g * w->group, w->group);
        const int32_t sum = to_bytes(x + g * w->group, w->group, top, to + g * w->group), from = -sum * (w->kind == INT8 ? 128 : 8);
        scale[g] = top / 127.0f;
        mass[g] = scale[g] * (float)sum;
        memcpy(start + g, &from, 4);
    }
}

INLINE void products(const int rows, vu *u, const int8_t *x, long record, vi sum[RQ][NQ]) {
    for (int r = 0; r < rows; r++) {
        int32_t four; memcpy(&four, x + r * record, 4);
        for (int c = 0; c < NQ; c++) sum[r][c] = dot(sum[r][c], u[c], (vi){0} + four);
    }
}

/* NQ vectors of outputs from `first` on in the block row at `at`, for `rows` rows of `record` bytes.  Meanwhile every `turns`-th
 * block `ahead` of them is fetched. */
INLINE void tile(const int rows, const int bits, const Weight *w, const char *at, long first, const int8_t *x, long record, long K,
                 long ahead, long turn, long turns, vf acc[RQ][NQ]) {
    const long groups = K / w->group, chunks = w->group / 16, bytes = block_bytes(w), values = w->group * WIDE * bits / 8;
    for (int r = 0; r < rows; r++) for (int c = 0; c < NQ; c++) acc[r][c] = (vf){0};
    for (long g = 0; g < groups; g++, at += bytes) {
        const int8_t *q = x + g * w->group, *meta = x + K + 4 * g;
        const char *v = at + first * 4, *scales = at + values + first * 2;
        vi sum[RQ][NQ];
        if (turn-- == 0) {
            for (long i = 0; i < bytes; i += 64) __builtin_prefetch(at + ahead + i);
            turn = turns - 1;
        }
        for (int r = 0; r < rows; r++) {
            int32_t start; memcpy(&start, meta + r * record + 4 * groups, 4);
            for (int c = 0; c < NQ; c++) sum[r][c] = (vi){0} + start;
        }
        for (long h = 0; h < chunks; h++, q += 16) {
            #pragma GCC unroll 4
            for (int s = 0; s < bits / 2; s++, v += WIDE * 4) {
                vu u[NQ];
                for (int c = 0; c < NQ; c++) u[c] = *(const vu *)(v + c * VL * 4);
                if (bits == 8) { products(rows, u, q + 4 * s, record, sum); continue; }
                vu low[NQ], high[NQ];
                for (int c = 0; c < NQ; c++) { low[c] = u[c] & 0x0f0f0f0f; high[c] = u[c] >> 4 & 0x0f0f0f0f; }
                products(rows, low, q + 4 * s, record, sum);
                products(rows, high, q + 4 * s + 8, record, sum);
            }
        }
        for (int c = 0; c < NQ; c++) {
            const vf scale = halves(scales + c * VL * 2);
            for (int r = 0; r < rows; r++) {
                float s; memcpy(&s, meta + r * record, 4);
                acc[r][c] += __builtin_convertvector(sum[r][c], vf) * (scale * s);
            }
            if (!w->offsets) continue;
            const vf offset = halves(scales + WIDE * 2 + c * VL * 2);
            for (int r = 0; r < rows; r++) {
                float mass; memcpy(&mass, meta + r * record + 8 * groups, 4);
                acc[r][c] += offset * mass;
            }
        }
    }
}

INLINE void block(const int rows, const int bits, const Weight *w, const char *at, long first, const int8_t *x, long record, long K,
                  long ahead, long turn, long turns, const float *bias, float *y, long O, long room, int add) {
    vf acc[RQ][NQ];
    tile(rows, bits, w, at, first, x, record, K, ahead, turn, turns, acc);
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < NQ; c++) acc[r][c] *= w->unit;
        put(acc[r], NQ, bias, y + r * O, room, add);
    }
}

#define ROWS(n, bits) case n: block(n, bits, w, at, c, x8 + r * record, record, K, ahead, b, count, bias, y + r * O + first, O, O - first, add); break;
#ifdef __AVX512F__
#define BLOCKS(bits) switch (rows) { ROWS(1, bits) ROWS(2, bits) ROWS(3, bits) ROWS(4, bits) ROWS(5, bits) ROWS(6, bits) }
#else
#define BLOCKS(bits) switch (rows) { ROWS(1, bits) ROWS(2, bits) }
#endif

void linear_quantised(const Weight *w, const float *x, long n, long K, float *y, long O, int add) {
    static _Thread_local int8_t *scratch;
    static _Thread_local long size;
    const long record = K + 12 * (K / w->group), count = (n + RQ - 1) / RQ, panels = (O + WIDE - 1) / WIDE;
    const long bytes = K / w->group * block_bytes(w), ahead = count > 1 ? bytes : 4096;
    if (size < n * record) { free(scratch); scratch = malloc((size_t)(size = n * record)); }
    int8_t *x8 = scratch;
    #pragma omp parallel for schedule(static) if (n > 4)
    for (long r = 0; r < n; r++) round_row(x + r * K, K, w, x8 + r * record);
    #pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++) for (long c = 0; c < WIDE && p * WIDE + c < O; c += NQ * VL) {
        const char *at = (const char *)w->data + p * bytes;
        const long first = p * WIDE + c;
        const float *bias = w->bias ? w->bias + first : 0;
        for (long b = 0; b < count; b++) {
            const long r = b * n / count, rows = (b + 1) * n / count - r;
            if (w->kind == INT8) BLOCKS(8) else BLOCKS(4)
        }
    }
}

void embed_quantised(const Weight *w, const int64_t *ids, long n, long K, float *y) {
    const long group = w->group, bytes = block_bytes(w), values = bytes - (w->offsets ? 4 : 2) * WIDE;
    for (long r = 0; r < n; r++) for (long k = 0; k < K; k++) {
        const long o = ids[r] % WIDE, i = k % group, half = i % 16 / 8;
        const char *at = (const char *)w->data + (ids[r] / WIDE * (K / group) + k / group) * bytes, *scale = at + values + 2 * o;
        const long in = w->kind == INT8 ? i / 4 * WIDE * 4 : (i / 16 * 2 + i % 8 / 4) * WIDE * 4;
        const int u = (uint8_t)at[in + o * 4 + i % 4], value = w->kind == INT8 ? u - 128 : (u >> 4 * half & 15) - 8;
        y[r * K + k] = ((float)value * half_at(scale) + (w->offsets ? half_at(scale + 2 * WIDE) : 0)) * w->unit;
    }
}

/* ---- K and V: a head is Dp bytes and the float that one of them counts */
void store_head(const float *x, long D, long Dp, int8_t *to) {
    float wide[512 + VL] = {0};
    memcpy(wide, x, (size_t)D * 4);
    const float top = peak(wide, Dp), scale = top / 127.0f;
    to_bytes(wide, Dp, top, to);
    memcpy(to + Dp, &scale, 4);
}

INLINE vi sums(vi *v) {                                       /* lane j: the sum of the lanes of v[j] */
    #pragma GCC unroll 4
    for (int n = VL / 2; n; n /= 2)
        #pragma GCC unroll 8
        for (int i = 0; i < n; i++) v[i] = PICK(v[2 * i], v[2 * i + 1], EVEN) + PICK(v[2 * i], v[2 * i + 1], ODD);
    return v[0];
}

/* Fetches the VL keys from key j + AHEAD on; they are neighbours, as a rule. */
INLINE void fetch(const long Dp, Keys keys, long from, long n, long j, const int8_t *at) {
    if (j + AHEAD >= n) return;
    at += slot_of(keys, from + j + AHEAD) * (Dp + 4);
    for (long c = 0; c < VL * (Dp + 4); c += 64) __builtin_prefetch(at + c);
}

/* The dot products of `group` query heads with n keys, VL keys at a time.  A key is read in whole vectors: what lies past it meets
 * zeros of q, and past the pool there is room. */
INLINE void scores(const long Dp, const int group, Keys keys, long from, long n, const float *q, const int8_t *K, float scale, float *s, long room) {
    const long V4 = (Dp + 4 * VL - 1) / (4 * VL);
    int8_t q8[group][V4 * 4 * VL];
    int32_t start[group];
    float one[group];
    memset(q8, 0, sizeof q8);
    for (int g = 0; g < group; g++) {
        const float top = peak(q + g * Dp, Dp);
        start[g] = -128 * to_bytes(q + g * Dp, Dp, top, q8[g]);
        one[g] = top / 127.0f * scale;
    }
    for (long j = 0; j < n; j += VL) {
        const int8_t *at[VL];
        float key[VL];
        fetch(Dp, keys, from, n, j, K);
        for (int i = 0; i < VL; i++) {
            at[i] = K + slot_of(keys, from + (j + i < n ? j + i : n - 1)) * (Dp + 4);
            memcpy(key + i, at[i] + Dp, 4);
        }
        for (int g = 0; g < group; g++) {
            vi part[VL];
            #pragma GCC unroll 16
            for (int i = 0; i < VL; i++) {
                part[i] = (vi){0};
                for (long c = 0; c < V4; c++) part[i] = dot(part[i], *(const vu *)(at[i] + c * 4 * VL) ^ 0x80808080u, *(const vi *)(q8[g] + c * 4 * VL));
            }
            *(vf *)(s + g * room + j) = __builtin_convertvector(sums(part) + start[g], vf) * (*(vf *)key * one[g]);
        }
    }
}

INLINE void attend_group(const long Dp, const int group, Keys keys, long from, long n, const float *q, const int8_t *K, const int8_t *V,
                         float scale, const Bend *bend, long first, float *s, long room, float *out, long D) {
    const long V2 = Dp / VL;
    float inv[4];
    vf a[MAX_HEAD_DIM / VL];                                           /* group * V2 of them: a size known early keeps them in registers */
    scores(Dp, group, keys, from, n, q, K, scale, s, room);
    for (int g = 0; g < group; g++) inv[g] = softmax(s + g * room, bent(bend, first + g, keys, from, s + g * room, n));
    for (long i = 0; i < group * V2; i++) a[i] = (vf){0};
    for (long j = 0; j < n; j++) {
        const int8_t *at = V + slot_of(keys, from + j) * (Dp + 4);
        if (j % VL == 0) fetch(Dp, keys, from, n, j, V);
        float one; memcpy(&one, at + Dp, 4);
        for (long c = 0; c < V2; c++) {
            const vf x = bytes(at + c * VL);
            for (int g = 0; g < group; g++) a[g * V2 + c] += x * (s[g * room + j] * one);
        }
    }
    for (int g = 0; g < group; g++) {
        float wide[MAX_HEAD_DIM];
        for (long c = 0; c < V2; c++) *(vf *)(wide + c * VL) = a[g * V2 + c] * inv[g];
        memcpy(out + g * D, wide, (size_t)D * 4);
    }
}

#define GROUP(Dp, n) case n: attend_group(Dp, n, keys, from, count, q, K, V, scale, bend, first, s, room, out, D); break;
#define GROUPS(Dp) switch (size) { GROUP(Dp, 1) GROUP(Dp, 2) GROUP(Dp, 3) GROUP(Dp, 4) }

/* `size` query heads of one row over one K/V head, as `heads` in kernels.c. */
void attend_heads(int size, Keys keys, long from, long count, const float *q, const int8_t *K, const int8_t *V, long Dp, float scale,
                  const Bend *bend, long first, float *s, long room, float *out, long D) {
    if (Dp == 64) GROUPS(64) else if (Dp == 128) GROUPS(128) else GROUPS(Dp)
}
