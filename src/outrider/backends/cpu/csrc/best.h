/* The k best tokens of a row of logits, with or without noise; no filter.
 *
 * First come the blocks that hold the k highest logits.  Most others cannot win after that: even the largest
 * noise, or the noise that their tokens have, is too little.  Noise is computed exactly only where its bound
 * can win.
 * Exact: the result is the k best by score, of equal scores the lower token.  The order in which blocks
 * are visited does not matter. */
#pragma once
#include "noise.h"
#include "row.h"
#include "system.h"

/* The best so far, best first. */
typedef struct {
    int64_t k, count;
    float score[MAX_PICKS];
    int32_t token[MAX_PICKS];
} Best;

INLINE void clear_best(Best *best, int64_t k) {
    best->k = k;
    best->count = 0;
}

/* What a score must reach to enter. */
INLINE float entry_score(const Best *best) {
    return best->count < best->k ? -INFINITY : best->score[best->k - 1];
}

static void enter(Best *best, float score, int32_t token) {
    int64_t at = best->count < best->k ? best->count++ : best->k;
    for (; at > 0; at--) {
        const float other = best->score[at - 1];
        if (!(other < score || (other == score && best->token[at - 1] > token))) break;
        if (at < best->k) {
            best->score[at] = other;
            best->token[at] = best->token[at - 1];
        }
    }
    if (at < best->k) {
        best->score[at] = score;
        best->token[at] = token;
    }
}

/* How the tokens of a row are scored. */
typedef struct {
    const int32_t *token_ids; /* the token of each logit, which selects its noise; null: its index */
    uint64_t key;
    int noisy;
} Scoring;

/* A block of `count` logits, padded to BLOCK: those at listed[j] in their row, or at first + j if that is
 * null. */
typedef struct {
    const float *logits;
    int64_t count;
    const int32_t *listed;
    int32_t first;
} LogitBlock;

/* uniforms [BLOCK] of a block's tokens. */
INLINE void block_uniforms(const LogitBlock *block, const Scoring *scoring, uint32_t *uniforms) {
    const int consecutive = !block->listed && !scoring->token_ids;
    const int64_t needed = consecutive ? HASH_LANES : block->count;
    int32_t tokens[BLOCK] = {0};
    for (int32_t j = 0; j < needed; j++) {
        tokens[j] = block->listed ? block->listed[j] : block->first + j;
        if (scoring->token_ids) tokens[j] = scoring->token_ids[tokens[j]];
    }
    vhash state = hash_state(scoring->key, *(const vtoken *)tokens);
    for (int64_t j = 0; j < BLOCK; j += HASH_LANES) {
        *(vuniform *)(uniforms + j) = uniform_bits(state);
        if (consecutive)
            state += HASH_LANES * GOLDEN;
        else if (j + HASH_LANES < BLOCK)
            state = hash_state(scoring->key, *(const vtoken *)(tokens + j + HASH_LANES));
    }
}

/* Enters the tokens of a block that reach both `least` and the best so far. */
INLINE void consider(LogitBlock block, const Scoring *scoring, float least, Best *best) {
    uint32_t uniforms[BLOCK];
    float upper[BLOCK]; /* bounds of the scores */
    const float needed = entry_score(best) > least ? entry_score(best) : least;
    const int noisy = scoring->noisy;
    int hits = 0;
    if (!noisy)
        memcpy(upper, block.logits, sizeof upper);
    else {
        block_uniforms(&block, scoring, uniforms);
        for (int64_t j = 0; j < BLOCK; j += LANES)
            store(upper + j, load(block.logits + j) + gumbel_bound(*(const vuint *)(uniforms + j)));
    }
    for (int64_t j = 0; j < BLOCK; j++) hits += upper[j] >= needed;
    for (int32_t j = 0; hits && j < block.count; j++) {
        const float logit = block.logits[j];
        if (!(upper[j] >= needed && upper[j] >= entry_score(best) && logit > -INFINITY)) continue;
        enter(best, noisy ? logit + gumbel(uniforms[j]) : logit,
              block.listed ? block.listed[j] : block.first + j);
    }
}

/* `consider` for block b of a row. */
INLINE void consider_block(const Row *row, int64_t b, const Scoring *scoring, float least, Best *best) {
    float scores[BLOCK];
    const float *logits = block_at(row, b);
    const int noisy = scoring->noisy;
    for (int64_t j = 0; j < BLOCK; j++) scores[j] = noisy ? below_max(row, logits[j]) : logits[j];
    const LogitBlock block = {scores, min64(row->vocab - b * BLOCK, BLOCK), 0, (int32_t)(b * BLOCK)};
    consider(block, scoring, least, best);
}

