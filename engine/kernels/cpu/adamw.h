// AdamW in one pass: gradients are scaled, and the rounded weights written, on the way.

#pragma once

#include "elementwise.h"

typedef struct {
    double factor;  // of the gradient
    double rate, beta1, beta2, eps, decay;
    double correction1, correction2;  // 1 − beta^step
} Adam;

typedef struct {
    const float *gradient;
    float *master, *m, *v;
    bf16 *working;
    int64_t count;
} Trained;

// master −= rate · (decay · master + m / correction1 / (√(v / correction2) + eps)); working = master
static void adamw_one(const Adam *a, const Trained *one) {
    const float *gradient = one->gradient;
    float *master = one->master, *m = one->m, *v = one->v;
    const __m512 factor = _mm512_set1_ps((float)a->factor), eps = _mm512_set1_ps((float)a->eps);
    const __m512 beta1 = _mm512_set1_ps((float)a->beta1), beta2 = _mm512_set1_ps((float)a->beta2);
    const __m512 new1 = _mm512_set1_ps((float)(1.0 - a->beta1));
    const __m512 new2 = _mm512_set1_ps((float)(1.0 - a->beta2));
    const __m512 decay_factor = _mm512_set1_ps((float)(1.0 - a->rate * a->decay));
    const __m512 size = _mm512_set1_ps((float)(a->rate / a->correction1));
    const __m512 root = _mm512_set1_ps((float)(1.0 / sqrt(a->correction2)));
    int64_t from, to;
    own_share(one->count, 64, &from, &to);
    for (int64_t i = from; i < to; i += 16) {
        __mmask16 here = lanes(i, to);
        fetch(gradient + i + AHEAD);
        fetch(m + i + AHEAD);
        fetch(v + i + AHEAD);
        fetch(master + i + AHEAD);
        __m512 g = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, gradient + i), factor);
        __m512 x = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, m + i), beta1);
        __m512 y = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, v + i), beta2);
        x = _mm512_fmadd_ps(g, new1, x);
        y = _mm512_fmadd_ps(_mm512_mul_ps(g, g), new2, y);
        __m512 below = _mm512_fmadd_ps(_mm512_sqrt_ps(y), root, eps);
        __m512 w = _mm512_mul_ps(_mm512_maskz_loadu_ps(here, master + i), decay_factor);
        w = _mm512_fnmadd_ps(size, _mm512_div_ps(x, below), w);
        _mm512_mask_storeu_ps(m + i, here, x);
        _mm512_mask_storeu_ps(v + i, here, y);
        _mm512_mask_storeu_ps(master + i, here, w);
        store_lanes(one->working + i, here, w);
    }
}

// Of `count` tensors.
void adamw(const Adam *a, const Trained *tensors, int64_t count, int64_t threads) {
#pragma omp parallel num_threads(threads)
    for (int64_t t = 0; t < count; t++) adamw_one(a, tensors + t);
}
