/* Describes this machine: processor, memory, limits of control groups, GPUs, and its measured
 * peak. */
#include "base/thread.h"
#include "base/sized.h"
#include "base/clock.h"
#include "comm/device.h"
#include "device/ceiling.h"
#include "device/info.h"
#include "train/launch/collective_ways.h"

#include <quadrille/comm.h>
#include <quadrille/machine.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* First line of a small kernel file; "" if it cannot be read. */
static void read_line(const char *path, char *text, size_t size)
{
    FILE *file = fopen(path, "re");
    text[0] = '\0';
    if (!file)
        return;
    if (!fgets(text, (int)size, file))
        text[0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    fclose(file);
}

/* The value after "name:" in a file of such lines. */
static bool find_value(const char *path, const char *name, char *value, size_t size)
{
    char line[512];
    bool found = false;
    FILE *file = fopen(path, "re");
    while (file && !found && fgets(line, sizeof line, file)) {
        size_t length = strlen(name);
        char *colon = strchr(line, ':');
        if (strncmp(line, name, length) != 0 || !colon)
            continue;
        colon += 1 + strspn(colon + 1, " \t");
        colon[strcspn(colon, "\n")] = '\0';
        snprintf(value, size, "%s", colon);
        found = true;
    }
    if (file)
        fclose(file);
    return found;
}

static int64_t meminfo(const char *name)
{
    char text[64];
    return find_value("/proc/meminfo", name, text, sizeof text) ? (int64_t)strtoll(text, NULL, 10) * 1024 : 0;
}

static void look_at_cores(qd_machine *m)
{
    /* arm64 kernels report no model name, only the numbers of implementer and part. */
    char maker[16], part[16];
    if (!find_value("/proc/cpuinfo", "model name", m->cpu, sizeof m->cpu) &&
        !find_value("/proc/cpuinfo", "Processor", m->cpu, sizeof m->cpu) &&
        find_value("/proc/cpuinfo", "CPU implementer", maker, sizeof maker) && find_value("/proc/cpuinfo", "CPU part", part, sizeof part))
        snprintf(m->cpu, sizeof m->cpu, "implementer %s, part %s", maker, part);
    m->cores = qd_cores();
    m->cores_allowed = qd_cores_allowed();
}

static void look_at_memory(qd_machine *m)
{
    char text[64];
    struct statvfs shm;
    m->memory_bytes = meminfo("MemTotal");
    m->memory_available_bytes = meminfo("MemAvailable");
    read_line("/sys/fs/cgroup/memory.max", text, sizeof text); /* "max": none */
    m->memory_limit_bytes = strtoll(text, NULL, 10);
    if (statvfs("/dev/shm", &shm) == 0) {
        m->shared_bytes = (int64_t)shm.f_blocks * (int64_t)shm.f_frsize;
        m->shared_free_bytes = (int64_t)shm.f_bavail * (int64_t)shm.f_frsize;
    }
    /* "always [madvise] never" */
    read_line("/sys/kernel/mm/transparent_hugepage/enabled", text, sizeof text);
    char *open = strchr(text, '['), *close = open ? strchr(open, ']') : NULL;
    if (close)
        snprintf(m->huge_pages, sizeof m->huge_pages, "%.*s", (int)(close - open - 1), open + 1);
}

/* A number in a file of a control group; -1: no limit ("max"), or no such file. */
static int64_t group_number(const char *folder, const char *name)
{
    char path[1024], text[64], *end;
    if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, name) >= sizeof path)
        return -1;
    read_line(path, text, sizeof text);
    long long value = strtoll(text, &end, 10);
    return end == text || value >= INT64_C(1) << 60 ? -1 : (int64_t)value;
}

/* Memory that a group still allows, where reclaimable page cache counts as free; INT64_MAX: no
 * limit. */
