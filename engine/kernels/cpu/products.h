// Linear layers and the gated MLP in training, forward and backward: matrix products of bfloat16 with
// float32 sums, and what lies between them while it is in a core's cache. Widths are multiples of 16,
// but for outputs of linear layers that are not rotated. Two numbers that one instruction multiplies
// with two others are a word: neighbours of a row, or one below the other.

#pragma once

#include <omp.h>
#include <stdlib.h>

#include "elementwise.h"
#include "tiles.h"

#define STRIP 6         // rows of a product that are summed together
#define PANEL 64        // columns of it
#ifdef TILES
#define SOME 64         // rows whose float32 products exist at a time
#define SHARE TILE      // a thread's rows are a multiple of it
#else
#define SOME 48
#define SHARE STRIP
#endif
#define DEEP 64         // words of a row that are float32 numbers at a time
#define BLOCK_ROWS 192  // rows after which gradients of weights are added up
#define INNER 128       // columns of the MLP's inside that are computed together
#define PAD 16          // words between rows, so that a column's lie in different sets of the cache

// Words of a matrix as panels of PANEL columns, one behind the other, of `depth` rows each.
INLINE int64_t panels(int64_t width, int64_t depth) {
    return (width + PANEL - 1) / PANEL * PANEL * depth;
}

// What is multiplied: words, or with MULTIPLY_ADD the float32 numbers that they widen to.
#ifdef MULTIPLY_ADD
typedef float number;
typedef __m512 numbers;
#define LOAD_NUMBERS _mm512_loadu_ps
#define BROADCAST(a) _mm512_set1_ps(a)
#define ADD_PRODUCT(sum, a, b) _mm512_fmadd_ps(a, b, sum)
#else
typedef word number;
typedef __m512bh numbers;
#define LOAD_NUMBERS(from) (__m512bh)_mm512_loadu_si512(from)
#define BROADCAST(a) (__m512bh)_mm512_set1_epi32((int)(a))
#define ADD_PRODUCT(sum, a, b) _mm512_dpbf16_ps(sum, a, b)
#endif

// c[rows, 16 · n] (+)= a · b of `count` numbers; a's rows and columns are `row` and `column` apart.
INLINE void numbers_tile(float *c, int64_t ldc, const number *a, int64_t row, int64_t column,
                         const number *b, int64_t ldb, int64_t count, int rows, int n, int add) {
    __m512 sum[STRIP][4];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            sum[i][j] = add ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t++) {
        numbers part[4];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) part[j] = LOAD_NUMBERS(b + t * ldb + 16 * j);
#pragma GCC unroll 6
        for (int i = 0; i < rows; i++) {
            numbers x = BROADCAST(a[i * row + t * column]);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) sum[i][j] = ADD_PRODUCT(sum[i][j], x, part[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, sum[i][j]);
}

#define STRIPS(m, n)                                                                    \
    for (; i + m <= rows; i += m)                                                       \
        numbers_tile(c + i * ldc, ldc, a + i * row, row, column, b, ldb, count, m, n, add);

#define COLUMNS(n)                                                                      \
    do { STRIPS(6, n) STRIPS(4, n) STRIPS(2, n) STRIPS(1, n) } while (0)

// c[rows, up to PANEL] (+)= a · b
static void panel_product(float *c, int64_t ldc, const number *a, int64_t row, int64_t column,
                          const number *b, int64_t ldb, int64_t rows, int64_t width, int64_t count,
                          int add) {
    int64_t i = 0;
    if (width >= 64) COLUMNS(4);
    else if (width == 48) COLUMNS(3);
    else if (width == 32) COLUMNS(2);
    else COLUMNS(1);
}

