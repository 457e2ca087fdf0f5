// One decode step of a Llama-shaped model in bfloat16, for CPUs with AVX512-BF16.
//
// One token of each running sequence goes through all layers in one call: at these sizes launching
// an operation costs more than computing it. Numbers are rounded to bfloat16 where transformers'
// modules round them; products, norms and attention sum in float32. Weights are read where the
// trainer keeps them, [out, in]. cpu_step.py compiles this file and says what it takes.

#include <omp.h>

#include "decode_attention.h"
#include "linear.h"
#include "sample.h"

static char *take(char **at, int64_t bytes) {
    char *here = *at;
    *at += (bytes + 63) & ~63LL;
    return here;
}

// Lay the scratch memory out from `at` on; returns its end.
static char *lay_out(const Model *m, int64_t rows, int64_t columns, int64_t threads, char *at,
                   Scratch *t) {
    int64_t query_bytes = 2 * rows * m->heads * m->head_dim;
    int64_t key_bytes = 2 * rows * m->kv_heads * m->head_dim;
    t->x = (bf16 *)take(&at, 2 * rows * m->hidden);
    t->h = (bf16 *)take(&at, 2 * rows * m->hidden);
    t->q = (bf16 *)take(&at, query_bytes);
    t->a = (bf16 *)take(&at, query_bytes);
    t->k = (bf16 *)take(&at, key_bytes);
    t->v = (bf16 *)take(&at, key_bytes);
    t->gated = (bf16 *)take(&at, 2 * rows * m->inner);
    t->row = (int64_t *)take(&at, 8 * rows);
    t->score_stride = (columns + 63) & ~15LL;
    t->scores = (float *)take(&at, 4 * threads * 2 * t->score_stride);
#ifdef TILES
    int64_t widest = m->hidden > m->inner ? m->hidden : m->inner;
    if (m->heads * m->head_dim > widest) widest = m->heads * m->head_dim;
    t->transposed_stride = upto(widest, 32) / 2 * upto(rows, 16);
    t->transposed = (word *)take(&at, 4 * threads * t->transposed_stride);
#endif
    return at;
}

int64_t scratch_bytes(const Model *m, int64_t rows, int64_t columns, int64_t threads) {
    Scratch t;
    return lay_out(m, rows, columns, threads, (char *)0, &t) - (char *)0;
}

INLINE Span share(int64_t count, int64_t unit, int64_t part, int64_t parts) {
    int64_t units = (count + unit - 1) / unit;
    return (Span){units * part / parts * unit, least(units * (part + 1) / parts * unit, count)};
}

// One thread's share of a step. By rows, each thread takes its rows through all layers, waiting for
// none; otherwise each takes some columns of every matrix, so that weights are read once.
static void run(const Model *m, const Step *s, const Scratch *t, int64_t live, int me, int threads) {
    int64_t alone = s->by_rows, keys = m->kv_heads * m->head_dim, queries = m->heads * m->head_dim;
    Span own = share(live, alone ? 4 : 1, me, threads), rows = alone ? own : (Span){0, live};
    float *scores = t->scores + me * 2 * t->score_stride;
    word *transposed = t->transposed + me * t->transposed_stride;
    BEGIN_TILES
#define COLUMNS(count) (alone ? (Span){0, count} : share(count, 32, me, threads))
#define MEET                  \
    if (!alone) {             \
        _Pragma("omp barrier") \
    }
    for (int64_t r = own.from; r < own.to; r++)
        memcpy(t->x + r * m->hidden, m->embedding + s->tokens[t->row[r]] * m->hidden,
               m->hidden * sizeof(bf16));
    for (int64_t i = 0; i < m->layer_count; i++) {
        const Layer *l = m->layers + i;
        norms(m, l->input_norm, t, own);
        MEET
        transpose_rows(t->h, m->hidden, rows, transposed);
        linear(transposed, t->h, m->hidden, l->q, l->q_bias, t->q, queries, rows, COLUMNS(queries), 0);
        linear(transposed, t->h, m->hidden, l->k, l->k_bias, t->k, keys, rows, COLUMNS(keys), 0);
        linear(transposed, t->h, m->hidden, l->v, l->v_bias, t->v, keys, rows, COLUMNS(keys), 0);
        MEET
        attention(m, s, t, i, own, scores);
        MEET
        transpose_rows(t->a, queries, rows, transposed);
        linear(transposed, t->a, queries, l->o, l->o_bias, t->x, m->hidden, rows, COLUMNS(m->hidden), 1);
        MEET
        norms(m, l->post_norm, t, own);
        MEET
        transpose_rows(t->h, m->hidden, rows, transposed);
        gate_up(m, l, t, transposed, rows, COLUMNS(m->inner));
        MEET
        transpose_rows(t->gated, m->inner, rows, transposed);
        linear(transposed, t->gated, m->inner, l->down, l->down_bias, t->x, m->hidden, rows,
               COLUMNS(m->hidden), 1);
        MEET
    }
    norms(m, m->norm, t, own);
    MEET
    transpose_rows(t->h, m->hidden, rows, transposed);
    logits(m, s, t, transposed, rows, COLUMNS(m->vocabulary));
}

// Feed one token to each live row; the logits of finished rows are 0.
void decode_step(const Model *m, const Step *s, int64_t columns) {
    Scratch t;
    lay_out(m, s->rows, columns, s->threads, s->scratch, &t);
    int64_t live = 0;
    for (int64_t r = 0; r < s->rows; r++) {
        if (s->positions[r] > 0) t.row[live++] = r;
        else memset(s->logits + r * m->vocabulary, 0, m->vocabulary * sizeof(float));
    }
    if (s->threads == 1) {
        run(m, s, &t, live, 0, 1);
        return;
    }
#pragma omp parallel num_threads(s->threads)
    run(m, s, &t, live, omp_get_thread_num(), omp_get_num_threads());
}
