/* Dot products of bf16 pairs on vectors: VDPBF16PS, or its emulation. Included by *_isa.c files.
 * For instruction sets without either, it stands in for code that the device never chooses. */
#ifndef QD_DEVICE_CPU_DOTS_IMPL_H
#define QD_DEVICE_CPU_DOTS_IMPL_H

#ifdef QD_ISA_emulated
#include "device/cpu/dots_emulated_impl.h"
#else
#include "device/cpu/simd_impl.h"

/* The instruction treats subnormal numbers as 0 whatever the mode. */
QD_INLINE unsigned flush_subnormals(void)
{
    return 0;
}

QD_INLINE void restore_subnormals(unsigned saved)
{
    (void)saved;
}

/* sum + x · y. Called only where the processor has AVX512-BF16, for which no file is compiled. */
QD_INLINE vf add_dot(vf sum, vf_factor x, vf y)
{
#if defined(__AVX512F__)
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
#else
    return vf_add_product(sum, x, y);
#endif
}
#endif

#endif
