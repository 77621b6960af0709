/* A whole decoder in one call: embedding, blocks, head, and the tokens that are picked from its logits.  After a forward has swept the
 * processor's caches, every step outside costs more than a pick itself. */
#include <time.h>
#include "row.h"
#include "stack.h"

double picking;                                               /* seconds that went into picks, for whoever measures one thread */
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec; }
INLINE long high_of(long V) { return parts_of((V + BLOCK - 1) / BLOCK) * PART; }

/* One forward: logits [m,outputs] behind the rows `wanted`, and what `match` says of trees whose logits they are.
 * taps: see `stack`; behind those stands one more, for all rows behind the last norm. */
void read_model(const Shape *s, const Layer *layers, const Ends *e, const Rows *rows, const int64_t *ids, char *pool, long plane,
                float *const *taps, const int64_t *wanted, long m, float *logits, const Ask *asks, long count, int32_t *trees) {
    const long h = s->hidden, n = rows->n, high = high_of(e->outputs);
    float *x = malloc((size_t)(n * h + m * (h + high)) * 4), *a = x + n * h, *top = a + m * h, *final = taps ? taps[s->layers + 1] : 0;
    embed(&e->embedding, ids, n, h, x);
    stack(s, layers, rows, pool, plane, x, 0, 0, taps);
    if (final) rms_norm(x, e->norm, n, h, s->eps, final);
    for (long i = 0; i < m; i++) {
        if (final) memcpy(a + i * h, final + wanted[i] * h, (size_t)h * 4);
        else rms_norm(x + wanted[i] * h, e->norm, 1, h, s->eps, a + i * h);
    }
    if (m) linear_crowned(&e->head, a, m, h, logits, e->outputs, 0, count ? top : 0, high);
    const double began = now();
    follow(logits, e->outputs, e->outputs, top, high, asks, count, trees);
    picking += now() - began;
    free(x);
}

/* Chains of guesses: `stack` over the rows, then the best of the first V tokens after row at[i] goes in as the row behind it, and so on.
 * A chain ends at a token that is none (-1), and behind one whose traits `halt` did not like (0: there are no traits; see stop.c) or that is
 * less likely than the chain's floor.
 * out[i * most + level]: its tokens, -1 past its end; states, unless 0: the rows that they were read from. */
typedef struct { long at, levels, top_k; double min_p, top_p; uint64_t stream; float temperature, floor; } Chain;
_Static_assert(sizeof(Chain) == 56, "chain.py packs them");

void chain(const Shape *s, const Layer *layers, const Ends *e, const Rows *first, const int64_t *first_ids, char *pool, long plane,
           const Chain *chains, long m, long most, long V, const Halt *halt, int32_t *out, float *traits, float *states) {
    const long h = s->hidden, n = first->n, high = high_of(e->outputs);
    int64_t at[5][m];                                         /* ids, positions, slots, seen, depths */
    const int32_t *tables[m];
    long live[m];                                             /* which chain each row belongs to */
    float *x = malloc((size_t)(n * h + m * (2 * h + e->outputs + high)) * 4), *y = x + n * h, *a = y + m * h, *logits = a + m * h;
    float *top = logits + m * e->outputs;
    embed(&e->embedding, first_ids, n, h, x);
    stack(s, layers, first, pool, plane, x, 0, 0, 0);
    for (long i = 0; i < m; i++) {
        memcpy(y + i * h, x + chains[i].at * h, (size_t)h * 4);
        at[1][i] = first->positions[chains[i].at];
        at[3][i] = first->seen[chains[i].at];
        at[4][i] = 0;
        tables[i] = first->tables[chains[i].at];
        live[i] = i;
    }
    memset(out, -1, (size_t)(m * most) * 4);
    for (long level = 0; ; level++) {
        long longest = 0, left = 0;
        rms_norm(y, e->norm, m, h, s->eps, a);
        linear_crowned(&e->head, a, m, h, logits, e->outputs, 0, top, high);
        for (long i = 0; i < m; i++) {
            const Chain *c = chains + live[i];
            const float *row = logits + i * e->outputs;
            const long place = live[i] * most + level;
            const uint64_t key = mix(c->stream + (uint64_t)(at[1][i] + 1));
            float *seen = halt ? traits + place * TRAITS : 0;
            if (states) memcpy(states + place * h, y + i * h, (size_t)h * 4);
            const Law law = {c->temperature, c->min_p, c->top_k, c->top_p};
            const double began = now();
            const long found = pick_known(row, V, &law, key, top + i * high, out + place);
            picking += now() - began;
            if (!found) continue;
            if (halt && (should_stop(halt, row, V, c->temperature, out[place], level, seen) || seen[0] < c->floor)) continue;
            if (level + 1 == c->levels) continue;
            const long j = left++;                            /* the rows that go on close up */
            live[j] = live[i];
            tables[j] = tables[i];
            at[0][j] = out[place];
            at[1][j] = at[1][i] + 1;
            at[2][j] = tables[j][at[3][i]];
            at[3][j] = at[3][i] + 1;
            longest = at[3][j] > longest ? at[3][j] : longest;
        }
        if (!(m = left)) break;
        const Rows rows = {m, 0, longest, first->pinned, at[1], at[2], at[3], at[4], tables, 0};
        embed(&e->embedding, at[0], m, h, y);
        stack(s, layers, &rows, pool, plane, y, 0, 0, 0);
    }
    free(x);
}
