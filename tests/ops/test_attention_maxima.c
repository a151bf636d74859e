/* Largest scores of heads that the forward pass of attention keeps, for QK-Clip: whole sequences,
 * and keys in two parts. CPU only. */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

typedef struct maxima_case {
    int64_t batch, seq, window;
    int heads, kv_heads, head_dim, v_dim;
    qd_dtype dtype;
    bool parts; /* keys of the first third, then the others */
} maxima_case;

enum { Q, K, V, O, LSE, MAXIMA, TENSORS };
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static void describe(const void *p, char *text, size_t size)
{
    const maxima_case *c = p;
    snprintf(text, size, "%lld x %lld, heads %d/%d, %d/%d, window %lld, %s%s", (long long)c->batch, (long long)c->seq, c->heads,
             c->kv_heads, c->head_dim, c->v_dim, (long long)c->window, qd_dtype_name(c->dtype), c->parts ? ", parts" : "");
}

static int tensors(const void *p, ops_tensor *t)
{
    const maxima_case *c = p;
    int64_t rows = c->batch * c->seq;
    t[Q] = (ops_tensor){.name = "q", .role = OPS_IN, .dtype = c->dtype, .rows = rows, .cols = c->heads * c->head_dim, .scale = 2};
    t[K] = (ops_tensor){.name = "k", .role = OPS_IN, .dtype = c->dtype, .rows = rows, .cols = c->kv_heads * c->head_dim, .scale = 2};
    t[V] = (ops_tensor){.name = "v", .role = OPS_IN, .dtype = c->dtype, .rows = rows, .cols = c->kv_heads * c->v_dim};
    t[O] = (ops_tensor){.name = "o", .role = OPS_SCRATCH, .dtype = c->parts ? QD_F32 : c->dtype, .rows = rows, .cols = c->heads * c->v_dim};
    t[LSE] = (ops_tensor){.name = "lse", .role = OPS_SCRATCH, .dtype = QD_F32, .rows = c->batch * c->heads, .cols = c->seq};
    t[MAXIMA] = (ops_tensor){.name = "maxima", .role = OPS_INOUT, .dtype = QD_F32, .rows = 1, .cols = c->heads};
    return TENSORS;
}

static float score_scale(const maxima_case *c)
{
    return 1.0f / sqrtf((float)c->head_dim);
}

static void reference(const void *p, double *const *v)
{
    const maxima_case *c = p;
    for (int h = 0; h < c->heads; h++) {
        double most = fmax(v[MAXIMA][h], 0.0);
        for (int64_t b = 0; b < c->batch; b++)
            for (int64_t t = 0; t < c->seq; t++)
                for (int64_t j = c->window > 0 && t >= c->window ? t - c->window + 1 : 0; j <= t; j++) {
                    const double *q = v[Q] + ((b * c->seq + t) * c->heads + h) * c->head_dim;
                    const double *k = v[K] + ((b * c->seq + j) * c->kv_heads + h / (c->heads / c->kv_heads)) * c->head_dim;
                    double score = 0.0;
                    for (int i = 0; i < c->head_dim; i++)
                        score += q[i] * k[i];
                    most = fmax(most, score * (double)score_scale(c));
                }
        v[MAXIMA][h] = most;
    }
}

static qd_status run_parts(const qd_kernels *k, qd_stream *stream, const maxima_case *c, void *const *p)
{
    const int64_t cut = c->seq / 3, size = (int64_t)qd_dtype_size(c->dtype);
    const qd_row_run queries = {0, 0, c->seq}, keys[2] = {{0, 0, cut}, {0, cut, c->seq - cut}};
    for (int part = 0; part < 2; part++) {
        int64_t skipped = keys[part].position * c->kv_heads * size;
        qd_attention_part_args args = {
            .q = p[Q], .k = (char *)p[K] + skipped * c->head_dim, .v = (char *)p[V] + skipped * c->v_dim, .o = p[O], .lse = p[LSE],
            .maxima = p[MAXIMA], .q_runs = &queries, .k_runs = &keys[part], .q_run_count = 1, .k_run_count = 1, .batch = 1,
            .q_seq = c->seq, .k_seq = keys[part].count, .q_stride = c->heads * c->head_dim, .k_stride = c->kv_heads * c->head_dim,
            .v_stride = c->kv_heads * c->v_dim, .o_stride = c->heads * c->v_dim, .window = c->window, .heads = c->heads,
            .kv_heads = c->kv_heads, .head_dim = c->head_dim, .v_dim = c->v_dim, .scale = score_scale(c), .begin = part == 0,
            .dtype = c->dtype};
        QD_TRY(k->attention_part_forward(stream, &args));
    }
    return QD_OK;
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *of, void *const *p)
{
    const maxima_case *c = of;
    if (c->parts)
        return run_parts(k, stream, c, p);
    return k->attention_forward(stream, &(qd_attention_args){
        .q = p[Q], .k = p[K], .v = p[V], .o = p[O], .lse = p[LSE], .maxima = p[MAXIMA], .batch = c->batch, .seq = c->seq,
        .q_stride = c->heads * c->head_dim, .k_stride = c->kv_heads * c->head_dim, .v_stride = c->kv_heads * c->v_dim,
        .o_stride = c->heads * c->v_dim, .window = c->window, .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim,
        .v_dim = c->v_dim, .scale = score_scale(c), .dtype = c->dtype});
}

static const maxima_case cases[] = {
    {1, 1, 0, 1, 1, 2, 2, QD_F32, false},     {2, 17, 0, 4, 2, 6, 6, QD_F32, false},   {1, 203, 0, 3, 3, 32, 20, QD_F32, false},
    {2, 301, 0, 2, 1, 20, 20, QD_F32, false}, {1, 300, 7, 2, 2, 16, 16, QD_F32, false}, {1, 130, 0, 4, 2, 24, 24, QD_BF16, false},
    {1, 310, 0, 4, 2, 18, 18, QD_F32, true},  {1, 205, 40, 2, 1, 16, 12, QD_BF16, true},
};

int main(int argc, char **argv)
{
    const ops_op ops[] = {{.kernel = "attention_forward, largest scores", .cases = cases, .case_count = COUNT(cases),
                           .case_size = sizeof *cases, .describe = describe, .tensors = tensors, .reference = reference, .run = run,
                           .cpu_only = true}};
    return ops_main(argc, argv, ops, COUNT(ops), NULL, 0);
}
