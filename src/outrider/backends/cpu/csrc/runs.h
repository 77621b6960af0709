/* Entry points of runs.c, which bindings.py reads as well. */
#pragma once
#include <stdint.h>

/* A text and the places where its n-grams of 8, 4, 2 and 1 tokens end.  Places count from 1, so zeroed
 * memory is an empty index. */
typedef struct {
    int32_t shift;            /* 32 - log2 of the buckets of a hash table */
    int32_t oldest;           /* places before it are forgotten */
    int32_t length, entered;  /* tokens; places that are in the hash tables */
    int32_t max_match, depth; /* longest match that is counted; tokens returned after a match */
    int32_t *tokens;          /* [capacity] */
    int32_t *previous;        /* [capacity][4]: the place before it with the same hash */
    int32_t *heads;           /* [4][1 << (32 - shift)]: the latest place of a hash */
} TextIndex;

/* Appends tokens [count]. */
void runs_extend(TextIndex *index, const int32_t *tokens, int64_t count);

/* Appends the first `count` of `tokens` to `own`, then looks up the end of that text followed by the next
 * `num_pending` tokens: in `own` if `texts` is null, otherwise in texts [num_texts], the last one first.
 * out: [4] numbers of matches, then for n-grams of 8, 4, 2 and 1 tokens [places][2+depth]: repetitions,
 * agreeing tokens, and the tokens that followed. */
void runs_find(TextIndex *own, const int32_t *tokens, int64_t count, int64_t num_pending,
               TextIndex *const *texts, int64_t num_texts, int32_t *out);

/* Appends tokens [count] to `own`.  Returns the length of the longest match of the end of that text in texts
 * [num_texts], of 8 to `max_match` tokens; 0 if there is none. */
int64_t runs_longest(TextIndex *own, const int32_t *tokens, int64_t count, TextIndex *const *texts,
                     int64_t num_texts);
