// Causal attention of packed rows, forward and backward: a tree of runs, which share what they begin
// with, by one key head at a time. Scores, probabilities and all sums are float32.

#pragma once

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "products.h"

#define BLOCK 48  // queries whose scores exist at a time; a multiple of TILE
#define TILE 6    // rows of a product that are summed together

// First and last + 1 of a run's tokens; they follow the first `before` of the run above's and its own.
typedef struct { int64_t before, start, end; } Run;

typedef struct {  // [T, heads, d]: numbers between tokens, and between heads
    bf16 *data;
    int64_t token, head;
} Heads;

typedef struct {
    const Run *runs;
    const int64_t *trees;    // [count + 1]; the first run of each, the number of runs
    int64_t count, longest;  // trees; keys of the run that has most
    int64_t heads, kv_heads, d, threads;
    double scale;
    Heads q, k, v, out;             // backward: `out` is its gradient
    Heads of_q, of_k, of_v;         // backward alone
} Attention;

typedef struct {  // of a thread; widths are multiples of 16
    int64_t d, keys;                      // numbers in a row of the keys, and of the scores
    float *k, *v, *of_k, *of_v;            // [longest + TILE, d]
    word *kt, *vt;                         // [d / 2, keys]
    float *q, *g, *o;                      // [BLOCK, d]
    float *p, *s;                          // [BLOCK, keys]
    const Run **path;                      // [longest]; runs whose keys are there, in order
} Room;

INLINE int64_t upto(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// c[TILE, 16 · n] (+)= a · b[count, ...]; a's rows and columns are `row` and `column` apart.
INLINE void product_tile(float *c, int64_t ldc, const float *a, int64_t row, int64_t column,
                         const float *b, int64_t ldb, int64_t count, int n, int add) {
    __m512 sum[TILE][4];
#pragma GCC unroll 6
    for (int i = 0; i < TILE; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++)
            sum[i][j] = add ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    for (int64_t t = 0; t < count; t++) {
        __m512 part[4];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) part[j] = _mm512_loadu_ps(b + t * ldb + 16 * j);
#pragma GCC unroll 6
        for (int i = 0; i < TILE; i++) {
            __m512 x = _mm512_set1_ps(a[i * row + t * column]);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) sum[i][j] = _mm512_fmadd_ps(x, part[j], sum[i][j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < TILE; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, sum[i][j]);
}

// The same of `rows` rows, up to a multiple of TILE, and `width` columns, a multiple of 16.
static void product(float *c, int64_t ldc, const float *a, int64_t row, int64_t column,
                    const float *b, int64_t ldb, int64_t rows, int64_t width, int64_t count,
                    int add) {
    for (int64_t j = 0; j < width; j += 64) {
        int64_t left = (width - j) / 16;
        for (int64_t i = 0; i < rows; i += TILE) {
            float *to = c + i * ldc + j;
            const float *x = a + i * row;
            if (left >= 4) product_tile(to, ldc, x, row, column, b + j, ldb, count, 4, add);
            else if (left == 3) product_tile(to, ldc, x, row, column, b + j, ldb, count, 3, add);
            else if (left == 2) product_tile(to, ldc, x, row, column, b + j, ldb, count, 2, add);
            else product_tile(to, ldc, x, row, column, b + j, ldb, count, 1, add);
        }
    }
}

// `count` rows from `token` on times `scale`, to [.., width]: zeros behind d.
static void gather(Heads from, int64_t head, int64_t token, int64_t count, int64_t d, int64_t width,
                   float scale, float *to) {
    for (int64_t t = 0; t < count; t++) {
        const bf16 *row = from.data + (token + t) * from.token + head * from.head;
        for (int64_t c = 0; c < width; c += 16) {
            __m512 v = c < d ? load_lanes(lanes(c, d), row + c) : _mm512_setzero_ps();
            _mm512_storeu_ps(to + t * width + c, _mm512_mul_ps(v, _mm512_set1_ps(scale)));
        }
    }
}

static void scatter(const float *from, int64_t width, int64_t count, int64_t d, float scale,
                    Heads to, int64_t head, int64_t token) {
    for (int64_t t = 0; t < count; t++) {
        bf16 *row = to.data + (token + t) * to.token + head * to.head;
        for (int64_t c = 0; c < d; c += 16) {
            __m512 v = _mm512_loadu_ps(from + t * width + c);
            store_lanes(row + c, lanes(c, d), _mm512_mul_ps(v, _mm512_set1_ps(scale)));
        }
    }
}

// Words of `count` rows from `token` on as columns of t [d / 2, keys].
static void transpose(Heads from, int64_t head, int64_t token, int64_t count, int64_t d, word *t,
                      int64_t keys) {
    int64_t step = from.token / 2;
    const word *base = (const word *)(from.data + token * from.token + head * from.head);
    for (int64_t j = 0; j < count; j += 16)
        for (int64_t c = 0; c < d / 2; c++) {
            __mmask16 m = lanes(j, count);
            __m512i found = strided_words(m, base + j * step + c, step);
            _mm512_mask_storeu_epi32(t + c * keys + j, m, found);
        }
}

// Probabilities of a row of scores times `scale`: of the first `seen`, zeros up to `end`.
static void softmax(float *s, int64_t seen, int64_t end, float scale) {
    __m512 high = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < seen; c += 16)
        high = _mm512_mask_max_ps(high, lanes(c, seen), high, _mm512_loadu_ps(s + c));
    high = _mm512_set1_ps(_mm512_reduce_max_ps(high));
    for (int64_t c = 0; c < seen; c += 16) {
        __m512 e = _mm512_sub_ps(_mm512_loadu_ps(s + c), high);
        e = exp16(_mm512_mul_ps(e, _mm512_set1_ps(scale)));
        e = _mm512_maskz_mov_ps(lanes(c, seen), e);
        sum = _mm512_add_ps(sum, e);
        _mm512_storeu_ps(s + c, e);
    }
    __m512 by = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(sum));
    for (int64_t c = 0; c < upto(seen, 16); c += 16)
        _mm512_storeu_ps(s + c, _mm512_mul_ps(by, _mm512_loadu_ps(s + c)));
    for (int64_t c = upto(seen, 16); c < end; c += 16)
        _mm512_storeu_ps(s + c, _mm512_setzero_ps());
}