/* Enters the tokens of a block whose hash is at least min_hash.  state: of the block's first tokens. */
INLINE void consider_by_hash(const Row *row, int64_t first, vhash state, uint64_t min_hash, Best *best) {
    uint64_t hashes[BLOCK], any = 0;
    vhash hits = {0};
    for (int64_t j = 0; j < BLOCK; j += HASH_LANES, state += HASH_LANES * GOLDEN) {
        const vhash h = hash(state);
        memcpy(hashes + j, &h, sizeof h);
        hits |= (vhash)(h >= min_hash);
    }
    for (int j = 0; j < HASH_LANES; j++) any |= hits[j];
    const int64_t count = any ? min64(row->vocab - first, BLOCK) : 0;
    for (int64_t j = 0; j < count; j++) {
        if (!(hashes[j] >= min_hash && row->logits[first + j] > -INFINITY)) continue;
        const volatile float below =
            below_max(row, row->logits[first + j]); /* rounded here, not fused with the sum */
        enter(best, below + gumbel((uint32_t)(hashes[j] >> 40)), (int32_t)(first + j));
    }
}

/* Blocks from g on, LANES of them, of those that were left out at first: below the threshold `first`. */
INLINE void consider_others(const Row *row, const float *block_max, int64_t g, const Scoring *scoring,
                            vhash start, float first, Best *best) {
    int32_t uniforms[LANES];
    const vfloat below = below_max_lanes(row, load(block_max + g));
    min_uniforms(below, entry_score(best), uniforms);
    for (int64_t i = 0; i < LANES; i++) {
        const float max = block_max[g + i];
        if (max >= first || max == -INFINITY || below[i] + MAX_GUMBEL < entry_score(best)) continue;
        if (scoring->token_ids)
            consider_block(row, g + i, scoring, -INFINITY, best);
        else {
            const vhash state = start + (uint64_t)(g + i) * (BLOCK * GOLDEN);
            consider_by_hash(row, (g + i) * BLOCK, state, (uint64_t)uniforms[i] << 40, best);
        }
    }
}

/* Enters what is in `own` and not yet in `best`. */
static void merge(const Best *own, Best *best) {
    for (int64_t i = 0; i < own->count; i++) {
        int is_known = 0;
        for (int64_t j = 0; j < best->count; j++) is_known |= best->token[j] == own->token[i];
        if (!is_known) enter(best, own->score[i], own->token[i]);
    }
}

/* The search of a row behind its highest blocks. */
typedef struct {
    const Row *row;
    const float *block_max;
    const Scoring *scoring;
    vhash start;
    float first;
    Lock *lock; /* of `best` */
    Best *best;
} Search;

static void search_groups(const void *loop, int64_t first, int64_t end) {
    const Search *s = loop;
    lock_acquire(s->lock);
    Best own = *s->best;
    lock_release(s->lock);
    for (int64_t g = first; g < end; g++)
        consider_others(s->row, s->block_max, g * LANES, s->scoring, s->start, s->first, &own);
    lock_acquire(s->lock);
    merge(&own, s->best);
    lock_release(s->lock);
}

/* The k best of a row into the empty `best`. */
static void choose(const Row *row, const float *block_max, const Scoring *scoring, Best *best) {
    Best blocks;
    clear_best(&blocks, best->k);
    for (int64_t b = 0; b < row->blocks; b++)
        if (block_max[b] > entry_score(&blocks)) enter(&blocks, block_max[b], (int32_t)b);
    const float first = entry_score(&blocks);
    for (int64_t b = 0; b < row->blocks; b++)
        if (block_max[b] >= first && block_max[b] > -INFINITY)
            consider_block(row, b, scoring, scoring->noisy ? -INFINITY : first, best);
    if (!scoring->noisy) return;
    int32_t tokens[HASH_LANES];
    for (int j = 0; j < HASH_LANES; j++) tokens[j] = j;
    Lock lock = FREE_LOCK;
    const vhash start = hash_state(scoring->key, *(const vtoken *)tokens);
    parallel_for(divide_up(row->blocks, LANES), THREAD_PARTS * PART / LANES, search_groups,
                 &(Search){row, block_max, scoring, start, first, &lock, best});
}
