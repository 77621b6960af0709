/* Gated delta rule and selective scan over a forest of rows: the state of a head is a matrix [height,dim],
 * whose rows ("lines") do not depend on each other.
 *
 * Computed, for every line s of the state with its value v:
 *   delta rule  s *= decay;  s += key * ((v - sum(s * key)) * rate);  out = sum(s * read)
 *   scan        s *= decay;  s += key * (v * rate);                   out = sum(s * read) + v * skip
 * Order: (group of rows, head) items, shared by threads > segments of a group > blocks of LINES lines > rows.
 * The lines of a block stay in registers from row to row, while the inputs of a segment are in the first cache.
 * A row whose parent is not the row before takes its lines from the slot, or from a copy made after its
 * parent.
 * Exact: the lines after a row follow from the lines before it by a fixed sequence of operations, and are the
 * same in registers and in memory.  Sums run in lanes, in two vectors, then over both, then across the lanes.
 */
#include "forest.h"
#include "memory.h"
#include "simd.h"
#include "threads.h"

enum { LINES = 2, MAX_VECTORS = MAX_STATE_DIM / LANES };

/* One call.  width: dim rounded up to whole vectors, zero behind dim. */
typedef struct {
    const Forest *forest;
    const Recurrent *layer;
    Schedule schedule;
    int64_t width;
} Scan;

/* Rows of one segment and one head, in scratch memory of the thread. */
typedef struct {
    const Scan *scan;
    const int32_t *order, *sources, *kept_as; /* of the segment */
    int64_t head, rows, is_first, is_last;    /* of its group */
    float *keys, *reads, *decays;             /* [rows,width] */
    float *rates;                             /* [rows] */
    float *carried;                           /* [carried_lines,width]: lines between segments */
    float *kept;                              /* [most_kept,LINES,width]: lines of the block in progress */
    float *saved;                             /* [LINES,width]: the same, to be written to the slot */
} Segment;

static int64_t carried_lines(const Scan *s) { return divide_up(s->layer->values.dim, LINES) * LINES; }

static int64_t segment_floats(const Scan *s) {
    const Schedule *plan = &s->schedule;
    return s->width * (3 * plan->longest + carried_lines(s) + LINES * (plan->most_kept + 1)) + plan->longest;
}

static Segment place_segment(const Scan *s, float *space) {
    Segment g = {.scan = s};
    g.keys = space;
    g.reads = g.keys + s->schedule.longest * s->width;
    g.decays = g.reads + s->schedule.longest * s->width;
    g.carried = g.decays + s->schedule.longest * s->width;
    g.kept = g.carried + carried_lines(s) * s->width;
    g.saved = g.kept + s->schedule.most_kept * LINES * s->width;
    g.rates = g.saved + LINES * s->width;
    return g;
}

/* ---- inputs of a segment */

static const float *input(const RowInputs *inputs, int64_t row, int64_t head) {
    return inputs->data + row * inputs->stride + head * inputs->dim;
}

/* to [width] = from [dim], divided by its length if `is_normed`, and times `scale`. */
static void copy_input(const float *from, int64_t dim, int64_t width, int is_normed, float scale, float *to) {
    vfloat squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        const vfloat x = load_at(from + i, dim - i);
        store(to + i, x);
        squares = multiply_add(x, x, squares);
    }
    if (!is_normed) return;
    const float factor = scale / sqrtf(sum_lanes(squares) + 1e-6f);
    for (int64_t i = 0; i < width; i += LANES) store(to + i, load(to + i) * factor);
}

/* to [width] = exp(factor * decays), from one number or from [dim]. */
static void copy_decays(const float *from, int64_t count, int64_t dim, int64_t width, float factor, float *to) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vfloat x = count == 1 ? broadcast(from[0]) : load_at(from + i, dim - i);
        store(to + i, vexp(x * factor));
    }
}

