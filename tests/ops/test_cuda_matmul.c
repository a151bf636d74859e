/* GEMMs on a GPU with everything that runs in the same pass: residual, GELU and its derivative, the
 * bias gradient. Sizes that epilogues accept and sizes that they decline, types that go through
 * copies. Tuned GEMMs give the results of untuned ones, and choices can be saved as text. */
#include "base/clock.h"
#include "base/half.h"
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct fused_case {
    int64_t m, n, k, pad;
    bool trans_a, trans_b, accumulate, bias, residual, bias_grad;
    qd_matmul_gelu gelu;
    qd_dtype ab, c;
} fused_case;

#define F QD_F32
#define H QD_BF16
static const fused_case cases[] = {
    /*  m    n    k  pad  ta     tb     acc    bias   resid  bgrad  */
    {128, 256, 192, 0, false, true, false, true, false, false, QD_MATMUL_NO_GELU, H, H},
    {128, 256, 192, 0, false, true, false, true, true, false, QD_MATMUL_NO_GELU, H, H},
    {128, 256, 192, 0, false, true, false, false, true, false, QD_MATMUL_NO_GELU, H, H},
    {128, 256, 192, 0, false, true, false, true, false, false, QD_MATMUL_GELU, H, H},
    {128, 256, 192, 0, false, true, false, false, false, false, QD_MATMUL_GELU, H, H},
    {128, 256, 192, 0, false, false, false, false, false, false, QD_MATMUL_GELU_GRAD, H, H},
    {256, 192, 512, 0, true, false, true, false, false, true, QD_MATMUL_NO_GELU, H, H},
    {256, 192, 512, 0, true, false, true, false, false, true, QD_MATMUL_NO_GELU, H, F},
    {256, 192, 512, 0, true, false, false, false, false, true, QD_MATMUL_NO_GELU, H, H},
    {256, 192, 512, 0, true, false, false, false, false, true, QD_MATMUL_NO_GELU, H, F},
    {96, 160, 64, 0, true, false, false, false, false, true, QD_MATMUL_NO_GELU, F, F},
    {33, 47, 29, 3, true, false, false, false, false, true, QD_MATMUL_NO_GELU, H, H},
    {40, 24, 0, 0, true, false, false, false, false, true, QD_MATMUL_NO_GELU, H, H},
    {96, 160, 64, 0, false, true, false, true, true, false, QD_MATMUL_NO_GELU, F, F},
    {96, 160, 64, 0, false, true, false, true, false, false, QD_MATMUL_GELU, F, F},
    {96, 160, 64, 0, false, false, false, false, false, false, QD_MATMUL_GELU_GRAD, F, F},
    {96, 160, 64, 0, true, false, true, false, false, true, QD_MATMUL_NO_GELU, F, F},
    /* odd sizes and strides */
    {33, 47, 29, 0, false, true, false, true, true, false, QD_MATMUL_NO_GELU, H, H},
    {33, 47, 29, 0, false, true, false, true, false, false, QD_MATMUL_GELU, H, H},
    {33, 47, 29, 5, false, true, false, true, false, false, QD_MATMUL_GELU, H, H},
    {33, 47, 29, 5, false, false, false, false, false, false, QD_MATMUL_GELU_GRAD, H, H},
    {33, 47, 29, 0, true, false, true, false, false, true, QD_MATMUL_NO_GELU, H, H},
    {33, 47, 29, 3, true, false, true, false, false, true, QD_MATMUL_NO_GELU, H, F},
    {33, 47, 29, 3, false, true, true, true, true, false, QD_MATMUL_NO_GELU, H, H},
    {33, 47, 29, 1, false, true, true, true, true, true, QD_MATMUL_NO_GELU, F, F},
    {17, 24, 40, 0, false, true, false, true, false, false, QD_MATMUL_GELU, H, F},
    {17, 24, 40, 0, false, true, false, true, false, false, QD_MATMUL_NO_GELU, F, H},
    {1, 8, 8, 0, false, true, false, true, true, false, QD_MATMUL_NO_GELU, H, H},
    {8, 8, 0, 0, false, true, false, true, true, false, QD_MATMUL_NO_GELU, H, H},
};

enum { A, B, BIAS, RESIDUAL, AUX, C, GRAD, OPERANDS };

/* One operand: its values in double, and its bytes on the device. */
typedef struct operand {
    qd_dtype dtype;
    int64_t count;
    double *values;
    void *there;
} operand;

static qd_device *device;

