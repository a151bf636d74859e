/* quadrille doctor: describes this machine and advises what would make it faster. */
#include "cli.h"

#include <quadrille/machine.h>
#include <quadrille/serve.h>
#include <quadrille/version.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ADVICE_MOST = 8, ADVICE_BYTES = 320 };

typedef struct findings {
    qd_machine machine;
    char mpirun[256]; /* "": not found */
    char advice[ADVICE_MOST][ADVICE_BYTES];
    int count;
} findings;

__attribute__((format(printf, 2, 3))) static void advise(findings *f, const char *format, ...)
{
    va_list arguments;
    if (f->count == ADVICE_MOST)
        return;
    va_start(arguments, format);
    vsnprintf(f->advice[f->count++], ADVICE_BYTES, format, arguments);
    va_end(arguments);
}

/* The first mpirun or mpiexec in PATH. */
static void find_mpirun(char *found, size_t size)
{
    static const char *const names[] = {"mpirun", "mpiexec"};
    const char *path = getenv("PATH");
    found[0] = '\0';
    for (const char *at = path ? path : ""; *at; at += strcspn(at, ":"), at += *at == ':') {
        for (int i = 0; i < 2; i++) {
            snprintf(found, size, "%.*s/%s", (int)strcspn(at, ":"), at, names[i]);
            if (access(found, X_OK) == 0)
                return;
        }
    }
    found[0] = '\0';
}

/* On an idle core, GEMMs reach about 85 % of the FMA rate. */
static bool products_slow(const qd_machine *m)
{
    return m->product_flops < 0.5 * m->fma_flops;
}

static void give_advice(findings *f)
{
    const qd_machine *m = &f->machine;
    int64_t usable = m->memory_limit_bytes > 0 && m->memory_limit_bytes < m->memory_bytes ? m->memory_limit_bytes : m->memory_bytes;
    if (products_slow(m))
        advise(f, "GEMMs reach only %.0f of %.0f GFLOP/s on a core: the machine is busy; "
                  "measure again when it is idle",
               m->product_flops * 1e-9, m->fma_flops * 1e-9);
    if (strcmp(m->isa, "generic") == 0)
        advise(f, "no vector instructions that quadrille has kernels for (AVX-512, AVX2, NEON): it works, but slowly");
    if (m->cores_allowed < m->cores)
        advise(f, "this process may use %d of %d cores (taskset, container or scheduler): start no more ranks than that",
               m->cores_allowed, m->cores);
    if (usable < (int64_t)2 << 30)
        advise(f, "less than 2 GiB of memory: use small models (quadrille check shows what a run needs)");
    else if (m->memory_available_bytes < usable / 10)
        advise(f, "less than a tenth of the memory is free: a run may be swapped out or killed");
    if (strcmp(m->huge_pages, "never") == 0)
        advise(f, "transparent huge pages are off; to gain a few percent: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled");
    if (!m->mpi_built)
        advise(f, "built without MPI: local ranks work, several machines do not. Install an MPI library (Debian: libopenmpi-dev) and build "
                  "again");
    else if (!f->mpirun[0])
        advise(f, "MPI is built in, but mpirun is not in PATH (Debian: openmpi-bin); srun works too");
    else if (geteuid() == 0 && !getenv("OMPI_ALLOW_RUN_AS_ROOT"))
        advise(f, "Open MPI's mpirun refuses to run as root, as in most containers: mpirun --allow-run-as-root, with more ranks than "
                  "cores also --oversubscribe");
    if (m->gpu_count > 0 && m->gpus[0].free_bytes < m->gpus[0].bytes / 2)
        advise(f, "less than half of GPU 0's memory is free: another program uses it (nvidia-smi shows which)");
    if (m->mpi_built && m->shared_bytes > 0 && m->shared_bytes < (int64_t)64 << 20)
        advise(f, "/dev/shm is small, which MPI libraries use (containers: --shm-size=1g); local ranks do not need it");
}

static qd_status print_json(const findings *f)
{
    const qd_machine *m = &f->machine;
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "cpu", m->cpu);
    qd_json_put_string(&w, "isa", m->isa);
    qd_json_put_int(&w, "cores", m->cores);
    qd_json_put_int(&w, "cores_allowed", m->cores_allowed);
    qd_json_put_string(&w, "products", m->products);
    qd_json_put_double(&w, "fma_flops", m->fma_flops);
    qd_json_put_double(&w, "product_flops", m->product_flops);
    qd_json_put_double(&w, "dot_flops", m->dot_flops);
    qd_json_put_double(&w, "amx_flops", m->amx_flops);
    qd_json_put_double(&w, "bf16_product_flops", m->bf16_product_flops);
    qd_json_put_bool(&w, "products_slow", products_slow(m));
    qd_json_put_int(&w, "memory_bytes", m->memory_bytes);
    qd_json_put_int(&w, "memory_available_bytes", m->memory_available_bytes);
    qd_json_put_int(&w, "memory_limit_bytes", m->memory_limit_bytes);
    qd_json_put_string(&w, "huge_pages", m->huge_pages);
    qd_json_put_string(&w, "collective_ways", m->ways);
    qd_json_put_string(&w, "collective_ways_file", m->ways_file[0] ? m->ways_file : NULL);
    qd_json_put_int(&w, "shared_bytes", m->shared_bytes);
    qd_json_put_int(&w, "shared_free_bytes", m->shared_free_bytes);
    qd_json_put_bool(&w, "mpi_built", m->mpi_built);
    qd_json_put_bool(&w, "serve_built", qd_serve_built());
    qd_json_put_string(&w, "mpirun", f->mpirun[0] ? f->mpirun : NULL);
    qd_json_list_begin(&w, "gpus");
    for (int i = 0; i < m->gpu_count && i < QD_MACHINE_GPUS; i++) {
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "name", m->gpus[i].name);
        qd_json_put_int(&w, "memory_bytes", m->gpus[i].bytes);
        qd_json_put_int(&w, "memory_free_bytes", m->gpus[i].free_bytes);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_put_string(&w, "gpu_libraries", m->gpu_libraries[0] ? m->gpu_libraries : NULL);
    qd_json_put_string(&w, "gpu_reason", m->gpu_reason[0] ? m->gpu_reason : NULL);
    qd_json_list_begin(&w, "advice");
    for (int i = 0; i < f->count; i++)
        qd_json_put_string(&w, NULL, f->advice[i]);
    qd_json_end(&w);
    qd_json_end(&w);
    return cli_print_json(&text);
}

