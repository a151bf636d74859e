/* Rotary embedding, forward and inverse.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct rope_case {
    int64_t rows, seq, gap; /* gap: row_stride - heads * head_dim */
    int heads, head_dim;
    bool positions, inverse;
    qd_dtype dtype;
    int dims; /* 0: head_dim */
    bool interleaved;
} rope_case;

static const rope_case cases[] = {
    {1, 1, 0, 1, 2, false, false, QD_F32, 0, false},     {9, 4, 0, 3, 2, false, true, QD_F32, 0, false},
    {37, 16, 5, 3, 14, false, false, QD_F32, 0, false},  {37, 16, 5, 3, 14, true, true, QD_F32, 0, false},
    {130, 65, 64, 4, 64, false, false, QD_F32, 0, false}, {130, 65, 64, 4, 128, true, true, QD_F32, 0, false},
    {11, 7, 0, 2, 600, false, false, QD_F32, 0, false},  {130, 65, 64, 4, 64, false, false, QD_BF16, 0, false},
    {37, 16, 3, 3, 14, true, true, QD_BF16, 0, false},   {11, 7, 0, 2, 600, true, false, QD_BF16, 0, false},
};

/* Parts of heads, and interleaved pairs. */
static const rope_case part_cases[] = {
    {37, 16, 5, 3, 14, false, false, QD_F32, 2, false},
    {37, 16, 5, 3, 14, true, true, QD_F32, 10, false},
    {65, 65, 0, 4, 64, false, false, QD_BF16, 16, false},
    {11, 7, 3, 2, 128, true, false, QD_F32, 96, false},
    {37, 16, 5, 3, 14, true, false, QD_F32, 10, true},
    {65, 65, 0, 4, 192, false, true, QD_BF16, 64, true},
    {9, 4, 0, 1, 64, false, false, QD_F32, 0, true},
};

static const rope_case speed[] = {
    {4096, 1024, 0, 12, 64, false, false, QD_F32, 0, false},
    {4096, 1024, 0, 12, 64, false, true, QD_BF16, 0, false},
};

static int dims(const rope_case *c)
{
    return c->dims > 0 ? c->dims : c->head_dim;
}

static void describe(const void *p, char *text, size_t size)
{
    const rope_case *c = p;
    snprintf(text, size, "%lld rows, %d heads, %d of %d, gap %lld, %s%s%s%s", (long long)c->rows, c->heads, dims(c), c->head_dim,
             (long long)c->gap, qd_dtype_name(c->dtype), c->positions ? ", positions" : "",
             c->inverse ? ", inverse" : "", c->interleaved ? ", interleaved" : "");
}

enum { X, TABLE, POSITIONS, TENSORS };

static int64_t stride(const rope_case *c)
{
    return c->heads * (int64_t)c->head_dim + c->gap;
}

static int tensors(const void *p, ops_tensor *t)
{
    const rope_case *c = p;
    t[X] = (ops_tensor){.name = "x", .role = OPS_INOUT, .dtype = c->dtype, .rows = c->rows,
                        .cols = c->heads * (int64_t)c->head_dim, .ld = stride(c)};
    t[TABLE] = (ops_tensor){.name = "table", .role = OPS_IN, .dtype = QD_F32, .rows = c->seq, .cols = dims(c)};
    t[POSITIONS] = (ops_tensor){.name = "positions", .role = c->positions ? OPS_IN : OPS_ABSENT, .dtype = QD_I32,
                                .cols = c->rows, .scale = (double)c->seq};
    return TENSORS;
}

/* As the model computes it: angle = position * 10000^(-2 i / dims). */
static void derive(const void *p, double *const *v)
{
    const rope_case *c = p;
    for (int64_t position = 0; position < c->seq; position++)
        for (int i = 0; i < dims(c) / 2; i++) {
            double angle = (double)position * pow(10000, -2.0 * i / dims(c));
            v[TABLE][position * dims(c) + 2 * i] = cos(angle);
            v[TABLE][position * dims(c) + 2 * i + 1] = sin(angle);
        }
}

