/* Verification of draft trees by the rules of outrider/verify, which are the reference.
 *
 * Computed: the accepted path of a tree and the tokens to emit, from the target's logits and, except for
 * exact match, the distributions q that draft tokens were sampled from.
 * Order: that of the reference, node by node.  Logits are only read at nodes that the rule visits.
 * Exact: random streams are functions of (stream, position, node), so nothing depends on other trees. */
#include "distribution.h"
#include "memory.h"
#include "simd.h"

/* An open node of traversal verification: p is its residual distribution, r its acceptance probability,
 * child the one of its children that was visited last. */
typedef struct {
    int64_t node, child;
    double r;
} Open;

/* One tree, and the memory of its verification. */
typedef struct {
    const TreeQuery *query;
    const int32_t *tokens, *parents, *probs_of; /* [nodes] */
    const float *logits;                        /* of the root and of every node, `stride` apart */
    float *block_max;                           /* the same, block_max_stride apart; or null */
    int64_t stride, vocab, block_max_stride;
    int32_t *path, *emitted;
    Distribution *p; /* [depth+1], of the nodes on the way */
    Distribution spare;
    double *remaining; /* [vocab]: q without the siblings before a node */
    Open *open;        /* [depth+1] */
} Tree;

static DistributionParams params_of(const TreeQuery *q) {
    return (DistributionParams){q->temperature, q->min_p, q->top_k, q->top_p};
}

static const float *logits_after(const Tree *t, int64_t node) { return t->logits + (node + 1) * t->stride; }
static float *maxima_after(const Tree *t, int64_t node) {
    return t->block_max ? t->block_max + (node + 1) * t->block_max_stride : 0;
}

/* ---- exact match */

/* The last child of `node` that holds the token, or `node` if there is none.  Parents come first. */
static int64_t matching_child(const Tree *t, int64_t node, int32_t token) {
    int64_t child = t->query->nodes - 1;
    while (child > node && (t->parents[child] != node || t->tokens[child] != token)) child--;
    return child;
}

static int64_t match(Tree *t) {
    const TreeQuery *query = t->query;
    const DistributionParams params = params_of(query);
    int64_t node = -1;
    for (int64_t n = 0;; n++) {
        const uint64_t key = splitmix64(query->stream + query->position + (uint64_t)n);
        if (!pick_with_maxima(logits_after(t, node), t->vocab, &params, key, maxima_after(t, node),
                              t->emitted + n))
            return -1;
        const int64_t child = matching_child(t, node, t->emitted[n]);
        if (child == node) return n + 1;
        t->path[n] = (int32_t)(node = child);
    }
}

/* ---- what the other rules share */

static int target_distribution(const Tree *t, int64_t node, Distribution *p) {
    const DistributionParams params = params_of(t->query);
    return make_distribution(logits_after(t, node), &params, maxima_after(t, node), p);
}

/* The next child of `node` behind `after`, -1 if there is none.  The first call passes the node itself. */
static int64_t next_child(const Tree *t, int64_t node, int64_t after) {
    for (int64_t child = after + 1; child < t->query->nodes; child++)
        if (t->parents[child] == node) return child;
    return -1;
}

/* What `node` was sampled from: unless draws repeat, without its earlier siblings from there. */
static Sampled sampled_from(const Tree *t, int64_t node) {
    const int32_t which = t->probs_of[node];
    if (which < 0) return (Sampled){0, 1, t->tokens[node]};
    Sampled q = {t->query->probs[which], 1, t->tokens[node]};
    if (t->query->repeats) return q;
    for (int64_t i = 0; i < node; i++) {
        if (t->parents[i] != t->parents[node] || t->probs_of[i] != which) continue;
        if (q.probs != t->remaining) memcpy(t->remaining, q.probs, (size_t)t->vocab * 8);
        q.probs = t->remaining;
        t->remaining[t->tokens[i]] = 0;
    }
    if (q.probs == t->remaining) q.total = sum_of(t->remaining, t->vocab);
    if (!(q.total > 0)) q.total = 1;
    return q;
}

/* p(x) / q(x) of a draft token. */
static double ratio(const Distribution *p, Sampled q) {
    const double above = probability(p, q.token);
    return q.probs ? above / (q.probs[q.token] / q.total) : above;
}

/* p becomes [scale p - q]+, unless rounding leaves nothing of it.  Returns the mass of that. */
static double take_away(Tree *t, Distribution *p, Sampled q, double scale) {
    const double mass = subtract(p, q, scale, &t->spare);
    if (mass > 0) {
        const Distribution old = *p;
        *p = t->spare;
        t->spare = old;
    }
    return mass;
}

static double share_left(double mass, double r) { return r < 1 ? mass / (mass + 1 - r) : 1; }

static int accepts(const Tree *t, int64_t node, double probability) {
    return uniform(t->query->stream, ACCEPT_STREAM, t->query->position, node) < probability;
}

static int32_t draw_after(const Tree *t, int64_t node, const Distribution *p) {
    return draw(p, uniform(t->query->stream, EMIT_STREAM, t->query->position, node));
}

/* ---- rejection sampling */

