/* The matmul slot: checks a call, finds the choice made for its shape, and runs it with the steps
 * that the choice leaves to separate kernels. Choices and descriptors are cached, so that a
 * training step only looks up and launches. */
#include "device/cuda/gemm/matmul_impl.h"
#include "device/aligned_gemm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int64_t round_up(int64_t bytes)
{
    return (bytes + 255) & ~(int64_t)255;
}

qd_status qd_cublas_fail_at(const char *file, int line, const char *function, const char *call, cublasStatus_t error)
{
    qd_status status = error == CUBLAS_STATUS_ALLOC_FAILED ? QD_NO_MEMORY : QD_SYSTEM;
    return qd_fail_at(file, line, function, status, "cuBLASLt: %s: %s", call, cublasLtGetStatusString(error));
}

qd_status qd_cuda_gemms_create(qd_cuda *cuda)
{
    QD_CUBLAS_TRY(cublasLtCreate(&cuda->blas_handle));
    cuda->gemms = calloc(1, sizeof *cuda->gemms);
    if (!cuda->gemms)
        return QD_FAIL(QD_NO_MEMORY, "GEMM table: no host memory");
    int major = 0, minor = 0;
    QD_CUBLAS_TRY(cublasLtGetProperty(MAJOR_VERSION, &major));
    QD_CUBLAS_TRY(cublasLtGetProperty(MINOR_VERSION, &minor));
    snprintf(cuda->blas, sizeof cuda->blas, "cuBLASLt %d.%d", major, minor);
    cuda->base.caps.fused_residual = true;
    cuda->base.caps.fused_gelu = true;
    cuda->base.caps.fused_bias_grad = true;
    cuda->base.caps.fp8 = 10 * cuda->properties.major + cuda->properties.minor >= 89;
    cuda->base.caps.fp8_recipes = cuda->properties.major == 9; /* cuBLASLt has such GEMMs for Hopper only */
    return QD_OK;
}

void qd_cuda_gemms_destroy(qd_cuda *cuda)
{
    if (cuda->gemms) {
        for (int i = 0; i < cuda->gemms->capacity; i++)
            qd_gemm_unbuild(&cuda->gemms->table[i]);
        free(cuda->gemms->table);
        free(cuda->gemms);
        cuda->gemms = NULL;
    }
    if (cuda->blas_handle)
        cublasLtDestroy(cuda->blas_handle);
    cuda->blas_handle = NULL;
}

void qd_cuda_gemms_describe(const qd_cuda *cuda, qd_strbuf *text)
{
    (void)cuda;
    (void)text; /* GEMMs use the stream's workspace */
}

static uint64_t hash_key(const qd_gemm_key *key)
{
    uint64_t words[sizeof *key / 8], h = 0x9E3779B97F4A7C15u;
    _Static_assert(sizeof *key % 8 == 0, "the key is hashed by words");
    memcpy(words, key, sizeof *key);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) {
        h = (h ^ words[i]) * 0xFF51AFD7ED558CCDu;
        h ^= h >> 32;
    }
    return h;
}

/* The entry of a key, or the free one where it would be inserted. */
static qd_gemm *place_of(qd_gemm *table, int capacity, const qd_gemm_key *key)
{
    size_t mask = (size_t)capacity - 1, i = (size_t)hash_key(key) & mask;
    while (table[i].used && memcmp(&table[i].key, key, sizeof *key) != 0)
        i = (i + 1) & mask;
    return &table[i];
}

static qd_status grow_table(qd_cuda_gemms *gemms)
{
    int capacity = gemms->capacity ? 2 * gemms->capacity : 64;
    qd_gemm *table = calloc((size_t)capacity, sizeof *table);
    if (!table)
        return QD_FAIL(QD_NO_MEMORY, "GEMM table: no host memory for %d choices", capacity);
    for (int i = 0; i < gemms->capacity; i++)
        if (gemms->table[i].used)
            *place_of(table, capacity, &gemms->table[i].key) = gemms->table[i];
    free(gemms->table);
    gemms->table = table;
    gemms->capacity = capacity;
    return QD_OK;
}

