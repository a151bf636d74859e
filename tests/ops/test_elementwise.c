/* Elementwise sums and conversions, exact to the bit.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct add_case {
    int64_t n;
    qd_dtype a, b, y;
    enum { APART, OVER_A, OVER_B } place;
} add_case;

static const add_case add_cases[] = {
    {1, QD_F32, QD_F32, QD_F32, APART},       {7, QD_F32, QD_F32, QD_F32, OVER_A},
    {1000, QD_F32, QD_F32, QD_F32, OVER_B},   {40961, QD_F32, QD_F32, QD_F32, OVER_A},
    {40961, QD_BF16, QD_BF16, QD_BF16, APART}, {1000, QD_BF16, QD_BF16, QD_BF16, OVER_A},
    {40961, QD_F32, QD_BF16, QD_F32, OVER_A}, {4097, QD_BF16, QD_F32, QD_BF16, OVER_A},
    {4097, QD_BF16, QD_F32, QD_F32, OVER_B},  {4097, QD_BF16, QD_BF16, QD_F32, APART},
};
static const add_case add_speed[] = {
    {4096 * 768, QD_F32, QD_F32, QD_F32, APART},
    {4096 * 3072, QD_F32, QD_F32, QD_F32, OVER_A},
    {4096 * 3072, QD_BF16, QD_BF16, QD_BF16, APART},
};

static void add_describe(const void *p, char *text, size_t size)
{
    const add_case *c = p;
    snprintf(text, size, "%lld, %s + %s -> %s%s", (long long)c->n, qd_dtype_name(c->a), qd_dtype_name(c->b),
             qd_dtype_name(c->y), c->place == OVER_A ? ", over a" : c->place == OVER_B ? ", over b" : "");
}

static int add_tensors(const void *p, ops_tensor *t)
{
    const add_case *c = p;
    t[0] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = c->a, .cols = c->n};
    t[1] = (ops_tensor){.name = "b", .role = OPS_IN, .dtype = c->b, .cols = c->n};
    t[2] = (ops_tensor){.name = "y", .role = OPS_OUT, .dtype = c->y, .cols = c->n,
                        .shares = c->place == OVER_A ? 1 : c->place == OVER_B ? 2 : 0};
    return 3;
}

static void add_reference(const void *p, double *const *v)
{
    const add_case *c = p;
    for (int64_t i = 0; i < c->n; i++)
        v[2][i] = v[0][i] + v[1][i];
}

static qd_status add_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const add_case *c = p;
    return k->add(stream, &(qd_add_args){.a = t[0], .b = t[1], .y = t[2], .n = c->n, .a_dtype = c->a, .b_dtype = c->b,
                                         .y_dtype = c->y});
}

static double add_bytes(const void *p)
{
    const add_case *c = p;
    return (double)c->n * (double)(qd_dtype_size(c->a) + qd_dtype_size(c->b) + qd_dtype_size(c->y));
}

typedef struct cast_case {
    int64_t n;
    qd_dtype from, to;
} cast_case;

static const cast_case cast_cases[] = {
    {1, QD_F32, QD_BF16}, {7, QD_BF16, QD_F32}, {1000, QD_F32, QD_F32}, {40961, QD_F32, QD_BF16},
    {40961, QD_BF16, QD_F32}, {4097, QD_BF16, QD_BF16},
};
static const cast_case cast_speed[] = {{4096 * 3072, QD_F32, QD_BF16}, {4096 * 3072, QD_BF16, QD_F32}};

static void cast_describe(const void *p, char *text, size_t size)
{
    const cast_case *c = p;
    snprintf(text, size, "%lld, %s -> %s", (long long)c->n, qd_dtype_name(c->from), qd_dtype_name(c->to));
}

static int cast_tensors(const void *p, ops_tensor *t)
{
    const cast_case *c = p;
    t[0] = (ops_tensor){.name = "from", .role = OPS_IN, .dtype = c->from, .cols = c->n};
    t[1] = (ops_tensor){.name = "to", .role = OPS_OUT, .dtype = c->to, .cols = c->n};
    return 2;
}

static void cast_reference(const void *p, double *const *v)
{
    const cast_case *c = p;
    memcpy(v[1], v[0], (size_t)c->n * sizeof(double));
}

static qd_status cast_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const cast_case *c = p;
    return k->cast(stream,
                   &(qd_cast_args){.from = t[0], .to = t[1], .n = c->n, .from_dtype = c->from, .to_dtype = c->to});
}

static double cast_bytes(const void *p)
{
    const cast_case *c = p;
    return (double)c->n * (double)(qd_dtype_size(c->from) + qd_dtype_size(c->to));
}

typedef struct rows_case {
    int64_t rows, cols, from_stride, to_stride;
    qd_dtype from, to;
    bool add;
} rows_case;

static const rows_case rows_cases[] = {
    {1, 1, 1, 1, QD_F32, QD_F32, false},       {7, 33, 40, 33, QD_F32, QD_F32, false},     {130, 48, 64, 96, QD_BF16, QD_BF16, false},
    {64, 50, 50, 51, QD_F32, QD_BF16, false},  {300, 17, 21, 17, QD_BF16, QD_F32, false},  {7, 33, 40, 35, QD_F32, QD_F32, true},
    {64, 50, 50, 51, QD_BF16, QD_BF16, true},
};

static void rows_describe(const void *p, char *text, size_t size)
{
    const rows_case *c = p;
    snprintf(text, size, "%lld x %lld, strides %lld %lld, %s -> %s%s", (long long)c->rows, (long long)c->cols, (long long)c->from_stride,
             (long long)c->to_stride, qd_dtype_name(c->from), qd_dtype_name(c->to), c->add ? ", added" : "");
}

static int rows_tensors(const void *p, ops_tensor *t)
{
    const rows_case *c = p;
    t[0] = (ops_tensor){.name = "from", .role = OPS_IN, .dtype = c->from, .rows = c->rows, .cols = c->cols, .ld = c->from_stride};
    t[1] = (ops_tensor){.name = "to", .role = c->add ? OPS_INOUT : OPS_OUT, .dtype = c->to, .rows = c->rows, .cols = c->cols,
                        .ld = c->to_stride};
    return 2;
}

static void rows_reference(const void *p, double *const *v)
{
    const rows_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < c->cols; i++)
            v[1][r * c->to_stride + i] = v[0][r * c->from_stride + i] + (c->add ? v[1][r * c->to_stride + i] : 0);
}

static qd_status rows_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const rows_case *c = p;
    return k->copy_rows(stream, &(qd_copy_rows_args){.from = t[0], .to = t[1], .rows = c->rows, .cols = c->cols,
                                                     .from_stride = c->from_stride,
                                                     .to_stride = c->to_stride, .accumulate = c->add, .from_dtype = c->from,
                                                     .to_dtype = c->to});
}

/* Bit by bit the scalar conversion: ties, subnormals, infinities, and every kind of NaN. */
static void cast_exactly(void **state)
{
    (void)state;
    enum { N = 1 << 20 };
    static float from[N];
    static uint16_t to[N];
    for (uint32_t i = 0; i < N; i++) {
        uint32_t bits = i << 12 | (i & 1 ? 0x800 : 0) | (i & 2 ? 1 : 0);
        memcpy(&from[i], &bits, 4);
    }
    for (int s = 0; s < OPS_CPU_ISAS; s++) {
        qd_device *device = ops_cpu(ops_cpu_isas[s]);
        if (!device)
            continue;
        qd_cast_args a = {.from = from, .to = to, .n = N, .from_dtype = QD_F32, .to_dtype = QD_BF16};
        ops_assert_ok(qd_device_kernels(device)->cast(qd_device_compute_stream(device), &a));
        for (int i = 0; i < N; i++) {
            uint16_t want = qd_f32_to_bf16(from[i]);
            if (to[i] != want && !(isnan(from[i]) && isnan(qd_bf16_to_f32(to[i]))))
                fail_msg("%s: %a becomes %04x instead of %04x", ops_cpu_isas[s], (double)from[i], to[i], want);
        }
    }
}

static void wrong_type_is_refused(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    qd_cast_args a = {.from_dtype = QD_F32, .to_dtype = QD_I32};
    ops_assert_fails(qd_device_kernels(device)->cast(qd_device_compute_stream(device), &a), QD_UNSUPPORTED, "int32");
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "add", .cases = add_cases, .speed_cases = add_speed, .case_size = sizeof *add_cases,
         .case_count = COUNT(add_cases), .speed_count = COUNT(add_speed), .describe = add_describe,
         .tensors = add_tensors, .reference = add_reference, .run = add_run, .bytes = add_bytes},
        {.kernel = "cast", .cases = cast_cases, .speed_cases = cast_speed, .case_size = sizeof *cast_cases,
         .case_count = COUNT(cast_cases), .speed_count = COUNT(cast_speed), .describe = cast_describe,
         .tensors = cast_tensors, .reference = cast_reference, .run = cast_run, .bytes = cast_bytes},
        {.kernel = "copy_rows", .cases = rows_cases, .case_size = sizeof *rows_cases, .case_count = COUNT(rows_cases),
         .describe = rows_describe, .tensors = rows_tensors, .reference = rows_reference, .run = rows_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(cast_exactly), cmocka_unit_test(wrong_type_is_refused)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
