/* Products of bfloat16 pairs in AMX tiles, as the instruction tdpbf16ps computes them.
 *
 * Computed: sum += even + odd for every TILE_INPUTS inputs, where `even` is the float32 sum of the products
 * of the even inputs, from zero, one after the other, and `odd` that of the odd ones.
 * Each product is fused with its addition, and all are rounded to nearest, ties to even.  Numbers below the
 * smallest normal float count as zeros with their sign, in inputs and in results; the floating-point mode of
 * the thread has no influence.
 * Exact: a tile has up to 16 rows, and computes each by itself.  So one row has the bits that it has among
 * others.  Inputs that a row lacks count as zeros.
 *
 * Linux gives a process the tiles when it asks (targets.py). */
#pragma once
#include "linear.h"

enum { TILE_INPUTS = 32, MOST_TILE_ROWS = 16, TILE_LINES = TILE_INPUTS / 2 };

#ifdef __AMX_BF16__
enum { HAS_TILES = 1 };

/* What ldtilecfg reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Keeps the compiler from leaving out or moving what is written to this memory: gcc does not know that its
 * intrinsics read it. */
INLINE void write_back(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

/* Gives the calling thread its tiles: 0-3 sums of `rows` rows and 16 outputs, 4 inputs of these rows, 5-7
 * weights. */
INLINE void configure_tiles(int64_t rows) {
    TileConfig config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 5 ? rows : MOST_TILE_ROWS);
    }
    write_back(&config);
    _tile_loadconfig(&config);
}

/* From here on the thread has no tiles to save. */
INLINE void release_tiles(void) { _tile_release(); }

/* sums += x * TILE_LINES lines of weights. */
INLINE void multiply_lines(const char *weights, const char *x, int64_t row_bytes) {
    _tile_loadd(4, x, row_bytes);
    _tile_loadd(5, weights, LINE_BYTES);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weights + 64, LINE_BYTES);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weights + 128, LINE_BYTES);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weights + 192, LINE_BYTES);
    _tile_dpbf16ps(3, 4, 5);
}

/* All outputs of a panel for the rows that the tiles are configured for.  Their inputs are rounded, and
 * padded with zeros to whole tiles.  fetches: whether the weights AHEAD_BYTES further on are prefetched. */
static void multiply_tiles(TileTask t, int fetches) {
    const int64_t whole = t.inputs / TILE_INPUTS, left = t.inputs % TILE_INPUTS;
    const int64_t sums_bytes = PANEL * 4;
    write_back(t.sums);
    _tile_loadd(0, t.sums, sums_bytes);
    _tile_loadd(1, t.sums + 16, sums_bytes);
    _tile_loadd(2, t.sums + 32, sums_bytes);
    _tile_loadd(3, t.sums + 48, sums_bytes);
    for (int64_t k = 0; k < whole; k++, t.weights += TILE_LINES * LINE_BYTES, t.x += TILE_INPUTS * 2) {
        if (fetches)
            for (int i = 0; i < TILE_LINES * LINE_BYTES; i += 64)
                __builtin_prefetch(t.weights + AHEAD_BYTES + i);
        multiply_lines(t.weights, t.x, t.row_bytes);
    }
    if (left) {
        char padded[TILE_LINES * LINE_BYTES] = {0};
        memcpy(padded, t.weights, (size_t)divide_up(left, 2) * LINE_BYTES);
        write_back(padded);
        multiply_lines(padded, t.x, t.row_bytes);
    }
    _tile_stored(0, t.sums, sums_bytes);
    _tile_stored(1, t.sums + 16, sums_bytes);
    _tile_stored(2, t.sums + 32, sums_bytes);
    _tile_stored(3, t.sums + 48, sums_bytes);
}
#else
enum { HAS_TILES = 0 };
INLINE void configure_tiles(int64_t rows) { (void)rows; }
INLINE void release_tiles(void) {}
INLINE void multiply_tiles(TileTask t, int fetches) { (void)t, (void)fetches; }
#endif