static void reference(const void *p, double *const *v)
{
    const rope_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int h = 0; h < c->heads; h++)
            for (int i = 0; i < dims(c) / 2; i++) {
                int64_t position = c->positions ? (int64_t)v[POSITIONS][r] : r % c->seq;
                double *low = v[X] + r * stride(c) + h * c->head_dim + (c->interleaved ? 2 * i : i);
                double *high = low + (c->interleaved ? 1 : dims(c) / 2);
                double cosine = v[TABLE][position * dims(c) + 2 * i];
                double sine = v[TABLE][position * dims(c) + 2 * i + 1] * (c->inverse ? -1 : 1);
                double x = *low, y = *high;
                *low = x * cosine - y * sine;
                *high = x * sine + y * cosine;
            }
}

static qd_rope_args arguments(const rope_case *c, void *const *t)
{
    return (qd_rope_args){.x = t[X], .table = t[TABLE], .positions = t[POSITIONS], .rows = c->rows, .seq = c->seq,
                          .row_stride = stride(c), .heads = c->heads, .head_dim = c->head_dim, .dims = c->dims, .inverse = c->inverse,
                          .interleaved = c->interleaved, .dtype = c->dtype};
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_rope_args a = arguments(c, t);
    return k->rope(stream, &a);
}

static double bytes(const void *p)
{
    const rope_case *c = p;
    return (double)(c->rows * c->heads * c->head_dim) * 2 * (double)qd_dtype_size(c->dtype);
}

/* The backward pass inverts the rotation: it is the transpose of an orthogonal map. */
static void inverse_undoes(void **state)
{
    (void)state;
    rope_case c = {64, 32, 0, 3, 10, false, false, QD_F32, 0, false};
    static float x[64 * 30], before[64 * 30], table[32 * 10];
    double *v[TENSORS] = {NULL, (double[32 * 10]){0}, NULL};
    derive(&c, v);
    for (int i = 0; i < COUNT(table); i++)
        table[i] = (float)v[TABLE][i];
    for (int i = 0; i < COUNT(x); i++)
        x[i] = before[i] = (float)ops_normal();
    qd_device *device = ops_device(NULL, 2);
    void *t[TENSORS] = {x, table, NULL};
    qd_rope_args a = arguments(&c, t);
    ops_assert_ok(qd_device_kernels(device)->rope(qd_device_compute_stream(device), &a));
    assert_true(fabsf(x[35] - before[35]) > 1e-3f); /* row 1 is rotated */
    a.inverse = true;
    ops_assert_ok(qd_device_kernels(device)->rope(qd_device_compute_stream(device), &a));
    for (int i = 0; i < COUNT(x); i++)
        assert_true(fabsf(x[i] - before[i]) <= 1e-6f * (1 + fabsf(before[i])));
}

static void bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    float x[8] = {0}, table[8] = {0};
    int32_t positions[] = {0, -3};
    qd_rope_args a = {.x = x, .table = table, .positions = positions, .rows = 2, .seq = 1, .row_stride = 4, .heads = 1,
                      .head_dim = 4, .dtype = QD_F32};
    ops_assert_fails(k->rope(qd_device_compute_stream(device), &a), QD_USAGE, "row 1 has position -3");
    a.head_dim = 3;
    ops_assert_fails(k->rope(qd_device_compute_stream(device), &a), QD_USAGE, "head size 3");
    a.head_dim = 4;
    a.dims = 6;
    ops_assert_fails(k->rope(qd_device_compute_stream(device), &a), QD_USAGE, "6 of the 4 elements");
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "rope", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = tensors,
         .derive = derive, .reference = reference, .run = run, .bytes = bytes},
        {.kernel = "rope", .cases = part_cases, .case_size = sizeof *cases, .case_count = COUNT(part_cases), .describe = describe,
         .tensors = tensors, .derive = derive, .reference = reference, .run = run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(inverse_undoes), cmocka_unit_test(bad_arguments)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
