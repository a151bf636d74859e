/* Routing: what route.cu and route_plan.cu share. */
#ifndef QD_DEVICE_CUDA_EXPERTS_ROUTE_IMPL_CUH
#define QD_DEVICE_CUDA_EXPERTS_ROUTE_IMPL_CUH

#include "device/cuda/math_impl.cuh"

enum { EXPERTS_MOST = 512 };

/* Maps floats to unsigned integers of the same order; a value other than NaN never gives 0 or 1. */
static __device__ __forceinline__ unsigned order_of(float x)
{
    unsigned bits = __float_as_uint(x == 0.0f ? 0.0f : x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

#endif
