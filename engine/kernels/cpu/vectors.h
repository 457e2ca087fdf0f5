// Vectors of sixteen numbers: bfloat16 in and out, products, sums, exponentials, transposes (AVX512).

#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
typedef uint32_t word;  // two numbers that one instruction multiplies with two others

#define INLINE static inline __attribute__((always_inline))

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE __m512 widened(__m256i v) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}

INLINE __m256i narrowed(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

INLINE __m512 rounded(__m512 v) { return widened(narrowed(v)); }

INLINE __m512 load16(const bf16 *p) { return widened(_mm256_loadu_si256((const __m256i *)p)); }

INLINE void store16(bf16 *p, __m512 v) { _mm256_storeu_si256((__m256i *)p, narrowed(v)); }

// The lanes of what is left of a row from `at` on, up to sixteen.
INLINE __mmask16 lanes(int64_t at, int64_t end) {
    return end - at < 16 ? (__mmask16)((1u << (end - at)) - 1) : 0xFFFF;
}

INLINE __m512 load_lanes(__mmask16 m, const bf16 *p) {
    return widened(_mm256_maskz_loadu_epi16(m, p));
}

INLINE void store_lanes(bf16 *p, __mmask16 m, __m512 v) {
    _mm256_mask_storeu_epi16(p, m, narrowed(v));
}

// Numbers from which on a stream is fetched before it is needed: it is waited for otherwise.
#define AHEAD 256

INLINE void fetch(const void *p) { _mm_prefetch((const char *)p, _MM_HINT_T0); }

// Numbers that are the low halves of sixteen words, and the high ones.
INLINE __m512 low_halves(__m512i words) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
}

INLINE __m512 high_halves(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xFFFF0000)));
}

// sum + low(a) · low(b) + high(a) · high(b) of the words in each lane. With MULTIPLY_ADD by float32's
// instructions, on processors that multiply these at twice the rate and more.
INLINE __m512 add_products(__m512 sum, __m512i a, __m512i b) {
#ifdef MULTIPLY_ADD
    sum = _mm512_fmadd_ps(low_halves(a), low_halves(b), sum);
    return _mm512_fmadd_ps(high_halves(a), high_halves(b), sum);
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
}

INLINE float single(bf16 v) {
    uint32_t bits = (uint32_t)v << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

// Within 2e-7 of e^x, relatively; the polynomial is Cephes' expf.
INLINE __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), x);  // a NaN stays
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

// Per 128-bit lane, what each of four vectors sums up to there.
INLINE __m512 lane_sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                         _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}

// The sums of sixteen vectors, in order.
INLINE __m512 sums(const __m512 v[16]) {
    __m512 a = lane_sums(v[0], v[1], v[2], v[3]), b = lane_sums(v[4], v[5], v[6], v[7]);
    __m512 c = lane_sums(v[8], v[9], v[10], v[11]), d = lane_sums(v[12], v[13], v[14], v[15]);
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xDD));
    return _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
}

INLINE int64_t upto(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Columns of up to 16 rows of up to 16 words, `step` apart, to rows that are `to_step` apart.
INLINE void transpose16(const word *from, int64_t step, int64_t rows, int64_t columns, word *to,
                        int64_t to_step) {
    __m512i r[16], t[16];
    __mmask16 there = lanes(0, columns), out = lanes(0, rows);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        r[i] = _mm512_maskz_loadu_epi32(i < rows ? there : 0, from + (i < rows ? i : 0) * step);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // of four rows, column 4 · lane + k to r[i + k]
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
        __m512i even = _mm512_shuffle_i32x4(r[k], r[4 + k], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(r[k], r[4 + k], 0xDD);
        __m512i even2 = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0x88);
        __m512i odd2 = _mm512_shuffle_i32x4(r[8 + k], r[12 + k], 0xDD);
        t[k] = _mm512_shuffle_i32x4(even, even2, 0x88);
        t[4 + k] = _mm512_shuffle_i32x4(odd, odd2, 0x88);
        t[8 + k] = _mm512_shuffle_i32x4(even, even2, 0xDD);
        t[12 + k] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        if (i < columns) _mm512_mask_storeu_epi32(to + i * to_step, out, t[i]);
}
