/* Prints a digest of the results of each kernel on given pseudo-random inputs, one a line.
 * The argument is a library of kernels.  Libraries of one instruction set print the same lines, whatever
 * system and compiler they are from (scripts/cross.py).  "libm" marks kernels that call log, exp or tanh. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "kernels.h"
#include "recurrent.h"
#include "runs.h"
#ifdef _WIN32 /* whose header has another INT8 */
__declspec(dllimport) void *LoadLibraryA(const char *path);
__declspec(dllimport) void *GetProcAddress(void *library, const char *name);
#else
#include <dlfcn.h>
#endif

enum { HIDDEN = 96, INNER = 160, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 24, PADDED = 32, VOCAB = 300 };
enum { QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM, SLOTS = 64, POSITIONS = 64, ROWS = 7, LAYERS = 2 };

static void *found(const char *library, const char *name) {
#ifdef _WIN32
    static void *opened;
    if (!opened) opened = LoadLibraryA(library);
    void *at = opened ? GetProcAddress(opened, name) : 0;
#else
    static void *opened;
    char path[4096];
    snprintf(path, sizeof path, "./%s", library);
    if (!opened) opened = dlopen(path, RTLD_NOW);
    void *at = opened ? dlsym(opened, name) : 0;
#endif
    if (at) return at;
    printf("%s has no %s\n", library, name);
    exit(1);
}

#define KERNELS(F)                                                                                           \
    F(set_threads)                                                                                           \
    F(linear) F(linear_with_maxima) F(embed) F(rms_norm) F(silu_mul) F(clamped_mul) F(pair) F(rope_store)    \
        F(attend) F(stack) F(read_model) F(chain) F(pick) F(picks) F(probabilities) F(sample_children)       \
            F(verify_trees) F(add_lora) F(grow) F(keep) F(runs_extend) F(runs_find) F(runs_longest)          \
                F(gated_delta) F(selective_scan) F(short_conv) F(sigmoid_rows) F(softplus_rows) F(gate_rows) \
                    F(gated_norm)
#define DECLARE(name) static __typeof__(name) *do_##name;
KERNELS(DECLARE)

/* ---- pseudo-random inputs, and digests */

static uint64_t state = 1;

static uint32_t random_bits(void) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33);
}

static void *space(int64_t bytes) {
    void *data = calloc((size_t)bytes + 256, 1);
    if (!data) exit(2);
    return data;
}

static float *floats(int64_t count, float scale) {
    float *x = space(count * 4);
    for (int64_t i = 0; i < count; i++) x[i] = scale * ((float)(int32_t)(random_bits() >> 7) / 8388608 - 1);
    return x;
}

static void print(const char *name, int number, const void *data, int64_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    printf("%s-%d %08x%08x\n", name, number, (unsigned)(hash >> 32), (unsigned)hash);
}

enum { LEVELS = INT4 + 1 }; /* int4 with levels, and without offsets */

/* A packed weight.  Integers have scales of 2^-8 to 2^-7 in half precision. */
static Weight weight(int64_t outputs, int64_t inputs, int kind, int rounds) {
    static const int8_t NUMBERS[16] = {-127, -12, -8, -6, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6, 8, 126};
    const int64_t wide = (outputs + 63) / 64 * 64, groups = inputs / 32;
    Weight w = {.bias = floats(outputs, 1), .kind = kind, .group = 32, .unit = 0.5f, .rounds_inputs = rounds};
    if (kind == FLOAT32) {
        w.data = floats(wide * inputs, 0.3f);
    } else if (kind == BFLOAT16) {
        const float *x = floats(wide * inputs, 0.3f);
        uint16_t *to = space(wide * inputs * 2);
        for (int64_t i = 0; i < wide * inputs; i++) memcpy(to + i, (const char *)(x + i) + 2, 2);
        w.data = to;
    } else {
        const int64_t values = 32 * 32 * (kind == INT8 ? 8 : 4) / 8, rows = kind == LEVELS ? 32 : 64;
        const int64_t block = values + rows * 2;
        uint8_t *to = space(wide / 32 * groups * block);
        w.has_offsets = kind != LEVELS;
        if (kind == LEVELS) w.kind = INT4, w.levels = NUMBERS;
        w.data = to;
        for (int64_t b = 0; b < wide / 32 * groups; b++, to += block) {
            for (int64_t i = 0; i < values; i++) to[i] = (uint8_t)(random_bits() >> 9);
            for (int64_t i = 0; i < rows; i++) {
                const uint16_t half = (uint16_t)(0x1c00 + (random_bits() & 0x3ff));
                memcpy(to + values + 2 * i, &half, 2);
            }
        }
    }
    return w;
}

