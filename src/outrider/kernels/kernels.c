/* The CPU kernels.  One rule governs all of them: what is computed for a row is a fixed sequence of operations on that
 * row's own data.  How many rows stand beside it, which slots its keys lie in and how many threads run change the order
 * in which rows are visited, never the order of the sums inside one.  Bit-exact speculation follows from that alone.
 *
 * Activations are float.  Weights and K/V are float or bfloat16 (`bf16` flags); bfloat16 is widened in registers, so it
 * costs half the memory traffic and no accuracy in the sums.  Compiled on the machine that runs it (see cpu.py). */
#include "simd.h"

enum { PANEL = 64 };                         /* outputs a packed weight panel */

INLINE vf low(vu u) { return (vf)(u << 16); }                 /* the even element of each bfloat16 pair */
INLINE vf high(vu u) { return (vf)(u & 0xffff0000u); }        /* the odd one */
INLINE bf narrow(float x) {                                   /* round to nearest, ties to even */
    uint32_t u; memcpy(&u, &x, 4);
    return (bf)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE float total(vf v) {                                    /* always the same tree of additions: halves onto halves */
    typedef float v4 __attribute__((vector_size(16), aligned(4)));
    v4 q[VL / 4];
    memcpy(q, &v, sizeof v);
    for (int n = VL / 8; n; n /= 2) for (int i = 0; i < n; i++) q[i] += q[i + n];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}

/* ---- linear: y[n,O] (+)= x[n,K] w[O,K]^T + bias.  w is packed [O/64][K][64], or in pairs [O/64][K/2][64][2] for bfloat16. */
INLINE void fetch(const void *p) {                            /* a page ahead: the hardware stops at its border (+15 %) */
    for (int c = 0; c < NV * VL * 4; c += 64) __builtin_prefetch((const char *)p + c + 4096);
}
INLINE void tile(const int rows, const int half, const void *w, const float *x, long K, vf acc[6][NV]) {
    for (int r = 0; r < rows; r++) for (int c = 0; c < NV; c++) acc[r][c] = (vf){0};
    if (half) {
        const uint32_t *p = w;
        for (long k = 0; k + 1 < K; k += 2, p += PANEL) {
            fetch(p);
            vf even[NV], odd[NV];
            for (int c = 0; c < NV; c++) { vu u = *(const vu *)(p + c * VL); even[c] = low(u); odd[c] = high(u); }
            for (int r = 0; r < rows; r++) {
                const float *v = x + r * K + k;
                for (int c = 0; c < NV; c++) acc[r][c] += even[c] * v[0];
                for (int c = 0; c < NV; c++) acc[r][c] += odd[c] * v[1];
            }
        }
        if (K & 1) for (int r = 0; r < rows; r++) for (int c = 0; c < NV; c++)
            acc[r][c] += low(*(const vu *)(p + c * VL)) * x[r * K + K - 1];
    } else {
        const float *p = w;
        for (long k = 0; k < K; k++, p += PANEL) {
            fetch(p);
            for (int r = 0; r < rows; r++) for (int c = 0; c < NV; c++) acc[r][c] += *(const vf *)(p + c * VL) * x[r * K + k];
        }
    }
}

INLINE void block(const int rows, const int half, const void *w, const float *bias, const float *x, long K, float *y, long O,
                  long first, int add) {
    vf acc[6][NV];
    tile(rows, half, w, x, K, acc);
    for (int r = 0; r < rows; r++) {
        float part[NV * VL], *to = y + r * O + first;
        const int whole = first + NV * VL <= O;
        const float *old = to, *b = bias ? bias + first : 0;
        float tail[2][NV * VL] = {{0}};
        if (!whole) {                                         /* the last outputs go through a full-sized copy */
            if (add) memcpy(tail[0], to, (size_t)(O - first) * 4);
            if (b) memcpy(tail[1], b, (size_t)(O - first) * 4);
            old = tail[0]; b = b ? tail[1] : 0;
        }
        for (int c = 0; c < NV; c++) {
            vf v = acc[r][c];
            if (b) v += *(const vf *)(b + c * VL);
            if (add) v += *(const vf *)(old + c * VL);
            *(vf *)((whole ? to : part) + c * VL) = v;
        }
        if (!whole) memcpy(to, part, (size_t)(O - first) * 4);
    }
}

#define ROWS(n, half) case n: block(n, half, at, bias, x + r * K, K, y + r * O, O, first, add); break;
#define BLOCKS(half) switch (rows) { ROWS(1, half) ROWS(2, half) ROWS(3, half) ROWS(4, half) ROWS(5, half) ROWS(6, half) }  /* at most MR */

void linear(const void *w, int half, const float *bias, const float *x, long n, long K, float *y, long O, int add) {
    const long panels = (O + PANEL - 1) / PANEL, bytes = half ? (K + 1) / 2 * PANEL * 4 : K * PANEL * 4;
    const long count = (n + MR - 1) / MR;                     /* 8 rows go as 4 + 4, not 6 + 2 */
    #pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++) for (long c = 0; c < PANEL && p * PANEL + c < O; c += NV * VL) {
        const void *at = (const char *)w + p * bytes + c * 4;
        const long first = p * PANEL + c;
        for (long b = 0; b < count; b++) {
            const long r = b * n / count, rows = (b + 1) * n / count - r;
            if (half) BLOCKS(1) else BLOCKS(0)
        }
    }
}