static int64_t group_room(const char *folder, bool first_version)
{
    char path[1024], line[128];
    int64_t limit = group_number(folder, first_version ? "memory.limit_in_bytes" : "memory.max");
    int64_t used = group_number(folder, first_version ? "memory.usage_in_bytes" : "memory.current"), cached = 0;
    if (limit < 0 || used < 0)
        return INT64_MAX;
    snprintf(path, sizeof path, "%.1000s/memory.stat", folder);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof line, file)) {
        long long value;
        if (sscanf(line, first_version ? "total_inactive_file %lld" : "inactive_file %lld", &value) == 1)
            cached = value;
    }
    if (file)
        fclose(file);
    return limit - used + cached > 0 ? limit - used + cached : 0;
}

/* The least that the control group of this process and its parents allow: "0::/a/b" (version 2), or
 * "4:memory:/a/b" (version 1). */
static int64_t groups_room(void)
{
    int64_t room = INT64_MAX;
    char line[768];
    FILE *file = fopen("/proc/self/cgroup", "re");
    while (file && fgets(line, sizeof line, file)) {
        char folder[1024], *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        bool second = strncmp(line, "0::", 3) == 0, first = path && !second && strncmp(controllers, ":memory:", 8) == 0;
        if (!path || (!first && !second))
            continue;
        path[strcspn(path, "\n")] = '\0';
        int root = snprintf(folder, sizeof folder, "/sys/fs/cgroup%s", first ? "/memory" : "");
        snprintf(folder + root, sizeof folder - (size_t)root, "%s", path + 1);
        for (char *end = folder + strlen(folder); end; end = strrchr(folder + root, '/')) {
            *end = '\0';
            int64_t here = group_room(folder, first);
            room = here < room ? here : room;
        }
    }
    if (file)
        fclose(file);
    return room;
}

int64_t qd_machine_free_memory(int64_t *swap)
{
    int64_t allowed = groups_room(), there = meminfo("MemAvailable");
    if (swap)
        *swap = allowed < there ? 0 : meminfo("SwapFree");
    return allowed < there ? allowed : there;
}

/* The best of several GEMMs: the library's peak, whatever else the machine is doing. */
static qd_status time_products(qd_device *device, qd_dtype dtype, double *flops)
{
    enum { N = 384, LEAST = 3 }; /* under a millisecond each: some run undisturbed on a busy machine */
    const int64_t bytes = (int64_t)N * N * 4;
    char *memory;
    QD_TRY(qd_device_alloc(device, 3 * bytes, (void **)&memory));
    qd_stream *stream = qd_device_compute_stream(device);
    qd_matmul_args args = {
        .a = memory, .b = memory + bytes, .c = memory + 2 * bytes, .m = N, .n = N, .k = N, .lda = N, .ldb = N, .ldc = N,
        .a_dtype = dtype, .b_dtype = dtype, .c_dtype = QD_F32,
    };
    qd_status status = QD_OK;
    double best = 0.0, until = qd_clock_now() + 0.15;
    for (int i = 0; status == QD_OK && (i < LEAST || qd_clock_now() < until); i++) {
        double begin = qd_clock_now();
        status = qd_device_kernels(device)->matmul(stream, &args);
        if (status == QD_OK)
            status = qd_stream_wait(stream);
        double rate = 2.0 * N * N * N / (qd_clock_now() - begin);
        best = i > 0 && rate > best ? rate : best; /* the first one is a warm-up */
    }
    qd_device_free(device, memory, 3 * bytes);
    *flops = best;
    return status;
}

enum { FMA_RUNS = 20 };

