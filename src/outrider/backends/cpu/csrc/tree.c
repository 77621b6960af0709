/* A dynamic tree while it grows (see heads/dynamic.py): all candidates as records, level by level, and the likeliest of them. */
#include "simd.h"

/* tree.py mirrors the struct.  A record: its token (-1: none), its share of its parent's law, its score (log of the joint
 * probability), and the record of its parent, -1 behind the root. */
typedef struct {
    long wide, records, rows;                                 /* rows: nodes that went through the head last, of which `front` says the records */
    double *scores;
    float *shares;
    int32_t *tokens, *above, *front, *order;                  /* order: room for a number a record */
} Tree;

/* Whether record a goes before b is kept: the less likely, of equals the later. */
INLINE int worse(const double *s, int32_t a, int32_t b) { return s[a] < s[b] || (s[a] == s[b] && a > b); }

static void sink(const double *s, int32_t *heap, long n, long i) {          /* the worst lies on top */
    for (long j; (j = 2 * i + 1) < n; i = j) {
        if (j + 1 < n && worse(s, heap[j + 1], heap[j])) j++;
        if (!worse(s, heap[j], heap[i])) return;
        const int32_t held = heap[i];
        heap[i] = heap[j]; heap[j] = held;
    }
}

/* The `most` likeliest of records first … n - 1, best first, of equals the earlier; those of score -inf never.  How many. */
static long likeliest(const double *s, long first, long n, long most, int32_t *heap) {
    long count = 0;
    for (long i = first; i < n; i++) {
        if (!(s[i] > -INFINITY)) continue;
        if (count < most) {
            heap[count++] = (int32_t)i;
            if (count == most) for (long j = most / 2; j-- > 0; ) sink(s, heap, most, j);
        } else if (worse(s, heap[0], (int32_t)i)) {
            heap[0] = (int32_t)i;
            sink(s, heap, most, 0);
        }
    }
    if (count < most) for (long j = count / 2; j-- > 0; ) sink(s, heap, count, j);
    for (long left = count; --left > 0; ) {                   /* the worst of what is left goes last */
        const int32_t held = heap[0];
        heap[0] = heap[left]; heap[left] = held;
        sink(s, heap, left, 0);
    }
    return count;
}

/* The k candidates behind every node that went through the head last, [rows,k] entries and shares, become records; the likeliest go on.
 * ids, unless 0: the token of each entry.  ranked, unless 0: shares by rank.  out [2,wide]: which row of the last forward each of those
 * that go on hangs from, and its token.  Returns how many do. */
long widen(Tree *t, const int32_t *entries, const float *shares, long k, const int32_t *ids, const float *ranked, int32_t *out) {
    const long first = t->records;
    for (long r = 0; r < t->rows; r++) {
        const int32_t parent = t->front[r];
        const double joint = parent < 0 ? 0 : t->scores[parent];
        for (long i = 0; i < k; i++) {
            const int32_t entry = entries[r * k + i];
            const long at = t->records++;
            const float share = entry < 0 ? 0 : ranked ? ranked[i] : shares[r * k + i];
            t->tokens[at] = entry < 0 || !ids ? entry : ids[entry];
            t->shares[at] = share;
            t->scores[at] = entry < 0 ? -INFINITY : log(share > 1e-30 ? (double)share : 1e-30) + joint;
            t->above[at] = parent;
        }
    }
    t->rows = likeliest(t->scores, first, t->records, t->wide, t->order);
    for (long i = 0; i < t->rows; i++) {
        const int32_t at = t->front[i] = t->order[i];
        out[i] = (int32_t)((at - first) / k);
        out[t->wide + i] = t->tokens[at];
    }
    return t->rows;
}

/* `widen` of the k best picks behind every such node, logits[rows,V] with one key for all: they are equally deep. */
long grow(Tree *t, const float *logits, long V, float temperature, double min_p, long top_k, double top_p, uint64_t key,
          const int32_t *ids, const float *ranked, long k, int32_t *out) {
    int32_t entries[t->rows * k];
    float shares[t->rows * k];
    uint64_t keys[t->rows];
    for (long r = 0; r < t->rows; r++) keys[r] = key;
    picks(logits, t->rows, V, temperature, min_p, top_k, top_p, keys, ids, k, entries, ranked ? 0 : shares);
    return widen(t, entries, shares, k, ids, ranked, out);
}

/* The likeliest `nodes` records of all, parents first: their tokens, the nodes of their parents (-1 behind the root) and their shares.
 * A node is no likelier than its parent, so that parents are among them.  Returns how many. */
long keep(const Tree *t, long nodes, int32_t *tokens, int32_t *parents, float *shares) {
    const long count = likeliest(t->scores, 0, t->records, nodes, t->order);
    int32_t *place = malloc((size_t)t->records * 4);
    memset(place, -1, (size_t)t->records * 4);
    for (long i = 0; i < count; i++) place[t->order[i]] = 0;
    for (long at = 0, node = 0; at < t->records; at++) if (place[at] == 0) {
        tokens[node] = t->tokens[at];
        parents[node] = t->above[at] < 0 ? -1 : place[t->above[at]];
        shares[node] = t->shares[at];
        place[at] = (int32_t)node++;
    }
    free(place);
    return count;
}
