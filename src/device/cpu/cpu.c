/* The CPU device: memory, streams, thread pool, choice of the instruction set, and the kernel
 * table. */
#include "device/cpu/cpu_impl.h"

#include "base/clock.h"
#include "base/memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

static const char *const isa_names[] = {
#define ISA_NAME(name) #name,
    QD_CPU_ISA_LIST(ISA_NAME)
#undef ISA_NAME
};

static const qd_kernels kernels = {
#define KERNEL(slot, args) .slot = qd_cpu_##slot,
    QD_KERNEL_TABLE(KERNEL)
#undef KERNEL
};

#if defined(__x86_64__)
/* The processor has AMX tiles of bf16, the system saves their state, and the kernel permits this
 * process to use them: it asks for that once, because the state takes 8 KiB of each thread. */
static bool machine_has_amx(void)
{
    enum { TILES = 1 << 24, TILES_OF_BF16 = 1 << 22, OSXSAVE = 1 << 27, PERMIT = 0x1023 /* ARCH_REQ_XCOMP_PERM */, TILE_DATA = 18 };
    const unsigned state = 3u << 17; /* of XCR0: tile configuration and data */
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & TILES) || !(d & TILES_OF_BF16))
        return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE))
        return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
#if defined(__linux__)
    return (low & state) == state && syscall(SYS_arch_prctl, PERMIT, TILE_DATA) == 0;
#else
    return false;
#endif
}
#endif

/* The features used by the targets that *_isa.c files are compiled for (haswell,
 * skylake-avx512). */
