// Causal attention of packed rows, forward and backward: a tree of runs, which share what they begin
// with, by one key head at a time. As in arXiv:2307.08691, scores, exponentials and all sums are
// float32, what is multiplied is bfloat16, and the backward pass has each query's sum of exponentials.

#pragma once

#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "products.h"

#define BLOCK 48  // queries whose scores exist at a time

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
    Heads q, k, v, out;      // backward: `out` is its gradient
    Heads grad_q, grad_k, grad_v;  // backward alone
    float *softmax;          // [T, heads, 2]; the highest score, 1 / sum of exponentials
} Attention;

typedef struct {  // of a thread; widths are multiples of 16
    int64_t d, keys;        // numbers in a row of the keys, and of the scores
    word *kt, *vt;          // [d / 2, keys]; columns of keys and values
    word *below;            // [longest / 2 + 1, d]; values, or backward keys, one below the other
    float *grad_k, *grad_v; // [longest, d]
    float *s, *grad_p;      // [BLOCK, keys]; scores, and gradients of probabilities
    bf16 *rounded;          // [BLOCK, keys]; exponentials, or backward gradients of scores
    word *p2, *s2;          // [BLOCK / 2, keys]; probabilities and those, one below the other
    word *q2, *grad_out2;      // [BLOCK / 2, d]; as are queries, and gradients of outputs
    float *o;               // [BLOCK, d]
    const Run **path;       // [longest]; runs whose keys are there, in order
} Room;

INLINE __mmask16 lanes_if_any(int64_t at, int64_t end) { return at < end ? lanes(at, end) : 0; }

INLINE bf16 *row_of(Heads h, int64_t head, int64_t token) {
    return h.data + token * h.token + head * h.head;
}

// `count` rows from `token` on, one below the other, and zeros behind d: to [.., width]. With `odd`
// the first is below the one that is there.
static void pair_tokens(Heads from, int64_t head, int64_t token, int64_t count, int64_t d,
                        int64_t width, int odd, word *to) {
    for (int64_t t = odd ? -1 : 0; t < count; t += 2, to += width)
        for (int64_t c = 0; c < width; c += 16) {
            __mmask16 m = lanes_if_any(c, d);
            __m256i a = _mm512_cvtepi32_epi16(_mm512_loadu_si512(to + c)), b = {0};
            if (t >= 0) a = _mm256_maskz_loadu_epi16(m, row_of(from, head, token + t) + c);
            if (t + 1 < count)
                b = _mm256_maskz_loadu_epi16(m, row_of(from, head, token + t + 1) + c);
            _mm512_storeu_si512(to + c, below(a, b));
        }
}

// `count` rows to those from `token` on; row t times scale[t · step].
static void scatter(const float *from, int64_t width, int64_t count, int64_t d, const float *scale,
                    int64_t step, Heads to, int64_t head, int64_t token) {
    for (int64_t t = 0; t < count; t++) {
        bf16 *row = row_of(to, head, token + t);
        __m512 by = _mm512_set1_ps(scale[t * step]);
        for (int64_t c = 0; c < d; c += 16) {
            __m512 v = _mm512_loadu_ps(from + t * width + c);
            store_lanes(row + c, lanes(c, d), _mm512_mul_ps(v, by));
        }
    }
}

// Words of `count` rows from `token` on as columns of t [d / 2, keys].
static void transpose(Heads from, int64_t head, int64_t token, int64_t count, int64_t d, word *t,
                      int64_t keys) {
    int64_t step = from.token / 2;
    const word *base = (const word *)row_of(from, head, token);
    for (int64_t j = 0; j < count; j += 16)
        for (int64_t c = 0; c < d / 2; c += 16)
            transpose16(base + j * step + c, step, least(16, count - j), least(16, d / 2 - c),
                        t + c * keys + j, keys);
}

// e^(scale · (score − highest)) of a row of scores: of the first `seen`, zeros up to `end`.
static void exponentials(const float *s, int64_t seen, int64_t end, float scale, float *stats,
                         bf16 *to) {
    __m512 high = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < seen; c += 16)
        high = _mm512_mask_max_ps(high, lanes(c, seen), high, _mm512_loadu_ps(s + c));
    stats[0] = scale * _mm512_reduce_max_ps(high);
    high = _mm512_set1_ps(stats[0]);
    for (int64_t c = 0; c < end; c += 16) {
        __m512 e = _mm512_fmsub_ps(_mm512_loadu_ps(s + c), _mm512_set1_ps(scale), high);
        e = _mm512_maskz_mov_ps(lanes_if_any(c, seen), exp16(e));
        sum = _mm512_add_ps(sum, e);
        store16(to + c, e);
    }
    stats[1] = 1.0f / _mm512_reduce_add_ps(sum);
}

