/* Candidates of a dynamic draft tree (heads/trees.py): records depth by depth, and the likeliest of them.
 *
 * Computed: score = log probability given the parent + score of the parent, in float64; the best by a heap
 * of fixed size.
 * Exact: the result is ordered by (score, record), without ties, so that the order of the search does not
 * matter. */
#include "memory.h"
#include "simd.h"

/* Whether record a is dropped before b: the less likely, of equals the later. */
INLINE int is_worse(const double *scores, int32_t a, int32_t b) {
    return scores[a] < scores[b] || (scores[a] == scores[b] && a > b);
}

INLINE void swap(int32_t *a, int32_t *b) {
    const int32_t held = *a;
    *a = *b;
    *b = held;
}

/* Restores a heap of n records, the worst on top, whose entry i may be too good for its place. */
static void sift_down(const double *scores, int32_t *heap, int64_t n, int64_t i) {
    for (int64_t child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && is_worse(scores, heap[child + 1], heap[child])) child++;
        if (!is_worse(scores, heap[child], heap[i])) return;
        swap(heap + i, heap + child);
    }
}

static void make_heap(const double *scores, int32_t *heap, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;) sift_down(scores, heap, n, i);
}

/* The `max_count` likeliest of records first ... end - 1, best first; never those of score minus infinity.
 * Returns how many. */
static int64_t likeliest(const double *scores, int64_t first, int64_t end, int64_t max_count, int32_t *heap) {
    int64_t count = 0;
    for (int64_t i = first; i < end; i++) {
        if (!(scores[i] > -INFINITY)) continue;
        if (count < max_count) {
            heap[count++] = (int32_t)i;
            if (count == max_count) make_heap(scores, heap, count);
        } else if (is_worse(scores, heap[0], (int32_t)i)) {
            heap[0] = (int32_t)i;
            sift_down(scores, heap, count, 0);
        }
    }
    if (count < max_count) make_heap(scores, heap, count);
    for (int64_t left = count; --left > 0;) { /* the worst of what is left goes last */
        swap(heap, heap + left);
        sift_down(scores, heap, left, 0);
    }
    return count;
}

static void add_record(CandidateTree *tree, int32_t parent, int32_t entry, float prob,
                       const int32_t *token_ids) {
    const int64_t at = tree->num_records++;
    const double parent_score = parent < 0 ? 0 : tree->scores[parent];
    tree->tokens[at] = entry < 0 || !token_ids ? entry : token_ids[entry];
    tree->probs[at] = entry < 0 ? 0 : prob;
    tree->scores[at] = entry < 0 ? -INFINITY : log(prob > 1e-30 ? (double)prob : 1e-30) + parent_score;
    tree->parents[at] = parent;
}

int64_t widen(CandidateTree *tree, const int32_t *entries, const float *probs, int64_t k,
              const int32_t *token_ids, const float *probs_by_rank, int32_t *out) {
    const int64_t first = tree->num_records;
    for (int64_t r = 0; r < tree->num_rows; r++)
        for (int64_t i = 0; i < k; i++) {
            const int32_t entry = entries[r * k + i];
            const float prob = entry < 0 ? 0 : probs_by_rank ? probs_by_rank[i] : probs[r * k + i];
            add_record(tree, tree->frontier[r], entry, prob, token_ids);
        }
    tree->num_rows = likeliest(tree->scores, first, tree->num_records, tree->width, tree->order);
    for (int64_t i = 0; i < tree->num_rows; i++) {
        const int32_t at = tree->frontier[i] = tree->order[i];
        out[i] = (int32_t)((at - first) / k);
        out[tree->width + i] = tree->tokens[at];
    }
    return tree->num_rows;
}

int64_t grow(CandidateTree *tree, const float *logits, int64_t vocab, float temperature, double min_p,
             int64_t top_k, double top_p, uint64_t key, const int32_t *token_ids, const float *probs_by_rank,
             int64_t k, int32_t *out) {
    const int64_t rows = tree->num_rows, count = rows * k;
    uint64_t *keys = allocate(rows * 8 + count * 8);
    int32_t *entries = (int32_t *)(keys + rows);
    float *probs = (float *)(entries + count);
    for (int64_t r = 0; r < rows; r++) keys[r] = key;
    picks(logits, rows, vocab, temperature, min_p, top_k, top_p, keys, token_ids, k, entries,
          probs_by_rank ? 0 : probs);
    const int64_t frontier = widen(tree, entries, probs, k, token_ids, probs_by_rank, out);
    release(keys);
    return frontier;
}

/* A node is no likelier than its parent, and parents come first: the parents of all kept records are kept as
 * well. */
int64_t keep(const CandidateTree *tree, int64_t nodes, int32_t *tokens, int32_t *parents, float *probs) {
    const int64_t count = likeliest(tree->scores, 0, tree->num_records, nodes, tree->order);
    int32_t *node_of =
        allocate(tree->num_records * 4); /* 0, later the node, of a kept record; -1 of others */
    memset(node_of, -1, (size_t)tree->num_records * 4);
    for (int64_t i = 0; i < count; i++) node_of[tree->order[i]] = 0;
    for (int64_t at = 0, node = 0; at < tree->num_records; at++) {
        if (node_of[at] < 0) continue;
        tokens[node] = tree->tokens[at];
        parents[node] = tree->parents[at] < 0 ? -1 : node_of[tree->parents[at]];
        probs[node] = tree->probs[at];
        node_of[at] = (int32_t)node++;
    }
    release(node_of);
    return count;
}
