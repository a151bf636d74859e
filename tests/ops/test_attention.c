/* Causal attention, forward and backward: multi-head and grouped-query, separate and fused q, k, v,
 * documents, sequence lengths around block boundaries, every kind of head size. */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct attention_case {
    int64_t batch, seq;
    int heads, kv_heads, head_dim;
    qd_dtype dtype;
    bool documents;
    bool fused;     /* q, k, v are views of one buffer with rows of their heads side by side */
    double spread;  /* of queries and keys: large values make the softmax sharp; 0 means 1 */
    int64_t window; /* 0: none */
    double softcap, scale; /* 0: none; 1 / sqrt(head_dim) */
    int v_dim;             /* of values; 0: head_dim */
} attention_case;

/* Forward and backward share the layout; the forward pass omits the last tensors. With `fused`, Q
 * (DQ) holds all three. */
enum { Q, K, V, O, LSE, DOC, DO, DQ, DK, DV, DELTA, COUNT };

static void describe(const void *p, char *text, size_t size)
{
    const attention_case *c = p;
    snprintf(text, size, "B%lld T%lld H%d/%d D%d %s%s%s%s", (long long)c->batch, (long long)c->seq, c->heads, c->kv_heads,
             c->head_dim, qd_dtype_name(c->dtype), c->documents ? " documents" : "", c->fused ? " fused" : "",
             c->spread > 1 ? " sharp" : "");
    size_t used = strlen(text);
    if (c->window || c->softcap > 0 || c->scale > 0)
        snprintf(text + used, size - used, " W%lld cap %g scale %g", (long long)c->window, c->softcap, c->scale);
    used = strlen(text);
    if (c->v_dim)
        snprintf(text + used, size - used, " V%d", c->v_dim);
}

typedef struct layout {
    int64_t rows, q, k, v, o, q_stride, k_stride, v_stride, k_at, v_at; /* widths, strides, offsets of k and v when fused */
    int v_dim;
    float scale;
} layout;

static layout layout_of(const attention_case *c)
{
    layout l = {.rows = c->batch * c->seq, .q = c->heads * c->head_dim, .k = c->kv_heads * c->head_dim};
    l.v_dim = qd_attention_v_dim(c->head_dim, c->v_dim);
    l.v = c->kv_heads * l.v_dim;
    l.o = c->heads * l.v_dim;
    l.q_stride = c->fused ? l.q + l.k + l.v : l.q;
    l.k_stride = c->fused ? l.q_stride : l.k;
    l.v_stride = c->fused ? l.q_stride : l.v;
    l.k_at = c->fused ? l.q : 0;
    l.v_at = c->fused ? l.q + l.k : 0;
    l.scale = (float)(c->scale > 0 ? c->scale : 1 / sqrt(c->head_dim));
    return l;
}

