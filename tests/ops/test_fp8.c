/* fp8: the largest magnitude of a tensor, casts with and without transposition (exact to the bit),
 * and GEMMs of two tensors that were cast, against sums of their rounded values in double.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/fp8.h"
#include "support/ok.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct cast_case {
    int64_t rows, cols;
    double size; /* of the values */
    qd_dtype dtype, to;
    bool plain, transposed;
} cast_case;

static const cast_case cast_cases[] = {
    {1, 16, 1, QD_BF16, QD_F8E4M3, true, true},         {16, 1, 1e-6, QD_BF16, QD_F8E5M2, true, true},
    {48, 64, 300, QD_BF16, QD_F8E4M3, true, false},     {48, 80, 1e-9, QD_BF16, QD_F8E5M2, false, true},
    {130, 176, 1e9, QD_F32, QD_F8E4M3, true, true},     {272, 528, 1, QD_BF16, QD_F8E4M3, true, true},
    {272, 528, 1, QD_BF16, QD_F8E5M2, false, true},     {64, 96, 1e-30, QD_F32, QD_F8E4M3, true, true},
    {1040, 528, 0.02, QD_BF16, QD_F8E4M3, true, true},  {528, 1040, 0.02, QD_BF16, QD_F8E4M3, false, true},
};
static const cast_case cast_speed[] = {
    {16384, 4096, 1, QD_BF16, QD_F8E4M3, true, false},
    {16384, 4096, 1, QD_BF16, QD_F8E4M3, true, true},
    {16384, 4096, 1, QD_BF16, QD_F8E5M2, false, true},
};

enum { X, AMAX, CODES, TRANSPOSED, CAST_TENSORS };

static void cast_describe(const void *p, char *text, size_t size)
{
    const cast_case *c = p;
    snprintf(text, size, "%lld x %lld of size %g, %s -> %s%s%s", (long long)c->rows, (long long)c->cols, c->size,
             qd_dtype_name(c->dtype), qd_dtype_name(c->to), c->plain ? ", plain" : "", c->transposed ? ", transposed" : "");
}

/* Codes are compared as integers, four at a time; the scale, which follows them, too. */
static int cast_tensors(const void *p, ops_tensor *t)
{
    const cast_case *c = p;
    int64_t words = qd_fp8_scale_at(c->rows * c->cols) / 4 + 1;
    t[X] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols, .scale = c->size};
    t[AMAX] = (ops_tensor){.name = "amax", .role = OPS_OUT, .dtype = QD_F32, .cols = 1, .tol = 1e-30};
    t[CODES] = (ops_tensor){.name = "codes", .role = c->plain ? OPS_OUT : OPS_ABSENT, .dtype = QD_I32, .cols = words};
    t[TRANSPOSED] = (ops_tensor){.name = "transposed", .role = c->transposed ? OPS_OUT : OPS_ABSENT, .dtype = QD_I32, .cols = words};
    return CAST_TENSORS;
}

static double largest(const double *x, int64_t count)
{
    double most = 0.0;
    for (int64_t i = 0; i < count; i++)
        most = fmax(most, fabs(x[i]));
    return most;
}

static void put_byte(uint32_t *words, int64_t at, uint8_t byte)
{
    words[at / 4] |= (uint32_t)byte << at % 4 * 8;
}

static void cast_reference(const void *p, double *const *v)
{
    const cast_case *c = p;
    const int64_t count = c->rows * c->cols, words = qd_fp8_scale_at(count) / 4 + 1;
    const float amax = (float)largest(v[X], count), scale = qd_fp8_scale(amax, c->to);
    uint32_t *packed = calloc((size_t)words, sizeof *packed);
    assert_non_null(packed);
    v[AMAX][0] = amax;
    for (int copy = CODES; copy <= TRANSPOSED; copy++) {
        if (!(copy == CODES ? c->plain : c->transposed))
            continue;
        memset(packed, 0, (size_t)words * sizeof *packed);
        for (int64_t i = 0; i < count; i++)
            put_byte(packed, copy == CODES ? i : i % c->cols * c->rows + i / c->cols, qd_f32_to_fp8((float)(v[X][i] / scale), c->to));
        packed[words - 1] = qd_f32_bits(scale);
        for (int64_t i = 0; i < words; i++)
            v[copy][i] = (int32_t)packed[i];
    }
    free(packed);
}

static qd_status cast_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const cast_case *c = p;
    QD_TRY(k->amax(stream, &(qd_amax_args){.x = t[X], .amax = t[AMAX], .n = c->rows * c->cols, .dtype = c->dtype}));
    return k->fp8_cast(stream, &(qd_fp8_cast_args){.x = t[X], .amax = t[AMAX], .to = t[CODES], .transposed = t[TRANSPOSED],
                                                   .rows = c->rows, .cols = c->cols, .dtype = c->dtype, .to_dtype = c->to});
}

static double cast_bytes(const void *p)
{
    const cast_case *c = p;
    return (double)(c->rows * c->cols) * (2.0 * (double)qd_dtype_size(c->dtype) + c->plain + c->transposed);
}

