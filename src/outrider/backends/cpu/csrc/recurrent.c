/* Gated delta rule and selective scan over a forest of rows: the state of a head is a matrix [height,dim],
 * whose rows ("lines") do not depend on each other.
 *
 * Computed, for every line s of the state with its value v:
 *   delta rule  added = (v - sum(s * (key * decay))) * rate;  s = s * decay + key * added;  out = sum(s * read)
 *   scan        added = v * rate;  s = s * decay + key * added;  out = sum(s * read) + v * skip
 * Order: (group of rows, head) items, shared by threads > segments of a group > blocks of lines > rows > four
 * lines.  The lines of a block and the inputs of a segment stay in the first cache.  A row writes its lines
 * over those of the row before, unless these are read again: by another child, or into the slot.
 * Exact: the lines after a row follow from the lines before it by a fixed sequence of operations, wherever they
 * are stored.  Sums run in lanes, in two vectors, then over both, then across the lanes.
 */
#include "forest.h"
#include "memory.h"
#include "simd.h"
#include "threads.h"

enum { LINES = 4, BLOCK_LINES = 16 };

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
    float *keys, *reads, *decays, *decayed;   /* [rows,width]; decayed: keys times decays */
    float *rates;                             /* [rows] */
    float *carried;                           /* [carried_lines,width]: lines between segments */
    float *kept;                              /* [most_kept,BLOCK_LINES,width]: of the block in progress */
    float *saved;                             /* [BLOCK_LINES,width]: the same, to be written to the slot */
} Segment;

static int64_t carried_lines(const Scan *s) { return divide_up(s->layer->values.dim, BLOCK_LINES) * BLOCK_LINES; }

static int64_t segment_floats(const Scan *s) {
    const Schedule *plan = &s->schedule;
    return s->width * (4 * plan->longest + carried_lines(s) + BLOCK_LINES * (plan->most_kept + 1)) + plan->longest;
}

static Segment place_segment(const Scan *s, float *space) {
    Segment g = {.scan = s};
    g.keys = space;
    g.reads = g.keys + s->schedule.longest * s->width;
    g.decays = g.reads + s->schedule.longest * s->width;
    g.decayed = g.decays + s->schedule.longest * s->width;
    g.carried = g.decayed + s->schedule.longest * s->width;
    g.kept = g.carried + carried_lines(s) * s->width;
    g.saved = g.kept + s->schedule.most_kept * BLOCK_LINES * s->width;
    g.rates = g.saved + BLOCK_LINES * s->width;
    return g;
}

/* Inputs [width] of one row. */
typedef struct {
    const float *keys, *reads, *decays;
} RowOf;

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
        for (int64_t i = r * width; is_delta && i < (r + 1) * width; i++)
            g->decayed[i] = g->keys[i] * g->decays[i];
    }
}

/* ---- lines */

INLINE float *line_at(const Segment *g, int64_t row, int64_t line) {
    const Recurrent *l = g->scan->layer;
    const int64_t slot = g->scan->forest->slots[row];
    return l->states + ((slot * l->values.heads + g->head) * l->values.dim + line) * l->keys.dim;
}

/* to [BLOCK_LINES,width] = `count` lines of a slot, then zeros. */
static void load_slot(const Segment *g, int64_t row, int64_t line, int64_t count, float *to) {
    const int64_t width = g->scan->width, dim = g->scan->layer->keys.dim;
    const int fresh = g->scan->forest->fresh[row];
    if (fresh || dim < width || count < BLOCK_LINES) memset(to, 0, (size_t)(BLOCK_LINES * width) * 4);
    for (int64_t l = 0; !fresh && l < count; l++)
        memcpy(to + l * width, line_at(g, row, line + l), (size_t)dim * 4);
}

/* The sums of the lanes of four vectors: within quarters, then over these. */
INLINE void sum_four(const vfloat *v, float *sums) {
    typedef float quad __attribute__((vector_size(16), aligned(4)));
    const vfloat low = SHUFFLE(v[0], v[1], EVEN_IN_QUARTERS) + SHUFFLE(v[0], v[1], ODD_IN_QUARTERS),
                 high = SHUFFLE(v[2], v[3], EVEN_IN_QUARTERS) + SHUFFLE(v[2], v[3], ODD_IN_QUARTERS),
                 all = SHUFFLE(low, high, EVEN_IN_QUARTERS) + SHUFFLE(low, high, ODD_IN_QUARTERS);
    quad q[LANES / 4];
    memcpy(q, &all, sizeof all);
    for (int n = LANES / 8; n; n /= 2)
        for (int i = 0; i < n; i++) q[i] += q[i + n];
    memcpy(sums, q, sizeof *q);
}

