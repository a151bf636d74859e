/* AdamW and SGD over several steps, with fp32 parameters, fp32 masters and split masters.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"
#include "optim/optim.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* n elements in ranges with gaps, which stay unchanged. half: bf16 parameters with fp32 masters;
 * split: with the low 16 bits of the masters. */
typedef struct update_case {
    int64_t n;
    int steps;
    bool half, momentum, split;
} update_case;

static const update_case cases[] = {
    {1, 3, false, true, false},     {7, 3, false, true, false},     {1000, 10, false, true, false}, {40961, 5, false, true, false},
    {40961, 5, false, false, false}, {4097, 10, true, true, false}, {40961, 3, true, false, false},
};
static const update_case speed[] = {
    {(int64_t)1 << 24, 1, false, true, false},
    {(int64_t)1 << 24, 1, true, true, false},
    {(int64_t)1 << 24, 1, true, true, true},
};

enum { MOST_RANGES = 4 };

/* Ranges of uneven size: from the start, with a gap of up to 3 after each; the second is shorter
 * than a vector. */
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

enum { PARAM, GRAD, MASTER, M, V, SCALES, REST, TENSORS };

static void describe(const void *p, char *text, size_t size)
{
    const update_case *c = p;
    snprintf(text, size, "%lld elements, %d steps%s%s", (long long)c->n, c->steps, c->split ? ", bf16 and rest" : c->half ? ", bf16" : "",
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
    if (c->split)
        t[MASTER].role = OPS_ABSENT;
    /* any 16 bits */
    t[REST] = (ops_tensor){.name = "rest", .role = c->split ? OPS_INOUT : OPS_ABSENT, .dtype = QD_BF16, .cols = c->n};
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
                double decayed = ranges[r].decay ? decay * *x : 0;
                *x -= rate_of(step) * (mean / (sqrt(square) + eps) + decayed);
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
    return (qd_adamw_args){.param = half ? t[PARAM] : t[MASTER], .grad = t[GRAD], .master = t[MASTER], .rest = t[REST],
                           .m = t[M], .v = t[V], .ranges = ranges, .range_count = count, .lr = rate_of(step), .beta1 = betas[0],
                           .beta2 = betas[1], .eps = eps, .weight_decay = decay,
                           .bias_correction1 = 1 - pow(betas[0], step), .bias_correction2 = 1 - pow(betas[1], step),
                           .grad_scale = (const double *)t[SCALES] + step - 1, .param_dtype = half ? QD_BF16 : QD_F32,
                           .grad_dtype = half ? QD_BF16 : QD_F32};
}

static qd_sgd_args sgd_arguments(bool half, bool momentum, void *const *t, const qd_param_range *ranges, int count, int step)
{
    return (qd_sgd_args){.param = half ? t[PARAM] : t[MASTER],
                         .grad = t[GRAD],
                         .master = t[MASTER],
                         .rest = t[REST],
                         .m = t[M],
                         .ranges = ranges,
                         .range_count = count,
                         .lr = rate_of(step),
                         .momentum = momentum ? inertia : 0,
                         .weight_decay = decay,
                         .grad_scale = (const double *)t[SCALES] + step - 1,
                         .param_dtype = half ? QD_BF16 : QD_F32,
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
    for (int step = 1; step <= c->steps; step++) {
        qd_sgd_args a = sgd_arguments(c->half, c->momentum, t, ranges, count, step);
        QD_TRY(k->sgd(stream, &a));
    }
    return QD_OK;
}

/* Gradient, and parameter where it is not the master, once; master and `states` states read and
 * written. With split masters: parameter and rest. */
static double traffic(const update_case *c, int states)
{
    double narrow = c->half ? 2 : 4;
    return (double)c->n * (narrow + (c->split ? 0 : c->half ? narrow : 0) + 8 * (1 + states));
}

static double adamw_bytes(const void *c)
{
    return traffic(c, 2);
}

static double sgd_bytes(const void *c)
{
    return traffic(c, 1);
}

/* The bf16 parameter is the master rounded to nearest even, exactly; a gradient that is not finite
 * reaches its own parameter only; elements outside the ranges are unchanged. */
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
    void *t[TENSORS] = {param, grad, master, m, v, scales, NULL};
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
    a = adamw_arguments(true, t, &range, 1, 2); /* with a scale that is not finite nothing is changed */
    ops_assert_ok(qd_device_kernels(device)->adamw(qd_device_compute_stream(device), &a));
    assert_memory_equal(master, after, sizeof after);
}

static void move(qd_device *device, void *to, const void *from, size_t bytes)
{
    ops_assert_ok(qd_copy(qd_device_compute_stream(device), to, from, (int64_t)bytes));
    ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
}

/* Coefficients from the configuration: no digit of 1 - beta is lost on the way to the kernels. */

static void near(double got, double expected, const char *what, double beta, int64_t step)
{
    if (!(fabs(got - expected) <= 2e-6 * fabs(expected)))
        fail_msg("beta2 %.9g, step %lld: %s is %.9g, expected %.9g", beta, (long long)step, what, got, expected);
}

static void coefficients_on(qd_device *device, qd_optim_kind kind, double beta2)
{
    enum { N = 5, STEPS = 12 };
    static const float gradients[N] = {0.5f, -3.0f, 1e-3f, 40.0f, -1e-5f};
    const qd_optim o = {.kind = kind, .lr = 1e-3, .schedule = QD_LR_CONSTANT, .steps = STEPS, .beta1 = 0.9, .beta2 = beta2,
                        .eps = 1e-8, .weight_decay = 0.1, .momentum = 0.9};
    const qd_param_range range = {.count = N, .decay = true};
    const double one = 1;
    enum { P, G, FIRST, SECOND, SCALE, BUFFERS };
    float values[N] = {0}, m[N] = {0}, v[N] = {0};
    double x[N] = {0}, first[N] = {0}, second[N] = {0};
    const void *from[BUFFERS] = {values, gradients, m, v, &one};
    void *at[BUFFERS];
    for (int i = 0; i < BUFFERS; i++) {
        ops_assert_ok(qd_device_alloc(device, sizeof values, &at[i]));
        move(device, at[i], from[i], i == SCALE ? sizeof one : sizeof values);
    }
    const qd_optim_state state = {.param = at[P], .grad = at[G], .master = at[P], .moment1 = at[FIRST], .moment2 = at[SECOND],
                                  .param_dtype = QD_F32, .grad_dtype = QD_F32};
    for (int64_t step = 1; step <= STEPS; step++) {
        ops_assert_ok(qd_optim_update(&o, qd_device_kernels(device), qd_device_compute_stream(device), &state, &range, 1, step, at[SCALE]));
        move(device, values, at[P], sizeof values);
        move(device, m, at[FIRST], sizeof m);
        move(device, v, at[SECOND], sizeof v);
        for (int i = 0; i < N; i++) {
            double g = gradients[i];
            if (kind == QD_OPTIM_SGD) {
                first[i] = o.momentum * first[i] + g;
                x[i] -= o.lr * (first[i] + o.weight_decay * x[i]);
            } else {
                first[i] += (1 - o.beta1) * (g - first[i]);
                second[i] += (1 - beta2) * (g * g - second[i]);
                double mean = first[i] / (1 - pow(o.beta1, (double)step)), square = second[i] / (1 - pow(beta2, (double)step));
                x[i] -= o.lr * (mean / (sqrt(square) + o.eps) + o.weight_decay * x[i]);
                near(v[i], second[i], "the second moment", beta2, step);
            }
            near(m[i], first[i], "the first moment", beta2, step);
            near(values[i], x[i], "the parameter", beta2, step);
        }
    }
    for (int i = 0; i < BUFFERS; i++)
        qd_device_free(device, at[i], sizeof values);
}

static void coefficients_stay_double(void **state)
{
    (void)state;
    static const double betas2[] = {0.95, 0.999, 0.99999999};
    qd_device *devices[] = {ops_device(NULL, 1), ops_cuda()};
    for (int d = 0; d < COUNT(devices) && devices[d]; d++) {
        for (int i = 0; i < COUNT(betas2); i++)
            coefficients_on(devices[d], QD_OPTIM_ADAMW, betas2[i]);
        coefficients_on(devices[d], QD_OPTIM_SGD, 0.999);
    }
}

/* Split masters: the kernels give the results of whole masters, split. */

enum { PARTS_N = 1500, PARTS_STEPS = 5 };

/* Around ties, at both ends of the range, and NaN; then random values. */
static float crafted(int i)
{
    static const uint16_t upper[] = {0x3f80, 0x3f81, 0xbf80, 0xbf81, 0x0000, 0x8000, 0x0001, 0x8001, 0x007f,
                                     0x0080, 0x7f7f, 0xff7f, 0x7f7e, 0x7f80, 0xff80, 0x7fc0, 0x3380};
    static const uint16_t lower[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    if (i >= COUNT(upper) * COUNT(lower))
        return (float)(ops_normal() * pow(10, 4 * ops_uniform() - 3));
    return qd_f32_from_bits((uint32_t)upper[i / COUNT(lower)] << 16 | lower[i % COUNT(lower)]);
}

static void step_with(qd_device *device, bool adam, void *const *t, int step)
{
    const qd_param_range ranges[] = {
        {.offset = 0, .count = 1003, .decay = true}, {.offset = 1005, .count = 300}, {.offset = 1308, .count = 190, .decay = true}};
    const qd_kernels *k = qd_device_kernels(device);
    qd_adamw_args a = adamw_arguments(true, t, ranges, COUNT(ranges), step);
    qd_sgd_args s = sgd_arguments(true, t[M] != NULL, t, ranges, COUNT(ranges), step);
    ops_assert_ok(adam ? k->adamw(qd_device_compute_stream(device), &a) : k->sgd(qd_device_compute_stream(device), &s));
}

/* Three runs: whole masters; split ones; whole masters that start each step from the split ones. A
 * third of the gradients is 0, so that without decay values stay unchanged. */
static void parts_on(qd_device *device, const char *name, bool adam, bool momentum)
{
    enum { FREE, SPLIT, LED, RUNS };
    static const size_t bytes[TENSORS] = {PARTS_N * 2, PARTS_N * 2, PARTS_N * 4, PARTS_N * 4, PARTS_N * 4, PARTS_STEPS * 8, PARTS_N * 2};
    uint16_t param[RUNS][PARTS_N], grad[PARTS_N];
    float master[RUNS][PARTS_N], m[RUNS][PARTS_N], v[RUNS][PARTS_N], joined[PARTS_N];
    int16_t rest[PARTS_N];
    double scales[PARTS_STEPS];
    void *t[RUNS][TENSORS];
    for (int i = 0; i < PARTS_N; i++) {
        joined[i] = crafted(i);
        param[FREE][i] = qd_f32_to_bf16(joined[i]);
        rest[i] = qd_f32_rest(joined[i], param[FREE][i]);
        grad[i] = i % 3 ? qd_f32_to_bf16((float)ops_normal()) : 0;
        m[FREE][i] = i % 3 ? (float)ops_normal() * 1e-3f : 0;
        v[FREE][i] = i % 3 ? 1e-3f : 0;
    }
    for (int step = 1; step <= PARTS_STEPS; step++)
        scales[step - 1] = scale_of(step);
    const void *first[TENSORS] = {param[FREE], grad, joined, m[FREE], v[FREE], scales, rest};
    for (int r = 0; r < RUNS; r++)
        for (int i = 0; i < TENSORS; i++) {
            bool absent = (i == MASTER && r == SPLIT) || (i == REST && r != SPLIT) || (i == M && !momentum) || (i == V && !adam);
            t[r][i] = NULL;
            if (absent)
                continue;
            ops_assert_ok(qd_device_alloc(device, (int64_t)bytes[i], &t[r][i]));
            move(device, t[r][i], first[i], bytes[i]);
        }
    for (int step = 1; step <= PARTS_STEPS; step++) {
        for (int i = 0; i < PARTS_N; i++)
            joined[i] = qd_f32_join(step == 1 ? param[FREE][i] : param[SPLIT][i], rest[i]);
        move(device, t[LED][MASTER], joined, sizeof joined);
        for (int r = 0; r < RUNS; r++) {
            step_with(device, adam, t[r], step);
            move(device, param[r], t[r][PARAM], bytes[PARAM]);
            if (t[r][MASTER])
                move(device, master[r], t[r][MASTER], bytes[MASTER]);
            if (momentum)
                move(device, m[r], t[r][M], bytes[M]);
            if (adam)
                move(device, v[r], t[r][V], bytes[V]);
        }
        move(device, rest, t[SPLIT][REST], bytes[REST]);
        for (int r = SPLIT; r < RUNS && momentum; r++)
            assert_memory_equal(m[r], m[FREE], sizeof m[r]);
        for (int r = SPLIT; r < RUNS && adam; r++)
            assert_memory_equal(v[r], v[FREE], sizeof v[r]);
        for (int i = 0; i < PARTS_N; i++) {
            float whole = master[LED][i], other = master[FREE][i], back = qd_f32_join(param[SPLIT][i], rest[i]);
            uint32_t apart = qd_f32_bits(back) - qd_f32_bits(other) + 1; /* 0 .. 2: within a unit in the last place */
            bool same = isnan(whole) ? isnan(back) && isnan(qd_bf16_to_f32(param[SPLIT][i]))
                                     : param[SPLIT][i] == param[LED][i] && rest[i] == qd_f32_rest(whole, param[LED][i]);
            bool near = isnan(other) ? isnan(back) : param[SPLIT][i] == param[FREE][i] && apart <= 2;
            if (!same || !near)
                fail_msg(
                    "%s, %s, step %d, element %d: %04x and %04x are %a; whole masters give %a (%04x), and %a (%04x) in a run of their own",
                    name, adam ? "adamw" : "sgd", step, i, param[SPLIT][i], (unsigned)(uint16_t)rest[i], (double)back, (double)whole,
                    param[LED][i], (double)other, param[FREE][i]);
        }
    }
    for (int r = 0; r < RUNS; r++)
        for (int i = 0; i < TENSORS; i++)
            qd_device_free(device, t[r][i], (int64_t)bytes[i]);
}

static void parts_give_what_whole_masters_do(void **state)
{
    (void)state;
    for (int s = 0; s <= OPS_CPU_ISAS; s++) {
        const char *isa = s < OPS_CPU_ISAS ? ops_cpu_isas[s] : "cuda";
        qd_device *device = s < OPS_CPU_ISAS ? ops_cpu(isa) : ops_cuda();
        if (!device)
            continue;
        parts_on(device, isa, true, true);
        parts_on(device, isa, false, true);
        parts_on(device, isa, false, false);
    }
}

/* A chunk of masters far into the parameters, whose element 0 would have the address of the
 * parameters' element 0: still two buffers. */
static void equal_addresses_on(qd_device *device)
{
    enum { FIRST = 64, N = 21, ALL = FIRST + N };
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const qd_param_range range = {.offset = FIRST, .count = N};
    float master[N], zero[ALL] = {0};
    uint16_t grad[ALL], param[N];
    double scale = 1;
    static const size_t bytes[] = {[GRAD] = ALL * 2, [MASTER] = ALL * 4, [M] = ALL * 4, [V] = ALL * 4, [SCALES] = 8};
    const void *first[] = {[GRAD] = grad, [MASTER] = zero, [M] = zero, [V] = zero, [SCALES] = &scale};
    void *t[TENSORS] = {NULL};
    for (int i = 0; i < ALL; i++)
        grad[i] = qd_f32_to_bf16(1.0f);
    for (int i = 0; i < N; i++)
        master[i] = (float)(FIRST + i);
    for (int i = GRAD; i <= SCALES; i++) {
        ops_assert_ok(qd_device_alloc(device, (int64_t)bytes[i], &t[i]));
        move(device, t[i], first[i], bytes[i]);
    }
    t[PARAM] = t[MASTER]; /* parameters from byte 2 * FIRST on, masters from byte 4 * FIRST on */
    char *at = t[MASTER];
    move(device, at + 4 * FIRST, master, sizeof master);
    for (int step = 1; step <= 2; step++) {
        move(device, at + 2 * FIRST, zero, sizeof param);
        qd_adamw_args a = adamw_arguments(true, t, &range, 1, 1);
        qd_sgd_args s = sgd_arguments(true, false, t, &range, 1, 1);
        ops_assert_ok(step == 1 ? k->adamw(stream, &a) : k->sgd(stream, &s));
        move(device, param, at + 2 * FIRST, sizeof param);
        move(device, master, at + 4 * FIRST, sizeof master);
        for (int i = 0; i < N; i++) {
            assert_true(master[i] < (float)(FIRST + i));
            assert_int_equal(param[i], qd_f32_to_bf16(master[i]));
        }
    }
    for (int i = GRAD; i <= SCALES; i++)
        qd_device_free(device, t[i], (int64_t)bytes[i]);
}

static void equal_addresses_are_two_buffers(void **state)
{
    (void)state;
    equal_addresses_on(ops_device(NULL, 1));
    if (ops_cuda())
        equal_addresses_on(ops_cuda());
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
    int16_t rest[1];
    s = (qd_sgd_args){.rest = rest, .param_dtype = QD_F32};
    ops_assert_fails(k->sgd(qd_device_compute_stream(device), &s), QD_USAGE, "must be bf16");
    a = (qd_adamw_args){.rest = rest, .param_dtype = QD_F32};
    ops_assert_fails(k->adamw(qd_device_compute_stream(device), &a), QD_USAGE, "must be bf16");
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
    const struct CMUnitTest more[] = {cmocka_unit_test(coefficients_stay_double), cmocka_unit_test(exact_rounding_and_not_finite),
                                      cmocka_unit_test(equal_addresses_are_two_buffers),
                                      cmocka_unit_test(parts_give_what_whole_masters_do),
                                      cmocka_unit_test(bad_arguments)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
