/* Picks from rows of logits: a few vector passes, and no sort of the vocabulary.
 *
 * Computed: the k best tokens by logit (temperature 0), or by (logit - max) / temperature + Gumbel noise
 * among those that min_p, top_k and top_p leave.
 * Order: maxima of blocks; the k best of all tokens; whether these lie inside the filters.  Only if that
 * does not decide, the filters are applied to the whole row.
 * Exact: noise depends on (key, token) alone, and the k best of a set do not depend on the order of the
 * search.
 * Sums over a row are taken part by part.  backends/torch/sampling.py is the reference. */
#include "best.h"
#include "filter.h"

enum { EXTRA_PICKS = 16 };

/* A part is summed against its own maximum while it is cached. */
static void masses_of_parts(const void *loop, int64_t first, int64_t end) {
    const PartLoop *l = loop;
    const Row *row = l->row;
    for (int64_t p = first; p < end; p++) {
        const float part_max = part_maxima(row, p * PART, l->block_max),
                    against = part_max > -INFINITY ? part_max : 0;
        vfloat sum = {0};
        for (int64_t b = p * PART; b < min64((p + 1) * PART, row->blocks); b++)
            for (int64_t j = 0; j < BLOCK; j += LANES) sum += vexp_fast(load(block_at(row, b) + j) - against);
        l->parts[p] = (PartResult){part_max, sum_lanes(sum)};
    }
}

/* `row_maxima` that also writes the sum of exp(logit - max) over the row to *mass. */
static float row_mass(const Row *row, float *block_max, PartResult *parts, double *mass) {
    const int64_t count = parts_of(row);
    parallel_for(count, THREAD_PARTS, masses_of_parts, &(PartLoop){row, block_max, parts});
    const float max = max_of_parts(parts, count);
    *mass = 0;
    for (int64_t p = 0; p < count; p++) *mass += parts[p].mass * exp((double)parts[p].max - max);
    return max;
}

/* ---- is a token inside the filters? */

/* Sums over the logits of a row, counted below the maximum: the mass from `least` on, the mass above x, and
 * how many are above x. */
typedef struct {
    double all, above;
    int64_t count;
} Mass;

INLINE Mass part_mass(const Row *row, int64_t first, int64_t end, float least, float x,
                      const int with_above) {
    vfloat all = {0}, above = {0};
    vint count = {0};
    for (int64_t b = first; b < end; b++) {
        const float *logits = block_at(row, b);
        for (int64_t j = 0; j < BLOCK; j += LANES) {
            const vfloat below = below_max_lanes(row, load(logits + j)), mass = vexp_fast(below);
            all += (vfloat)((vint)mass & (below >= least));
            if (!with_above) continue;
            above += (vfloat)((vint)mass & (below > x));
            count -= below > x;
        }
    }
    Mass sum = {sum_lanes(all), sum_lanes(above), 0};
    for (int i = 0; i < LANES; i++) sum.count += count[i];
    return sum;
}

/* A row that is picked from, and the memory for it. */
typedef struct {
    Row row;
    const DistributionParams *params;
    Scoring scoring;
    int top_k, top_p, any_filter; /* which filters are in force */
    float *block_max;             /* [row_blocks(vocab)] */
    PartResult *part_results;     /* [parts_of(row)] */
    Mass *part_masses;            /* [parts_of(row)] */
    Candidates candidates;        /* all tokens; arrays of blocks * BLOCK */
} PickRow;

typedef struct {
    const PickRow *pick;
    float least, x;
} MassLoop;

static void masses_above(const void *loop, int64_t first_part, int64_t end_part) {
    const MassLoop *l = loop;
    const Row *row = &l->pick->row;
    for (int64_t i = first_part; i < end_part; i++) {
        const int64_t first = i * PART, end = min64(first + PART, row->blocks);
        l->pick->part_masses[i] = l->x < INFINITY ? part_mass(row, first, end, l->least, l->x, 1)
                                                  : part_mass(row, first, end, l->least, l->x, 0);
    }
}

