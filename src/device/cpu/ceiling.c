#include "device/cpu/ceiling_impl.h"

/* Together about a millisecond: short enough to fall between interruptions. In many pieces, because a core may be slower
 * than the others for a while: the ceiling is what all do together, not the slowest times their number. */
enum { STEPS = 1 << 13, PIECES = 32 };

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
    qd_pool_for(cpu->pool, (int64_t)threads * PIECES, 1, run_loop, cpu);
    *flops = (double)threads * PIECES * STEPS * qd_cpu_ceiling_for(cpu)->flops_per_step;
    return QD_OK;
}
