/* GELU, SwiGLU and GELU as a gate, forward and backward, against double precision.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct act_case {
    qd_activation kind;
    int64_t rows, cols;
    enum { APART, OVER_X, OVER_DY } place; /* where dx is written */
    qd_dtype dtype;
} act_case;

#define KIND_CASES(kind)                                                                                    \
    {kind, 1, 1, APART, QD_F32}, {kind, 5, 7, APART, QD_F32}, {kind, 37, 1000, OVER_X, QD_F32},             \
        {kind, 3, 4097, APART, QD_F32}, {kind, 5, 7, OVER_X, QD_BF16}, {kind, 19, 1000, APART, QD_BF16},    \
        {kind, 3, 4097, APART, QD_BF16}

static const act_case cases[] = {
    KIND_CASES(QD_ACT_GELU_TANH),
    KIND_CASES(QD_ACT_GELU),
    KIND_CASES(QD_ACT_SWIGLU),
    KIND_CASES(QD_ACT_GEGLU_TANH),
    KIND_CASES(QD_ACT_GEGLU),
    KIND_CASES(QD_ACT_SWIGLU_CLAMPED),
    {QD_ACT_GELU_TANH, 21, 1001, OVER_DY, QD_F32},
    {QD_ACT_GELU, 21, 1001, OVER_DY, QD_BF16},
};

static const act_case speed[] = {
    {QD_ACT_GELU_TANH, 4096, 3072, APART, QD_F32},
    {QD_ACT_GELU, 4096, 3072, APART, QD_F32},
    {QD_ACT_SWIGLU, 4096, 3072, APART, QD_F32},
    {QD_ACT_GELU_TANH, 4096, 3072, APART, QD_BF16},
    {QD_ACT_SWIGLU, 4096, 3072, APART, QD_BF16},
    {QD_ACT_GEGLU_TANH, 4096, 3072, APART, QD_BF16},
    {QD_ACT_SWIGLU_CLAMPED, 4096, 3072, APART, QD_BF16},
};

static const char *kind_name(qd_activation kind)
{
    switch (kind) {
    case QD_ACT_GELU_TANH: return "gelu_tanh";
    case QD_ACT_GELU: return "gelu";
    case QD_ACT_GEGLU_TANH: return "geglu_tanh";
    case QD_ACT_GEGLU: return "geglu";
    case QD_ACT_SWIGLU_CLAMPED: return "swiglu_clamped";
    default: return "swiglu";
    }
}

static void describe(const void *p, char *text, size_t size)
{
    const act_case *c = p;
    snprintf(text, size, "%s %lldx%lld %s%s", kind_name(c->kind), (long long)c->rows, (long long)c->cols,
             qd_dtype_name(c->dtype), c->place == OVER_X ? ", dx over x" : c->place == OVER_DY ? ", dx over dy" : "");
}

static double logistic(double x)
{
    return 1 / (1 + exp(-x));
}

/* Of the clamped SwiGLU. */
#define ALPHA 1.702
#define LIMIT 2.508 /* not a bf16 number: no input is at the kink */

/* The other factor, and its derivative. */
static double factor(qd_activation kind, double up, double *slope)
{
    bool limited = kind == QD_ACT_SWIGLU_CLAMPED;
    *slope = limited && fabs(up) > LIMIT ? 0 : 1;
    return limited ? fmin(fmax(up, -LIMIT), LIMIT) + 1 : up;
}