static void to_bytes(const operand *o, void *bytes)
{
    for (int64_t i = 0; i < o->count; i++) {
        if (o->dtype == QD_F32)
            ((float *)bytes)[i] = (float)o->values[i];
        else
            ((uint16_t *)bytes)[i] = qd_f32_to_bf16((float)o->values[i]);
    }
}

static double value_at(const void *bytes, qd_dtype dtype, int64_t i)
{
    return dtype == QD_F32 ? (double)((const float *)bytes)[i] : (double)qd_bf16_to_f32(((const uint16_t *)bytes)[i]);
}

static int64_t bytes_of(const operand *o)
{
    return o->count * (int64_t)qd_dtype_size(o->dtype);
}

/* Random values that the type represents exactly. */
static void fill(operand *o, qd_dtype dtype, int64_t count)
{
    *o = (operand){.dtype = dtype, .count = count};
    o->values = malloc((size_t)count * sizeof(double) + 1);
    void *bytes = malloc((size_t)count * 4 + 1);
    assert_non_null(o->values);
    assert_non_null(bytes);
    for (int64_t i = 0; i < count; i++)
        o->values[i] = ops_normal();
    to_bytes(o, bytes);
    for (int64_t i = 0; i < count; i++)
        o->values[i] = value_at(bytes, dtype, i);
    ops_assert_ok(qd_device_alloc(device, bytes_of(o), &o->there));
    ops_assert_ok(qd_copy(qd_device_compute_stream(device), o->there, bytes, bytes_of(o)));
    ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
    free(bytes);
}

static void release(operand *o)
{
    free(o->values);
    qd_device_free(device, o->there, bytes_of(o));
}

/* |device - expected| <= tol |expected| over the (rows, columns) elements, and the padding between
 * rows is unchanged */
static void compare(const operand *o, const double *expected, int64_t rows, int64_t columns, int64_t ld, const char *what,
                    const char *name)
{
    double error = 0, norm = 0, tol = o->dtype == QD_F32 ? 1e-5 : 6e-3;
    void *bytes = malloc((size_t)bytes_of(o) + 1);
    assert_non_null(bytes);
    ops_assert_ok(qd_copy(qd_device_compute_stream(device), bytes, o->there, bytes_of(o)));
    ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
    for (int64_t i = 0; i < o->count; i++) {
        double got = value_at(bytes, o->dtype, i);
        if (i % ld >= columns || i / ld >= rows) {
            if (got != o->values[i])
                fail_msg("%s: %s was written outside of its rows, at %lld", name, what, (long long)i);
            continue;
        }
        error += (got - expected[i]) * (got - expected[i]);
        norm += expected[i] * expected[i];
    }
    free(bytes);
    if (!(sqrt(error) <= tol * sqrt(norm)))
        fail_msg("%s: %s differs by %.3g of its norm, more than %.3g", name, what, sqrt(error / norm), tol);
}

static double gelu(double x)
{
    return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

static double gelu_slope(double x)
{
    double inner = 0.7978845608028654 * (x + 0.044715 * x * x * x), t = tanh(inner);
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x);
}

static qd_matmul_args call_of(const fused_case *c, operand *o)
{
    return (qd_matmul_args){
        .a = o[A].there, .b = o[B].there, .c = o[C].there, .bias = c->bias ? o[BIAS].there : NULL,
        .residual = c->residual ? o[RESIDUAL].there : NULL, .aux = c->gelu ? o[AUX].there : NULL,
        .bias_grad = c->bias_grad ? o[GRAD].there : NULL, .gelu = c->gelu, .m = c->m, .n = c->n, .k = c->k,
        .lda = (c->trans_a ? c->m : c->k) + c->pad, .ldb = (c->trans_b ? c->k : c->n) + c->pad, .ldc = c->n + c->pad,
        .trans_a = c->trans_a, .trans_b = c->trans_b, .accumulate = c->accumulate,
        .a_dtype = c->ab, .b_dtype = c->ab, .c_dtype = c->c,
    };
}

static void make_operands(const fused_case *c, operand *o)
{
    qd_matmul_args a = call_of(c, (operand[OPERANDS]){0});
    fill(&o[A], c->ab, (c->trans_a ? c->k : c->m) * a.lda);
    fill(&o[B], c->ab, (c->trans_b ? c->n : c->k) * a.ldb);
    fill(&o[BIAS], c->ab, c->n);
    fill(&o[RESIDUAL], c->c, c->m * a.ldc);
    fill(&o[AUX], c->c, c->m * a.ldc);
    fill(&o[C], c->c, c->m * a.ldc);
    fill(&o[GRAD], c->c, c->m);
}

