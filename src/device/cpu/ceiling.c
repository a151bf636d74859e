#include "device/cpu/ceiling_impl.h"

enum { STEPS = 1 << 18 }; /* about a millisecond: short enough to fall between interruptions */

static void run_loop(void *context, int64_t begin, int64_t end, int thread)
{
    qd_cpu *cpu = context;
    float *sink = qd_cpu_workspace(cpu, thread);
    for (int64_t i = begin; i < end; i++)
        *sink = qd_cpu_ceiling_for(cpu)->fma(STEPS);
}

qd_status qd_cpu_run_fma(qd_stream *stream, double *flops)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    int threads = qd_pool_threads(cpu->pool);
    qd_pool_for(cpu->pool, threads, 1, run_loop, cpu);
    *flops = (double)threads * STEPS * qd_cpu_ceiling_for(cpu)->flops_per_step;
    return QD_OK;
}