qd_status qd_gemm_find(qd_cuda_gemms *gemms, const qd_gemm_key *key, qd_gemm **found)
{
    if (gemms->capacity) {
        *found = place_of(gemms->table, gemms->capacity, key);
        if ((*found)->used)
            return QD_OK;
    }
    if (2 * (gemms->count + 1) > gemms->capacity)
        QD_TRY(grow_table(gemms));
    *found = place_of(gemms->table, gemms->capacity, key);
    **found = (qd_gemm){.key = *key, .used = true};
    gemms->count++;
    return QD_OK;
}

qd_gemm_key qd_gemm_key_of(const qd_matmul_args *a)
{
    uintptr_t addresses = (uintptr_t)a->a | (uintptr_t)a->b | (uintptr_t)a->c | (uintptr_t)a->bias |
                          (uintptr_t)a->residual | (uintptr_t)a->aux | 16;
    int wants = (a->accumulate ? QD_GEMM_ACCUMULATE : 0) | (a->bias ? QD_GEMM_BIAS : 0) |
                (a->residual ? QD_GEMM_RESIDUAL : 0) | (a->gelu == QD_MATMUL_GELU ? QD_GEMM_GELU : 0) |
                (a->gelu == QD_MATMUL_GELU_GRAD ? QD_GEMM_GELU_GRAD : 0) | (a->bias_grad ? QD_GEMM_BIAS_GRAD : 0) |
                (a->fast && qd_dtype_is_fp8(a->a_dtype) ? QD_GEMM_FAST : 0) | QD_GEMM_A_SCALING * (int)a->a_scaling |
                QD_GEMM_B_SCALING * (int)a->b_scaling;
    return (qd_gemm_key){
        .m = a->m, .n = a->n, .k = a->k, .lda = a->lda, .ldb = a->ldb, .ldc = a->ldc,
        .trans_a = a->trans_a, .trans_b = a->trans_b,
        .a_dtype = (int32_t)a->a_dtype, .b_dtype = (int32_t)a->b_dtype, .c_dtype = (int32_t)a->c_dtype,
        .wants = wants, .alignment = (int32_t)(addresses & (~addresses + 1)),
    };
}

qd_status qd_gemm_prepare(qd_cuda *cuda, qd_gemm *gemm)
{
    if (gemm->built)
        return QD_OK;
    if (gemm->choice.seconds > 0) { /* loaded from a tuning text */
        if (gemm->choice.converted) {
            gemm->built = true;
            return QD_OK;
        }
        if (qd_gemm_build(gemm, &gemm->choice) == QD_OK && qd_gemm_check(cuda, gemm, &gemm->choice))
            return QD_OK;
        qd_gemm_unbuild(gemm);
        qd_error_clear();
    }
    qd_gemm_choice ways[QD_GEMM_WAYS], candidates[QD_GEMM_CANDIDATES];
    int way_count = qd_gemm_ways(&gemm->key, ways);
    for (int w = 0; w < way_count; w++) {
        int count = 0;
        gemm->choice = ways[w];
        if (ways[w].converted) {
            gemm->built = true; /* runs as another GEMM, in fp32 */
            return QD_OK;
        }
        QD_TRY(qd_gemm_build(gemm, &ways[w]));
        QD_TRY(qd_gemm_candidates(cuda, gemm, candidates, &count));
        if (count > 0) {
            gemm->choice = candidates[0];
            return QD_OK;
        }
        qd_gemm_unbuild(gemm);
    }
    return QD_FAIL(QD_UNSUPPORTED, "matmul (%lld, %lld, %lld): cuBLASLt has no algorithm for it", (long long)gemm->key.m,
                   (long long)gemm->key.n, (long long)gemm->key.k);
}

typedef struct gemm_args {
    const void *a, *b, *c; /* c: added, with beta 1 */
    void *d, *aux;
    const void *bias; /* or the address of the bias gradient */
    const float *a_scale, *b_scale; /* of fp8 operands, else NULL */
    bool add;
    void *workspace;
} gemm_args;

