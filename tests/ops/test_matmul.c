/* GEMM: all transposes, strides, types, bias and accumulation, sizes around the edges of tiles. */
#include "device/aligned_gemm.h"
#include "support/ops.h"

#include <stdio.h>

enum { CUT = -1 };

typedef struct matmul_case {
    int64_t m, n, k;
    bool trans_a, trans_b, accumulate, bias;
    qd_dtype a, b, c;
    int64_t pad; /* added to each row stride; CUT: strides are multiples of 64, and the two parts of qd_matmul_cut are run */
} matmul_case;

enum { A, B, BIAS, C };

static void describe(const void *p, char *text, size_t size)
{
    const matmul_case *c = p;
    snprintf(text, size, "%lldx%lldx%lld %c%c%s%s %s·%s→%s%s", (long long)c->m, (long long)c->n, (long long)c->k,
             c->trans_a ? 'T' : 'N', c->trans_b ? 'T' : 'N', c->accumulate ? " +=" : "", c->bias ? " bias" : "",
             qd_dtype_name(c->a), qd_dtype_name(c->b), qd_dtype_name(c->c), c->pad == CUT ? " cut" : c->pad ? " strided" : "");
}

static qd_matmul_args arguments(const matmul_case *c)
{
    qd_matmul_args a = {
        .m = c->m, .n = c->n, .k = c->k,
        .lda = (c->trans_a ? c->m : c->k) + c->pad,
        .ldb = (c->trans_b ? c->k : c->n) + c->pad,
        .ldc = c->n + c->pad,
        .trans_a = c->trans_a, .trans_b = c->trans_b, .accumulate = c->accumulate,
        .a_dtype = c->a, .b_dtype = c->b, .c_dtype = c->c,
    };
    if (c->pad == CUT) {
        a.lda = (a.lda + 64) / 64 * 64;
        a.ldb = (a.ldb + 64) / 64 * 64;
        a.ldc = (a.ldc + 64) / 64 * 64;
    }
    return a;
}

static int tensors(const void *p, ops_tensor *t)
{
    const matmul_case *c = p;
    qd_matmul_args a = arguments(c);
    t[A] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = c->a, .rows = c->trans_a ? c->k : c->m,
                        .cols = c->trans_a ? c->m : c->k, .ld = a.lda};
    t[B] = (ops_tensor){.name = "b", .role = OPS_IN, .dtype = c->b, .rows = c->trans_b ? c->n : c->k,
                        .cols = c->trans_b ? c->k : c->n, .ld = a.ldb};
    t[BIAS] = (ops_tensor){.name = "bias", .role = c->bias ? OPS_IN : OPS_ABSENT, .dtype = c->b, .cols = c->n};
    t[C] = (ops_tensor){.name = "c", .role = c->accumulate ? OPS_INOUT : OPS_OUT, .dtype = c->c, .rows = c->m,
                        .cols = c->n, .ld = a.ldc};
    return 4;
}

static void reference(const void *p, double *const *v)
{
    const matmul_case *c = p;
    qd_matmul_args a = arguments(c);
    for (int64_t i = 0; i < c->m; i++) {
        for (int64_t j = 0; j < c->n; j++) {
            double sum = c->bias ? v[BIAS][j] : 0;
            for (int64_t k = 0; k < c->k; k++)
                sum += v[A][c->trans_a ? k * a.lda + i : i * a.lda + k] *
                       v[B][c->trans_b ? j * a.ldb + k : k * a.ldb + j];
            double *to = &v[C][i * a.ldc + j];
            *to = c->accumulate ? *to + sum : sum;
        }
    }
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *v)
{
    const matmul_case *c = p;
    qd_matmul_args a = arguments(c);
    a.a = v[A];
    a.b = v[B];
    a.bias = v[BIAS];
    a.c = v[C];
    if (c->pad != CUT)
        return k->matmul(stream, &a);
    qd_matmul_args parts[2];
    assert_int_equal(qd_matmul_cut(&a, 0, parts), 2);
    QD_TRY(k->matmul(stream, &parts[0]));
    return k->matmul(stream, &parts[1]);
}

static double flops(const void *p)
{
    const matmul_case *c = p;
    return 2.0 * (double)c->m * (double)c->n * (double)c->k;
}

