// RMSNorm, RoPE, and attention of one token a row over the keys that are there, and no others.

#pragma once

#include <math.h>

#include "model.h"

// RMSNorm of x [size] times w, to out.
INLINE void norm(const bf16 *x, const bf16 *w, int64_t size, double eps, bf16 *out) {
    __m512 squares = _mm512_setzero_ps();
    int64_t c = 0;
    for (; c + 16 <= size; c += 16) {
        __m512 v = load16(x + c);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    float sum = _mm512_reduce_add_ps(squares);
    for (int64_t i = c; i < size; i++) sum += single(x[i]) * single(x[i]);
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(sum / (float)size + (float)eps));
    for (c = 0; c < size; c += 16) {
        __mmask16 left = lanes(c, size);
        __m512 v = load_lanes(left, x + c), g = load_lanes(left, w + c);
        store_lanes(out + c, left, _mm512_mul_ps(g, rounded(_mm512_mul_ps(v, scale))));
    }
}

static void norms(const Model *m, const bf16 *w, const Scratch *t, Span rows) {
    for (int64_t r = rows.from; r < rows.to; r++)
        norm(t->x + r * m->hidden, w, m->hidden, m->eps, t->h + r * m->hidden);
}

// A head's query or key: its norm, if it has one, and RoPE at a position.
INLINE void rope(const Model *m, bf16 *x, const bf16 *w, int64_t position, bf16 *out) {
    int64_t d = m->head_dim, half = d / 2;
    const bf16 *cos = m->cos + position * d, *sin = m->sin + position * d;
    if (w) norm(x, w, d, m->eps, x);
    for (int64_t c = 0; c < half; c += 16) {
        __m512 a = load16(x + c), b = load16(x + half + c);
        __m512 a_cos = rounded(_mm512_mul_ps(a, load16(cos + c)));
        __m512 b_cos = rounded(_mm512_mul_ps(b, load16(cos + half + c)));
        __m512 b_sin = rounded(_mm512_mul_ps(b, load16(sin + c)));
        __m512 a_sin = rounded(_mm512_mul_ps(a, load16(sin + half + c)));
        store16(out + c, _mm512_add_ps(a_cos, b_sin));
        store16(out + half + c, _mm512_add_ps(b_cos, a_sin));
    }
}

typedef struct {  // keys and values of one head that follow each other
    bf16 *keys, *values;
    int64_t stride, count;
} Run;

INLINE Run run_of(const Cache *c, int64_t layer, int64_t slot, int64_t head, int64_t count) {
    bf16 *keys = c->data + layer * c->layer + slot * c->slot + head * c->head;
    return (Run){keys, keys + c->kind, c->column, count};
}

// scaling · q·k for all keys of a run; writes up to 15 numbers more.
INLINE void score(const bf16 *q, Run run, int64_t d, __m512 scaling, float *out) {
    for (int64_t t = 0; t < run.count; t += 16) {
        __m512 sum[16];
        const bf16 *k = run.keys + t * run.stride;
        int64_t last = run.count - 1 - t;
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) sum[j] = _mm512_setzero_ps();
        for (int64_t c = 0; c < d; c += 32) {
            __m512i part = _mm512_loadu_si512(q + c);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                const bf16 *key = k + (j < last ? j : last) * run.stride + c;
                sum[j] = add_products(sum[j], part, _mm512_loadu_si512(key));
            }
        }
        _mm512_storeu_ps(out + t, _mm512_mul_ps(sums(sum), scaling));
    }
}

// e^(score - highest), in place; returns 1 / their sum. Up to 15 numbers behind them are written too.
INLINE float softmax(float *scores, int64_t count) {
    int64_t padded = (count + 15) & ~15LL;
    for (int64_t t = count; t < padded; t++) scores[t] = -INFINITY;
    __m512 high = _mm512_loadu_ps(scores), sum = _mm512_setzero_ps();
    for (int64_t t = 16; t < padded; t += 16)
        high = _mm512_max_ps(high, _mm512_loadu_ps(scores + t));
    high = _mm512_set1_ps(_mm512_reduce_max_ps(high));
    for (int64_t t = 0; t < padded; t += 16) {
        __m512 e = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + t), high));
        sum = _mm512_add_ps(sum, e);
        _mm512_storeu_ps(scores + t, e);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
}

