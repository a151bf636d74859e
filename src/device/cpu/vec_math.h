/* Exponential, logistic and normal distribution functions without branches or calls, so that a loop over them becomes
 * vector code in the *_isa.c files (-O3 -fno-math-errno -fno-trapping-math). Errors are stated against the exact value;
 * tests/ops/test_activation.c measures them. Not a number stays not a number. */
#ifndef QD_DEVICE_CPU_VEC_MATH_H
#define QD_DEVICE_CPU_VEC_MATH_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__) || defined(__clang__)
#define QD_ALWAYS_INLINE static inline __attribute__((always_inline, unused))
#else
#define QD_ALWAYS_INLINE static inline
#endif

/* Iterations of the next loop do not depend on each other, even where its arrays are the same one (in place). */
#if defined(__clang__)
#define QD_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define QD_INDEPENDENT _Pragma("GCC ivdep")
#else
#define QD_INDEPENDENT
#endif

QD_ALWAYS_INLINE uint32_t qd_vec_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

QD_ALWAYS_INLINE float qd_vec_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* e^x, relative error below 1.2e-7. 0 below x = -86.9 (the exact value is under 1.8e-38), infinity above 88.72. */
QD_ALWAYS_INLINE float qd_vec_exp(float x)
{
    /* Bounded so that 2^(n-1) below is a normal number; comparisons are written so that not-a-number passes. */
    float t = x < -87.0f ? -87.0f : x;
    t = t > 89.0f ? 89.0f : t;
    /* Adding 1.5 * 2^23 leaves the nearest integer n of t / ln 2 in the low bits. */
    float shifted = t * 1.44269504f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = t - n * 0.693359375f; /* ln 2 in two parts; the first times n is exact */
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* 2^(n-1), doubled after the product: n may be 128, where 2^n alone would overflow. */
    float scale = qd_vec_float((qd_vec_bits(shifted) - 0x4b400000u + 126u) << 23);
    float y = p * scale * 2.0f;
    return x < -86.9f ? 0.0f : y;
}

/* 1 / (1 + e^-x), relative error below 3e-7 for x > -80; 1.8e-35 below, so that its products with x vanish in practice
 * while infinities remain visible. *complement = 1 - result, of the same relative error for x < 80. */
QD_ALWAYS_INLINE float qd_vec_logistic(float x, float *complement)
{
    float t = x < -80.0f ? -80.0f : x;
    float e = qd_vec_exp(-t);
    float s = 1.0f / (1.0f + e);
    *complement = e * s;
    return s;
}

/* The standard normal distribution's cumulative function, relative error below 5e-7 for |x| < 2 and 3e-8 * x^2 + 5e-7
 * beyond (the rounding of x^2), and its density in *density. Below x = -13 the result is 0. */
QD_ALWAYS_INLINE float qd_vec_normal_cdf(float x, float *density)
{
    float a = x < 0.0f ? -x : x;
    float e = qd_vec_exp(-0.5f * (x * x));
    /* Phi(-a) = e^(-a^2/2) * t * Q(t) / 2 with t = 1 / (1 + z/2), z = a / sqrt 2: Q is a minimax polynomial for the
     * scaled complementary error function over t, 0 <= z <= 9.5, relative error 4.2e-8. */
    float t = 1.0f / (1.0f + a * 0.35355339f);
    float q = -0.0588906216f;
    q = q * t + 0.283701207f;
    q = q * t - 0.485382115f;
    q = q * t + 0.275976311f;
    q = q * t - 0.0251763982f;
    q = q * t + 0.202069285f;
    q = q * t + 0.243261147f;
    q = q * t + 0.282353465f;
    q = q * t + 0.282087677f;
    float tail = 0.5f * (e * (q * t));
    *density = 0.398942280f * e;
    return x < 0.0f ? tail : 1.0f - tail;
}

#endif