#ifdef MULTIPLY_ADD
// Words of `a` as numbers: of up to SOME rows and DEEP columns, either of which are neighbours.
static void widen_rows(const word *a, int64_t row, int64_t column, int64_t rows, int64_t count,
                       float *to) {
    for (int64_t i = 0; column == 1 && i < rows; i++)  // to [rows, 2 · DEEP]
        for (int64_t t = 0; t < 2 * count; t += 16)
            _mm512_store_ps(to + 2 * DEEP * i + t,
                            load_lanes(lanes(t, 2 * count), (const bf16 *)(a + i * row) + t));
    for (int64_t t = 0; column != 1 && t < count; t++)  // to [2 · count, SOME]
        for (int64_t i = 0; i < rows; i += 16) {
            __m512i words = _mm512_maskz_loadu_epi32(lanes(i, rows), a + i + t * column);
            _mm512_store_ps(to + 2 * t * SOME + i, low_halves(words));
            _mm512_store_ps(to + (2 * t + 1) * SOME + i, high_halves(words));
        }
}

// Of `b`: `count` rows of a panel, to [2 · count, PANEL].
static void widen_panel(const word *b, int64_t ldb, int64_t width, int64_t count, float *to) {
    for (int64_t t = 0; t < count; t++)
        for (int64_t j = 0; j < width; j += 16) {
            __m512i words = _mm512_loadu_si512(b + t * ldb + j);
            _mm512_store_ps(to + 2 * t * PANEL + j, low_halves(words));
            _mm512_store_ps(to + (2 * t + 1) * PANEL + j, high_halves(words));
        }
}
#endif

// c[rows, width] (+)= a · b by vectors; b's panels are `next` words apart, its rows `ldb`.
static void vectors_product(float *c, int64_t ldc, const word *a, int64_t row, int64_t column,
                            const word *b, int64_t ldb, int64_t next, int64_t rows, int64_t width,
                            int64_t count, int add) {
#ifdef MULTIPLY_ADD
    float left[SOME * 2 * DEEP] __attribute__((aligned(64)));
    float right[2 * DEEP * PANEL] __attribute__((aligned(64)));
    int64_t left_row = column == 1 ? 2 * DEEP : 1, left_column = column == 1 ? 1 : SOME;
    for (int64_t i = 0; i < rows; i += SOME)
        for (int64_t t = 0; t < count; t += DEEP) {
            int64_t some = least(SOME, rows - i), deep = least(DEEP, count - t);
            widen_rows(a + i * row + t * column, row, column, some, deep, left);
            for (int64_t j = 0; j < width; j += PANEL) {
                int64_t wide = least(PANEL, width - j);
                widen_panel(b + j / PANEL * next + t * ldb, ldb, wide, deep, right);
                panel_product(c + i * ldc + j, ldc, left, left_row, left_column, right, PANEL, some,
                              wide, 2 * deep, add || t);
            }
        }
#else
    for (int64_t j = 0; j < width; j += PANEL)
        panel_product(c + j, ldc, a, row, column, b + j / PANEL * next, ldb, rows,
                      least(PANEL, width - j), count, add);
#endif
}

#ifdef TILES
// The same of whole tiles: all columns, `rows` and `count` multiples of 16.
static void tiles_product(float *c, int64_t ldc, const word *a, int64_t row, int64_t column,
                          const word *b, int64_t ldb, int64_t next, int64_t rows, int64_t width,
                          int64_t count, int add) {
    word turned[2 * TILE * MOST_TRANSPOSED] __attribute__((aligned(64)));
    for (int64_t i = 0, m; i < rows; i += TILE * m) {
        const word *left = a + i * row;
        int64_t lda = row;
        m = least(2, (rows - i) / TILE);
        if (column != 1) {
            for (int64_t t = 0; t < count; t += TILE)
                for (int64_t k = 0; k < m; k++)
                    transpose16(left + TILE * k * row + t * column, column, TILE, TILE,
                                turned + TILE * k * count + t, count);
            left = turned, lda = count;
        }
        for (int64_t j = 0; j < width; j += 2 * TILE) {
            const word *right = b + j / PANEL * next + j % PANEL;
            float *to = c + i * ldc + j;
            int both = width - j > TILE;
            if (m > 1 && both) tile_block(to, ldc, left, lda, right, ldb, count, 2, 2, add);
            else if (m > 1) tile_block(to, ldc, left, lda, right, ldb, count, 2, 1, add);
            else if (both) tile_block(to, ldc, left, lda, right, ldb, count, 1, 2, add);
            else tile_block(to, ldc, left, lda, right, ldb, count, 1, 1, add);
        }
    }
}
#endif

