/* Gated delta rule and selective scan over a forest of rows: the state of a head is a matrix [height,dim],
 * whose rows ("lines") do not depend on each other.
 *
 * Computed, for every line s of the state with its value v:
 *   delta rule  added = (v - sum(s * (key * decay))) * rate;  s = s * decay + key * added;
 *               out = sum(s * read)
 *   scan        added = v * rate;  s = s * decay + key * added;  out = sum(s * read) + v * skip
 * Order: (group of rows, head, slice of lines) items, shared by threads > segments of a group > blocks of
 * lines > rows > four lines.  The lines of a block and the inputs of a segment stay in the first cache.  A
 * row writes its lines over those of the row before, unless these are read again: by another child, or
 * into the slot.  No row reads the slots of copies, so that these are written at once.  Heads of one line
 * (Mamba) are lines of one head instead, with decays, rates and skips of their own.
 * Exact: the lines after a row follow from the lines before it by a fixed sequence of operations, wherever
 * they are stored.  Sums run in lanes, in two vectors, then over both, then across the lanes. */
#include "forest.h"
#include "memory.h"
#include "simd.h"
#include "threads.h"

enum { LINES = 4, BLOCK_LINES = 16, SLICE_LINES = 256 };
enum { BY_HEAD, BY_DIM, BY_LINE }; /* what has decays of its own; by line also rates and skips */

/* One call.  width: dim rounded up to whole vectors, zero behind dim. */
typedef struct {
    const Forest *forest;
    const Recurrent *layer;
    Schedule schedule;
    int64_t width, heads, height, slice; /* slice: lines of an item */
    int by;
} Scan;

/* Rows of one segment and one head, in scratch memory of the thread. */
typedef struct {
    const Scan *scan;
    const int32_t *order, *sources, *kept_as; /* of the segment */
    int64_t head, rows, is_last;              /* is_last: of its group */
    float *keys, *reads, *decays, *decayed;   /* [rows,width]; decayed: keys times decays */
    float *rates;                             /* [rows] */
    float *carried;                           /* [carried_lines,width]: lines between segments */
    float *kept;                              /* [most_kept,BLOCK_LINES,width]: of the block in progress */
    float *saved;                             /* [BLOCK_LINES,width]: the same, to be written to the slot */
} Segment;

static int64_t carried_lines(const Scan *s) { return divide_up(s->slice, BLOCK_LINES) * BLOCK_LINES; }

static int64_t segment_floats(const Scan *s) {
    const int64_t longest = s->schedule.longest, blocks = s->schedule.most_kept + 1;
    return s->width * (4 * longest + carried_lines(s) + BLOCK_LINES * blocks) + longest;
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

/* One row, and the lines of a block that it adds to. */
typedef struct {
    const float *keys, *reads, *decays, *decayed; /* [width] */
    const float *line_decays;                     /* [count,dim]: logarithms, by line */
    int64_t count, dim;
    float values[BLOCK_LINES], rates[BLOCK_LINES], skips[BLOCK_LINES], added[BLOCK_LINES], out[BLOCK_LINES];
} RowLines;

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
static void copy_decays(const float *from, int64_t count, int64_t dim, int64_t width, float factor,
                        float *to) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vfloat x = count == 1 ? broadcast(from[0]) : load_at(from + i, dim - i);
        store(to + i, vexp(x * factor));
    }
}

static void copy_inputs(const int is_delta, const Segment *g) {
    const Recurrent *l = g->scan->layer;
    const int64_t width = g->scan->width, dim = l->keys.dim;
    const int64_t group = g->head / (g->scan->heads / l->keys.heads);
    const float scale = is_delta ? 1.0f / sqrtf((float)dim) : 1.0f;
    for (int64_t r = 0; r < g->rows; r++) {
        const int64_t row = g->order[r];
        float *keys = g->keys + r * width, *decays = g->decays + r * width;
        copy_input(input(&l->keys, row, group), dim, width, is_delta, 1.0f, keys);
        copy_input(input(&l->reads, row, group), dim, width, is_delta, scale, g->reads + r * width);
        g->rates[r] = *input(&l->rates, row, g->head);
        if (g->scan->by == BY_LINE) continue;
        copy_decays(input(&l->decays, row, g->head), l->decays.dim, dim, width,
                    is_delta ? 1.0f : g->rates[r], decays);
        for (int64_t i = 0; is_delta && i < width; i++) g->decayed[r * width + i] = keys[i] * decays[i];
    }
}

/* ---- lines */

INLINE float *line_at(const Segment *g, int64_t slot, int64_t line) {
    const int64_t head = slot * g->scan->heads + g->head;
    return g->scan->layer->states + (head * g->scan->height + line) * g->scan->layer->keys.dim;
}