static void print_gpus(const qd_machine *m)
{
    for (int i = 0; i < m->gpu_count && i < QD_MACHINE_GPUS; i++) {
        char bytes[32], left[32];
        qd_text_bytes(m->gpus[i].bytes, bytes, sizeof bytes);
        qd_text_bytes(m->gpus[i].free_bytes, left, sizeof left);
        printf("GPU %-2d         %s, %s, %s free\n", i, m->gpus[i].name, bytes, left);
    }
    if (m->gpu_count == 0)
        cli_say("GPU", 15, "none: %s", m->gpu_reason);
    else
        printf("CUDA           %s\n", m->gpu_libraries);
}

static void print_text(const findings *f)
{
    const qd_machine *m = &f->machine;
    char memory[32], available[32], limit[32], shared[32], stream[32];
    qd_text_bytes(m->memory_bytes, memory, sizeof memory);
    qd_text_bytes(m->memory_available_bytes, available, sizeof available);
    qd_text_bytes(m->memory_limit_bytes, limit, sizeof limit);
    qd_text_bytes(m->shared_bytes, shared, sizeof shared);
    printf("quadrille      %s\n", qd_version());
    printf("CPU            %s\n", m->cpu[0] ? m->cpu : "unknown");
    printf("cores          %d, %d for this process\n", m->cores, m->cores_allowed);
    printf("kernels        %s\n", m->isa);
    printf("GEMM           %s, %.0f of %.0f GFLOP/s on one core%s\n", m->products, m->product_flops * 1e-9,
           m->fma_flops * 1e-9, products_slow(m) ? " (slow)" : "");
    const bool amx = m->amx_flops > 0.0, dots = m->dot_flops > 0.0;
    printf("bf16 GEMM      %s, %.0f of %.0f GFLOP/s on one core\n",
           amx ? "AMX tiles" : dots ? "dot products of bf16 pairs" : "computed in fp32", m->bf16_product_flops * 1e-9,
           (amx ? m->amx_flops : dots ? m->dot_flops : m->fma_flops) * 1e-9);
    printf("ceilings       %.0f GFLOP/s of fp32 multiply-adds", m->fma_flops * 1e-9);
    if (dots)
        printf(", %.0f of bf16 dot products", m->dot_flops * 1e-9);
    if (amx)
        printf(", %.0f of AMX tiles", m->amx_flops * 1e-9);
    puts(", on one core");
    printf("memory         %s, %s free%s%s\n", memory, available, m->memory_limit_bytes > 0 ? ", limited to " : "",
           m->memory_limit_bytes > 0 ? limit : "");
    printf("huge pages     %s\n", m->huge_pages[0] ? m->huge_pages : "unknown");
    qd_text_bytes(m->stream_bytes, stream, sizeof stream);
    if (m->ways[0])
        cli_say("collectives", 15, "results bypass the caches from %s of buffers on (copies: %s, the largest: %s); %s%s", stream,
                m->stream_copy, m->far_copy, m->ways_file[0] ? "kept in " : "not kept: the cache folder cannot be written",
                m->ways_file);
    else
        puts("collectives    built-in sizes and copies: the machine is too busy to measure them");
    printf("shared memory  %s in /dev/shm\n", m->shared_bytes > 0 ? shared : "none");
    printf("MPI            %s; %s\n", m->mpi_built ? "built in" : "not built in", f->mpirun[0] ? f->mpirun : "no mpirun in PATH");
    printf("serve          %s\n", qd_serve_built() ? "built in" : "not built in (Debian: libmicrohttpd-dev)");
    print_gpus(m);
    putchar('\n');
    for (int i = 0; i < f->count; i++)
        cli_say("-", 2, "%s", f->advice[i]);
    if (f->count == 0)
        puts("No problems found.");
}

static qd_status run(cli_call *call)
{
    findings f = {.machine.size = sizeof f.machine};
    QD_TRY(cli_no_words(call));
    QD_TRY(qd_machine_look(&f.machine));
    find_mpirun(f.mpirun, sizeof f.mpirun);
    give_advice(&f);
    if (qd_options_bool(call->options, "json"))
        return print_json(&f);
    print_text(&f);
    return QD_OK;
}

static const qd_option own[] = {
    CLI_OPTION_JSON,
};

const cli_command cli_doctor = {
    .name = "doctor",
    .arguments = "[--json]",
    .summary = "Describes this machine and advises what would make it faster",
    CLI_OPTIONS(own),
    .run = run,
};