// The same by the fastest instructions there are: tiles, and vectors for what fills none.
static void words_product(float *c, int64_t ldc, const word *a, int64_t row, int64_t column,
                          const word *b, int64_t ldb, int64_t next, int64_t rows, int64_t width,
                          int64_t count, int add) {
    int64_t done = 0;
#ifdef TILES
    int64_t deep = count / TILE * TILE;
    if (deep && (column == 1 || (row == 1 && deep <= MOST_TRANSPOSED))) done = rows / TILE * TILE;
    if (done) {
        tiles_product(c, ldc, a, row, column, b, ldb, next, done, width, deep, add);
        if (deep < count)
            vectors_product(c, ldc, a + deep * column, row, column, b + deep * ldb, ldb, next, done,
                            width, count - deep, 1);
    }
#endif
    if (done < rows)
        vectors_product(c + done * ldc, ldc, a + done * row, row, column, b, ldb, next, rows - done,
                        width, count, add);
}

// Sixteen words of a's lanes below b's.
INLINE __m512i below(__m256i a, __m256i b) {
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(a), high);
}

// Rows [from, to) of m [.., width], each below the next, to [(to − from + 1) / 2, width + PAD] words.
static void pair_rows(const bf16 *m, int64_t width, int64_t from, int64_t to, word *out) {
    for (int64_t r = from; r < to; r += 2, out += width + PAD)
        for (int64_t c = 0; c < width; c += 16) {
            __m256i a = _mm256_loadu_si256((const __m256i *)(m + r * width + c)), b = {0};
            if (r + 1 < to) b = _mm256_loadu_si256((const __m256i *)(m + (r + 1) * width + c));
            _mm512_storeu_si512(out + c, below(a, b));
        }
}

// A matrix m [rows, width] as panels, a row below the next, and zeros up to a multiple of 16 rows. As
// in the functions that follow, the threads share the work, and don't wait for each other at its end.
static void panels_of_rows(const bf16 *m, int64_t width, int64_t rows, word *out) {
    int64_t depth = upto(rows, 16) / 2;
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < depth; r++)
        for (int64_t c = 0; c < width; c += 16) {
            const bf16 *from = m + 2 * r * width + c;
            __m256i a = {0}, b = {0};
            if (2 * r < rows) a = _mm256_loadu_si256((const __m256i *)from);
            if (2 * r + 1 < rows) b = _mm256_loadu_si256((const __m256i *)(from + width));
            int64_t at = c / PANEL * PANEL * depth + r * PANEL + c % PANEL;
            _mm512_storeu_si512(out + at, below(a, b));
        }
}

// Its transpose, of m [width, depth · 2].
static void panels_of_columns(const bf16 *m, int64_t width, int64_t depth, word *out) {
    const word *from = (const word *)m;
#pragma omp for schedule(static) nowait
    for (int64_t c = 0; c < width; c += 16)
        for (int64_t r = 0; r < depth; r += 16) {
            int64_t at = c / PANEL * PANEL * depth + r * PANEL + c % PANEL;
            transpose16(from + c * depth + r, depth, least(16, width - c), least(16, depth - r),
                        out + at, PANEL);
        }
}

INLINE void *room_for(int64_t words) { return aligned_alloc(64, (size_t)(words / 16 + 1) * 64); }

