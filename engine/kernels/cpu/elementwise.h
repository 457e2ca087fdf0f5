// RMSNorm, rotary positions and the gated product, forward and backward, one pass over memory each.
// Matrices are contiguous, rows follow each other. Sums and products are in float32.

#pragma once

#include <math.h>
#include <omp.h>

#include "vectors.h"

// The rows or numbers of thread `omp_get_thread_num()`: a share of `count`, in steps of `unit`.
INLINE void own_share(int64_t count, int64_t unit, int64_t *from, int64_t *to) {
    int64_t n = omp_get_num_threads(), at = omp_get_thread_num(), units = (count + unit - 1) / unit;
    *from = least(count, units * at / n * unit);
    *to = least(count, units * (at + 1) / n * unit);
}

// x[rows, width] += plus, where there is one (to `sum`); out = w · (x · r), with
// r = 1 / √(mean(x²) + eps), to `scale`.
void norm_forward(const bf16 *x, const bf16 *plus, const bf16 *w, int64_t rows, int64_t width,
                  double eps, int64_t threads, bf16 *sum, bf16 *out, float *scale) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(rows, 1, &from, &to);
        for (int64_t r = from; r < to; r++) {
            const bf16 *row = x + r * width;
            __m512 squares = _mm512_setzero_ps();
            for (int64_t c = 0; c < width; c += 16) {
                __mmask16 m = lanes(c, width);
                __m512 v = load_lanes(m, row + c);
                fetch(row + c + AHEAD);
                if (plus) {
                    fetch(plus + r * width + c + AHEAD);
                    v = rounded(_mm512_add_ps(v, load_lanes(m, plus + r * width + c)));
                    store_lanes(sum + r * width + c, m, v);
                }
                squares = _mm512_fmadd_ps(v, v, squares);
            }
            if (plus) row = sum + r * width;
            float total = _mm512_reduce_add_ps(squares);
            scale[r] = 1.0f / sqrtf(total / (float)width + (float)eps);
            __m512 by = _mm512_set1_ps(scale[r]);
            for (int64_t c = 0; c < width; c += 16) {
                __mmask16 m = lanes(c, width);
                __m512 v = rounded(_mm512_mul_ps(load_lanes(m, row + c), by));
                store_lanes(out + r * width + c, m, _mm512_mul_ps(load_lanes(m, w + c), v));
            }
        }
    }
}

// grad = plus + r · (w ∂y − x · r² · mean(w ∂y x)); grad_weight = Σ ∂y x r, a row of `shares`
// [threads, width] for each thread.
void norm_backward(const bf16 *x, const bf16 *w, const float *scale, const bf16 *grad_out,
                   const bf16 *plus, int64_t rows, int64_t width, int64_t threads, bf16 *grad,
                   float *shares) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(rows, 1, &from, &to);
        float *share = shares + omp_get_thread_num() * width;
        memset(share, 0, width * sizeof(float));
        for (int64_t r = from; r < to; r++) {
            const bf16 *row = x + r * width, *top = grad_out + r * width;
            __m512 by = _mm512_set1_ps(scale[r]), dot = _mm512_setzero_ps();
            for (int64_t c = 0; c < width; c += 16) {
                __mmask16 m = lanes(c, width);
                fetch(row + c + AHEAD), fetch(top + c + AHEAD);
                if (plus) fetch(plus + r * width + c + AHEAD);
                __m512 product = _mm512_mul_ps(load_lanes(m, row + c), load_lanes(m, top + c));
                __m512 before = _mm512_maskz_loadu_ps(m, share + c);
                _mm512_mask_storeu_ps(share + c, m, _mm512_fmadd_ps(product, by, before));
                dot = _mm512_fmadd_ps(product, load_lanes(m, w + c), dot);
            }
            float mean = _mm512_reduce_add_ps(dot) / (float)width;
            __m512 grad_x = _mm512_set1_ps(mean * scale[r] * scale[r] * scale[r]);
            for (int64_t c = 0; c < width; c += 16) {
                __mmask16 m = lanes(c, width);
                __m512 g = _mm512_mul_ps(load_lanes(m, top + c), load_lanes(m, w + c));
                g = _mm512_mul_ps(g, by);
                g = _mm512_fnmadd_ps(load_lanes(m, row + c), grad_x, g);
                if (plus) g = _mm512_add_ps(g, load_lanes(m, plus + r * width + c));
                store_lanes(grad + r * width + c, m, g);
            }
        }
    }
}

// Rotary positions of one token's x [heads, d] by its cos and sin [d]; `back`: as the gradient is
// rotated. In place where out is x.
INLINE void rotate_token(const bf16 *x, const bf16 *cos, const bf16 *sin, int64_t heads, int64_t d,
                         int64_t back, bf16 *out) {
    int64_t half = d / 2;
    for (int64_t c = 0; c < half; c += 16) {
        __mmask16 m = lanes(c, half);
        __m512 cos0 = load_lanes(m, cos + c), cos1 = load_lanes(m, cos + half + c);
        __m512 sin0 = load_lanes(m, sin + c), sin1 = load_lanes(m, sin + half + c);
        __m512 sin_b = back ? sin1 : _mm512_sub_ps(_mm512_setzero_ps(), sin0);
        __m512 sin_a = back ? _mm512_sub_ps(_mm512_setzero_ps(), sin0) : sin1;
        for (int64_t at = c; at < heads * d; at += d) {
            __m512 a = load_lanes(m, x + at), b = load_lanes(m, x + at + half);
            __m512 first = _mm512_fmadd_ps(b, sin_b, _mm512_mul_ps(a, cos0));
            __m512 second = _mm512_fmadd_ps(a, sin_a, _mm512_mul_ps(b, cos1));
            store_lanes(out + at, m, first);
            store_lanes(out + at + half, m, second);
        }
    }
}

