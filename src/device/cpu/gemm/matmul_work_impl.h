/* What both ways of splitting a GEMM among threads use (matmul.c, matmul_ahead.c). */
#ifndef QD_DEVICE_CPU_GEMM_MATMUL_WORK_IMPL_H
#define QD_DEVICE_CPU_GEMM_MATMUL_WORK_IMPL_H

#include "device/cpu/gemm/matmul_impl.h"

#include <sched.h>
#include <stdatomic.h>

static inline int64_t count_parts(int64_t size, int64_t part)
{
    return (size + part - 1) / part;
}

static inline int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static inline int64_t larger(int64_t x, int64_t y)
{
    return x > y ? x : y;
}

static inline int64_t round_up(int64_t size, int64_t step)
{
    return count_parts(size, step) * step;
}

/* Narrows the block to lines [begin, begin + size) of op(a) or op(b), except for the packed
 * operand. */
static inline void narrow(qd_gemm_block *g, bool a, int64_t begin, int64_t size)
{
    if (a) {
        g->m += begin;
        g->rows = size;
        if (g->sums)
            g->sums += begin * g->ld_sums;
    } else {
        g->n += begin;
        g->cols = size;
        if (g->sums)
            g->sums += begin;
    }
}

/* Spins until another thread has raised *count to `least`. Threads take items in an order in which
 * each depends on earlier ones only, so the awaited thread is at work. */
static inline void wait_for(_Atomic int32_t *count, int32_t least)
{
    enum { SPINS = 64 /* between yields to other threads */ };
    for (int spin = 1; atomic_load_explicit(count, memory_order_acquire) < least; spin++)
        if (spin % SPINS == 0)
            sched_yield();
}

/* Runs a GEMM whose operands both need packing, if that is worth it and its operands fit the
 * workspace; returns whether it did. */
bool qd_gemm_run_ahead(const qd_cpu *cpu, const qd_cpu_gemm *gemm, const qd_matmul_args *a, bool pairs);

#endif