typedef struct gemm_case {
    int64_t m, n, k;
    qd_dtype a, b, c;
    bool bias, residual, accumulate, fast;
} gemm_case;

static const gemm_case gemm_cases[] = {
    {1, 16, 16, QD_F8E4M3, QD_F8E4M3, QD_F32, false, false, false, false},
    {7, 48, 32, QD_F8E4M3, QD_F8E4M3, QD_BF16, true, false, false, false},
    {64, 64, 64, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, false, false},
    {48, 80, 176, QD_F8E4M3, QD_F8E5M2, QD_F32, false, false, true, false},
    {48, 80, 176, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, true, false},
    {128, 256, 512, QD_F8E4M3, QD_F8E4M3, QD_BF16, true, true, false, true},
    {130, 96, 8448, QD_F8E4M3, QD_F8E4M3, QD_BF16, false, true, false, false},
};
static const gemm_case gemm_speed[] = {
    {2048, 2048, 2048, QD_F8E4M3, QD_F8E4M3, QD_BF16, false, false, false, true},
};

enum { A, B, BIAS, RESIDUAL, C, A_AMAX, B_AMAX, A_CODES, B_CODES, GEMM_TENSORS };

static void gemm_describe(const void *p, char *text, size_t size)
{
    const gemm_case *c = p;
    snprintf(text, size, "(%lld, %lld, %lld), %s, %s -> %s%s%s%s%s", (long long)c->m, (long long)c->n, (long long)c->k,
             qd_dtype_name(c->a), qd_dtype_name(c->b), qd_dtype_name(c->c), c->bias ? ", bias" : "", c->residual ? ", residual" : "",
             c->accumulate ? ", accumulate" : "", c->fast ? ", fast" : "");
}

static ops_tensor codes_of(const char *name, int64_t count)
{
    return (ops_tensor){.name = name, .role = OPS_SCRATCH, .dtype = QD_I32, .cols = qd_fp8_bytes(count) / 4};
}

static int gemm_tensors(const void *p, ops_tensor *t)
{
    const gemm_case *c = p;
    const double tol = c->c == QD_F32 ? 2e-4 : 4e-3; /* tensor cores keep about 14 bits of a sum of fp8 terms */
    t[A] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = QD_BF16, .rows = c->m, .cols = c->k, .scale = 3};
    t[B] = (ops_tensor){.name = "b", .role = OPS_IN, .dtype = QD_BF16, .rows = c->n, .cols = c->k, .scale = 0.02};
    t[BIAS] = (ops_tensor){.name = "bias", .role = c->bias ? OPS_IN : OPS_ABSENT, .dtype = c->c, .cols = c->n};
    t[RESIDUAL] = (ops_tensor){.name = "residual", .role = c->residual ? OPS_IN : OPS_ABSENT, .dtype = c->c, .rows = c->m, .cols = c->n};
    t[C] = (ops_tensor){.name = "c", .role = c->accumulate ? OPS_INOUT : OPS_OUT, .dtype = c->c, .rows = c->m, .cols = c->n,
                        .tol = c->fast ? 1e-2 : tol};
    t[A_AMAX] = (ops_tensor){.name = "amax of a", .role = OPS_SCRATCH, .dtype = QD_F32, .cols = 1};
    t[B_AMAX] = (ops_tensor){.name = "amax of b", .role = OPS_SCRATCH, .dtype = QD_F32, .cols = 1};
    t[A_CODES] = codes_of("codes of a", c->m * c->k);
    t[B_CODES] = codes_of("codes of b", c->n * c->k);
    return GEMM_TENSORS;
}

/* The values that the codes of x stand for. */
static double *rounded(const double *x, size_t count, qd_dtype dtype)
{
    const float scale = qd_fp8_scale((float)largest(x, (int64_t)count), dtype);
    double *values = calloc(count, sizeof *values);
    assert_non_null(values);
    for (size_t i = 0; i < count; i++)
        values[i] = qd_fp8_to_f32(qd_f32_to_fp8((float)x[i] / scale, dtype), dtype) * (double)scale;
    return values;
}

static void gemm_reference(const void *p, double *const *v)
{
    const gemm_case *c = p;
    double *a = rounded(v[A], (size_t)(c->m * c->k), c->a), *b = rounded(v[B], (size_t)(c->n * c->k), c->b);
    for (int64_t i = 0; i < c->m; i++)
        for (int64_t j = 0; j < c->n; j++) {
            double sum = (c->bias ? v[BIAS][j] : 0.0) + (c->residual ? v[RESIDUAL][i * c->n + j] : 0.0) +
                         (c->accumulate ? v[C][i * c->n + j] : 0.0);
            for (int64_t k = 0; k < c->k; k++)
                sum += a[i * c->k + k] * b[j * c->k + k];
            v[C][i * c->n + j] = sum;
        }
    free(a);
    free(b);
}

