/* Cross-entropy, whole and sharded by vocabulary, and the sum of losses, against double precision.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#define SCALE 0.125

typedef struct loss_case {
    int64_t rows, vocab, ld;
    bool grad;
    qd_dtype dtype;
    double cap; /* 0: none */
} loss_case;

static const loss_case cases[] = {
    {1, 1, 1, true, QD_F32, 0},         {3, 7, 7, false, QD_F32, 0},        {40, 7, 16, true, QD_F32, 0},
    {37, 1000, 1000, true, QD_F32, 0},  {9, 4097, 4160, true, QD_F32, 0},   {9, 4097, 4160, false, QD_F32, 0},
    {5, 50257, 50304, true, QD_F32, 0}, {37, 1000, 1024, true, QD_BF16, 0}, {9, 4097, 4097, false, QD_BF16, 0},
    {5, 50257, 50257, true, QD_BF16, 0}, {5, 50257, 50304, true, QD_BF16, 0}, {4, 50304, 50304, true, QD_BF16, 0},
    {3, 128251, 128256, true, QD_BF16, 0}, {2, 65537, 65540, true, QD_F32, 0}, {1, 530001, 530001, true, QD_F32, 0},
    {40, 7, 16, true, QD_F32, 5}, {37, 1000, 1000, false, QD_F32, 30}, {9, 4097, 4160, true, QD_F32, 2},
    {37, 1000, 1024, true, QD_BF16, 30}, {5, 50257, 50257, true, QD_BF16, 5}, {3, 256000, 256000, true, QD_BF16, 30},
};
static const loss_case speed[] = {
    {512, 256000, 256000, true, QD_BF16, 0},
    {512, 256000, 256000, true, QD_BF16, 30},
    {512, 50257, 50304, false, QD_F32, 0},
    {512, 50257, 50304, true, QD_F32, 0},
    {512, 50257, 50304, true, QD_BF16, 0},
};

static void describe(const void *p, char *text, size_t size)
{
    const loss_case *c = p;
    snprintf(text, size, "%lld rows, vocabulary %lld, stride %lld, %s%s, cap %g", (long long)c->rows, (long long)c->vocab,
             (long long)c->ld, qd_dtype_name(c->dtype), c->grad ? ", gradient" : "", c->cap);
}

/* The tensor's columns are ld, because the gradient clears the padding beyond the vocabulary. */
enum { LOGITS, TARGETS, LOSSES, TENSORS };

static int tensors(const void *p, ops_tensor *t)
{
    const loss_case *c = p;
    t[LOGITS] = (ops_tensor){.name = "logits", .role = c->grad ? OPS_INOUT : OPS_IN, .dtype = c->dtype, .rows = c->rows,
                             .cols = c->ld, .scale = 3, .floor = c->vocab == 1 ? 1 : 0};
    t[TARGETS] = (ops_tensor){.name = "targets", .role = OPS_IN, .dtype = QD_I32, .cols = c->rows,
                              .scale = (double)c->vocab};
    t[LOSSES] = (ops_tensor){.name = "losses", .role = OPS_OUT, .dtype = QD_F32, .cols = c->rows,
                             .floor = c->vocab == 1 ? 1 : 0};
    return TENSORS;
}

/* Some targets are ignored, and rows have logits of very different magnitude (which a cap would
 * make equal). */
static void derive(const void *p, double *const *v)
{
    const loss_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        if (r % 5 == 2)
            v[TARGETS][r] = -1 - (double)(r % 100);
        for (int64_t i = 0; i < c->vocab; i++)
            v[LOGITS][r * c->ld + i] += c->cap > 0 ? 0 : r % 4 == 1 ? 300 : r % 4 == 2 ? -300 : 0;
    }
}

/* What a logit stands for. */
static double capped(double x, double cap)
{
    return cap > 0 ? cap * tanh(x / cap) : x;
}

/* Its derivative. */
static double slope(double x, double cap)
{
    return cap > 0 ? 1 - pow(tanh(x / cap), 2) : 1;
}

