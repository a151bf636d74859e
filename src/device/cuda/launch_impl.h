/* What kernels (.cu files, C++) and the C files of the CUDA device share. Neither `struct qd_cuda`
 * nor library handles are visible here: see cuda_impl.h, which is C only. */
#ifndef QD_DEVICE_CUDA_LAUNCH_IMPL_H
#define QD_DEVICE_CUDA_LAUNCH_IMPL_H

#ifdef __cplusplus
extern "C" {
#endif

#include "device/arguments_impl.h"

#include <cuda_runtime_api.h>

/* Recorded in device memory by a kernel that reads an invalid index. The host cannot check before
 * the kernel runs, so the next qd_stream_wait reports it. */
typedef enum qd_cuda_fault_kind {
    QD_CUDA_NO_FAULT,
    QD_CUDA_BAD_TOKEN,
    QD_CUDA_BAD_POSITION,
    QD_CUDA_BAD_TARGET,
    QD_CUDA_BAD_EXPERT
} qd_cuda_fault_kind;
typedef struct qd_cuda_fault {
    int kind; /* qd_cuda_fault_kind */
    int value;
    long long row, bound; /* values must be below bound; -1: at least 0 */
} qd_cuda_fault;

/* Where and how to launch: properties of a stream and its device. */
typedef struct qd_cuda_launch {
    cudaStream_t stream;
    int multiprocessors;
    int shared_most;      /* most bytes of shared memory per block */
    bool deterministic;
    bool has_wgmma;       /* a Hopper GPU, and this build has sm_90a code */
    qd_cuda_fault *fault; /* device address */
} qd_cuda_launch;
qd_cuda_launch qd_cuda_launch_of(qd_stream *stream);

/* At least `bytes` of scratch memory for the call that is being enqueued on this stream, aligned to
 * 256 bytes. Its contents are undefined. The next call on the stream may use it too, which is safe
 * because a stream runs its work in order. It is reallocated where it is too small: at most once
 * for calls of one shape. */
qd_status qd_cuda_workspace(qd_stream *stream, int64_t bytes, void **address);

/* Records the failure of a CUDA runtime call and clears its sticky state. Out of memory becomes
 * QD_NO_MEMORY, with free and total bytes. */
qd_status qd_cuda_fail_at(const char *file, int line, const char *function, const char *call, cudaError_t error);
#define QD_CUDA_TRY(call)                                                                                   \
    do {                                                                                                    \
        cudaError_t qd_cuda_error = (call);                                                                 \
        if (qd_cuda_error != cudaSuccess)                                                                   \
            return qd_cuda_fail_at(__FILE__, __LINE__, __func__, #call, qd_cuda_error);                     \
    } while (0)
/* For functions with one `done:` label that cleans up and returns `status`. */
#define QD_CUDA_TRY_DONE(call)                                                                              \
    do {                                                                                                    \
        cudaError_t qd_cuda_error = (call);                                                                 \
        if (qd_cuda_error != cudaSuccess) {                                                                 \
            status = qd_cuda_fail_at(__FILE__, __LINE__, __func__, #call, qd_cuda_error);                   \
            goto done;                                                                                      \
        }                                                                                                   \
    } while (0)

/* The kernels. Slot S of the table is qd_cuda_S; the stream's device is current when it is
 * called. */
#define QD_CUDA_KERNEL(slot, args) qd_status qd_cuda_##slot(qd_stream *stream, const args *a);
QD_KERNEL_TABLE(QD_CUDA_KERNEL)
#undef QD_CUDA_KERNEL

/* bf16 numbers in [-1, 1), for benchmarks. */
qd_status qd_cuda_fill_random(qd_stream *stream, void *to, int64_t n);

#ifdef __cplusplus
}
#endif
#endif