static int list(const attention_case *c, ops_tensor *t, bool backward)
{
    layout l = layout_of(c);
    ops_role apart = c->fused ? OPS_ABSENT : OPS_IN, given = backward ? OPS_IN : OPS_OUT;
    ops_role gradient = backward ? OPS_OUT : OPS_ABSENT;
    double spread = c->spread > 0 ? c->spread : 1, floor = 0.1; /* dq and dk of the first row are 0 except for rounding */
    t[Q] = (ops_tensor){"q", OPS_IN, c->dtype, l.rows, l.q_stride, 0, spread, 0, 0, false, 0, 0};
    t[K] = (ops_tensor){"k", apart, c->dtype, l.rows, l.k, 0, spread, 0, 0, false, 0, 0};
    t[V] = (ops_tensor){"v", apart, c->dtype, l.rows, l.v, 0, 0, 0, 0, false, 0, 0};
    t[O] = (ops_tensor){"o", given, c->dtype, l.rows, l.o, 0, 0, 0, 0, false, 0, 0};
    t[LSE] = (ops_tensor){"lse", given, QD_F32, c->batch * c->heads, c->seq, 0, 0, 0, 0, false, 0, 0.1};
    t[DOC] = (ops_tensor){"doc_start", c->documents ? OPS_IN : OPS_ABSENT, QD_I32, 1, l.rows, 0, 0, 0, 0, false, 0, 0};
    t[DO] = (ops_tensor){"d_o", backward ? OPS_IN : OPS_ABSENT, c->dtype, l.rows, l.o, 0, 0, 0, 0, false, 0, 0};
    t[DQ] = (ops_tensor){"dq", gradient, c->dtype, l.rows, l.q_stride, 0, 0, 0, 0, false, 0, floor};
    t[DK] = (ops_tensor){"dk", c->fused ? OPS_ABSENT : gradient, c->dtype, l.rows, l.k, 0, 0, 0, 0, false, 0, floor};
    t[DV] = (ops_tensor){"dv", c->fused ? OPS_ABSENT : gradient, c->dtype, l.rows, l.v, 0, 0, 0, 0, false, 0, 0};
    t[DELTA] = (ops_tensor){"delta", gradient, QD_F32, c->batch * c->heads, c->seq, 0, 0, 0, 0, false, 0, floor};
    if (c->dtype == QD_BF16) /* the kernel reads the rounded o */
        t[DQ].tol = t[DK].tol = t[DELTA].tol = 1e-2;
    if (c->spread > 1) /* scores of some hundreds, of which fp32 keeps 1e-5 */
        t[O].tol = t[DQ].tol = t[DK].tol = t[DV].tol = 3e-5;
    return COUNT;
}

static int tensors_forward(const void *p, ops_tensor *t)
{
    return list(p, t, false);
}
static int tensors_backward(const void *p, ops_tensor *t)
{
    return list(p, t, true);
}

static void view(const attention_case *c, double *const *v, const double **k, const double **values)
{
    layout l = layout_of(c);
    *k = c->fused ? v[Q] + l.k_at : v[K];
    *values = c->fused ? v[Q] + l.v_at : v[V];
}

/* The first position that row t attends to. */
static int64_t first_of(const attention_case *c, double *const *v, int64_t b, int64_t t)
{
    double first = c->documents ? fmax(0, v[DOC][b * c->seq + t]) : 0;
    return (int64_t)(c->window > 0 ? fmax(first, (double)(t - c->window + 1)) : first);
}

/* o (rows, heads * v_dim), lse, and p (seq) of one row for the caller. */
static void attend_row(const attention_case *c, double *const *v, int64_t b, int h, int64_t t, double *p, double *o,
                       double *lse)
{
    layout l = layout_of(c);
    const double *k, *values;
    view(c, v, &k, &values);
    int kv = h / (c->heads / c->kv_heads), hd = c->head_dim;
    const double *q = v[Q] + (b * c->seq + t) * l.q_stride + h * hd;
    int64_t first = first_of(c, v, b, t);
    double most = -INFINITY, total = 0;
    for (int64_t j = 0; j < c->seq; j++) {
        p[j] = -INFINITY;
        if (j >= first && j <= t) {
            double dot = 0;
            for (int i = 0; i < hd; i++)
                dot += q[i] * k[(b * c->seq + j) * l.k_stride + kv * hd + i];
            p[j] = c->softcap > 0 ? c->softcap * tanh(dot * l.scale / c->softcap) : dot * l.scale;
            most = fmax(most, p[j]);
        }
    }
    for (int64_t j = first; j <= t; j++)
        total += exp(p[j] - most);
    *lse = most + log(total);
    for (int i = 0; i < l.v_dim; i++)
        o[i] = 0;
    for (int64_t j = 0; j < c->seq; j++) {
        p[j] = exp(p[j] - *lse);
        for (int i = 0; p[j] > 0 && i < l.v_dim; i++)
            o[i] += p[j] * values[(b * c->seq + j) * l.v_stride + kv * l.v_dim + i];
    }
}

static void reference_forward(const void *case_, double *const *v)
{
    const attention_case *c = case_;
    layout l = layout_of(c);
    double *p = malloc((size_t)c->seq * sizeof *p);
    for (int64_t b = 0; b < c->batch; b++)
        for (int h = 0; h < c->heads; h++)
            for (int64_t t = 0; t < c->seq; t++)
                attend_row(c, v, b, h, t, p, v[O] + (b * c->seq + t) * l.o + h * l.v_dim,
                           &v[LSE][(b * c->heads + h) * c->seq + t]);
    free(p);
}