static Mass mass_above(const PickRow *p, float least, float x) {
    const int64_t parts = parts_of(&p->row);
    Mass sum = {0};
    parallel_for(parts, THREAD_PARTS, masses_above, &(MassLoop){p, least, x});
    for (int64_t i = 0; i < parts; i++) {
        sum.all += p->part_masses[i].all;
        sum.above += p->part_masses[i].above;
        sum.count += p->part_masses[i].count;
    }
    return sum;
}

/* Whether the filters surely leave the token that lies x below the maximum; 0 if one pass does not tell.
 * Filters leave everything from some logit on.  So a token is inside unless those above it are too many
 * already. */
static int is_inside(const PickRow *p, float x) {
    const DistributionParams *params = p->params;
    const float least = params->min_p > 0 ? (float)log(params->min_p) : FORBIDDEN;
    if (x == 0) return 1;
    if (x < least) return 0;
    if (!p->top_k && !p->top_p) return 1;
    const Mass mass = mass_above(p, least, x);
    if (p->top_k && mass.count >= params->top_k) return 0;
    if (!p->top_p) return 1;
    const double all = p->top_k ? mass.above + exp(x) : mass.all; /* with top_k: at least that much */
    return mass.above * (1 + 1e-4) < params->top_p * all;         /* vexp_fast needs the margin */
}

/* Reduces the tokens found to the k best inside the filters; 0 if there are fewer.  Only for filters that
 * is_inside decides. */
static int keep_inside(const PickRow *p, Best *found, int64_t k) {
    float inside = INFINITY, outside = -INFINITY; /* the lowest known inside, the highest known outside */
    int64_t n = 0;
    for (int64_t i = 0; i < found->count && n < k; i++) {
        const float x = below_max(&p->row, p->row.logits[found->token[i]]);
        if (x <= outside) continue;
        if (x < inside && !is_inside(p, x)) {
            outside = x;
            continue;
        }
        if (x < inside) inside = x;
        found->token[n++] = found->token[i];
    }
    found->count = n;
    return n == k;
}

/* ---- one pick */

/* The k best of all tokens are the k best inside the filters if they are inside.  Returns 0 if that is not
 * certain. */
static int pick_quickly(const PickRow *p, int64_t k, Best *found) {
    clear_best(found, k);
    choose(&p->row, p->block_max, &p->scoring, found);
    if (!p->any_filter) return 1;
    float lowest = INFINITY;
    for (int64_t i = 0; i < found->count; i++) {
        const float x = below_max(&p->row, p->row.logits[found->token[i]]);
        lowest = x < lowest ? x : lowest;
    }
    if (is_inside(p, lowest)) return 1;
    if ((p->top_k && p->top_p) || k + EXTRA_PICKS > MAX_PICKS) return 0;
    clear_best(found, k + EXTRA_PICKS);
    choose(&p->row, p->block_max, &p->scoring, found);
    return keep_inside(p, found, k);
}

/* The k best of what the filters leave of the whole row; *mass as in apply_filters. */
static void pick_filtered(const PickRow *p, int64_t k, int want_mass, double *mass, Best *found) {
    const Row *row = &p->row;
    Candidates t = p->candidates;
    for (int64_t b = 0; b < row->blocks; b++)
        for (int64_t j = 0; j < BLOCK; j++) t.logit[b * BLOCK + j] = below_max(row, block_at(row, b)[j]);
    for (int64_t i = 0; i < row->vocab; i++) t.token[i] = (int32_t)i;
    t = apply_filters(t, row->blocks * BLOCK, p->params, want_mass, mass);
    clear_best(found, k);
    for (int64_t i = 0; i < t.count; i += BLOCK) {
        const LogitBlock block = {t.logit + i, min64(t.count - i, BLOCK), t.token + i, 0};
        consider(block, &p->scoring, -INFINITY, found);
    }
}

/* One call of `pick`. */
typedef struct {
    const float *logits;
    int64_t vocab;
    const DistributionParams *params;
    uint64_t key;
    const int32_t *token_ids; /* or null, see Scoring */
    int64_t k;
    float *block_max; /* known block maxima, or null */
} PickCall;

