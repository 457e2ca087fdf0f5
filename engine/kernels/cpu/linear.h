// Linear layers: tiles of four rows by four columns, each a sum over whole rows of both matrices.

#pragma once

#include "model.h"

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

// out[rows, columns] = x[rows, in]·w[columns, in]ᵀ + bias, or added to what is there.
INLINE void linear(const bf16 *x, int64_t in, const bf16 *w, const bf16 *bias, bf16 *out,
                   int64_t width, Span rows, Span columns, int add) {
    const bf16 *xs[4], *ws[4];
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

static void project(const bf16 *x, int64_t in, const bf16 *w, const bf16 *bias, bf16 *out,
                    int64_t width, Span rows, Span columns) {
    linear(x, in, w, bias, out, width, rows, columns, 0);
}

static void add_projected(const bf16 *x, int64_t in, const bf16 *w, const bf16 *bias, bf16 *out,
                          int64_t width, Span rows, Span columns) {
    linear(x, in, w, bias, out, width, rows, columns, 1);
}

// gated = silu(gate(h)) * up(h)
static void gate_up(const Model *m, const Layer *l, const Scratch *t, Span rows, Span columns) {
    const bf16 *xs[4], *gates[4], *ups[4];
    const __m512 one = _mm512_set1_ps(1.0f), zero = _mm512_setzero_ps();
    int64_t in = m->hidden;
    for (int64_t n = columns.from; n < columns.to; n += 4) {
        four(gates, l->gate, in, n, columns.to);
        four(ups, l->up, in, n, columns.to);
        __m512 gate_bias = biases(l->gate_bias, n, columns.to);
        __m512 up_bias = biases(l->up_bias, n, columns.to);
        for (int64_t r = rows.from; r < rows.to; r += 4) {
            four(xs, t->h, in, r, rows.to);
            __m512 g = rounded(_mm512_add_ps(products(xs, gates, in, rows.to - r), gate_bias));
            __m512 u = rounded(_mm512_add_ps(products(xs, ups, in, rows.to - r), up_bias));
            __m512 s = _mm512_div_ps(g, _mm512_add_ps(one, exp16(_mm512_sub_ps(zero, g))));
            bf16 *out = t->gated + r * m->inner + n;
            put(out, m->inner, _mm512_mul_ps(rounded(s), u), rows.to - r, columns.to - n, 0);
        }
    }
}

static void logits(const Model *m, const Step *s, const Scratch *t, Span rows, Span columns) {
    const bf16 *xs[4], *ws[4];
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