/* to [BLOCK_LINES,width] = `count` lines of a slot, then zeros. */
static void load_slot(const Segment *g, int64_t row, int64_t line, int64_t count, float *to) {
    const int64_t width = g->scan->width, dim = g->scan->layer->keys.dim;
    const int64_t slot = g->scan->forest->slots[row];
    const int fresh = g->scan->forest->fresh[row];
    if (fresh || dim < width || count < BLOCK_LINES) memset(to, 0, (size_t)(BLOCK_LINES * width) * 4);
    for (int64_t l = 0; !fresh && l < count; l++)
        memcpy(to + l * width, line_at(g, slot, line + l), (size_t)dim * 4);
}

/* `count` lines of a slot = those of a block, from [BLOCK_LINES,width]. */
static void store_slot(const Segment *g, int64_t slot, int64_t line, int64_t count, const float *from) {
    for (int64_t l = 0; l < count; l++)
        memcpy(line_at(g, slot, line + l), from + l * g->scan->width, (size_t)g->scan->layer->keys.dim * 4);
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

/* The lines `line`, ... after a row in `to`, from those before it, and their outputs.
 * What the row has in memory is read first: for the compiler, `to` may overlap it. */
INLINE void update_lines(const int by, const int64_t vectors, RowLines *row, int64_t line, const float *from,
                         float *to) {
    const float *const keys = row->keys, *const reads = row->reads, *const decays = row->decays;
    const float *const line_decays = row->line_decays;
    const int64_t dim = row->dim, last = row->count - 1;
    const vfloat head_decay = broadcast(decays[0]);
    vfloat sums[LINES][2] = {{{0}}}, line_sums[LINES], added[LINES], rates[LINES];
    for (int l = 0; l < LINES; l++) {
        added[l] = broadcast(row->added[line + l]);
        rates[l] = broadcast(row->rates[line + l]);
    }
    for (int l = 0; l < LINES; l++, from += vectors * LANES, to += vectors * LANES) {
        for (int64_t i = 0; i < vectors; i++) {
            vfloat decay = head_decay;
            if (by == BY_DIM) decay = load(decays + i * LANES);
            if (by == BY_LINE)
                decay = vexp(rates[l] * load_at(line_decays + min64(line + l, last) * dim + i * LANES,
                                                dim - i * LANES));
            const vfloat old = load(from + i * LANES) * decay;
            const vfloat new = multiply_add(load(keys + i * LANES), added[l], old);
            store(to + i * LANES, new);
            sums[l][i % 2] = multiply_add(new, load(reads + i * LANES), sums[l][i % 2]);
        }
        line_sums[l] = sums[l][0] + sums[l][1];
    }
    sum_four(line_sums, row->out + line);
}

/* What row r of a segment adds to the lines `line`, ...; zeros behind `count`. */
INLINE RowLines row_lines(const int is_delta, const int by, const Segment *g, int64_t r, int64_t line,
                          int64_t count) {
    const Recurrent *l = g->scan->layer;
    const int64_t at = r * g->scan->width, row = g->order[r];
    RowLines made = {.keys = g->keys + at, .reads = g->reads + at, .decays = g->decays + at,
                     .decayed = g->decayed + at, .count = count, .dim = l->keys.dim};
    memcpy(made.values, input(&l->values, row, g->head) + line, (size_t)count * 4);
    for (int i = 0; i < BLOCK_LINES; i++) made.rates[i] = g->rates[r];
    for (int i = 0; !is_delta && i < BLOCK_LINES; i++) made.skips[i] = l->skips[g->head];
    if (by == BY_LINE) {
        memcpy(made.rates, input(&l->rates, row, 0) + line, (size_t)count * 4);
        memcpy(made.skips, l->skips + line, (size_t)count * 4);
        made.line_decays = input(&l->decays, row, line);
    }
    return made;
}

/* The lines `line`, ... through row r of a segment. */
INLINE void compute_row(const int is_delta, const int by, const int64_t vectors, const Segment *g, int64_t r,
                        int64_t line, const float *from, float *to) {
    const Scan *s = g->scan;
    const int64_t count = min64(BLOCK_LINES, s->height - line), width = vectors * LANES;
    RowLines row = row_lines(is_delta, by, g, r, line, count);
    float found[BLOCK_LINES] = {0};
    for (int64_t l = 0; is_delta && l < count; l += LINES)
        find_values(vectors, row.decayed, from + l * width, found + l);
    for (int l = 0; l < BLOCK_LINES; l++) row.added[l] = (row.values[l] - found[l]) * row.rates[l];
    for (int64_t l = 0; l < count; l += LINES)
        update_lines(by, vectors, &row, l, from + l * width, to + l * width);
    for (int l = 0; !is_delta && l < BLOCK_LINES; l += LANES)
        store(row.out + l, multiply_add(load(row.values + l), load(row.skips + l), load(row.out + l)));
    memcpy(s->layer->out + (g->order[r] * s->heads + g->head) * s->height + line, row.out, (size_t)count * 4);
}

/* The lines `line`, ... through the rows of a segment.  Each row writes them where its children find them.
 * carried: the lines before the segment, later those after it. */
INLINE void compute_block(const int is_delta, const int by, const int64_t vectors, const Segment *g,
                          int64_t line, float *carried) {
    const int64_t width = vectors * LANES, count = min64(BLOCK_LINES, g->scan->height - line);
    const Forest *forest = g->scan->forest;
    float *before = carried, *saved = 0;
    int64_t saved_slot = 0;
    for (int64_t r = 0; r < g->rows; r++) {
        const int64_t row = g->order[r], is_saved = forest->saves[row];
        float *after = is_saved ? g->saved : carried;
        if (g->kept_as[r] >= 0) after = g->kept + g->kept_as[r] * BLOCK_LINES * width;
        if (g->sources[r] == FROM_SLOT) load_slot(g, row, line, count, before = carried);
        if (g->sources[r] >= 0) before = g->kept + g->sources[r] * BLOCK_LINES * width;
        compute_row(is_delta, by, vectors, g, r, line, before, after);
        before = after;
        if (is_saved) saved = after, saved_slot = forest->slots[row];
        if (forest->copies[row] >= 0) store_slot(g, forest->copies[row], line, count, after);
    }
    if (!g->is_last && before != carried) memcpy(carried, before, (size_t)(count * width) * 4);
    if (saved) store_slot(g, saved_slot, line, count, saved);
}

/* Item i is slice i % slices of head i / slices % heads of group i / slices / heads. */
INLINE void compute_items(const int is_delta, const int by, const int64_t vectors, const Scan *s,
                          int64_t item, int64_t end) {
    Segment g = place_segment(s, scratch_acquire(SCRATCH_STATES, segment_floats(s) * 4));
    const int64_t slices = divide_up(s->height, s->slice);
    for (; item < end; item++) {
        const int64_t group = item / slices / s->heads, last = s->schedule.group_ends[group],
                      first = group ? s->schedule.group_ends[group - 1] : 0;
        const int64_t first_line = item % slices * s->slice,
                      end_line = min64(first_line + s->slice, s->height);
        g.head = item / slices % s->heads;
        for (int64_t at = first; at < last; at += g.rows) {
            g.order = s->schedule.order + at;
            g.sources = s->schedule.sources + at;
            g.kept_as = s->schedule.kept + at;
            g.rows = s->schedule.segment_ends[at] - at;
            g.is_last = at + g.rows == last;
            copy_inputs(is_delta, &g);
            for (int64_t l = first_line; l < end_line; l += BLOCK_LINES)
                compute_block(is_delta, by, vectors, &g, l, g.carried + (l - first_line) * s->width);
        }
    }
    scratch_release(SCRATCH_STATES);
}

/* A constant number of vectors is unrolled. */
INLINE void compute_heads(const int is_delta, const void *loop, int64_t item, int64_t end) {
    const Scan *s = loop;
    if (!is_delta && s->by == BY_LINE && s->width == 16)
        compute_items(is_delta, BY_LINE, 16 / LANES, s, item, end);
    else if (!is_delta && s->by == BY_LINE)
        compute_items(is_delta, BY_LINE, s->width / LANES, s, item, end);
    else if (s->by == BY_DIM && s->width == 128)
        compute_items(is_delta, BY_DIM, 128 / LANES, s, item, end);
    else if (s->by == BY_DIM)
        compute_items(is_delta, BY_DIM, s->width / LANES, s, item, end);
    else if (s->width == 64)
        compute_items(is_delta, BY_HEAD, 64 / LANES, s, item, end);
    else if (s->width == 128)
        compute_items(is_delta, BY_HEAD, 128 / LANES, s, item, end);
    else
        compute_items(is_delta, BY_HEAD, s->width / LANES, s, item, end);
}

static void delta_heads(const void *loop, int64_t item, int64_t end) { compute_heads(1, loop, item, end); }
static void scan_heads(const void *loop, int64_t item, int64_t end) { compute_heads(0, loop, item, end); }

static void compute(const Forest *forest, const Recurrent *layer, LoopBody *heads) {
    const int64_t dim = layer->keys.dim, height = layer->values.dim;
    Scan s = {.forest = forest, .layer = layer, .heads = layer->values.heads, .height = height,
              .width = divide_up(dim, LANES) * LANES, .slice = height,
              .by = layer->decays.dim > 1 ? BY_DIM : BY_HEAD};
    if (heads == scan_heads && height == 1 && layer->keys.heads == 1 && layer->decays.dim == dim) {
        s.by = BY_LINE;
        s.height = s.heads;
        s.heads = 1;
        s.slice = min64(SLICE_LINES, s.height);
    }
    s.schedule = forest_schedule(forest);
    const int64_t slices = divide_up(s.height, s.slice);
    parallel_for(s.schedule.num_groups * s.heads * slices, 1, heads, &s);
    forest_release();
}

void gated_delta(const Forest *forest, const Recurrent *layer) { compute(forest, layer, delta_heads); }
void selective_scan(const Forest *forest, const Recurrent *layer) { compute(forest, layer, scan_heads); }