// to[count]: the sum of what each thread has, `size` numbers apart.
static void sum_shares(const float *shares, int64_t size, int64_t count, float *to) {
    int64_t threads = omp_get_num_threads();
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < count; i += 16) {
        __mmask16 m = lanes(i, count);
        __m512 sum = _mm512_maskz_loadu_ps(m, shares + i);
        for (int64_t t = 1; t < threads; t++)
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(m, shares + t * size + i));
        _mm512_mask_storeu_ps(to + i, m, sum);
    }
}

typedef struct {
    const bf16 *x, *gate, *up, *down;  // [rows, hidden], [inner, hidden] twice, [hidden, inner]
    bf16 *gated, *raised;              // [rows, inner]; outputs of gate and up, or NULL
    bf16 *out;                         // [rows, hidden]; backward: gradient of x, or NULL
    const bf16 *grad_out;                 // backward alone, as what follows: of `out`
    float *grad_gate, *grad_up, *grad_down;  // all or none
    const bf16 *residual;              // forward alone: what `out` is added to, or NULL
    int64_t rows, hidden, inner, threads;
} Mlp;

// silu(gate) · up of rows [first, first + count) and of a part of the inside, by float32 products:
// rounded to `out`, and the two to gated and raised where these are kept.
static void gate_part(const Mlp *m, const float *g, const float *u, int64_t first, int64_t count,
                      int64_t c0, int64_t width, bf16 *out) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t c = 0; c < width; c += 16) {
            __m512 x = rounded(_mm512_load_ps(g + r * INNER + c));
            __m512 y = rounded(_mm512_load_ps(u + r * INNER + c));
            int64_t at = (first + r) * m->inner + c0 + c;
            if (m->gated) store16(m->gated + at, x), store16(m->raised + at, y);
            __m512 silu = rounded(_mm512_mul_ps(x, sigmoid(x)));
            store16(out + r * INNER + c, _mm512_mul_ps(silu, y));
        }
}

INLINE void store_rows(const float *from, int64_t count, int64_t width, bf16 *to) {
    for (int64_t i = 0; i < count * width; i += 16) store16(to + i, _mm512_load_ps(from + i));
}

INLINE void add_residual(const float *from, int64_t count, int64_t width, const bf16 *residual,
                         bf16 *to) {
    for (int64_t i = 0; i < count * width; i += 16)
        store16(to + i, _mm512_add_ps(load16(residual + i), rounded(_mm512_load_ps(from + i))));
}

// out = residual + down(silu(gate(x)) · up(x)); returns 0 where there was no memory.
int64_t mlp_forward(const Mlp *m) {
    int64_t h = m->hidden, n = m->inner, outer = panels(n, h / 2), last = panels(h, n / 2);
    word *gate = room_for(2 * outer + last), *up = gate + outer, *down = up + outer;
    int64_t failed = !gate;
#pragma omp parallel num_threads(m->threads) reduction(+ : failed)
    if (gate) {
        BEGIN_TILES
        float *g = room_for((2 * INNER + h + INNER / 2) * SOME), *u = g + SOME * INNER;
        float *o = u + SOME * INNER;
        bf16 *p = (bf16 *)(o + SOME * h);
        int64_t from, to;
        panels_of_columns(m->gate, n, h / 2, gate);
        panels_of_columns(m->up, n, h / 2, up);
        panels_of_columns(m->down, h, n / 2, down);
#pragma omp barrier
        own_share(m->rows, SHARE, &from, &to);
        if (!g) failed = 1, to = from;
        for (int64_t r = from; r < to; r += SOME) {
            int64_t count = least(SOME, to - r);
            const word *x = (const word *)(m->x + r * h);
            for (int64_t c = 0; c < n; c += INNER) {
                int64_t width = least(INNER, n - c), in = h / 2, next = PANEL * in;
                words_product(g, INNER, x, in, 1, gate + c * in, PANEL, next, count, width, in, 0);
                words_product(u, INNER, x, in, 1, up + c * in, PANEL, next, count, width, in, 0);
                gate_part(m, g, u, r, count, c, width, p);
                words_product(o, h, (word *)p, INNER / 2, 1, down + c / 2 * PANEL, PANEL,
                              PANEL * (n / 2), count, h, width / 2, c > 0);
            }
            if (m->residual) add_residual(o, count, h, m->residual + r * h, m->out + r * h);
            else store_rows(o, count, h, m->out + r * h);
        }
        free(g);
    }
    free(gate);
    return !failed;
}

