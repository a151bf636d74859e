/* The CUDA device, as its C files see it: cuda.c (memory, streams, events), gemm/matmul*.c
 * (cuBLASLt), attention/attention_cudnn*.c. Kernels in .cu files see launch_impl.h only.
 *
 * Ranks may be threads of one process that share a GPU or have one each: every entry point makes
 * its device current first. cuda.c does so for the kernel table and for the calls below, so the
 * functions declared here find it current. */
#ifndef QD_DEVICE_CUDA_CUDA_IMPL_H
#define QD_DEVICE_CUDA_CUDA_IMPL_H

#include "device/cuda/launch_impl.h"
#include "device/device_impl.h"

#include <cublasLt.h>
#include <cudnn.h>

/* Initial workspace of the compute stream, for cuBLASLt. The communication stream starts without
 * one. */
#define QD_CUDA_WORKSPACE_BYTES ((int64_t)64 << 20)

/* The ceiling's GEMM has size x size operands of bf16: large enough to run for more than a
 * millisecond. */
#define QD_CUDA_CEILING_SIZE 8192
#define QD_CUDA_CEILING_BYTES ((int64_t)3 * 2 * QD_CUDA_CEILING_SIZE * QD_CUDA_CEILING_SIZE)

typedef struct qd_cuda_stream {
    qd_stream base; /* first: a qd_stream * of a CUDA device is a qd_cuda_stream * */
    cudaStream_t stream;
    void *workspace;
    int64_t workspace_bytes;
} qd_cuda_stream;

typedef struct qd_cuda_gemms qd_cuda_gemms;   /* gemm/matmul.c: chosen algorithms, descriptors */
typedef struct qd_cuda_attention qd_cuda_attention; /* attention/attention_cudnn.c: plans built so far */

typedef struct qd_cuda {
    qd_device base; /* first: a qd_device * of kind "cuda" is a qd_cuda * */
    qd_cuda_stream compute, comm, in, out;
    int ordinal;
    struct cudaDeviceProp properties;
    bool deterministic;
    qd_cuda_fault *fault, *fault_seen; /* the kernels' record, and its copy in page-locked memory */
    void *ceiling; /* operands of the ceiling's GEMM, after its first run */
    char isa[16], blas[32];
    cublasLtHandle_t blas_handle; /* this and the following: created by the functions below, NULL before */
    qd_cuda_gemms *gemms;
    cudnnHandle_t cudnn_handle;
    qd_cuda_attention *attention;
} qd_cuda;

static inline qd_cuda *qd_cuda_of(qd_stream *stream)
{
    return (qd_cuda *)stream->device;
}

static inline cudaStream_t qd_cuda_stream_of(qd_stream *stream)
{
    return ((qd_cuda_stream *)stream)->stream;
}

/* Called once, when streams, workspace and properties exist. qd_cuda_gemms_create sets blas_handle,
 * gemms, the text `blas` ("cuBLASLt 13.0") and the fused_* fields of base.caps. The destroy
 * functions accept a partly created device. */
qd_status qd_cuda_gemms_create(qd_cuda *cuda);
void qd_cuda_gemms_destroy(qd_cuda *cuda);
qd_status qd_cuda_attention_create(qd_cuda *cuda);
void qd_cuda_attention_destroy(qd_cuda *cuda);

/* Device memory that the two hold in addition to the workspace, by name; each item starts with ",
 * ". */
void qd_cuda_gemms_describe(const qd_cuda *cuda, qd_strbuf *text);
void qd_cuda_attention_describe(const qd_cuda *cuda, qd_strbuf *text);

/* qd_device_ops.tune and so on (gemm/matmul*.c). */
qd_status qd_cuda_tune(qd_device *device, const qd_tune_args *args, bool *searched);
qd_status qd_cuda_tune_more(qd_device *device, const qd_tune_args *args, int *left);
qd_status qd_cuda_tuning_get(qd_device *device, qd_strbuf *text);
qd_status qd_cuda_tuning_set(qd_device *device, const char *text);

/* Attention through cuDNN. QD_UNSUPPORTED, before any work and without recording an error, for what
 * cuDNN does not support: types, head sizes, document masks. The caller then runs our own
 * kernels. */
qd_status qd_cuda_attention_forward_cudnn(qd_stream *stream, const qd_attention_args *a);
qd_status qd_cuda_attention_backward_cudnn(qd_stream *stream, const qd_attention_args *a);

/* qd_device_ops.reach, .make_current and .native (reach.c). */
qd_status qd_cuda_reach(qd_device *device, qd_device *other);
qd_status qd_cuda_make_current(qd_device *device);
void *qd_cuda_native(qd_stream *stream);

/* qd_device_ops.run_fma: one large bf16 GEMM (ceiling.c). */
qd_status qd_cuda_run_fma(qd_stream *stream, double *flops);

/* Attention lines of the tuning text (attention/attention_cudnn.c): get writes all, set reads
 * one. */
void qd_cuda_attention_tuning_get(const qd_cuda *cuda, qd_strbuf *text);
qd_status qd_cuda_attention_tuning_set(qd_cuda *cuda, const char *line);
#endif
