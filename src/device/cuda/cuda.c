/* The CUDA device: memory, streams, events, copies, and the kernel table. Every entry point makes
 * its device current, because ranks are threads that may have a GPU each. */
#include "device/cuda/cuda_impl.h"
#include "device/cuda/libraries.h"

#include <quadrille/text.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LEAST_MAJOR = 8 }; /* compute capability with bf16 tensor cores */

static qd_cuda *of_device(const qd_device *device)
{
    return (qd_cuda *)(uintptr_t)device;
}

static qd_status make_current(const qd_cuda *cuda)
{
    QD_CUDA_TRY(cudaSetDevice(cuda->ordinal));
    return QD_OK;
}

/* The kernel table: each slot makes its device current. */

#define ENTER_KERNEL(slot, args)                                                                            \
    static qd_status enter_##slot(qd_stream *stream, const args *a)                                         \
    {                                                                                                       \
        QD_TRY(make_current(qd_cuda_of(stream)));                                                           \
        return qd_cuda_##slot(stream, a);                                                                   \
    }
QD_KERNEL_TABLE(ENTER_KERNEL)
#undef ENTER_KERNEL

static const qd_kernels kernels = {
#define KERNEL(slot, args) .slot = enter_##slot,
    QD_KERNEL_TABLE(KERNEL)
#undef KERNEL
};

typedef struct amount {
    char text[24];
} amount;

static amount bytes_of(int64_t bytes)
{
    amount a;
    qd_text_bytes(bytes, a.text, sizeof a.text);
    return a;
}

qd_status qd_cuda_fail_at(const char *file, int line, const char *function, const char *call, cudaError_t error)
{
    (void)cudaGetLastError(); /* so that an unrelated call does not report it again */
    const char *end = strchr(call, '(');
    int length = end ? (int)(end - call) : (int)strlen(call);
    if (error == cudaErrorMemoryAllocation) {
        size_t left = 0, total = 0;
        int ordinal = 0;
        (void)cudaGetDevice(&ordinal);
        (void)cudaMemGetInfo(&left, &total);
        return qd_fail_at(file, line, function, QD_NO_MEMORY, "cuda device %d: %.*s: no memory; %s of %s are free", ordinal,
                          length, call, bytes_of((int64_t)left).text, bytes_of((int64_t)total).text);
    }
    return qd_fail_at(file, line, function, QD_SYSTEM, "cuda: %.*s: %s (%s)", length, call, cudaGetErrorString(error),
                      cudaGetErrorName(error));
}

/* Reports an error that a kernel recorded; `fault` is a copy of the device's record. */
static qd_status check_fault(qd_cuda *cuda, qd_cuda_fault fault)
{
    static const char *const names[] = {"", "token", "position", "target", "expert"};
    if (fault.kind == QD_CUDA_NO_FAULT)
        return QD_OK;
    QD_CUDA_TRY(cudaMemsetAsync(cuda->fault, 0, sizeof *cuda->fault, cuda->compute.stream));
    if (fault.bound < 0)
        return QD_FAIL(QD_USAGE, "cuda: row %lld has %s %d; it must be at least 0", fault.row, names[fault.kind], fault.value);
    return QD_FAIL(QD_USAGE, "cuda: row %lld has %s %d; it must be within 0 .. %lld", fault.row, names[fault.kind],
                   fault.value, fault.bound - 1);
}

/* Ordered on `stream` and for its use only; NULL: at once, for all streams. */
static qd_status take_memory(qd_cuda *cuda, const char *what, int64_t bytes, cudaStream_t stream, void **address)
{
    *address = NULL;
    cudaError_t error = stream ? cudaMallocAsync(address, (size_t)bytes, stream) : cudaMalloc(address, (size_t)bytes);
    if (error == cudaErrorMemoryAllocation) {
        size_t left = 0, total = 0;
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&left, &total);
        return QD_FAIL(QD_NO_MEMORY, "cuda device %d: no memory for %s of %s; %s of %s are free", cuda->ordinal, what,
                       bytes_of(bytes).text, bytes_of((int64_t)left).text,
                       bytes_of((int64_t)total).text);
    }
    QD_CUDA_TRY(error);
    return QD_OK;
}

