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
    qd_fp8_scaling scaling;
} cast_case;

static const cast_case cast_cases[] = {
    {1, 16, 1, QD_BF16, QD_F8E4M3, true, true, 0},         {16, 1, 1e-6, QD_BF16, QD_F8E5M2, true, true, 0},
    {48, 64, 300, QD_BF16, QD_F8E4M3, true, false, 0},     {48, 80, 1e-9, QD_BF16, QD_F8E5M2, false, true, 0},
    {130, 176, 1e9, QD_F32, QD_F8E4M3, true, true, 0},     {272, 528, 1, QD_BF16, QD_F8E4M3, true, true, 0},
    {272, 528, 1, QD_BF16, QD_F8E5M2, false, true, 0},     {64, 96, 1e-30, QD_F32, QD_F8E4M3, true, true, 0},
    {1040, 528, 0.02, QD_BF16, QD_F8E4M3, true, true, 0},  {528, 1040, 0.02, QD_BF16, QD_F8E4M3, false, true, 0},
};
static const cast_case scaled_cases[] = {
    {16, 48, 1, QD_BF16, QD_F8E4M3, true, true, QD_FP8_ROWS},         {272, 528, 1e-6, QD_BF16, QD_F8E5M2, true, true, QD_FP8_ROWS},
    {272, 528, 300, QD_BF16, QD_F8E4M3, false, true, QD_FP8_VECTORS}, {144, 256, 1, QD_BF16, QD_F8E5M2, true, true, QD_FP8_VECTORS},
    /* four blocks along k, so that rows of scales have no gaps, which nothing writes */
    {512, 512, 0.02, QD_BF16, QD_F8E4M3, true, true, QD_FP8_BLOCKS},  {400, 496, 0.02, QD_BF16, QD_F8E5M2, true, true, QD_FP8_BLOCKS},
    {16, 1040, 1e-30, QD_BF16, QD_F8E4M3, true, true, QD_FP8_ROWS},   {1040, 16, 1e30, QD_BF16, QD_F8E4M3, true, true, QD_FP8_VECTORS},
};
static const cast_case cast_speed[] = {
    {16384, 4096, 1, QD_BF16, QD_F8E4M3, true, false, 0},
    {16384, 4096, 1, QD_BF16, QD_F8E4M3, true, true, 0},
    {16384, 4096, 1, QD_BF16, QD_F8E5M2, false, true, 0},
};

enum { X, AMAX, CODES, TRANSPOSED, CAST_TENSORS };

static void cast_describe(const void *p, char *text, size_t size)
{
    const cast_case *c = p;
    static const char *const scalings[] = {"", ", scales of rows", ", scales of vectors", ", scales of blocks"};
    snprintf(text, size, "%lld x %lld of size %g, %s -> %s%s%s%s", (long long)c->rows, (long long)c->cols, c->size,
             qd_dtype_name(c->dtype), qd_dtype_name(c->to), c->plain ? ", plain" : "", c->transposed ? ", transposed" : "",
             scalings[c->scaling]);
}

/* Codes of one form and its scales, in words of 4 bytes. */
static int64_t words_of(const cast_case *c, bool transposed)
{
    const int64_t rows = transposed ? c->cols : c->rows, k = transposed ? c->rows : c->cols;
    return qd_fp8_scale_at(rows * k) / 4 + qd_fp8_scale_count(c->scaling, rows, k);
}

/* Codes are compared as integers, four at a time; the scales, which follow them, too. */
static int cast_tensors(const void *p, ops_tensor *t)
{
    const cast_case *c = p;
    const int64_t words = words_of(c, false), transposed = words_of(c, true);
    t[X] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols, .scale = c->size};
    t[AMAX] = (ops_tensor){.name = "amax", .role = c->scaling == QD_FP8_TENSOR ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .cols = 1,
                           .tol = 1e-30};
    t[CODES] = (ops_tensor){.name = "codes", .role = c->plain ? OPS_OUT : OPS_ABSENT, .dtype = QD_I32, .cols = words};
    t[TRANSPOSED] = (ops_tensor){.name = "transposed", .role = c->transposed ? OPS_OUT : OPS_ABSENT, .dtype = QD_I32,
                                 .cols = transposed};
    return CAST_TENSORS;
}

