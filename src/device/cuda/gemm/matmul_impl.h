/* GEMM through cuBLASLt: what the matmul*.c files share.
 *
 *   matmul.c         the kernel slot: finds the choice for a call and runs it, with the steps that
 *                    are not fused
 *   matmul_plan.c    descriptors of a GEMM, and the algorithms that cuBLASLt offers for it
 *   matmul_tune.c    times epilogue splits and algorithms on random data and keeps the fastest
 *   matmul_text.c    the choices as text
 *   matmul_steps.cu  the steps that are not fused
 *
 * cuBLASLt's matrices are column-major: a row-major c = op(a)·op(b) is its cᵀ = op(b)ᵀ·op(a)ᵀ. So
 * its first operand is our b, its rows are our columns, and a vector along its rows (the bias) runs
 * along our columns. */
#ifndef QD_DEVICE_CUDA_GEMM_MATMUL_IMPL_H
#define QD_DEVICE_CUDA_GEMM_MATMUL_IMPL_H

#include "base/fp8.h"
#include "device/cuda/cuda_impl.h"
#include "device/cuda/gemm/matmul_steps_impl.h"

/* What a call requests in addition to the plain GEMM. */
enum {
    QD_GEMM_ACCUMULATE = 1,
    QD_GEMM_BIAS = 2,
    QD_GEMM_RESIDUAL = 4,
    QD_GEMM_GELU = 8,
    QD_GEMM_GELU_GRAD = 16,
    QD_GEMM_BIAS_GRAD = 32,
    QD_GEMM_FAST = 64, /* fp8: tensor cores may keep fewer bits of a sum */
    QD_GEMM_A_SCALING = 128, /* times qd_fp8_scaling of a, and of b */
    QD_GEMM_B_SCALING = 512,
    /* the parts that a cuBLASLt epilogue can do */
    QD_GEMM_EPILOGUES = QD_GEMM_BIAS | QD_GEMM_GELU | QD_GEMM_GELU_GRAD | QD_GEMM_BIAS_GRAD,
};

/* What a choice depends on. Plain integers without padding, so that keys compare and hash as
 * bytes. */
typedef struct qd_gemm_key {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t trans_a, trans_b;
    int32_t a_dtype, b_dtype, c_dtype;
    int32_t wants;     /* QD_GEMM_* */
    int32_t alignment; /* of all addresses, in bytes; 16 means 16 or more */
    int32_t unused;
} qd_gemm_key;

/* One way to compute a GEMM. */
typedef struct qd_gemm_choice {
    cublasLtMatmulAlgo_t algorithm;
    int64_t workspace_bytes;
    int32_t fused;     /* QD_GEMM_*: done by the epilogue; the others are separate steps */
    int32_t converted; /* through fp32 copies, for types or strides that cuBLASLt does not support */
    int32_t rough;     /* found under a time limit: a longer search may find a faster one */
    double seconds;    /* measured; 0: not timed */
} qd_gemm_choice;

/* A GEMM, its choice and the descriptors to run it. */
typedef struct qd_gemm {
    qd_gemm_key key;
    qd_gemm_choice choice;
    bool used, built;
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t a, b, c; /* in cuBLASLt's terms: of our b, a, c */
} qd_gemm;

struct qd_cuda_gemms {
    qd_gemm *table; /* open addressing; capacity is a power of two */
    int capacity, count;
};

enum { QD_GEMM_CANDIDATES = 32, QD_GEMM_SIBLINGS = 24, QD_GEMM_VARIANTS = 72, QD_GEMM_NEIGHBOURS = 96 };

qd_gemm_key qd_gemm_key_of(const qd_matmul_args *a);