static void copy_inputs(const int is_delta, const Segment *g) {
    const Recurrent *l = g->scan->layer;
    const int64_t width = g->scan->width, heads = l->values.heads, dim = l->keys.dim;
    const int64_t group = g->head / (heads / l->keys.heads);
    const float scale = is_delta ? 1.0f / sqrtf((float)dim) : 1.0f;
    for (int64_t r = 0; r < g->rows; r++) {
        const int64_t row = g->order[r];
        g->rates[r] = *input(&l->rates, row, g->head);
        copy_input(input(&l->keys, row, group), dim, width, is_delta, 1.0f, g->keys + r * width);
        copy_input(input(&l->reads, row, group), dim, width, is_delta, scale, g->reads + r * width);
        copy_decays(input(&l->decays, row, g->head), l->decays.dim, dim, width, is_delta ? 1.0f : g->rates[r],
                    g->decays + r * width);
    }
}

/* ---- lines */

typedef vfloat Lines[LINES][MAX_VECTORS];

INLINE void load_lines(const int64_t vectors, const float *from, Lines s) {
    for (int l = 0; l < LINES; l++)
        for (int64_t i = 0; i < vectors; i++) s[l][i] = load(from + (l * vectors + i) * LANES);
}
INLINE void store_lines(const int64_t vectors, Lines s, float *to) {
    for (int l = 0; l < LINES; l++)
        for (int64_t i = 0; i < vectors; i++) store(to + (l * vectors + i) * LANES, s[l][i]);
}

/* Lines `line`, ... of a state, the last one repeatedly where there are no more. */
INLINE float *line_at(const Segment *g, int64_t row, int64_t line) {
    const Recurrent *l = g->scan->layer;
    const int64_t height = l->values.dim, slot = g->scan->forest->slots[row];
    return l->states + ((slot * l->values.heads + g->head) * height + min64(line, height - 1)) * l->keys.dim;
}

INLINE void load_slot(const int64_t vectors, const Segment *g, int64_t row, int64_t line, Lines s) {
    const int64_t dim = g->scan->layer->keys.dim;
    for (int l = 0; l < LINES; l++) {
        const float *from = line_at(g, row, line + l);
        for (int64_t i = 0; i < vectors; i++)
            s[l][i] = g->scan->forest->fresh[row] ? broadcast(0) : load_at(from + i * LANES, dim - i * LANES);
    }
}

/* The lines after one row, and their outputs. */
INLINE void step(const int is_delta, const int64_t vectors, const Segment *g, int64_t r, const float *values,
                 Lines s, float *out) {
    const int64_t at = r * vectors * LANES;
    const float *keys = g->keys + at, *reads = g->reads + at, *decays = g->decays + at;
    vfloat sums[LINES][2] = {{{0}}}, added[LINES];
    for (int64_t i = 0; i < vectors; i++)
        for (int l = 0; l < LINES; l++) {
            s[l][i] *= load(decays + i * LANES);
            if (is_delta) sums[l][i % 2] = multiply_add(s[l][i], load(keys + i * LANES), sums[l][i % 2]);
        }
    for (int l = 0; l < LINES; l++) {
        const float found = is_delta ? sum_lanes(sums[l][0] + sums[l][1]) : 0;
        added[l] = broadcast((values[l] - found) * g->rates[r]);
        sums[l][0] = sums[l][1] = broadcast(0);
    }
    for (int64_t i = 0; i < vectors; i++)
        for (int l = 0; l < LINES; l++) {
            s[l][i] = multiply_add(load(keys + i * LANES), added[l], s[l][i]);
            sums[l][i % 2] = multiply_add(s[l][i], load(reads + i * LANES), sums[l][i % 2]);
        }
    for (int l = 0; l < LINES; l++) out[l] = sum_lanes(sums[l][0] + sums[l][1]);
}