static double largest(const double *x, int64_t count)
{
    double most = 0.0;
    for (int64_t i = 0; i < count; i++)
        most = fmax(most, fabs(x[i]));
    return most;
}

/* The scales of all elements of x (rows, k), each that of all which share it. */
static float *scales_of(const double *x, qd_fp8_scaling scaling, int64_t rows, int64_t k, qd_dtype to)
{
    const int64_t high = qd_fp8_scale_rows(scaling, rows), length = qd_fp8_scale_length(scaling, k);
    float *scales = calloc((size_t)(rows * k), sizeof *scales);
    assert_non_null(scales);
    for (int64_t r0 = 0; r0 < rows; r0 += high)
        for (int64_t i0 = 0; i0 < k; i0 += length) {
            const int64_t r1 = r0 + high < rows ? r0 + high : rows, i1 = i0 + length < k ? i0 + length : k;
            double most = 0.0;
            for (int64_t r = r0; r < r1; r++)
                most = fmax(most, largest(x + r * k + i0, i1 - i0));
            for (int64_t r = r0; r < r1; r++)
                for (int64_t i = i0; i < i1; i++)
                    scales[r * k + i] = qd_fp8_scale((float)most, to);
        }
    return scales;
}

static void put_byte(uint32_t *words, int64_t at, uint8_t byte)
{
    words[at / 4] |= (uint32_t)byte << at % 4 * 8;
}

static void cast_reference(const void *p, double *const *v)
{
    const cast_case *c = p;
    if (c->scaling == QD_FP8_TENSOR)
        v[AMAX][0] = (float)largest(v[X], c->rows * c->cols);
    for (int copy = CODES; copy <= TRANSPOSED; copy++) {
        if (!(copy == CODES ? c->plain : c->transposed))
            continue;
        const int64_t rows = copy == CODES ? c->rows : c->cols, k = copy == CODES ? c->cols : c->rows;
        const int64_t words = words_of(c, copy == TRANSPOSED), scales = qd_fp8_scale_at(rows * k) / 4;
        uint32_t *packed = calloc((size_t)words, sizeof *packed);
        double *x = calloc((size_t)(rows * k), sizeof *x);
        assert_non_null(packed);
        assert_non_null(x);
        for (int64_t i = 0; i < rows * k; i++)
            x[i] = v[X][copy == CODES ? i : i % k * rows + i / k];
        float *scale = scales_of(x, c->scaling, rows, k, c->to);
        for (int64_t i = 0; i < rows * k; i++) {
            put_byte(packed, i, qd_f32_to_fp8((float)(x[i] / scale[i]), c->to));
            packed[scales + qd_fp8_scale_index(c->scaling, rows, k, i / k, i % k / QD_FP8_BLOCK)] = qd_f32_bits(scale[i]);
        }
        for (int64_t i = 0; i < words; i++)
            v[copy][i] = (int32_t)packed[i];
        free(packed);
        free(scale);
        free(x);
    }
}

static qd_status cast_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const cast_case *c = p;
    if (c->scaling == QD_FP8_TENSOR)
        QD_TRY(k->amax(stream, &(qd_amax_args){.x = t[X], .amax = t[AMAX], .n = c->rows * c->cols, .dtype = c->dtype}));
    return k->fp8_cast(stream, &(qd_fp8_cast_args){.x = t[X], .amax = t[AMAX], .to = t[CODES], .transposed = t[TRANSPOSED],
                                                   .rows = c->rows, .cols = c->cols, .dtype = c->dtype, .to_dtype = c->to,
                                                   .scaling = c->scaling});
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
    qd_fp8_scaling a_scaling, b_scaling;
} gemm_case;

