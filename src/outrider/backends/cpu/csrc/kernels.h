/* Entry points of the CPU kernels, and the structs that they take.  bindings.py reads them here: it knows
 * the types below, pointers, and the form in which structs and functions are declared.
 *
 * Row invariance.  The result of a row is a fixed sequence of operations on that row's own data.  The number
 * of rows in a call, the KV slots of a request and the number of threads change the order in which rows are
 * visited.  They never change the order of the sums inside a row.  Verification by a draft tree therefore
 * reproduces plain decoding bit for bit.
 *
 * Conventions
 *   [rows,inputs]   dense row-major array; float32 unless a type is given
 *   or null         the argument may be 0
 *   sizes           int64_t
 *   memory          belongs to the caller, scratch memory to memory.c; nothing is kept between calls
 *   threads         share the loops of a call (threads.c); calls may come from several threads at once
 */
#pragma once
#include <stdint.h>

/* The most threads that a call uses, 1 before this is called. */
void set_threads(int64_t count);

/* ---- weights: linear.c, linear_int.c */

enum { FLOAT32, BFLOAT16, INT8, INT4 }; /* element type of a weight; the first three also of a KV pool */

/* A linear layer [outputs,inputs], packed for the kernels.
 *   float32    [outputs/64][inputs][64]
 *   bfloat16   [outputs/64][inputs/2][64][2]
 *   int8, int4 see linear_int.c
 * Outputs and, for bfloat16, inputs are padded with zeros. */
typedef struct {
    const void *data;
    const float *bias; /* [outputs] or null */
    int kind;          /* FLOAT32, BFLOAT16, INT8 or INT4 */
    int group;         /* integers: inputs that share a scale, 16 or 32 */
    int has_offsets;   /* integers: every group also has an offset */
    float unit;        /* integers: factor of all scales and offsets, a power of two */
    int rounds_inputs; /* bfloat16: the inputs are rounded to bfloat16 as well, see linear.c */
    const int8_t *levels; /* int4: [16] what the values count, or null: value - 8 */
} Weight;

/* y [rows,outputs] = x [rows,inputs] * weight^T + bias, plus the former y if `add`. */
void linear(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y, int64_t outputs,
            int add);

/* `linear` that also writes the maximum of every 64 outputs of a row to block_max [rows,block_max_stride],
 * unless that is null. */
void linear_with_maxima(const Weight *weight, const float *x, int64_t rows, int64_t inputs, float *y,
                        int64_t outputs, int add, float *block_max, int64_t block_max_stride);

/* y [rows,inputs] = the rows `ids` [rows] of the weight, widened to float. */
void embed(const Weight *weight, const int64_t *ids, int64_t rows, int64_t inputs, float *y);

/* Whether the processor has instructions for products of bfloat16 pairs, as `rounds_inputs` takes them. */
int has_bfloat16_products(void);

/* Whether these are AMX tiles, which take products in another order: tiles.h instead of pairs.h. */
int has_bfloat16_tiles(void);

/* Whether these are those of NEON's bfdot, which rounds in another way than others (pairs.h). */
int has_bfdot(void);

/* ---- small kernels: elementwise.c */

/* y = x / sqrt(mean(x^2) + eps) * weight [width] for x and y [rows,width]; y may be x. */
void rms_norm(const float *x, const float *weight, int64_t rows, int64_t width, float eps, float *y);

/* x [rows,width] += norm(y) for y [rows,width], which is overwritten. */
void add_normed(float *x, float *y, const float *weight, int64_t rows, int64_t width, float eps);

/* y [rows,width] = silu(gate) * up for x [rows,2*width] = [gate | up]; gelu_mul: gelu, its approximation by
 * tanh. */
void silu_mul(const float *x, int64_t rows, int64_t width, float *y);
void gelu_mul(const float *x, int64_t rows, int64_t width, float *y);

