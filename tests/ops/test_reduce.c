/* Sums over rows, sums of squares, and the gradient norm.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct reduce_case {
    int64_t rows, cols;
    qd_dtype dtype, grad_dtype;
    bool overwrite;
} reduce_case;

static const reduce_case cases[] = {
    {1, 1, QD_F32, QD_F32, false},       {3, 7, QD_F32, QD_F32, false},      {1000, 7, QD_F32, QD_F32, false},
    {70, 1000, QD_F32, QD_F32, false},   {33, 4097, QD_F32, QD_F32, false},  {1, 40961, QD_F32, QD_F32, false},
    {70, 1000, QD_BF16, QD_BF16, false}, {33, 4097, QD_BF16, QD_F32, false}, {33, 4097, QD_F32, QD_BF16, false},
    {3000, 2304, QD_BF16, QD_BF16, false}, {3, 140000, QD_BF16, QD_F32, false}, {700, 1, QD_F32, QD_F32, false},
    {33, 4097, QD_F32, QD_F32, true}, {70, 1000, QD_BF16, QD_BF16, true}, {700, 3, QD_BF16, QD_F32, true},
};
static const reduce_case speed[] = {
    {4096, 768, QD_F32, QD_F32, false},
    {4096, 3072, QD_F32, QD_F32, false},
    {4096, 3072, QD_BF16, QD_BF16, false},
};

static void describe(const void *p, char *text, size_t size)
{
    const reduce_case *c = p;
    snprintf(text, size, "%lldx%lld %s, gradient %s%s", (long long)c->rows, (long long)c->cols, qd_dtype_name(c->dtype),
             qd_dtype_name(c->grad_dtype), c->overwrite ? ", overwritten" : "");
}

static double bytes(const void *p)
{
    const reduce_case *c = p;
    return (double)(c->rows * c->cols) * (double)qd_dtype_size(c->dtype);
}

static int bias_tensors(const void *p, ops_tensor *t)
{
    const reduce_case *c = p;
    t[0] = (ops_tensor){.name = "dy", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[1] = (ops_tensor){.name = "grad", .role = c->overwrite ? OPS_OUT : OPS_INOUT, .dtype = c->grad_dtype, .cols = c->cols};
    return 2;
}

static void bias_reference(const void *p, double *const *v)
{
    const reduce_case *c = p;
    for (int64_t i = 0; c->overwrite && i < c->cols; i++)
        v[1][i] = 0;
    for (int64_t i = 0; i < c->rows * c->cols; i++)
        v[1][i % c->cols] += v[0][i];
}

static qd_status bias_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const reduce_case *c = p;
    return k->bias_grad(stream, &(qd_bias_grad_args){.dy = t[0], .grad = t[1], .rows = c->rows, .cols = c->cols,
                                                     .accumulate = !c->overwrite,
                                                     .dtype = c->dtype, .grad_dtype = c->grad_dtype});
}

static int squares_tensors(const void *p, ops_tensor *t)
{
    const reduce_case *c = p;
    t[0] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[1] = (ops_tensor){.name = "out", .role = OPS_OUT, .dtype = QD_F64, .cols = c->rows};
    return 2;
}

static void squares_reference(const void *p, double *const *v)
{
    const reduce_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        v[1][r] = 0;
        for (int64_t i = 0; i < c->cols; i++)
            v[1][r] += v[0][r * c->cols + i] * v[0][r * c->cols + i];
    }
}

static qd_status squares_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const reduce_case *c = p;
    /* As two matrices: the upper rows, then the rest. */
    int64_t upper = c->rows / 3;
    qd_row_squares_args rest = {.x = (const char *)t[0] + upper * c->cols * (int64_t)qd_dtype_size(c->dtype),
                                .out = (double *)t[1] + upper, .rows = c->rows - upper, .cols = c->cols, .dtype = c->dtype};
    return k->row_squares(stream, &(qd_row_squares_args){.x = t[0], .out = t[1], .rows = upper, .cols = c->cols,
                                                         .dtype = c->dtype, .next = &rest});
}

/* Four sums: of all elements as one run, of none, and twice of all elements cut into runs. Many
 * runs take several launches on a GPU, some of which continue one sum and leave the other to the
 * next. */
typedef struct runs_case {
    int64_t count;
    int runs;
} runs_case;
static const runs_case runs_cases[] = {{1, 1}, {7, 3}, {5000, 1}, {5000, 64}, {9001, 1500}, {4000, 2600}, {300001, 7}};

