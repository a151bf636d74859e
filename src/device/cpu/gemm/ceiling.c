/* Measures the peak throughput of the CPU: multiply-adds, dot products, AMX tiles and integer
 * additions in registers, and GEMM panels in cache. */
#include "base/clock.h"
#include "device/cpu/gemm/ceiling_impl.h"
#include "device/cpu/gemm/matmul_impl.h"

#include <string.h>

/* About half a millisecond in total: short enough to run between interrupts. In many pieces,
 * because a core may be slower than the others for a while: the ceiling is what all threads achieve
 * together, not the slowest thread times their number. Pieces of a few microseconds, because
 * threads without work wait for the last one. */
enum { STEPS = 1 << 11, AMX_STEPS = 1 << 7, PIECES = 128, ADD_STEPS = 1 << 10, ADD_PIECES = 64 };

static void run_fma(void *context, int64_t begin, int64_t end, int thread)
{
    float *sink = qd_cpu_workspace(context, thread);
    for (int64_t i = begin; i < end; i++)
        *sink = qd_cpu_ceiling_for(context)->fma(STEPS);
}

#if defined(__x86_64__)
static void run_dots(void *context, int64_t begin, int64_t end, int thread)
{
    float *sink = qd_cpu_workspace(context, thread);
    for (int64_t i = begin; i < end; i++)
        *sink = qd_cpu_ceiling_for(context)->dot(STEPS);
}

static void run_amx(void *context, int64_t begin, int64_t end, int thread)
{
    float *sink = qd_cpu_workspace(context, thread);
    for (int64_t i = begin; i < end; i++)
        *sink = qd_cpu_ceiling_for(context)->amx(AMX_STEPS);
}
#endif

static void run_adds(void *context, int64_t begin, int64_t end, int thread)
{
    int64_t *sink = qd_cpu_workspace(context, thread);
    for (int64_t i = begin; i < end; i++)
        *sink = qd_cpu_ceiling_for(context)->add(ADD_STEPS);
}

/* Runs `pieces` pieces per thread; returns their total number. */
static double run_pieces(qd_cpu *cpu, int64_t pieces, void (*piece)(void *context, int64_t begin, int64_t end, int thread))
{
    int64_t all = qd_pool_threads(cpu->pool) * pieces;
    qd_pool_for(cpu->pool, all, 1, piece, cpu);
    return (double)all;
}

qd_status qd_cpu_run_fma(qd_stream *stream, double *flops)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    const double steps = run_pieces(cpu, PIECES, run_fma) * STEPS;
    *flops = steps * qd_cpu_ceiling_for(cpu)->flops_per_step;
    return QD_OK;
}

qd_status qd_cpu_run_bf16(qd_stream *stream, qd_bf16_unit unit, double *flops)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    *flops = 0.0;
#if defined(__x86_64__)
    const qd_cpu_ceiling *loops = qd_cpu_ceiling_for(cpu);
    /* Processors with AMX have dot products too; its emulation uses multiply-adds. */
    if (unit == QD_BF16_DOTS && (cpu->isa == QD_CPU_avx512bf16 || cpu->isa == QD_CPU_amx))
        *flops = run_pieces(cpu, PIECES, run_dots) * STEPS * loops->dot_flops_per_step;
    if (unit == QD_BF16_AMX && cpu->isa == QD_CPU_amx)
        *flops = run_pieces(cpu, PIECES, run_amx) * AMX_STEPS * loops->amx_flops_per_step;
#else
    (void)cpu;
    (void)unit;
#endif
    return QD_OK;
}

qd_status qd_cpu_run_adds(qd_stream *stream, double *adds)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    const double steps = run_pieces(cpu, ADD_PIECES, run_adds) * ADD_STEPS;
    *adds = steps * qd_cpu_ceiling_for(cpu)->adds_per_step;
    return QD_OK;
}

/* A GEMM that stays in the L2 cache. */
enum { TILE_ROWS = 96, TILE_COLS = 96, TILE_K = 768, TILE_PIECES = 16, TILE_FLOATS = TILE_ROWS * TILE_COLS + 3 * 96 * TILE_K };
_Static_assert(TILE_FLOATS * 4 <= QD_CPU_WORKSPACE_BYTES, "the operands must fit the workspace");

static void multiply_panels(qd_cpu *cpu, bool pairs, int64_t begin, int64_t end, int thread)
{
    const qd_dtype dtype = pairs ? QD_BF16 : QD_F32;
    const int64_t k = qd_gemm_element(TILE_K, pairs);
    float *c = qd_cpu_workspace(cpu, thread), *a = c + TILE_ROWS * TILE_COLS, *b = a + TILE_ROWS * TILE_K;
    qd_matmul_args args = {.a = a, .b = b, .c = c, .m = TILE_ROWS, .n = TILE_COLS, .k = k, .lda = k, .ldb = TILE_COLS,
                           .ldc = TILE_COLS, .a_dtype = dtype, .b_dtype = dtype, .c_dtype = QD_F32};
    qd_gemm_block block = {.args = &args, .rows = TILE_ROWS, .cols = TILE_COLS, .kc = TILE_K, .pairs = pairs, .direct = true,
                           .a = a, .b = b, .b_stays = true};
    for (int64_t i = begin; i < end; i++)
        qd_cpu_gemm_of(cpu, pairs)->multiply(&block);
}

static void run_panels(void *context, int64_t begin, int64_t end, int thread)
{
    multiply_panels(context, false, begin, end, thread);
}

static void run_pair_panels(void *context, int64_t begin, int64_t end, int thread)
{
    multiply_panels(context, true, begin, end, thread);
}

/* Ordinary numbers, as fp32 and as bf16 pairs: the workspace may contain infinities or subnormals,
 * which are slow to multiply. */
static void fill_panels(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    uint32_t state = 1;
    for (int64_t i = begin; i < end; i++) {
        float *to = qd_cpu_workspace(context, (int)i);
        for (int64_t f = 0; f < TILE_FLOATS; f++) {
            state = state * 1664525u + 1013904223u;
            float x = (float)(int32_t)state * 0x1p-31f;
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            bits = (bits & 0xffff0000u) | bits >> 16;
            memcpy(&to[f], &bits, sizeof bits);
        }
    }
}

qd_status qd_cpu_run_tiles(qd_stream *stream, qd_dtype dtype, double *flops, double *seconds)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    const bool pairs = cpu->dots && dtype == QD_BF16;
    int threads = qd_pool_threads(cpu->pool);
    qd_pool_for(cpu->pool, threads, 1, fill_panels, cpu);
    double start = qd_clock_now();
    qd_pool_for(cpu->pool, (int64_t)threads * TILE_PIECES, 1, pairs ? run_pair_panels : run_panels, cpu);
    *seconds = qd_clock_now() - start;
    *flops = (double)threads * TILE_PIECES * 2.0 * TILE_ROWS * TILE_COLS * (double)qd_gemm_element(TILE_K, pairs);
    return QD_OK;
}