static void derive_documents(const void *case_, double *const *v)
{
    const attention_case *c = case_;
    for (int64_t b = 0; c->documents && b < c->batch; b++) {
        int64_t start = 0;
        for (int64_t t = 0; t < c->seq; t++) {
            start = ops_uniform() < 0.04 ? t : start;
            v[DOC][b * c->seq + t] = t < 5 && start == 0 ? -1 : (double)start; /* below 0 counts as 0 */
        }
    }
}

static void derive_backward(const void *case_, double *const *v)
{
    derive_documents(case_, v);
    reference_forward(case_, v);
}

static void reference_backward(const void *case_, double *const *v)
{
    const attention_case *c = case_;
    layout l = layout_of(c);
    int hd = c->head_dim;
    const double *k, *values;
    view(c, v, &k, &values);
    double *dk = c->fused ? v[DQ] + l.k_at : v[DK], *dv = c->fused ? v[DQ] + l.v_at : v[DV];
    double *p = malloc((size_t)c->seq * sizeof *p), o[256], lse;
    for (int64_t r = 0; r < l.rows; r++) {
        for (int64_t i = 0; i < l.q_stride; i++)
            v[DQ][r * l.q_stride + i] = 0;
        for (int64_t i = 0; i < l.k; i++)
            dk[r * l.k_stride + i] = 0;
        for (int64_t i = 0; i < l.v; i++)
            dv[r * l.v_stride + i] = 0;
    }
    for (int64_t b = 0; b < c->batch; b++) {
        for (int h = 0; h < c->heads; h++) {
            int kv = h / (c->heads / c->kv_heads);
            for (int64_t t = 0; t < c->seq; t++) {
                int64_t row = b * c->seq + t;
                const double *q = v[Q] + row * l.q_stride + h * hd, *d_o = v[DO] + row * l.o + h * l.v_dim;
                attend_row(c, v, b, h, t, p, o, &lse);
                double delta = 0;
                for (int i = 0; i < l.v_dim; i++)
                    delta += d_o[i] * o[i];
                v[DELTA][(b * c->heads + h) * c->seq + t] = delta;
                for (int64_t j = 0; j <= t; j++) {
                    int64_t at = (b * c->seq + j) * l.k_stride + kv * hd, v_at = (b * c->seq + j) * l.v_stride + kv * l.v_dim;
                    double dp = 0;
                    for (int i = 0; i < l.v_dim; i++)
                        dp += d_o[i] * values[v_at + i];
                    double ds = p[j] * (dp - delta) * l.scale;
                    if (c->softcap > 0 && p[j] > 0) /* p = exp(capped score - lse) */
                        ds *= 1 - pow((log(p[j]) + lse) / c->softcap, 2);
                    for (int i = 0; p[j] > 0 && i < l.v_dim; i++)
                        dv[v_at + i] += p[j] * d_o[i];
                    for (int i = 0; p[j] > 0 && i < hd; i++) {
                        dk[at + i] += ds * q[i];
                        v[DQ][row * l.q_stride + h * hd + i] += ds * k[at + i];
                    }
                }
            }
        }
    }
    free(p);
}

static double loss(const void *case_, double *const *v)
{
    const attention_case *c = case_;
    layout l = layout_of(c);
    double *p = malloc((size_t)c->seq * sizeof *p), o[256], lse, sum = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        for (int h = 0; h < c->heads; h++) {
            for (int64_t t = 0; t < c->seq; t++) {
                attend_row(c, v, b, h, t, p, o, &lse);
                for (int i = 0; i < l.v_dim; i++)
                    sum += o[i] * v[DO][(b * c->seq + t) * l.o + h * l.v_dim + i];
            }
        }
    }
    free(p);
    return sum;
}

