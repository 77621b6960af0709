/* The CPU kernels.  One rule governs all of them: what is computed for a row is a fixed sequence of operations on that
 * row's own data.  How many rows stand beside it, which slots its keys lie in and how many threads run change the order
 * in which rows are visited, never the order of the sums inside one.  Bit-exact speculation follows from that alone.
 *
 * Activations are float.  Weights and K/V are float, bfloat16 or integers, each by its `kind`; bfloat16 is widened in
 * registers, so it costs half the memory traffic and no accuracy in the sums; quantized.c has the integers.  Compiled on the
 * machine that runs it (see cpu.py). */
#include "row.h"
#include "stack.h"

enum { PANEL = 64 };                         /* outputs a packed weight panel */
_Static_assert(PANEL == BLOCK, "crown looks at a panel as a block");

INLINE vf low(vu u) { return (vf)(u << 16); }                 /* the even element of each bfloat16 pair */
INLINE vf high(vu u) { return (vf)(u & 0xffff0000u); }        /* the odd one */
INLINE bf narrow(float x) {                                   /* round to nearest, ties to even */
    uint32_t u; memcpy(&u, &x, 4);
    return (bf)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* ---- linear: y[n,O] (+)= x[n,K] w[O,K]^T + bias.  w is packed [O/64][K][64], or in pairs [O/64][K/2][64][2] for bfloat16;
 * integers are the business of quantized.c. */
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
    for (int r = 0; r < rows; r++) put(acc[r], NV, bias ? bias + first : 0, y + r * O + first, O - first, add);
}

#define ROWS(n, half) case n: block(n, half, at, bias, x + r * K, K, y + r * O, O, first, add); break;
#define BLOCKS(half) switch (rows) { ROWS(1, half) ROWS(2, half) ROWS(3, half) ROWS(4, half) ROWS(5, half) ROWS(6, half) }  /* at most MR */

/* The highest of the panel's outputs in every row. */
static void crown(const float *y, long n, long O, long p, float *top, long high) {
    for (long r = 0; r < n; r++) {
        float last[PANEL];
        const float *at = y + r * O + p * PANEL;
        if (O - p * PANEL < PANEL) {
            for (long j = 0; j < PANEL; j++) last[j] = p * PANEL + j < O ? at[j] : -INFINITY;
            at = last;
        }
        top[r * high + p] = highest(at);
    }
}

void linear_crowned(const Weight *weight, const float *x, long n, long K, float *y, long O, int add, float *top, long high) {
    const long panels = (O + PANEL - 1) / PANEL;
    if (weight->kind >= INT8) {
        linear_quantised(weight, x, n, K, y, O, add);
        #pragma omp parallel for schedule(static) if (top != 0)
        for (long p = 0; p < (top ? panels : 0); p++) crown(y, n, O, p, top, high);
        return;
    }
    const int half = weight->kind == BFLOAT;
    const float *bias = weight->bias;
    const long bytes = half ? (K + 1) / 2 * PANEL * 4 : K * PANEL * 4;
    const long count = (n + MR - 1) / MR;                     /* 8 rows go as 4 + 4, not 6 + 2 */
    #pragma omp parallel for schedule(static)
    for (long p = 0; p < panels; p++) {
        for (long c = 0; c < PANEL && p * PANEL + c < O; c += NV * VL) {
            const void *at = (const char *)weight->data + p * bytes + c * 4;
            const long first = p * PANEL + c;
            for (long b = 0; b < count; b++) {
                const long r = b * n / count, rows = (b + 1) * n / count - r;
                if (half) BLOCKS(1) else BLOCKS(0)
            }
        }
        if (top) crown(y, n, O, p, top, high);                /* while they lie in the cache */
    }
}
void linear(const Weight *weight, const float *x, long n, long K, float *y, long O, int add) {
    linear_crowned(weight, x, n, K, y, O, add, 0, 0);
}