// Of a query that sees `seen` keys: probabilities over scores, and Σ p ∂p.
static float probabilities(float *s, const float *grad_p, int64_t seen, float scale,
                           const float *stats) {
    __m512 high = _mm512_set1_ps(stats[0]), by = _mm512_set1_ps(stats[1]);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < seen; c += 16) {
        __mmask16 m = lanes(c, seen);
        __m512 p = _mm512_fmsub_ps(_mm512_loadu_ps(s + c), _mm512_set1_ps(scale), high);
        p = _mm512_maskz_mul_ps(m, exp16(p), by);
        sum = _mm512_mask3_fmadd_ps(p, _mm512_loadu_ps(grad_p + c), sum, m);
        _mm512_storeu_ps(s + c, p);
    }
    return _mm512_reduce_add_ps(sum);
}

// Of queries i and i + 1, the first of which sees `seen` keys: p, and p · (∂p − Σ p ∂p), the
// gradients of scaled scores; zeros up to `end`, and for a query behind the last.
static void softmax_backward(const Room *r, int64_t i, int64_t count, int64_t seen, int64_t end,
                             float scale, const float *stats, int64_t step) {
    float means[2];
    for (int64_t k = 0; k < 2 && i + k < count; k++)
        means[k] = probabilities(r->s + (i + k) * r->keys, r->grad_p + (i + k) * r->keys, seen + k,
                                 scale, stats + k * step);
    for (int64_t c = 0; c < end; c += 16) {
        __m256i p[2] = {{0}}, slope[2] = {{0}};
        for (int64_t k = 0; k < 2 && i + k < count; k++) {
            int64_t at = (i + k) * r->keys + c;
            __mmask16 m = lanes_if_any(c, seen + k);
            __m512 e = _mm512_maskz_loadu_ps(m, r->s + at);
            __m512 of = _mm512_sub_ps(_mm512_loadu_ps(r->grad_p + at), _mm512_set1_ps(means[k]));
            p[k] = narrowed(e);
            slope[k] = narrowed(_mm512_maskz_mul_ps(m, e, of));
            _mm256_storeu_si256((__m256i *)(r->rounded + at), slope[k]);
        }
        _mm512_storeu_si512(r->p2 + i / 2 * r->keys + c, below(p[0], p[1]));
        _mm512_storeu_si512(r->s2 + i / 2 * r->keys + c, below(slope[0], slope[1]));
    }
}

// s [count, end of keys] = rows from `token` on · t [d / 2, keys]
static void scores(Heads rows, int64_t head, int64_t token, int64_t count, int64_t d, const word *t,
                   int64_t keys, int64_t end, float *s) {
    const word *at = (const word *)row_of(rows, head, token);
    for (int64_t c = 0, wide; c < end; c += wide) {
        wide = end - c == PANEL + 16 ? PANEL - 16 : least(PANEL, end - c);  // not 16 alone
        words_product(s + c, keys, at, rows.token / 2, 1, t + c, keys, PANEL, count, wide, d / 2, 0);
    }
}

// `count` queries of a head from `token` on, the first of which sees `seen` keys.
static void block_forward(const Attention *a, const Room *r, int64_t head, int64_t token,
                          int64_t count, int64_t seen) {
    int64_t all = seen + count - 1, end = upto(all, 16), step = 2 * a->heads;
    float *softmax = a->softmax + token * step + 2 * head;
    scores(a->q, head, token, count, a->d, r->kt, r->keys, end, r->s);
    for (int64_t i = 0; i < count; i++)
        exponentials(r->s + i * r->keys, seen + i, end, (float)a->scale, softmax + i * step,
                     r->rounded + i * r->keys);
    words_product(r->o, r->d, (const word *)r->rounded, r->keys / 2, 1, r->below, r->d, PANEL, count,
                  r->d, (all + 1) / 2, 0);
    scatter(r->o, r->d, count, a->d, softmax + 1, step, a->out, head, token);
}