/* The lines `line`, ... through the rows of a segment. */
INLINE void compute_block(const int is_delta, const int64_t vectors, const Segment *g, int64_t line) {
    const Recurrent *layer = g->scan->layer;
    const int64_t width = vectors * LANES, height = layer->values.dim, count = min64(LINES, height - line);
    const RowInputs *v = &layer->values;
    Lines s;
    int64_t saved_row = -1;
    load_lines(vectors, g->carried + line * width, s); /* unused in the first segment */
    for (int64_t r = 0; r < g->rows; r++) {
        const int64_t row = g->order[r], source = g->sources[r];
        float values[LINES], out[LINES];
        for (int l = 0; l < LINES; l++) values[l] = input(v, row, g->head)[line + (l < count ? l : 0)];
        if (source == FROM_SLOT) load_slot(vectors, g, row, line, s);
        if (source >= 0) load_lines(vectors, g->kept + source * LINES * width, s);
        step(is_delta, vectors, g, r, values, s, out);
        memcpy(layer->out + (row * v->heads + g->head) * height + line, out, (size_t)count * 4);
        if (g->kept_as[r] >= 0) store_lines(vectors, s, g->kept + g->kept_as[r] * LINES * width);
        if (g->scan->forest->saves[row]) {
            store_lines(vectors, s, g->saved);
            saved_row = row;
        }
    }
    if (!g->is_last) store_lines(vectors, s, g->carried + line * width);
    for (int64_t l = 0; saved_row >= 0 && l < count; l++)
        memcpy(line_at(g, saved_row, line + l), g->saved + l * width, (size_t)layer->keys.dim * 4);
}

/* out += value * skip. */
static void add_skips(const Segment *g) {
    const Recurrent *l = g->scan->layer;
    const int64_t height = l->values.dim;
    const vfloat skip = broadcast(l->skips[g->head]);
    for (int64_t r = 0; r < g->rows; r++) {
        const float *x = input(&l->values, g->order[r], g->head);
        float *out = l->out + (g->order[r] * l->values.heads + g->head) * height;
        for (int64_t i = 0; i < height; i += LANES) {
            const vfloat sum = multiply_add(load_at(x + i, height - i), skip, load_at(out + i, height - i));
            store_at(out + i, sum, height - i);
        }
    }
}

/* Item i is head i % heads of group i / heads. */
INLINE void compute_items(const int is_delta, const int64_t vectors, const Scan *s, int64_t item, int64_t end) {
    Segment g = place_segment(s, scratch_acquire(SCRATCH_STATES, segment_floats(s) * 4));
    const int64_t heads = s->layer->values.heads;
    for (; item < end; item++) {
        const int64_t group = item / heads, last = s->schedule.group_ends[group],
                      first = group ? s->schedule.group_ends[group - 1] : 0;
        g.head = item % heads;
        for (int64_t at = first; at < last; at += g.rows) {
            g.order = s->schedule.order + at;
            g.sources = s->schedule.sources + at;
            g.kept_as = s->schedule.kept + at;
            g.rows = s->schedule.segment_ends[at] - at;
            g.is_first = at == first;
            g.is_last = at + g.rows == last;
            copy_inputs(is_delta, &g);
            for (int64_t line = 0; line < s->layer->values.dim; line += LINES)
                compute_block(is_delta, vectors, &g, line);
            if (!is_delta) add_skips(&g);
        }
    }
    scratch_release(SCRATCH_STATES);
}

INLINE void compute_heads(const int is_delta, const void *loop, int64_t item, int64_t end) {
    const Scan *s = loop;
    switch (s->width) { /* a constant number of vectors stays in registers */
        case 64: compute_items(is_delta, 64 / LANES, s, item, end); break;
        case 128: compute_items(is_delta, 128 / LANES, s, item, end); break;
        default: compute_items(is_delta, s->width / LANES, s, item, end);
    }
}

static void delta_heads(const void *loop, int64_t item, int64_t end) { compute_heads(1, loop, item, end); }
static void scan_heads(const void *loop, int64_t item, int64_t end) { compute_heads(0, loop, item, end); }

static void compute(const Forest *forest, const Recurrent *layer, LoopBody *heads) {
    const int64_t width = divide_up(layer->keys.dim, LANES) * LANES;
    const Scan scan = {forest, layer, forest_schedule(forest), width};
    parallel_for(scan.schedule.num_groups * layer->values.heads, 1, heads, &scan);
    forest_release();
}

void gated_delta(const Forest *forest, const Recurrent *layer) { compute(forest, layer, delta_heads); }
void selective_scan(const Forest *forest, const Recurrent *layer) { compute(forest, layer, scan_heads); }