static qd_attention_args arguments(const attention_case *c, void *const *p)
{
    layout l = layout_of(c);
    size_t size = qd_dtype_size(c->dtype);
    char *q = p[Q], *dq = p[DQ];
    return (qd_attention_args){
        .q = q, .k = c->fused ? q + (size_t)l.k_at * size : p[K], .v = c->fused ? q + (size_t)l.v_at * size : p[V],
        .o = p[O], .lse = p[LSE], .doc_start = p[DOC],
        .batch = c->batch, .seq = c->seq,
        .q_stride = l.q_stride, .k_stride = l.k_stride, .v_stride = l.v_stride, .o_stride = l.o,
        .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim, .v_dim = c->v_dim, .scale = l.scale,
        .dtype = c->dtype,
        .window = c->window, .softcap = (float)c->softcap,
        .d_o = p[DO], .dq = dq, .dk = dq && c->fused ? dq + (size_t)l.k_at * size : p[DK],
        .dv = dq && c->fused ? dq + (size_t)l.v_at * size : p[DV], .delta = p[DELTA],
    };
}

static qd_status run_forward(const qd_kernels *k, qd_stream *stream, const void *c, void *const *p)
{
    qd_attention_args a = arguments(c, p);
    return k->attention_forward(stream, &a);
}
static qd_status run_backward(const qd_kernels *k, qd_stream *stream, const void *c, void *const *p)
{
    qd_attention_args a = arguments(c, p);
    return k->attention_backward(stream, &a);
}

/* GEMMs over the lower triangle, or the window, with rows of `dim` elements. */
static double triangle(const void *p, double dim)
{
    const attention_case *c = p;
    double outside = c->window > 0 ? fmax(0, (double)(c->seq - c->window)) : 0, n = (double)c->seq;
    return 2.0 * (double)c->batch * c->heads * dim * (n * (n + 1) - outside * (outside + 1)) / 2;
}
static double flops_forward(const void *p)
{
    const attention_case *c = p;
    return triangle(p, c->head_dim + qd_attention_v_dim(c->head_dim, c->v_dim));
}
/* Scores, dq and dk; dv and the gradients of the weights. */
static double flops_backward(const void *p)
{
    const attention_case *c = p;
    return triangle(p, 3.0 * c->head_dim + 2.0 * qd_attention_v_dim(c->head_dim, c->v_dim));
}