#define F QD_F32
#define H QD_BF16
static const matmul_case cases[] = {
    {1, 1, 1, false, false, false, false, F, F, F, 0},
    {1, 5, 3, false, true, false, true, F, F, F, 1},
    {7, 1, 9, true, false, true, false, F, F, F, 0},
    {3, 4, 0, false, false, false, true, F, F, F, 0}, /* k = 0: c = bias */
    {3, 4, 0, false, true, true, false, F, F, F, 2},
    {17, 33, 65, false, false, false, false, F, F, F, 0},
    {17, 33, 65, false, true, false, true, F, F, F, 3},
    {17, 33, 65, true, false, true, false, F, F, F, 5},
    {17, 33, 65, true, true, true, true, F, F, F, 1},
    {64, 48, 96, false, true, false, true, F, F, F, 0},
    {96, 768, 384, false, true, false, true, F, F, F, 0},
    {341, 131, 385, false, false, true, true, F, F, F, 7}, /* across the edge of a block of k */
    {13, 1601, 50, false, true, false, false, F, F, F, 0}, /* many items, few rows */
    {131, 97, 800, true, false, true, false, F, F, F, 0},
    {600, 800, 40, false, true, false, true, F, F, F, 0}, /* several items */
    {17, 33, 65, false, true, false, true, H, H, H, 3},
    {31, 18, 77, true, false, true, false, H, H, F, 0}, /* weight gradient into fp32 */
    {31, 18, 500, true, false, true, false, H, H, H, 1},
    {29, 66, 401, false, false, false, false, H, H, F, 1},
    {400, 790, 33, false, true, false, true, H, H, H, 0}, /* several items, sums on the side */
    {850, 870, 20, true, false, true, false, H, H, H, 0}, /* several blocks of sums */
    {900, 850, 70, true, false, true, false, F, F, F, 3}, /* b packed in pieces in both dimensions */
    {900, 850, 70, true, false, true, false, H, H, F, 3},
    {540, 530, 500, true, false, true, false, F, F, F, 1}, /* b packed with non-temporal stores */
    {540, 530, 500, true, false, false, true, F, H, H, 0},
    {2600, 2530, 2, false, true, false, true, F, F, F, 0}, /* more rows than one thread's workspace holds */
    {19, 23, 29, false, true, false, true, F, H, F, 0},
    {19, 23, 29, true, true, false, false, H, F, H, 1},
    /* a head's logits, their input gradient and their weight gradient, for a vocabulary of odd
     * size */
    {24, 257, 40, false, true, false, false, H, H, H, CUT},
    {24, 263, 40, false, true, false, false, H, H, F, CUT},
    {24, 40, 257, false, false, false, false, H, H, H, CUT},
    {24, 40, 262, false, false, true, false, H, H, F, CUT},
    {257, 40, 24, true, false, true, false, H, H, H, CUT},
    {259, 40, 24, true, false, false, false, H, H, F, CUT},
    {257, 40, 24, true, true, false, false, H, H, F, CUT},
};
#define FORWARD(m, n, k) {m, n, k, false, true, false, true, F, F, F, 0}
#define INPUT_GRADIENT(m, n, k) {m, k, n, false, false, false, false, F, F, F, 0}
#define WEIGHT_GRADIENT(m, n, k) {n, k, m, true, false, true, false, F, F, F, 0}
#define LAYER(m, n, k) FORWARD(m, n, k), INPUT_GRADIENT(m, n, k), WEIGHT_GRADIENT(m, n, k)
static const matmul_case speed_cases[] = {
    LAYER(1024, 2304, 768), LAYER(1024, 768, 768), LAYER(1024, 3072, 768), LAYER(1024, 768, 3072),
    LAYER(4096, 2304, 768), LAYER(4096, 3072, 768), LAYER(4096, 768, 3072), LAYER(1024, 50257, 768),
    {1024, 3072, 768, false, true, false, true, H, H, H, 0},
    {3072, 768, 1024, true, false, true, false, H, H, F, 0},
};

static void refuses_bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    float x[4] = {0};
    qd_matmul_args a = {.a = x, .b = x, .c = x, .m = 2, .n = 2, .k = 2, .lda = 2, .ldb = 2, .ldc = 2};
    ops_assert_ok(k->matmul(stream, &a));
    a.ldc = 1;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "row strides");
    a.ldc = 2;
    a.b_dtype = QD_F16;
    ops_assert_fails(k->matmul(stream, &a), QD_UNSUPPORTED, "b has type fp16");
    a.b_dtype = QD_F32;
    a.m = -1;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "negative");
}

/* Cases that are not split: nothing odd, more than one odd size, other types, epilogues, unaligned
 * rows, little work. */
static void cuts_only_what_gains(void **state)
{
    (void)state;
    static char here[1];
    qd_matmul_args parts[2], a = {.m = 8192, .n = 50257, .k = 768, .lda = 768, .ldb = 768, .ldc = 50304, .trans_b = true,
                                  .a_dtype = QD_BF16, .b_dtype = QD_BF16, .c_dtype = QD_BF16};
    assert_int_equal(qd_matmul_cut(&a, 4e9, parts), 2);
    assert_int_equal(parts[0].n, 50256);
    assert_int_equal(parts[1].n, 1);
    for (int i = 0; i < 7; i++) {
        qd_matmul_args b = a;
        if (i == 0)
            b.n = 50256;
        if (i == 1)
            b.k = 767;
        if (i == 2)
            b.a_dtype = QD_F32;
        if (i == 3)
            b.bias = here;
        if (i == 4)
            b.ldc = 50257;
        if (i == 5)
            b.m = 1;
        if (i == 6)
            b.n = 7;
        assert_int_equal(qd_matmul_cut(&b, 4e9, parts), 1);
        assert_int_equal(parts[0].n, b.n);
    }
}

static const ops_op op = {
    .kernel = "matmul",
    .cases = cases, .case_count = sizeof cases / sizeof *cases, .case_size = sizeof *cases,
    .speed_cases = speed_cases, .speed_count = sizeof speed_cases / sizeof *speed_cases,
    .describe = describe, .tensors = tensors, .reference = reference, .run = run, .flops = flops,
};

int main(int argc, char **argv)
{
    const struct CMUnitTest more[] = {cmocka_unit_test(refuses_bad_arguments), cmocka_unit_test(cuts_only_what_gains)};
    return ops_main(argc, argv, &op, 1, more, 2);
}