/* y [rows,width] = g * sigmoid(slope * g) * (u + 1) for x [rows,2*width] = [gate | up], where g is the gate
 * of at most `limit`, and u is up between -limit and limit. */
void clamped_mul(const float *x, int64_t rows, int64_t width, float slope, float limit, float *y);

/* x [rows,width] = cap * tanh(x / cap), and the maximum of every 64 of a row to block_max
 * [rows,block_max_stride], unless that is null. */
void soft_cap(float *x, int64_t rows, int64_t width, float cap, float *block_max, int64_t block_max_stride);

/* y [rows,inputs+width] = [norm(embedding of ids) | norm(states)] for states [rows,width]; a norm that is
 * null is left out. */
void pair(const Weight *embedding, const int64_t *ids, int64_t rows, int64_t inputs, const float *states,
          int64_t width, const float *norm_token, const float *norm_state, float eps, float *y);

/* ---- attention: attention.c, attention_scores.c, attention_values.c */

/* The rows of one forward.  Row r sees the first table_lengths[r] slots of its request's table and then
 * path_lengths[r] slots of its path.  These are the keys of positions 0, 1, 2 ... in this order, wherever
 * their slots are in the pool.
 * In a view, a table that leaves some tokens out, the keys after the first `pinned` have a later position
 * than index. */
typedef struct {
    int64_t num_rows, path_width, longest, pinned; /* longest: the most keys that a row sees */
    const int64_t *positions;                      /* [num_rows] */
    const int64_t *slots;                          /* [num_rows]: where a row's own K/V is written */
    const int64_t *table_lengths, *path_lengths;   /* [num_rows] */
    const int32_t *const *tables;                  /* [num_rows] block tables, one slot a token */
    const int32_t *paths;                          /* [num_rows,path_width] */
    int64_t num_lora_runs;
    const void *lora_runs;                         /* LoraRun [num_lora_runs], see lora.c */
    const void *recurrent;                         /* RecurrentRows of recurrent.h, or null */
} Rows;

/* One attention layer and its part of the KV pool.  A pool row is a head of padded_dim elements, zero behind
 * head_dim; an int8 row is followed by the float that one step of it counts. */
typedef struct {
    void *keys, *values;                           /* [kv_heads][slots][pool row] */
    int64_t head_bytes;                            /* distance between two heads of the pool */
    int64_t heads, kv_heads, head_dim, padded_dim; /* padded_dim: head_dim rounded up to 32 */
    int64_t rotary_dim;                            /* leading dimensions of a head that are rotated */
    int64_t window;                                /* > 0 sliding window, < 0 chunks of -window, 0 all keys */
    const float *q_norm, *k_norm;                  /* [head_dim] or null */
    const float *rotary;                           /* [positions,rotary_dim]: cosines, then sines */
    float eps, scale;
    int kind;          /* element type of the pool: FLOAT32, BFLOAT16 or INT8 */
    int rounds_inputs; /* bfloat16: queries and weights are rounded to bfloat16 as well */
} Attention;

/* Changes of the scores before the softmax; by query head, null and 0 mean none. */
typedef struct {
    const float *slopes; /* ALiBi */
    const float *sinks;  /* score of an extra key without a value */
    float cap;           /* soft cap: cap * tanh(score / cap) */
} ScoreModifier;

/* Splits qkv [rows,(heads+2*kv_heads)*head_dim], normalizes and rotates q and k, and writes k and v to the
 * slots of the rows.
 * q: [rows,heads,padded_dim], zero behind head_dim. */
void rope_store(const Attention *attention, const Rows *rows, const float *qkv, float *q);

/* out [rows,heads,head_dim] = softmax(q k^T * scale) v for q [rows,heads,padded_dim]; modifier or null. */
void attend(const Attention *attention, const Rows *rows, const float *q, const ScoreModifier *modifier,
            float *out);

/* ---- whole decoders: decoder.c, delta.c, experts.c, fused.c */