static const attention_case cases[] = {
    {1, 1, 1, 1, 2, QD_F32, false, false, 0, 0, 0, 0, 0},
    {2, 3, 2, 1, 6, QD_F32, false, false, 0, 0, 0, 0, 0},
    {1, 17, 3, 3, 16, QD_F32, false, true, 0, 0, 0, 0, 0},
    {2, 33, 4, 2, 18, QD_F32, true, false, 0, 0, 0, 0, 0},
    {1, 96, 2, 2, 64, QD_F32, false, true, 0, 0, 0, 0, 0},
    {1, 97, 2, 1, 64, QD_F32, true, true, 0, 0, 0, 0, 0},
    {1, 203, 2, 2, 32, QD_F32, false, false, 6, 0, 0, 0, 0}, /* several blocks, sharp */
    {1, 300, 2, 1, 20, QD_F32, true, false, 0, 0, 0, 0, 0},
    {1, 50, 1, 1, 256, QD_F32, false, false, 0, 0, 0, 0, 0},
    {1, 41, 2, 1, 130, QD_F32, false, false, 0, 0, 0, 0, 0},
    {2, 40, 4, 1, 80, QD_F32, true, true, 0, 0, 0, 0, 0},
    {1, 130, 2, 2, 64, QD_BF16, false, true, 0, 0, 0, 0, 0},
    {1, 101, 4, 2, 22, QD_BF16, true, false, 0, 0, 0, 0, 0},
};
/* Without numerical gradients, which would take too long. */
static const attention_case long_cases[] = {
    {1, 420, 20, 1, 64, QD_BF16, true, false, 0, 0, 0, 0, 0}, /* dq does not fit into the CPU's workspace: two passes */
    {1, 200, 8, 1, 128, QD_BF16, true, false, 0, 0, 0, 0, 0}, /* dq fits, but not together with the packed queries */
    {1, 200, 8, 1, 256, QD_F32, true, false, 0, 0, 0, 0, 0},  /* neither fits */
    {2, 192, 12, 12, 64, QD_F32, false, true, 0, 0, 0, 0, 0}, /* results that the CPU writes with non-temporal stores */
    /* shapes of models, around the tiles of the accelerator's kernels */
    {2, 192, 4, 4, 64, QD_BF16, false, true, 0, 0, 0, 0, 0},
    {2, 256, 4, 2, 128, QD_BF16, false, true, 0, 0, 0, 0, 0},
    {1, 200, 4, 2, 128, QD_BF16, true, true, 0, 0, 0, 0, 0},
    {2, 150, 2, 1, 96, QD_BF16, true, false, 0, 0, 0, 0, 0},
    {1, 129, 3, 1, 96, QD_BF16, false, false, 0, 0, 0, 0, 0},
    {1, 77, 2, 2, 40, QD_BF16, true, true, 0, 0, 0, 0, 0},
    {1, 65, 2, 2, 160, QD_BF16, true, true, 0, 0, 0, 0, 0},
    {2, 130, 4, 2, 128, QD_F32, true, true, 0, 0, 0, 0, 0},
};
/* Values of another size than queries and keys: latent attention. */
static const attention_case value_cases[] = {
    {2, 9, 2, 1, 6, QD_F32, false, false, 0, 0, 0, 0, 3},
    {1, 40, 3, 1, 24, QD_F32, true, true, 0, 0, 0, 0, 16},
    {1, 37, 2, 1, 18, QD_F32, false, true, 0, 9, 4, 0.3, 33},
    {1, 51, 2, 2, 16, QD_BF16, true, true, 0, 0, 0, 0.1, 7},
};
static const attention_case long_value_cases[] = {
    {1, 130, 2, 2, 192, QD_F32, true, true, 0, 0, 0, 0, 128},
    {1, 200, 2, 2, 16, QD_F32, false, false, 0, 0, 0, 0, 150},
    {2, 256, 4, 4, 192, QD_BF16, false, true, 0, 0, 0, 0.1, 128},
    {1, 300, 2, 2, 192, QD_BF16, true, true, 0, 0, 0, 0, 128},
    {2, 150, 4, 2, 192, QD_BF16, true, true, 0, 70, 5, 0, 128},
    {1, 129, 4, 4, 48, QD_BF16, false, true, 0, 0, 0, 0, 32},
    {1, 100, 2, 1, 24, QD_BF16, true, false, 0, 0, 0, 0, 80},
    {1, 90, 2, 2, 176, QD_BF16, true, true, 0, 0, 0, 0, 136},
};
/* Windows, soft-caps and scales; the last ones without numerical gradients. Windows of one key,
 * within a block, across blocks, and longer than the sequence. */