static void run_case(const fused_case *c, const char *name)
{
    operand o[OPERANDS];
    make_operands(c, o);
    qd_matmul_args a = call_of(c, o);
    ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &a));

    double *result = malloc((size_t)(c->m * a.ldc) * sizeof *result), *before = malloc((size_t)(c->m * a.ldc) * sizeof *before);
    double *grad = malloc((size_t)c->m * sizeof *grad);
    assert_true(result && before && grad);
    for (int64_t i = 0; i < c->m; i++) {
        grad[i] = c->accumulate ? o[GRAD].values[i] : 0;
        for (int64_t k = 0; k < c->k; k++)
            grad[i] += o[A].values[c->trans_a ? k * a.lda + i : i * a.lda + k];
        for (int64_t j = 0; j < c->n; j++) {
            int64_t at = i * a.ldc + j;
            double sum = c->bias ? o[BIAS].values[j] : 0;
            for (int64_t k = 0; k < c->k; k++)
                sum += o[A].values[c->trans_a ? k * a.lda + i : i * a.lda + k] *
                       o[B].values[c->trans_b ? j * a.ldb + k : k * a.ldb + j];
            sum += c->residual ? o[RESIDUAL].values[at] : 0;
            sum += c->accumulate ? o[C].values[at] : 0;
            before[at] = sum;
            result[at] = c->gelu == QD_MATMUL_GELU ? gelu(sum) : c->gelu == QD_MATMUL_GELU_GRAD ? sum * gelu_slope(o[AUX].values[at]) : sum;
        }
    }
    compare(&o[C], result, c->m, c->n, a.ldc, "c", name);
    if (c->gelu == QD_MATMUL_GELU)
        compare(&o[AUX], before, c->m, c->n, a.ldc, "aux", name);
    if (c->bias_grad)
        compare(&o[GRAD], grad, 1, c->m, c->m, "bias_grad", name);
    free(result);
    free(before);
    free(grad);
    for (int i = 0; i < OPERANDS; i++)
        release(&o[i]);
}

static void run_all(const char *which)
{
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[64];
        snprintf(name, sizeof name, "%s case %zu", which, i);
        run_case(&cases[i], name);
    }
}

static void fused_results(void **state)
{
    (void)state;
    run_all("untuned");
}

/* The search times every variant, fused or not; the one it keeps must be correct too. Then the text
 * restores it. */
static void tuned_results_and_text(void **state)
{
    (void)state;
    enum { COUNT = sizeof cases / sizeof *cases };
    qd_matmul_args calls[COUNT];
    static char here[1];
    operand marks[OPERANDS];
    for (int i = 0; i < OPERANDS; i++)
        marks[i] = (operand){.there = here};
    for (size_t i = 0; i < COUNT; i++)
        calls[i] = call_of(&cases[i], marks);
    bool searched;
    qd_strbuf text = {0}, again = {0};
    const qd_tune_args tune = {.calls = calls, .count = COUNT, .seconds = INFINITY};
    ops_assert_ok(qd_device_tune(device, &tune, &searched));
    assert_true(searched);
    run_all("tuned");
    ops_assert_ok(qd_device_tune(device, &tune, &searched));
    assert_false(searched);

    ops_assert_ok(qd_device_tuning_get(device, &text));
    qd_device *first = device, *second;
    ops_assert_ok(qd_device_create("cuda", NULL, &second));
    ops_assert_ok(qd_device_tuning_set(second, "quadrille tuning 0; another device\nnonsense\n"));
    ops_assert_ok(qd_device_tuning_set(second, text.data));
    device = second;
    run_all("from text");
    ops_assert_ok(qd_device_tune(device, &tune, &searched));
    assert_false(searched);
    ops_assert_ok(qd_device_tuning_get(device, &again));
    assert_int_equal(again.length, text.length);
    char *broken = strdup(text.data);
    char *line = strstr(broken, "product ");
    assert_non_null(line);
    memcpy(line, "prudoct ", 8);
    ops_assert_fails(qd_device_tuning_set(device, broken), QD_CORRUPT, "unknown line");
    free(broken);
    qd_strbuf_free(&text);
    qd_strbuf_free(&again);
    qd_device_destroy(second);
    device = first;
}

static void count_searches(void *context, int searches)
{
    *(int *)context += searches;
}

/* What was found in a hurry is searched for again, one GEMM per call; the last call leaves nothing
 * that is rough. Searches stay inside the memory that they are lent. */
