/* Attention of a rank's rows against the keys of all ranks, one rank's part after another: the
 * running result and the summed gradients against attention over whole sequences. Unaligned runs of
 * positions, documents, every kind of head size. */
#include "spec/layout/context.h"
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct part_case {
    int64_t batch, seq;
    int cp, rank; /* whose queries */
    int heads, kv_heads, head_dim;
    qd_dtype dtype;
    bool documents;
    bool gathered; /* keys of all ranks in the order of positions, as one part; else one part per rank, downwards from this rank */
    int64_t dealt; /* 0: positions are sharded as in training; n: round robin, n at a time, which makes many runs */
    int64_t window; /* 0: none */
    double softcap; /* 0: none */
    int v_dim;      /* of values; 0: head_dim */
} part_case;
enum { RUNS_MOST = 64 };

/* Keys, values and their gradients: all rows of rank 0 (batch, rows), then those of rank 1, … */
enum { Q, K, V, O, LSE, DOC, DO, OUT, DQ, DK, DV, DELTA, COUNT };

static void describe(const void *p, char *text, size_t size)
{
    const part_case *c = p;
    snprintf(text, size, "B%lld T%lld rank %d of %d H%d/%d D%d %s%s%s%s", (long long)c->batch, (long long)c->seq, c->rank, c->cp,
             c->heads, c->kv_heads, c->head_dim, qd_dtype_name(c->dtype), c->documents ? " documents" : "",
             c->gathered ? " gathered" : "", c->dealt ? " dealt" : "");
    size_t used = strlen(text);
    if (c->window || c->softcap > 0)
        snprintf(text + used, size - used, " W%lld cap %g", (long long)c->window, c->softcap);
    used = strlen(text);
    if (c->v_dim)
        snprintf(text + used, size - used, " V%d", c->v_dim);
}

