/* A mixture of experts in place of an MLP: every row has a few of many small MLPs.
 *
 * Computed: the router's logits of a row choose its experts, the largest first, of equal ones the first.  An
 * expert's weight is its softmax probability among all, or among the chosen.  Then x += the sum of weight *
 * down(silu(gate) * up) over the row's experts; some models clamp gate and up (clamped_mul).
 * Order: pairs (row, expert) are sorted by expert, so that an expert is read once for all of its rows.
 * Threads share (expert, slice of outputs) items.
 * Exact: the choice, the weights and the linears of a pair depend on its row alone.  A row's experts are
 * added by number, in one sum, wherever its pairs are among those of other rows. */
#include "experts.h"
#include "attention.h"
#include "linear.h"
#include "memory.h"
#include "threads.h"

enum { ITEMS_PER_THREAD = 4 };

/* One call of `mix_experts`.  pairs = rows * chosen_experts; a row's pairs are by expert. */
typedef struct {
    const ModelShape *shape;
    const Layer *layer;
    int64_t rows;
    const float *input;
    float *logits;             /* [rows,experts] */
    float *weights;            /* [pairs], row by row */
    int64_t *expert_of;        /* [pairs], row by row */
    int64_t *place;            /* [pairs]: where a pair is among those sorted by expert */
    int64_t *first;            /* [experts+1]: of every expert, its first pair */
    int64_t *active;           /* [experts]: the experts that have pairs, num_active of them */
    int64_t num_active;
    float *states;             /* [pairs,hidden], by expert: inputs, later outputs */
    float *gate_up, *inner;    /* [pairs,2*expert_inner], [pairs,expert_inner] */
    float *x;
} Mixture;

static int64_t integers(const ModelShape *s, int64_t rows) {
    return 2 * rows * s->chosen_experts + 2 * s->experts + 1;
}

int64_t experts_floats(const ModelShape *s, int64_t rows) {
    const int64_t pairs = rows * s->chosen_experts;
    return 2 * integers(s, rows) + rows * s->experts + pairs * (1 + s->hidden + 3 * s->expert_inner);
}

static Mixture place_mixture(const ModelShape *s, const Layer *layer, int64_t rows, const float *input,
                             float *space, float *x) {
    const int64_t pairs = rows * s->chosen_experts;
    Mixture m = {.shape = s, .layer = layer, .rows = rows, .input = input, .x = x};
    m.expert_of = (int64_t *)space;
    m.place = m.expert_of + pairs;
    m.first = m.place + pairs;
    m.active = m.first + s->experts + 1;
    m.states = space + 2 * integers(s, rows);
    m.gate_up = m.states + pairs * s->hidden;
    m.inner = m.gate_up + pairs * 2 * s->expert_inner;
    m.logits = m.inner + pairs * s->expert_inner;
    m.weights = m.logits + rows * s->experts;
    return m;
}

/* The experts of a row, ascending, and their weights, each [chosen_experts]. */
static void route(const ModelShape *s, const float *logits, int64_t *expert_of, float *weights) {
    float probs[MAX_EXPERTS];
    char is_chosen[MAX_EXPERTS] = {0};
    for (int64_t i = 0; i < s->chosen_experts; i++) {
        int64_t best = 0;
        while (is_chosen[best]) best++;
        for (int64_t e = best + 1; e < s->experts; e++)
            if (!is_chosen[e] && logits[e] > logits[best]) best = e;
        is_chosen[best] = 1;
    }
    memcpy(probs, logits, (size_t)s->experts * 4);
    float scale = softmax(probs, s->experts), sum = 0;
    for (int64_t e = 0, i = 0; e < s->experts; e++)
        if (is_chosen[e]) {
            expert_of[i] = e;
            weights[i++] = probs[e];
            sum += probs[e];
        }
    if (s->normalizes_experts) scale = 1.0f / sum;
    for (int64_t i = 0; i < s->chosen_experts; i++) weights[i] *= scale;
}

static void route_rows(const void *loop, int64_t first, int64_t end) {
    const Mixture *m = loop;
    const int64_t chosen = m->shape->chosen_experts;
    for (int64_t r = first; r < end; r++) {
        const float *logits = m->logits + r * m->shape->experts;
        route(m->shape, logits, m->expert_of + r * chosen, m->weights + r * chosen);
    }
}