static double row_loss(const loss_case *c, const double *x, int64_t target, double *top, double *sum)
{
    *top = -INFINITY;
    *sum = 0;
    for (int64_t i = 0; i < c->vocab; i++)
        *top = fmax(*top, capped(x[i], c->cap));
    for (int64_t i = 0; i < c->vocab; i++)
        *sum += exp(capped(x[i], c->cap) - *top);
    return log(*sum) + *top - capped(x[target], c->cap);
}

static void reference(const void *p, double *const *v)
{
    const loss_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        double *x = v[LOGITS] + r * c->ld, top, sum;
        int64_t target = (int64_t)v[TARGETS][r];
        v[LOSSES][r] = target < 0 ? 0 : row_loss(c, x, target, &top, &sum);
        for (int64_t i = 0; i < c->ld && c->grad; i++)
            x[i] = target < 0 || i >= c->vocab
                       ? 0
                       : (exp(capped(x[i], c->cap) - top) / sum - (i == target)) * SCALE * slope(x[i], c->cap);
    }
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const loss_case *c = p;
    return k->cross_entropy(stream, &(qd_cross_entropy_args){.logits = t[LOGITS], .targets = t[TARGETS],
                                                             .losses = t[LOSSES], .rows = c->rows, .vocab = c->vocab,
                                                             .ld = c->ld, .scale = (float)SCALE, .cap = (float)c->cap,
                                                             .grad = c->grad, .dtype = c->dtype});
}

static double bytes(const void *p)
{
    const loss_case *c = p;
    return (double)(c->rows * c->vocab) * (double)qd_dtype_size(c->dtype) * (c->grad ? 2 : 1);
}

typedef struct part_case {
    qd_cross_entropy_stage stage;
    int64_t rows, vocab, ld, first, all;
    bool grad;
    qd_dtype dtype;
    double cap; /* 0: none */
} part_case;

static const part_case parts[] = {
    {QD_CROSS_ENTROPY_MAX, 3, 7, 7, 0, 14, true, QD_F32, 0},
    {QD_CROSS_ENTROPY_MAX, 37, 1009, 1024, 1009, 2018, true, QD_BF16, 0},
    {QD_CROSS_ENTROPY_SUM, 40, 7, 16, 7, 14, true, QD_F32, 0},
    {QD_CROSS_ENTROPY_SUM, 9, 12565, 12565, 25129, 50257, true, QD_F32, 0},
    {QD_CROSS_ENTROPY_SUM, 37, 1000, 1024, 0, 1009, true, QD_BF16, 0},
    {QD_CROSS_ENTROPY_GRAD, 40, 7, 16, 0, 14, true, QD_F32, 0},
    {QD_CROSS_ENTROPY_GRAD, 40, 253, 253, 253, 1009, false, QD_F32, 0},
    {QD_CROSS_ENTROPY_GRAD, 9, 12565, 12600, 25129, 50257, true, QD_F32, 0},
    {QD_CROSS_ENTROPY_GRAD, 37, 1000, 1024, 500, 2000, true, QD_BF16, 0},
    {QD_CROSS_ENTROPY_MAX, 9, 100, 100, 0, 200, true, QD_F32, 4},
    {QD_CROSS_ENTROPY_SUM, 40, 253, 256, 253, 1009, true, QD_F32, 4},
    {QD_CROSS_ENTROPY_SUM, 37, 1000, 1024, 0, 1009, true, QD_BF16, 30},
    {QD_CROSS_ENTROPY_GRAD, 40, 253, 256, 253, 1009, true, QD_F32, 4},
    {QD_CROSS_ENTROPY_GRAD, 37, 1000, 1024, 500, 2000, true, QD_BF16, 30},
};

enum { PART_LOGITS, PART_TARGETS, PART_TOP, PART_SUMS, PART_LOSSES, PART_TENSORS };