static void runs_describe(const void *p, char *text, size_t size)
{
    const runs_case *c = p;
    snprintf(text, size, "%lld elements, %d runs", (long long)c->count, c->runs);
}

static int runs_tensors(const void *p, ops_tensor *t)
{
    const runs_case *c = p;
    t[0] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = QD_F64, .cols = c->count};
    t[1] = (ops_tensor){.name = "sums", .role = OPS_INOUT, .dtype = QD_F64, .cols = 4};
    return 2;
}

static void runs_reference(const void *p, double *const *v)
{
    const runs_case *c = p;
    v[1][0] = 0;
    for (int64_t i = 0; i < c->count; i++)
        v[1][0] += v[0][i];
    v[1][2] = v[1][3] = v[1][0];
}

static qd_status runs_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const runs_case *c = p;
    qd_sum_run runs[1 + 2 * 2600] = {{.first = 0, .count = c->count, .sum = 0}};
    for (int r = 0; r < 2 * c->runs; r++) {
        int64_t part = r % c->runs, begin = c->count * part / c->runs, end = c->count * (part + 1) / c->runs;
        runs[r + 1] = (qd_sum_run){.first = begin, .count = end - begin, .sum = r < c->runs ? 2 : 3};
    }
    return k->run_sums(stream, &(qd_run_sums_args){.x = t[0], .runs = runs, .run_count = 2 * c->runs + 1, .sums = t[1]});
}

typedef struct norm_case {
    int64_t count, bad; /* bad: a sum that is not finite, -1: none */
    double clip, counted;
    bool bad_loss;
    double most_norm, most_loss;
} norm_case;
static const norm_case norm_cases[] = {
    {1, -1, 0, 10, false, 0, 0},      {700, -1, 1, 10, false, 0, 0},      {700, -1, 1e6, 7, false, 0, 0},
    {9, -1, 0.5, 0, false, 0, 0},     {40, 3, 1, 10, false, 0, 0},        {40, -1, 1, 10, true, 0, 0},
    {40, -1, 1, 10, false, 1e-3, 0},  {40, -1, 1, 10, false, 1e6, 0.31},  {40, -1, 0, 10, false, 0, 0.29},
};
static const double planned = 10;

static void norm_describe(const void *p, char *text, size_t size)
{
    const norm_case *c = p;
    snprintf(text, size, "%lld sums, clip %g, %g tokens%s%s", (long long)c->count, c->clip, c->counted,
             c->bad >= 0 ? ", a sum is not finite" : "", c->bad_loss ? ", the loss is not finite"
             : c->most_norm > 0 || c->most_loss > 0 ? ", limits" : "");
}

static int norm_tensors(const void *p, ops_tensor *t)
{
    const norm_case *c = p;
    t[0] = (ops_tensor){.name = "sums", .role = OPS_IN, .dtype = QD_F64, .cols = c->count};
    t[1] = (ops_tensor){.name = "loss", .role = OPS_IN, .dtype = QD_F64, .cols = 2};
    t[2] = (ops_tensor){.name = "out", .role = OPS_OUT, .dtype = QD_F64, .cols = 3};
    return 3;
}

static void norm_derive(const void *p, double *const *v)
{
    const norm_case *c = p;
    for (int64_t i = 0; i < c->count; i++)
        v[0][i] = c->bad >= 0 && (i == c->bad || i == c->bad + 5) ? INFINITY : fabs(v[0][i]);
    v[1][0] = c->bad_loss ? NAN : 3;
    v[1][1] = c->counted;
}

static void norm_reference(const void *p, double *const *v)
{
    const norm_case *c = p;
    double total = 0, correction = c->counted > 0 ? planned / c->counted : 0;
    for (int64_t i = 0; i < c->count; i++)
        total += v[0][i];
    double norm = sqrt(total) * correction;
    v[2][0] = norm;
    bool high = (c->most_norm > 0 && norm > c->most_norm) || (c->most_loss > 0 && 3 / c->counted > c->most_loss);
    v[2][1] = c->bad >= 0 || c->bad_loss || high ? NAN : correction * (c->clip > 0 && norm > c->clip ? c->clip / (norm + 1e-6) : 1);
    v[2][2] = (double)c->bad;
}