static qd_status cast_to(const qd_kernels *k, qd_stream *stream, void *const *t, int x, int64_t rows, int64_t cols, qd_dtype to)
{
    void *amax = t[x == A ? A_AMAX : B_AMAX], *codes = t[x == A ? A_CODES : B_CODES];
    QD_TRY(k->amax(stream, &(qd_amax_args){.x = t[x], .amax = amax, .n = rows * cols, .dtype = QD_BF16}));
    return k->fp8_cast(stream, &(qd_fp8_cast_args){.x = t[x], .amax = amax, .to = codes, .rows = rows, .cols = cols, .dtype = QD_BF16,
                                                   .to_dtype = to});
}

static const float *scale_of(const void *codes, int64_t count)
{
    return (const float *)((const char *)codes + qd_fp8_scale_at(count));
}

static qd_status gemm_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const gemm_case *c = p;
    QD_TRY(cast_to(k, stream, t, A, c->m, c->k, c->a));
    QD_TRY(cast_to(k, stream, t, B, c->n, c->k, c->b));
    return k->matmul(stream, &(qd_matmul_args){
        .a = t[A_CODES], .b = t[B_CODES], .bias = t[BIAS], .residual = t[RESIDUAL], .c = t[C], .m = c->m, .n = c->n, .k = c->k,
        .lda = c->k, .ldb = c->k, .ldc = c->n, .trans_b = true, .accumulate = c->accumulate, .a_dtype = c->a, .b_dtype = c->b,
        .c_dtype = c->c, .a_scale = scale_of(t[A_CODES], c->m * c->k), .b_scale = scale_of(t[B_CODES], c->n * c->k), .fast = c->fast});
}

static double gemm_flops(const void *p)
{
    const gemm_case *c = p;
    return 2.0 * (double)c->m * (double)c->n * (double)c->k;
}

/* A tensor that is not finite gets a scale that is not, and so does every product with it. */
static void not_finite(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 2);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const float wrong[] = {INFINITY, -INFINITY, NAN};
    for (int i = 0; i < COUNT(wrong); i++) {
        float x[256], amax, c[256];
        _Alignas(16) uint8_t codes[272];
        for (int j = 0; j < 256; j++)
            x[j] = j == 37 ? wrong[i] : 1.0f;
        ok(k->amax(stream, &(qd_amax_args){.x = x, .amax = &amax, .n = 256, .dtype = QD_F32}));
        assert_false(isfinite(amax));
        ok(k->fp8_cast(stream, &(qd_fp8_cast_args){.x = x, .amax = &amax, .to = codes, .rows = 16, .cols = 16, .dtype = QD_F32,
                                                   .to_dtype = QD_F8E4M3}));
        ok(k->matmul(stream, &(qd_matmul_args){.a = codes, .b = codes, .c = c, .m = 16, .n = 16, .k = 16, .lda = 16, .ldb = 16, .ldc = 16,
                                               .trans_b = true, .a_dtype = QD_F8E4M3, .b_dtype = QD_F8E4M3, .c_dtype = QD_F32,
                                               .a_scale = scale_of(codes, 256), .b_scale = scale_of(codes, 256)}));
        for (int j = 0; j < 256; j++)
            assert_true(isnan(c[j]));
    }
}

/* What no device computes is refused by name. */
static void refused(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    static float scale = 1.0f, c[32 * 32];
    static uint8_t codes[32 * 32];
    const qd_matmul_args good = {.a = codes, .b = codes, .c = c, .m = 32, .n = 32, .k = 32, .lda = 32, .ldb = 32, .ldc = 32,
                                 .trans_b = true, .a_dtype = QD_F8E4M3, .b_dtype = QD_F8E4M3, .c_dtype = QD_F32, .a_scale = &scale,
                                 .b_scale = &scale};
    ok(k->matmul(stream, &good));
    qd_matmul_args bad[6] = {good, good, good, good, good, good};
    bad[0].n = 24;
    bad[1].k = 8;
    bad[2].a_dtype = bad[2].b_dtype = QD_F8E5M2;
    bad[3].trans_b = false;
    bad[4].b_dtype = QD_BF16;
    bad[5].a_scale = NULL;
    for (int i = 0; i < COUNT(bad); i++)
        assert_int_equal(k->matmul(stream, &bad[i]), QD_UNSUPPORTED);
    assert_int_equal(k->fp8_cast(stream, &(qd_fp8_cast_args){.x = c, .amax = &scale, .to = codes, .rows = 1, .cols = 16, .dtype = QD_F32,
                                                             .to_dtype = QD_BF16}),
                     QD_UNSUPPORTED);
    qd_error_clear();
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "fp8_cast", .cases = cast_cases, .speed_cases = cast_speed, .case_size = sizeof *cast_cases,
         .case_count = COUNT(cast_cases), .speed_count = COUNT(cast_speed), .describe = cast_describe, .tensors = cast_tensors,
         .reference = cast_reference, .run = cast_run, .bytes = cast_bytes},
        {.kernel = "matmul", .cases = gemm_cases, .speed_cases = gemm_speed, .case_size = sizeof *gemm_cases,
         .case_count = COUNT(gemm_cases), .speed_count = COUNT(gemm_speed), .describe = gemm_describe, .tensors = gemm_tensors,
         .reference = gemm_reference, .run = gemm_run, .flops = gemm_flops},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(not_finite), cmocka_unit_test(refused)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