/* matmul.c: the one or two GEMMs that a call runs as, in order (device/aligned_gemm.h). */
int qd_gemm_parts(const qd_matmul_args *a, qd_matmul_args parts[2]);
/* The entry of a key, added if it does not exist. Adding one invalidates earlier pointers. */
qd_status qd_gemm_find(qd_cuda_gemms *gemms, const qd_gemm_key *key, qd_gemm **found);
/* Gives a GEMM a choice without timing, if it has none yet, and its descriptors. */
qd_status qd_gemm_prepare(qd_cuda *cuda, qd_gemm *gemm);
/* Runs a prepared GEMM with its choice. */
qd_status qd_gemm_run(qd_stream *stream, qd_gemm *gemm, const qd_matmul_args *a);

/* matmul_plan.c: descriptors of the GEMM with the `fused` parts in the epilogue. */
qd_status qd_gemm_build(qd_gemm *gemm, const qd_gemm_choice *choice);
void qd_gemm_unbuild(qd_gemm *gemm);
/* Up to QD_GEMM_CANDIDATES algorithms for a GEMM whose descriptors are built, in the order of the
 * library's heuristic. */
qd_status qd_gemm_candidates(qd_cuda *cuda, const qd_gemm *gemm, qd_gemm_choice *choices, int *count);
/* Up to QD_GEMM_SIBLINGS more, which the library proposes for GEMMs of other sizes but accepts for
 * this one too: for some sizes its heuristic misses a whole family of kernels. */
int qd_gemm_siblings(qd_cuda *cuda, const qd_gemm *gemm, const qd_gemm_choice *candidates, int count,
                        qd_gemm_choice *siblings);
/* Up to QD_GEMM_SIBLINGS more: the choices of other GEMMs with the same types, transposes and
 * epilogue. */
int qd_gemm_transfers(qd_cuda *cuda, const qd_gemm *gemm, const qd_gemm_choice *candidates, int count,
                         qd_gemm_choice *transfers);
/* Up to QD_GEMM_VARIANTS more: each is one of the candidates (best first) with one setting (tile,
 * cluster, stages, …) of another, if the library accepts it. The library proposes few algorithms,
 * and not always the best combination of settings. */
int qd_gemm_variants(qd_cuda *cuda, const qd_gemm *gemm, const qd_gemm_choice *candidates, int count,
                        qd_gemm_choice *variants);
/* Up to QD_GEMM_NEIGHBOURS more: the best candidate, which comes first, with one setting changed to
 * each value that the library accepts, proposed or not. A second call continues from the best of
 * those. */
int qd_gemm_neighbours(qd_cuda *cuda, const qd_gemm *gemm, const qd_gemm_choice *candidates, int count,
                          qd_gemm_choice *neighbours);
/* Whether the library accepts an algorithm read from a tuning text for this GEMM, within the
 * workspace. */
bool qd_gemm_check(qd_cuda *cuda, const qd_gemm *gemm, const qd_gemm_choice *choice);
/* Ways to split a call between epilogue and separate steps, most fused first. Returns their number,
 * at most QD_GEMM_WAYS. */
enum { QD_GEMM_WAYS = 4 };
int qd_gemm_ways(const qd_gemm_key *key, qd_gemm_choice *ways);

/* The type of a bias: fp8 operands have one of c's type. */
static inline qd_dtype qd_gemm_bias_dtype(int32_t b_dtype, int32_t c_dtype)
{
    return (qd_dtype)(qd_dtype_is_fp8((qd_dtype)b_dtype) ? c_dtype : b_dtype);
}

/* Size in bytes of a matrix of `rows` rows of `columns` elements with row stride ld. */
int64_t qd_gemm_span(int64_t rows, int64_t columns, int64_t ld, qd_dtype dtype);

qd_status qd_cublas_fail_at(const char *file, int line, const char *function, const char *call, cublasStatus_t error);
#define QD_CUBLAS_TRY(call)                                                                                 \
    do {                                                                                                    \
        cublasStatus_t qd_cublas_error = (call);                                                            \
        if (qd_cublas_error != CUBLAS_STATUS_SUCCESS)                                                       \
            return qd_cublas_fail_at(__FILE__, __LINE__, __func__, #call, qd_cublas_error);                 \
    } while (0)

#endif
