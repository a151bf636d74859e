/* Loops that measure the throughput of multiply-adds, dot products and AMX tiles, and how many
 * instructions a core issues. */
#include "device/cpu/gemm/ceiling_impl.h"
#include "device/cpu/simd_impl.h"

#if defined(__x86_64__) && QD_VF == 16
#include "device/cpu/amx_registers_impl.h"
#endif

/* Enough to hide the latency, few enough to fit in registers. */
#if defined(__aarch64__)
enum { CHAINS = 24 };
#else
enum { CHAINS = 12 };
#endif

static float fma_loop(int64_t steps)
{
    const float x = 1e-9f;
    vf sum[CHAINS], y = vf_set(0.5f), all = {0};
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++)
        sum[i] = vf_set((float)i);
    for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++)
#if defined(__aarch64__) /* fmla adds to its destination; the other form would need copies */
            sum[i] = vf_add_product(sum[i], vf_factor_of(x), y);
#else
            sum[i] = sum[i] * y + x;
#endif
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++)
        all += sum[i];
    return vf_sum(all);
}

#if defined(__x86_64__) && QD_VF == 16
/* Called only where the processor has AVX512-BF16, for which this file is not compiled. */
static float dot_loop(int64_t steps)
{
    vf sum[CHAINS], x = vf_set(0.25f), all = {0}; /* pairs (0, 0.25) */
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++)
        sum[i] = vf_set((float)i);
    for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 24
        for (int i = 0; i < CHAINS; i++)
            __asm__("vdpbf16ps %1, %1, %0" : "+v"(sum[i]) : "v"(x));
#pragma GCC unroll 24
    for (int i = 0; i < CHAINS; i++)
        all += sum[i];
    return vf_sum(all);
}

/* Called only where the processor has AMX and the kernel allows this process to use it. Six sums: a
 * TDPBF16PS starts every 16 cycles and takes 52. */
static float amx_loop(int64_t steps)
{
    vf tile[QD_VF], sum; /* (16, 16) pairs of k, or fp32 sums; ordinary numbers, pairs (0, 0.25) */
    for (int i = 0; i < QD_VF; i++)
        tile[i] = vf_set(0.25f);
    amx_begin();
    AMX_ZERO(0);
    AMX_ZERO(1);
    AMX_ZERO(2);
    AMX_ZERO(3);
    AMX_ZERO(4);
    AMX_ZERO(5);
    AMX_LOAD(6, tile, 64);
    AMX_LOAD(7, tile, 64);
    for (int64_t s = 0; s < steps; s++) {
        AMX_DOT(0, 6, 7);
        AMX_DOT(1, 6, 7);
        AMX_DOT(2, 6, 7);
        AMX_DOT(3, 6, 7);
        AMX_DOT(4, 6, 7);
        AMX_DOT(5, 6, 7);
    }
    AMX_STORE(0, tile, 64);
    sum = tile[0];
    AMX_STORE(5, tile, 64);
    sum += tile[0];
    amx_end();
    return vf_sum(sum);
}
enum { AMX_FLOPS = 6 * 2 * 16 * 16 * 32 }; /* of a step */
#else
#define dot_loop NULL
#define amx_loop NULL
enum { AMX_FLOPS = 0 };
#endif

enum { ADD_CHAINS = 8, ADDS = 4 }; /* chains, and additions to each in a step */

static int64_t add_loop(int64_t steps)
{
    int64_t sum[ADD_CHAINS] = {0}, all = 0;
    for (int64_t s = 0; s < steps; s++)
#pragma GCC unroll 4
        for (int j = 0; j < ADDS; j++)
#pragma GCC unroll 8
            for (int i = 0; i < ADD_CHAINS; i++) {
                sum[i] += 1;
                QD_HIDE(sum[i]); /* else the additions would be combined */
            }
#pragma GCC unroll 8
    for (int i = 0; i < ADD_CHAINS; i++)
        all += sum[i];
    return all;
}

const qd_cpu_ceiling QD_ISA_NAME(qd_cpu_ceiling) = {
    .flops_per_step = 2 * CHAINS * QD_VF, .dot_flops_per_step = 4 * CHAINS * QD_VF,
    .amx_flops_per_step = AMX_FLOPS, .adds_per_step = ADD_CHAINS * ADDS,
    .fma = fma_loop, .dot = dot_loop, .amx = amx_loop, .add = add_loop};