static qd_status norm_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const norm_case *c = p;
    return k->grad_norm(stream, &(qd_grad_norm_args){.sums = t[0], .loss = t[1], .count = c->count, .planned = planned, .clip = c->clip,
                                                     .most_norm = c->most_norm, .most_loss = c->most_loss, .out = t[2]});
}

/* So many columns that the partial sums of all rows do not fit the workspace of one thread, but
 * that of three. */
static void several_rounds(void **state)
{
    (void)state;
    enum { ROWS = 300, COLS = 131072 };
    uint16_t *dy = malloc(sizeof *dy * ROWS * COLS);
    double *want = calloc(COLS, sizeof *want);
    float *grad[3]; /* fp32: the last bit shows the order of the sums */
    assert_true(dy && want);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++) {
            uint32_t hash = (uint32_t)(r * COLS + c) * 2654435761u;
            dy[r * COLS + c] = qd_f32_to_bf16((float)(hash >> 8) * 0x1p-24f - 0.5f);
            want[c] += qd_bf16_to_f32(dy[r * COLS + c]);
        }
    for (int threads = 1; threads <= 3; threads++) {
        float *g = grad[threads - 1] = calloc(COLS, sizeof *g);
        assert_non_null(g);
        qd_device *device = ops_device(NULL, threads);
        qd_bias_grad_args a = {.dy = dy, .grad = g, .rows = ROWS, .cols = COLS, .dtype = QD_BF16,
                               .grad_dtype = QD_F32};
        ops_assert_ok(qd_device_kernels(device)->bias_grad(qd_device_compute_stream(device), &a));
        assert_memory_equal(g, grad[0], COLS * sizeof *g);
    }
    for (int c = 0; c < COLS; c++)
        assert_true(fabs((double)grad[0][c] - want[c]) <= 2e-5);
    for (int i = 0; i < 3; i++)
        free(grad[i]);
    free(want);
    free(dy);
}

/* The squares of the norm are bit-identical on every instruction set; values that overflow fp32 do
 * not overflow double; a NaN or infinity anywhere is detected. */
static void squares_same_bits(void **state)
{
    (void)state;
    enum { N = 1037 };
    float x[N];
    for (int i = 0; i < N; i++)
        x[i] = (float)(1e25 * ops_normal());
    double first = 0;
    for (int s = 0; s < OPS_CPU_ISAS; s++) {
        qd_device *device = ops_cpu(ops_cpu_isas[s]);
        if (!device)
            continue;
        double out;
        qd_row_squares_args a = {.x = x, .out = &out, .rows = 1, .cols = N, .dtype = QD_F32};
        const qd_kernels *k = qd_device_kernels(device);
        ops_assert_ok(k->row_squares(qd_device_compute_stream(device), &a));
        assert_true(isfinite(out) && out > 1e52);
        first = first == 0 ? out : first;
        assert_memory_equal(&out, &first, sizeof out);
        for (int at = 0; at < N; at += 17) {
            float kept = x[at];
            x[at] = at % 2 ? NAN : -INFINITY;
            ops_assert_ok(k->row_squares(qd_device_compute_stream(device), &a));
            assert_false(isfinite(out));
            x[at] = kept;
        }
    }
}

static void too_wide(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    float x = 0;
    qd_bias_grad_args a = {.dy = &x, .grad = &x, .rows = 0, .cols = 600000, .dtype = QD_F32, .grad_dtype = QD_F32};
    ops_assert_fails(qd_device_kernels(device)->bias_grad(qd_device_compute_stream(device), &a), QD_UNSUPPORTED,
                     "600000 columns");
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "bias_grad", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = bias_tensors,
         .reference = bias_reference, .run = bias_run, .bytes = bytes},
        {.kernel = "row_squares", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = squares_tensors,
         .reference = squares_reference, .run = squares_run, .bytes = bytes},
        {.kernel = "run_sums", .cases = runs_cases, .case_size = sizeof *runs_cases, .case_count = COUNT(runs_cases),
         .describe = runs_describe,
         .tensors = runs_tensors, .reference = runs_reference, .run = runs_run},
        {.kernel = "grad_norm", .cases = norm_cases, .case_size = sizeof *norm_cases, .case_count = COUNT(norm_cases),
         .describe = norm_describe,
         .tensors = norm_tensors, .derive = norm_derive, .reference = norm_reference, .run = norm_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(several_rounds), cmocka_unit_test(squares_same_bits),
                                      cmocka_unit_test(too_wide)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