static qd_status look_at_kernels(qd_machine *m)
{
    qd_device_config config = qd_device_config_default();
    qd_device *device = NULL;
    config.threads = 1;
    QD_TRY(qd_device_create("cpu", &config, &device));
    const qd_device_caps *caps = qd_device_get_caps(device);
    snprintf(m->isa, sizeof m->isa, "%s", caps->isa);
    snprintf(m->products, sizeof m->products, "%s", caps->blas);
    qd_ceiling ceiling = {0};
    qd_status status = qd_device_measure_flops(device, FMA_RUNS, &ceiling);
    m->fma_flops = ceiling.fma_flops;
    m->dot_flops = ceiling.dot_flops;
    m->amx_flops = ceiling.amx_flops;
    if (status == QD_OK)
        status = time_products(device, QD_F32, &m->product_flops);
    if (status == QD_OK)
        status = time_products(device, QD_BF16, &m->bf16_product_flops);
    qd_device_destroy(device);
    return status;
}

static void look_at_gpus(qd_machine *m)
{
    qd_device_info info;
    char nccl[32];
    for (int i = 0; i < QD_MACHINE_GPUS && (i == 0 || i < m->gpu_count); i++) {
        if (qd_device_look("cuda", i, &info) != QD_OK) {
            snprintf(m->gpu_reason, sizeof m->gpu_reason, "%s", qd_error_message());
            qd_error_clear();
            return;
        }
        m->gpu_count = info.count;
        memcpy(m->gpus[i].name, info.name, sizeof info.name);
        m->gpus[i].bytes = info.total_bytes;
        m->gpus[i].free_bytes = info.free_bytes;
        bool with_nccl = qd_nccl_version(nccl, sizeof nccl);
        snprintf(m->gpu_libraries, sizeof m->gpu_libraries, "%s, %s%s", info.libraries, with_nccl ? "NCCL " : "no NCCL",
                 with_nccl ? nccl : "");
    }
}

/* The word after "name=" in a list of such words. */
static void find_word(const char *list, const char *name, char *word, size_t size)
{
    const char *at = strstr(list, name);
    word[0] = '\0';
    if (at)
        snprintf(word, size, "%.*s", (int)strcspn(at + strlen(name), " "), at + strlen(name));
}

static void look_at_ways(qd_machine *m)
{
    char bytes[32];
    qd_collective_ways ways;
    qd_collective_ways_find("", true, &ways);
    snprintf(m->ways, sizeof m->ways, "%s", ways.text);
    if (ways.kept)
        snprintf(m->ways_file, sizeof m->ways_file, "%s", ways.path);
    find_word(ways.text, "stream_bytes=", bytes, sizeof bytes);
    find_word(ways.text, "stream_copy=", m->stream_copy, sizeof m->stream_copy);
    find_word(ways.text, "far_copy=", m->far_copy, sizeof m->far_copy);
    m->stream_bytes = strtoll(bytes, NULL, 10);
}

qd_status qd_machine_look(qd_machine *machine)
{
    qd_machine m = {.mpi_built = qd_mpi_built()};
    QD_TRY(QD_SIZED_CHECK(machine, qd_machine));
    look_at_cores(&m);
    look_at_memory(&m);
    look_at_gpus(&m);
    look_at_ways(&m);
    qd_status status = look_at_kernels(&m);
    QD_SIZED_WRITE(machine, &m);
    return status;
}

qd_status qd_machine_peak_for(qd_dtype dtype, double *flops)
{
    qd_machine m = {0};
    qd_device_config config = qd_device_config_default();
    qd_device *device = NULL;
    look_at_cores(&m);
    config.threads = m.cores_allowed;
    QD_TRY(qd_device_create("cpu", &config, &device));
    qd_ceiling ceiling = {0};
    qd_status status = dtype == QD_BF16 ? qd_device_measure_flops(device, FMA_RUNS, &ceiling)
                                        : qd_device_measure_fma(device, FMA_RUNS, &ceiling.fma_flops);
    *flops = qd_ceiling_of(&ceiling, dtype) * (double)m.cores / m.cores_allowed;
    qd_device_destroy(device);
    return status;
}

qd_status qd_machine_peak(double *flops)
{
    return qd_machine_peak_for(QD_F32, flops);
}
