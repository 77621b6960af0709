/* Index of the n-grams of 8, 4, 2 and 1 tokens of a text: where each ended, latest first, and which tokens
 * followed. run_index.py holds its memory; backends/run_index.py is the reference.
 *
 * Computed: a hash table for each n-gram size leads to the latest place with a hash; `previous` links a
 * place to the one before it.
 * Integers only: a result depends on the tokens and on nothing else. */
#include "runs.h"
#include "memory.h"
#include <string.h>

enum { SIZES = 4, LONGEST = 8 }; /* n-gram size s has LONGEST >> s tokens */

static const int64_t MAX_PLACES[SIZES] = {4, 16, 16, 16}; /* places that a search returns */

/* Hashes of the n-grams that end with tokens[-1], of the n tokens there: the high bits of a polynomial of
 * the tokens. */
static void hashes_of(const int32_t *tokens, int64_t n, int32_t shift, uint32_t *hashes) {
    uint32_t sum = 0, power = 2654435769u;
    for (int64_t i = 1, s = SIZES; i <= LONGEST && i <= n; i++, power *= 2246822507u) {
        sum += (uint32_t)tokens[-i] * power;
        const int is_power_of_two = !(i & (i - 1));
        if (is_power_of_two) hashes[--s] = sum >> shift;
    }
}

static int32_t *head_of(const TextIndex *t, int64_t size, uint32_t hash) {
    return t->heads + (size << (32 - t->shift)) + hash;
}

/* The n-grams that end with the last token are entered by the next call, so that the end of a text never
 * finds itself. */
void runs_extend(TextIndex *t, const int32_t *tokens, int64_t count) {
    if (count) memcpy(t->tokens + t->length, tokens, (size_t)count * 4);
    t->length += (int32_t)count;
    for (; t->entered < t->length - 1; t->entered++) {
        uint32_t hashes[SIZES];
        const int64_t end = t->entered + 1;
        hashes_of(t->tokens + end, end, t->shift, hashes);
        for (int64_t s = 0; s < SIZES; s++) {
            if (end < LONGEST >> s) continue;
            int32_t *head = head_of(t, s, hashes[s]);
            t->previous[t->entered * SIZES + s] = *head;
            *head = (int32_t)end;
        }
    }
}

/* out [depth]: the tokens from `at` on, -1 behind the end and from a negative token on.  If `wraps`, the
 * text continues behind its end with the same tokens again. */
static void copy_following(const TextIndex *t, int64_t at, int64_t depth, int wraps, int32_t *out) {
    const int64_t n = t->length - at;
    int64_t i = 0;
    for (int64_t j = 0; i < depth && j < n && t->tokens[at + j] >= 0; i++) {
        out[i] = t->tokens[at + j];
        j = wraps && j + 1 == n ? 0 : j + 1;
    }
    for (; i < depth; i++) out[i] = -1;
}

/* What is looked up: the n tokens before `end`, from the n-grams of one size on. */
typedef struct {
    const int32_t *end;
    int64_t n, size, max_match; /* max_match: agreeing tokens are counted up to it */
    int64_t depth;
    int wraps;
} Search;

static int64_t agreeing_tokens(const TextIndex *t, int64_t at, const Search *search) {
    int64_t n = 0;
    while (n < search->max_match && n < at && n < search->n && t->tokens[at - 1 - n] == search->end[-1 - n])
        n++;
    return n;
}

/* Finds up to `max_places` places, latest first, and writes a row for each to *row, which moves on: 1,
 * agreeing tokens, tokens that followed.  A row equal to the one before it is counted there instead. */
static int64_t find(const TextIndex *t, const Search *search, int64_t max_places, int32_t **row) {
    const int64_t size = search->size, width = 2 + search->depth;
    uint32_t hashes[SIZES];
    hashes_of(search->end, search->n, t->shift, hashes);
    int64_t found = 0, at = *head_of(t, size, hashes[size]);
    for (int64_t visited = 0; visited < 2 * MAX_PLACES[size] && found < max_places && at > t->oldest;
         visited++) {
        const int64_t agree = agreeing_tokens(t, at, search);
        if (agree >= LONGEST >> size) { /* otherwise another n-gram with the same hash */
            int32_t *r = *row;
            r[0] = 1;
            r[1] = (int32_t)agree;
            copy_following(t, at, search->depth, search->wraps, r + 2);
            const int repeats = found++ && !memcmp(r + 1, r + 1 - width, (size_t)(1 + search->depth) * 4);
            if (repeats)
                r[-width]++;
            else
                *row += width;
        }
        at = t->previous[(at - 1) * SIZES + size];
    }
    return found;
}

/* The last `longest` tokens of the text followed by pending [num_pending], into context; returns how many
 * there are. */
static int64_t copy_context(const TextIndex *t, const int32_t *pending, int64_t num_pending, int64_t longest,
                            int32_t *context) {
    const int64_t behind = num_pending < longest ? num_pending : longest, space = longest - behind;
    const int64_t before = t->length < space ? t->length : space;
    memcpy(context, t->tokens + t->length - before, (size_t)before * 4);
    if (behind) memcpy(context + before, pending + num_pending - behind, (size_t)behind * 4);
    return before + behind;
}

void runs_find(TextIndex *own, const int32_t *tokens, int64_t count, int64_t num_pending,
               TextIndex *const *texts, int64_t num_texts, int32_t *out) {
    runs_extend(own, tokens, count);
    const int64_t longest = own->max_match, depth = own->depth, width = 2 + depth;
    int32_t *context = allocate(longest * 4), *first = out + SIZES;
    const int64_t n = copy_context(own, tokens + count, num_pending, longest, context);
    for (int64_t s = 0; s < SIZES; first += MAX_PLACES[s++] * width) {
        const int64_t next_size = 2 * (LONGEST >> s); /* longer matches were found as those n-grams */
        const int64_t max_match = s && next_size <= longest ? next_size - 1 : longest;
        const Search search = {context + n, n, s, max_match, depth, !texts};
        int64_t left = n >= LONGEST >> s ? MAX_PLACES[s] : 0;
        int32_t *row = first;
        if (left && !texts) find(own, &search, left, &row);
        for (int64_t i = num_texts - 1; i >= 0 && left > 0; i--) left -= find(texts[i], &search, left, &row);
        out[s] = (int32_t)((row - first) / width);
    }
    release(context);
}

/* Of the places that `find` returns for the longest n-grams. */
static int64_t longest_match(const TextIndex *t, const Search *search) {
    uint32_t hashes[SIZES];
    hashes_of(search->end, search->n, t->shift, hashes);
    int64_t longest = 0, left = MAX_PLACES[0], at = *head_of(t, 0, hashes[0]);
    for (int64_t visited = 0; visited < 2 * MAX_PLACES[0] && left && at > t->oldest; visited++) {
        const int64_t agree = agreeing_tokens(t, at, search);
        if (agree >= LONGEST) {
            left--;
            longest = agree > longest ? agree : longest;
        }
        at = t->previous[(at - 1) * SIZES];
    }
    return longest;
}

int64_t runs_longest(TextIndex *own, const int32_t *tokens, int64_t count, TextIndex *const *texts,
                     int64_t num_texts) {
    runs_extend(own, tokens, count);
    const int64_t n = own->length < own->max_match ? own->length : own->max_match;
    const Search search = {own->tokens + own->length, n, 0, own->max_match, 0, 0};
    int64_t longest = 0;
    for (int64_t i = 0; i < num_texts && n >= LONGEST; i++) {
        const int64_t match = longest_match(texts[i], &search);
        if (match > longest) longest = match;
    }
    return longest;
}