// Gradients of scores, over those of probabilities in s: p · (s − Σ p s).
static void softmax_backward(const float *p, float *s, int64_t seen, int64_t end) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < seen; c += 16) {
        __m512 x = _mm512_maskz_loadu_ps(lanes(c, seen), s + c);
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(p + c), x, sum);
    }
    __m512 all = _mm512_set1_ps(_mm512_reduce_add_ps(sum));
    for (int64_t c = 0; c < end; c += 16) {
        __mmask16 m = c < seen ? lanes(c, seen) : 0;
        __m512 x = _mm512_sub_ps(_mm512_maskz_loadu_ps(m, s + c), all);
        _mm512_storeu_ps(s + c, _mm512_maskz_mul_ps(m, x, _mm512_loadu_ps(p + c)));
    }
}

// s [count, end of keys] = rows from `token` on · t [d / 2, keys]
static void scores(Heads rows, int64_t head, int64_t token, int64_t count, int64_t d, const word *t,
                   int64_t keys, int64_t end, float *s) {
    const word *at = (const word *)(rows.data + token * rows.token + head * rows.head);
    words_product(s, keys, at, rows.token / 2, 1, t, keys, PANEL, count, end, d / 2, 0);
}

// Probabilities of `count` queries of a head from `token` on, the first of which sees `seen` keys.
static void probabilities(const Attention *a, const Room *r, int64_t head, int64_t token,
                          int64_t count, int64_t seen) {
    int64_t end = upto(seen + count - 1, 16);
    scores(a->q, head, token, count, a->d, r->kt, r->keys, end, r->p);
    for (int64_t i = 0; i < count; i++)
        softmax(r->p + i * r->keys, seen + i, end + 16, (float)a->scale);
}

static void block_forward(const Attention *a, const Room *r, int64_t head, int64_t token,
                          int64_t count, int64_t seen) {
    probabilities(a, r, head, token, count, seen);
    product(r->o, r->d, r->p, r->keys, 1, r->v, r->d, count, r->d, seen + count - 1, 0);
    scatter(r->o, r->d, count, a->d, 1.0f, a->out, head, token);
}

static void block_backward(const Attention *a, const Room *r, int64_t head, int64_t token,
                           int64_t count, int64_t seen) {
    int64_t all = seen + count - 1, end = upto(all, 16);
    probabilities(a, r, head, token, count, seen);
    gather(a->q, head, token, count, a->d, r->d, (float)a->scale, r->q);
    gather(a->out, head, token, count, a->d, r->d, 1.0f, r->g);
    scores(a->out, head, token, count, a->d, r->vt, r->keys, end, r->s);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i * r->keys;
        softmax_backward(r->p + at, r->s + at, seen + i, end + 16);
    }
    product(r->of_v, r->d, r->p, 1, r->keys, r->g, r->d, all, r->d, count, 1);
    product(r->of_k, r->d, r->s, 1, r->keys, r->q, r->d, all, r->d, count, 1);
    product(r->o, r->d, r->s, r->keys, 1, r->k, r->d, count, r->d, all, 0);
    scatter(r->o, r->d, count, a->d, (float)a->scale, a->of_q, head, token);
}