static const gemm_case gemm_cases[] = {
    {1, 16, 16, QD_F8E4M3, QD_F8E4M3, QD_F32, false, false, false, false, 0, 0},
    {7, 48, 32, QD_F8E4M3, QD_F8E4M3, QD_BF16, true, false, false, false, 0, 0},
    {64, 64, 64, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, false, false, 0, 0},
    {48, 80, 176, QD_F8E4M3, QD_F8E5M2, QD_F32, false, false, true, false, 0, 0},
    {48, 80, 176, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, true, false, 0, 0},
    {128, 256, 512, QD_F8E4M3, QD_F8E4M3, QD_BF16, true, true, false, true, 0, 0},
    {130, 96, 8448, QD_F8E4M3, QD_F8E4M3, QD_BF16, false, true, false, false, 0, 0},
};
/* The GEMMs of the recipes: forward, gradients of inputs and of weights. */
static const gemm_case scaled_gemms[] = {
    {48, 80, 176, QD_F8E4M3, QD_F8E4M3, QD_BF16, true, false, false, true, QD_FP8_ROWS, QD_FP8_ROWS},
    {256, 128, 512, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, true, false, QD_FP8_ROWS, QD_FP8_ROWS},
    {256, 128, 512, QD_F8E4M3, QD_F8E4M3, QD_BF16, false, false, false, true, QD_FP8_VECTORS, QD_FP8_BLOCKS},
    {256, 384, 128, QD_F8E4M3, QD_F8E4M3, QD_BF16, true, true, false, false, QD_FP8_VECTORS, QD_FP8_BLOCKS},
    {128, 256, 384, QD_F8E4M3, QD_F8E4M3, QD_F32, false, false, true, false, QD_FP8_VECTORS, QD_FP8_VECTORS},
    {48, 80, 176, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, false, false, QD_FP8_VECTORS, QD_FP8_BLOCKS},
    {272, 144, 400, QD_F8E5M2, QD_F8E4M3, QD_BF16, false, false, true, false, QD_FP8_VECTORS, QD_FP8_VECTORS},
};
static const gemm_case gemm_speed[] = {
    {2048, 2048, 2048, QD_F8E4M3, QD_F8E4M3, QD_BF16, false, false, false, true, 0, 0},
};

enum { A, B, BIAS, RESIDUAL, C, A_AMAX, B_AMAX, A_CODES, B_CODES, GEMM_TENSORS };

static void gemm_describe(const void *p, char *text, size_t size)
{
    const gemm_case *c = p;
    snprintf(text, size, "(%lld, %lld, %lld), %s, %s -> %s%s%s%s%s", (long long)c->m, (long long)c->n, (long long)c->k,
             qd_dtype_name(c->a), qd_dtype_name(c->b), qd_dtype_name(c->c), c->bias ? ", bias" : "", c->residual ? ", residual" : "",
             c->accumulate ? ", accumulate" : "", c->fast ? ", fast" : "");
}

static ops_tensor codes_of(const char *name, qd_fp8_scaling scaling, int64_t rows, int64_t k)
{
    return (ops_tensor){.name = name, .role = OPS_SCRATCH, .dtype = QD_I32, .cols = qd_fp8_scaled_bytes(scaling, rows, k) / 4};
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
    t[A_CODES] = codes_of("codes of a", c->a_scaling, c->m, c->k);
    t[B_CODES] = codes_of("codes of b", c->b_scaling, c->n, c->k);
    return GEMM_TENSORS;
}

/* The values that the codes of x stand for. */
static double *rounded(const double *x, qd_fp8_scaling scaling, int64_t rows, int64_t k, qd_dtype dtype)
{
    double *values = calloc((size_t)(rows * k), sizeof *values);
    float *scale = scales_of(x, scaling, rows, k, dtype);
    assert_non_null(values);
    for (int64_t i = 0; i < rows * k; i++)
        values[i] = qd_fp8_to_f32(qd_f32_to_fp8((float)x[i] / scale[i], dtype), dtype) * (double)scale[i];
    free(scale);
    return values;
}