typedef struct {  // of a thread
    word *x, *grad_out, *g, *u, *p;       // a row below the next: [BLOCK_ROWS / 2, .. + PAD]
    bf16 *gates, *ups;                 // gradients [BLOCK_ROWS, INNER]
    float *some, *grad_x;                // [SOME, INNER], [BLOCK_ROWS, hidden]
    float *grad_gate, *grad_up, *grad_down;  // sums
} MlpRoom;

// Gradients of a part of the inside, of rows [r, r + count) of a block, by those of the product.
static void gate_part_backward(const Mlp *m, const MlpRoom *t, int64_t first, int64_t r,
                               int64_t count, int64_t c0, int64_t width, int64_t ahead) {
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < count; i += 2)
        for (int64_t c = 0; c < width; c += 16) {
            __m256i grad_g[2] = {{0}}, grad_u[2] = {{0}}, product[2] = {{0}};
            for (int64_t k = 0; k < 2 && i + k < count; k++) {
                int64_t at = (first + r + i + k) * m->inner + c0 + c, own = (r + i + k) * INNER + c;
                int64_t soon = ahead + (i + k) * m->inner + c;
                fetch(m->gated + soon), fetch(m->raised + soon);
                __m512 g = load16(m->gated + at), u = load16(m->raised + at);
                __m512 top = _mm512_load_ps(t->some + (i + k) * INNER + c), s = sigmoid(g);
                __m512 silu = _mm512_mul_ps(g, s);
                __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, s), s);
                silu = rounded(silu);
                grad_g[k] = narrowed(_mm512_mul_ps(_mm512_mul_ps(top, u), slope));
                grad_u[k] = narrowed(_mm512_mul_ps(top, silu));
                product[k] = narrowed(_mm512_mul_ps(silu, u));
                _mm256_store_si256((__m256i *)(t->gates + own), grad_g[k]);
                _mm256_store_si256((__m256i *)(t->ups + own), grad_u[k]);
            }
            int64_t at = (r + i) / 2 * (INNER + PAD) + c;
            _mm512_store_si512(t->g + at, below(grad_g[0], grad_g[1]));
            _mm512_store_si512(t->u + at, below(grad_u[0], grad_u[1]));
            _mm512_store_si512(t->p + at, below(product[0], product[1]));
        }
}

// A block of rows: gradients of x, and of the weights added to the thread's sums.
static void mlp_block(const Mlp *m, const MlpRoom *t, const word *gate, const word *up,
                      const word *down, int64_t first, int64_t count, int add) {
    int64_t h = m->hidden, n = m->inner, ld = h + PAD, in = INNER + PAD, pairs = (count + 1) / 2;
    pair_rows(m->x, h, first, first + count, t->x);
    pair_rows(m->grad_out, h, first, first + count, t->grad_out);
    for (int64_t c = 0; c < n; c += INNER) {
        int64_t width = least(INNER, n - c);
        for (int64_t r = 0; r < count; r += SOME) {
            int64_t some = least(SOME, count - r);
            words_product(t->some, INNER, (const word *)(m->grad_out + (first + r) * h), h / 2, 1,
                          down + c * (h / 2), PANEL, PANEL * (h / 2), some, width, h / 2, 0);
            int64_t ahead = r + SOME < count ? (first + r + SOME) * n + c : first * n + c + INNER;
            gate_part_backward(m, t, first, r, some, c, width, ahead);
        }
        if (m->out) {
            int64_t at = c / 2 * PANEL, next = PANEL * (n / 2);
            words_product(t->grad_x, h, (word *)t->gates, INNER / 2, 1, gate + at, PANEL, next,
                          count, h, width / 2, c > 0);
            words_product(t->grad_x, h, (word *)t->ups, INNER / 2, 1, up + at, PANEL, next, count,
                          h, width / 2, 1);
        }
        if (!m->grad_gate) continue;
        words_product(t->grad_gate + c * h, h, t->g, 1, in, t->x, ld, PANEL, width, h, pairs, add);
        words_product(t->grad_up + c * h, h, t->u, 1, in, t->x, ld, PANEL, width, h, pairs, add);
        words_product(t->grad_down + c, n, t->grad_out, 1, ld, t->p, in, PANEL, h, width, pairs,
                      add);
    }
    if (m->out) store_rows(t->grad_x, count, h, m->out + first * h);
}

