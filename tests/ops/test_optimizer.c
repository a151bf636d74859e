/* AdamW and SGD over several steps. ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* n elements in ranges with gaps, which stay as they are. half: bf16 parameters beside fp32 masters. */
typedef struct update_case {
    int64_t n;
    int steps;
    bool half, momentum;
} update_case;

static const update_case cases[] = {
    {1, 3, false, true},     {7, 3, false, true},     {1000, 10, false, true}, {40961, 5, false, true},
    {40961, 5, false, false}, {4097, 10, true, true}, {40961, 3, true, false},
};
static const update_case speed[] = {
    {(int64_t)1 << 24, 1, false, true},
    {(int64_t)1 << 24, 1, true, true},
};

enum { MOST_RANGES = 4 };

/* Ranges of uneven size: from the start, with a gap of up to 3 after each; the second is shorter than a vector. */
static int make_ranges(int64_t n, qd_param_range *ranges)
{
    int64_t sizes[] = {n / 3, 5, n / 2, n}, at = 0;
    int count = 0;
    for (int i = 0; i < MOST_RANGES; i++) {
        int64_t size = sizes[i] < n - at ? sizes[i] : n - at;
        ranges[count++] = (qd_param_range){.offset = at, .count = size > 0 ? size : 0, .decay = i % 2 == 0};
        at += size + 3 < n - at ? size + 3 : n - at;
    }
    return count;
}

static const double betas[2] = {0.9, 0.999}, eps = 1e-8, decay = 0.1, inertia = 0.9;

/* Rates and scales differ from step to step; the scale's sign makes moments cancel. */
static double rate_of(int step)
{
    return 1e-2 / step;
}

static double scale_of(int step)
{
    return step % 3 == 2 ? -0.7 : 1.0 / step;
}

enum { PARAM, GRAD, MASTER, M, V, SCALES, TENSORS };

static void describe(const void *p, char *text, size_t size)
{
    const update_case *c = p;
    snprintf(text, size, "%lld elements, %d steps%s%s", (long long)c->n, c->steps, c->half ? ", bf16" : "",
             c->momentum ? "" : ", no momentum");
}

static int adamw_tensors(const void *p, ops_tensor *t)
{
    const update_case *c = p;
    t[PARAM] = (ops_tensor){.name = "param", .role = c->half ? OPS_INOUT : OPS_ABSENT, .dtype = QD_BF16, .cols = c->n};
    t[GRAD] = (ops_tensor){.name = "grad", .role = OPS_IN, .dtype = c->half ? QD_BF16 : QD_F32, .cols = c->n,
                           .scale = 0.1};
    t[MASTER] = (ops_tensor){.name = "master", .role = OPS_INOUT, .dtype = QD_F32, .cols = c->n};
    t[M] = t[MASTER];
    t[M].name = "m";
    t[M].scale = 1e-3;
    t[V] = t[M];
    t[V].name = "v";
    t[SCALES] = (ops_tensor){.name = "scales", .role = OPS_IN, .dtype = QD_F64, .cols = c->steps};
    return TENSORS;
}

static int sgd_tensors(const void *p, ops_tensor *t)
{
    const update_case *c = p;
    adamw_tensors(p, t);
    t[M].role = c->momentum ? OPS_INOUT : OPS_ABSENT;
    t[V].role = OPS_ABSENT;
    return TENSORS;
}

static void sgd_derive(const void *p, double *const *v)
{
    const update_case *c = p;
    for (int step = 1; step <= c->steps; step++)
        v[SCALES][step - 1] = scale_of(step);
}

static void adamw_derive(const void *p, double *const *v)
{
    const update_case *c = p;
    sgd_derive(p, v);
    for (int64_t i = 0; i < c->n; i++)
        v[V][i] = i % 7 == 3 ? 0 : fabs(v[V][i]);
}

static void finish(const update_case *c, double *const *v, int64_t i)
{
    if (c->half)
        v[PARAM][i] = v[MASTER][i];
}

