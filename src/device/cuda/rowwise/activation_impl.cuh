/* SiLU for bf16 results, shared by the activation kernels and GEMMs with fused SwiGLU. */
#ifndef QD_DEVICE_CUDA_ROWWISE_ACTIVATION_IMPL_CUH
#define QD_DEVICE_CUDA_ROWWISE_ACTIVATION_IMPL_CUH

#include "device/cuda/math_impl.cuh"

/* x times the logistic function of x, and its slope, for results that are rounded to bf16: few
 * instructions, and an error of up to 3e-6. e^-x may overflow to infinity, and s become 0: nothing
 * here multiplies the two. */
static __device__ __forceinline__ float silu_for_bf16(float x, float &slope)
{
    float e, s;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(x * -1.442695041f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.0f + e));
    slope = s * fmaf(x, 1.0f - s, 1.0f);
    return x * s;
}

#endif