void embed(const void *w, int half, const int64_t *ids, long n, long K, float *y) {   /* rows of a packed weight */
    for (long r = 0; r < n; r++) {
        const long p = ids[r] / PANEL, o = ids[r] % PANEL;
        if (half) {
            const bf *from = (const bf *)w + p * ((K + 1) / 2) * 2 * PANEL + 2 * o;
            for (long k = 0; k < K; k++) {
                uint32_t u = (uint32_t)from[k / 2 * 2 * PANEL + k % 2] << 16;
                memcpy(y + r * K + k, &u, 4);
            }
        } else for (long k = 0; k < K; k++) y[r * K + k] = ((const float *)w)[(p * K + k) * PANEL + o];
    }
}

/* ---- the small ones */
static void norm_row(const float *x, const float *w, long h, float eps, float *y) {
    vf s = {0};
    float rest = 0;
    long i = 0;
    for (; i + VL <= h; i += VL) { vf v = *(const vf *)(x + i); s += v * v; }
    for (; i < h; i++) rest += x[i] * x[i];
    const float scale = 1.0f / sqrtf((total(s) + rest) / (float)h + eps);
    for (i = 0; i < h; i++) y[i] = x[i] * scale * w[i];
}

void rms_norm(const float *x, const float *w, long n, long h, float eps, float *y) {
    #pragma omp parallel for schedule(static) if (n > 8)
    for (long r = 0; r < n; r++) norm_row(x + r * h, w, h, eps, y + r * h);
}

void silu_mul(const float *x, long n, long I, float *y) {     /* x = [gate | up], y = silu(gate) * up */
    #pragma omp parallel for schedule(static) if (n > 4)
    for (long r = 0; r < n; r++) {
        const float *gate = x + r * 2 * I, *up = gate + I;
        long i = 0;
        for (; i + VL <= I; i += VL) {
            vf g = *(const vf *)(gate + i), u = *(const vf *)(up + i);
            *(vf *)(y + r * I + i) = g / (1.0f + vexp(-g)) * u;
        }
        if (i < I) {
            vf g = {0}, u = {0};
            memcpy(&g, gate + i, (size_t)(I - i) * 4); memcpy(&u, up + i, (size_t)(I - i) * 4);
            vf o = g / (1.0f + vexp(-g)) * u;
            memcpy(y + r * I + i, &o, (size_t)(I - i) * 4);
        }
    }
}

INLINE void rotate(const float *x, const float *cs, long D, long rot, float *y) {     /* cs = cos[rot/2] then sin[rot/2] */
    const long m = rot / 2;
    for (long i = 0; i < m; i++) {
        const float a = x[i], b = x[i + m], c = cs[i], s = cs[i + m];
        y[i] = a * c - b * s; y[i + m] = b * c + a * s;
    }
    for (long i = rot; i < D; i++) y[i] = x[i];
}

/* Splits a fused projection x[n,(H+2k)D], normalises heads (Qwen3) and rotates; q goes out as [n,H,Dp], K and V to their
 * slots [slot,k,Dp].  Dp is D rounded up to 32; what lies past D stays zero. */