/* ---- linears and small kernels */

static void check_linears(void) {
    static const int KINDS[] = {FLOAT32, BFLOAT16, BFLOAT16, INT8, INT4, LEVELS},
                     ROW_COUNTS[] = {1, 2, 5, 16, 17, 70};
    const float *x = floats(70 * HIDDEN, 1);
    for (int k = 0; k < 6; k++) {
        const Weight w = weight(130, HIDDEN, KINDS[k], k == 2);
        for (int r = 0; r < 6; r++) {
            const int64_t rows = ROW_COUNTS[r];
            float *y = floats(rows * 130, 1), *maxima = space(rows * 16 * 4);
            do_linear_with_maxima(&w, x, rows, HIDDEN, y, 130, 1, maxima, 16);
            print("linear", k * 100 + (int)rows, y, rows * 130 * 4);
            print("maxima", k * 100 + (int)rows, maxima, rows * 16 * 4);
        }
        const int64_t ids[] = {3, 129, 64};
        float *y = space(3 * HIDDEN * 4);
        do_embed(&w, ids, 3, HIDDEN, y);
        print("embed", k, y, 3 * HIDDEN * 4);
    }
}

static void check_elementwise(void) {
    const float *x = floats(ROWS * 2 * 101, 3), *norm = floats(2 * 101, 1);
    const int64_t ids[] = {3, 129, 64};
    float *y = space(ROWS * 300 * 4);
    do_rms_norm(x, norm, ROWS, 101, 1e-5f, y);
    print("rms_norm", 0, y, ROWS * 101 * 4);
    do_silu_mul(x, ROWS, 101, y);
    print("silu_mul", 0, y, ROWS * 101 * 4);
    do_clamped_mul(x, ROWS, 101, 1.7f, 2, y);
    print("clamped_mul", 0, y, ROWS * 101 * 4);
    const Weight w = weight(130, HIDDEN, BFLOAT16, 0);
    do_pair(&w, ids, 3, HIDDEN, x, HIDDEN, norm, norm + 5, 1e-5f, y);
    print("pair", 0, y, 3 * 2 * HIDDEN * 4);
    LoraPart part = {floats(8 * HIDDEN, 1), floats(3 * 64 * 8, 1), 8, 2, 128, 0.5f};
    const LoraRun runs[] = {{0, 4, &part}, {4, 3, &part}};
    const float *inputs = floats(ROWS * HIDDEN, 1);
    do_add_lora(runs, 2, 0, 1, inputs, HIDDEN, y, 130);
    print("lora", 0, y, ROWS * 130 * 4);
}

/* ---- attention and whole models */

/* Two requests, the second one with a tree of three nodes; slots are spread over the pool. */
static Rows rows_of_step(void) {
    static int64_t positions[ROWS], slots[ROWS], table_lengths[ROWS], path_lengths[ROWS];
    static int32_t tables[2][32], paths[ROWS * 3];
    static const int32_t *table_of_row[ROWS];
    for (int i = 0; i < 32; i++) tables[0][i] = (i * 7 + 3) % SLOTS, tables[1][i] = (i * 5 + 8) % SLOTS;
    for (int r = 0; r < ROWS; r++) {
        const int second = r > 3, length = second ? 21 : 11 + r, depth = second ? r == 6 ? 2 : r - 3 : 0;
        for (int d = 0; d < depth; d++) paths[r * 3 + d] = 60 + (d == depth - 1 ? r - 4 : d);
        table_of_row[r] = tables[second];
        table_lengths[r] = length;
        path_lengths[r] = depth;
        positions[r] = length + depth - 1;
        slots[r] = second ? 60 + r - 4 : tables[0][length - 1];
    }
    return (Rows){ROWS, 3, 24, 0, positions, slots, table_lengths, path_lengths, table_of_row, paths, 0, 0};
}