static const attention_case score_cases[] = {
    {1, 9, 1, 1, 2, QD_F32, false, false, 0, 1, 0, 0, 0},
    {2, 40, 2, 1, 6, QD_F32, false, false, 0, 7, 0, 0, 0},
    {1, 67, 4, 2, 18, QD_F32, true, true, 0, 13, 3, 0.2, 0},
    {1, 110, 2, 1, 20, QD_F32, true, false, 0, 100, 0, 0.3, 0},
    {1, 33, 2, 2, 16, QD_F32, false, true, 3, 0, 5, 0, 0},
    {1, 25, 3, 1, 10, QD_F32, true, false, 0, 64, 2, 0, 0},
    {1, 90, 2, 2, 24, QD_BF16, true, true, 0, 11, 4, 0, 0},
};
static const attention_case long_score_cases[] = {
    {1, 500, 2, 1, 32, QD_F32, false, false, 0, 96, 0, 0, 0},
    {2, 431, 4, 2, 64, QD_F32, true, true, 0, 37, 0, 0, 0},
    {1, 700, 2, 2, 34, QD_F32, false, true, 2, 300, 10, 0.5, 0},
    {1, 420, 20, 1, 64, QD_BF16, true, false, 0, 50, 20, 0, 0},
    {1, 200, 8, 1, 256, QD_F32, true, false, 0, 120, 0, 0, 0},
    {2, 192, 12, 12, 64, QD_F32, false, true, 0, 20, 0, 0, 0},
    /* shapes of models, around the tiles of the accelerator's kernels; some with documents */
    {2, 384, 4, 2, 128, QD_BF16, false, true, 0, 100, 0, 0, 0},
    {1, 320, 2, 2, 64, QD_BF16, false, true, 0, 0, 5, 0, 0},
    {1, 500, 4, 2, 256, QD_BF16, false, true, 0, 130, 8, 0.1, 0},
    {1, 512, 4, 2, 256, QD_BF16, false, true, 0, 130, 8, 0.1, 0},
    {2, 256, 2, 1, 256, QD_BF16, false, false, 0, 0, 0, 0, 0},
    {1, 256, 2, 2, 64, QD_BF16, false, true, 0, 0, 5, 0, 0},
    {1, 384, 2, 1, 128, QD_BF16, false, true, 0, 200, 10, 0, 0},
    {1, 300, 4, 2, 256, QD_BF16, true, true, 0, 70, 8, 0.1, 0},
    {1, 200, 2, 1, 192, QD_BF16, true, false, 0, 0, 0, 0, 0},
    {1, 333, 2, 1, 96, QD_BF16, true, true, 0, 33, 0, 0.2, 0},
};
static const attention_case speed_cases[] = {
    {4, 1024, 12, 12, 64, QD_F32, false, true, 0, 0, 0, 0, 0},
    {4, 1024, 12, 12, 64, QD_BF16, false, true, 0, 0, 0, 0, 0},
    {1, 2048, 16, 4, 128, QD_F32, false, true, 0, 0, 0, 0, 0},
    {1, 4096, 8, 2, 64, QD_F32, false, true, 0, 0, 0, 0, 0},
    {1, 4096, 8, 2, 64, QD_F32, false, true, 0, 512, 0, 0, 0},
    {1, 4096, 8, 2, 64, QD_F32, false, true, 0, 0, 50, 0, 0},
    {1, 4096, 8, 4, 256, QD_BF16, false, true, 0, 0, 0, 0, 0},
    {1, 4096, 8, 4, 256, QD_BF16, false, true, 0, 1024, 50, 0, 0},
    {4, 4096, 16, 16, 192, QD_BF16, false, true, 0, 0, 0, 0, 128},
    {4, 4096, 16, 16, 192, QD_BF16, true, true, 0, 0, 0, 0, 128},
};

/* A score beyond the largest number must show in the result, so that divergence is detected. */
static void overflow_shows(void **state)
{
    (void)state;
    enum { ROWS = 40, SIZE = 16, AT = 20 };
    for (int s = 0; s < OPS_CPU_ISAS; s++) {
        qd_device *device = ops_cpu(ops_cpu_isas[s]);
        float qkv[3][ROWS * SIZE], o[ROWS * SIZE], lse[ROWS];
        if (!device)
            continue;
        for (int i = 0; i < 3 * ROWS * SIZE; i++)
            qkv[i / (ROWS * SIZE)][i % (ROWS * SIZE)] = (float)ops_normal();
        for (int i = 0; i < SIZE; i++)
            qkv[0][AT * SIZE + i] = qkv[1][AT * SIZE + i] = 1e30f;
        qd_attention_args a = {.q = qkv[0],
                               .k = qkv[1],
                               .v = qkv[2],
                               .o = o,
                               .lse = lse,
                               .batch = 1,
                               .seq = ROWS,
                               .heads = 1,
                               .kv_heads = 1,
                               .head_dim = SIZE,
                               .q_stride = SIZE,
                               .k_stride = SIZE,
                               .v_stride = SIZE,
                               .o_stride = SIZE,
                               .scale = 0.25f,
                               .dtype = QD_F32};
        ops_assert_ok(qd_device_kernels(device)->attention_forward(qd_device_compute_stream(device), &a));
        for (int i = 0; i < SIZE; i++)
            if (!isfinite(o[(AT - 1) * SIZE + i]) || isfinite(o[AT * SIZE + i]))
                fail_msg("%s: %g before the row that is too large, %g in it", ops_cpu_isas[s], (double)o[(AT - 1) * SIZE + i],
                         (double)o[AT * SIZE + i]);
    }
}