static qd_status cuda_alloc(qd_device *device, int64_t bytes, void **address)
{
    qd_cuda *cuda = of_device(device);
    QD_TRY(make_current(cuda));
    QD_TRY(take_memory(cuda, "a buffer", bytes, NULL, address));
    QD_CUDA_TRY(cudaMemsetAsync(*address, 0, (size_t)bytes, cuda->compute.stream));
    QD_CUDA_TRY(cudaStreamSynchronize(cuda->compute.stream)); /* so that the other streams may use it too */
    return QD_OK;
}

static void cuda_free(qd_device *device, void *address, int64_t bytes)
{
    (void)bytes;
    if (make_current(of_device(device)) == QD_OK)
        (void)cudaFree(address);
}

static qd_status cuda_memory(qd_device *device, int64_t *free_bytes, int64_t *total_bytes)
{
    size_t left, total;
    QD_TRY(make_current(of_device(device)));
    QD_CUDA_TRY(cudaMemGetInfo(&left, &total));
    *free_bytes = (int64_t)left;
    *total_bytes = (int64_t)total;
    return QD_OK;
}

static qd_status cuda_host_alloc(qd_device *device, int64_t bytes, void **address)
{
    QD_TRY(make_current(of_device(device)));
    cudaError_t error = cudaHostAlloc(address, (size_t)bytes, cudaHostAllocPortable);
    if (error == cudaErrorMemoryAllocation) {
        (void)cudaGetLastError();
        return QD_FAIL(QD_NO_MEMORY, "cuda: the host has no %s of memory to page-lock", bytes_of(bytes).text);
    }
    QD_CUDA_TRY(error);
    return QD_OK;
}

static void cuda_host_free(qd_device *device, void *address)
{
    if (make_current(of_device(device)) == QD_OK)
        (void)cudaFreeHost(address);
}

/* Stream-ordered: cudaFree would wait for all kernels of the device, including those that wait for
 * other ranks, which may themselves wait for data that this rank has yet to send: a deadlock.
 * Devices without memory pools have no alternative. */
static qd_status grow_workspace(qd_cuda *cuda, qd_cuda_stream *s, int64_t bytes)
{
    const int64_t step = (int64_t)1 << 20;
    const int64_t rounded = (bytes + step - 1) / step * step;
    if (s->workspace && cuda->properties.memoryPoolsSupported) {
        QD_CUDA_TRY(cudaFreeAsync(s->workspace, s->stream));
    } else if (s->workspace) {
        QD_CUDA_TRY(cudaStreamSynchronize(s->stream));
        QD_CUDA_TRY(cudaFree(s->workspace));
    }
    cuda->base.caps.workspace_bytes -= s->workspace_bytes;
    s->workspace = NULL;
    s->workspace_bytes = 0;
    QD_TRY(take_memory(cuda, "a workspace", rounded, cuda->properties.memoryPoolsSupported ? s->stream : NULL, &s->workspace));
    s->workspace_bytes = rounded;
    cuda->base.caps.workspace_bytes += rounded;
    return QD_OK;
}

qd_status qd_cuda_workspace(qd_stream *stream, int64_t bytes, void **address)
{
    qd_cuda_stream *s = (qd_cuda_stream *)stream;
    if (bytes > s->workspace_bytes)
        QD_TRY(grow_workspace(qd_cuda_of(stream), s, bytes));
    *address = s->workspace;
    return QD_OK;
}