static qd_status run_gemm(qd_stream *stream, qd_gemm *p, const gemm_args *g)
{
    const float alpha = 1, beta = g->add ? 1 : 0;
    if (p->choice.fused & (QD_GEMM_BIAS | QD_GEMM_BIAS_GRAD))
        QD_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(p->how, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof g->bias));
    if (p->choice.fused & (QD_GEMM_GELU | QD_GEMM_GELU_GRAD))
        QD_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(p->how, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->aux,
                                                     sizeof g->aux));
    if (g->a_scale) {
        QD_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(p->how, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, &g->b_scale, sizeof g->b_scale));
        QD_CUBLAS_TRY(cublasLtMatmulDescSetAttribute(p->how, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, &g->a_scale, sizeof g->a_scale));
    }
    QD_CUBLAS_TRY(cublasLtMatmul(qd_cuda_of(stream)->blas_handle, p->how, &alpha, g->b, p->a, g->a, p->b, &beta, g->c, p->c,
                                 g->d, p->c, &p->choice.algorithm, g->workspace, (size_t)p->choice.workspace_bytes,
                                 qd_cuda_stream_of(stream)));
    return QD_OK;
}

static const char *row_of(const void *at, int64_t row, const qd_matmul_args *a)
{
    return at ? (const char *)at + row * a->ldc * (int64_t)qd_dtype_size(a->c_dtype) : NULL;
}

/* GELU of aux into c, or c times the derivative at aux, with kernels of the table, which need
 * contiguous rows. */
static qd_status run_gelu(qd_stream *stream, const qd_matmul_args *a)
{
    bool whole = a->ldc == a->n;
    for (int64_t row = 0; row < (whole ? 1 : a->m); row++) {
        void *c = (void *)(uintptr_t)row_of(a->c, row, a);
        qd_activation_args args = {.kind = QD_ACT_GELU_TANH, .x = row_of(a->aux, row, a), .rows = whole ? a->m : 1,
                                   .cols = a->n, .dtype = a->c_dtype};
        if (a->gelu == QD_MATMUL_GELU) {
            args.y = c;
            QD_TRY(qd_cuda_activation_forward(stream, &args));
        } else {
            args.dy = c;
            args.dx = c;
            QD_TRY(qd_cuda_activation_backward(stream, &args));
        }
    }
    return QD_OK;
}

static qd_status run_bias_grad(qd_stream *stream, const qd_matmul_args *a)
{
    if (a->trans_a && a->lda == a->m)
        return qd_cuda_bias_grad(stream, &(qd_bias_grad_args){
            .dy = a->a, .grad = a->bias_grad, .rows = a->k, .cols = a->m, .accumulate = a->accumulate, .dtype = a->a_dtype,
            .grad_dtype = a->c_dtype});
    return qd_gemm_row_sums_run(stream, &(qd_gemm_row_sums){
        .to = a->bias_grad, .x = a->a, .m = a->m, .k = a->k, .ld = a->lda, .transposed = a->trans_a,
        .accumulate = a->accumulate, .to_dtype = a->c_dtype, .x_dtype = a->a_dtype});
}

/* target = product [+ c] [+ residual] [+ bias]; product: (m, n) contiguous fp32, or NULL */
static qd_status run_sum(qd_stream *stream, const qd_matmul_args *a, void *target, const float *product, bool with_bias)
{
    qd_gemm_sum sum = {
        .to = target, .x = a->accumulate ? a->c : NULL, .y = a->residual, .bias = with_bias ? a->bias : NULL,
        .rows = a->m, .columns = a->n, .to_ld = a->ldc, .x_ld = a->ldc, .y_ld = a->ldc,
        .to_dtype = a->c_dtype, .x_dtype = a->c_dtype, .y_dtype = a->c_dtype,
        .bias_dtype = qd_gemm_bias_dtype((int32_t)a->b_dtype, (int32_t)a->c_dtype),
    };
    if (product && sum.x && sum.y) { /* three matrices: c + residual first */
        qd_gemm_sum two = sum;
        two.bias = NULL;
        QD_TRY(qd_gemm_sum_run(stream, &two));
        sum.y = NULL;
    }
    if (product) {
        if (!sum.x) {
            sum.x = sum.y;
            sum.x_ld = sum.y_ld;
        }
        sum.y = product;
        sum.y_ld = a->n;
        sum.y_dtype = QD_F32;
    }
    return qd_gemm_sum_run(stream, &sum);
}

