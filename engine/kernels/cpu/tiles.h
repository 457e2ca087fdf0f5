// Matrix products of bfloat16 by AMX: tiles of 16 rows of 16 words, float32 sums. A word is two
// numbers: neighbours of a row of `a`, or one below the other in `b`.
//
//   c[i, j] (+)= Σ_t a[i, 2t] · b[2t, j] + a[i, 2t + 1] · b[2t + 1, j]

#pragma once

#include "vectors.h"

#ifdef TILES

#define TILE 16
#define MOST_TRANSPOSED 96  // words of a column of `a` that is turned into a row

#ifndef TILE_LOAD  // the tests define these five for processors without AMX
#define TILE_SHAPES(shapes) _tile_loadconfig(shapes)
#define TILE_LOAD(tile, at, bytes) _tile_loadd(tile, at, bytes)
#define TILE_STORE(tile, at, bytes) _tile_stored(tile, at, bytes)
#define TILE_ZERO(tile) _tile_zero(tile)
#define TILE_MULTIPLY(sum, a, b) _tile_dpbf16ps(sum, a, b)
#endif

// Give all eight tiles of this thread their full size; other libraries change it between calls.
static void begin_tiles(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 4 * TILE, shapes.rows[i] = TILE;
    TILE_SHAPES(&shapes);
}

#define BEGIN_TILES begin_tiles();

// c[16 · m, 16 · n] (+)= a · b of `count` words; rows are lda, ldb and ldc apart; m and n are 1 or 2.
INLINE void tile_block(float *c, int64_t ldc, const word *a, int64_t lda, const word *b, int64_t ldb,
                       int64_t count, int m, int n, int add) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    if (add) {
        TILE_LOAD(0, c, 4 * ldc);
        if (n > 1) TILE_LOAD(1, c + TILE, 4 * ldc);
        if (m > 1) TILE_LOAD(2, c + TILE * ldc, 4 * ldc);
        if (m > 1 && n > 1) TILE_LOAD(3, c + TILE * ldc + TILE, 4 * ldc);
    }
    for (int64_t t = 0; t < count; t += TILE) {
        TILE_LOAD(4, a + t, 4 * lda);
        TILE_LOAD(6, b + t * ldb, 4 * ldb);
        TILE_MULTIPLY(0, 4, 6);
        if (n > 1) {
            TILE_LOAD(7, b + t * ldb + TILE, 4 * ldb);
            TILE_MULTIPLY(1, 4, 7);
        }
        if (m > 1) {
            TILE_LOAD(5, a + TILE * lda + t, 4 * lda);
            TILE_MULTIPLY(2, 5, 6);
            if (n > 1) TILE_MULTIPLY(3, 5, 7);
        }
    }
    TILE_STORE(0, c, 4 * ldc);
    if (n > 1) TILE_STORE(1, c + TILE, 4 * ldc);
    if (m > 1) TILE_STORE(2, c + TILE * ldc, 4 * ldc);
    if (m > 1 && n > 1) TILE_STORE(3, c + TILE * ldc + TILE, 4 * ldc);
}

#else
#define BEGIN_TILES
#endif