enum { SKIP_ATTENTION = 1, SKIP_MLP = 2 };

/* The MLP of one expert: gate_up [2*expert_inner,hidden], down [hidden,expert_inner]. */
typedef struct {
    Weight gate_up, down;
} Expert;

typedef struct {
    Weight qkv, o, gate_up, down, router;
    Weight query_gate, shared_gate; /* [heads*head_dim,hidden], [1,hidden]; without data: none */
    const void *delta;     /* LayerDelta of recurrent.h in place of attention, which has `o` then, or null */
    int64_t place;         /* number of the layer among those with attention, or with a delta rule */
    const Expert *experts; /* [experts] or null: chosen by router [experts,hidden], in place of an MLP */
    const float *norm_in, *norm_post, *q_norm, *k_norm; /* the last two may be null */
    const float *norm_attended, *norm_mlp; /* of what attention and MLP add to x, or null */
    const float *rotary;                   /* of this layer alone, or null */
    const float *sinks;                    /* [heads], as in ScoreModifier, or null */
    int64_t window, skip; /* as in Attention; SKIP_ATTENTION, SKIP_MLP, both or 0 */
} Layer;

typedef struct {
    int64_t layers, hidden, inner, heads, kv_heads, head_dim, padded_dim, rotary_dim;
    int64_t kv_kind; /* element type of the KV pool */
    int64_t rounds_inputs; /* of attention, see Attention */
    /* of a layer with experts; chosen_experts: of a row; shared_inner: of a shared expert, or 0 */
    int64_t experts, chosen_experts, expert_inner, shared_inner;
    int64_t normalizes_experts; /* the weights of a row's experts are divided by their sum */
    int64_t is_gelu;       /* the MLP's gate goes through gelu_mul, not silu_mul */
    float eps, scale, cap; /* cap: soft cap of attention scores, or 0 */
    float gate_slope, gate_limit; /* experts: those of clamped_mul; limit 0: silu_mul */
    const float *rotary;
} ModelShape;

typedef struct {
    Weight embedding, head;
    const float *norm;
    int64_t outputs;
    float scale, cap; /* factor of the embeddings; soft cap of the logits, or 0 */
} ModelEnds;

/* Runs the decoder layers over x [rows,hidden], in place.
 * pool, plane_bytes: K of the layer with place i is plane 2i of the pool, V plane 2i+1.
 * first_input [rows,first_width] or null: replaces norm(x) as the input of the first layer's attention, or of
 * its MLP if the attention is skipped; it may be x.
 * taps [layers+1] or null: where to copy the input of each layer and the output of the last, each
 * [rows,hidden] or null. */
void stack(const ModelShape *shape, const Layer *layers, const Rows *rows, char *pool, int64_t plane_bytes,
           float *x, const float *first_input, int64_t first_width, float *const *taps);

/* Rules of outrider/verify. */
enum { RULE_MATCH, RULE_REJECTION, RULE_BLOCK, RULE_TRAVERSAL };

/* One draft tree for `verify_trees`.  From trees[at] on lie: tokens [nodes], parents [nodes] (-1: the root),
 * index in probs of what each was sampled from [nodes] (-1: chosen), then space for the accepted nodes
 * [nodes], the emitted tokens [nodes+1] and how many those are. */
typedef struct {
    int64_t at, root_row, nodes, top_k; /* root_row: row of the root's logits, the nodes' rows follow it */
    int64_t rule, repeats;              /* repeats: siblings are independent draws */
    double min_p, top_p;
    uint64_t stream, position; /* random stream; position of the token after the root */
    const double *const *probs; /* distributions [vocab] that draft tokens were sampled from */
    float temperature;
} TreeQuery;

/* One forward.
 *   ids [rows->num_rows]; taps as in `stack`, and one more for the states of all rows after the last norm
 *   logits [num_outputs,outputs] of the rows output_rows [num_outputs]
 *   TreeQuery queries [num_queries], trees: as in `verify_trees`, on these logits */