static int value_dim(const part_case *c)
{
    return qd_attention_v_dim(c->head_dim, c->v_dim);
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int runs_of(const part_case *c, int rank, qd_row_run *runs)
{
    if (!c->dealt)
        return qd_context_runs(c->seq, c->cp, rank, runs);
    int count = 0;
    for (int64_t at = rank * c->dealt, row = 0; at < c->seq; row += runs[count++].count, at += c->cp * c->dealt)
        runs[count] = (qd_row_run){row, at, least(c->dealt, c->seq - at)};
    assert_true(count <= RUNS_MOST);
    return count;
}

static int64_t rows_of(const part_case *c, int rank)
{
    qd_row_run runs[RUNS_MOST];
    int count = runs_of(c, rank, runs);
    return count ? runs[count - 1].row + runs[count - 1].count : 0;
}

static int64_t q_seq(const part_case *c)
{
    return rows_of(c, c->rank);
}

/* Gap between rows of q: aligned for tensor cores, or odd. */
static int64_t gap(const part_case *c)
{
    return c->dtype == QD_BF16 && c->head_dim % 8 == 0 ? 8 : 3;
}

/* Row of K and V at which the part of a rank begins. */
static int64_t part_row(const part_case *c, int rank)
{
    int64_t row = 0;
    for (int r = 0; r < rank; r++)
        row += c->batch * rows_of(c, r);
    return row;
}

/* Row of K and V that holds a position. */
static int64_t key_row(const part_case *c, int64_t b, int64_t position)
{
    if (c->gathered)
        return b * c->seq + position;
    for (int rank = 0; rank < c->cp; rank++) {
        qd_row_run runs[RUNS_MOST];
        for (int i = runs_of(c, rank, runs) - 1; i >= 0; i--)
            if (position >= runs[i].position && position < runs[i].position + runs[i].count)
                return part_row(c, rank) + b * rows_of(c, rank) + runs[i].row + position - runs[i].position;
    }
    return -1;
}

static int64_t position_of(const part_case *c, int64_t row)
{
    qd_row_run runs[RUNS_MOST];
    int count = runs_of(c, c->rank, runs);
    for (int i = 0; i < count; i++)
        if (row < runs[i].row + runs[i].count)
            return runs[i].position + row - runs[i].row;
    return -1;
}

static int list(const part_case *c, ops_tensor *t, bool backward)
{
    int64_t rows = c->batch * q_seq(c), keys = c->batch * c->seq, q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    int64_t values = c->kv_heads * value_dim(c), out = c->heads * value_dim(c);
    ops_role given = backward ? OPS_IN : OPS_ABSENT, gradient = backward ? OPS_INOUT : OPS_ABSENT;
    double floor = 0.1;
    t[Q] = (ops_tensor){"q", OPS_IN, c->dtype, rows, q, q + gap(c), 0, 0, 0, false, 0, 0};
    t[K] = (ops_tensor){"k", OPS_IN, c->dtype, keys, kv, 0, 0, 0, 0, false, 0, 0};
    t[V] = (ops_tensor){"v", OPS_IN, c->dtype, keys, values, 0, 0, 0, 0, false, 0, 0};
    t[O] = (ops_tensor){"o", backward ? OPS_ABSENT : OPS_OUT, QD_F32, rows, out, 0, 0, 0, 0, false, 0, 0};
    t[LSE] = (ops_tensor){"lse", backward ? OPS_IN : OPS_OUT, QD_F32, c->batch * c->heads, q_seq(c), 0, 0, 0, 0, false, 0, 0.1};
    t[DOC] = (ops_tensor){"doc_start", c->documents ? OPS_IN : OPS_ABSENT, QD_I32, 1, rows, 0, 0, 0, 0, false, 0, 0};
    t[DO] = (ops_tensor){"d_o", given, c->dtype, rows, out, 0, 0, 0, 0, false, 0, 0};
    t[OUT] = (ops_tensor){"o", given, c->dtype, rows, out, 0, 0, 0, 0, false, 0, 0};
    t[DQ] = (ops_tensor){"dq", gradient, QD_F32, rows, q, q + gap(c), 0, 0, 0, false, 0, floor};
    t[DK] = (ops_tensor){"dk", gradient, QD_F32, keys, kv, 0, 0, 0, 0, false, 0, floor};
    t[DV] = (ops_tensor){"dv", gradient, QD_F32, keys, values, 0, 0, 0, 0, false, 0, floor};
    t[DELTA] = (ops_tensor){"delta", backward ? OPS_OUT : OPS_ABSENT, QD_F32, c->batch * c->heads, q_seq(c), 0, 0, 0, 0, false, 0, 0.1};
    if (c->dtype == QD_BF16) { /* the kernel reads the rounded o; tensor cores round weights too */
        t[DQ].tol = t[DK].tol = t[DELTA].tol = 1e-2;
        t[O].tol = t[DV].tol = 4e-3;
    }
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

/* p (seq), o (v_dim) and lse of one row of one head. */
static void attend_row(const part_case *c, double *const *v, int64_t b, int h, int64_t row, double *p, double *o, double *lse)
{
    int64_t q_cols = c->heads * c->head_dim + gap(c), kv = c->kv_heads * c->head_dim, t = position_of(c, row);
    int kv_head = h / (c->heads / c->kv_heads), at = kv_head * c->head_dim, hd = c->head_dim, v_dim = value_dim(c);
    const double *q = v[Q] + (b * q_seq(c) + row) * q_cols + h * hd;
    int64_t first = c->documents ? (int64_t)fmax(0, v[DOC][b * q_seq(c) + row]) : 0;
    if (c->window > 0 && t - c->window + 1 > first)
        first = t - c->window + 1;
    double most = -INFINITY, total = 0;
    for (int64_t j = 0; j < c->seq; j++) {
        p[j] = -INFINITY;
        if (j < first || j > t)
            continue;
        double dot = 0;
        const double *k = v[K] + key_row(c, b, j) * kv + at;
        for (int i = 0; i < hd; i++)
            dot += q[i] * k[i];
        p[j] = c->softcap > 0 ? c->softcap * tanh(dot / sqrt(hd) / c->softcap) : dot / sqrt(hd);
        most = fmax(most, p[j]);
    }
    for (int64_t j = first; j <= t; j++)
        total += exp(p[j] - most);
    *lse = most + log(total);
    for (int i = 0; i < v_dim; i++)
        o[i] = 0;
    for (int64_t j = 0; j < c->seq; j++) {
        p[j] = exp(p[j] - *lse);
        const double *value = v[V] + (key_row(c, b, j) * c->kv_heads + kv_head) * v_dim;
        for (int i = 0; p[j] > 0 && i < v_dim; i++)
            o[i] += p[j] * value[i];
    }
}

static void forward_into(const part_case *c, double *const *v, double *o)
{
    double *p = malloc((size_t)c->seq * sizeof *p);
    for (int64_t b = 0; b < c->batch; b++)
        for (int h = 0; h < c->heads; h++)
            for (int64_t r = 0; r < q_seq(c); r++)
                attend_row(c, v, b, h, r, p, o + ((b * q_seq(c) + r) * c->heads + h) * value_dim(c),
                           &v[LSE][(b * c->heads + h) * q_seq(c) + r]);
    free(p);
}

static void reference_forward(const void *c, double *const *v)
{
    forward_into(c, v, v[O]);
}

static void derive_documents(const void *case_, double *const *v)
{
    const part_case *c = case_;
    for (int64_t b = 0; c->documents && b < c->batch; b++) {
        int64_t *start = malloc((size_t)c->seq * sizeof *start);
        for (int64_t t = 0; t < c->seq; t++)
            start[t] = t == 0 ? -1 : ops_uniform() < 0.04 ? t : start[t - 1];
        for (int64_t r = 0; r < q_seq(c); r++)
            v[DOC][b * q_seq(c) + r] = (double)start[position_of(c, r)];
        free(start);
    }
}

static void derive_backward(const void *c, double *const *v)
{
    derive_documents(c, v);
    forward_into(c, v, v[OUT]);
}

static void reference_backward(const void *case_, double *const *v)
{
    const part_case *c = case_;
    int hd = c->head_dim, v_dim = value_dim(c);
    int64_t q_cols = c->heads * hd, kv_cols = c->kv_heads * hd;
    double *p = malloc((size_t)c->seq * sizeof *p), o[256], lse, scale = 1 / sqrt(hd);
    for (int64_t b = 0; b < c->batch; b++) {
        for (int h = 0; h < c->heads; h++) {
            for (int64_t r = 0; r < q_seq(c); r++) {
                int64_t row = b * q_seq(c) + r;
                const double *q = v[Q] + row * (q_cols + gap(c)) + h * hd, *d_o = v[DO] + (row * c->heads + h) * v_dim;
                attend_row(c, v, b, h, r, p, o, &lse);
                double delta = 0;
                for (int i = 0; i < v_dim; i++)
                    delta += d_o[i] * o[i];
                v[DELTA][(b * c->heads + h) * q_seq(c) + r] = delta;
                for (int64_t j = 0; j <= position_of(c, r); j++) {
                    int64_t key = key_row(c, b, j), kv_head = h / (c->heads / c->kv_heads), at = key * kv_cols + kv_head * hd;
                    int64_t v_at = (key * c->kv_heads + kv_head) * v_dim;
                    double dp = 0;
                    for (int i = 0; i < v_dim; i++)
                        dp += d_o[i] * v[V][v_at + i];
                    double ds = p[j] * (dp - delta) * scale;
                    if (c->softcap > 0 && p[j] > 0) /* p = exp(capped score - lse) */
                        ds *= 1 - pow((log(p[j]) + lse) / c->softcap, 2);
                    for (int i = 0; p[j] > 0 && i < v_dim; i++)
                        v[DV][v_at + i] += p[j] * d_o[i];
                    for (int i = 0; p[j] > 0 && i < hd; i++) {
                        v[DK][at + i] += ds * q[i];
                        v[DQ][row * (q_cols + gap(c)) + h * hd + i] += ds * v[K][at + i];
                    }
                }
            }
        }
    }
    free(p);
}

static double loss(const void *case_, double *const *v)
{
    const part_case *c = case_;
    double *p = malloc((size_t)c->seq * sizeof *p), o[256], lse, sum = 0;
    for (int64_t b = 0; b < c->batch; b++)
        for (int h = 0; h < c->heads; h++)
            for (int64_t r = 0; r < q_seq(c); r++) {
                attend_row(c, v, b, h, r, p, o, &lse);
                for (int i = 0; i < value_dim(c); i++)
                    sum += o[i] * v[DO][((b * q_seq(c) + r) * c->heads + h) * value_dim(c) + i];
            }
    free(p);
    return sum;
}

typedef qd_status part_kernel(qd_stream *stream, const qd_attention_part_args *a);

/* One call for each part of the keys. */
static qd_status run_parts(part_kernel *kernel, qd_stream *stream, const part_case *c, void *const *p)
{
    qd_row_run q_runs[RUNS_MOST], k_runs[RUNS_MOST];
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, values = c->kv_heads * value_dim(c);
    size_t size = qd_dtype_size(c->dtype);
    qd_attention_part_args a = {
        .q = p[Q],
        .o = p[O],
        .lse = p[LSE],
        .doc_start = p[DOC],
        .d_o = p[DO],
        .delta = p[DELTA],
        .dq = p[DQ],
        .q_runs = q_runs,
        .k_runs = k_runs,
        .q_run_count = runs_of(c, c->rank, q_runs),
        .batch = c->batch,
        .q_seq = q_seq(c),
        .q_stride = q + gap(c),
        .k_stride = kv,
        .v_stride = values,
        .o_stride = c->heads * value_dim(c),
        .dq_stride = q + gap(c),
        .dk_stride = kv,
        .dv_stride = values,
        .heads = c->heads,
        .kv_heads = c->kv_heads,
        .head_dim = c->head_dim,
        .v_dim = c->v_dim,
        .scale = (float)(1 / sqrt(c->head_dim)),
        .softcap = (float)c->softcap,
        .window = c->window,
        .dtype = c->dtype,
    };
    int parts = c->gathered ? 1 : c->cp;
    for (int i = 0; i < parts; i++) {
        int of = (c->rank - i + c->cp) % c->cp;
        int64_t row = c->gathered ? 0 : part_row(c, of);
        a.k_seq = c->gathered ? c->seq : rows_of(c, of);
        a.k_run_count = c->gathered ? qd_context_runs(c->seq, 1, 0, k_runs) : runs_of(c, of, k_runs);
        a.k = (char *)p[K] + (size_t)(row * kv) * size;
        a.v = (char *)p[V] + (size_t)(row * values) * size;
        a.dk = p[DK] ? (float *)p[DK] + row * kv : NULL;
        a.dv = p[DV] ? (float *)p[DV] + row * values : NULL;
        a.begin = i == 0;
        QD_TRY(kernel(stream, &a));
    }
    return QD_OK;
}

static qd_status run_forward(const qd_kernels *k, qd_stream *stream, const void *c, void *const *p)
{
    return run_parts(k->attention_part_forward, stream, c, p);
}

static qd_status run_backward(const qd_kernels *k, qd_stream *stream, const void *case_, void *const *p)
{
    const part_case *c = case_;
    int64_t q = c->heads * c->head_dim, out = c->heads * value_dim(c);
    QD_TRY(k->attention_delta(stream, &(qd_attention_args){
        .o = p[OUT], .d_o = p[DO], .delta = p[DELTA], .batch = c->batch, .seq = q_seq(c), .q_stride = q, .k_stride = q, .v_stride = out,
        .o_stride = out, .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim, .v_dim = c->v_dim, .dtype = c->dtype}));
    return run_parts(k->attention_part_backward, stream, case_, p);
}

static const part_case cases[] = {
    {1, 4, 2, 0, 1, 1, 2, QD_F32, false, false, 0, 0, 0, 0},
    {2, 13, 2, 1, 2, 1, 6, QD_F32, false, false, 0, 0, 0, 0},
    {1, 41, 3, 0, 3, 3, 16, QD_F32, true, false, 0, 0, 0, 0},
    {1, 41, 3, 2, 2, 1, 18, QD_F32, false, true, 0, 0, 0, 0},
    {2, 67, 4, 1, 4, 2, 20, QD_F32, true, false, 0, 0, 0, 0},
    {1, 201, 2, 0, 2, 1, 18, QD_F32, false, false, 0, 0, 0, 0},
    {1, 205, 2, 1, 1, 1, 24, QD_F32, true, false, 0, 0, 0, 0},
    {1, 205, 2, 0, 1, 1, 24, QD_F32, true, true, 0, 0, 0, 0},
    {1, 60, 2, 1, 1, 1, 256, QD_F32, false, false, 0, 0, 0, 0},
    {1, 120, 2, 0, 4, 2, 64, QD_BF16, true, false, 0, 0, 0, 0},
    {1, 99, 4, 3, 2, 1, 22, QD_BF16, false, true, 0, 0, 0, 0},
    {1, 150, 2, 1, 2, 1, 16, QD_F32, true, false, 4, 0, 0, 0}, /* 19 runs of 4 */
    {1, 41, 2, 0, 2, 2, 10, QD_F32, true, false, 0, 0, 0, 7},
    {1, 50, 2, 1, 2, 1, 6, QD_BF16, false, true, 0, 0, 0, 9},
};
/* Without numerical gradients, which would take too long. */
static const part_case long_cases[] = {
    {1, 700, 2, 0, 2, 1, 64, QD_F32, true, false, 0, 0, 0, 0},
    {1, 1001, 4, 1, 1, 1, 32, QD_F32, false, false, 0, 0, 0, 0},
    {2, 577, 3, 1, 2, 1, 48, QD_F32, true, true, 0, 0, 0, 0},
    /* shapes of models, around the tiles of the accelerator's kernels */
    {2, 512, 2, 0, 4, 2, 64, QD_BF16, false, false, 0, 0, 0, 0},
    {2, 512, 2, 1, 4, 1, 64, QD_BF16, true, false, 0, 0, 0, 0},
    {1, 777, 4, 2, 4, 4, 128, QD_BF16, false, false, 0, 0, 0, 0},
    {1, 530, 2, 1, 4, 2, 128, QD_BF16, true, true, 0, 0, 0, 0},
    {2, 389, 3, 1, 2, 1, 96, QD_BF16, true, false, 0, 0, 0, 0},
    {1, 300, 2, 0, 3, 1, 96, QD_BF16, false, true, 0, 0, 0, 0},
    {1, 301, 2, 1, 2, 2, 40, QD_BF16, true, false, 0, 0, 0, 0},
    {1, 130, 2, 0, 2, 1, 160, QD_BF16, true, false, 0, 0, 0, 0},
    {2, 260, 4, 0, 4, 2, 128, QD_F32, true, false, 0, 0, 0, 0},
    {1, 600, 3, 0, 2, 1, 64, QD_BF16, false, false, 11, 0, 0, 0}, /* 19 runs of 11 */
    {1, 300, 2, 1, 2, 2, 192, QD_BF16, false, false, 0, 0, 0, 128}, /* latent attention */
    {2, 260, 2, 0, 2, 2, 192, QD_BF16, true, true, 0, 0, 0, 128},
    {1, 200, 2, 1, 2, 2, 192, QD_F32, true, false, 0, 0, 0, 128},
    {1, 200, 3, 1, 2, 1, 48, QD_BF16, true, false, 0, 0, 0, 32},
};
/* Windows shorter and longer than the rows of a rank, so that some parts are wholly outside. */
static const part_case score_cases[] = {
    {1, 13, 2, 1, 2, 1, 6, QD_F32, false, false, 0, 1, 0, 0},
    {1, 64, 4, 1, 2, 1, 8, QD_F32, false, false, 0, 5, 0, 0},
    {2, 67, 4, 2, 4, 2, 20, QD_F32, true, false, 0, 9, 3, 0},
    {1, 41, 3, 2, 2, 1, 18, QD_F32, false, true, 0, 12, 0, 0},
    {1, 120, 2, 0, 2, 2, 16, QD_F32, true, false, 0, 70, 4, 0},
    {1, 99, 4, 3, 2, 1, 22, QD_BF16, false, true, 0, 30, 0, 0},
    {1, 80, 2, 1, 2, 1, 16, QD_F32, true, false, 4, 6, 2, 0},
};
static const part_case long_score_cases[] = {
    {1, 1001, 4, 1, 1, 1, 32, QD_F32, false, false, 0, 60, 0, 0},
    {1, 700, 2, 0, 2, 1, 64, QD_F32, true, false, 0, 250, 10, 0},
    {2, 577, 3, 1, 2, 1, 48, QD_F32, true, true, 0, 33, 0, 0},
    {1, 400, 2, 1, 4, 2, 128, QD_BF16, false, false, 0, 100, 0, 0},
    {1, 300, 2, 0, 2, 1, 256, QD_BF16, true, true, 0, 90, 8, 0},
};
static const part_case speed_cases[] = {
    {1, 4096, 2, 0, 8, 2, 64, QD_F32, false, false, 0, 0, 0, 0},
    {1, 4096, 2, 0, 8, 2, 64, QD_F32, false, true, 0, 0, 0, 0},
    {1, 4096, 2, 0, 8, 2, 64, QD_BF16, false, false, 0, 0, 0, 0},
    {1, 4096, 2, 0, 8, 2, 128, QD_BF16, false, false, 0, 0, 0, 0},
    {1, 4096, 2, 0, 8, 2, 128, QD_BF16, true, false, 0, 0, 0, 0},
    {1, 8192, 2, 0, 16, 16, 192, QD_BF16, false, false, 0, 0, 0, 128},
};

static double triangle(const void *p, double dim)
{
    const part_case *c = p;
    double pairs = 0;
    for (int64_t r = 0; r < q_seq(c); r++)
        pairs += (double)position_of(c, r) + 1;
    return 2.0 * (double)c->batch * c->heads * dim * pairs;
}
static double flops_forward(const void *p)
{
    const part_case *c = p;
    return triangle(p, c->head_dim + value_dim(c));
}
static double flops_backward(const void *p)
{
    const part_case *c = p;
    return triangle(p, 3.0 * c->head_dim + 2.0 * value_dim(c));
}

static void refuses_bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    float x[64] = {0};
    qd_row_run runs[2] = {{0, 5, 1}, {1, 9, 1}};
    qd_attention_part_args a = {.q = x, .k = x, .v = x, .o = x + 32, .lse = x + 48, .batch = 1, .q_seq = 2, .k_seq = 2, .heads = 1,
                                .kv_heads = 1, .head_dim = 4, .q_stride = 4, .k_stride = 4, .v_stride = 4, .o_stride = 4,
                                .q_runs = runs, .k_runs = runs, .q_run_count = 2, .k_run_count = 2, .begin = true};
    ops_assert_ok(k->attention_part_forward(stream, &a));
    a.k_seq = 1;
    ops_assert_fails(k->attention_part_forward(stream, &a), QD_USAGE, "run 1 of keys, rows 1 to 2 at position 9, is not within the 1 rows");
    a.k_seq = 2;
    runs[1].position = 5;
    ops_assert_fails(k->attention_part_forward(stream, &a), QD_USAGE, "runs 0 and 1 of queries overlap");
    runs[1].position = 6;
    ops_assert_fails(k->attention_part_backward(stream, &a), QD_USAGE, "strides dq 0");
}

/* One call of the kernel on host values: q = k = v = (1, 2, 3, 4) at these positions. */
static void attend_once(qd_device *device, int64_t query, int64_t key, bool begin, float o[4], float *lse)
{
    enum { Q_AT = 0, O_AT = 4, LSE_AT = 8, FLOATS = 9 };
    qd_stream *stream = qd_device_compute_stream(device);
    float host[FLOATS] = {1, 2, 3, 4, o[0], o[1], o[2], o[3], *lse};
    qd_row_run q_run = {0, query, 1}, k_run = {0, key, 1};
    void *memory;
    ops_assert_ok(qd_device_alloc(device, sizeof host, &memory));
    ops_assert_ok(qd_copy(stream, memory, host, sizeof host));
    float *at = memory;
    qd_attention_part_args a = {.q = at, .k = at, .v = at, .o = at + O_AT, .lse = at + LSE_AT, .batch = 1, .q_seq = 1, .k_seq = 1,
                                .heads = 1, .kv_heads = 1, .head_dim = 4, .q_stride = 4, .k_stride = 4, .v_stride = 4, .o_stride = 4,
                                .q_runs = &q_run, .k_runs = &k_run, .q_run_count = 1, .k_run_count = 1, .scale = 1, .begin = begin};
    ops_assert_ok(qd_device_kernels(device)->attention_part_forward(stream, &a));
    ops_assert_ok(qd_copy(stream, host, memory, sizeof host));
    ops_assert_ok(qd_stream_wait(stream));
    qd_device_free(device, memory, sizeof host);
    memcpy(o, host + O_AT, 4 * sizeof *o);
    *lse = host[LSE_AT];
}

/* A row that sees none of the keys keeps its running result, or gets 0 and minus infinity if it has
 * none. */
static void rows_that_see_nothing(void **state)
{
    (void)state;
    qd_device *const devices[] = {ops_device(NULL, 1), ops_cuda()};
    for (int i = 0; i < 2 && devices[i]; i++) {
        float o[4] = {5, 6, 7, 8}, lse = 9;
        attend_once(devices[i], 3, 4, false, o, &lse);
        assert_true(o[0] == 5 && lse == 9);
        attend_once(devices[i], 3, 4, true, o, &lse);
        assert_true(o[0] == 0 && o[3] == 0 && lse == -INFINITY);
        attend_once(devices[i], 3, 3, false, o, &lse);
        assert_true(fabsf(o[3] - 4) < 1e-5f && fabsf(lse - 30) < 1e-4f);
    }
}

#define COUNT_OF(x) (sizeof(x) / sizeof *(x))
#define FORWARD                                                                                             \
    .kernel = "attention_part_forward", .case_size = sizeof *cases, .describe = describe, .tensors = tensors_forward, \
    .derive = derive_documents, .reference = reference_forward, .run = run_forward
#define BACKWARD                                                                                            \
    .kernel = "attention_part_backward", .case_size = sizeof *cases, .describe = describe, .tensors = tensors_backward, \
    .derive = derive_backward, .reference = reference_backward, .run = run_backward
static const ops_op ops[] = {
    {FORWARD, .cases = cases, .case_count = COUNT_OF(cases), .speed_cases = speed_cases, .speed_count = COUNT_OF(speed_cases),
     .flops = flops_forward},
    {BACKWARD, .cases = cases, .case_count = COUNT_OF(cases), .speed_cases = speed_cases, .speed_count = COUNT_OF(speed_cases),
     .flops = flops_backward, .loss = loss, .gradients = {{Q, DQ}, {K, DK}, {V, DV}}, .gradient_count = 3},
    {FORWARD, .cases = long_cases, .case_count = COUNT_OF(long_cases)},
    {BACKWARD, .cases = long_cases, .case_count = COUNT_OF(long_cases)},
    {FORWARD, .cases = score_cases, .case_count = COUNT_OF(score_cases)},
    {BACKWARD, .cases = score_cases, .case_count = COUNT_OF(score_cases), .loss = loss,
     .gradients = {{Q, DQ}, {K, DK}, {V, DV}}, .gradient_count = 3},
    {FORWARD, .cases = long_score_cases, .case_count = COUNT_OF(long_score_cases)},
    {BACKWARD, .cases = long_score_cases, .case_count = COUNT_OF(long_score_cases)},
};

int main(int argc, char **argv)
{
    const struct CMUnitTest more[] = {cmocka_unit_test(refuses_bad_arguments), cmocka_unit_test(rows_that_see_nothing)};
    return ops_main(argc, argv, ops, COUNT_OF(ops), more, 2);
}
