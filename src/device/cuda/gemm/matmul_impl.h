/* Products through cuBLASLt: what the matmul*.c files share.
 *
 *   matmul.c          the kernel slot: finds the choice for a call and runs it, with the steps that are not fused
 *   matmul_plan.c     descriptors of a product, and the algorithms that cuBLASLt offers for it
 *   matmul_tune.c     times ways and algorithms on random data and keeps the fastest
 *   matmul_text.c     the choices as text
 *   matmul_steps.cu   the steps that are not fused
 *
 * cuBLASLt's matrices are column-major: a row-major c = op(a)·op(b) is its cᵀ = op(b)ᵀ·op(a)ᵀ. So
 * its first operand is our b, its rows are our columns, and a vector along its rows (the bias) runs
 * along our columns. */
#ifndef QD_DEVICE_CUDA_GEMM_MATMUL_IMPL_H
#define QD_DEVICE_CUDA_GEMM_MATMUL_IMPL_H

#include "device/cuda/cuda_impl.h"
#include "device/cuda/gemm/matmul_steps_impl.h"

/* What a call asks for beyond the bare product. */
enum {
    QD_PRODUCT_ACCUMULATE = 1,
    QD_PRODUCT_BIAS = 2,
    QD_PRODUCT_RESIDUAL = 4,
    QD_PRODUCT_GELU = 8,
    QD_PRODUCT_GELU_GRAD = 16,
    QD_PRODUCT_BIAS_GRAD = 32,
    /* the parts that an epilogue of cuBLASLt can do */
    QD_PRODUCT_EPILOGUES = QD_PRODUCT_BIAS | QD_PRODUCT_GELU | QD_PRODUCT_GELU_GRAD | QD_PRODUCT_BIAS_GRAD,
};

/* What a choice depends on. Plain numbers without gaps between them, so that keys compare and hash
 * as bytes. */
typedef struct qd_product_key {
    int64_t m, n, k, lda, ldb, ldc;
    int32_t trans_a, trans_b;
    int32_t a_dtype, b_dtype, c_dtype;
    int32_t wants;     /* QD_PRODUCT_* */
    int32_t alignment; /* of all addresses, in bytes: 16 stands for 16 and more */
    int32_t unused;
} qd_product_key;

/* One way to compute a product. */
typedef struct qd_product_choice {
    cublasLtMatmulAlgo_t algorithm;
    int64_t workspace_bytes;
    int32_t fused;     /* QD_PRODUCT_*: done by the epilogue; the rest are steps of their own */
    int32_t converted; /* operands and result go through fp32 copies, for types or strides that cuBLASLt does not take */
    double seconds;    /* as timed; 0: not timed */
} qd_product_choice;

/* A product, its choice and the descriptors to run it. */
typedef struct qd_product {
    qd_product_key key;
    qd_product_choice choice;
    bool used, built;
    cublasLtMatmulDesc_t how;
    cublasLtMatrixLayout_t a, b, c; /* cuBLASLt's, that is: of our b, a, c */
} qd_product;

struct qd_cuda_products {
    qd_product *table; /* open addressing; capacity is a power of two */
    int capacity, count;
};

enum { QD_PRODUCT_CANDIDATES = 32, QD_PRODUCT_SIBLINGS = 24, QD_PRODUCT_VARIANTS = 72, QD_PRODUCT_NEIGHBOURS = 96 };

qd_product_key qd_product_key_of(const qd_matmul_args *a);

/* matmul.c: the GEMMs that a call is run as, one or two, in order (device/aligned_gemm.h). */
int qd_product_parts(const qd_matmul_args *a, qd_matmul_args parts[2]);
/* The place of a key, which is added if it is not there. Earlier places become invalid when one is
 * added. */
qd_status qd_product_find(qd_cuda_products *products, const qd_product_key *key, qd_product **found);
/* Gives a product a choice without timing, if it has none yet, and its descriptors. */
qd_status qd_product_prepare(qd_cuda *cuda, qd_product *product);
/* Runs a prepared product with its choice. */
qd_status qd_product_run(qd_stream *stream, qd_product *product, const qd_matmul_args *a);

/* matmul_plan.c: descriptors for the product with `fused` parts in the epilogue. */
qd_status qd_product_build(qd_product *product, const qd_product_choice *choice);
void qd_product_unbuild(qd_product *product);
/* Up to QD_PRODUCT_CANDIDATES algorithms for a product whose descriptors are built, the library's
 * favourite first. */
qd_status qd_product_candidates(qd_cuda *cuda, const qd_product *product, qd_product_choice *choices, int *count);
/* Up to QD_PRODUCT_SIBLINGS more that the library proposes for products of other sizes and takes
 * for this one too: for some sizes it overlooks a whole family of kernels. */
int qd_product_siblings(qd_cuda *cuda, const qd_product *product, const qd_product_choice *candidates, int count,
                        qd_product_choice *siblings);
/* Up to QD_PRODUCT_SIBLINGS more: what other GEMMs of the same types and transposes have come to
 * use with the same epilogue. */
int qd_product_transfers(qd_cuda *cuda, const qd_product *product, const qd_product_choice *candidates, int count,
                         qd_product_choice *transfers);
/* Up to QD_PRODUCT_VARIANTS more: each is one of the candidates, the best of which come first, with
 * one setting (tile, cluster, stages, …) of another, as far as the library takes it. The library
 * proposes few, and not always the best combination of what it knows. */
int qd_product_variants(qd_cuda *cuda, const qd_product *product, const qd_product_choice *candidates, int count,
                        qd_product_choice *variants);
/* Up to QD_PRODUCT_NEIGHBOURS more: the best candidate, which comes first, with one setting changed
 * to each value that the library takes, whether it proposed that value or not. Called again, it
 * goes on from the best of those. */
int qd_product_neighbours(qd_cuda *cuda, const qd_product *product, const qd_product_choice *candidates, int count,
                          qd_product_choice *neighbours);
/* Whether the library takes an algorithm that was read from a text for this product, within the
 * workspace. */
bool qd_product_check(qd_cuda *cuda, const qd_product *product, const qd_product_choice *choice);
/* Ways to split a call between epilogue and steps, the most fused first; returns how many, at most
 * QD_PRODUCT_WAYS. */
enum { QD_PRODUCT_WAYS = 4 };
int qd_product_ways(const qd_product_key *key, qd_product_choice *ways);

/* The bytes of a matrix of `rows` rows of `columns` elements with row stride ld. */
int64_t qd_product_span(int64_t rows, int64_t columns, int64_t ld, qd_dtype dtype);

qd_status qd_cublas_fail_at(const char *file, int line, const char *function, const char *call, cublasStatus_t error);
#define QD_CUBLAS_TRY(call)                                                                                 \
    do {                                                                                                    \
        cublasStatus_t qd_cublas_error = (call);                                                            \
        if (qd_cublas_error != CUBLAS_STATUS_SUCCESS)                                                       \
            return qd_cublas_fail_at(__FILE__, __LINE__, __func__, #call, qd_cublas_error);                 \
    } while (0)

#endif