static void describe_part(const void *p, char *text, size_t size)
{
    const part_case *c = p;
    snprintf(text, size, "stage %d, %lld rows, tokens %lld to %lld of %lld, stride %lld, %s%s, cap %g", (int)c->stage, (long long)c->rows,
             (long long)c->first, (long long)(c->first + c->vocab - 1), (long long)c->all, (long long)c->ld, qd_dtype_name(c->dtype),
             c->grad ? ", gradient" : "", c->cap);
}

static int part_tensors(const void *p, ops_tensor *t)
{
    const part_case *c = p;
    bool max = c->stage == QD_CROSS_ENTROPY_MAX, sum = c->stage == QD_CROSS_ENTROPY_SUM, last = c->stage == QD_CROSS_ENTROPY_GRAD;
    t[PART_LOGITS] = (ops_tensor){.name = "logits", .role = last && c->grad ? OPS_INOUT : OPS_IN, .dtype = c->dtype, .rows = c->rows,
                                  .cols = c->ld, .scale = 3};
    t[PART_TARGETS] = (ops_tensor){.name = "targets", .role = max ? OPS_ABSENT : OPS_IN, .dtype = QD_I32, .cols = c->rows,
                                   .scale = (double)c->all};
    t[PART_TOP] = (ops_tensor){.name = "top", .role = max ? OPS_OUT : OPS_IN, .dtype = QD_F32, .cols = c->rows};
    t[PART_SUMS] = (ops_tensor){.name = "sums", .role = max ? OPS_ABSENT : sum ? OPS_OUT : OPS_IN, .dtype = QD_F32, .cols = 2 * c->rows};
    t[PART_LOSSES] = (ops_tensor){.name = "losses", .role = last ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .cols = c->rows};
    return PART_TENSORS;
}

/* What the earlier stages would have left: another rank may have the largest logit and the rest of
 * the sum. */
static void derive_part(const void *p, double *const *v)
{
    const part_case *c = p;
    for (int64_t r = 0; r < c->rows && c->stage != QD_CROSS_ENTROPY_MAX; r++) {
        double *x = v[PART_LOGITS] + r * c->ld, top = -INFINITY, sum = 0;
        if (r % 5 == 2)
            v[PART_TARGETS][r] = -1;
        for (int64_t i = 0; i < c->vocab; i++)
            top = fmax(top, capped(x[i], c->cap));
        v[PART_TOP][r] = (double)(float)(top + (r % 3 ? 0.5 : 0));
        for (int64_t i = 0; i < c->vocab; i++)
            sum += exp(capped(x[i], c->cap) - v[PART_TOP][r]);
        int64_t target = (int64_t)v[PART_TARGETS][r] - c->first;
        if (c->stage == QD_CROSS_ENTROPY_GRAD) {
            v[PART_SUMS][2 * r] = (double)(float)(sum + 1.5);
            bool here = target >= 0 && target < c->vocab;
            v[PART_SUMS][2 * r + 1] = here ? (double)(float)(capped(x[target], c->cap) - v[PART_TOP][r]) : -0.75;
        }
    }
}

static void part_reference(const void *p, double *const *v)
{
    const part_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        double *x = v[PART_LOGITS] + r * c->ld, most = -INFINITY, sum = 0;
        for (int64_t i = 0; i < c->vocab; i++)
            most = fmax(most, capped(x[i], c->cap));
        if (c->stage == QD_CROSS_ENTROPY_MAX) {
            v[PART_TOP][r] = most;
            continue;
        }
        int64_t target = (int64_t)v[PART_TARGETS][r], here = target - c->first;
        for (int64_t i = 0; i < c->vocab; i++)
            sum += exp(capped(x[i], c->cap) - v[PART_TOP][r]);
        if (c->stage == QD_CROSS_ENTROPY_SUM) {
            v[PART_SUMS][2 * r] = sum;
            v[PART_SUMS][2 * r + 1] = target >= 0 && here >= 0 && here < c->vocab ? capped(x[here], c->cap) - v[PART_TOP][r] : 0;
            continue;
        }
        v[PART_LOSSES][r] = target < 0 ? 0 : log(v[PART_SUMS][2 * r]) - v[PART_SUMS][2 * r + 1];
        for (int64_t i = 0; i < c->ld && c->grad; i++)
            x[i] = target < 0 || i >= c->vocab ? 0
                                               : (exp(capped(x[i], c->cap) - v[PART_TOP][r]) / v[PART_SUMS][2 * r] - (i == here)) *
                                                     SCALE * slope(x[i], c->cap);
    }
}

