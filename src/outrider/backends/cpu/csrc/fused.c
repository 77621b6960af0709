/* A whole decoder in one call: embedding, layers, head, and the tokens picked from its logits.  A forward
 * sweeps the processor's caches; Python that runs after it costs more than a pick.
 *
 * Both entry points call the kernels in the same order as separate calls would, so their results have the
 * same bits. */
#include "memory.h"
#include "blocks.h"
#include "distribution.h"

double picking;

static double now(void) { return 1e-9 * (double)nanoseconds(); }

static void embed_rows(const ModelEnds *ends, const int64_t *ids, int64_t rows, int64_t hidden, float *x) {
    embed(&ends->embedding, ids, rows, hidden, x);
    if (ends->scale != 1)
        for (int64_t i = 0; i < rows * hidden; i++) x[i] *= ends->scale;
}

/* Logits [rows,outputs] of states [rows,hidden] after the last norm; block_max: as of linear_with_maxima. */
static void read_logits(const ModelEnds *ends, const float *states, int64_t rows, int64_t hidden,
                        float *logits, float *block_max, int64_t blocks) {
    float *maxima = ends->cap > 0 ? 0 : block_max;
    linear_with_maxima(&ends->head, states, rows, hidden, logits, ends->outputs, 0, maxima, blocks);
    if (ends->cap > 0) soft_cap(logits, rows, ends->outputs, ends->cap, block_max, blocks);
}

void read_model(const ModelShape *s, const Layer *layers, const ModelEnds *ends, const Rows *rows,
                const int64_t *ids, char *pool, int64_t plane_bytes, float *const *taps,
                const int64_t *output_rows, int64_t num_outputs, float *logits, const void *queries,
                int64_t num_queries, int32_t *trees) {
    const int64_t hidden = s->hidden, n = rows->num_rows, blocks = row_blocks(ends->outputs);
    float *x = allocate((n * hidden + num_outputs * (hidden + blocks)) * 4), *states = x + n * hidden;
    float *block_max = states + num_outputs * hidden, *final = taps ? taps[s->layers + 1] : 0;
    embed_rows(ends, ids, n, hidden, x);
    stack(s, layers, rows, pool, plane_bytes, x, 0, 0, taps);
    if (final) rms_norm(x, ends->norm, n, hidden, s->eps, final);
    for (int64_t i = 0; i < num_outputs; i++) {
        float *state = states + i * hidden;
        if (final)
            memcpy(state, final + output_rows[i] * hidden, (size_t)hidden * 4);
        else
            rms_norm(x + output_rows[i] * hidden, ends->norm, 1, hidden, s->eps, state);
    }
    float *maxima = num_queries ? block_max : 0;
    if (num_outputs) read_logits(ends, states, num_outputs, hidden, logits, maxima, blocks);
    const double began = now();
    verify_trees(logits, ends->outputs, ends->outputs, maxima, blocks, queries, num_queries, trees);
    picking += now() - began;
    release(x);
}

/* ---- chains of draft tokens */

/* The rows of the chains that go on, one a chain; they close up when a chain ends. */
typedef struct {
    int64_t count, longest;
    int64_t *ids, *positions, *slots, *table_lengths, *path_lengths,
        *chain_of; /* [num_chains]; chain_of: index of the chain */
    const int32_t **tables;
    double *joint; /* [num_chains], by chain: product of the probabilities of its tokens */
    float *x, *normed, *logits, *block_max; /* a row: hidden, hidden, outputs, blocks */
    int64_t blocks;
} ChainRows;

static ChainRows allocate_chain_rows(int64_t num_chains, int64_t hidden, int64_t outputs) {
    const int64_t blocks = row_blocks(outputs), pointer_bytes = (int64_t)sizeof(int32_t *);
    int64_t *ints = allocate(num_chains * (7 * 8 + pointer_bytes + (2 * hidden + outputs + blocks) * 4));
    ChainRows c = {.count = num_chains, .blocks = blocks};
    int64_t **arrays[] = {&c.ids, &c.positions, &c.slots, &c.table_lengths, &c.path_lengths, &c.chain_of};
    for (int i = 0; i < 6; i++) *arrays[i] = ints + i * num_chains;
    c.joint = (double *)(ints + 6 * num_chains);
    c.tables = (const int32_t **)(c.joint + num_chains);
    c.x = (float *)(c.tables + num_chains);
    c.normed = c.x + num_chains * hidden;
    c.logits = c.normed + num_chains * hidden;
    c.block_max = c.logits + num_chains * outputs;
    return c;
}

/* Chain i begins after its row of the first forward, whose states are x [rows,hidden]. */
static void begin_chains(ChainRows *c, const Chain *chains, const Rows *rows, const float *x,
                         int64_t hidden) {
    for (int64_t i = 0; i < c->count; i++) {
        const int64_t row = chains[i].first_row;
        memcpy(c->x + i * hidden, x + row * hidden, (size_t)hidden * 4);
        c->positions[i] = rows->positions[row];
        c->table_lengths[i] = rows->table_lengths[row];
        c->path_lengths[i] = 0;
        c->tables[i] = rows->tables[row];
        c->chain_of[i] = i;
        c->joint[i] = 1;
    }
}