/* A pool of all layers, zero behind the heads' dimensions. */
static char *pool(int kind, int64_t *head_bytes) {
    static const int SIZES[] = {4, 2, 1};
    const int64_t row = PADDED * SIZES[kind] + 4 * (kind == INT8), planes = 2 * LAYERS * KV_HEADS;
    char *made = space(planes * SLOTS * row);
    for (int64_t i = 0; i < planes * SLOTS; i++) {
        const float *x = floats(PADDED, 1), step = 0.01f + x[0] * x[0];
        for (int d = 0; d < HEAD_DIM; d++) {
            const int8_t byte = (int8_t)(x[d] * 127);
            const char *const forms[] = {(const char *)(x + d), (const char *)(x + d) + 2,
                                         (const char *)&byte};
            memcpy(made + i * row + d * SIZES[kind], forms[kind], (size_t)SIZES[kind]);
        }
        if (kind == INT8) memcpy(made + i * row + PADDED, &step, 4);
    }
    *head_bytes = SLOTS * row;
    return made;
}

static void check_attention(void) {
    const float *rotary = floats(POSITIONS * HEAD_DIM, 1), *norm = floats(HEAD_DIM, 1);
    const Rows rows = rows_of_step();
    for (int kind = FLOAT32; kind <= INT8; kind++) {
        int64_t head_bytes;
        char *keys = pool(kind, &head_bytes);
        const float *qkv = floats(ROWS * QKV, 1);
        float *q = space(ROWS * HEADS * PADDED * 4), *out = space(ROWS * HEADS * HEAD_DIM * 4);
        Attention a = {keys,     keys + KV_HEADS * head_bytes, head_bytes, HEADS, KV_HEADS, HEAD_DIM, PADDED,
                       HEAD_DIM, kind == BFLOAT16 ? 9 : 0,     norm,       norm,  rotary,   1e-5f,    0.2f,
                       kind,     kind == BFLOAT16};
        do_rope_store(&a, &rows, qkv, q);
        print("rope", kind, q, ROWS * HEADS * PADDED * 4);
        print("pool", kind, keys, 2 * KV_HEADS * head_bytes);
        const ScoreModifier tilted = {floats(HEADS, 0.1f), floats(HEADS, 1), 0}, capped = {0, 0, 3};
        const ScoreModifier *const modifiers[] = {0, &tilted, &capped};
        for (int m = 0; m < 3; m++) {
            do_attend(&a, &rows, q, modifiers[m], out);
            print(m == 2 ? "libm-attend" : "attend", kind * 10 + m, out, ROWS * HEADS * HEAD_DIM * 4);
        }
    }
}

static Layer layer(int kind, int rounds) {
    return (Layer){.qkv = weight(QKV, HIDDEN, kind, rounds),
                   .o = weight(HIDDEN, HEADS * HEAD_DIM, kind, rounds),
                   .gate_up = weight(2 * INNER, HIDDEN, kind, rounds),
                   .down = weight(HIDDEN, INNER, kind, rounds),
                   .norm_in = floats(HIDDEN, 1),
                   .norm_post = floats(HIDDEN, 1)};
}

/* Four experts in place of the MLP, of which a row has two. */
static Layer layer_of_experts(int kind, int rounds) {
    Expert *experts = space(4 * (int64_t)sizeof *experts);
    for (int i = 0; i < 4; i++)
        experts[i] = (Expert){weight(2 * INNER, HIDDEN, kind, rounds), weight(HIDDEN, INNER, kind, rounds)};
    Layer made = layer(kind, rounds);
    made.router = weight(4, HIDDEN, kind, rounds);
    made.experts = experts;
    return made;
}

