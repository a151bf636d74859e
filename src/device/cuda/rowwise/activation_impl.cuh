/* Activation functions and their gradients, shared by the activation kernels, casts of their
 * results to fp8, and GEMMs with fused SwiGLU. */
#ifndef QD_DEVICE_CUDA_ROWWISE_ACTIVATION_IMPL_CUH
#define QD_DEVICE_CUDA_ROWWISE_ACTIVATION_IMPL_CUH

#include "device/cuda/math_impl.cuh"

#include <type_traits>

/* x times the logistic function of alpha x, and its slope, for results that are rounded to bf16:
 * few instructions, and an error of up to 3e-6. e^-x may overflow to infinity, and s become 0:
 * nothing here multiplies the two. */
static __device__ __forceinline__ float silu_for_bf16(float x, float &slope, float alpha = 1.0f)
{
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * (-1.442695041f * alpha)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    slope = s * fmaf(alpha * x, 1.0f - s, 1.0f);
    return x * s;
}

/* A gate limited to at most `limit`, for a function of it and its slope: no gradient beyond. A
 * comparison instead of fminf, which would drop a NaN. */
template <typename F> static __device__ __forceinline__ float limit_gate(float x, float limit, float &slope, F function)
{
    const bool beyond = x > limit;
    const float y = function(beyond ? limit : x, slope);
    slope = beyond ? 0.0f : slope;
    return y;
}

/* The other factor of a clamped SwiGLU. */
static __device__ __forceinline__ float limit_up(float x, float limit, float &slope)
{
    slope = x > limit || x < -limit ? 0.0f : 1.0f;
    return (x > limit ? limit : x < -limit ? -limit : x) + 1.0f;
}

/* 0.5 * (1 + tanh u) is the logistic function of 2u, and 2u = x * (TWO_B + TWO_BK x^2)
 * with TWO_B = 2 sqrt(2/pi), TWO_BK = 0.044715 * TWO_B. */
#define TWO_B 1.5957691216f
#define TWO_BK 0.0713548163f

/* GELU (tanh form) and its slope for results that are rounded to bf16, as silu_for_bf16. Where x is
 * so large that a multiple of it overflows, x * s or 1 - s is 0, and multiplied first. */
static __device__ __forceinline__ float gelu_for_bf16(float x, float &slope)
{
    const float squared = fminf(x * x, 1e6f);
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * fmaf(squared, -1.442695041f * TWO_BK, -1.442695041f * TWO_B)));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    const float y = x * s;
    slope = fmaf(y * (1.0f - s), fmaf(squared, 3.0f * TWO_BK, TWO_B), s);
    return y;
}

/* 1 / (1 + e^-x), and its complement. The bound keeps the divisor finite; callers multiply by x,
 * which keeps non-finite values visible. */
static __device__ __forceinline__ float logistic(float x, float &complement)
{
    float e = expf(fminf(80.0f, -x));
    float s = __fdividef(1.0f, 1.0f + e);
    complement = e * s;
    return s;
}

/* x times the logistic function of alpha x. T: storage type of results. */
template <typename T> static __device__ __forceinline__ float silu(float x, float &slope, float alpha)
{
    if constexpr (std::is_same_v<T, bf16>) {
        return silu_for_bf16(x, slope, alpha);
    } else {
        float complement, s = logistic(alpha * x, complement);
        slope = s + alpha * x * (s * complement);
        return x * s;
    }
}

/* Whether an activation is the factor of a second input, `up`. */
template <int KIND> struct gated {
    enum { value = KIND == QD_ACT_SWIGLU || KIND == QD_ACT_SWIGLU_CLAMPED || KIND == QD_ACT_GEGLU_TANH || KIND == QD_ACT_GEGLU };
};

/* The function of x, of the gate if there is one. T: storage type of results. */
template <int KIND, typename T> static __device__ __forceinline__ float activate(const qd_activation_args &a, float x, float &slope)
{
    if constexpr (KIND == QD_ACT_GELU || KIND == QD_ACT_GEGLU) {
        float p = normcdff(x);
        slope = p + x * (0.398942280f * expf(-0.5f * (x * x)));
        return x * p;
    } else if constexpr ((KIND == QD_ACT_GELU_TANH || KIND == QD_ACT_GEGLU_TANH) && std::is_same_v<T, bf16>) {
        return gelu_for_bf16(x, slope);
    } else if constexpr (KIND == QD_ACT_GELU_TANH || KIND == QD_ACT_GEGLU_TANH) {
        float squared = fminf(x * x, 1e6f), complement; /* bounded: a finite x must not give 0 times infinity */
        float s = logistic(x * (TWO_B + TWO_BK * squared), complement);
        slope = s + x * (s * complement) * (TWO_B + 3.0f * TWO_BK * squared);
        return x * s;
    } else if constexpr (KIND == QD_ACT_SWIGLU_CLAMPED) {
        return limit_gate(x, a.limit, slope, [&](float gate, float &d) { return silu<T>(gate, d, a.alpha); });
    } else {
        return silu<T>(x, slope, 1.0f);
    }
}

/* The activation of N inputs at (row, col) of its result, in fp32. Forward: y. Backward: also the
 * gradients of the inputs: x, and of a gated activation x for the gate and up for the other
 * factor. */
template <int KIND, typename T, int N, bool BACKWARD>
static __device__ __forceinline__ void activation_values(const qd_activation_args &a, int64_t row, int64_t col, float (&x)[N],
                                                         float (&up)[N], float (&y)[N])
{
    constexpr bool GATED = gated<KIND>::value;
    const int64_t y_at = row * a.cols + col, x_at = GATED ? y_at + row * a.cols : y_at;
    float d[N], slope, up_slope = 1.0f;
    load<N>((const T *)a.x + x_at, x);
    if constexpr (GATED)
        load<N>((const T *)a.x + x_at + a.cols, up);
    if constexpr (BACKWARD)
        load<N>((const T *)a.dy + y_at, d);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float value = activate<KIND, T>(a, x[i], slope);
        if constexpr (KIND == QD_ACT_SWIGLU_CLAMPED)
            up[i] = limit_up(up[i], a.limit, up_slope);
        y[i] = GATED ? value * up[i] : value;
        if constexpr (BACKWARD && GATED) {
            x[i] = d[i] * up[i] * slope;
            up[i] = d[i] * value * up_slope;
        } else if constexpr (BACKWARD) {
            x[i] = d[i] * slope;
        }
    }
}

#endif
