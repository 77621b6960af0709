/* The layers of a decoder in one call: per layer norm, qkv, rotary embedding, attention, output projection,
 * norm, gated MLP or experts.  Some models also normalize what attention and MLP add, gate the attention's
 * output, or have a gated delta rule in place of attention.
 *
 * Each step is a kernel of its own over all rows, with the LoRA updates of a linear right after it.  Row
 * invariance is that of the kernels: nothing here mixes rows. */
#include "delta.h"
#include "experts.h"
#include "memory.h"
#include "recurrent.h"
#include "simd.h"

/* Activations of one layer, in one allocation, and what experts and delta rules need, in others.
 * added: what a sublayer adds to x, before its norm. */
typedef struct {
    float *normed, *added, *projected, *q, *inner, *experts, *delta;
} Buffers;

static Buffers allocate_buffers(const ModelShape *s, const Layer *layers, const Rows *of_step) {
    const int64_t rows = of_step->num_rows;
    const int64_t qkv = (s->heads + 2 * s->kv_heads) * s->head_dim, attended = s->heads * s->head_dim;
    const int64_t width = s->inner > s->shared_inner ? s->inner : s->shared_inner;
    const int64_t projected = 2 * width > qkv ? 2 * width : qkv, inner = width > attended ? width : attended;
    Buffers b = {0};
    b.normed = allocate(rows * (2 * s->hidden + projected + s->heads * s->padded_dim + inner) * 4);
    b.added = b.normed + rows * s->hidden;
    b.projected = b.added + rows * s->hidden;
    b.q = b.projected + rows * projected;
    b.inner = b.q + rows * s->heads * s->padded_dim;
    if (s->experts) b.experts = allocate(experts_floats(s, rows) * 4);
    if (of_step->recurrent) b.delta = allocate(delta_floats(layers, s->layers, of_step) * 4);
    return b;
}

static void release_buffers(Buffers b) {
    release(b.normed);
    if (b.experts) release(b.experts);
    if (b.delta) release(b.delta);
}

/* A linear with its LoRA parts, of layer `layer`, for all rows. */
typedef struct {
    const Rows *rows;
    int64_t layer;
} LayerRows;

static void project(const LayerRows *at, const Weight *weight, int64_t first_part, int64_t num_parts,
                    const float *x, int64_t inputs, float *y, int64_t outputs, int add) {
    const Rows *rows = at->rows;
    linear(weight, x, rows->num_rows, inputs, y, outputs, add);
    if (!rows->num_lora_runs) return;
    add_lora(rows->lora_runs, rows->num_lora_runs, at->layer * LORA_PARTS + first_part, num_parts, x, inputs,
             y, outputs);
}

static Attention attention_of(const ModelShape *s, const Layer *layer, char *keys, int64_t plane_bytes) {
    return (Attention){
        .keys = keys,
        .values = keys + plane_bytes,
        .head_bytes = plane_bytes / s->kv_heads,
        .heads = s->heads,
        .kv_heads = s->kv_heads,
        .head_dim = s->head_dim,
        .padded_dim = s->padded_dim,
        .rotary_dim = s->rotary_dim,
        .window = layer->window,
        .q_norm = layer->q_norm,
        .k_norm = layer->k_norm,
        .rotary = layer->rotary ? layer->rotary : s->rotary,
        .eps = s->eps,
        .scale = s->scale,
        .kind = (int)s->kv_kind,
        .rounds_inputs = (int)s->rounds_inputs,
    };
}

/* x += the output of a linear, or its norm if the layer has one. */
static void project_onto(const ModelShape *s, const LayerRows *at, const Weight *weight, int64_t part,
                         const float *norm, const float *input, int64_t inputs, Buffers b, float *x) {
    project(at, weight, part, 1, input, inputs, norm ? b.added : x, s->hidden, !norm);
    if (norm) add_normed(x, b.added, norm, at->rows->num_rows, s->hidden, s->eps);
}

/* The attention's output, b.inner [rows,attended], times its gates. */
static void gate_attended(const Layer *layer, int64_t rows, const float *input, int64_t width,
                          int64_t attended, Buffers b) {
    linear(&layer->query_gate, input, rows, width, b.projected, attended, 0);
    const RowInputs from = {b.inner, attended, 1, attended}, gates = {b.projected, attended, 1, attended};
    gate_rows(&from, &gates, rows, 0, b.inner);
}

