/* VDPBF16PS in multiply-adds, for tests on machines without it. */
#ifndef QD_DEVICE_CPU_DOTS_EMULATED_IMPL_H
#define QD_DEVICE_CPU_DOTS_EMULATED_IMPL_H

#include "device/cpu/simd_impl.h"

/* The instruction takes subnormal numbers for 0, unlike the code around it. The code between the
 * two calls must be a function that is not inlined. */
QD_INLINE unsigned flush_subnormals(void)
{
    const unsigned saved = __builtin_ia32_stmxcsr(), flags = 0x8040; /* FTZ, DAZ */
    __builtin_ia32_ldmxcsr(saved | flags);
    return saved;
}

QD_INLINE void restore_subnormals(unsigned saved)
{
    __builtin_ia32_ldmxcsr(saved);
}

/* sum + x · y of bf16 pairs: two multiply-adds, the second element first. */
QD_INLINE vf add_dot(vf sum, vf x, vf y)
{
    const vu high = (vu){0} + 0xffff0000u;
    sum = vf_add_product(sum, (vf)((vu)x & high), (vf)((vu)y & high));
    return vf_add_product(sum, (vf)((vu)x << 16), (vf)((vu)y << 16));
}

#endif
