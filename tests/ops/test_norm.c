/* LayerNorm and RMSNorm, forward and backward, with residual and column sums.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdio.h>

#define EPS 1e-5
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct norm_case {
    int64_t rows, cols;
    bool rms, beta, add, in_place; /* in_place: backward with dx == add */
    qd_dtype dtype, param_dtype, grad_dtype;
    bool overwrite; /* backward: gradients of parameters */
    bool branches;  /* backward: sums of add and dx too */
    enum { GAMMA, ONE_PLUS, NONE } factor;
} norm_case;

static const norm_case cases[] = {
    {1, 1, false, true, false, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {5, 1, true, false, true, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {9, 200, false, true, true, false, QD_F32, QD_F32, QD_F32, true, true, GAMMA},
    {9, 37, true, false, false, false, QD_BF16, QD_F32, QD_F32, true, false, GAMMA},
    {70, 256, false, true, false, false, QD_BF16, QD_BF16, QD_BF16, true, true, GAMMA},
    {3, 7, false, true, true, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {67, 7, true, false, false, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {65, 16, false, true, true, true, QD_F32, QD_F32, QD_F32, false, true, GAMMA},
    {33, 1000, false, true, false, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {33, 1000, false, false, true, true, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {130, 768, true, false, true, true, QD_F32, QD_F32, QD_F32, false, true, GAMMA},
    {9, 4097, false, true, true, false, QD_F32, QD_F32, QD_F32, false, true, GAMMA},
    {9, 4097, true, true, false, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {2, 65536, false, true, true, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {33, 1000, false, true, true, true, QD_BF16, QD_BF16, QD_BF16, false, true, GAMMA},
    {40, 7, true, false, true, false, QD_BF16, QD_BF16, QD_F32, false, false, GAMMA},
    {9, 4097, false, true, false, false, QD_BF16, QD_F32, QD_F32, false, false, GAMMA},
    {9, 4097, true, false, true, false, QD_F32, QD_BF16, QD_BF16, false, false, GAMMA},
};

/* Row lengths of models, as the accelerator's kernels distribute them over threads; enough rows
 * that each thread has several. Without numerical gradients, which would take too long. */
static const norm_case wide[] = {
    {2500, 768, false, true, true, true, QD_BF16, QD_BF16, QD_BF16, false, true, GAMMA},
    {300, 1024, true, false, false, false, QD_BF16, QD_BF16, QD_F32, false, false, GAMMA},
    {700, 1600, false, true, true, false, QD_BF16, QD_BF16, QD_BF16, false, true, GAMMA},
    {600, 2048, true, false, true, true, QD_BF16, QD_BF16, QD_BF16, false, false, GAMMA},
    {300, 4096, true, false, true, false, QD_BF16, QD_F32, QD_F32, false, false, GAMMA},
    {150, 8192, false, true, false, false, QD_BF16, QD_BF16, QD_BF16, false, false, GAMMA},
    {300, 1600, true, false, true, true, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {8, 16384, true, false, true, false, QD_BF16, QD_BF16, QD_BF16, false, false, GAMMA},
};

/* Factors of 1 + gamma, and none. */
static const norm_case factors[] = {
    {9, 37, true, false, false, false, QD_F32, QD_F32, QD_F32, false, false, ONE_PLUS},
    {67, 64, true, false, true, true, QD_F32, QD_F32, QD_F32, true, false, ONE_PLUS},
    {33, 256, true, false, false, false, QD_BF16, QD_BF16, QD_F32, false, false, ONE_PLUS},
    {40, 7, true, false, true, false, QD_BF16, QD_F32, QD_F32, false, false, ONE_PLUS},
    {9, 37, false, false, false, false, QD_F32, QD_F32, QD_F32, false, false, NONE},
    {33, 1000, false, false, true, true, QD_F32, QD_F32, QD_F32, false, false, NONE},
    {70, 256, false, false, true, false, QD_BF16, QD_F32, QD_F32, false, false, NONE},
};
static const norm_case wide_factors[] = {
    {600, 2304, true, false, true, true, QD_BF16, QD_BF16, QD_BF16, false, false, ONE_PLUS},
    {300, 4096, true, false, false, false, QD_BF16, QD_F32, QD_F32, false, false, ONE_PLUS},
    {700, 2048, false, false, true, false, QD_BF16, QD_BF16, QD_BF16, false, false, NONE},
    {150, 8192, false, false, false, false, QD_BF16, QD_BF16, QD_BF16, false, false, NONE},
};

static const norm_case speed[] = {
    {4096, 768, false, true, false, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {4096, 768, false, true, true, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {4096, 768, true, false, true, false, QD_F32, QD_F32, QD_F32, false, false, GAMMA},
    {4096, 768, false, true, true, false, QD_BF16, QD_BF16, QD_BF16, false, false, GAMMA},
};

static void describe(const void *p, char *text, size_t size)
{
    const norm_case *c = p;
    snprintf(text, size, "%s %lldx%lld %s, %s %s, gradients %s%s%s%s%s%s", c->rms ? "rms" : "layer", (long long)c->rows,
             (long long)c->cols, qd_dtype_name(c->dtype), c->factor == NONE ? "no gamma" : c->factor == ONE_PLUS ? "1 + gamma" : "gamma",
             qd_dtype_name(c->param_dtype), qd_dtype_name(c->grad_dtype),
             c->beta ? ", beta" : "", c->add ? ", add" : "", c->in_place ? ", in place" : "",
             c->overwrite ? ", overwritten" : "", c->branches ? ", with sums" : "");
}

/* What normalized values of a column are multiplied by. */
static double factor(const norm_case *c, const double *gamma, int64_t i)
{
    return c->factor == NONE ? 1 : c->factor == ONE_PLUS ? 1 + gamma[i] : gamma[i];
}

static double rounded(double x, qd_dtype dtype)
{
    return dtype == QD_BF16 ? (double)qd_bf16_to_f32(qd_f32_to_bf16((float)x)) : x;
}

static void statistics(const norm_case *c, const double *x, double *mean, double *rstd)
{
    double n = (double)c->cols, m = 0, square = 0;
    for (int64_t i = 0; i < c->cols && !c->rms; i++)
        m += x[i] / n;
    for (int64_t i = 0; i < c->cols; i++)
        square += (x[i] - m) * (x[i] - m) / n;
    *mean = m;
    *rstd = 1 / sqrt(square + EPS);
}

enum { F_X, F_ADD, F_GAMMA, F_BETA, F_SUM, F_Y, F_MEAN, F_RSTD, F_COUNT };

static int forward_tensors(const void *p, ops_tensor *t)
{
    const norm_case *c = p;
    t[F_X] = (ops_tensor){
        .name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols, .offset = 0.5};
    t[F_ADD] = t[F_X];
    t[F_ADD].name = "add";
    t[F_ADD].role = c->add ? OPS_IN : OPS_ABSENT;
    t[F_GAMMA] = (ops_tensor){.name = "gamma", .role = c->factor == NONE ? OPS_ABSENT : OPS_IN, .dtype = c->param_dtype,
                            .cols = c->cols, .offset = 1};
    t[F_BETA] = (ops_tensor){
        .name = "beta", .role = c->beta ? OPS_IN : OPS_ABSENT, .dtype = c->param_dtype, .cols = c->cols};
    t[F_SUM] = t[F_X];
    t[F_SUM].name = "sum";
    t[F_SUM].role = c->add ? OPS_OUT : OPS_ABSENT;
    t[F_Y] = t[F_X];
    t[F_Y].name = "y";
    t[F_Y].role = OPS_OUT;
    t[F_MEAN] = (ops_tensor){.name = "mean", .role = c->rms ? OPS_ABSENT : OPS_OUT, .dtype = QD_F32, .cols = c->rows};
    t[F_RSTD] = (ops_tensor){.name = "rstd", .role = OPS_OUT, .dtype = QD_F32, .cols = c->rows};
    return F_COUNT;
}

static void forward_reference(const void *p, double *const *v)
{
    const norm_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        double *x = v[F_X] + r * c->cols, mean;
        if (c->add) {
            double *sum = v[F_SUM] + r * c->cols;
            for (int64_t i = 0; i < c->cols; i++)
                sum[i] = rounded(x[i] + v[F_ADD][r * c->cols + i], c->dtype);
            x = sum;
        }
        statistics(c, x, &mean, &v[F_RSTD][r]);
        if (!c->rms)
            v[F_MEAN][r] = mean;
        for (int64_t i = 0; i < c->cols; i++)
            v[F_Y][r * c->cols + i] =
                (x[i] - mean) * v[F_RSTD][r] * factor(c, v[F_GAMMA], i) + (c->beta ? v[F_BETA][i] : 0);
    }
}

static qd_status forward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const norm_case *c = p;
    return k->norm_forward(stream, &(qd_norm_forward_args){.x = t[F_X],
                                                           .add = t[F_ADD],
                                                           .gamma = t[F_GAMMA],
                                                           .beta = t[F_BETA],
                                                           .sum = t[F_SUM],
                                                           .y = t[F_Y],
                                                           .mean = t[F_MEAN],
                                                           .rstd = t[F_RSTD],
                                                           .rows = c->rows,
                                                           .cols = c->cols,
                                                           .eps = (float)EPS,
                                                           .rms = c->rms,
                                                           .plus_one = c->factor == ONE_PLUS,
                                                           .dtype = c->dtype,
                                                           .param_dtype = c->param_dtype});
}

static double forward_bytes(const void *p)
{
    const norm_case *c = p;
    return (double)(c->rows * c->cols) * (double)qd_dtype_size(c->dtype) * (c->add ? 4 : 2);
}

/* beta is not an argument of the kernel; the loss depends on it, so that dbeta can be checked. */
enum { B_DY, B_X, B_GAMMA, B_ADD, B_MEAN, B_RSTD, B_DX, B_DGAMMA, B_DBETA, B_ADD_GRAD, B_DX_GRAD, B_BETA, B_COUNT };

static int backward_tensors(const void *p, ops_tensor *t)
{
    const norm_case *c = p;
    t[B_DY] = (ops_tensor){.name = "dy", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[B_X] = t[B_DY];
    t[B_X].name = "x";
    t[B_X].offset = c->cols == 1 ? 4 : 0.5; /* one column: x near 0 would make rstd arbitrarily large */
    t[B_GAMMA] = (ops_tensor){.name = "gamma", .role = c->factor == NONE ? OPS_ABSENT : OPS_IN, .dtype = c->param_dtype,
                            .cols = c->cols, .offset = 1};
    t[B_ADD] = t[B_DY];
    t[B_ADD].name = "add";
    t[B_ADD].role = c->add ? OPS_IN : OPS_ABSENT;
    t[B_MEAN] = (ops_tensor){.name = "mean", .role = c->rms ? OPS_ABSENT : OPS_IN, .dtype = QD_F32, .cols = c->rows};
    t[B_RSTD] = (ops_tensor){.name = "rstd", .role = OPS_IN, .dtype = QD_F32, .cols = c->rows};
    t[B_DX] = t[B_DY];
    t[B_DX].name = "dx";
    t[B_DX].role = OPS_OUT;
    t[B_DX].shares = c->in_place ? 1 + B_ADD : 0;
    t[B_DX].floor = c->cols == 1 ? 1 / sqrt(EPS) : 0; /* zero except for eps, from differences scaled by rstd */
    t[B_DGAMMA] = (ops_tensor){.name = "dgamma", .role = c->overwrite ? OPS_OUT : OPS_INOUT, .dtype = c->grad_dtype, .cols = c->cols};
    ops_role sums = t[B_DGAMMA].role;
    t[B_DBETA] = t[B_DGAMMA];
    t[B_DBETA].name = "dbeta";
    t[B_DBETA].role = c->beta ? sums : OPS_ABSENT;
    t[B_ADD_GRAD] = t[B_DX_GRAD] = t[B_DGAMMA];
    t[B_ADD_GRAD].name = "add_grad";
    t[B_ADD_GRAD].role = c->branches && c->add ? sums : OPS_ABSENT;
    t[B_DX_GRAD].name = "dx_grad";
    t[B_DX_GRAD].role = c->branches ? sums : OPS_ABSENT;
    t[B_DGAMMA].role = c->factor == NONE ? OPS_ABSENT : sums;
    t[B_BETA] = t[B_GAMMA];
    t[B_BETA].name = "beta";
    t[B_BETA].role = OPS_IN;
    return B_COUNT;
}

static void backward_derive(const void *p, double *const *v)
{
    const norm_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        double mean;
        statistics(c, v[B_X] + r * c->cols, &mean, &v[B_RSTD][r]);
        if (!c->rms)
            v[B_MEAN][r] = mean;
    }
}

static double backward_loss(const void *p, double *const *v)
{
    const norm_case *c = p;
    double loss = 0;
    for (int64_t r = 0; r < c->rows; r++) {
        const double *x = v[B_X] + r * c->cols, *dy = v[B_DY] + r * c->cols;
        double mean, rstd;
        statistics(c, x, &mean, &rstd);
        for (int64_t i = 0; i < c->cols; i++) {
            loss += dy[i] * ((x[i] - mean) * rstd * factor(c, v[B_GAMMA], i) + v[B_BETA][i]);
            loss += c->add ? v[B_ADD][r * c->cols + i] * x[i] : 0;
        }
    }
    return loss;
}

static void backward_reference(const void *p, double *const *v)
{
    const norm_case *c = p;
    for (int64_t i = 0; c->overwrite && i < c->cols; i++) {
        if (c->factor != NONE)
            v[B_DGAMMA][i] = 0;
        if (c->beta)
            v[B_DBETA][i] = 0;
        if (c->branches && c->add)
            v[B_ADD_GRAD][i] = 0;
        if (c->branches)
            v[B_DX_GRAD][i] = 0;
    }
    for (int64_t r = 0; r < c->rows; r++) {
        const double *x = v[B_X] + r * c->cols, *dy = v[B_DY] + r * c->cols;
        double mean, rstd, mean_g = 0, mean_gx = 0, n = (double)c->cols;
        statistics(c, x, &mean, &rstd);
        for (int64_t i = 0; i < c->cols; i++) {
            double hat = (x[i] - mean) * rstd;
            mean_g += c->rms ? 0 : dy[i] * factor(c, v[B_GAMMA], i) / n;
            mean_gx += dy[i] * factor(c, v[B_GAMMA], i) * hat / n;
            if (c->factor != NONE)
                v[B_DGAMMA][i] += dy[i] * hat;
            if (c->beta)
                v[B_DBETA][i] += dy[i];
        }
        for (int64_t i = 0; i < c->cols; i++) {
            const double add = c->add ? v[B_ADD][r * c->cols + i] : 0;
            const double dx = rstd * (dy[i] * factor(c, v[B_GAMMA], i) - mean_g - (x[i] - mean) * rstd * mean_gx) + add;
            v[B_DX][r * c->cols + i] = dx;
            if (c->branches && c->add)
                v[B_ADD_GRAD][i] += add;
            if (c->branches)
                v[B_DX_GRAD][i] += dx;
        }
    }
}

static qd_status backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const norm_case *c = p;
    return k->norm_backward(stream, &(qd_norm_backward_args){.dy = t[B_DY],
                                                             .x = t[B_X],
                                                             .gamma = t[B_GAMMA],
                                                             .add = t[B_ADD],
                                                             .mean = t[B_MEAN],
                                                             .rstd = t[B_RSTD],
                                                             .dx = t[B_DX],
                                                             .dgamma = t[B_DGAMMA],
                                                             .dbeta = t[B_DBETA],
                                                             .add_grad = t[B_ADD_GRAD],
                                                             .dx_grad = t[B_DX_GRAD],
                                                             .rows = c->rows,
                                                             .cols = c->cols,
                                                             .rms = c->rms,
                                                             .plus_one = c->factor == ONE_PLUS,
                                                             .accumulate = !c->overwrite,
                                                             .dtype = c->dtype,
                                                             .param_dtype = c->param_dtype,
                                                             .grad_dtype = c->grad_dtype});
}

static double backward_bytes(const void *p)
{
    const norm_case *c = p;
    return (double)(c->rows * c->cols) * (double)qd_dtype_size(c->dtype) * (c->add ? 4 : 3);
}

/* Only dx is requested: both parameter gradients are NULL. A NaN in one row stays in that row. */
static void input_only_and_nan(void **state)
{
    (void)state;
    enum { ROWS = 3, COLS = 50 };
    float x[ROWS * COLS], dy[ROWS * COLS], dx[ROWS * COLS], gamma[COLS], mean[ROWS], rstd[ROWS], y[ROWS * COLS];
    for (int i = 0; i < ROWS * COLS; i++) {
        x[i] = (float)ops_normal();
        dy[i] = (float)ops_normal();
        gamma[i % COLS] = 1;
    }
    x[COLS + 49] = NAN;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    ops_assert_ok(k->norm_forward(stream, &(qd_norm_forward_args){.x = x, .gamma = gamma, .y = y, .mean = mean,
                                                                  .rstd = rstd, .rows = ROWS, .cols = COLS,
                                                                  .eps = 1e-5f, .dtype = QD_F32,
                                                                  .param_dtype = QD_F32}));
    ops_assert_ok(k->norm_backward(stream, &(qd_norm_backward_args){.dy = dy, .x = x, .gamma = gamma, .mean = mean,
                                                                    .rstd = rstd, .dx = dx, .rows = ROWS,
                                                                    .cols = COLS, .dtype = QD_F32,
                                                                    .param_dtype = QD_F32}));
    for (int i = 0; i < ROWS * COLS; i++) {
        assert_int_equal(!!isnan(y[i]), i / COLS == 1);
        assert_int_equal(!!isnan(dx[i]), i / COLS == 1);
    }
}

/* No rows: nothing is read, and gradients are unchanged, or become 0. */
static void no_rows(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 2);
    float gamma[3] = {1, 1, 1}, grad[3] = {1, 2, 3};
    qd_norm_backward_args a = {.gamma = gamma, .dgamma = grad, .cols = 3, .accumulate = true, .dtype = QD_F32, .param_dtype = QD_F32,
                               .grad_dtype = QD_F32};
    ops_assert_ok(qd_device_kernels(device)->norm_backward(qd_device_compute_stream(device), &a));
    assert_true(grad[0] == 1 && grad[1] == 2 && grad[2] == 3);
    a.accumulate = false;
    ops_assert_ok(qd_device_kernels(device)->norm_backward(qd_device_compute_stream(device), &a));
    assert_true(grad[0] == 0 && grad[1] == 0 && grad[2] == 0);
}

static void wrong_type_is_refused(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    qd_norm_forward_args a = {.dtype = QD_F16, .param_dtype = QD_F32};
    ops_assert_fails(qd_device_kernels(device)->norm_forward(qd_device_compute_stream(device), &a), QD_UNSUPPORTED,
                     "fp16");
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "norm_forward", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = forward_tensors,
         .reference = forward_reference, .run = forward_run, .bytes = forward_bytes},
        {.kernel = "norm_backward", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = backward_tensors,
         .derive = backward_derive, .reference = backward_reference, .run = backward_run, .loss = backward_loss,
         .gradients = {{B_X, B_DX}, {B_GAMMA, B_DGAMMA}, {B_BETA, B_DBETA}}, .gradient_count = 3,
         .bytes = backward_bytes},
        {.kernel = "norm_forward", .cases = wide, .case_size = sizeof *wide, .case_count = COUNT(wide), .describe = describe,
         .tensors = forward_tensors, .reference = forward_reference, .run = forward_run},
        {.kernel = "norm_backward", .cases = wide, .case_size = sizeof *wide, .case_count = COUNT(wide), .describe = describe,
         .tensors = backward_tensors, .derive = backward_derive, .reference = backward_reference, .run = backward_run},
        {.kernel = "norm_forward", .cases = factors, .case_size = sizeof *factors, .case_count = COUNT(factors), .describe = describe,
         .tensors = forward_tensors, .reference = forward_reference, .run = forward_run},
        {.kernel = "norm_backward", .cases = factors, .case_size = sizeof *factors, .case_count = COUNT(factors), .describe = describe,
         .tensors = backward_tensors, .derive = backward_derive, .reference = backward_reference, .run = backward_run,
         .loss = backward_loss, .gradients = {{B_X, B_DX}, {B_GAMMA, B_DGAMMA}}, .gradient_count = 2},
        {.kernel = "norm_forward", .cases = wide_factors, .case_size = sizeof *wide_factors, .case_count = COUNT(wide_factors),
         .describe = describe, .tensors = forward_tensors, .reference = forward_reference, .run = forward_run},
        {.kernel = "norm_backward", .cases = wide_factors, .case_size = sizeof *wide_factors, .case_count = COUNT(wide_factors),
         .describe = describe, .tensors = backward_tensors, .derive = backward_derive, .reference = backward_reference,
         .run = backward_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(input_only_and_nan), cmocka_unit_test(no_rows),
                                      cmocka_unit_test(wrong_type_is_refused)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