static void adamw_reference(const void *p, double *const *v)
{
    const update_case *c = p;
    qd_param_range ranges[MOST_RANGES];
    int count = make_ranges(c->n, ranges);
    for (int r = 0; r < count; r++)
        for (int64_t i = ranges[r].offset; i < ranges[r].offset + ranges[r].count; i++) {
            for (int step = 1; step <= c->steps; step++) {
                double g = v[GRAD][i] * scale_of(step), *m = &v[M][i], *s = &v[V][i], *x = &v[MASTER][i];
                *m = betas[0] * *m + (1 - betas[0]) * g;
                *s = betas[1] * *s + (1 - betas[1]) * g * g;
                double mean = *m / (1 - pow(betas[0], step)), square = *s / (1 - pow(betas[1], step));
                *x -= rate_of(step) * (mean / (sqrt(square) + eps) + (ranges[r].decay ? decay * *x : 0));
            }
            finish(c, v, i);
        }
}

static void sgd_reference(const void *p, double *const *v)
{
    const update_case *c = p;
    qd_param_range ranges[MOST_RANGES];
    int count = make_ranges(c->n, ranges);
    for (int r = 0; r < count; r++)
        for (int64_t i = ranges[r].offset; i < ranges[r].offset + ranges[r].count; i++) {
            for (int step = 1; step <= c->steps; step++) {
                double d = v[GRAD][i] * scale_of(step), *x = &v[MASTER][i];
                if (c->momentum)
                    d = v[M][i] = inertia * v[M][i] + d;
                *x -= rate_of(step) * (d + (ranges[r].decay ? decay * *x : 0));
            }
            finish(c, v, i);
        }
}

static qd_adamw_args adamw_arguments(bool half, void *const *t, const qd_param_range *ranges, int count, int step)
{
    return (qd_adamw_args){.param = half ? t[PARAM] : t[MASTER], .grad = t[GRAD], .master = t[MASTER], .m = t[M],
                           .v = t[V], .ranges = ranges, .range_count = count, .lr = rate_of(step), .beta1 = betas[0],
                           .beta2 = betas[1], .eps = eps, .weight_decay = decay,
                           .bias_correction1 = 1 - pow(betas[0], step), .bias_correction2 = 1 - pow(betas[1], step),
                           .grad_scale = (const double *)t[SCALES] + step - 1, .param_dtype = half ? QD_BF16 : QD_F32,
                           .grad_dtype = half ? QD_BF16 : QD_F32};
}

static qd_status adamw_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const update_case *c = p;
    qd_param_range ranges[MOST_RANGES];
    int count = make_ranges(c->n, ranges);
    for (int step = 1; step <= c->steps; step++) {
        qd_adamw_args a = adamw_arguments(c->half, t, ranges, count, step);
        QD_TRY(k->adamw(stream, &a));
    }
    return QD_OK;
}

static qd_status sgd_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const update_case *c = p;
    qd_param_range ranges[MOST_RANGES];
    int count = make_ranges(c->n, ranges);
    for (int step = 1; step <= c->steps; step++)
        QD_TRY(k->sgd(stream,
                      &(qd_sgd_args){.param = c->half ? t[PARAM] : t[MASTER], .grad = t[GRAD], .master = t[MASTER],
                                     .m = t[M], .ranges = ranges, .range_count = count, .lr = rate_of(step),
                                     .momentum = c->momentum ? inertia : 0, .weight_decay = decay,
                                     .grad_scale = (const double *)t[SCALES] + step - 1,
                                     .param_dtype = c->half ? QD_BF16 : QD_F32,
                                     .grad_dtype = c->half ? QD_BF16 : QD_F32}));
    return QD_OK;
}

/* Gradient, and parameter where it is not the master, once; master and `states` states read and written. */
static double traffic(const update_case *c, int states)
{
    double narrow = c->half ? 2 : 4;
    return (double)c->n * (narrow + (c->half ? narrow : 0) + 8 * (1 + states));
}

static double adamw_bytes(const void *c)
{
    return traffic(c, 2);
}

static double sgd_bytes(const void *c)
{
    return traffic(c, 1);
}

/* The bf16 parameter is the master rounded to nearest even, exactly; a gradient that is not finite reaches its own
 * parameter and no other; elements outside the ranges keep their bits. */