/* The function and its derivative. */
static double value(qd_activation kind, double x, double *slope)
{
    double b = sqrt(2 / M_PI), k = 0.044715, f, d;
    if (kind == QD_ACT_GELU_TANH || kind == QD_ACT_GEGLU_TANH) {
        double u = b * (x + k * x * x * x);
        f = logistic(2 * u);
        d = f + x * 2 * b * (1 + 3 * k * x * x) * f * logistic(-2 * u);
    } else if (kind == QD_ACT_GELU || kind == QD_ACT_GEGLU) {
        f = 0.5 * erfc(-x * M_SQRT1_2);
        d = f + x * exp(-0.5 * x * x) / sqrt(2 * M_PI);
    } else if (kind == QD_ACT_SWIGLU_CLAMPED) {
        double gate = fmin(x, LIMIT);
        f = logistic(ALPHA * gate);
        *slope = x > LIMIT ? 0 : f + ALPHA * gate * f * logistic(-ALPHA * gate);
        return gate * f;
    } else {
        f = logistic(x);
        d = f + x * f * logistic(-x);
    }
    *slope = d;
    return x * f;
}

enum { X, DY, Y, DX, TENSORS };

static int64_t x_cols(const act_case *c)
{
    return qd_activation_is_gated(c->kind) ? 2 * c->cols : c->cols;
}

static int tensors(const act_case *c, ops_tensor *t, bool backward)
{
    t[X] = (ops_tensor){
        .name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = x_cols(c), .scale = 2};
    t[DY] = (ops_tensor){.name = "dy", .role = OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[Y] = t[DY];
    t[Y].name = "y";
    t[DX] = t[X];
    t[DX].name = "dx";
    t[DX].role = OPS_ABSENT;
    if (backward) {
        t[DY].role = OPS_IN;
        t[DX].role = OPS_OUT;
        t[DX].shares = c->place == OVER_X ? 1 + X : c->place == OVER_DY ? 1 + DY : 0;
    } else {
        t[Y].role = OPS_OUT;
    }
    return TENSORS;
}

static int forward_tensors(const void *c, ops_tensor *t)
{
    return tensors(c, t, false);
}

static int backward_tensors(const void *c, ops_tensor *t)
{
    return tensors(c, t, true);
}

/* Both ends of the range among other values. */
static void derive(const void *p, double *const *v)
{
    static const double ends[] = {0, -0.0, 30, -30, 12, -12, 1e4, -1e4, 1e-20, -1e-20};
    const act_case *c = p;
    for (int64_t i = 0; i < COUNT(ends) && i < c->rows * x_cols(c); i++)
        v[X][i * 37 % (c->rows * x_cols(c))] = ends[i];
}

static double output(const act_case *c, double *const *v, int64_t r, int64_t i)
{
    double unused, f = value(c->kind, v[X][r * x_cols(c) + i], &unused);
    return qd_activation_is_gated(c->kind) ? f * factor(c->kind, v[X][r * x_cols(c) + c->cols + i], &unused) : f;
}

static void forward_reference(const void *p, double *const *v)
{
    const act_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < c->cols; i++)
            v[Y][r * c->cols + i] = output(c, v, r, i);
}

static double loss(const void *p, double *const *v)
{
    const act_case *c = p;
    double sum = 0;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < c->cols; i++)
            sum += v[DY][r * c->cols + i] * output(c, v, r, i);
    return sum;
}

static void backward_reference(const void *p, double *const *v)
{
    const act_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < c->cols; i++) {
            int64_t at = r * x_cols(c) + i;
            double slope, dy = v[DY][r * c->cols + i], f = value(c->kind, v[X][at], &slope);
            v[DX][at] = dy * slope;
            if (qd_activation_is_gated(c->kind)) {
                double up = v[X][at + c->cols];
                v[DX][at] *= factor(c->kind, up, &slope);
                v[DX][at + c->cols] = dy * f * slope;
            }
        }
}

static qd_activation_args arguments(const act_case *c, void *const *t)
{
    return (qd_activation_args){.kind = c->kind, .x = t[X], .dy = t[DY], .y = t[Y], .dx = t[DX], .rows = c->rows,
                                .cols = c->cols, .alpha = (float)ALPHA, .limit = (float)LIMIT, .dtype = c->dtype};
}

static qd_status forward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_activation_args a = arguments(c, t);
    return k->activation_forward(stream, &a);
}