void embed(const Weight *weight, const int64_t *ids, long n, long K, float *y) {   /* rows of a packed weight */
    if (weight->kind >= INT8) { embed_quantised(weight, ids, n, K, y); return; }
    const void *w = weight->data;
    for (long r = 0; r < n; r++) {
        const long p = ids[r] / PANEL, o = ids[r] % PANEL;
        if (weight->kind == BFLOAT) {
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

INLINE long size_of(int kind, long Dp) { return kind == INT8 ? Dp + 4 : kind == BFLOAT ? Dp * 2 : Dp * 4; }   /* bytes of K or V */

/* Splits a fused projection x[n,(H+2k)D], normalises heads (Qwen3) and rotates; q goes out as [n,H,Dp], K and V to their
 * slots [k,slot,Dp], heads `head` bytes apart.  Dp is D rounded up to 32; what lies past D stays zero. */
void rope_store(const float *x, long n, long H, long k, long D, long Dp, const float *qn, const float *kn, float eps, const float *cs,
                long rot, const int64_t *positions, const int64_t *slots, void *K, void *V, int kind, long head, float *q) {
    #pragma omp parallel for schedule(static) if (n > 8)
    for (long r = 0; r < n; r++) {
        float a[MAX_HEAD_DIM], b[MAX_HEAD_DIM];
        const float *turn = cs + positions[r] * rot;
        for (long h = 0; h < H + 2 * k; h++) {
            const float *from = x + (r * (H + 2 * k) + h) * D, *norm = h < H ? qn : h < H + k ? kn : 0;
            if (norm) { norm_row(from, norm, D, eps, a); from = a; }
            if (h < H + k) { rotate(from, turn, D, rot, b); from = b; }
            if (h < H) { float *to = q + (r * H + h) * Dp; memcpy(to, from, D * 4); memset(to + D, 0, (Dp - D) * 4); continue; }
            char *to = (char *)(h < H + k ? K : V) + (h - H) % k * head + slots[r] * size_of(kind, Dp);
            if (kind == INT8) store_head(from, D, Dp, (int8_t *)to);
            else if (kind == BFLOAT) {
                for (long i = 0; i < D; i++) ((bf *)to)[i] = narrow(from[i]);
                memset(to + D * 2, 0, (Dp - D) * 2);
            } else { memcpy(to, from, D * 4); memset(to + D * 4, 0, (Dp - D) * 4); }
        }
    }
}

/* ---- attention.  Row r sees the first seen[r] slots of its request's table and then its path, in that order: always the
 * keys of positions 0, 1, 2 ... wherever they lie.  So a node of a tree computes what plain decoding computes there.
 * In a view the keys after the first `pinned` stand further on in the text than in the table, without gaps from there to the row. */
/* The first of a row's `to` keys that a layer looks at.
 * window > 0: the keys of the latest `window` positions.  0: all keys.
 * window < 0: the keys of the row's chunk, positions being cut into chunks of -window.
 * Behind the pinned keys, key j has position j + shift.  A row of a block has keys ahead, and no shift. */
INLINE long first_key(long to, long position, long window, long pinned) {
    const long oldest = window < 0 ? position / -window * -window : position + 1 - window;
    const long first = to > position + 1 ? oldest : oldest + to - position - 1;
    if (!window || oldest <= 0) return 0;
    return oldest < pinned ? oldest : first > pinned ? first : pinned;
}

/* `group` query heads of one row over one K/V head: q [group,Dp], s [group,room], out [group,D].  K and V point at the head, which
 * serves the query heads from `first` on. */
INLINE void heads(const int half, const long Dp, const int group, Keys keys, long from, long n, const float *q, const void *K,
                  const void *V, float scale, const Bend *bend, long first, float *s, long room, float *out, long D) {
    const long V2 = Dp / VL, E = V2 / 2;                      /* vectors a head; with bfloat16 the even elements, then the odd */
    vf a[group][V2];
    for (int g = 0; g < group; g++) for (long c = 0; c < V2; c++) {
        if (!half) a[g][c] = *(const vf *)(q + g * Dp + c * VL);
        else for (int i = 0; i < VL; i++) a[g][c][i] = q[g * Dp + (c % E * VL + i) * 2 + c / E];
    }
    for (long j = 0; j < n; j++) {
        const long at = slot_of(keys, from + j) * Dp;
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
    for (int g = 0; g < group; g++) inv[g] = softmax(s + g * room, bent(bend, first + g, keys, from, s + g * room, n));
    for (int g = 0; g < group; g++) for (long c = 0; c < V2; c++) a[g][c] = (vf){0};
    for (long j = 0; j < n; j++) {
        const long at = slot_of(keys, from + j) * Dp;
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

#define GROUP(half, Dp, n) case n: heads(half, Dp, n, keys, from, to - from, a, kk, vv, scale, bend, g, s, room, o, D); break;
#define GROUPS(half, Dp) switch (size) { GROUP(half, Dp, 1) GROUP(half, Dp, 2) GROUP(half, Dp, 3) GROUP(half, Dp, 4) }

void attend(const float *q, const void *K, const void *V, int kind, long head, long n, long H, long k, long D, long Dp,
            const int32_t *const *tables, const int64_t *positions, const int64_t *seen, const int32_t *paths, const int64_t *depth,
            long width, float scale, long window, long pinned, long longest, const Bend *bend, float *out) {
    const long G = H / k, room = (longest + 2 * VL - 1) / VL * VL;
    const long most = Dp <= 64 ? 4 : Dp <= 128 ? 2 : 1;       /* query heads whose sums fit into registers */
    #pragma omp parallel if (n * H > 1)
    {
        float *s = malloc((size_t)(most * room) * 4);
        #pragma omp for collapse(2) schedule(dynamic, 1)
        for (long r = 0; r < n; r++) for (long h = 0; h < k; h++) {
            const long to = seen[r] + depth[r], from = first_key(to, positions[r], window, pinned);
            const Keys keys = {tables[r], paths + r * width, seen[r], pinned, positions[r] + 1 - to};
            const char *kk = (const char *)K + h * head, *vv = (const char *)V + h * head;
            for (long g = h * G, size; g < (h + 1) * G; g += size) {
                size = (h + 1) * G - g < most ? (h + 1) * G - g : most;
                const float *a = q + (r * H + g) * Dp;
                float *o = out + (r * H + g) * D;
                if (kind == INT8) attend_heads(size, keys, from, to - from, a, (const int8_t *)kk, (const int8_t *)vv, Dp, scale, bend, g, s, room, o, D);
                else if (kind == BFLOAT && Dp == 64) GROUPS(1, 64)
                else if (kind == BFLOAT && Dp == 128) GROUPS(1, 128)
                else if (kind == BFLOAT) GROUPS(1, Dp)
                else GROUPS(0, Dp)
            }
        }
        free(s);
    }
}

/* ---- the blocks of a decoder, one after the other */
void adapt(const void *runs, long count, long part, long parts, const float *x, long K, float *y, long O);
#define ADAPT(part, parts, x, K, y, O) if (rows->runs) adapt(rows->adapted, rows->runs, (l - layers) * 7 + part, parts, x, K, y, O)

/* u [n,wide_u], unless 0: what the first layer's attention reads in place of norm(x); it may be x.  taps, unless 0: where to put what
 * enters each layer, and leaves the last; 0 for nowhere. */
void stack(const Shape *s, const Layer *layers, const Rows *rows, char *pool, long plane, float *x, const float *u, long wide_u,
           float *const *taps) {
    const long n = rows->n, H = s->heads, k = s->kv_heads, D = s->head_dim, h = s->hidden, I = s->inner, head = plane / k;
    const long qkv = (H + 2 * k) * D, wide = 2 * I > qkv ? 2 * I : qkv, inner = I > H * D ? I : H * D;
    float *a = malloc((size_t)n * (size_t)(h + wide + H * s->width + inner) * 4);
    float *b = a + n * h, *q = b + n * wide, *c = q + n * H * s->width;
    for (const Layer *l = layers; l < layers + s->layers; l++, pool += 2 * plane) {
        if (taps && taps[l - layers]) memcpy(taps[l - layers], x, (size_t)(n * h) * 4);
        if (l->skip & 1) goto mlp;
        const int given = u && l == layers;
        const float *in = given ? u : a;
        if (!given) rms_norm(x, l->norm_in, n, h, s->eps, a);
        linear(&l->qkv, in, n, given ? wide_u : h, b, qkv, 0);
        ADAPT(0, 3, in, h, b, qkv);
        rope_store(b, n, H, k, D, s->width, l->q_norm, l->k_norm, s->eps, s->turn, s->rot, rows->positions, rows->slots,
                   pool, pool + plane, s->kv, head, q);
        attend(q, pool, pool + plane, s->kv, head, n, H, k, D, s->width, rows->tables, rows->positions, rows->seen, rows->paths,
               rows->depths, rows->path, s->scale, l->window, rows->pinned, rows->longest, 0, c);
        linear(&l->o, c, n, H * D, x, h, 1);
        ADAPT(3, 1, c, H * D, x, h);
    mlp:
        if (l->skip & 2) continue;
        rms_norm(x, l->norm_post, n, h, s->eps, a);
        linear(&l->gate_up, a, n, h, b, 2 * I, 0);
        ADAPT(4, 2, a, h, b, 2 * I);
        silu_mul(b, n, I, c);
        linear(&l->down, c, n, I, x, h, 1);
        ADAPT(6, 1, c, I, x, h);
    }
    if (taps && taps[s->layers]) memcpy(taps[s->layers], x, (size_t)(n * h) * 4);
    free(a);
}
