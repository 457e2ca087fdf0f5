// Linear layers of a step: blocks of four rows by four columns, each a sum over whole rows of both
// matrices, or AMX's tiles of sixteen by sixteen.

#pragma once

#include "model.h"
#include "tiles.h"

// x[i]·w[j] of `count` rows and four rows, [in] long, at lane 4i + j; the rest of the lanes is 0. The
// four rows that follow those of w are fetched: reading the weights is what a step of few rows takes.
INLINE __m512 products_of(const bf16 *const x[4], const bf16 *const w[4], int64_t in, int count) {
    __m512 sum[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sum[i] = _mm512_setzero_ps();
    int64_t c = 0;
    for (; c + 32 <= in; c += 32) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) fetch(w[j] + c + 4 * in);
        __m512i of[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) of[j] = _mm512_loadu_si512(w[j] + c);
#pragma GCC unroll 4
        for (int i = 0; i < count; i++) {
            __m512i xi = _mm512_loadu_si512(x[i] + c);
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) sum[4 * i + j] = add_products(sum[4 * i + j], xi, of[j]);
        }
    }
    if (c < in) {
        __mmask32 left = (__mmask32)((1u << (in - c)) - 1);
#pragma GCC unroll 16
        for (int i = 0; i < 4 * count; i++) {
            __m512i xi = _mm512_maskz_loadu_epi16(left, x[i / 4] + c);
            sum[i] = add_products(sum[i], xi, _mm512_maskz_loadu_epi16(left, w[i % 4] + c));
        }
    }
    return sums(sum);
}

// The same of up to four rows.
INLINE __m512 products(const bf16 *const x[4], const bf16 *const w[4], int64_t in, int64_t count) {
    if (count == 1) return products_of(x, w, in, 1);
    return count == 2 ? products_of(x, w, in, 2) : products_of(x, w, in, 4);
}

// Four rows of [rows, width] from `at` on; beyond `end` the last one again.
INLINE void four(const bf16 *rows[4], const bf16 *base, int64_t width, int64_t at, int64_t end) {
    for (int i = 0; i < 4; i++) rows[i] = base + least(at + i, end - 1) * width;
}

INLINE __m512 biases(const bf16 *bias, int64_t at, int64_t end) {
    if (!bias) return _mm512_setzero_ps();
    float b[4];
    for (int i = 0; i < 4; i++) b[i] = single(bias[least(at + i, end - 1)]);
    return _mm512_broadcast_f32x4(_mm_loadu_ps(b));
}

// Write a tile of four by four to [rows, width]; `add`: to what is there.
INLINE void put(bf16 *out, int64_t width, __m512 tile, int64_t rows, int64_t columns, int add) {
    bf16 t[16];
    size_t bytes = columns < 4 ? 2 * columns : 8;
    if (add) {
        memset(t, 0, sizeof t);
        for (int64_t i = 0; i < rows && i < 4; i++) memcpy(t + 4 * i, out + i * width, bytes);
        tile = _mm512_add_ps(rounded(tile), load16(t));
    }
    store16(t, tile);
    for (int64_t i = 0; i < rows && i < 4; i++) {
        if (bytes == 8) memcpy(out + i * width, t + 4 * i, 8);
        else memcpy(out + i * width, t + 4 * i, bytes);
    }
}

// silu(gate) · up, of numbers of bfloat16
INLINE __m512 gated_product(__m512 gate, __m512 up) {
    __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), gate));
    __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    return _mm512_mul_ps(rounded(silu), up);
}

#ifdef TILES
// xᵀ [in / 2, upto(rows, 16)] in words: the right factor of tiles, whose left one is rows of w.
static void transpose_rows(const bf16 *x, int64_t in, Span rows, word *to) {
    int64_t count = rows.to - rows.from, words = in / 2;
    const word *from = (const word *)(x + rows.from * in);
    for (int64_t r = 0; r < count; r += TILE)
        for (int64_t t = 0; t < words; t += TILE)
            transpose16(from + r * words + t, words, least(TILE, count - r), TILE,
                        to + t * upto(count, TILE) + r, upto(count, TILE));
}

// What is computed of the sums of sixteen columns of a row, and stored.
typedef void Epilogue(const void *of, int64_t row, int64_t column, __m512 sums);

// x·wᵀ of the columns that fill tiles, by wᵀ's rows times xᵀ; returns the first column left.
INLINE int64_t by_tiles(const word *transposed, const bf16 *w, int64_t in, Span rows, Span columns,
                        Epilogue epilogue, const void *of) {
    int64_t count = rows.to - rows.from, wide = upto(count, TILE), n = columns.from;
    if (in % (2 * TILE)) return n;
    for (int64_t most; n + TILE <= columns.to; n += most) {
        float c[2 * TILE * 2 * TILE] __attribute__((aligned(64)));
        word row[TILE * TILE] __attribute__((aligned(64)));
        most = n + 2 * TILE <= columns.to ? 2 * TILE : TILE;
        const word *from = (const word *)(w + n * in);
        for (int64_t r = 0; r < count; r += 2 * TILE) {
            int64_t some = least(2 * TILE, wide - r), ld = 2 * TILE, depth = in / 2;
            int two = most > TILE, both = some > TILE;
            if (two && both) tile_block(c, ld, from, depth, transposed + r, wide, depth, 2, 2, 0);
            else if (two) tile_block(c, ld, from, depth, transposed + r, wide, depth, 2, 1, 0);
            else if (both) tile_block(c, ld, from, depth, transposed + r, wide, depth, 1, 2, 0);
            else tile_block(c, ld, from, depth, transposed + r, wide, depth, 1, 1, 0);
            for (int64_t k = 0; k < most; k += TILE)
                for (int64_t i = 0; i < some; i += TILE) {
                    transpose16((word *)c + k * ld + i, ld, TILE, TILE, row, TILE);
                    for (int64_t j = 0; j < TILE && r + i + j < count; j++)
                        epilogue(of, rows.from + r + i + j, n + k,
                               _mm512_load_ps((float *)row + TILE * j));
                }
        }
    }
    return n;
}

