/* The loop that measures what the multiply-add units can do. */
#include "device/cpu/ceiling_impl.h"
#include "device/cpu/simd_impl.h"

enum { CHAINS = 12 }; /* enough to hide the latency, few enough for 16 registers */

static float fma_loop(int64_t steps)
{
    vf sum[CHAINS], x = vf_set(1e-9f), y = vf_set(0.5f), all = {0};
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++)
        sum[i] = vf_set((float)i);
    for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++)
            sum[i] = sum[i] * y + x;
#pragma GCC unroll 12
    for (int i = 0; i < CHAINS; i++)
        all += sum[i];
    return vf_sum(all);
}

const qd_cpu_ceiling QD_ISA_NAME(qd_cpu_ceiling) = {.flops_per_step = 2 * CHAINS * QD_VF, .fma = fma_loop};
