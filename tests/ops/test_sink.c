/* Attention sinks, forward and backward: one more logit per head in the denominator of the softmax.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct sink_case {
    int64_t batch, seq, gap; /* gap: o_stride - heads * head_dim */
    int heads, head_dim, first, all;
    double sinks; /* mean of the logits: far below or above the log-sum-exps */
    bool accumulate;
    qd_dtype dtype, param_dtype, grad_dtype;
} sink_case;

static const sink_case cases[] = {
    {1, 1, 0, 1, 2, 0, 1, 0, false, QD_F32, QD_F32, QD_F32},
    {2, 7, 5, 3, 6, 0, 3, 1, false, QD_F32, QD_F32, QD_F32},
    {3, 33, 0, 4, 16, 4, 8, 2, false, QD_F32, QD_F32, QD_F32},
    {3, 33, 0, 4, 16, 0, 8, -40, true, QD_F32, QD_F32, QD_F32},
    {1, 9, 3, 2, 14, 2, 5, 60, true, QD_F32, QD_BF16, QD_BF16},
    {2, 130, 0, 5, 64, 0, 5, 0, false, QD_BF16, QD_BF16, QD_F32},
    {2, 130, 8, 3, 66, 1, 4, 3, false, QD_BF16, QD_F32, QD_BF16},
};

static const sink_case speed[] = {
    {4, 1024, 0, 16, 64, 0, 16, 0, false, QD_F32, QD_F32, QD_F32},
    {4, 1024, 0, 16, 64, 0, 16, 0, false, QD_BF16, QD_BF16, QD_F32},
};

static void describe(const void *p, char *text, size_t size)
{
    const sink_case *c = p;
    snprintf(text, size, "%lld x %lld rows, heads %d to %d of %d, size %d, gap %lld, sinks %g, %s, %s%s", (long long)c->batch,
             (long long)c->seq, c->first, c->first + c->heads, c->all, c->head_dim, (long long)c->gap, c->sinks, qd_dtype_name(c->dtype),
             qd_dtype_name(c->grad_dtype), c->accumulate ? ", accumulate" : "");
}

static int64_t stride(const sink_case *c)
{
    return c->heads * (int64_t)c->head_dim + c->gap;
}

static int64_t sums(const sink_case *c)
{
    return c->batch * c->heads * c->seq;
}

enum { O, LSE, SINKS, FORWARD_TENSORS };

static int forward_tensors(const void *p, ops_tensor *t)
{
    const sink_case *c = p;
    t[O] = (ops_tensor){.name = "o", .role = OPS_INOUT, .dtype = c->dtype, .rows = c->batch * c->seq,
                        .cols = c->heads * (int64_t)c->head_dim, .ld = stride(c)};
    t[LSE] = (ops_tensor){.name = "lse", .role = OPS_INOUT, .dtype = QD_F32, .cols = sums(c), .scale = 2};
    t[SINKS] = (ops_tensor){.name = "sinks", .role = OPS_IN, .dtype = c->param_dtype, .cols = c->all, .offset = c->sinks};
    return FORWARD_TENSORS;
}

static void forward_reference(const void *p, double *const *v)
{
    const sink_case *c = p;
    for (int64_t row = 0; row < c->batch * c->seq; row++)
        for (int h = 0; h < c->heads; h++) {
            double *lse = &v[LSE][(row / c->seq * c->heads + h) * c->seq + row % c->seq], sink = v[SINKS][c->first + h];
            for (int i = 0; i < c->head_dim; i++)
                v[O][row * stride(c) + h * c->head_dim + i] /= 1 + exp(sink - *lse);
            *lse = log(exp(*lse) + exp(sink));
        }
}

static qd_status forward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const sink_case *c = p;
    return k->sink(stream, &(qd_sink_args){
        .sink = t[SINKS], .o = t[O], .lse = t[LSE], .batch = c->batch, .seq = c->seq, .o_stride = stride(c), .heads = c->heads,
        .head_dim = c->head_dim, .first = c->first, .all = c->all, .dtype = c->dtype, .param_dtype = c->param_dtype});
}

static double forward_bytes(const void *p)
{
    const sink_case *c = p;
    return 2.0 * (double)c->batch * (double)c->seq * c->heads * c->head_dim * (double)qd_dtype_size(c->dtype);
}

/* From the new log-sum-exps, as the gradient of attention reads them. */
enum { NEW_LSE, DELTA, SINKS_AGAIN, GRAD, BACKWARD_TENSORS };

static int backward_tensors(const void *p, ops_tensor *t)
{
    const sink_case *c = p;
    t[NEW_LSE] = (ops_tensor){.name = "lse", .role = OPS_IN, .dtype = QD_F32, .cols = sums(c), .scale = 2};
    t[DELTA] = (ops_tensor){.name = "delta", .role = OPS_IN, .dtype = QD_F32, .cols = sums(c)};
    t[SINKS_AGAIN] = (ops_tensor){.name = "sinks", .role = OPS_IN, .dtype = c->param_dtype, .cols = c->all, .offset = c->sinks};
    t[GRAD] = (ops_tensor){.name = "grad", .role = c->accumulate ? OPS_INOUT : OPS_OUT, .dtype = c->grad_dtype, .cols = c->all};
    return BACKWARD_TENSORS;
}

static void backward_derive(const void *p, double *const *v)
{
    const sink_case *c = p;
    for (int64_t i = 0; i < sums(c); i++) /* they contain the sinks */
        v[NEW_LSE][i] = (double)(float)log(exp(v[NEW_LSE][i]) + exp(v[SINKS_AGAIN][c->first + i / c->seq % c->heads]));
}

static void backward_reference(const void *p, double *const *v)
{
    const sink_case *c = p;
    for (int i = 0; i < c->all; i++) {
        double sum = 0;
        for (int64_t k = 0; k < sums(c); k++)
            if (c->first + k / c->seq % c->heads == i)
                sum -= exp(v[SINKS_AGAIN][i] - v[NEW_LSE][k]) * v[DELTA][k];
        v[GRAD][i] = sum + (c->accumulate ? v[GRAD][i] : 0);
    }
}

static qd_status backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const sink_case *c = p;
    return k->sink_backward(stream, &(qd_sink_args){
        .sink = t[SINKS_AGAIN], .lse = t[NEW_LSE], .delta = t[DELTA], .grad = t[GRAD], .batch = c->batch, .seq = c->seq,
        .heads = c->heads, .head_dim = c->head_dim, .first = c->first, .all = c->all, .accumulate = c->accumulate,
        .param_dtype = c->param_dtype, .grad_dtype = c->grad_dtype});
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "sink", .cases = cases, .case_count = COUNT(cases), .speed_cases = speed, .speed_count = COUNT(speed),
         .case_size = sizeof *cases, .describe = describe, .tensors = forward_tensors, .reference = forward_reference,
         .run = forward_run, .bytes = forward_bytes},
        {.kernel = "sink_backward", .cases = cases, .case_count = COUNT(cases), .case_size = sizeof *cases, .describe = describe,
         .tensors = backward_tensors, .derive = backward_derive, .reference = backward_reference, .run = backward_run},
    };
    return ops_main(argc, argv, ops, COUNT(ops), NULL, 0);
}