/* Products [LINES] of lines with the decayed keys: what the state holds for these keys. */
INLINE void find_values(const int64_t vectors, const float *keys, const float *from, float *found) {
    vfloat sums[LINES][2] = {{{0}}}, line_sums[LINES];
    for (int64_t i = 0; i < vectors; i++)
        for (int l = 0; l < LINES; l++)
            sums[l][i % 2] = multiply_add(load(from + (l * vectors + i) * LANES), load(keys + i * LANES),
                                          sums[l][i % 2]);
    for (int l = 0; l < LINES; l++) line_sums[l] = sums[l][0] + sums[l][1];
    sum_four(line_sums, found);
}

/* `to` = LINES lines after a row, from those before it, and their outputs. */
INLINE void update_lines(const int by_dim, const int64_t vectors, const RowOf *row, const float *from,
                         const float *added, float *to, float *out) {
    const vfloat decay = broadcast(row->decays[0]);
    vfloat sums[LINES][2] = {{{0}}}, line_sums[LINES];
    for (int l = 0; l < LINES; l++, from += vectors * LANES, to += vectors * LANES) {
        for (int64_t i = 0; i < vectors; i++) {
            const vfloat old = load(from + i * LANES) * (by_dim ? load(row->decays + i * LANES) : decay);
            const vfloat new = multiply_add(load(row->keys + i * LANES), broadcast(added[l]), old);
            store(to + i * LANES, new);
            sums[l][i % 2] = multiply_add(new, load(row->reads + i * LANES), sums[l][i % 2]);
        }
        line_sums[l] = sums[l][0] + sums[l][1];
    }
    sum_four(line_sums, out);
}

/* The lines `line`, ... through row r of a segment. */
INLINE void compute_row(const int is_delta, const int by_dim, const int64_t vectors, const Segment *g, int64_t r,
                        int64_t line, const float *from, float *to) {
    const RowInputs *v = &g->scan->layer->values;
    const int64_t count = min64(BLOCK_LINES, v->dim - line), width = vectors * LANES, at = g->order[r];
    const RowOf row = {g->keys + r * width, g->reads + r * width, g->decays + r * width};
    float added[BLOCK_LINES] = {0}, found[BLOCK_LINES] = {0}, out[BLOCK_LINES];
    memcpy(added, input(v, at, g->head) + line, (size_t)count * 4);
    for (int64_t l = 0; is_delta && l < count; l += LINES)
        find_values(vectors, g->decayed + r * width, from + l * width, found + l);
    for (int l = 0; l < BLOCK_LINES; l++) added[l] = (added[l] - found[l]) * g->rates[r];
    for (int64_t l = 0; l < count; l += LINES)
        update_lines(by_dim, vectors, &row, from + l * width, added + l, to + l * width, out + l);
    memcpy(g->scan->layer->out + (at * v->heads + g->head) * v->dim + line, out, (size_t)count * 4);
}

/* The lines `line`, ... through the rows of a segment.  Each row writes them where its children find them. */
INLINE void compute_block(const int is_delta, const int64_t vectors, const Segment *g, int64_t line) {
    const Recurrent *layer = g->scan->layer;
    const int64_t width = vectors * LANES, count = min64(BLOCK_LINES, layer->values.dim - line);
    const int by_dim = layer->decays.dim > 1;
    float *const carried = g->carried + line * width, *before = carried, *saved = 0;
    int64_t saved_row = 0;
    for (int64_t r = 0; r < g->rows; r++) {
        const int64_t row = g->order[r], is_saved = g->scan->forest->saves[row];
        float *after = is_saved ? g->saved : carried;
        if (g->kept_as[r] >= 0) after = g->kept + g->kept_as[r] * BLOCK_LINES * width;
        if (g->sources[r] == FROM_SLOT) load_slot(g, row, line, count, before = carried);
        if (g->sources[r] >= 0) before = g->kept + g->sources[r] * BLOCK_LINES * width;
        if (by_dim)
            compute_row(is_delta, 1, vectors, g, r, line, before, after);
        else
            compute_row(is_delta, 0, vectors, g, r, line, before, after);
        before = after;
        if (is_saved) saved = after, saved_row = row;
    }
    if (!g->is_last && before != carried) memcpy(carried, before, (size_t)(count * width) * 4);
    for (int64_t l = 0; saved && l < count; l++)
        memcpy(line_at(g, saved_row, line + l), saved + l * width, (size_t)layer->keys.dim * 4);
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
            for (int64_t line = 0; line < s->layer->values.dim; line += BLOCK_LINES)
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