void rope_store(const float *x, long n, long H, long k, long D, long Dp, const float *qn, const float *kn, float eps,
                const float *cs, long rot, const int64_t *positions, const int64_t *slots, void *K, void *V, int half, float *q) {
    #pragma omp parallel for schedule(static) if (n > 8)
    for (long r = 0; r < n; r++) {
        float a[512], b[512];
        const float *turn = cs + positions[r] * rot;
        for (long h = 0; h < H + 2 * k; h++) {
            const float *from = x + (r * (H + 2 * k) + h) * D, *norm = h < H ? qn : h < H + k ? kn : 0;
            if (norm) { norm_row(from, norm, D, eps, a); from = a; }
            if (h < H + k) { rotate(from, turn, D, rot, b); from = b; }
            if (h < H) { float *to = q + (r * H + h) * Dp; memcpy(to, from, D * 4); memset(to + D, 0, (Dp - D) * 4); continue; }
            void *pool = h < H + k ? K : V;
            const long at = (slots[r] * k + (h < H + k ? h - H : h - H - k)) * Dp;
            if (half) {
                bf *to = (bf *)pool + at;
                for (long i = 0; i < D; i++) to[i] = narrow(from[i]);
                memset(to + D, 0, (Dp - D) * 2);
            } else { memcpy((float *)pool + at, from, D * 4); memset((float *)pool + at + D, 0, (Dp - D) * 4); }
        }
    }
}

/* ---- attention.  Row r sees the first seen[r] slots of its request's table and then its path, in that order: always the
 * keys of positions 0, 1, 2 ... wherever they lie.  So a node of a tree computes what plain decoding computes there. */
typedef struct { const int32_t *table, *path; long seen; } Keys;
static float softmax(float *s, long n) {                      /* in place, unnormalised; returns 1 / sum */
    const long padded = (n + VL - 1) / VL * VL;
    for (long j = n; j < padded; j++) s[j] = -INFINITY;
    vf top = *(vf *)s, sum = {0};
    for (long j = VL; j < padded; j += VL) { vf v = *(vf *)(s + j); vi m = v > top; top = (vf)(((vi)v & m) | ((vi)top & ~m)); }
    float best = top[0];
    for (int i = 1; i < VL; i++) best = top[i] > best ? top[i] : best;
    for (long j = 0; j < padded; j += VL) { vf e = vexp(*(vf *)(s + j) - best); sum += e; *(vf *)(s + j) = e; }
    return 1.0f / total(sum);
}
INLINE long slot_of(Keys k, long j) { return j < k.seen ? k.table[j] : k.path[j - k.seen]; }

/* `group` query heads of one row over one K/V head: q [group,Dp], s [group,room], out [group,D].  K and V point at the head. */
INLINE void heads(const int half, const long Dp, const int group, Keys keys, long from, long n, const float *q, const void *K,
                  const void *V, long stride, float scale, float *s, long room, float *out, long D) {
    const long V2 = Dp / VL, E = V2 / 2;                      /* vectors a head; with bfloat16 the even elements, then the odd */
    vf a[group][V2];
    for (int g = 0; g < group; g++) for (long c = 0; c < V2; c++) {
        if (!half) a[g][c] = *(const vf *)(q + g * Dp + c * VL);
        else for (int i = 0; i < VL; i++) a[g][c][i] = q[g * Dp + (c % E * VL + i) * 2 + c / E];
    }
    for (long j = 0; j < n; j++) {
        const long at = slot_of(keys, from + j) * stride;
        vf even[group], odd[group];
        for (int g = 0; g < group; g++) even[g] = odd[g] = (vf){0};
        for (long c = 0; c < E; c++) {
            const vu u = *(const vu *)((const bf *)K + at + c * 2 * VL);
            const vf x = half ? low(u) : *(const vf *)((const float *)K + at + c * VL);
            const vf y = half ? high(u) : *(const vf *)((const float *)K + at + (E + c) * VL);
            for (int g = 0; g < group; g++) { even[g] += a[g][c] * x; odd[g] += a[g][E + c] * y; }
        }
        for (int g = 0; g < group; g++) s[g * room + j] = total(even[g] + odd[g]) * scale;
    }
    float inv[group];
    for (int g = 0; g < group; g++) inv[g] = softmax(s + g * room, n);
    for (int g = 0; g < group; g++) for (long c = 0; c < V2; c++) a[g][c] = (vf){0};
    for (long j = 0; j < n; j++) {
        const long at = slot_of(keys, from + j) * stride;
        for (long c = 0; c < E; c++) {
            const vu u = *(const vu *)((const bf *)V + at + c * 2 * VL);
            const vf x = half ? low(u) : *(const vf *)((const float *)V + at + c * VL);
            const vf y = half ? high(u) : *(const vf *)((const float *)V + at + (E + c) * VL);
            for (int g = 0; g < group; g++) { a[g][c] += x * s[g * room + j]; a[g][E + c] += y * s[g * room + j]; }
        }
    }
    for (int g = 0; g < group; g++) for (long i = 0; i < D; i++)
        out[g * D + i] = inv[g] * (half ? a[g][i % 2 * E + i / 2 / VL][i / 2 % VL] : a[g][i / VL][i % VL]);
}