static qd_status backward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_activation_args a = arguments(c, t);
    return k->activation_backward(stream, &a);
}

static double forward_bytes(const void *p)
{
    const act_case *c = p;
    return (double)(c->rows * (x_cols(c) + c->cols)) * (double)qd_dtype_size(c->dtype);
}

static double backward_bytes(const void *p)
{
    const act_case *c = p;
    return (double)(c->rows * (2 * x_cols(c) + c->cols)) * (double)qd_dtype_size(c->dtype);
}

/* Element by element: the errors that vec_math.h states, on each instruction set; inputs that are
 * not finite. */
static void each_element(void **state)
{
    (void)state;
    enum { N = 200001 };
    static float x[N], up[2 * N], y[N], dy[N], dx[2 * N];
    for (int i = 0; i < N; i++) {
        x[i] = (float)(-20 + 40.0 * i / (N - 1));
        dy[i] = 1;
    }
    for (int s = 0; s < OPS_CPU_ISAS; s++) {
        qd_device *device = ops_cpu(ops_cpu_isas[s]);
        if (!device)
            continue;
        const qd_kernels *k = qd_device_kernels(device);
        qd_stream *stream = qd_device_compute_stream(device);
        for (int kind = QD_ACT_GELU_TANH; kind <= QD_ACT_SWIGLU; kind++) {
            bool gated = kind == QD_ACT_SWIGLU;
            for (int i = 0; i < N; i++) {
                up[i] = x[i];
                up[N + i] = 1;
            }
            qd_activation_args a = {.kind = (qd_activation)kind, .x = gated ? up : x, .y = y, .dy = dy, .dx = dx,
                                    .rows = 1, .cols = N, .dtype = QD_F32};
            ops_assert_ok(k->activation_forward(stream, &a));
            ops_assert_ok(k->activation_backward(stream, &a));
            for (int i = 0; i < N; i++) {
                double slope, want = value((qd_activation)kind, x[i], &slope), square = (double)x[i] * x[i];
                /* the argument of the exponential is rounded: the relative error grows with its
                 * magnitude */
                double argument = kind == QD_ACT_GELU ? square / 2 : fabs(x[i]) * (gated ? 1 : 1.6 + 0.08 * square);
                double tol = 6e-7 + 1.5e-7 * argument;
                if (fabs(y[i] - want) > tol * fabs(want) + 1e-33 || fabs(dx[i] - slope) > 1.5e-6)
                    fail_msg("%s on %s at %.9g: %.9g and slope %.9g instead of %.9g and %.9g",
                             kind_name((qd_activation)kind), ops_cpu_isas[s], (double)x[i], (double)y[i], (double)dx[i],
                             want, slope);
            }
            static const float odd[] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f};
            float in[10] = {NAN, INFINITY, -INFINITY, 1e30f, -1e30f, 1, 1, 1, 1, 1}, out[5], grad[10];
            a = (qd_activation_args){.kind = (qd_activation)kind, .x = in, .y = out, .dy = dy, .dx = grad, .rows = 1,
                                     .cols = COUNT(odd), .dtype = QD_F32};
            ops_assert_ok(k->activation_forward(stream, &a));
            ops_assert_ok(k->activation_backward(stream, &a));
            assert_true(isnan(out[0]) && isnan(grad[0]));
            assert_false(isfinite(out[1]));
            assert_false(isfinite(out[2]) && isfinite(grad[2]));
            assert_true(out[3] == 1e30f && grad[3] == 1 && isfinite(out[4]) && isfinite(grad[4]));
        }
    }
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "activation_forward", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = forward_tensors,
         .derive = derive, .reference = forward_reference, .run = forward_run, .bytes = forward_bytes},
        {.kernel = "activation_backward", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = backward_tensors,
         .reference = backward_reference, .run = backward_run, .loss = loss, .gradients = {{X, DX}},
         .gradient_count = 1, .bytes = backward_bytes},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(each_element)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