// sum[query, part] += score · value, for `queries` and `parts` of 16 channels.
INLINE void weigh(const float *scores, int64_t score_stride, Run run, __m512 sum[2][4], int queries,
                  int parts) {
    for (int64_t t = 0; t < run.count; t++) {
        const bf16 *value = run.values + t * run.stride;
#pragma GCC unroll 4
        for (int c = 0; c < parts; c++) {
            __m512 v = load16(value + 16 * c);
#pragma GCC unroll 2
            for (int i = 0; i < queries; i++) {
                __m512 p = _mm512_set1_ps(scores[i * score_stride + t]);
                sum[i][c] = _mm512_fmadd_ps(p, v, sum[i][c]);
            }
        }
    }
}

// One or two queries' mean of the values, over both runs, in 16 · `parts` channels.
INLINE void mean(const float *scores, int64_t score_stride, const float *weights, const Run runs[2],
                 int64_t channel, bf16 *out, int64_t d, int queries, int parts) {
    __m512 sum[2][4];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) sum[i / 4][i % 4] = _mm512_setzero_ps();
    for (int part = 0; part < 2; part++) {
        Run run = runs[part];
        run.values += channel;
        weigh(scores + (part ? runs[0].count : 0), score_stride, run, sum, queries, parts);
    }
    for (int i = 0; i < queries; i++)
        for (int c = 0; c < parts; c++)
            store16(out + i * d + channel + 16 * c,
                    _mm512_mul_ps(sum[i][c], _mm512_set1_ps(weights[i])));
}

// Attention of the queries that share a key head: q [queries, d] → a [queries, d].
static void attend_head(const Model *m, const bf16 *q, const Run runs[2], float *scores,
                        int64_t score_stride, bf16 *a) {
    int64_t d = m->head_dim, queries = m->heads / m->kv_heads;
    __m512 scaling = _mm512_set1_ps((float)m->scaling);
    for (int64_t i = 0; i < queries; i += 2) {
        int64_t both = least(2, queries - i);
        float weights[2];
        for (int64_t j = 0; j < both; j++) {
            float *of = scores + j * score_stride;
            score(q + (i + j) * d, runs[0], d, scaling, of);
            score(q + (i + j) * d, runs[1], d, scaling, of + runs[0].count);
            weights[j] = softmax(of, runs[0].count + runs[1].count);
        }
        for (int64_t c = 0; c < d;) {
            int wide = d - c >= 64;
            bf16 *out = a + i * d;
            if (wide && both == 2) mean(scores, score_stride, weights, runs, c, out, d, 2, 4);
            else if (wide) mean(scores, score_stride, weights, runs, c, out, d, 1, 4);
            else if (both == 2) mean(scores, score_stride, weights, runs, c, out, d, 2, 2);
            else mean(scores, score_stride, weights, runs, c, out, d, 1, 2);
            c += wide ? 64 : 32;
        }
    }
}

// Store the rows' keys and values, then attend from their queries.
static void attention(const Model *m, const Step *s, const Scratch *t, int64_t layer, Span rows,
                      float *scores) {
    const Layer *l = m->layers + layer;
    int64_t d = m->head_dim, queries = m->heads / m->kv_heads;
    for (int64_t r = rows.from; r < rows.to; r++) {
        int64_t row = t->row[r], position = s->positions[row], column = s->columns[row];
        int64_t group = s->group ? s->group[row] : 0;
        int64_t prompt = s->group ? s->prompt_lengths[group] : 0;
        for (int64_t h = 0; h < m->kv_heads; h++) {
            Run runs[2] = {{0, 0, 0, 0}, run_of(&s->completions, layer, row, h, column + 1)};
            if (prompt) runs[0] = run_of(&s->prompts, layer, group, h, prompt);
            int64_t key_offset = (r * m->kv_heads + h) * d, query_offset = key_offset * queries;
            rope(m, t->k + key_offset, l->k_norm, position, runs[1].keys + column * runs[1].stride);
            memcpy(runs[1].values + column * runs[1].stride, t->v + key_offset, d * sizeof(bf16));
            for (int64_t i = 0; i < queries; i++) {
                bf16 *q = t->q + query_offset + i * d;
                rope(m, q, l->q_norm, position, q);
            }
            attend_head(m, t->q + query_offset, runs, scores, t->score_stride, t->a + query_offset);
        }
    }
}