static void block_backward(const Attention *a, const Room *r, int64_t head, int64_t token,
                           int64_t count, int64_t seen) {
    int64_t all = seen + count - 1, end = upto(all, 16), step = 2 * a->heads, two = (count + 1) / 2;
    const float scale = (float)a->scale, *softmax = a->softmax + token * step + 2 * head;
    scores(a->q, head, token, count, a->d, r->kt, r->keys, end, r->s);
    scores(a->out, head, token, count, a->d, r->vt, r->keys, end, r->grad_p);
    for (int64_t i = 0; i < count; i += 2)
        softmax_backward(r, i, count, seen + i, end, scale, softmax + i * step, step);
    pair_tokens(a->q, head, token, count, a->d, r->d, 0, r->q2);
    pair_tokens(a->out, head, token, count, a->d, r->d, 0, r->grad_out2);
    words_product(r->grad_v, r->d, r->p2, 1, r->keys, r->grad_out2, r->d, PANEL, all, r->d, two,
                  1);
    words_product(r->grad_k, r->d, r->s2, 1, r->keys, r->q2, r->d, PANEL, all, r->d, two, 1);
    words_product(r->o, r->d, (const word *)r->rounded, r->keys / 2, 1, r->below, r->d, PANEL, count,
                  r->d, (all + 1) / 2, 0);
    scatter(r->o, r->d, count, a->d, &scale, 0, a->grad_q, head, token);
}

// The run's own keys and values, behind the `before` that are there.
static void take_keys(const Attention *a, const Room *r, const Run *run, int64_t kv, int backward) {
    int64_t count = run->end - run->start, at = run->before * r->d, odd = run->before % 2;
    transpose(a->k, kv, run->start, count, a->d, r->kt + run->before, r->keys);
    pair_tokens(backward ? a->k : a->v, kv, run->start, count, a->d, r->d, (int)odd,
                r->below + run->before / 2 * r->d);
    if (!backward) return;
    transpose(a->v, kv, run->start, count, a->d, r->vt + run->before, r->keys);
    memset(r->grad_k + at, 0, count * r->d * sizeof(float));
    memset(r->grad_v + at, 0, count * r->d * sizeof(float));
}

// Their gradients, once no run that follows has them.
static void give_gradients(const Attention *a, const Room *r, const Run *run, int64_t kv) {
    int64_t count = run->end - run->start, at = run->before * r->d;
    const float scale = (float)a->scale, one = 1.0f;
    scatter(r->grad_k + at, r->d, count, a->d, &scale, 0, a->grad_k, kv, run->start);
    scatter(r->grad_v + at, r->d, count, a->d, &one, 0, a->grad_v, kv, run->start);
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
static word *make_room(const Attention *a, int backward, Room *r) {
    r->d = upto(a->d, 16);
    r->keys = upto(a->longest, 16) + 16;
    int64_t rows = a->longest * r->d, columns = r->d / 2 * r->keys, half = rows / 2 + r->d;
    int64_t queries = BLOCK * r->d, scores = BLOCK * r->keys;
    int64_t both = columns + half + scores + scores / 2 + queries;
    int64_t size = both + (backward ? columns + 2 * rows + 2 * scores + queries : 0);
    int64_t path = a->longest * (int64_t)(sizeof(Run *) / sizeof(word));
    word *room = calloc(path + size, sizeof(word)), *at = room + path;
    r->path = (const Run **)room;
    r->kt = at, at += columns;
    r->below = at, at += half;
    r->s = (float *)at, at += scores;
    r->rounded = (bf16 *)at, at += scores / 2;
    r->o = (float *)at, at += queries;
    if (backward) {
        r->vt = at, at += columns;
        r->grad_k = (float *)at, at += rows;
        r->grad_v = (float *)at, at += rows;
        r->grad_p = (float *)at, at += scores;
        r->p2 = at, at += scores / 2;
        r->s2 = at, at += scores / 2;
        r->q2 = at, at += queries / 2;
        r->grad_out2 = at;
    }
    return room;
}

// Returns 0 where a thread got no memory.
int64_t packed_attention(const Attention *a, int64_t backward) {
    int64_t failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(+ : failed)
    {
        BEGIN_TILES
        Room r;
        word *room = make_room(a, (int)backward, &r);
        if (!room) failed = 1;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < a->count * a->kv_heads; i++)
            if (room) attend(a, &r, i / a->kv_heads, i % a->kv_heads, (int)backward);
        free(room);
    }
    return !failed;
}
