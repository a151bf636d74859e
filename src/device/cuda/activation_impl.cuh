/* Activations of elements, which passes of their own and products share. */
#ifndef QD_DEVICE_CUDA_ACTIVATION_IMPL_CUH
#define QD_DEVICE_CUDA_ACTIVATION_IMPL_CUH

#include "device/cuda/math_impl.cuh"

/* 1 / (1 + e^-x), and one minus it. The bound keeps the quotient's divisor finite; the callers multiply by x, which keeps
 * what is not finite visible. */
static __device__ __forceinline__ float logistic(float x, float &complement)
{
    float e = expf(fminf(80.0f, -x));
    float s = __fdividef(1.0f, 1.0f + e);
    complement = e * s;
    return s;
}

/* x times the logistic function of x, and its slope. e^-x may become infinite, and s 0: nothing here multiplies the two. */
static __device__ __forceinline__ float silu(float x, float &slope)
{
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.442695041f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    slope = s * fmaf(x, 1.0f - s, 1.0f);
    return x * s;
}

#endif