static int64_t rejection(Tree *t) {
    int64_t node = -1;
    for (int64_t n = 0;; n++) {
        if (!target_distribution(t, node, t->p)) return -1;
        int64_t child = node;
        while ((child = next_child(t, node, child)) >= 0) {
            const Sampled q = sampled_from(t, child);
            if (accepts(t, child, ratio(t->p, q))) break;
            take_away(t, t->p, q, 1);
        }
        if (child < 0) {
            t->emitted[n] = draw_after(t, node, t->p);
            return n + 1;
        }
        t->path[n] = (int32_t)(node = child);
        t->emitted[n] = t->tokens[node];
    }
}

/* ---- block verification of the chain from the root; other branches are not judged */

static int64_t block(Tree *t) {
    int64_t length = 0, end = 0; /* end: nodes that may be accepted */
    while (length < t->query->nodes && t->parents[length] == length - 1) length++;
    t->open[0].r = 1; /* of entry i: min(1, the product of p/q of the first i nodes) */
    if (!target_distribution(t, -1, t->p)) return -1;
    for (; end < length; end++) {
        const double r = t->open[end].r * ratio(t->p + end, sampled_from(t, end));
        if (r == 0) break;
        t->open[end + 1].r = r < 1 ? r : 1;
        if (!target_distribution(t, end, t->p + end + 1)) return -1;
    }
    for (; end >= 0; end--) {
        double share = t->open[end].r;
        if (end < length) share = share_left(take_away(t, t->p + end, sampled_from(t, end), share), share);
        if (end == 0 || accepts(t, end - 1, share)) break;
    }
    for (int64_t i = 0; i < end; i++) {
        t->path[i] = (int32_t)i;
        t->emitted[i] = t->tokens[i];
    }
    t->emitted[end] = draw_after(t, end - 1, t->p + end);
    return end + 1;
}

/* ---- traversal verification */

static int64_t traversal(Tree *t) {
    Open *tip = t->open;
    Distribution *p = t->p;
    *tip = (Open){-1, -1, 1};
    if (!target_distribution(t, -1, p)) return -1;
    for (;;) {
        const int64_t child = next_child(t, tip->node, tip->child);
        Sampled q;
        if (child >= 0) {
            q = sampled_from(t, child);
            tip->child = child;
            const double r = tip->r * ratio(p, q);
            if (r != 0) {
                *++tip = (Open){child, child, r < 1 ? r : 1};
                if (!target_distribution(t, child, ++p)) return -1;
                continue;
            }
        } else if (tip == t->open || accepts(t, tip->node, tip->r))
            break;
        else {
            q = sampled_from(t, tip->node);
            tip--;
            p--;
        }
        tip->r = share_left(take_away(t, p, q, tip->r), tip->r); /* the child is taken away */
    }
    const int64_t accepted = tip - t->open;
    for (int64_t i = 0; i < accepted; i++) {
        t->path[i] = (int32_t)t->open[i + 1].node;
        t->emitted[i] = t->tokens[t->path[i]];
    }
    t->emitted[accepted] = draw_after(t, tip->node, p);
    return accepted + 1;
}

/* ---- all trees of a step */

/* Nodes of the longest path. */
static int64_t depth_of(const Tree *t) {
    int64_t deepest = 0;
    for (int64_t i = 0; i < t->query->nodes; i++) {
        int64_t depth = 0;
        for (int64_t node = i; node >= 0; node = t->parents[node]) depth++;
        deepest = depth > deepest ? depth : deepest;
    }
    return deepest;
}

/* Lays the distributions of a tree into the scratch memory of the thread. */
static void place(Tree *t) {
    const int64_t levels = t->query->rule == RULE_REJECTION ? 1 : depth_of(t) + 1;
    const int64_t doubles = distribution_doubles(t->vocab);
    double *at = scratch_acquire(
        SCRATCH_RULES, ((levels + 2) * doubles + 1) * 8 + levels * (int64_t)(sizeof(Open) + sizeof *t->p));
    t->p = (Distribution *)(at + (levels + 2) * doubles);
    t->open = (Open *)(t->p + levels);
    for (int64_t i = 0; i < levels; i++) t->p[i] = place_distribution(at + i * doubles, t->vocab);
    t->spare = place_distribution(at + levels * doubles, t->vocab);
    t->remaining = at + (levels + 1) * doubles;
}

/* Returns how many tokens are emitted, -1 if a row has no finite logit. */
static int64_t verify_tree(Tree *t) {
    if (t->query->rule == RULE_MATCH) return match(t);
    place(t);
    const int64_t emitted = t->query->rule == RULE_REJECTION ? rejection(t)
                            : t->query->rule == RULE_BLOCK   ? block(t)
                                                        : traversal(t);
    scratch_release(SCRATCH_RULES);
    return emitted;
}

void verify_trees(const float *logits, int64_t stride, int64_t vocab, float *block_max,
                  int64_t block_max_stride, const void *queries, int64_t num_queries, int32_t *trees) {
    const TreeQuery *query = queries;
    for (const TreeQuery *q = query; q < query + num_queries; q++) {
        int32_t *tokens = trees + q->at, *path = tokens + 3 * q->nodes, *emitted = path + q->nodes;
        Tree tree = {
            .query = q,
            .tokens = tokens,
            .parents = tokens + q->nodes,
            .probs_of = tokens + 2 * q->nodes,
            .logits = logits + q->root_row * stride,
            .block_max = block_max ? block_max + q->root_row * block_max_stride : 0,
            .stride = stride,
            .vocab = vocab,
            .block_max_stride = block_max_stride,
            .path = path,
            .emitted = emitted,
        };
        emitted[q->nodes + 1] = (int32_t)verify_tree(&tree);
    }
}