/* to (rows, columns), contiguous fp32 = x */
static qd_status widen(qd_stream *stream, float *to, const void *x, int64_t rows, int64_t columns, int64_t ld, qd_dtype dtype)
{
    return qd_gemm_sum_run(stream, &(qd_gemm_sum){
        .to = to, .x = x, .rows = rows, .columns = columns, .to_ld = columns, .x_ld = ld, .to_dtype = QD_F32,
        .x_dtype = dtype});
}

/* Types or strides that cuBLASLt does not support: copies to fp32, a GEMM of those, and one
 * rounding. */
static qd_status run_converted(qd_stream *stream, const qd_matmul_args *a, void *target)
{
    qd_cuda *cuda = qd_cuda_of(stream);
    int64_t a_rows = a->trans_a ? a->k : a->m, a_columns = a->trans_a ? a->m : a->k;
    int64_t b_rows = a->trans_b ? a->n : a->k, b_columns = a->trans_b ? a->k : a->n;
    int64_t a_bytes = round_up(a->m * a->k * 4), b_bytes = round_up(a->k * a->n * 4), c_bytes = round_up(a->m * a->n * 4);
    qd_matmul_args wide = {
        .m = a->m, .n = a->n, .k = a->k, .lda = a_columns, .ldb = b_columns, .ldc = a->n,
        .trans_a = a->trans_a, .trans_b = a->trans_b, .a_dtype = QD_F32, .b_dtype = QD_F32, .c_dtype = QD_F32,
    };
    qd_gemm_key key = qd_gemm_key_of(&wide);
    qd_gemm *inner;
    QD_TRY(qd_gemm_find(cuda->gemms, &key, &inner));
    QD_TRY(qd_gemm_prepare(cuda, inner));
    if (inner->choice.converted)
        return QD_FAIL(QD_UNSUPPORTED, "matmul (%lld, %lld, %lld): cuBLASLt does not support it in fp32 either", (long long)a->m,
                       (long long)a->n, (long long)a->k);
    void *space;
    QD_TRY(qd_cuda_workspace(stream, a_bytes + b_bytes + c_bytes + inner->choice.workspace_bytes, &space));
    float *wide_a = space, *wide_b = (float *)((char *)space + a_bytes), *wide_c = (float *)((char *)wide_b + b_bytes);
    QD_TRY(widen(stream, wide_a, a->a, a_rows, a_columns, a->lda, a->a_dtype));
    QD_TRY(widen(stream, wide_b, a->b, b_rows, b_columns, a->ldb, a->b_dtype));
    QD_TRY(run_gemm(stream, inner, &(gemm_args){.a = wide_a, .b = wide_b, .c = wide_c, .d = wide_c,
                                                .workspace = (char *)wide_c + c_bytes}));
    return run_sum(stream, a, target, wide_c, a->bias != NULL);
}

