/* Math functions for *_isa.c files, beyond vf_exp. Errors are relative to the exact value;
 * tests/ops/test_activation.c measures them through the kernels. NaN stays NaN. */
#ifndef QD_DEVICE_CPU_VEC_MATH_H
#define QD_DEVICE_CPU_VEC_MATH_H

#include "device/cpu/simd_impl.h"

/* Runs the block once per vector of [0, count): element index i, lanes n. n is a compile-time
 * constant in all but the last, partial vector, so loads and stores of n lanes cost nothing
 * extra. */
#define QD_FOR_VECTORS(i, n, count, ...)                                                                    \
    do {                                                                                                    \
        int64_t i = 0;                                                                                      \
        for (; i + QD_VF <= (count); i += QD_VF) {                                                          \
            enum { n = QD_VF };                                                                             \
            __VA_ARGS__                                                                                     \
        }                                                                                                   \
        if (i < (count)) {                                                                                  \
            const int n = (int)((count)-i);                                                                 \
            __VA_ARGS__                                                                                     \
        }                                                                                                   \
    } while (0)

QD_INLINE vf vec_load(const void *p, int64_t i, int n, qd_dtype dtype)
{
    return n == QD_VF ? vf_load_as(p, i, dtype) : vf_load_n_as(p, i, n, dtype);
}

QD_INLINE void vec_store(void *p, int64_t i, vf v, int n, qd_dtype dtype)
{
    if (n == QD_VF)
        vf_store_as(p, i, v, dtype);
    else
        vf_store_n_as(p, i, v, n, dtype);
}

/* fp32 values split into a bf16 half and the low 16 bits (base/half.h). */
QD_INLINE vf vec_load_parts(const uint16_t *half, const int16_t *rest, int64_t i, int n)
{
    vh upper = {0}, lower = {0};
    memcpy(&upper, half + i, (size_t)n * 2);
    memcpy(&lower, rest + i, (size_t)n * 2);
    return vf_join(upper, lower);
}

QD_INLINE void vec_store_parts(uint16_t *half, int16_t *rest, int64_t i, vf v, int n)
{
    vh upper = vf_to_bf16(v), lower = vf_rest(v, upper);
    memcpy(half + i, &upper, (size_t)n * 2);
    memcpy(rest + i, &lower, (size_t)n * 2);
}

/* v in the first n lanes, `other` in the remaining ones. */
QD_INLINE vf vec_first(vf v, int n, float other)
{
    if (n == QD_VF)
        return v;
    vf w = vf_set(other);
    memcpy(&w, &v, (size_t)n * 4);
    return w;
}

/* 1 / x, relative error below 1.2e-7, for x from 1 to 1e36: the range that the functions below
 * need. */
QD_INLINE vf vec_reciprocal(vf x)
{
#if defined(__AVX512F__)
    vf y = (vf)_mm512_rcp14_ps((__m512)x); /* 14 bits; one Newton iteration doubles them */
    return y * (2.0f - x * y);
#else
    return 1.0f / x;
#endif
}

/* Correctly rounded. The loop compiles to one instruction where the machine has it. */
QD_INLINE vf vec_sqrt(vf x)
{
    float lanes[QD_VF];
    memcpy(lanes, &x, sizeof x);
    for (int i = 0; i < QD_VF; i++)
        lanes[i] = __builtin_sqrtf(lanes[i]);
    memcpy(&x, lanes, sizeof x);
    return x;
}

/* 1 / (1 + e^-x), relative error below 3e-7 for x > -80; 1.8e-35 below, so that x times it vanishes
 * in practice and infinities stay visible. *complement = 1 - result, with the same relative error
 * for x < 80. */
QD_INLINE vf vec_logistic(vf x, vf *complement)
{
    vf e = vf_exp(vf_min(vf_set(80.0f), -x)); /* -x second: vf_min returns it if it is NaN */
    vf s = vec_reciprocal(1.0f + e);
    *complement = e * s;
    return s;
}

/* Absolute error below 2e-7, and relative error below 4e-7; NaN stays NaN. */
QD_INLINE vf vec_tanh(vf x)
{
    vf a = vf_max(vf_min(vf_set(10.0f), x), vf_set(-10.0f)), y = x * x;
    a = vf_select(x == x, a, x);
    vf e = vf_exp(2.0f * a), p = vf_set(62.0f / 2835);
    p = p * y - 17.0f / 315;
    p = p * y + 2.0f / 15;
    p = p * y - 1.0f / 3;
    return vf_select((x < 0.25f) & (x > -0.25f), x + x * (y * p), (e - 1.0f) / (e + 1.0f));
}

/* CDF of the standard normal distribution, relative error below 5e-7 + 3e-8 x^2 (the rounding of
 * x^2), and its density in *density. 0 below x = -13.2. */
QD_INLINE vf vec_normal_cdf(vf x, vf *density)
{
    vf a = vf_min(vf_max(x, -x), vf_set(1e6f));
    vf e = vf_exp(-0.5f * (x * x));
    /* Phi(-a) = e^(-a^2/2) * t * Q(t) / 2 with t = 1 / (1 + z/2), z = a / sqrt 2: Q is a minimax
     * polynomial for the scaled complementary error function over t, 0 <= z <= 9.5, relative error
     * 4.2e-8. */
    vf t = vec_reciprocal(1.0f + a * 0.35355339f);
    vf q = vf_set(-0.0588906216f);
    q = q * t + 0.283701207f;
    q = q * t - 0.485382115f;
    q = q * t + 0.275976311f;
    q = q * t - 0.0251763982f;
    q = q * t + 0.202069285f;
    q = q * t + 0.243261147f;
    q = q * t + 0.282353465f;
    q = q * t + 0.282087677f;
    vf tail = 0.5f * (e * (q * t));
    *density = 0.398942280f * e;
    return vf_select(x < 0.0f, tail, 1.0f - tail);
}

#endif