void read_model(const ModelShape *shape, const Layer *layers, const ModelEnds *ends, const Rows *rows,
                const int64_t *ids, char *pool, int64_t plane_bytes, float *const *taps,
                const int64_t *output_rows, int64_t num_outputs, float *logits, const void *queries,
                int64_t num_queries, int32_t *trees);

/* A chain of draft tokens that begins after row first_row. */
typedef struct {
    int64_t first_row, max_tokens, top_k;
    /* the chain ends at a token that is less likely than min_prob, or, with all before, than min_joint */
    double min_p, top_p, min_joint;
    uint64_t stream;
    double *probs; /* [max_tokens,width] or null: tokens are sampled, and what from is written here */
    int64_t width;
    uint64_t first_node; /* number of the random stream of the first token */
    float temperature, min_prob;
} Chain;

/* When a chain of draft tokens ends early; see stop.c. */
typedef struct {
    double min_prob, max_entropy;
    const float *net; /* or null */
    int64_t hidden;
} StopRule;

/* Drafts a chain of tokens behind each of num_chains rows: `stack` over the rows, a pick from the first
 * `vocab` logits, one more row for each chain that goes on, and so on.
 *   Chain chains [num_chains]; out [num_chains,stride]: draft tokens, -1 from the end of a chain on
 *   rule or null; features [num_chains,stride,NUM_FEATURES]: see should_stop, only with a rule
 *   states [num_chains,stride,hidden] or null: the state that each token was picked from */
void chain(const ModelShape *shape, const Layer *layers, const ModelEnds *ends, const Rows *rows,
           const int64_t *ids, char *pool, int64_t plane_bytes, const void *chains, int64_t num_chains,
           int64_t stride, int64_t vocab, const StopRule *rule, int32_t *out, float *features, float *states);

/* Seconds spent in picks by read_model and chain; not synchronized, for measurements with one caller. */
extern double picking;

/* ---- sampling: sample.c, stop.c */

enum { MAX_PICKS = 64 };

typedef struct {
    float temperature;
    double min_p;
    int64_t top_k;
    double top_p;
} DistributionParams;

/* The k <= MAX_PICKS best tokens of logits [vocab] into out [k], and their probabilities into prob [k]
 * or null.
 * Temperature 0 ranks by logit.  Otherwise the rank is log p + Gumbel noise(key, token), with p after min_p,
 * top_k and top_p.
 * Returns how many were found: fewer if the filters leave fewer, 0 if no logit is finite. */
int64_t pick(const float *logits, int64_t vocab, float temperature, double min_p, int64_t top_k, double top_p,
             uint64_t key, int64_t k, int32_t *out, float *prob);

/* `pick` for logits [rows,vocab], keys [rows], out and prob [rows,k]; missing picks are -1 with
 * probability 0.
 * token_ids [vocab] or null: the token of each logit, which selects its noise. */
void picks(const float *logits, int64_t rows, int64_t vocab, float temperature, double min_p, int64_t top_k,
           double top_p, const uint64_t *keys, const int32_t *token_ids, int64_t k, int32_t *out,
           float *prob);

/* One pick with known block maxima, as linear_with_maxima leaves them; block_max has space for
 * row_blocks(vocab) floats. */
int64_t pick_with_maxima(const float *logits, int64_t vocab, const DistributionParams *params, uint64_t key,
                         float *block_max, int32_t *out);

/* ---- sampling distributions: distribution.c; verification: rules.c */

/* The distribution that a token is sampled from, into out [vocab].  Returns 0 if no logit is finite. */
int64_t probabilities(const float *logits, int64_t vocab, float temperature, double min_p, int64_t top_k,
                      double top_p, double *out);

/* Samples `count` siblings from probs [vocab], with the random streams of the nodes first_node, ...
 * Without replacement unless `repeats`.  Returns how many there are: fewer if the tokens run out. */