static void cuda_describe_workspace(const qd_device *device, qd_strbuf *text)
{
    const qd_cuda *cuda = of_device(device);
    qd_strbuf_printf(text, "workspace of the compute stream (GEMMs, attention, sums) %s",
                     bytes_of(cuda->compute.workspace_bytes).text);
    if (cuda->comm.workspace_bytes)
        qd_strbuf_printf(text, ", of the communication stream %s", bytes_of(cuda->comm.workspace_bytes).text);
    if (cuda->ceiling)
        qd_strbuf_printf(text, ", operands of the ceiling's GEMM %s", bytes_of(QD_CUDA_CEILING_BYTES).text);
    qd_cuda_gemms_describe(cuda, text);
    qd_cuda_attention_describe(cuda, text);
}

qd_cuda_launch qd_cuda_launch_of(qd_stream *stream)
{
    const qd_cuda *cuda = qd_cuda_of(stream);
    return (qd_cuda_launch){
        .stream = qd_cuda_stream_of(stream),
        .multiprocessors = cuda->properties.multiProcessorCount,
        .shared_most = (int)cuda->properties.sharedMemPerBlockOptin,
        .deterministic = cuda->deterministic,
        .has_wgmma = QD_CUDA_HAS_90A && cuda->properties.major == 9 && cuda->properties.minor == 0,
        .fault = cuda->fault,
    };
}

static qd_status cuda_wait(qd_stream *stream)
{
    qd_cuda *cuda = qd_cuda_of(stream);
    bool compute = stream == &cuda->compute.base; /* all kernels that take indices run on this stream */
    QD_TRY(make_current(cuda));
    if (compute)
        QD_CUDA_TRY(cudaMemcpyAsync(cuda->fault_seen, cuda->fault, sizeof *cuda->fault, cudaMemcpyDeviceToHost, cuda->compute.stream));
    QD_CUDA_TRY(cudaStreamSynchronize(qd_cuda_stream_of(stream)));
    return compute ? check_fault(cuda, *cuda->fault_seen) : QD_OK;
}

static qd_status cuda_copy(qd_stream *stream, void *to, const void *from, int64_t bytes)
{
    QD_TRY(make_current(qd_cuda_of(stream)));
    QD_CUDA_TRY(cudaMemcpyAsync(to, from, (size_t)bytes, cudaMemcpyDefault, qd_cuda_stream_of(stream)));
    return QD_OK;
}

static qd_status cuda_fill_zero(qd_stream *stream, void *to, int64_t bytes)
{
    QD_TRY(make_current(qd_cuda_of(stream)));
    QD_CUDA_TRY(cudaMemsetAsync(to, 0, (size_t)bytes, qd_cuda_stream_of(stream)));
    return QD_OK;
}

typedef struct cuda_event {
    qd_event base;
    cudaEvent_t event;
} cuda_event;

static cuda_event *of_event(qd_event *event)
{
    return (cuda_event *)event;
}

static qd_status cuda_event_create(qd_device *device, qd_event **event)
{
    QD_TRY(make_current(of_device(device)));
    cuda_event *e = calloc(1, sizeof *e);
    if (!e)
        return QD_FAIL(QD_NO_MEMORY, "cuda device: no memory for an event");
    e->base.device = device;
    cudaError_t error = cudaEventCreate(&e->event);
    if (error != cudaSuccess)
        free(e);
    QD_CUDA_TRY(error);
    *event = &e->base;
    return QD_OK;
}

static void cuda_event_destroy(qd_event *event)
{
    if (make_current(of_device(event->device)) == QD_OK)
        (void)cudaEventDestroy(of_event(event)->event);
    free(event);
}

static qd_status cuda_event_record(qd_event *event, qd_stream *stream)
{
    QD_TRY(make_current(qd_cuda_of(stream)));
    QD_CUDA_TRY(cudaEventRecord(of_event(event)->event, qd_cuda_stream_of(stream)));
    return QD_OK;
}

static qd_status cuda_stream_wait_event(qd_stream *stream, qd_event *event)
{
    QD_TRY(make_current(qd_cuda_of(stream)));
    QD_CUDA_TRY(cudaStreamWaitEvent(qd_cuda_stream_of(stream), of_event(event)->event, 0));
    return QD_OK;
}