/* GEMMA: GELU, soft caps, norms of what is added, scaled embeddings.  OSS: sinks, clamped gates of experts */
enum { DENSE, EXPERTS, GEMMA, OSS };

static void check_model(int kind, int family) {
    static const char *const NAMES[] = {"model", "experts", "libm-gemma", "oss"};
    static const char *const POOL_NAMES[] = {"model-pool", "experts-pool", "libm-gemma-pool", "oss-pool"};
    const int has_experts = family == EXPERTS || family == OSS, is_gemma = family == GEMMA;
    const int half = kind != FLOAT32;
    int64_t head_bytes;
    char *kv = pool(half ? BFLOAT16 : FLOAT32, &head_bytes);
    Layer layers[LAYERS] = {layer(kind, half),
                            has_experts ? layer_of_experts(kind, half) : layer(kind, half)};
    for (int i = 0; i < LAYERS; i++) layers[i].place = i;
    for (int i = 0; is_gemma && i < LAYERS; i++) {
        layers[i].norm_attended = floats(HIDDEN, 1);
        layers[i].norm_mlp = floats(HIDDEN, 1);
        layers[i].rotary = floats(POSITIONS * HEAD_DIM, 1);
        layers[i].window = i ? 0 : 9;
    }
    for (int i = 0; family == OSS && i < LAYERS; i++) layers[i].sinks = floats(HEADS, 2);
    const ModelShape shape = {.layers = LAYERS,
                              .hidden = HIDDEN,
                              .inner = INNER,
                              .heads = HEADS,
                              .kv_heads = KV_HEADS,
                              .head_dim = HEAD_DIM,
                              .padded_dim = PADDED,
                              .rotary_dim = HEAD_DIM,
                              .kv_kind = half ? BFLOAT16 : FLOAT32,
                              .rounds_inputs = half,
                              .experts = has_experts ? 4 : 0,
                              .chosen_experts = 2,
                              .expert_inner = INNER,
                              .is_gelu = is_gemma,
                              .cap = is_gemma ? 5 : 0,
                              .gate_slope = 1.7f,
                              .gate_limit = family == OSS ? 2 : 0,
                              .eps = 1e-5f,
                              .scale = 0.2f,
                              .rotary = floats(POSITIONS * HEAD_DIM, 1)};
    const ModelEnds ends = {weight(VOCAB, HIDDEN, kind, 0), weight(VOCAB, HIDDEN, kind, half),
                            floats(HIDDEN, 1), VOCAB, is_gemma ? 9.75f : 1, is_gemma ? 8 : 0};
    const Rows rows = rows_of_step();
    const int64_t ids[ROWS] = {3, 1, 4, 1, 5, 9, 2}, outputs[] = {3, 4, 5, 6};
    float *logits = space(4 * VOCAB * 4);
    /* a tree of two nodes below row 4 of the outputs, and none below row 3 */
    int32_t trees[] = {9, 2, -1, 0, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    const TreeQuery queries[] = {
        {.at = 12, .root_row = 0, .rule = RULE_MATCH, .min_p = 0, .top_p = 1, .stream = 5},
        {.at = 0,
         .root_row = 1,
         .nodes = 2,
         .rule = RULE_MATCH,
         .top_p = 1,
         .stream = 6,
         .position = 4,
         .temperature = 0.7f}};
    do_read_model(&shape, layers, &ends, &rows, ids, kv, KV_HEADS * head_bytes, 0, outputs, 4, logits,
                  queries, 2, trees);
    print(NAMES[family], kind, logits, 4 * VOCAB * 4);
    print(POOL_NAMES[family], kind, kv, 2 * LAYERS * KV_HEADS * head_bytes);
    print("libm-match", kind, trees, sizeof trees);
    int32_t out[2 * 4];
    const Chain chains[] = {
        {.first_row = 3, .max_tokens = 4, .top_p = 1},
        {.first_row = 5, .max_tokens = 3, .top_p = 0.9, .stream = 7, .temperature = 0.8f}};
    float *states = space(2 * 4 * HIDDEN * 4);
    do_chain(&shape, layers, &ends, &rows, ids, kv, KV_HEADS * head_bytes, chains, 2, 4, VOCAB, 0, out, 0,
             states);
    print("libm-chain", kind, out, sizeof out);
}

/* ---- sampling, verification, trees */

static void check_sampling(void) {
    const float *logits = floats(4 * VOCAB, 6);
    const uint64_t keys[] = {1, 2, 3, 4};
    int32_t tokens[4 * 8];
    float probs[4 * 8];
    double p[2][VOCAB];
    for (int t = 0; t < 3; t++) {
        do_picks(logits, 4, VOCAB, 0.4f * (float)t, t == 2 ? 0.01 : 0, 40 * t, t ? 0.9 : 1, keys, 0, 8,
                 tokens, probs);
        print(t ? "libm-picks" : "picks", t, tokens, sizeof tokens);
        print("libm-pick-probs", t, probs, sizeof probs);
    }
    for (int i = 0; i < 2; i++) do_probabilities(logits + i * VOCAB, VOCAB, 0.7f, 0, 0, 1, p[i]);
    print("probabilities", 0, p, sizeof p);
    do_probabilities(logits, VOCAB, 0.7f, 0.001, 50, 0.95, p[1]);
    print("libm-probabilities", 1, p[1], sizeof p[1]);
    do_sample_children(p[0], VOCAB, 5, 6, 1, 8, 0, tokens);
    print("children", 0, tokens, 8 * 4);
    for (int rule = RULE_MATCH; rule <= RULE_TRAVERSAL; rule++) {
        const double *const q[] = {p[0], p[1]};
        /* two siblings and a child of the first one; a chain of two for the rule that takes chains */
        int32_t chain[12] = {tokens[0], tokens[1], -1, 0, 0, 1};
        int32_t tree[17] = {tokens[0], tokens[1], tokens[2], -1, -1, 0, 0, 0, 1}, *trees = tree;
        TreeQuery query = {.nodes = 3,
                           .rule = rule,
                           .top_p = 1,
                           .stream = 9,
                           .position = 3,
                           .probs = q,
                           .temperature = 0.7f};
        if (rule == RULE_BLOCK) query.nodes = 2, trees = chain;
        do_verify_trees(logits, VOCAB, VOCAB, 0, 0, &query, 1, trees);
        print("libm-verify", rule, trees, query.nodes * 5 * 4 + 8);
    }
}

static void check_trees(void) {
    enum { WIDTH = 4, RECORDS = 3 * WIDTH * 6 };
    double scores[RECORDS] = {0};
    float probs[RECORDS], kept_probs[10];
    int32_t tokens[RECORDS], parents[RECORDS], frontier[WIDTH] = {-1}, order[RECORDS], out[2 * WIDTH],
                                               kept[2][10];
    CandidateTree tree = {WIDTH, 0, 1, scores, probs, tokens, parents, frontier, order};
    for (int depth = 0; depth < 3; depth++) {
        const float *logits = floats(WIDTH * VOCAB, 5);
        do_grow(&tree, logits, VOCAB, 0, 0, 0, 1, 11, 0, 0, 6, out);
        print("libm-grow", depth, out, sizeof out);
    }
    const int64_t count = do_keep(&tree, 10, kept[0], kept[1], kept_probs);
    print("libm-keep", (int)count, kept, sizeof kept);

    int32_t given[200], *found_rows = space(4096 * 4);
    TextIndex index = {24, 0, 0, 0, 8, 4, space(256 * 4), space(256 * 4 * 4), space((4 << 8) * 4)};
    for (int i = 0; i < 200; i++) given[i] = (int32_t)(random_bits() >> 8) % 5;
    do_runs_extend(&index, given, 150);
    do_runs_find(&index, given + 150, 40, 3, 0, 0, found_rows);
    print("runs", 0, found_rows, 4096 * 4);
    TextIndex *const texts[] = {&index};
    const int64_t longest = do_runs_longest(&index, given + 190, 10, texts, 1);
    print("runs-longest", 0, &longest, sizeof longest);
}

/* ---- recurrent layers */

/* Two requests: a tree whose second row is saved, and a chain from a slot without a state. */
static void check_recurrences(void) {
    enum { WIDTH = 75, HEIGHT = 21, SLOT = 2 * HEIGHT * 128 };
    static const int32_t parents[ROWS] = {-1, 0, 1, 1, 2, -1, 5}, slots[ROWS] = {2, 2, 2, 2, 2, 0, 0},
                         saves[ROWS] = {0, 1, 0, 0, 0, 0, 1}, fresh[ROWS] = {0, 0, 0, 0, 0, 1, 1},
                         copies[ROWS] = {-1, -1, -1, -1, -1, -1, -1};
    const Forest forest = {ROWS, parents, slots, saves, fresh, copies};
    for (int dim = 16; dim <= 128; dim *= 2) {
        float *states = floats(3 * SLOT, 1), *out = space(ROWS * 2 * HEIGHT * 4);
        const RowInputs keys = {floats(ROWS * dim, 1), dim, 1, dim},
                        reads = {floats(ROWS * dim, 1), dim, 1, dim},
                        values = {floats(ROWS * 2 * HEIGHT, 1), 2 * HEIGHT, 2, HEIGHT},
                        decays = {floats(ROWS * 2 * dim, 1), 2 * dim, 2, dim}, decay = {decays.data, 2, 2, 1},
                        rates = {floats(ROWS * 2, 1), 2, 2, 1};
        const Recurrent by_dim = {keys, reads, values, decays, rates, decays.data, states, out},
                        by_head = {keys, reads, values, decay, rates, decays.data, states, out};
        do_gated_delta(&forest, dim < 64 ? &by_dim : &by_head);
        print("delta", dim, out, ROWS * 2 * HEIGHT * 4);
        do_selective_scan(&forest, dim < 64 ? &by_head : &by_dim);
        print("scan", dim, out, ROWS * 2 * HEIGHT * 4);
        print("states", dim, states, 3 * SLOT * 4);
    }
    const RowInputs x = {floats(ROWS * 80, 3), 80, 1, WIDTH}, z = {floats(ROWS * 80, 3), 80, 1, WIDTH};
    const float *weight = floats(4 * WIDTH, 1);
    float *tails = floats(3 * 3 * WIDTH, 1), *y = space(ROWS * WIDTH * 4);
    do_short_conv(&forest, &x, weight, weight + 1, 4, 1, tails, y);
    print("conv", 0, y, ROWS * WIDTH * 4);
    print("tails", 0, tails, 3 * 3 * WIDTH * 4);
    do_sigmoid_rows(&x, ROWS, y);
    print("sigmoid", 0, y, ROWS * WIDTH * 4);
    do_softplus_rows(&x, ROWS, weight, 0.01f, 4, y);
    print("softplus", 0, y, ROWS * WIDTH * 4);
    for (int variant = 0; variant < 2; variant++) {
        do_gate_rows(&x, &z, ROWS, variant, y);
        print("gate", variant, y, ROWS * WIDTH * 4);
        do_gated_norm(&x, &z, ROWS, weight, variant ? WIDTH / 3 : WIDTH, 1e-5f, variant, variant, y);
        print("gated_norm", variant, y, ROWS * WIDTH * 4);
    }
}

int main(int count, char **arguments) {
    if (count != 2) return 2;
#define FIND(name) do_##name = (__typeof__(do_##name))(uintptr_t)found(arguments[1], #name);
    KERNELS(FIND)
    for (int threads = 1; threads <= 4; threads += 3) {
        do_set_threads(threads);
        state = 1;
        printf("threads %d\n", threads);
        check_linears();
        check_elementwise();
        check_attention();
        for (int kind = FLOAT32; kind <= LEVELS; kind++)
            for (int family = DENSE; family <= OSS; family++) check_model(kind, family);
        check_sampling();
        check_trees();
        check_recurrences();
    }
    return 0;
}
