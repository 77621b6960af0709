/* A gated delta rule in place of a layer's attention.
 *
 * Computed: `LayerDelta` of outrider/backends/layer.py, over the replayed rows and those of the step.
 * Order: each step is a kernel of its own over all rows.
 * Exact: that of the kernels.  A replayed row has the bits that it had as a node: the numbers of its linears
 * are kept, and all that follows depends on its path alone. */
#include "delta.h"
#include <math.h>
#include <string.h>
#include "recurrent.h"

/* Rows are the replayed ones, then those of the step. */
typedef struct {
    const LayerDelta *delta;
    const RecurrentRows *path;
    int64_t rows, replayed, channels, values, mixed_width, gates_width;
    float *mixed;     /* [rows,mixed_width]: q, k, v and z; replayed rows have no z */
    float *gates;     /* [rows,gates_width]: b, a */
    float *convolved; /* [rows,channels] */
    float *beta, *decays; /* [rows,heads] */
    float *out;       /* [rows,values] */
} Block;

static Block place_block(const LayerDelta *d, const Rows *rows, float *space) {
    const RecurrentRows *path = rows->recurrent;
    const int64_t values = d->heads * d->dim, channels = 2 * d->key_heads * d->key_dim + values;
    Block b = {.delta = d, .path = path, .replayed = path->num_replayed, .channels = channels,
               .values = values, .mixed_width = channels + values, .gates_width = 2 * d->heads};
    b.rows = path->num_replayed + rows->num_rows;
    b.mixed = space;
    b.gates = b.mixed + b.rows * b.mixed_width;
    b.convolved = b.gates + b.rows * b.gates_width;
    b.beta = b.convolved + b.rows * channels;
    b.decays = b.beta + b.rows * d->heads;
    b.out = b.decays + b.rows * d->heads;
    return b;
}

int64_t delta_floats(const Layer *layers, int64_t num_layers, const Rows *rows) {
    int64_t most = 0;
    for (int64_t i = 0; i < num_layers; i++) {
        if (!layers[i].delta) continue;
        const Block b = place_block(layers[i].delta, rows, 0);
        const int64_t row = b.mixed_width + b.gates_width + b.channels + 2 * b.delta->heads + b.values;
        if (b.rows * row > most) most = b.rows * row;
    }
    return most;
}

/* The kept inputs of replayed rows; then those of this step's draft nodes take their place. */
static void exchange_kept(const Block *b, float *kept) {
    const int64_t width = b->channels + b->gates_width;
    for (int64_t i = 0; i < b->replayed; i++) {
        const float *from = kept + b->path->replayed[i] * width;
        memcpy(b->mixed + i * b->mixed_width, from, (size_t)b->channels * 4);
        memcpy(b->gates + i * b->gates_width, from + b->channels, (size_t)b->gates_width * 4);
    }
    for (int64_t i = 0; i < b->path->num_drafted; i++) {
        const int64_t row = b->replayed + b->path->drafted[i];
        float *to = kept + i * width;
        memcpy(to, b->mixed + row * b->mixed_width, (size_t)b->channels * 4);
        memcpy(to + b->channels, b->gates + row * b->gates_width, (size_t)b->gates_width * 4);
    }
}

static void compute_gates(const Block *b) {
    const LayerDelta *d = b->delta;
    const int64_t heads = d->heads;
    sigmoid_rows(&(RowInputs){b->gates, b->gates_width, 1, heads}, b->rows, b->beta);
    softplus_rows(&(RowInputs){b->gates + heads, b->gates_width, 1, heads}, b->rows, d->bias, 0, INFINITY,
                  b->decays);
    for (int64_t r = 0; r < b->rows; r++)
        for (int64_t h = 0; h < heads; h++) b->decays[r * heads + h] *= d->rates[h];
}

static void compute_states(const Block *b, int64_t place) {
    const LayerDelta *d = b->delta;
    const int64_t keys = d->key_heads * d->key_dim;
    short_conv(&b->path->forest, &(RowInputs){b->mixed, b->mixed_width, 1, b->channels}, d->taps, 0,
               d->num_taps, 1, b->path->tails[place], b->convolved);
    const Recurrent scan = {
        .keys = {b->convolved + keys, b->channels, d->key_heads, d->key_dim},
        .reads = {b->convolved, b->channels, d->key_heads, d->key_dim},
        .values = {b->convolved + 2 * keys, b->channels, d->heads, d->dim},
        .decays = {b->decays, d->heads, d->heads, 1},
        .rates = {b->beta, d->heads, d->heads, 1},
        .states = b->path->states[place],
        .out = b->out,
    };
    gated_delta(&b->path->forest, &scan);
}

void delta_block(const Layer *layer, const Rows *rows, int64_t hidden, float eps, const float *input,
                 float *space, float *x) {
    const LayerDelta *d = layer->delta;
    const Block b = place_block(d, rows, space);
    const int64_t n = rows->num_rows;
    float *mixed = b.mixed + b.replayed * b.mixed_width, *out = b.out + b.replayed * b.values;
    linear(&d->qkvz, input, n, hidden, mixed, b.mixed_width, 0);
    linear(&d->gates, input, n, hidden, b.gates + b.replayed * b.gates_width, b.gates_width, 0);
    exchange_kept(&b, b.path->kept[layer->place]);
    compute_gates(&b);
    compute_states(&b, layer->place);
    const RowInputs found = {out, b.values, 1, b.values};
    const RowInputs z = {mixed + b.channels, b.mixed_width, 1, b.values};
    gated_norm(&found, &z, n, d->norm, d->dim, eps, 1, 0, out);
    linear(&layer->o, out, n, b.values, x, hidden, 1);
}