/* x += attention of `input` [rows,width]. */
static void attention_block(const ModelShape *s, const Layer *layer, const LayerRows *at, char *keys,
                            int64_t plane_bytes, const float *input, int64_t width, Buffers b, float *x) {
    const Attention attention = attention_of(s, layer, keys, plane_bytes);
    const int64_t qkv = (s->heads + 2 * s->kv_heads) * s->head_dim;
    project(at, &layer->qkv, LORA_Q, 3, input, width, b.projected, qkv, 0);
    rope_store(&attention, at->rows, b.projected, b.q);
    const ScoreModifier modifier = {.sinks = layer->sinks, .cap = s->cap};
    attend(&attention, at->rows, b.q, layer->sinks || s->cap > 0 ? &modifier : 0, b.inner);
    const int64_t attended = s->heads * s->head_dim;
    if (layer->query_gate.data) gate_attended(layer, at->rows->num_rows, input, width, attended, b);
    project_onto(s, at, &layer->o, LORA_O, layer->norm_attended, b.inner, attended, b, x);
}

/* x += the expert that all rows share, of `input` [rows,hidden], times its gates. */
static void add_shared(const ModelShape *s, const Layer *layer, int64_t rows, const float *input, Buffers b,
                       float *x) {
    const int64_t inner = s->shared_inner;
    linear(&layer->gate_up, input, rows, s->hidden, b.projected, 2 * inner, 0);
    silu_mul(b.projected, rows, inner, b.inner);
    float *const gates = b.projected, *const shares = gates + rows;
    linear(&layer->shared_gate, input, rows, s->hidden, gates, 1, 0);
    sigmoid_rows(&(RowInputs){gates, 1, 1, 1}, rows, shares);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < inner; i++) b.inner[r * inner + i] *= shares[r];
    linear(&layer->down, b.inner, rows, inner, x, s->hidden, 1);
}

/* x += MLP of `input` [rows,hidden]; of norm(x) if it is null. */
static void mlp_block(const ModelShape *s, const Layer *layer, const LayerRows *at, const float *input,
                      Buffers b, float *x) {
    if (!input) rms_norm(x, layer->norm_post, at->rows->num_rows, s->hidden, s->eps, b.normed);
    input = input ? input : b.normed;
    if (layer->experts) {
        mix_experts(s, layer, at->rows->num_rows, input, b.experts, x);
        if (layer->shared_gate.data) add_shared(s, layer, at->rows->num_rows, input, b, x);
        return;
    }
    project(at, &layer->gate_up, LORA_GATE, 2, input, s->hidden, b.projected, 2 * s->inner, 0);
    (s->is_gelu ? gelu_mul : silu_mul)(b.projected, at->rows->num_rows, s->inner, b.inner);
    project_onto(s, at, &layer->down, LORA_DOWN, layer->norm_mlp, b.inner, s->inner, b, x);
}

/* x += attention, or the delta rule, of `given` [rows,width]; of norm(x) if it is null. */
static void mixing_block(const ModelShape *s, const Layer *layer, const LayerRows *at, char *keys,
                         int64_t plane_bytes, const float *given, int64_t width, Buffers b, float *x) {
    if (!given) rms_norm(x, layer->norm_in, at->rows->num_rows, s->hidden, s->eps, b.normed);
    const float *input = given ? given : b.normed;
    width = given ? width : s->hidden;
    if (layer->delta)
        delta_block(layer, at->rows, s->hidden, s->eps, input, b.delta, x);
    else
        attention_block(s, layer, at, keys, plane_bytes, input, width, b, x);
}

void stack(const ModelShape *s, const Layer *layers, const Rows *rows, char *pool, int64_t plane_bytes,
           float *x, const float *first_input, int64_t first_width, float *const *taps) {
    const int64_t n = rows->num_rows, state_bytes = n * s->hidden * 4;
    const Buffers b = allocate_buffers(s, layers, rows);
    for (int64_t i = 0; i < s->layers; i++) {
        const Layer *layer = layers + i;
        const LayerRows at = {rows, i};
        char *keys = pool + 2 * layer->place * plane_bytes;
        const float *given = i == 0 ? first_input : 0;
        if (taps && taps[i]) memcpy(taps[i], x, (size_t)state_bytes);
        if (!(layer->skip & SKIP_ATTENTION)) {
            mixing_block(s, layer, &at, keys, plane_bytes, given, first_width, b, x);
            given = 0;
        }
        if (!(layer->skip & SKIP_MLP)) mlp_block(s, layer, &at, given, b, x);
    }
    if (taps && taps[s->layers]) memcpy(taps[s->layers], x, (size_t)state_bytes);
    release_buffers(b);
}