static float *make_mlp_room(const Mlp *m, MlpRoom *t) {
    int64_t h = m->hidden, pairs = BLOCK_ROWS / 2, inside = pairs * (INNER + PAD);
    int64_t rows = pairs * (h + PAD);
    float *room = room_for(2 * rows + 3 * inside + BLOCK_ROWS * (INNER + h) + SOME * INNER);
    t->x = (word *)room, t->grad_out = t->x + rows;
    t->g = t->grad_out + rows, t->u = t->g + inside, t->p = t->u + inside;
    t->gates = (bf16 *)(t->p + inside), t->ups = t->gates + BLOCK_ROWS * INNER;
    t->some = (float *)(t->ups + BLOCK_ROWS * INNER), t->grad_x = t->some + SOME * INNER;
    return room;
}

int64_t mlp_backward(const Mlp *m) {
    int64_t h = m->hidden, n = m->inner, outer = panels(n, h / 2), last = panels(h, n / 2);
    int64_t size = m->grad_gate ? h * n : 0;
    word *down = room_for(outer + 2 * last), *gate = down + outer, *up = gate + last;
    float *shares = room_for(3 * size * m->threads);
    int64_t failed = !down || !shares;
    if (!failed) {
#pragma omp parallel num_threads(m->threads) reduction(+ : failed)
        {
            BEGIN_TILES
            MlpRoom t;
            float *room = make_mlp_room(m, &t), *own = shares + 3 * size * omp_get_thread_num();
            int64_t from, to;
            t.grad_gate = own, t.grad_up = own + size, t.grad_down = own + 2 * size;
            panels_of_rows(m->down, n, h, down);
            panels_of_rows(m->gate, h, n, gate);
            panels_of_rows(m->up, h, n, up);
#pragma omp barrier
            own_share(m->rows, SHARE, &from, &to);
            if (!room) failed = 1, to = from;
            if (from == to) memset(own, 0, 3 * size * sizeof(float));
            for (int64_t r = from; r < to; r += BLOCK_ROWS)
                mlp_block(m, &t, gate, up, down, r, least(BLOCK_ROWS, to - r), r > from);
#pragma omp barrier
            sum_shares(shares, 3 * size, size, m->grad_gate);
            sum_shares(shares + size, 3 * size, size, m->grad_up);
            sum_shares(shares + 2 * size, 3 * size, size, m->grad_down);
            free(room);
        }
    }
    free(down), free(shares);
    return !failed;
}

typedef struct {  // a layer that shares its input with others
    const bf16 *weight, *bias;  // [width, in], [width] or NULL
    bf16 *out;                  // [rows, width]
    const bf16 *grad_out;          // backward: its gradient
    float *grad_weight, *grad_bias; // NULL where not wanted
    int64_t width, rotated;     // whether `out` has rotary positions
} Affine;

