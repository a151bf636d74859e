/* The boundary between ceiling.c and ceiling_isa.c (measuring loops, vectorized). */
#ifndef QD_DEVICE_CPU_GEMM_CEILING_IMPL_H
#define QD_DEVICE_CPU_GEMM_CEILING_IMPL_H

#include "device/cpu/cpu_impl.h"

typedef struct qd_cpu_ceiling {
    int flops_per_step, dot_flops_per_step, amx_flops_per_step, adds_per_step;
    float (*fma)(int64_t steps); /* independent chains of multiply-adds in registers; returns their sum */
    float (*dot)(int64_t steps); /* the same with dot products of bf16 pairs; NULL if the instruction set has none */
    float (*amx)(int64_t steps); /* the same with tiles of bf16 pairs; NULL if the instruction set has none */
    int64_t (*add)(int64_t steps); /* the same with integer additions, more independent ones than a core can issue */
} qd_cpu_ceiling;
QD_CPU_TABLE(qd_cpu_ceiling, qd_cpu_ceiling)

#endif