/* Row `to` becomes the row of `token` behind row `from` >= to. */
static void advance_row(ChainRows *c, int64_t from, int64_t to, int32_t token) {
    c->chain_of[to] = c->chain_of[from];
    c->tables[to] = c->tables[from];
    c->ids[to] = token;
    c->positions[to] = c->positions[from] + 1;
    c->slots[to] = c->tables[to][c->table_lengths[from]];
    c->table_lengths[to] = c->table_lengths[from] + 1;
    if (c->table_lengths[to] > c->longest) c->longest = c->table_lengths[to];
}

/* Samples the token at this depth of a chain from its distribution, which is kept.  Returns 0 if no logit is
 * finite. */
static int64_t sample_next(const Chain *chain, const DistributionParams *params, const float *logits,
                           int64_t vocab, float *block_max, int64_t position, int64_t depth, int32_t *token) {
    double *space = scratch_acquire(SCRATCH_RULES, distribution_doubles(vocab) * 8);
    Distribution q = place_distribution(space, vocab);
    const int found = make_distribution(logits, params, block_max, &q);
    if (found) {
        const uint64_t step = (uint64_t)(position - depth);
        *token = draw(&q, uniform(chain->stream, DRAW_STREAM, step, chain->first_node + depth));
        write_probs(&q, chain->probs + depth * chain->width, chain->width);
    }
    scratch_release(SCRATCH_RULES);
    return found;
}

/* Picks the token of row i.  Returns whether the chain goes on behind it.  features: of this token, or null
 * without a rule. */
static int pick_next(const ChainRows *c, int64_t i, const Chain *chain, int64_t depth, int64_t outputs,
                     int64_t vocab, const StopRule *rule, int32_t *token, float *features) {
    const DistributionParams params = {chain->temperature, chain->min_p, chain->top_k, chain->top_p};
    const int64_t position = c->positions[i] + 1;
    const uint64_t key = splitmix64(chain->stream + (uint64_t)position);
    const float *logits = c->logits + i * outputs;
    float *block_max = c->block_max + i * c->blocks;
    const double began = now();
    const int64_t found =
        chain->probs ? sample_next(chain, &params, logits, vocab, block_max, position, depth, token)
                     : pick_with_maxima(logits, vocab, &params, key, block_max, token);
    picking += now() - began;
    if (!found) return 0;
    if (rule && should_stop(rule, logits, vocab, chain->temperature, *token, depth, features)) return 0;
    if (rule && (c->joint[c->chain_of[i]] *= features[0]) < chain->min_joint) return 0;
    if (rule && features[0] < chain->min_prob) return 0;
    return depth + 1 < chain->max_tokens;
}

void chain(const ModelShape *s, const Layer *layers, const ModelEnds *ends, const Rows *rows,
           const int64_t *ids, char *pool, int64_t plane_bytes, const void *given, int64_t num_chains,
           int64_t stride, int64_t vocab, const StopRule *rule, int32_t *out, float *features,
           float *states) {
    const Chain *chains = given;
    const int64_t hidden = s->hidden;
    ChainRows c = allocate_chain_rows(num_chains, hidden, ends->outputs);
    float *x = allocate(rows->num_rows * hidden * 4);
    embed_rows(ends, ids, rows->num_rows, hidden, x);
    stack(s, layers, rows, pool, plane_bytes, x, 0, 0, 0);
    begin_chains(&c, chains, rows, x, hidden);
    release(x);
    memset(out, -1, (size_t)(num_chains * stride) * 4);
    for (int64_t depth = 0;; depth++) {
        int64_t left = 0;
        rms_norm(c.x, ends->norm, c.count, hidden, s->eps, c.normed);
        read_logits(ends, c.normed, c.count, hidden, c.logits, c.block_max, c.blocks);
        c.longest = 0;
        for (int64_t i = 0; i < c.count; i++) {
            const int64_t at = c.chain_of[i] * stride + depth;
            float *of_token = rule ? features + at * NUM_FEATURES : 0;
            if (states) memcpy(states + at * hidden, c.x + i * hidden, (size_t)hidden * 4);
            if (pick_next(&c, i, chains + c.chain_of[i], depth, ends->outputs, vocab, rule, out + at,
                          of_token))
                advance_row(&c, i, left++, out[at]);
        }
        if (!(c.count = left)) break;
        const Rows next = {
            c.count,
            0,
            c.longest,
            rows->pinned,
            c.positions,
            c.slots,
            c.table_lengths,
            c.path_lengths,
            c.tables,
            0,
            0,
            0,
            0,
        };
        embed_rows(ends, c.ids, c.count, hidden, c.x);
        stack(s, layers, &next, pool, plane_bytes, c.x, 0, 0, 0);
    }
    release(c.ids);
}