int64_t sample_children(const double *probs, int64_t vocab, uint64_t stream, uint64_t step,
                        int64_t first_node, int64_t count, int repeats, int32_t *out);

/* Verifies the draft trees of TreeQuery queries [num_queries].
 *   logits: rows of `stride` floats, of which `vocab` count; block_max: rows of `block_max_stride` floats,
 *     or null
 *   trees: see TreeQuery; the count of emitted tokens is -1 if a row has no finite logit */
void verify_trees(const float *logits, int64_t stride, int64_t vocab, float *block_max,
                  int64_t block_max_stride, const void *queries, int64_t num_queries, int32_t *trees);

enum { NUM_TOP = 4, NUM_FEATURES = NUM_TOP + 2 };

/* Whether a chain ends behind `token` at this depth.  features [NUM_FEATURES]: the token's probability, the
 * entropy of the distribution before any filter, its NUM_TOP largest probabilities. */
int should_stop(const StopRule *rule, const float *logits, int64_t vocab, float temperature, int32_t token,
                int64_t depth, float *features);

/* ---- LoRA: lora.c */

enum { LORA_Q, LORA_K, LORA_V, LORA_O, LORA_GATE, LORA_UP, LORA_DOWN, LORA_PARTS };

/* A low-rank update of the outputs [start,start+outputs) of a linear; rank 0 is none. */
typedef struct {
    const float *a; /* [rank][inputs rounded up to 16] */
    const float *b; /* [outputs/64][rank][64] */
    int64_t rank, start, outputs;
    float scale;
} LoraPart;

/* Consecutive rows that use one adapter; parts [layers][LORA_PARTS]. */
typedef struct {
    int64_t first_row, num_rows;
    const LoraPart *parts;
} LoraRun;

/* y [rows,outputs] += scale * b (a x) for the parts [first_part,first_part+num_parts) of every run, x
 * [rows,inputs]. */
void add_lora(const LoraRun *runs, int64_t num_runs, int64_t first_part, int64_t num_parts, const float *x,
              int64_t inputs, float *y, int64_t outputs);

/* ---- candidates of a dynamic draft tree: tree.c.  All candidates are records, depth by depth. */
typedef struct {
    int64_t width, num_records, num_rows; /* num_rows: nodes that went through the head last */
    double *scores;                       /* log of the joint probability of a record */
    float *probs;                         /* probability given the parent */
    int32_t *tokens;                      /* -1: none */
    int32_t *parents;                     /* record of the parent, -1: the root */
    int32_t *frontier;                    /* [width]: the records of those num_rows nodes */
    int32_t *order;                       /* space for an index a record */
} CandidateTree;

/* Adds k records behind every frontier node and makes the best `width` of the new ones the frontier.
 *   entries, probs [num_rows,k]: candidates (-1: none) and their probabilities
 *   token_ids or null: the token of each entry; probs_by_rank [k] or null: replaces probs
 *   out [2,width]: for each new frontier node the row of the last forward it follows, and its token
 * Returns the size of the new frontier. */
int64_t widen(CandidateTree *tree, const int32_t *entries, const float *probs, int64_t k,
              const int32_t *token_ids, const float *probs_by_rank, int32_t *out);

/* `widen` by the k best picks from logits [num_rows,vocab], with one key for all rows. */
int64_t grow(CandidateTree *tree, const float *logits, int64_t vocab, float temperature, double min_p,
             int64_t top_k, double top_p, uint64_t key, const int32_t *token_ids, const float *probs_by_rank,
             int64_t k, int32_t *out);

/* The likeliest `nodes` records, parents first: their tokens, the nodes of their parents (-1: the root) and
 * their probabilities, each [nodes].  Returns how many there are. */
int64_t keep(const CandidateTree *tree, int64_t nodes, int32_t *tokens, int32_t *parents, float *probs);