static void exact_rounding_and_not_finite(void **state)
{
    (void)state;
    enum { N = 300, BAD = 77, END = 290 };
    float master[N], m[N] = {0}, v[N] = {0}, before[N];
    uint16_t param[N], grad[N];
    for (int i = 0; i < N; i++) {
        before[i] = master[i] = (float)ops_normal();
        grad[i] = qd_f32_to_bf16((float)ops_normal());
        param[i] = 0x1234;
    }
    grad[BAD] = qd_f32_to_bf16(NAN);
    grad[BAD + 1] = qd_f32_to_bf16(INFINITY);
    qd_device *device = ops_device(NULL, 2);
    qd_param_range range = {.offset = 1, .count = END - 1};
    double scales[] = {scale_of(1), NAN};
    void *t[TENSORS] = {param, grad, master, m, v, scales};
    qd_adamw_args a = adamw_arguments(true, t, &range, 1, 1);
    ops_assert_ok(qd_device_kernels(device)->adamw(qd_device_compute_stream(device), &a));
    for (int i = 0; i < N; i++) {
        if (i < 1 || i >= END) {
            assert_true(master[i] == before[i] && param[i] == 0x1234);
        } else if (i == BAD || i == BAD + 1) {
            assert_true(!isfinite(master[i]) && !isfinite(qd_bf16_to_f32(param[i])));
        } else {
            assert_true(isfinite(master[i]) && master[i] != before[i]);
            assert_int_equal(param[i], qd_f32_to_bf16(master[i]));
        }
    }
    float after[N];
    memcpy(after, master, sizeof after);
    a = adamw_arguments(true, t, &range, 1, 2); /* of a scale that is not finite nothing is done */
    ops_assert_ok(qd_device_kernels(device)->adamw(qd_device_compute_stream(device), &a));
    assert_memory_equal(master, after, sizeof after);
}

/* A chunk of masters far into the parameters, whose element 0 would lie where that of the parameters does: two buffers all the same. */
static void equal_addresses_are_two_buffers(void **state)
{
    (void)state;
    enum { FIRST = 64, N = 21 };
    float *memory = calloc(FIRST + N, sizeof *memory), m[FIRST + N] = {0}, v[FIRST + N] = {0};
    uint16_t grad[FIRST + N], *param = (void *)memory; /* parameters from byte 2 * FIRST on, masters from byte 4 * FIRST on */
    assert_non_null(memory);
    for (int i = FIRST; i < FIRST + N; i++) {
        memory[i] = (float)i;
        grad[i] = qd_f32_to_bf16(1.0f);
    }
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_param_range range = {.offset = FIRST, .count = N};
    double scale = 1;
    void *t[TENSORS] = {memory, grad, memory, m, v, &scale};
    qd_adamw_args a = adamw_arguments(true, t, &range, 1, 1);
    qd_sgd_args s = {.param = memory, .grad = grad, .master = memory, .ranges = &range, .range_count = 1, .lr = 0.5, .grad_scale = &scale, .param_dtype = QD_BF16,
                     .grad_dtype = QD_BF16};
    for (int sgd = 0; sgd < 2; sgd++) {
        memset(param + FIRST, 0, N * sizeof *param);
        ops_assert_ok(sgd ? k->sgd(qd_device_compute_stream(device), &s) : k->adamw(qd_device_compute_stream(device), &a));
        for (int i = FIRST; i < FIRST + N; i++) {
            assert_true(memory[i] < (float)i);
            assert_int_equal(param[i], qd_f32_to_bf16(memory[i]));
        }
    }
    free(memory);
}

static void bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_sgd_args s = {.momentum = 0.9};
    ops_assert_fails(k->sgd(qd_device_compute_stream(device), &s), QD_USAGE, "momentum");
    qd_adamw_args a = {.bias_correction1 = 0};
    ops_assert_fails(k->adamw(qd_device_compute_stream(device), &a), QD_USAGE, "bias corrections");
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "adamw", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = adamw_tensors,
         .derive = adamw_derive, .reference = adamw_reference, .run = adamw_run, .bytes = adamw_bytes},
        {.kernel = "sgd", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = sgd_tensors,
         .derive = sgd_derive, .reference = sgd_reference, .run = sgd_run, .bytes = sgd_bytes},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(exact_rounding_and_not_finite), cmocka_unit_test(equal_addresses_are_two_buffers),
                                      cmocka_unit_test(bad_arguments)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