/* Sorts the pairs by expert, those of an expert by row. */
static void sort_pairs(Mixture *m) {
    const int64_t experts = m->shape->experts, pairs = m->rows * m->shape->chosen_experts;
    memset(m->first, 0, (size_t)(experts + 1) * 8);
    for (int64_t i = 0; i < pairs; i++) m->first[m->expert_of[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) {
        if (m->first[e + 1]) m->active[m->num_active++] = e;
        m->first[e + 1] += m->first[e];
    }
    for (int64_t i = 0; i < pairs; i++) m->place[i] = m->first[m->expert_of[i]]++;
    for (int64_t e = experts; e > 0; e--) m->first[e] = m->first[e - 1];
    m->first[0] = 0;
}

/* Copies every row to its pairs. */
static void gather_rows(const void *loop, int64_t first, int64_t end) {
    const Mixture *m = loop;
    const int64_t chosen = m->shape->chosen_experts, hidden = m->shape->hidden;
    for (int64_t r = first; r < end; r++)
        for (int64_t i = r * chosen; i < (r + 1) * chosen; i++)
            memcpy(m->states + m->place[i] * hidden, m->input + r * hidden, (size_t)hidden * 4);
}

/* A linear of all active experts, `down` or `gate_up`.  Item i is slice i % slices of active expert
 * i / slices. */
typedef struct {
    const Mixture *mixture;
    int is_down;
    const float *x;
    float *y;
    int64_t inputs, outputs, slices, slice_outputs;
} ExpertsLinear;

static void multiply_slices(const void *loop, int64_t item, int64_t end) {
    const ExpertsLinear *l = loop;
    const Mixture *m = l->mixture;
    for (; item < end; item++) {
        const int64_t expert = m->active[item / l->slices], pair = m->first[expert],
                      rows = m->first[expert + 1] - pair;
        const int64_t from = item % l->slices * l->slice_outputs,
                      count = min64(l->slice_outputs, l->outputs - from);
        const Expert *weights = m->layer->experts + expert;
        const Weight part = outputs_from(l->is_down ? &weights->down : &weights->gate_up, l->inputs, from);
        float *y = scratch_acquire(SCRATCH_EXPERTS, rows * count * 4);
        linear(&part, l->x + pair * l->inputs, rows, l->inputs, y, count, 0);
        for (int64_t r = 0; r < rows; r++)
            memcpy(l->y + (pair + r) * l->outputs + from, y + r * count, (size_t)count * 4);
        scratch_release(SCRATCH_EXPERTS);
    }
}

static void multiply_experts(const Mixture *m, int is_down, const float *x, int64_t inputs, float *y,
                             int64_t outputs) {
    const int64_t panels = divide_up(outputs, PANEL);
    const int64_t wanted = divide_up(ITEMS_PER_THREAD * most_threads(), m->num_active);
    const int64_t slice_panels = divide_up(panels, min64(wanted, panels)),
                  slices = divide_up(panels, slice_panels);
    parallel_for(m->num_active * slices, 1, multiply_slices,
                 &(ExpertsLinear){m, is_down, x, y, inputs, outputs, slices, slice_panels * PANEL});
}

/* x += the weighted outputs of a row's experts, lane by lane. */
static void add_rows(const void *loop, int64_t first, int64_t end) {
    const Mixture *m = loop;
    const int64_t chosen = m->shape->chosen_experts, hidden = m->shape->hidden;
    for (int64_t r = first; r < end; r++) {
        const int64_t *place = m->place + r * chosen;
        const float *weights = m->weights + r * chosen;
        float *x = m->x + r * hidden;
        for (int64_t k = 0; k < hidden; k += LANES) {
            const int64_t left = min64(hidden - k, LANES);
            vfloat sum = {0};
            for (int64_t i = 0; i < chosen; i++) {
                const float *y = m->states + place[i] * hidden + k;
                sum += (left < LANES ? load_part(y, left) : load(y)) * weights[i];
            }
            sum += left < LANES ? load_part(x + k, left) : load(x + k);
            memcpy(x + k, &sum, (size_t)left * 4);
        }
    }
}

void mix_experts(const ModelShape *s, const Layer *layer, int64_t rows, const float *input, float *space,
                 float *x) {
    if (rows == 0) return;
    Mixture m = place_mixture(s, layer, rows, input, space, x);
    linear(&layer->router, input, rows, s->hidden, m.logits, s->experts, 0);
    parallel_for(rows, 8, route_rows, &m);
    sort_pairs(&m);
    parallel_for(rows, 8, gather_rows, &m);
    multiply_experts(&m, 0, m.states, s->hidden, m.gate_up, 2 * s->expert_inner);
    const int64_t pairs = rows * s->chosen_experts;
    if (s->gate_limit > 0)
        clamped_mul(m.gate_up, pairs, s->expert_inner, s->gate_slope, s->gate_limit, m.inner);
    else
        silu_mul(m.gate_up, pairs, s->expert_inner, m.inner);
    multiply_experts(&m, 1, m.inner, s->expert_inner, m.states, s->hidden);
    parallel_for(rows, 8, add_rows, &m);
}