static qd_status part_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const part_case *c = p;
    return k->cross_entropy_part(stream, &(qd_cross_entropy_part_args){
        .stage = c->stage, .logits = t[PART_LOGITS], .targets = t[PART_TARGETS], .top = t[PART_TOP], .sums = t[PART_SUMS],
        .losses = t[PART_LOSSES], .rows = c->rows, .vocab = c->vocab, .ld = c->ld, .first = c->first, .all = c->all,
        .scale = (float)SCALE, .cap = (float)c->cap, .grad = c->grad, .dtype = c->dtype});
}

/* The gradient that replaces the logits is the numerical derivative of scale * sum of losses. */
static void gradient_is_the_derivative(void **state)
{
    (void)state;
    enum { ROWS = 4, VOCAB = 33 };
    loss_case c = {ROWS, VOCAB, VOCAB, true, QD_F32, 0};
    float x[ROWS * VOCAB], losses[ROWS];
    double exact[ROWS * VOCAB];
    int32_t targets[ROWS] = {0, 32, -1, 7};
    for (int i = 0; i < ROWS * VOCAB; i++)
        exact[i] = x[i] = (float)(2 * ops_normal());
    qd_device *device = ops_device(NULL, 2);
    void *t[TENSORS] = {x, targets, losses};
    ops_assert_ok(run(qd_device_kernels(device), qd_device_compute_stream(device), &c, t));
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VOCAB; i++) {
            double change = 0, top, sum, *at = &exact[r * VOCAB + i];
            if (targets[r] >= 0) {
                *at += 1e-5;
                double up = row_loss(&c, exact + r * VOCAB, targets[r], &top, &sum);
                *at -= 2e-5;
                change = SCALE * (up - row_loss(&c, exact + r * VOCAB, targets[r], &top, &sum)) / 2e-5;
                *at += 1e-5;
            }
            assert_true(fabs(change - (double)x[r * VOCAB + i]) < 1e-7);
        }
}

static void not_finite_stays_visible(void **state)
{
    (void)state;
    enum { VOCAB = 70 };
    static const float odd[] = {NAN, INFINITY};
    qd_device *device = ops_device(NULL, 1);
    loss_case c = {2, VOCAB, VOCAB, true, QD_F32, 0};
    for (int o = 0; o < COUNT(odd); o++)
        for (int at = 0; at < VOCAB; at++) {
            float x[2 * VOCAB] = {0}, losses[2];
            x[at] = odd[o];
            void *t[TENSORS] = {x, (int32_t[]){3, 3}, losses};
            ops_assert_ok(run(qd_device_kernels(device), qd_device_compute_stream(device), &c, t));
            assert_true(isnan(losses[0]) && isnan(x[0]) && isnan(x[3]) && isnan(x[VOCAB - 1]));
            assert_true(fabsf(losses[1] - logf(VOCAB)) < 1e-5f && isfinite(x[VOCAB]));
        }
    /* minus infinity is a legal logit: probability 0 */
    float x[2 * VOCAB] = {0}, losses[2];
    x[1] = -INFINITY;
    void *t[TENSORS] = {x, (int32_t[]){3, -1}, losses};
    ops_assert_ok(run(qd_device_kernels(device), qd_device_compute_stream(device), &c, t));
    assert_true(fabsf(losses[0] - logf(VOCAB - 1)) < 1e-5f && x[1] == 0);
}

