/* Causal depthwise convolution over a forest of rows.
 *
 * Computed: out = bias + x[first] * weight[0] + ... + x[row] * weight[taps-1] over the row's path, then the
 * activation.
 * Order: (row, block of channels) items, shared by threads > vectors of channels > taps.
 * Exact: lanes are channels, and every sum takes the taps one after the other. */
#include "elementwise.h"
#include "memory.h"
#include "recurrent.h"
#include "threads.h"

enum { ITEM_CHANNELS = 1024 };

/* seen [rows,taps]: the inputs of a row, the oldest first; zeros [channels]. */
typedef struct {
    const Forest *forest;
    const RowInputs *x;
    const float *weight, *bias;
    int64_t taps, channels, parts;
    int is_silu;
    float *tails, *out, *zeros;
    const float **seen;
} Conv;

/* Finds the inputs of every row: those of its parent and its own, or the stored ones. */
static void find_inputs(const Conv *c) {
    const Forest *f = c->forest;
    const int64_t before = c->taps - 1;
    for (int64_t r = 0; r < f->num_rows; r++) {
        const float **seen = c->seen + r * c->taps;
        if (f->parents[r] >= 0)
            memcpy(seen, c->seen + f->parents[r] * c->taps + 1, (size_t)before * sizeof *seen);
        else
            for (int64_t t = 0; t < before; t++)
                seen[t] = f->fresh[r] ? c->zeros : c->tails + (f->slots[r] * before + t) * c->channels;
        seen[before] = c->x->data + r * c->x->stride;
    }
}

/* Item i is part i % parts of row i / parts. */
static void compute_parts(const void *loop, int64_t item, int64_t end) {
    const Conv *c = loop;
    for (; item < end; item++) {
        const int64_t row = item / c->parts, first = item % c->parts * ITEM_CHANNELS;
        const float *const *seen = c->seen + row * c->taps;
        const int64_t last = min64(first + ITEM_CHANNELS, c->channels);
        for (int64_t i = first; i < last; i += LANES) {
            const int64_t count = min64(last - i, LANES);
            vfloat sum = c->bias ? load_at(c->bias + i, count) : broadcast(0);
            for (int64_t t = 0; t < c->taps; t++)
                sum = multiply_add(load_at(seen[t] + i, count),
                                   load_at(c->weight + t * c->channels + i, count), sum);
            if (c->is_silu) sum = silu(sum);
            store_at(c->out + row * c->channels + i, sum, count);
        }
    }
}

/* The tails of a slot = the inputs up to a row.
 * The oldest first: an input that is moved within the tails of a slot is read before it is overwritten. */
static void write_tails(const Conv *c, int64_t row, int64_t slot) {
    const int64_t before = c->taps - 1;
    for (int64_t t = 0; t < before; t++)
        memcpy(c->tails + (slot * before + t) * c->channels, c->seen[row * c->taps + t + 1],
               (size_t)c->channels * 4);
}

/* Copies come first, as they may have inputs that are in the tails of the row's own slot. */
static void save_tails(const Conv *c) {
    const Forest *f = c->forest;
    for (int64_t r = 0; r < f->num_rows; r++)
        if (f->copies[r] >= 0) write_tails(c, r, f->copies[r]);
    for (int64_t r = 0; r < f->num_rows; r++)
        if (f->saves[r]) write_tails(c, r, f->slots[r]);
}

void short_conv(const Forest *forest, const RowInputs *x, const float *weight, const float *bias,
                int64_t taps, int is_silu, float *tails, float *out) {
    const int64_t rows = forest->num_rows, channels = x->dim;
    const int64_t pointers = rows * taps * (int64_t)sizeof(float *);
    char *space = scratch_acquire(SCRATCH_FOREST, pointers + channels * 4);
    Conv c = {.forest = forest, .x = x, .weight = weight, .bias = bias, .taps = taps, .channels = channels,
              .parts = divide_up(channels, ITEM_CHANNELS), .is_silu = is_silu, .tails = tails, .out = out,
              .zeros = (float *)(space + pointers), .seen = (const float **)space};
    memset(c.zeros, 0, (size_t)channels * 4);
    find_inputs(&c);
    parallel_for(rows * c.parts, 4, compute_parts, &c);
    save_tails(&c);
    scratch_release(SCRATCH_FOREST);
}