#define GROUP(half, Dp, n) case n: heads(half, Dp, n, keys, from, to - from, a, kk, vv, stride, scale, s, room, o, D); break;
#define GROUPS(half, Dp) switch (size) { GROUP(half, Dp, 1) GROUP(half, Dp, 2) GROUP(half, Dp, 3) GROUP(half, Dp, 4) }

void attend(const float *q, const void *K, const void *V, int half, long n, long H, long k, long D, long Dp,
            const int32_t *const *tables, const int64_t *seen, const int32_t *paths, const int64_t *depth, long width,
            float scale, long window, long longest, float *out) {
    const long G = H / k, stride = k * Dp, room = (longest + 2 * VL - 1) / VL * VL;
    const long most = Dp <= 64 ? 4 : Dp <= 128 ? 2 : 1;       /* query heads whose sums fit into registers */
    #pragma omp parallel if (n * H > 1)
    {
        float *s = malloc((size_t)(most * room) * 4);
        #pragma omp for collapse(2) schedule(dynamic, 1)
        for (long r = 0; r < n; r++) for (long h = 0; h < k; h++) {
            const Keys keys = {tables[r], paths + r * width, seen[r]};
            const long to = seen[r] + depth[r], from = window && to > window ? to - window : 0;
            const char *kk = (const char *)K + h * Dp * (half ? 2 : 4), *vv = (const char *)V + h * Dp * (half ? 2 : 4);
            for (long g = h * G, size; g < (h + 1) * G; g += size) {
                size = (h + 1) * G - g < most ? (h + 1) * G - g : most;
                const float *a = q + (r * H + g) * Dp;
                float *o = out + (r * H + g) * D;
                if (half && Dp == 64) GROUPS(1, 64)
                else if (half && Dp == 128) GROUPS(1, 128)
                else if (half) GROUPS(1, Dp)
                else GROUPS(0, Dp)
            }
        }
        free(s);
    }
}

/* ---- the blocks of a decoder, one after the other.  cpu.py mirrors these structs. */
typedef struct {
    const void *qkv, *o, *gate_up, *down;
    const float *qkv_bias, *o_bias, *gate_up_bias, *down_bias, *norm_in, *norm_post, *q_norm, *k_norm;
    long window;
} Layer;
typedef struct { long layers, hidden, inner, heads, kv_heads, head_dim, width, rot, half; float eps, scale; const float *turn; } Shape;
typedef struct {
    long n, path, longest;
    const int64_t *positions, *slots, *seen, *depths;
    const int32_t *const *tables, *paths;
} Rows;

void stack(const Shape *s, const Layer *layers, const Rows *rows, char *pool, long plane, float *x) {
    const long n = rows->n, H = s->heads, k = s->kv_heads, D = s->head_dim, h = s->hidden, I = s->inner, half = s->half;
    const long qkv = (H + 2 * k) * D, wide = 2 * I > qkv ? 2 * I : qkv, inner = I > H * D ? I : H * D;
    float *a = malloc((size_t)n * (size_t)(h + wide + H * s->width + inner) * 4);
    float *b = a + n * h, *q = b + n * wide, *c = q + n * H * s->width;
    for (const Layer *l = layers; l < layers + s->layers; l++, pool += 2 * plane) {
        rms_norm(x, l->norm_in, n, h, s->eps, a);
        linear(l->qkv, half, l->qkv_bias, a, n, h, b, qkv, 0);
        rope_store(b, n, H, k, D, s->width, l->q_norm, l->k_norm, s->eps, s->turn, s->rot, rows->positions, rows->slots,
                   pool, pool + plane, half, q);
        attend(q, pool, pool + plane, half, n, H, k, D, s->width, rows->tables, rows->seen, rows->paths, rows->depths,
               rows->path, s->scale, l->window, rows->longest, c);
        linear(l->o, half, l->o_bias, c, n, H * D, x, h, 1);
        rms_norm(x, l->norm_post, n, h, s->eps, a);
        linear(l->gate_up, half, l->gate_up_bias, a, n, h, b, 2 * I, 0);
        silu_mul(b, n, I, c);
        linear(l->down, half, l->down_bias, c, n, I, x, h, 1);
    }
    free(a);
}
