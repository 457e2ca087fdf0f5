// What a step reads and writes: the layouts of cpu_step.py's structures.

#pragma once

#include "vectors.h"

typedef struct {  // matrices [out, in]; biases [out], NULL where there are none
    const bf16 *q, *q_bias, *k, *k_bias, *v, *v_bias, *o, *o_bias;
    const bf16 *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    const bf16 *input_norm, *post_norm;  // [hidden]
    const bf16 *q_norm, *k_norm;         // [head_dim], or NULL
} Layer;

typedef struct {
    int64_t layer_count, hidden, inner, vocabulary, heads, kv_heads, head_dim;
    double eps, scaling;  // of the norms; of q·k
    const bf16 *embedding, *norm, *head, *head_bias;
    const bf16 *cos, *sin;  // [columns, head_dim]
    const Layer *layers;
} Model;

typedef struct {  // [layers, 2, slots, kv_heads, columns, head_dim], and its strides but the last
    bf16 *data;
    int64_t layer, kind, slot, head, column;
} Cache;

typedef struct {
    int64_t rows, threads, by_rows;
    const int64_t *tokens, *positions, *columns;  // [rows]; position 0: a finished row, skipped
    const int64_t *group, *prompt_lengths;        // [rows], [groups]; NULL: no shared prompts
    Cache prompts, completions;                   // prompts: a group is a slot
    float *logits;                                // [rows, vocabulary]
    char *scratch;
} Step;

typedef struct { int64_t from, to; } Span;

typedef struct {  // of the live rows, in order
    bf16 *x, *h;         // [rows, hidden]
    bf16 *q, *a;         // [rows, heads * head_dim]
    bf16 *k, *v;         // [rows, kv_heads * head_dim]
    bf16 *gated;         // [rows, inner]
    int64_t *row;        // [rows], where a live row is among all
    float *scores;       // [threads, queries a key head, columns + 32]
    int64_t score_stride;
    word *transposed;    // [threads, words in a row, rows]; for AMX's tiles
    int64_t transposed_stride;
} Scratch;