static qd_status cuda_event_wait(qd_event *event)
{
    QD_TRY(make_current(of_device(event->device)));
    QD_CUDA_TRY(cudaEventSynchronize(of_event(event)->event));
    return QD_OK;
}

static qd_status cuda_event_done(qd_event *event, bool *done)
{
    QD_TRY(make_current(of_device(event->device)));
    cudaError_t error = cudaEventQuery(of_event(event)->event);
    *done = error != cudaErrorNotReady;
    if (*done)
        QD_CUDA_TRY(error);
    return QD_OK;
}

static qd_status cuda_event_seconds(qd_event *from, qd_event *to, double *seconds)
{
    float milliseconds;
    QD_TRY(make_current(of_device(from->device)));
    QD_CUDA_TRY(cudaEventElapsedTime(&milliseconds, of_event(from)->event, of_event(to)->event));
    *seconds = (double)milliseconds * 1e-3;
    return QD_OK;
}

static qd_status cuda_tune(qd_device *device, const qd_tune_args *args, bool *searched)
{
    QD_TRY(make_current(of_device(device)));
    return qd_cuda_tune(device, args, searched);
}

static qd_status cuda_tune_more(qd_device *device, const qd_tune_args *args, int *left)
{
    QD_TRY(make_current(of_device(device)));
    return qd_cuda_tune_more(device, args, left);
}

static qd_status cuda_tuning_get(qd_device *device, qd_strbuf *text)
{
    QD_TRY(make_current(of_device(device)));
    return qd_cuda_tuning_get(device, text);
}

static qd_status cuda_tuning_set(qd_device *device, const char *text)
{
    QD_TRY(make_current(of_device(device)));
    return qd_cuda_tuning_set(device, text);
}

static qd_status cuda_run_fma(qd_stream *stream, double *flops)
{
    QD_TRY(make_current(qd_cuda_of(stream)));
    return qd_cuda_run_fma(stream, flops);
}

static void destroy_stream(qd_cuda_stream *stream)
{
    if (stream->stream) {
        (void)cudaStreamSynchronize(stream->stream);
        (void)cudaStreamDestroy(stream->stream);
    }
    (void)cudaFree(stream->workspace);
}

static void cuda_destroy(qd_device *device)
{
    qd_cuda *cuda = of_device(device);
    if (make_current(cuda) == QD_OK) {
        qd_cuda_attention_destroy(cuda);
        qd_cuda_gemms_destroy(cuda);
        (void)cudaFree(cuda->ceiling);
        destroy_stream(&cuda->compute);
        destroy_stream(&cuda->comm);
        destroy_stream(&cuda->in);
        destroy_stream(&cuda->out);
        (void)cudaFreeHost(cuda->fault_seen);
        (void)cudaFree(cuda->fault);
    }
    free(cuda);
}

static const qd_device_ops ops = {
    .destroy = cuda_destroy,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .wait = cuda_wait,
    .copy = cuda_copy,
    .fill_zero = cuda_fill_zero,
    .memory = cuda_memory,
    .host_alloc = cuda_host_alloc,
    .host_free = cuda_host_free,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .stream_wait_event = cuda_stream_wait_event,
    .event_wait = cuda_event_wait,
    .event_done = cuda_event_done,
    .event_seconds = cuda_event_seconds,
    .describe_workspace = cuda_describe_workspace,
    .tune = cuda_tune,
    .tune_more = cuda_tune_more,
    .tuning_get = cuda_tuning_get,
    .tuning_set = cuda_tuning_set,
    .run_fma = cuda_run_fma,
    .reach = qd_cuda_reach,
    .make_current = qd_cuda_make_current,
    .native = qd_cuda_native,
};

