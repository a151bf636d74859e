/* Dropout: the mask is a function of seed, step, site and element.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/rng.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct drop_case {
    int64_t rows, cols, first_row;
    float p;
    uint64_t seed, step;
    uint32_t site;
    bool in_place;
    qd_dtype dtype;
} drop_case;

static const drop_case cases[] = {
    {1, 1, 0, 0.5f, 1, 1, 0, false, QD_F32},
    {3, 7, 0, 0.1f, 1, 1, 3, true, QD_F32},
    {3, 7, 5, 0.1f, 1, 1, 3, false, QD_F32},
    {37, 1000, 1, 0.25f, 7, 12, 4000000000u, true, QD_F32},
    {21, 4097, 3, 0.9f, UINT64_MAX, (uint64_t)1 << 40, 9, false, QD_F32},
    {21, 4097, (int64_t)1 << 34, 0.1f, 2, 5, 9, false, QD_F32}, /* block numbers beyond 32 bits */
    {37, 1000, 0, 0.0f, 7, 12, 2, false, QD_F32},
    {37, 1000, 1, 0.25f, 7, 12, 2, true, QD_BF16},
    {21, 4097, 3, 0.1f, 2, 5, 9, false, QD_BF16},
};
static const drop_case speed[] = {
    {4096, 768, 0, 0.1f, 1, 1, 1, false, QD_F32},
    {4096, 768, 0, 0.1f, 1, 1, 1, false, QD_BF16},
};

static void describe(const void *p, char *text, size_t size)
{
    const drop_case *c = p;
    snprintf(text, size, "%lldx%lld from row %lld, p %g, %s%s", (long long)c->rows, (long long)c->cols,
             (long long)c->first_row, (double)c->p, qd_dtype_name(c->dtype), c->in_place ? ", in place" : "");
}

static int tensors(const void *p, ops_tensor *t)
{
    const drop_case *c = p;
    t[0] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[1] = t[0];
    t[1].name = "y";
    t[1].role = OPS_OUT;
    t[1].shares = c->in_place ? 1 : 0;
    return 2;
}

/* The stated rule, one draw after another. */
static void reference(const void *p, double *const *v)
{
    const drop_case *c = p;
    char name[32];
    snprintf(name, sizeof name, "dropout.%u", c->site);
    qd_philox_key key = qd_rng_key(c->seed, name);
    for (int64_t i = 0; i < c->rows * c->cols; i++) {
        uint64_t index = (uint64_t)(c->first_row * c->cols + i);
        uint32_t words[4];
        qd_philox4x32(key, index / 4, c->step, words);
        v[1][i] = qd_rng_to_uniform(words[index % 4]) >= c->p ? v[0][i] / (1 - (double)c->p) : 0;
    }
}

static qd_dropout_args arguments(const drop_case *c, const void *x, void *y)
{
    return (qd_dropout_args){.x = x, .y = y, .rows = c->rows, .cols = c->cols, .first_row = c->first_row, .p = c->p,
                             .seed = c->seed, .step = c->step, .site = c->site, .dtype = c->dtype};
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_dropout_args a = arguments(c, t[0], t[1]);
    return k->dropout(stream, &a);
}

static double bytes(const void *p)
{
    const drop_case *c = p;
    return (double)(c->rows * c->cols) * 2 * (double)qd_dtype_size(c->dtype);
}

enum { ROWS = 64, COLS = 501 };

static void apply(drop_case c, const float *x, float *y)
{
    qd_device *device = ops_device(NULL, 2);
    qd_dropout_args a = arguments(&c, x, y);
    ops_assert_ok(qd_device_kernels(device)->dropout(qd_device_compute_stream(device), &a));
}

/* Two halves of the rows, as on two ranks, give the mask of the whole; seed, step and site each
 * change it; the share of dropped elements is p. */
static void masks(void **state)
{
    (void)state;
    static float ones[ROWS * COLS], whole[ROWS * COLS], other[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++)
        ones[i] = 1;
    drop_case c = {ROWS, COLS, 0, 0.25f, 3, 5, 7, false, QD_F32};
    apply(c, ones, whole);
    double dropped = 0;
    for (int i = 0; i < ROWS * COLS; i++)
        dropped += whole[i] == 0;
    assert_true(fabs(dropped / (ROWS * COLS) - 0.25) < 0.015); /* 6 standard deviations */

    drop_case part = c;
    part.rows = 31;
    apply(part, ones, other);
    part.first_row = 31;
    part.rows = ROWS - 31;
    apply(part, ones, other + 31 * COLS);
    assert_memory_equal(whole, other, sizeof whole);

    drop_case changed[] = {c, c, c};
    changed[0].seed++;
    changed[1].step++;
    changed[2].site++;
    for (int i = 0; i < COUNT(changed); i++) {
        apply(changed[i], ones, other);
        double same = 0;
        for (int j = 0; j < ROWS * COLS; j++)
            same += (whole[j] == 0) == (other[j] == 0);
        assert_true(fabs(same / (ROWS * COLS) - 0.625) < 0.017); /* independent: p^2 + (1-p)^2 */
    }
}

static void not_finite_and_bad_probability(void **state)
{
    (void)state;
    float x[100], y[100];
    for (int i = 0; i < 100; i++)
        x[i] = i % 2 ? NAN : INFINITY;
    drop_case c = {1, 100, 0, 0.5f, 1, 1, 1, false, QD_F32};
    apply(c, x, y);
    for (int i = 0; i < 100; i++)
        assert_false(isfinite(y[i]));
    qd_device *device = ops_device(NULL, 1);
    static const float bad[] = {1.0f, -0.1f, NAN};
    for (int i = 0; i < COUNT(bad); i++) {
        c.p = bad[i];
        qd_dropout_args a = arguments(&c, x, y);
        ops_assert_fails(qd_device_kernels(device)->dropout(qd_device_compute_stream(device), &a), QD_USAGE,
                         "probability");
    }
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "dropout", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = tensors,
         .reference = reference, .run = run, .bytes = bytes},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(masks), cmocka_unit_test(not_finite_and_bad_probability)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
