/* Where the runs of 8, 4, 2 and 1 tokens of a text ended, most recent first, and what followed those that a text ends with now.
 * kernels/runs.py says what is promised and holds the memory; runs_reference.py is the same in Python. */
#include <stdint.h>
#include <string.h>

enum { ORDERS = 4, LONGEST = 8 };                             /* run `o` has LONGEST >> o tokens */

static const long PLACES[ORDERS] = {4, 16, 16, 16};

/* Places count from 1 in heads and previous, so that memory full of zeros is an empty index. */
typedef struct {
    int32_t shift, oldest, length, entered;                   /* places before `oldest` are forgotten, those before `entered` are in */
    int32_t longest, depth;                                   /* tokens that agree at most; tokens that followed */
    int32_t *tokens, *previous, *heads;                       /* [capacity], [capacity][ORDERS], [ORDERS][1 << (32 - shift)] */
} Text;

/* Of the runs that end with tokens[-1], of the n tokens there; a polynomial of the tokens, of which the high bits count. */
static void places_of(const int32_t *tokens, long n, int32_t shift, uint32_t *hash) {
    uint32_t sum = 0, power = 2654435769u;
    for (long i = 1, o = ORDERS; i <= LONGEST && i <= n; i++, power *= 2246822507u) {
        sum += (uint32_t)tokens[-i] * power;
        if (!(i & (i - 1))) hash[--o] = sum >> shift;
    }
}

static int32_t *head(const Text *t, long o, uint32_t hash) { return t->heads + (o << (32 - t->shift)) + hash; }

/* Adds n tokens; the runs that end with the last one wait for the next call, so that what a text ends with never finds itself. */
void runs_extend(Text *t, const int32_t *tokens, long n) {
    if (n) memcpy(t->tokens + t->length, tokens, (size_t)n * 4);
    t->length += (int32_t)n;
    for (; t->entered < t->length - 1; t->entered++) {
        uint32_t hash[ORDERS];
        const long end = t->entered + 1;
        places_of(t->tokens + end, end, t->shift, hash);
        for (long o = 0; o < ORDERS; o++) if (end >= LONGEST >> o) {
            int32_t *last = head(t, o, hash[o]);
            t->previous[t->entered * ORDERS + o] = *last;
            *last = (int32_t)end;
        }
    }
}

/* `depth` tokens from `at` on, -1 from the first one on that is below 0 or not there; a text that loops goes on with what it has said */
static void follow(const Text *t, long at, long depth, int loops, int32_t *out) {
    const long n = t->length - at;
    long i = 0;
    for (long j = 0; i < depth && j < n && t->tokens[at + j] >= 0; i++, j = loops && j + 1 == n ? 0 : j + 1) out[i] = t->tokens[at + j];
    for (; i < depth; i++) out[i] = -1;
}

/* Up to `room` places where the last n tokens before `now`, a run of order o at least, ended.  *row: how often in a row the same was
 * found, how many tokens agree (`most` at most), what followed; it moves on. */
static long find(const Text *t, const int32_t *now, long n, long o, long most, long room, long depth, int loops, int32_t **row) {
    const long run = LONGEST >> o, wide = 2 + depth;
    uint32_t hash[ORDERS];
    places_of(now, n, t->shift, hash);
    long found = 0, at = *head(t, o, hash[o]);
    for (long looked = 0; looked < 2 * PLACES[o] && found < room && at > t->oldest; looked++) {   /* some may be of other runs */
        long agree = 0;
        while (agree < most && agree < at && agree < n && t->tokens[at - 1 - agree] == now[-1 - agree]) agree++;
        if (agree >= run) {
            int32_t *r = *row;
            r[0] = 1;
            r[1] = (int32_t)agree;
            follow(t, at, depth, loops, r + 2);
            if (found++ && !memcmp(r + 1, r + 1 - wide, (size_t)(1 + depth) * 4)) r[-wide]++;
            else *row += wide;
        }
        at = t->previous[(at - 1) * ORDERS + o];
    }
    return found;
}

/* `own` gets the first `fresh` of the given tokens; what it ends with then, with `said` more behind it, is looked up: in itself where
 * there are no `texts`, otherwise in these, the last one first.  out = [ORDERS] how many rows, then of each order [PLACES][2 + depth] */
void runs_find(Text *own, const int32_t *given, long fresh, long said, Text *const *texts, long count, int32_t *out) {
    runs_extend(own, given, fresh);
    const long longest = own->longest, depth = own->depth, wide = 2 + depth;
    const long later = said < longest ? said : longest, left = longest - later;
    const long before = own->length < left ? own->length : left, n = before + later;
    int32_t context[n + 1];
    memcpy(context, own->tokens + own->length - before, (size_t)before * 4);
    if (later) memcpy(context + before, given + fresh + said - later, (size_t)later * 4);
    int32_t *first = out + ORDERS;
    for (long o = 0; o < ORDERS; first += PLACES[o++] * wide) {
        const long longer = 2 * (LONGEST >> o), most = o && longer <= longest ? longer - 1 : longest;
        int32_t *row = first;
        if (n >= LONGEST >> o && !texts) find(own, context + n, n, o, most, PLACES[o], depth, 1, &row);
        long room = n >= LONGEST >> o ? PLACES[o] : 0;
        for (long i = count - 1; i >= 0 && room > 0; i--) room -= find(texts[i], context + n, n, o, most, room, depth, 0, &row);
        out[o] = (int32_t)((row - first) / wide);
    }
}
