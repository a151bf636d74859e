/* Biases of experts: added to rows that are sorted by source and expert, and their gradients.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct bias_case {
    int64_t rows, begin, width, first, n; /* of the list that counts describes, rows from `begin` on */
    int sources, experts, each;           /* each: most rows of an expert from a source */
    bool accumulate;
    qd_dtype dtype, bias_dtype;
} bias_case;

static const bias_case cases[] = {
    {4, 0, 1, 0, 1, 1, 1, 3, false, QD_F32, QD_F32},
    {40, 0, 14, 0, 14, 1, 5, 8, false, QD_F32, QD_F32},
    {60, 0, 37, 18, 19, 3, 4, 5, true, QD_F32, QD_F32},     /* a share of the columns */
    {20, 16, 24, 0, 24, 2, 3, 9, false, QD_F32, QD_F32},    /* an extra round: the list goes on */
    {400, 0, 130, 65, 65, 2, 3, 66, true, QD_F32, QD_BF16}, /* more rows than one partial sum */
    {40, 0, 66, 0, 66, 2, 4, 5, false, QD_BF16, QD_BF16},
    {60, 8, 48, 16, 16, 3, 4, 5, true, QD_BF16, QD_F32},
};

static void describe(const void *p, char *text, size_t size)
{
    const bias_case *c = p;
    snprintf(text, size, "%lld rows from %lld on, columns %lld to %lld of %lld, %d sources, %d experts, %s, %s%s", (long long)c->rows,
             (long long)c->begin, (long long)c->first, (long long)(c->first + c->n), (long long)c->width, c->sources, c->experts,
             qd_dtype_name(c->dtype), qd_dtype_name(c->bias_dtype), c->accumulate ? ", accumulate" : "");
}

enum { X, BIAS, COUNTS, TENSORS };

static int tensors(const bias_case *c, ops_tensor *t, bool backward)
{
    ops_role grad = c->accumulate ? OPS_INOUT : OPS_OUT;
    t[X] = (ops_tensor){.name = "x", .role = backward ? OPS_IN : OPS_INOUT, .dtype = c->dtype, .rows = c->rows, .cols = c->width};
    t[BIAS] = (ops_tensor){.name = "bias", .role = backward ? grad : OPS_IN, .dtype = c->bias_dtype, .rows = c->experts, .cols = c->n};
    t[COUNTS] = (ops_tensor){.name = "counts", .role = OPS_IN, .dtype = QD_I32, .rows = c->sources, .cols = c->experts,
                             .scale = c->each + 1};
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

/* The expert of a row of the list; -1: the list ends before it. */
static int expert_of(const bias_case *c, const double *counts, int64_t row)
{
    double end = 0;
    for (int i = 0; i < c->sources * c->experts; i++) {
        end += counts[i];
        if ((double)row < end)
            return i % c->experts;
    }
    return -1;
}

static void forward_reference(const void *p, double *const *v)
{
    const bias_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        int expert = expert_of(c, v[COUNTS], c->begin + r);
        for (int64_t i = 0; i < c->n && expert >= 0; i++)
            v[X][r * c->width + c->first + i] += v[BIAS][expert * c->n + i];
    }
}

static void backward_reference(const void *p, double *const *v)
{
    const bias_case *c = p;
    for (int64_t i = 0; i < c->experts * c->n && !c->accumulate; i++)
        v[BIAS][i] = 0;
    for (int64_t r = 0; r < c->rows; r++) {
        int expert = expert_of(c, v[COUNTS], c->begin + r);
        for (int64_t i = 0; i < c->n && expert >= 0; i++)
            v[BIAS][expert * c->n + i] += v[X][r * c->width + c->first + i];
    }
}

static qd_grouped_bias_args arguments(const bias_case *c, void *const *t)
{
    return (qd_grouped_bias_args){.x = t[X], .bias = t[BIAS], .counts = t[COUNTS], .count_stride = c->experts, .begin = c->begin,
                                  .rows = c->rows, .width = c->width, .first = c->first, .n = c->n, .sources = c->sources,
                                  .experts = c->experts, .accumulate = c->accumulate, .dtype = c->dtype, .bias_dtype = c->bias_dtype};
}

static qd_status forward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_grouped_bias_args a = arguments(c, t);
    return k->grouped_bias(stream, &a);
}

static qd_status backward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_grouped_bias_args a = arguments(c, t);
    return k->grouped_bias_grad(stream, &a);
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "grouped_bias", .cases = cases, .case_count = COUNT(cases), .case_size = sizeof *cases, .describe = describe,
         .tensors = forward_tensors, .reference = forward_reference, .run = forward_run},
        {.kernel = "grouped_bias_grad", .cases = cases, .case_count = COUNT(cases), .case_size = sizeof *cases, .describe = describe,
         .tensors = backward_tensors, .reference = backward_reference, .run = backward_run},
    };
    return ops_main(argc, argv, ops, COUNT(ops), NULL, 0);
}
