// What is read off logits, bfloat16 [rows, size], for each row: the log-prob of its target, entropy
// and Σ p², where p = softmax(logits · by); and their gradients. All of it is computed in float32.

#pragma once

#include <math.h>

#include "elementwise.h"

#define LOWEST -104.0f  // whose exponential is 0

// log Σ e^(by · x).
INLINE float log_sum(const bf16 *x, int64_t size, __m512 by) {
    __m512 high = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t c = 0; c < size; c += 16) {
        __mmask16 m = lanes(c, size);
        high = _mm512_mask_max_ps(high, m, high, _mm512_mul_ps(by, load_lanes(m, x + c)));
    }
    float top = _mm512_reduce_max_ps(high);
    high = _mm512_set1_ps(top);
    for (int64_t c = 0; c < size; c += 16) {
        __mmask16 m = lanes(c, size);
        __m512 e = exp16(_mm512_fmsub_ps(by, load_lanes(m, x + c), high));
        sum = _mm512_mask_add_ps(sum, m, sum, e);
    }
    return top + logf(_mm512_reduce_add_ps(sum));
}

// To log_probs, log_sums, entropy and squares [rows], the last two where there is room for them.
void head_statistics(const bf16 *logits, const int64_t *targets, int64_t rows, int64_t size,
                     double by, int64_t threads, float *log_probs, float *log_sums,
                     float *entropy, float *squares) {
    const __m512 factor = _mm512_set1_ps((float)by), lowest = _mm512_set1_ps(LOWEST);
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(rows, 1, &from, &to);
        for (int64_t r = from; r < to; r++) {
            const bf16 *x = logits + r * size;
            log_sums[r] = log_sum(x, size, factor);
            log_probs[r] = single(x[targets[r]]) * (float)by - log_sums[r];
            if (!entropy && !squares) continue;
            __m512 all = _mm512_set1_ps(log_sums[r]);
            __m512 entropy_sum = _mm512_setzero_ps(), square_sum = _mm512_setzero_ps();
            for (int64_t c = 0; c < size; c += 16) {
                __mmask16 m = lanes(c, size);
                __m512 log_p = _mm512_fmsub_ps(factor, load_lanes(m, x + c), all);
                __m512 p = _mm512_maskz_mov_ps(m, exp16(log_p));
                log_p = _mm512_max_ps(lowest, log_p);
                entropy_sum = _mm512_fnmadd_ps(p, log_p, entropy_sum);
                square_sum = _mm512_fmadd_ps(p, p, square_sum);
            }
            if (entropy) entropy[r] = _mm512_reduce_add_ps(entropy_sum);
            if (squares) squares[r] = _mm512_reduce_add_ps(square_sum);
        }
    }
}

// Gradients of logits, which may lie over them: by · ((1[v = t] − p) · grad_log_probs
// − p · (log p + entropy) · grad_entropy); NULL: the entropy has none.
void head_gradients(const bf16 *logits, const int64_t *targets, const float *log_sums,
                    const float *grad_log_probs, const float *entropy, const float *grad_entropy,
                    int64_t rows, int64_t size, double by, int64_t threads, bf16 *out) {
    const __m512 factor = _mm512_set1_ps((float)by), lowest = _mm512_set1_ps(LOWEST);
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(rows, 1, &from, &to);
        for (int64_t r = from; r < to; r++) {
            const bf16 *x = logits + r * size;
            float chosen = single(x[targets[r]]) * (float)by - log_sums[r];
            float grad_chosen = grad_log_probs[r] * (1.0f - expf(chosen));
            __m512 all = _mm512_set1_ps(log_sums[r]), top = _mm512_set1_ps(grad_log_probs[r]);
            __m512 spread = _mm512_set1_ps(grad_entropy ? grad_entropy[r] : 0.0f);
            __m512 mean = _mm512_set1_ps(grad_entropy ? entropy[r] : 0.0f);
            if (grad_entropy)
                grad_chosen -=
                    grad_entropy[r] * expf(chosen) * (fmaxf(chosen, LOWEST) + entropy[r]);
            for (int64_t c = 0; c < size; c += 16) {
                __mmask16 m = lanes(c, size);
                __m512 log_p = _mm512_fmsub_ps(factor, load_lanes(m, x + c), all);
                __m512 p = exp16(log_p), slope = top;
                if (grad_entropy)
                    slope = _mm512_fmadd_ps(
                        spread, _mm512_add_ps(_mm512_max_ps(lowest, log_p), mean), slope);
                slope = _mm512_mul_ps(_mm512_mul_ps(p, slope), factor);
                store_lanes(out + r * size + c, m, _mm512_sub_ps(_mm512_setzero_ps(), slope));
            }
            __m512 there = _mm512_set1_ps(grad_chosen * (float)by);
            store_lanes(out + r * size + targets[r], 1, there);
        }
    }
}