static void refined_in_lent_memory(const qd_tune_args *hurried, int rough)
{
    enum { LENT = 1 << 30, GUARD = 4096 };
    void *lent;
    char guard[GUARD], after[GUARD];
    memset(guard, 0x5a, sizeof guard);
    ops_assert_ok(qd_device_alloc(device, (int64_t)LENT + GUARD, &lent));
    qd_stream *stream = qd_device_compute_stream(device);
    ops_assert_ok(qd_copy(stream, (char *)lent + LENT, guard, GUARD));
    qd_tune_args tune = *hurried;
    tune.scratch = lent;
    tune.scratch_bytes = LENT;
    for (int left = rough; left > 0;) {
        int before = left;
        ops_assert_ok(qd_device_tune_more(device, &tune, &left));
        assert_true(left < before);
    }
    ops_assert_ok(qd_copy(stream, after, (char *)lent + LENT, GUARD));
    ops_assert_ok(qd_stream_wait(stream));
    assert_memory_equal(after, guard, GUARD);
    qd_device_free(device, lent, (int64_t)LENT + GUARD);
    qd_strbuf text = {0};
    ops_assert_ok(qd_device_tuning_get(device, &text));
    assert_null(strstr(text.data, "rough 1"));
    assert_non_null(strstr(text.data, "rough 0"));
    qd_strbuf_free(&text);
    run_all("refined");
}

/* A search with a time limit: it takes about that long, results are correct, GEMMs with a small
 * share of the step are left to the library, and a second call searches for nothing. The head's
 * GEMMs over an odd vocabulary are tuned in two parts. */
static void tuned_in_time(void **state)
{
    (void)state;
    enum { M_ROWS = 8192, WIDE = 50257, HIDDEN = 768 };
    static char here[1];
    qd_matmul_args calls[4];
    calls[0] = (qd_matmul_args){.m = M_ROWS, .n = WIDE, .k = HIDDEN, .lda = HIDDEN, .ldb = HIDDEN, .ldc = 50304, .trans_b = true};
    calls[1] = (qd_matmul_args){.m = M_ROWS, .n = HIDDEN, .k = WIDE, .lda = 50304, .ldb = HIDDEN, .ldc = HIDDEN};
    calls[2] = (qd_matmul_args){.m = WIDE, .n = HIDDEN, .k = M_ROWS, .lda = 50304, .ldb = HIDDEN, .ldc = HIDDEN, .trans_a = true};
    calls[3] = call_of(&cases[0], (operand[OPERANDS]){{.there = here}, {.there = here}, {.there = here}, {.there = here}, {.there = here},
                                                      {.there = here}, {.there = here}});
    for (int i = 0; i < 3; i++) {
        calls[i].a = calls[i].b = calls[i].c = here;
        calls[i].a_dtype = calls[i].b_dtype = calls[i].c_dtype = QD_BF16;
    }
    qd_device *first = device, *fresh;
    ops_assert_ok(qd_device_create("cuda", NULL, &fresh));
    device = fresh;
    int searches = 0;
    bool searched;
    const qd_tune_args tune = {.calls = calls, .count = 4, .seconds = 1, .begin = count_searches, .context = &searches};
    const double begin = qd_clock_now();
    ops_assert_ok(qd_device_tune(device, &tune, &searched));
    const double took = qd_clock_now() - begin;
    print_message("searches for %d GEMMs took %.2f s of 1\n", searches, took);
    assert_true(searched && took < 3);
    assert_int_equal(searches, 3);
    ops_assert_ok(qd_device_tune(device, &tune, &searched));
    assert_false(searched);
    run_all("tuned in time");
    refined_in_lent_memory(&tune, searches);
    qd_device_destroy(fresh);
    device = first;
}

static void refuses_bad_arguments(void **state)
{
    (void)state;
    qd_stream *stream = qd_device_compute_stream(device);
    const qd_kernels *k = qd_device_kernels(device);
    static char here[1], there[1];
    qd_matmul_args a = {.a = here, .b = here, .c = here, .m = 2, .n = 2, .k = 2, .lda = 2, .ldb = 2, .ldc = 2};
    a.residual = here;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "residual must not be c");
    a.residual = there;
    a.gelu = QD_MATMUL_GELU;
    a.aux = there;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "fused GELU");
    a.residual = NULL;
    a.aux = NULL;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "needs aux");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fused_results),
        cmocka_unit_test(tuned_results_and_text),
        cmocka_unit_test(tuned_in_time),
        cmocka_unit_test(refuses_bad_arguments),
    };
    qd_status status = qd_device_create("cuda", NULL, &device);
    if (status != QD_OK) {
        printf("skipped: %s\n", qd_error_message());
        return status == QD_UNSUPPORTED ? 77 : 1;
    }
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    qd_device_destroy(device);
    return failed;
}
