/* SwiGLU for bf16 results, shared by the activation kernels and GEMMs with fused SwiGLU. */
#ifndef QD_DEVICE_CUDA_ROWWISE_ACTIVATION_IMPL_CUH
#define QD_DEVICE_CUDA_ROWWISE_ACTIVATION_IMPL_CUH

#include "device/cuda/math_impl.cuh"

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

#endif