static qd_status choose_device(const qd_device_config *config, int *ordinal, int *count)
{
    *count = 0;
    cudaError_t error = cudaGetDeviceCount(count);
    if (error != cudaSuccess || *count == 0) {
        (void)cudaGetLastError();
        return QD_FAIL(QD_UNSUPPORTED, "device 'cuda': no GPU is visible on this machine (%s)",
                       error != cudaSuccess ? cudaGetErrorString(error) : "the driver lists none");
    }
    if (config->ordinal < 0 || (config->ordinal >= *count && !config->share))
        return QD_FAIL(QD_USAGE, "device 'cuda': GPU %d; this machine has 0 .. %d", config->ordinal, *count - 1);
    *ordinal = config->ordinal % *count;
    return QD_OK;
}

static qd_status open_device(qd_cuda *cuda)
{
    int least, greatest;
    QD_TRY(make_current(cuda));
    QD_CUDA_TRY(cudaGetDeviceProperties(&cuda->properties, cuda->ordinal));
    const struct cudaDeviceProp *p = &cuda->properties;
    if (p->major < LEAST_MAJOR)
        return QD_FAIL(QD_UNSUPPORTED, "device 'cuda': GPU %d, %s, has compute capability %d.%d; at least %d.0 is needed",
                       cuda->ordinal, p->name, p->major, p->minor, LEAST_MAJOR);
    snprintf(cuda->isa, sizeof cuda->isa, "sm_%d%d", p->major, p->minor);
    QD_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    QD_CUDA_TRY(cudaStreamCreateWithPriority(&cuda->compute.stream, cudaStreamNonBlocking, least));
    /* Communication has priority where both have work: other ranks wait for it. */
    QD_CUDA_TRY(cudaStreamCreateWithPriority(&cuda->comm.stream, cudaStreamNonBlocking, greatest));
    QD_CUDA_TRY(cudaStreamCreateWithPriority(&cuda->in.stream, cudaStreamNonBlocking, least));
    QD_CUDA_TRY(cudaStreamCreateWithPriority(&cuda->out.stream, cudaStreamNonBlocking, least));
    void *workspace, *fault;
    QD_TRY(take_memory(cuda, "a record", sizeof *cuda->fault, NULL, &fault));
    cuda->fault = fault;
    QD_CUDA_TRY(cudaMemsetAsync(cuda->fault, 0, sizeof *cuda->fault, cuda->compute.stream));
    QD_CUDA_TRY(cudaHostAlloc((void **)&cuda->fault_seen, sizeof *cuda->fault_seen, cudaHostAllocPortable));
    QD_TRY(qd_cuda_workspace(&cuda->compute.base, QD_CUDA_WORKSPACE_BYTES, &workspace));
    QD_TRY(qd_cuda_gemms_create(cuda));
    QD_TRY(qd_cuda_attention_create(cuda));
    return QD_OK;
}

qd_status qd_cuda_device_create(const qd_device_config *config, qd_device **device)
{
    qd_status status;
    int ordinal = 0, count = 0;
    QD_TRY(choose_device(config, &ordinal, &count));
    QD_TRY(qd_cuda_libraries_load());
    qd_cuda *cuda = calloc(1, sizeof *cuda);
    if (!cuda)
        return QD_FAIL(QD_NO_MEMORY, "cuda device: no memory for its description");
    cuda->ordinal = ordinal;
    cuda->deterministic = config->deterministic;
    cuda->compute.base.device = cuda->comm.base.device = cuda->in.base.device = cuda->out.base.device = &cuda->base;
    cuda->base.ops = &ops;
    cuda->base.kernels = &kernels;
    cuda->base.compute = &cuda->compute.base;
    cuda->base.comm = &cuda->comm.base;
    cuda->base.in = &cuda->in.base;
    cuda->base.out = &cuda->out.base;
    cuda->base.caps.name = "cuda";
    cuda->base.caps.isa = cuda->isa;
    cuda->base.caps.blas = cuda->blas;
    cuda->base.caps.threads = config->threads;
    cuda->base.caps.count = count;
    QD_TRY_DONE(open_device(cuda));
    *device = &cuda->base;
    return QD_OK;
done:
    cuda_destroy(&cuda->base);
    return status;
}