typedef struct {
    bf16 *out;          // [rows, width]
    const bf16 *bias;   // [width], or NULL
    int64_t width, add; // whether to add to what is there
} LinearOutput;

static void store_sums(const void *of, int64_t row, int64_t column, __m512 sums) {
    const LinearOutput *s = of;
    bf16 *out = s->out + row * s->width + column;
    if (s->bias) sums = _mm512_add_ps(sums, load16(s->bias + column));
    if (s->add) sums = _mm512_add_ps(rounded(sums), load16(out));
    store16(out, sums);
}

// `sums` are up's, and `out` has gate's outputs.
static void store_gated(const void *of, int64_t row, int64_t column, __m512 sums) {
    const LinearOutput *s = of;
    bf16 *out = s->out + row * s->width + column;
    if (s->bias) sums = _mm512_add_ps(sums, load16(s->bias + column));
    store16(out, gated_product(load16(out), rounded(sums)));
}

typedef struct { const Model *m; const Step *s; const Scratch *t; } Logits;

static void store_logits(const void *of, int64_t row, int64_t column, __m512 sums) {
    const Logits *l = of;
    if (l->m->head_bias) sums = _mm512_add_ps(sums, load16(l->m->head_bias + column));
    _mm512_storeu_ps(l->s->logits + l->t->row[row] * l->m->vocabulary + column, rounded(sums));
}
// Compute the columns that fill tiles, and leave the others.
#define BY_TILES(w, in, epilogue, ...) \
    columns.from = by_tiles(transposed, w, in, rows, columns, epilogue, &__VA_ARGS__);
#else
#define transpose_rows(x, in, rows, to)
#define BY_TILES(w, in, epilogue, ...) (void)transposed;
#endif

// out[rows, columns] = x[rows, in]·w[columns, in]ᵀ + bias, or added to what is there; `transposed` is xᵀ.
static void linear(const word *transposed, const bf16 *x, int64_t in, const bf16 *w, const bf16 *bias,
                   bf16 *out, int64_t width, Span rows, Span columns, int add) {
    const bf16 *xs[4], *ws[4];
    BY_TILES(w, in, store_sums, (LinearOutput){out, bias, width, add})
    for (int64_t n = columns.from; n < columns.to; n += 4) {
        four(ws, w, in, n, columns.to);
        __m512 b = biases(bias, n, columns.to);
        for (int64_t m = rows.from; m < rows.to; m += 4) {
            four(xs, x, in, m, rows.to);
            __m512 tile = _mm512_add_ps(products(xs, ws, in, rows.to - m), b);
            put(out + m * width + n, width, tile, rows.to - m, columns.to - n, add);
        }
    }
}

// gated = silu(gate(h)) * up(h)
static void gate_up(const Model *m, const Layer *l, const Scratch *t, const word *transposed, Span rows,
                    Span columns) {
    const bf16 *xs[4], *gates[4], *ups[4];
    int64_t in = m->hidden;
    Span all = columns;
    BY_TILES(l->gate, in, store_sums, (LinearOutput){t->gated, l->gate_bias, m->inner, 0})
    columns = all;
    BY_TILES(l->up, in, store_gated, (LinearOutput){t->gated, l->up_bias, m->inner, 0})
    for (int64_t n = columns.from; n < columns.to; n += 4) {
        four(gates, l->gate, in, n, columns.to);
        four(ups, l->up, in, n, columns.to);
        __m512 gate_bias = biases(l->gate_bias, n, columns.to);
        __m512 up_bias = biases(l->up_bias, n, columns.to);
        for (int64_t r = rows.from; r < rows.to; r += 4) {
            four(xs, t->h, in, r, rows.to);
            __m512 g = rounded(_mm512_add_ps(products(xs, gates, in, rows.to - r), gate_bias));
            __m512 u = rounded(_mm512_add_ps(products(xs, ups, in, rows.to - r), up_bias));
            bf16 *out = t->gated + r * m->inner + n;
            put(out, m->inner, gated_product(g, u), rows.to - r, columns.to - n, 0);
        }
    }
}

static void logits(const Model *m, const Step *s, const Scratch *t, const word *transposed, Span rows,
                   Span columns) {
    const bf16 *xs[4], *ws[4];
    BY_TILES(m->head, m->hidden, store_logits, (Logits){m, s, t})
    for (int64_t n = columns.from; n < columns.to; n += 4) {
        four(ws, m->head, m->hidden, n, columns.to);
        __m512 b = biases(m->head_bias, n, columns.to);
        for (int64_t r = rows.from; r < rows.to; r += 4) {
            four(xs, t->h, m->hidden, r, rows.to);
            float tile[16];
            _mm512_storeu_ps(tile, rounded(_mm512_add_ps(products(xs, ws, m->hidden, rows.to - r), b)));
            int64_t count = least(4, columns.to - n);
            for (int64_t i = 0; i < 4 && r + i < rows.to; i++)
                memcpy(s->logits + t->row[r + i] * m->vocabulary + n, tile + 4 * i, 4 * count);
        }
    }
}