// The run's own keys and values, behind the `before` that are there.
static void take_keys(const Attention *a, const Room *r, const Run *run, int64_t kv, int backward) {
    int64_t count = run->end - run->start, at = run->before * r->d;
    transpose(a->k, kv, run->start, count, a->d, r->kt + run->before, r->keys);
    if (!backward) {
        gather(a->v, kv, run->start, count, a->d, r->d, 1.0f, r->v + at);
        return;
    }
    size_t bytes = (count + TILE) * r->d * sizeof(float);
    gather(a->k, kv, run->start, count, a->d, r->d, 1.0f, r->k + at);
    transpose(a->v, kv, run->start, count, a->d, r->vt + run->before, r->keys);
    memset(r->of_k + at, 0, bytes);
    memset(r->of_v + at, 0, bytes);
}

// Their gradients, once no run that follows has them.
static void give_gradients(const Attention *a, const Room *r, const Run *run, int64_t kv) {
    int64_t count = run->end - run->start, at = run->before * r->d;
    scatter(r->of_k + at, r->d, count, a->d, 1.0f, a->of_k, kv, run->start);
    scatter(r->of_v + at, r->d, count, a->d, 1.0f, a->of_v, kv, run->start);
}

// The runs of a tree by key head `kv`, in an order in which each follows what is left of the path.
static void attend(const Attention *a, const Room *r, int64_t tree, int64_t kv, int backward) {
    int64_t shared = a->heads / a->kv_heads, depth = 0;
    const Run *end = a->runs + a->trees[tree + 1];
    for (const Run *run = a->runs + a->trees[tree]; run < end; run++) {
        for (; depth && r->path[depth - 1]->before >= run->before; depth--)
            if (backward) give_gradients(a, r, r->path[depth - 1], kv);
        r->path[depth++] = run;
        take_keys(a, r, run, kv, backward);
        int64_t count = run->end - run->start;
        int64_t blocks = (count + BLOCK - 1) / BLOCK, size = (count + blocks - 1) / blocks;
        for (int64_t h = kv * shared; h < (kv + 1) * shared; h++)
            for (int64_t t = 0; t < count; t += size) {
                int64_t some = least(size, count - t);
                (backward ? block_backward : block_forward)(a, r, h, run->start + t, some,
                                                            run->before + t + 1);
            }
    }
    for (; backward && depth; depth--) give_gradients(a, r, r->path[depth - 1], kv);
}

// Lays a thread's room out, and zeros it; NULL where there is no memory.
static float *make_room(const Attention *a, int backward, Room *r) {
    r->d = upto(a->d, 16);
    r->keys = upto(a->longest, 16) + 16;
    int64_t rows = (a->longest + TILE) * r->d, columns = r->d / 2 * r->keys;
    int64_t queries = BLOCK * r->d, scores = BLOCK * r->keys;
    int64_t both = rows + columns + queries + scores;
    int64_t size = both + (backward ? 2 * rows + columns + 2 * queries + scores : 0);
    int64_t path = a->longest * (int64_t)(sizeof(Run *) / sizeof(float));
    float *room = calloc(path + size, sizeof(float)), *at = room + path;
    r->path = (const Run **)room;
    r->k = r->v = at, at += rows;  // the backward pass needs k alone, the forward pass v
    r->kt = (word *)at, at += columns;
    r->o = at, at += queries;
    r->p = at, at += scores;
    if (backward) {
        r->of_k = at, at += rows;
        r->of_v = at, at += rows;
        r->vt = (word *)at, at += columns;
        r->q = at, at += queries;
        r->g = at, at += queries;
        r->s = at;
    }
    return room;
}

// Returns 0 where a thread got no memory.
int64_t packed_attention(const Attention *a, int64_t backward) {
    int64_t failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(+ : failed)
    {
        Room r;
        float *room = make_room(a, (int)backward, &r);
        if (!room) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a->count * a->kv_heads; i++)
            if (room) attend(a, &r, i / a->kv_heads, i % a->kv_heads, (int)backward);
        free(room);
    }
    return !failed;
}