// The same of x [rows, heads, d] by cos and sin [period, d], row r by row r mod period.
void rotate(const bf16 *x, const bf16 *cos, const bf16 *sin, int64_t rows, int64_t heads, int64_t d,
            int64_t period, int64_t back, int64_t threads, bf16 *out) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to, width = heads * d;
        own_share(rows, 1, &from, &to);
        for (int64_t r = from; r < to; r++) {
            int64_t at = r % period * d;
            rotate_token(x + r * width, cos + at, sin + at, heads, d, back, out + r * width);
        }
    }
}

// Sums over the rows of x[rows, width], a row of `shares` [threads, width] for each thread.
void column_sums(const bf16 *x, int64_t rows, int64_t width, int64_t threads, float *shares) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(rows, 1, &from, &to);
        float *share = shares + omp_get_thread_num() * width;
        for (int64_t c = 0; c < width; c += 64) {
            __m512 sum[4];
            for (int j = 0; j < 4; j++) sum[j] = _mm512_setzero_ps();
            for (int64_t r = from; r < to; r++)
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    int64_t at = c + 16 * j;
                    __mmask16 m = at < width ? lanes(at, width) : 0;
                    sum[j] = _mm512_add_ps(sum[j], load_lanes(m, x + r * width + at));
                }
            for (int j = 0; j < 4 && c + 16 * j < width; j++)
                _mm512_mask_storeu_ps(share + c + 16 * j, lanes(c + 16 * j, width), sum[j]);
        }
    }
}

// 1 / (1 + e^-x), for finite x of at least -87, where it is 0 already in bfloat16's products.
INLINE __m512 sigmoid(__m512 x) {
    __m512 low = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
    __m512 sum = _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(_mm512_sub_ps(_mm512_setzero_ps(), low)));
    __m512 near = _mm512_rcp14_ps(sum);  // and a step of Newton's: within 1e-8
    return _mm512_mul_ps(near, _mm512_fnmadd_ps(sum, near, _mm512_set1_ps(2.0f)));
}

// out[count] = silu(gate) · up
void silu_product(const bf16 *gate, const bf16 *up, int64_t count, int64_t threads, bf16 *out) {
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(count, 512, &from, &to);
        for (int64_t i = from; i < to; i += 16) {
            __mmask16 m = lanes(i, to);
            fetch(gate + i + AHEAD), fetch(up + i + AHEAD);
            __m512 g = load_lanes(m, gate + i), silu = rounded(_mm512_mul_ps(g, sigmoid(g)));
            store_lanes(out + i, m, _mm512_mul_ps(silu, load_lanes(m, up + i)));
        }
    }
}

// With ∂out in `grad_out`: ∂gate, ∂up and, where there is room for it, silu(gate) · up again. ∂up
// may be written over `grad_out`.
void silu_product_backward(const bf16 *gate, const bf16 *up, const bf16 *grad_out, int64_t count,
                           int64_t threads, bf16 *grad_gate, bf16 *grad_up, bf16 *out) {
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel num_threads(threads)
    {
        int64_t from, to;
        own_share(count, 512, &from, &to);
        for (int64_t i = from; i < to; i += 16) {
            __mmask16 m = lanes(i, to);
            fetch(gate + i + AHEAD), fetch(up + i + AHEAD), fetch(grad_out + i + AHEAD);
            __m512 g = load_lanes(m, gate + i), u = load_lanes(m, up + i);
            __m512 top = load_lanes(m, grad_out + i), s = sigmoid(g);
            __m512 silu = _mm512_mul_ps(g, s);
            // silu' = s · (1 + g · (1 − s)) = s + silu · (1 − s)
            __m512 slope = _mm512_fmadd_ps(silu, _mm512_sub_ps(one, s), s);
            silu = rounded(silu);
            store_lanes(grad_gate + i, m, _mm512_mul_ps(_mm512_mul_ps(top, u), slope));
            store_lanes(grad_up + i, m, _mm512_mul_ps(top, silu));
            if (out) store_lanes(out + i, m, _mm512_mul_ps(silu, u));
        }
    }
}

// to[tokens, width]: row r of `from` [count, width] at index[r], zeros elsewhere.
void scatter_rows(const bf16 *from, const int64_t *index, int64_t count, int64_t width,
                 int64_t tokens, int64_t threads, bf16 *to) {
    size_t row = width * sizeof(bf16);
#pragma omp parallel num_threads(threads)
    {
        int64_t first, last;
        own_share(tokens, 1, &first, &last);
        memset(to + first * width, 0, (last - first) * row);
#pragma omp barrier
        own_share(count, 1, &first, &last);
        for (int64_t r = first; r < last; r++) memcpy(to + index[r] * width, from + r * width, row);
    }
}