typedef struct {
    const bf16 *x;  // [rows, in]
    bf16 *grad_x;     // backward; NULL where not wanted
    const Affine *parts;
    const bf16 *cos, *sin;  // [period, d], row r by row r mod period
    int64_t count, rows, in, threads, period, d;
} Linears;

// Rotary positions of x [rows, width], the first of which is row `first` of all; `back`: see
// rotate_token.
static void rotate_part(const Linears *l, const bf16 *x, int64_t first, int64_t rows, int64_t width,
                        int back, bf16 *out) {
    for (int64_t r = 0; r < rows; r++) {
        int64_t at = (first + r) % l->period * l->d;
        rotate_token(x + r * width, l->cos + at, l->sin + at, width / l->d, l->d, back,
                     out + r * width);
    }
}

// Rows of float32 products and a bias, if any, to [.., ld].
INLINE void store_affine(const float *from, int64_t rows, int64_t width, const bf16 *bias, bf16 *to,
                         int64_t ld) {
    for (int64_t c = 0; c < width; c += 16) {
        __mmask16 m = lanes(c, width);
        __m512 b = bias ? load_lanes(m, bias + c) : _mm512_setzero_ps();
        for (int64_t r = 0; r < rows; r++)
            store_lanes(to + r * ld + c, m, _mm512_add_ps(_mm512_load_ps(from + r * INNER + c), b));
    }
}

int64_t linears_forward(const Linears *l) {
    int64_t depth = l->in / 2, size = 0, failed;
    for (int64_t k = 0; k < l->count; k++) size += panels(l->parts[k].width, depth);
    word *weights = room_for(size);
    failed = !weights;
    if (!failed) {
#pragma omp parallel num_threads(l->threads)
        {
            BEGIN_TILES
            float some[SOME * INNER] __attribute__((aligned(64)));
            int64_t from, to, at = 0;
            for (int64_t k = 0; k < l->count; at += panels(l->parts[k++].width, depth))
                panels_of_columns(l->parts[k].weight, l->parts[k].width, depth, weights + at);
#pragma omp barrier
            own_share(l->rows, SHARE, &from, &to);
            for (int64_t r = from; r < to; r += SOME) {
                int64_t count = least(SOME, to - r);
                const word *x = (const word *)(l->x + r * l->in), *w = weights;
                for (int64_t k = 0; k < l->count; w += panels(l->parts[k++].width, depth)) {
                    const Affine *p = l->parts + k;
                    bf16 *out = p->out + r * p->width;
                    for (int64_t c = 0; c < p->width; c += INNER) {
                        int64_t width = least(INNER, p->width - c);
                        words_product(some, INNER, x, depth, 1, w + c * depth, PANEL, PANEL * depth,
                                      count, upto(width, 16), depth, 0);
                        store_affine(some, count, width, p->bias ? p->bias + c : NULL, out + c,
                                     p->width);
                    }
                    if (p->rotated) rotate_part(l, out, r, count, p->width, 0, out);
                }
            }
        }
    }
    free(weights);
    return !failed;
}

// of[width] (+)= the sums over `count` rows, `ld` apart.
static void add_rows(const bf16 *rows, int64_t ld, int64_t count, int64_t width, float *of,
                     int add) {
    for (int64_t c = 0; c < width; c += 16) {
        __mmask16 m = lanes(c, width);
        __m512 sum = add ? _mm512_maskz_loadu_ps(m, of + c) : _mm512_setzero_ps();
        for (int64_t r = 0; r < count; r++)
            sum = _mm512_add_ps(sum, load_lanes(m, rows + r * ld + c));
        _mm512_mask_storeu_ps(of + c, m, sum);
    }
}

// Rows with zeros behind them up to a multiple of 16.
static void pad_rows(const bf16 *rows, int64_t count, int64_t width, bf16 *to) {
    for (int64_t r = 0, ld = upto(width, 16); r < count; r++)
        for (int64_t c = 0; c < width; c += 16)
            store16(to + r * ld + c, load_lanes(lanes(c, width), rows + r * width + c));
}