/* Low logits that begin with many minus infinities and end with a much larger maximum: terms
 * computed relative to an earlier maximum must be rescaled. */
static void maximum_comes_late(void **state)
{
    (void)state;
    enum { VOCAB = 20000, OPEN = 9000, LAST = VOCAB - 1 };
    static float x[VOCAB];
    qd_device *device = ops_device(NULL, 1);
    loss_case c = {1, VOCAB, VOCAB, true, QD_F32, 0};
    const float rise[] = {3, 300};
    for (int k = 0; k < COUNT(rise); k++) {
        float losses[1];
        for (int i = 0; i < VOCAB; i++)
            x[i] = i < OPEN ? -INFINITY : -200;
        x[LAST] += rise[k];
        void *t[TENSORS] = {x, (int32_t[]){LAST}, losses};
        ops_assert_ok(run(qd_device_kernels(device), qd_device_compute_stream(device), &c, t));
        double sum = 1 + (LAST - OPEN) * exp(-rise[k]), other = exp(-rise[k]) / sum * SCALE;
        assert_true(fabs(losses[0] - log(sum)) < 1e-5 && x[0] == 0 && x[OPEN - 1] == 0);
        double most = 1e-6 * other + 1e-38; /* the smaller ones become 0 */
        assert_true(fabs(x[OPEN] - other) <= most && fabs(x[LAST - 1] - other) <= most);
        assert_true(fabs(x[LAST] - (1 / sum - 1) * SCALE) <= 1e-6 * SCALE);
    }
}

static void target_out_of_range(void **state)
{
    (void)state;
    float x[6] = {0}, losses[2];
    qd_device *device = ops_device(NULL, 1);
    loss_case c = {2, 3, 3, true, QD_F32, 0};
    void *t[TENSORS] = {x, (int32_t[]){2, 3}, losses};
    ops_assert_fails(run(qd_device_kernels(device), qd_device_compute_stream(device), &c, t), QD_USAGE,
                     "row 1 has target 3");
    for (int i = 0; i < 6; i++)
        assert_true(x[i] == 0); /* refused before anything is written */
}

/* Splitting the rows into calls changes no bit. */
static void losses_are_summed_in_order(void **state)
{
    (void)state;
    enum { ROWS = 1000 };
    float losses[ROWS];
    int32_t targets[ROWS];
    double want = 7.5, left_out = 0;
    for (int i = 0; i < ROWS; i++) {
        targets[i] = i % 9 == 4 ? -1 : i;
        losses[i] = targets[i] < 0 ? 0 : (float)fabs(ops_normal());
        want += (double)losses[i];
        left_out += targets[i] < 0;
    }
    qd_device *device = ops_device(NULL, 2);
    for (int cut = 1; cut < ROWS; cut += 333) {
        double total = 7.5, counted = 2;
        qd_loss_sum_args a = {.losses = losses, .targets = targets, .rows = cut, .total = &total, .counted = &counted};
        ops_assert_ok(qd_device_kernels(device)->loss_sum(qd_device_compute_stream(device), &a));
        a.losses += cut;
        a.targets += cut;
        a.rows = ROWS - cut;
        ops_assert_ok(qd_device_kernels(device)->loss_sum(qd_device_compute_stream(device), &a));
        assert_true(total == want);
        assert_true(counted == 2 + ROWS - left_out);
    }
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "cross_entropy", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = tensors,
         .derive = derive, .reference = reference, .run = run, .bytes = bytes},
        {.kernel = "cross_entropy_part", .cases = parts, .case_size = sizeof *parts, .case_count = COUNT(parts),
         .describe = describe_part, .tensors = part_tensors, .derive = derive_part, .reference = part_reference, .run = part_run},
    };
    const struct CMUnitTest more[] = {
        cmocka_unit_test(gradient_is_the_derivative), cmocka_unit_test(not_finite_stays_visible), cmocka_unit_test(maximum_comes_late),
        cmocka_unit_test(target_out_of_range), cmocka_unit_test(losses_are_summed_in_order)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
