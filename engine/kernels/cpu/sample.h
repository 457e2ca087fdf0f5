// One token a row from logits, by the rule of sampling.py: the inverse of the cumulative
// distribution at a uniform number, which is a hash of the sequence and its column.

#pragma once

#include <math.h>

#include "model.h"

#define BLOCK 256  // tokens whose probabilities are summed first

// SplitMix64's finaliser.
INLINE uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return z ^ (z >> 31);
}

// A number in [0, 1) of 24 bits.
INLINE double uniform(int64_t key, int64_t column) {
    uint64_t bits = mix((uint64_t)key + (uint64_t)(column + 1) * 0x9E3779B97F4A7C15ULL);
    return (double)(bits >> 40) * 0x1p-24;
}

// Sixteen of a row's logits over the temperature; -inf beyond its end.
INLINE __m512 scaled(const float *row, int64_t at, int64_t end, __m512 temperature) {
    __mmask16 here = end - at < 16 ? (__mmask16)((1u << (end - at)) - 1) : 0xFFFF;
    __m512 z = _mm512_div_ps(_mm512_maskz_loadu_ps(here, row + at), temperature);
    return _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), here, z);
}

// The sum of e^(z - high) of a block.
INLINE float block_sum(const float *row, int64_t at, int64_t end, __m512 temperature, __m512 high) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t c = at; c < least(at + BLOCK, end); c += 16) {
        __m512 z = scaled(row, c, end, temperature);
        sum = _mm512_add_ps(sum, exp16(_mm512_sub_ps(z, high)));
    }
    return _mm512_reduce_add_ps(sum);
}

// The token of a block where the running sum passes `inside`; rounding must not lead beyond the
// last token that has a probability.
INLINE int64_t token_in_block(const float *row, int64_t at, int64_t end, __m512 temperature,
                              __m512 high, double inside) {
    int64_t index = at;
    double sum = 0;
    for (int64_t c = at; c < least(at + BLOCK, end); c += 16) {
        float e[16];
        _mm512_storeu_ps(e, exp16(_mm512_sub_ps(scaled(row, c, end, temperature), high)));
        for (int i = 0; i < 16 && c + i < end; i++) {
            sum += e[i];
            if (e[i] > 0) index = c + i;
            if (sum > inside) return index;
        }
    }
    return index;
}

// A row with a NaN gives some token and the log-prob NaN.
INLINE void sample_row(const float *row, int64_t size, float heat, double noise, double *sums,
                       int64_t *token, float *log_prob) {
    __m512 temperature = _mm512_set1_ps(heat > 0 ? heat : 1.0f), high = scaled(row, 0, size, temperature);
    for (int64_t c = 16; c < size; c += 16)
        high = _mm512_max_ps(high, scaled(row, c, size, temperature));
    float top = _mm512_reduce_max_ps(high);
    high = _mm512_set1_ps(top);
    double total = 0;
    int64_t blocks = (size + BLOCK - 1) / BLOCK, chosen = 0;
    for (int64_t b = 0; b < blocks; b++) {
        total += block_sum(row, b * BLOCK, size, temperature, high);
        sums[b] = total;
    }
    if (heat > 0) {
        double target = noise * total;
        while (chosen < blocks - 1 && !(sums[chosen] > target)) chosen++;
        double before = chosen ? sums[chosen - 1] : 0;
        *token = token_in_block(row, chosen * BLOCK, size, temperature, high, target - before);
    } else {
        for (*token = 0; *token < size - 1 && !(row[*token] >= top); (*token)++) {}
    }
    float z = row[*token] / (heat > 0 ? heat : 1.0f);
    *log_prob = (float)((double)z - top - log(total));
}

// Draw a token for each row of logits [rows, size]; heat 0: the likeliest. `sums` is
// [rows, blocks of 256].
void sample_rows(const float *logits, int64_t rows, int64_t size, double heat, const int64_t *keys,
                 const int64_t *columns, int64_t threads, double *sums, int64_t *tokens,
                 float *log_probs) {
    int64_t blocks = (size + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < rows; r++)
        sample_row(logits + r * size, size, (float)heat, uniform(keys[r], columns[r]),
                   sums + r * blocks, tokens + r, log_probs + r);
}