// A block of rows; `weights` are panels, `sums` the gradients of weights and biases so far.
static void linears_block(const Linears *l, const word *weights, float *sums, word *room,
                          int64_t widest, int64_t first, int64_t count, int add) {
    int64_t pairs = (count + 1) / 2, ld = l->in + PAD;
    float *grad_x = (float *)room;
    word *x = room + BLOCK_ROWS * l->in, *top = x + BLOCK_ROWS / 2 * ld;
    bf16 *turned = (bf16 *)(top + BLOCK_ROWS / 2 * (widest + PAD));
    pair_rows(l->x, l->in, first, first + count, x);
    for (int64_t k = 0; k < l->count; k++) {
        const Affine *p = l->parts + k;
        const bf16 *grad_out = p->grad_out + first * p->width;
        int64_t even = upto(p->width, 16), depth = even / 2, wide = even + PAD;
        if (p->rotated) rotate_part(l, grad_out, first, count, p->width, 1, turned);
        else if (even != p->width) pad_rows(grad_out, count, p->width, turned);
        if (p->rotated || even != p->width) grad_out = turned;
        pair_rows(grad_out, even, 0, count, top);
        if (l->grad_x)
            words_product(grad_x, l->in, (const word *)grad_out, depth, 1, weights, PANEL,
                          PANEL * depth, count, l->in, depth, k > 0);
        if (p->grad_weight)
            words_product(sums, l->in, top, 1, wide, x, ld, PANEL, p->width, l->in, pairs, add);
        if (p->grad_bias) add_rows(grad_out, even, count, p->width, sums + p->width * l->in, add);
        weights += panels(l->in, depth), sums += p->width * (l->in + 1);
    }
    if (l->grad_x) store_rows(grad_x, count, l->in, l->grad_x + first * l->in);
}

int64_t linears_backward(const Linears *l) {
    int64_t size = 0, held = 0, widest = 0;
    for (int64_t k = 0; k < l->count; k++) {
        int64_t width = l->parts[k].width, even = upto(width, 16);
        size += width * (l->in + 1), held += panels(l->in, even / 2);
        widest = widest > even ? widest : even;
    }
    word *weights = room_for(held);
    float *shares = room_for(size * l->threads);
    int64_t own = BLOCK_ROWS * l->in + BLOCK_ROWS / 2 * (l->in + 2 * widest + 2 * PAD);
    int64_t failed = !weights || !shares;
    if (!failed) {
#pragma omp parallel num_threads(l->threads) reduction(+ : failed)
        {
            BEGIN_TILES
            word *room = room_for(own);
            float *sums = shares + size * omp_get_thread_num();
            int64_t from, to, at = 0;
            for (int64_t k = 0; k < l->count; k++) {
                int64_t width = l->parts[k].width;
                panels_of_rows(l->parts[k].weight, l->in, width, weights + at);
                at += panels(l->in, upto(width, 16) / 2);
            }
#pragma omp barrier
            own_share(l->rows, SHARE, &from, &to);
            if (!room) failed = 1, to = from;
            if (from == to) memset(sums, 0, size * sizeof(float));
            for (int64_t r = from; r < to; r += BLOCK_ROWS)
                linears_block(l, weights, sums, room, widest, r, least(BLOCK_ROWS, to - r),
                              r > from);
#pragma omp barrier
            const float *share = shares;
            for (int64_t k = 0; k < l->count; k++) {
                const Affine *p = l->parts + k;
                if (p->grad_weight) sum_shares(share, size, p->width * l->in, p->grad_weight);
                share += p->width * l->in;
                if (p->grad_bias) sum_shares(share, size, p->width, p->grad_bias);
                share += p->width;
            }
            free(room);
        }
    }
    free(weights), free(shares);
    return !failed;
}