static void gemm_reference(const void *p, double *const *v)
{
    const gemm_case *c = p;
    double *a = rounded(v[A], c->a_scaling, c->m, c->k, c->a), *b = rounded(v[B], c->b_scaling, c->n, c->k, c->b);
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

static qd_status cast_to(const qd_kernels *k, qd_stream *stream, void *const *t, int x, int64_t rows, int64_t cols, qd_dtype to,
                         qd_fp8_scaling scaling)
{
    void *amax = t[x == A ? A_AMAX : B_AMAX], *codes = t[x == A ? A_CODES : B_CODES];
    if (scaling == QD_FP8_TENSOR)
        QD_TRY(k->amax(stream, &(qd_amax_args){.x = t[x], .amax = amax, .n = rows * cols, .dtype = QD_BF16}));
    return k->fp8_cast(stream, &(qd_fp8_cast_args){.x = t[x], .amax = scaling == QD_FP8_TENSOR ? amax : NULL, .to = codes, .rows = rows,
                                                   .cols = cols, .dtype = QD_BF16, .to_dtype = to, .scaling = scaling});
}

static const float *scale_of(const void *codes, int64_t count)
{
    return (const float *)((const char *)codes + qd_fp8_scale_at(count));
}

static qd_status gemm_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const gemm_case *c = p;
    QD_TRY(cast_to(k, stream, t, A, c->m, c->k, c->a, c->a_scaling));
    QD_TRY(cast_to(k, stream, t, B, c->n, c->k, c->b, c->b_scaling));
    return k->matmul(stream, &(qd_matmul_args){
        .a = t[A_CODES], .b = t[B_CODES], .bias = t[BIAS], .residual = t[RESIDUAL], .c = t[C], .m = c->m, .n = c->n, .k = c->k,
        .lda = c->k, .ldb = c->k, .ldc = c->n, .trans_b = true, .accumulate = c->accumulate, .a_dtype = c->a, .b_dtype = c->b,
        .c_dtype = c->c, .a_scale = scale_of(t[A_CODES], c->m * c->k), .b_scale = scale_of(t[B_CODES], c->n * c->k),
        .a_scaling = c->a_scaling, .b_scaling = c->b_scaling, .fast = c->fast});
}

static double gemm_flops(const void *p)
{
    const gemm_case *c = p;
    return 2.0 * (double)c->m * (double)c->n * (double)c->k;
}

/* c (SIDE, SIDE) = a · bᵀ of ones, with one value that is not finite in a, or in b: what shares its
 * scale is lost and reported, and nothing else is. */