/* The GEMM with its epilogue; `target` is c, or aux where GELU follows as a separate step. */
static qd_status run_direct(qd_stream *stream, qd_gemm *p, const qd_matmul_args *a, void *target, int steps)
{
    const bool bias_grad = p->choice.fused & QD_GEMM_BIAS_GRAD; /* the epilogue overwrites it */
    const bool apart = a->accumulate || (uintptr_t)a->bias_grad % 16 != 0;
    int64_t sums = bias_grad && apart ? round_up(a->m * (int64_t)qd_dtype_size(a->c_dtype)) : 0;
    void *space;
    QD_TRY(qd_cuda_workspace(stream, sums + p->choice.workspace_bytes, &space));
    gemm_args g = {
        .a = a->a, .b = a->b, .c = a->residual ? a->residual : target, .d = target, .aux = a->aux,
        .bias = sums ? space : bias_grad ? a->bias_grad : a->bias, .add = a->accumulate || a->residual,
        .a_scale = qd_dtype_is_fp8(a->a_dtype) ? a->a_scale : NULL, .b_scale = a->b_scale, .workspace = (char *)space + sums,
    };
    if (steps & QD_GEMM_BIAS || (a->accumulate && a->residual)) {
        /* Addends are stored in the target first, so that the GEMM rounds once. */
        QD_TRY(run_sum(stream, a, target, NULL, steps & QD_GEMM_BIAS));
        g.c = target;
        g.add = true;
    }
    QD_TRY(run_gemm(stream, p, &g));
    if (!sums)
        return QD_OK;
    return qd_gemm_sum_run(stream, &(qd_gemm_sum){
        .to = a->bias_grad, .x = a->accumulate ? a->bias_grad : NULL, .y = space, .rows = 1, .columns = a->m, .to_ld = a->m, .x_ld = a->m,
        .y_ld = a->m, .to_dtype = a->c_dtype, .x_dtype = a->c_dtype, .y_dtype = a->c_dtype});
}

qd_status qd_gemm_run(qd_stream *stream, qd_gemm *p, const qd_matmul_args *a)
{
    const bool converted = p->choice.converted;
    const int steps = p->key.wants & QD_GEMM_EPILOGUES & ~p->choice.fused;
    void *target = steps & QD_GEMM_GELU ? a->aux : a->c;
    if (converted)
        QD_TRY(run_converted(stream, a, target)); /* p may have moved */
    else
        QD_TRY(run_direct(stream, p, a, target, steps));
    if (steps & (QD_GEMM_GELU | QD_GEMM_GELU_GRAD))
        QD_TRY(run_gelu(stream, a));
    if (steps & QD_GEMM_BIAS_GRAD)
        QD_TRY(run_bias_grad(stream, a));
    return QD_OK;
}

/* k is 0: c is the sum of its addends. */
static qd_status run_empty(qd_stream *stream, const qd_matmul_args *a)
{
    QD_TRY(run_sum(stream, a, a->gelu == QD_MATMUL_GELU ? a->aux : a->c, NULL, a->bias != NULL));
    if (a->bias_grad)
        QD_TRY(run_bias_grad(stream, a));
    return a->gelu != QD_MATMUL_NO_GELU ? run_gelu(stream, a) : QD_OK;
}

static qd_status run_one(qd_stream *stream, const qd_matmul_args *a)
{
    qd_cuda *cuda = qd_cuda_of(stream);
    qd_gemm_key key = qd_gemm_key_of(a);
    qd_gemm *gemm;
    QD_TRY(qd_gemm_find(cuda->gemms, &key, &gemm));
    QD_TRY(qd_gemm_prepare(cuda, gemm));
    return qd_gemm_run(stream, gemm, a);
}

int qd_gemm_parts(const qd_matmul_args *a, qd_matmul_args parts[2])
{
    /* An unaligned GEMM of this size loses about 30 us, the cost of one or two extra launches. */
    static const double least = 4e9;
    return qd_matmul_cut(a, least, parts);
}

qd_status qd_cuda_matmul(qd_stream *stream, const qd_matmul_args *a)
{
    QD_TRY(qd_matmul_check(a));
    if (a->m == 0)
        return QD_OK;
    if (a->n == 0)
        return a->bias_grad ? run_bias_grad(stream, a) : QD_OK;
    if (a->k == 0)
        return run_empty(stream, a);
    qd_matmul_args parts[2];
    const int count = qd_gemm_parts(a, parts);
    for (int i = 0; i < count; i++)
        QD_TRY(run_one(stream, &parts[i]));
    return QD_OK;
}