/* Lays the arrays of a pick into the scratch memory of the thread. */
static PickRow make_pick_row(const PickCall *c) {
    const DistributionParams *params = c->params;
    const int noisy = params->temperature != 0;
    PickRow p = {
        .row = make_row(c->logits, c->vocab, params->temperature),
        .params = params,
        .scoring = {c->token_ids, c->key, noisy},
        .top_k = noisy && params->top_k > 0 && params->top_k < c->vocab,
        .top_p = noisy && params->top_p < 1,
    };
    p.any_filter = p.top_k || p.top_p || (noisy && params->min_p > 0);
    const int64_t parts = parts_of(&p.row), padded = p.row.blocks * BLOCK, blocks = row_blocks(c->vocab);
    const int64_t part_bytes = (int64_t)(sizeof(Mass) + sizeof(PartResult));
    p.part_masses = scratch_acquire(SCRATCH_SAMPLER, parts * part_bytes + (3 * padded + blocks) * 4);
    p.part_results = (PartResult *)(p.part_masses + parts);
    float *floats = (float *)(p.part_results + parts);
    p.candidates = (Candidates){floats, floats + padded, (int32_t *)(floats + 2 * padded), c->vocab};
    p.block_max = c->block_max ? c->block_max : floats + 3 * padded;
    return p;
}

/* out [k] and prob [k] or null; returns how many there are, see `pick` in kernels.h. */
static int64_t run_pick(const PickCall *c, int32_t *out, float *prob) {
    PickRow p = make_pick_row(c);
    Row *row = &p.row;
    Best found;
    clear_best(&found, c->k);
    double mass = -1; /* of all tokens that the filters leave */
    if (c->block_max)
        row->max = known_maxima(row, p.block_max);
    else if (p.scoring.noisy || !prob)
        row->max = row_maxima(row, p.block_max, p.part_results);
    else
        row->max = row_mass(row, p.block_max, p.part_results, &mass);
    if (isfinite(row->max)) {
        int done = 0;
        if (!p.any_filter || !prob) {
            done = pick_quickly(&p, c->k, &found);
            if (prob && p.scoring.noisy) mass = mass_above(&p, FORBIDDEN, INFINITY).all;
        }
        if (!done) pick_filtered(&p, c->k, prob != 0, &mass, &found);
    }
    for (int64_t i = 0; i < found.count; i++) {
        out[i] = found.token[i];
        if (prob) prob[i] = (float)(vexp(broadcast(below_max(row, c->logits[out[i]])))[0] / mass);
    }
    scratch_release(SCRATCH_SAMPLER);
    return found.count;
}

int64_t pick(const float *logits, int64_t vocab, float temperature, double min_p, int64_t top_k, double top_p,
             uint64_t key, int64_t k, int32_t *out, float *prob) {
    const DistributionParams params = {temperature, min_p, top_k, top_p};
    return run_pick(&(PickCall){logits, vocab, &params, key, 0, k, 0}, out, prob);
}

int64_t pick_with_maxima(const float *logits, int64_t vocab, const DistributionParams *params, uint64_t key,
                         float *block_max, int32_t *out) {
    return run_pick(&(PickCall){logits, vocab, params, key, 0, 1, block_max}, out, 0);
}

/* ---- many picks */

typedef struct {
    PickCall first; /* of row 0 */
    const uint64_t *keys;
    int32_t *out;
    float *prob;
} Picks;

static void pick_rows(const void *loop, int64_t first, int64_t end) {
    const Picks *p = loop;
    const int64_t k = p->first.k;
    for (int64_t r = first; r < end; r++) {
        int32_t *out = p->out + r * k;
        float *prob = p->prob ? p->prob + r * k : 0;
        PickCall call = p->first;
        call.logits += r * call.vocab;
        call.key = p->keys[r];
        for (int64_t i = run_pick(&call, out, prob); i < k; i++) {
            out[i] = -1;
            if (prob) prob[i] = 0;
        }
    }
}

void picks(const float *logits, int64_t rows, int64_t vocab, float temperature, double min_p, int64_t top_k,
           double top_p, const uint64_t *keys, const int32_t *token_ids, int64_t k, int32_t *out,
           float *prob) {
    const DistributionParams params = {temperature, min_p, top_k, top_p};
    const PickCall first = {logits, vocab, &params, 0, token_ids, k, 0};
    parallel_for(rows, 1, pick_rows, &(Picks){first, keys, out, prob}); /* one row is shared by itself */
}