static void not_finite_with(qd_device *device, float wrong, bool in_a, qd_fp8_scaling a_scaling, qd_fp8_scaling b_scaling)
{
    enum { SIDE = 160, K = 272, ROW = 37, AT = 150 };
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const int64_t x_bytes = SIDE * K * 2, code_bytes = qd_fp8_scaled_bytes(QD_FP8_VECTORS, SIDE, K), c_bytes = SIDE * SIDE * 2;
    const qd_fp8_scaling scaling[] = {a_scaling, b_scaling};
    static uint16_t x[SIDE * K], c[SIDE * SIDE];
    void *values, *codes[2], *amax, *result;
    ok(qd_device_alloc(device, x_bytes, &values));
    ok(qd_device_alloc(device, code_bytes, &codes[0]));
    ok(qd_device_alloc(device, code_bytes, &codes[1]));
    ok(qd_device_alloc(device, 4, &amax));
    ok(qd_device_alloc(device, c_bytes, &result));
    for (int i = 0; i < 2; i++) {
        for (int j = 0; j < SIDE * K; j++)
            x[j] = qd_f32_to_bf16(in_a == (i == 0) && j == ROW * K + AT ? wrong : 1.0f);
        ok(qd_copy(stream, values, x, x_bytes));
        if (scaling[i] == QD_FP8_TENSOR)
            ok(k->amax(stream, &(qd_amax_args){.x = values, .amax = amax, .n = SIDE * K, .dtype = QD_BF16}));
        ok(k->fp8_cast(stream, &(qd_fp8_cast_args){.x = values, .amax = scaling[i] == QD_FP8_TENSOR ? amax : NULL, .to = codes[i],
                                                   .rows = SIDE, .cols = K, .dtype = QD_BF16, .to_dtype = QD_F8E4M3,
                                                   .scaling = scaling[i]}));
        ok(qd_stream_wait(stream));
    }
    ok(k->matmul(stream, &(qd_matmul_args){
        .a = codes[0], .b = codes[1], .c = result, .m = SIDE, .n = SIDE, .k = K, .lda = K, .ldb = K, .ldc = SIDE, .trans_b = true,
        .a_dtype = QD_F8E4M3, .b_dtype = QD_F8E4M3, .c_dtype = QD_BF16, .a_scale = scale_of(codes[0], SIDE * K),
        .b_scale = scale_of(codes[1], SIDE * K), .a_scaling = a_scaling, .b_scaling = b_scaling}));
    ok(qd_copy(stream, c, result, c_bytes));
    ok(qd_stream_wait(stream));
    const int64_t high = qd_fp8_scale_rows(in_a ? a_scaling : b_scaling, SIDE);
    for (int i = 0; i < SIDE * SIDE; i++) {
        const float value = qd_bf16_to_f32(c[i]);
        const bool lost = (in_a ? i / SIDE : i % SIDE) / high == ROW / high;
        if (lost ? !isnan(value) : value != K)
            fail_msg("%g in %s, scalings %d and %d: element (%d, %d) is %g", (double)wrong, in_a ? "a" : "b", (int)a_scaling,
                     (int)b_scaling, i / SIDE, i % SIDE, (double)value);
    }
    qd_device_free(device, values, x_bytes);
    qd_device_free(device, codes[0], code_bytes);
    qd_device_free(device, codes[1], code_bytes);
    qd_device_free(device, amax, 4);
    qd_device_free(device, result, c_bytes);
}

static void not_finite(void **state)
{
    (void)state;
    static const float wrong[] = {INFINITY, -INFINITY, NAN};
    static const qd_fp8_scaling scalings[][2] = {
        {QD_FP8_TENSOR, QD_FP8_TENSOR}, {QD_FP8_ROWS, QD_FP8_ROWS}, {QD_FP8_VECTORS, QD_FP8_BLOCKS}, {QD_FP8_VECTORS, QD_FP8_VECTORS}};
    qd_device *devices[] = {ops_device(NULL, 2), ops_cuda()};
    for (int d = 0; d < COUNT(devices); d++)
        for (int i = 0; i < COUNT(wrong) * COUNT(scalings) * 2 && devices[d]; i++)
            not_finite_with(devices[d], wrong[i % COUNT(wrong)], i / COUNT(wrong) % 2, scalings[i / (2 * COUNT(wrong))][0],
                            scalings[i / (2 * COUNT(wrong))][1]);
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
    qd_matmul_args bad[7] = {good, good, good, good, good, good, good};
    bad[0].n = 24;
    bad[1].k = 8;
    bad[2].a_dtype = bad[2].b_dtype = QD_F8E5M2;
    bad[3].trans_b = false;
    bad[4].b_dtype = QD_BF16;
    bad[5].a_scale = NULL;
    bad[6].a_scaling = QD_FP8_ROWS;
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
        {.kernel = "fp8_cast", .cases = scaled_cases, .case_size = sizeof *scaled_cases, .case_count = COUNT(scaled_cases),
         .describe = cast_describe, .tensors = cast_tensors, .reference = cast_reference, .run = cast_run},
        {.kernel = "matmul", .cases = scaled_gemms, .case_size = sizeof *scaled_gemms, .case_count = COUNT(scaled_gemms),
         .describe = gemm_describe, .tensors = gemm_tensors, .reference = gemm_reference, .run = gemm_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(not_finite), cmocka_unit_test(refused)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