static bool machine_has(qd_cpu_isa isa)
{
#if defined(__x86_64__)
    if (isa == QD_CPU_amx)
        return machine_has(QD_CPU_avx512) && machine_has_amx();
    if (isa == QD_CPU_amx_emulated || isa == QD_CPU_avx512bf16_emulated)
        return machine_has(QD_CPU_avx2);
    if (isa == QD_CPU_avx512bf16)
        return __builtin_cpu_supports("avx512bf16") && machine_has(QD_CPU_avx512);
    if (isa == QD_CPU_avx512)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512cd") && machine_has(QD_CPU_avx2);
    if (isa == QD_CPU_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
               __builtin_cpu_supports("bmi2");
#endif
    (void)isa;
    return true;
}

/* Whether an instruction set is chosen without being named. Zen 4 and 5 start as many dot products
 * of bf16 pairs per cycle as multiply-adds, which doubles the rate (measured). On processors of
 * other vendors the gain has not been measured: run.kernels=avx512bf16 tries it. Emulations are
 * slow. The choice decides bits, so it follows the processor and not a measurement. */
static bool machine_gains(qd_cpu_isa isa)
{
#if defined(__x86_64__)
    if (isa == QD_CPU_avx512bf16)
        return __builtin_cpu_is("amd");
    if (isa == QD_CPU_amx_emulated || isa == QD_CPU_avx512bf16_emulated)
        return false;
#endif
    (void)isa;
    return true;
}

static qd_status choose_isa(const char *wanted, qd_cpu_isa *isa)
{
    for (int i = 0; i < QD_CPU_ISA_COUNT; i++) {
        if (wanted ? strcmp(wanted, isa_names[i]) != 0 : !machine_gains((qd_cpu_isa)i))
            continue;
        if (machine_has((qd_cpu_isa)i)) {
            *isa = (qd_cpu_isa)i;
            return QD_OK;
        }
        if (wanted)
            return QD_FAIL(QD_UNSUPPORTED,
                           "run.kernels: this machine does not support the instruction set '%s'; auto uses the best it has", wanted);
    }
    return QD_FAIL(QD_UNSUPPORTED, "run.kernels: this build has no kernels for '%s'; auto uses the best it has", wanted);
}

qd_status qd_cpu_device_exists(int ordinal, const char *wanted)
{
    (void)ordinal;
    qd_cpu_isa isa;
    return choose_isa(wanted, &isa);
}

static qd_status cpu_alloc(qd_device *device, int64_t bytes, void **address)
{
    (void)device;
    *address = qd_memory_take(bytes);
    return *address ? QD_OK
                    : QD_FAIL(QD_NO_MEMORY, "cpu device: no memory for a buffer of %lld bytes (%.4g GiB)", (long long)bytes,
                              (double)bytes / (1 << 30));
}

static void cpu_free(qd_device *device, void *address, int64_t bytes)
{
    (void)device;
    (void)bytes;
    free(address);
}

static qd_status cpu_wait(qd_stream *stream)
{
    (void)stream; /* kernels and copies have completed when their call returns */
    return QD_OK;
}

typedef struct move {
    char *to;
    const char *from; /* NULL: zero */
} move;

static void move_range(void *context, int64_t begin, int64_t end, int thread)
{
    const move *m = context;
    (void)thread;
    if (m->from)
        memcpy(m->to + begin, m->from + begin, (size_t)(end - begin));
    else
        memset(m->to + begin, 0, (size_t)(end - begin));
}

enum { MOVE_GRAIN = 1 << 20 };

static qd_status cpu_copy(qd_stream *stream, void *to, const void *from, int64_t bytes)
{
    /* Overlapping buffers need memmove, which cannot run in parallel. */
    const char *first = to < from ? to : from, *second = to < from ? from : to;
    if (first + bytes > second)
        memmove(to, from, (size_t)bytes);
    else
        qd_pool_for(qd_cpu_of(stream)->pool, bytes, MOVE_GRAIN, move_range, &(move){to, from});
    return QD_OK;
}

static qd_status cpu_fill_zero(qd_stream *stream, void *to, int64_t bytes)
{
    qd_pool_for(qd_cpu_of(stream)->pool, bytes, MOVE_GRAIN, move_range, &(move){to, NULL});
    return QD_OK;
}

static qd_status cpu_memory(qd_device *device, int64_t *free_bytes, int64_t *total_bytes)
{
    (void)device;
    int64_t page = sysconf(_SC_PAGESIZE);
    *free_bytes = sysconf(_SC_AVPHYS_PAGES) * page;
    *total_bytes = sysconf(_SC_PHYS_PAGES) * page;
    return QD_OK;
}

static qd_status cpu_host_alloc(qd_device *device, int64_t bytes, void **address)
{
    (void)device;
    *address = malloc((size_t)bytes);
    return *address ? QD_OK : QD_FAIL(QD_NO_MEMORY, "cpu device: no memory for %lld bytes of staging", (long long)bytes);
}

static void cpu_host_free(qd_device *device, void *address)
{
    (void)device;
    free(address);
}

typedef struct cpu_event {
    qd_event base;
    double at;
} cpu_event;

static qd_status cpu_event_create(qd_device *device, qd_event **event)
{
    cpu_event *e = calloc(1, sizeof *e);
    if (!e)
        return QD_FAIL(QD_NO_MEMORY, "cpu device: no memory for an event");
    e->base.device = device;
    *event = &e->base;
    return QD_OK;
}

static void cpu_event_destroy(qd_event *event)
{
    free(event);
}

static qd_status cpu_event_record(qd_event *event, qd_stream *stream)
{
    (void)stream;
    ((cpu_event *)event)->at = qd_clock_now();
    return QD_OK;
}

static qd_status cpu_stream_wait_event(qd_stream *stream, qd_event *event)
{
    (void)stream;
    (void)event;
    return QD_OK;
}

static qd_status cpu_event_wait(qd_event *event)
{
    (void)event;
    return QD_OK;
}

static qd_status cpu_event_done(qd_event *event, bool *done)
{
    (void)event;
    *done = true;
    return QD_OK;
}

static qd_status cpu_event_seconds(qd_event *from, qd_event *to, double *seconds)
{
    *seconds = ((cpu_event *)to)->at - ((cpu_event *)from)->at;
    return QD_OK;
}

static void cpu_destroy(qd_device *device)
{
    qd_cpu *cpu = (qd_cpu *)device;
    qd_pool_destroy(cpu->pool);
    free(cpu->workspace);
    free(cpu);
}

static const qd_device_ops ops = {
    .destroy = cpu_destroy,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .wait = cpu_wait,
    .copy = cpu_copy,
    .fill_zero = cpu_fill_zero,
    .memory = cpu_memory,
    .host_alloc = cpu_host_alloc,
    .host_free = cpu_host_free,
    .event_create = cpu_event_create,
    .event_destroy = cpu_event_destroy,
    .event_record = cpu_event_record,
    .stream_wait_event = cpu_stream_wait_event,
    .event_wait = cpu_event_wait,
    .event_done = cpu_event_done,
    .event_seconds = cpu_event_seconds,
    .run_fma = qd_cpu_run_fma,
    .run_bf16 = qd_cpu_run_bf16,
    .run_tiles = qd_cpu_run_tiles,
    .run_adds = qd_cpu_run_adds,
};

qd_status qd_cpu_device_create(const qd_device_config *config, qd_device **device)
{
    qd_status status;
    qd_cpu *cpu = NULL;
    qd_cpu_isa isa = (qd_cpu_isa)0;
    if (config->threads < 1)
        return QD_FAIL(QD_USAGE, "cpu device: %d compute threads; at least 1 is needed", config->threads);
    QD_TRY(choose_isa(config->isa, &isa));
    cpu = calloc(1, sizeof *cpu);
    if (!cpu)
        return QD_FAIL(QD_NO_MEMORY, "cpu device: no memory for its description");
    cpu->isa = isa;
#if defined(__x86_64__)
    cpu->dots = isa <= QD_CPU_avx512bf16_emulated && isa != QD_CPU_avx512;
#endif
    cpu->stream.device = &cpu->base;
    cpu->base.ops = &ops;
    cpu->base.kernels = &kernels;
    cpu->base.compute = cpu->base.comm = cpu->base.in = cpu->base.out = &cpu->stream;
    QD_TRY_DONE(qd_pool_create(config->threads, config->pin_first, &cpu->pool));
    int64_t workspace = config->threads * QD_CPU_WORKSPACE_BYTES;
    cpu->workspace = qd_memory_take(workspace);
    if (!cpu->workspace) {
        status = QD_FAIL(QD_NO_MEMORY, "cpu device: no memory for a workspace of %lld bytes", (long long)workspace);
        goto done;
    }
    cpu->base.caps = (qd_device_caps){
        .name = "cpu",
        .isa = isa_names[isa],
        .blas = "packed kernels",
        .threads = config->threads,
        .workspace_bytes = workspace,
        .count = 1,
        .host_memory = true,
        .fp8 = true,
        .fp8_recipes = true,
        .fused_residual = true,
        .fused_gelu = true,
        .fused_bias_grad = true,
    };
    *device = &cpu->base;
    return QD_OK;
done:
    cpu_destroy(&cpu->base);
    return status;
}