static void refuses_bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    float x[64] = {0};
    qd_attention_args a = {.q = x, .k = x, .v = x, .o = x + 32, .lse = x + 48, .batch = 1, .seq = 1, .heads = 2,
                           .kv_heads = 1, .head_dim = 4, .q_stride = 8, .k_stride = 4, .v_stride = 4, .o_stride = 8};
    ops_assert_ok(k->attention_forward(stream, &a));
    a.head_dim = 3;
    ops_assert_fails(k->attention_forward(stream, &a), QD_UNSUPPORTED, "head_dim 3");
    a.head_dim = 258;
    ops_assert_fails(k->attention_backward(stream, &a), QD_UNSUPPORTED, "even sizes from 2 to 256");
    a.head_dim = 4;
    a.kv_heads = 3;
    ops_assert_fails(k->attention_forward(stream, &a), QD_USAGE, "multiple of kv_heads");
    a.kv_heads = 1;
    a.o_stride = 7;
    ops_assert_fails(k->attention_forward(stream, &a), QD_USAGE, "strides");
    a.o_stride = 8;
    a.window = -1;
    ops_assert_fails(k->attention_forward(stream, &a), QD_USAGE, "window -1");
}

#define COUNT_OF(x) (sizeof(x) / sizeof *(x))
#define FORWARD                                                                                             \
    .kernel = "attention_forward", .case_size = sizeof *cases, .describe = describe, .tensors = tensors_forward,       \
    .derive = derive_documents, .reference = reference_forward, .run = run_forward, .flops = flops_forward
#define BACKWARD                                                                                            \
    .kernel = "attention_backward", .case_size = sizeof *cases, .describe = describe, .tensors = tensors_backward,     \
    .derive = derive_backward, .reference = reference_backward, .run = run_backward, .flops = flops_backward
static const ops_op ops[] = {
    {FORWARD, .cases = cases, .case_count = COUNT_OF(cases), .speed_cases = speed_cases, .speed_count = COUNT_OF(speed_cases)},
    {BACKWARD, .cases = cases, .case_count = COUNT_OF(cases), .speed_cases = speed_cases,
     .speed_count = COUNT_OF(speed_cases), .loss = loss, .gradients = {{Q, DQ}, {K, DK}, {V, DV}}, .gradient_count = 3},
    {FORWARD, .cases = long_cases, .case_count = COUNT_OF(long_cases)},
    {BACKWARD, .cases = long_cases, .case_count = COUNT_OF(long_cases)},
    {FORWARD, .cases = value_cases, .case_count = COUNT_OF(value_cases)},
    {BACKWARD, .cases = value_cases, .case_count = COUNT_OF(value_cases), .loss = loss,
     .gradients = {{Q, DQ}, {K, DK}, {V, DV}}, .gradient_count = 3},
    {FORWARD, .cases = long_value_cases, .case_count = COUNT_OF(long_value_cases)},
    {BACKWARD, .cases = long_value_cases, .case_count = COUNT_OF(long_value_cases)},
    {FORWARD, .cases = score_cases, .case_count = COUNT_OF(score_cases)},
    {BACKWARD, .cases = score_cases, .case_count = COUNT_OF(score_cases), .loss = loss,
     .gradients = {{Q, DQ}, {K, DK}, {V, DV}}, .gradient_count = 3},
    {FORWARD, .cases = long_score_cases, .case_count = COUNT_OF(long_score_cases)},
    {BACKWARD, .cases = long_score_cases, .case_count = COUNT_OF(long_score_cases)},
};

int main(int argc, char **argv)
{
    const struct CMUnitTest more[] = {cmocka_unit_test(overflow_shows), cmocka_unit_test(refuses_bad_arguments)};
    return ops_main(argc, argv, ops, COUNT_OF(ops), more, COUNT_OF(more));
}
