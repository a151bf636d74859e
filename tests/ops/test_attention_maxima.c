/* Largest scores of heads that the forward pass of attention keeps, for QK-Clip: whole sequences,
 * and keys in two parts; with the results and log-sum-exps of the same calls, because on a GPU
 * cuDNN computes them in another way then. And the rescaling of heads. */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

typedef struct maxima_case {
    int64_t batch, seq, window;
    int heads, kv_heads, head_dim, v_dim;
    qd_dtype dtype;
    bool parts; /* keys of the first third, then the others */
    bool documents; /* of 37 rows */
} maxima_case;

enum { Q, K, V, O, LSE, MAXIMA, DOC, TENSORS };
#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static void describe(const void *p, char *text, size_t size)
{
    const maxima_case *c = p;
    snprintf(text, size, "%lld x %lld, heads %d/%d, %d/%d, window %lld, %s%s%s", (long long)c->batch, (long long)c->seq, c->heads,
             c->kv_heads, c->head_dim, c->v_dim, (long long)c->window, qd_dtype_name(c->dtype), c->parts ? ", parts" : "",
             c->documents ? ", documents" : "");
}

static int tensors(const void *p, ops_tensor *t)
{
    const maxima_case *c = p;
    int64_t rows = c->batch * c->seq;
    const bool half = c->dtype == QD_BF16; /* tensor cores round sums; probabilities are bf16 */
    t[Q] = (ops_tensor){.name = "q", .role = OPS_IN, .dtype = c->dtype, .rows = rows, .cols = c->heads * c->head_dim, .scale = 2};
    t[K] = (ops_tensor){.name = "k", .role = OPS_IN, .dtype = c->dtype, .rows = rows, .cols = c->kv_heads * c->head_dim, .scale = 2};
    t[V] = (ops_tensor){.name = "v", .role = OPS_IN, .dtype = c->dtype, .rows = rows, .cols = c->kv_heads * c->v_dim};
    t[O] = (ops_tensor){.name = "o", .role = OPS_OUT, .dtype = c->parts ? QD_F32 : c->dtype, .rows = rows, .cols = c->heads * c->v_dim,
                        .tol = half ? 5e-3 : 0};
    const double sums = half ? 2e-5 : 0;
    t[LSE] = (ops_tensor){.name = "lse", .role = OPS_OUT, .dtype = QD_F32, .rows = c->batch * c->heads, .cols = c->seq, .tol = sums};
    t[MAXIMA] = (ops_tensor){.name = "maxima", .role = OPS_INOUT, .dtype = QD_F32, .rows = 1, .cols = c->heads, .tol = sums};
    t[DOC] = (ops_tensor){.name = "doc_start", .role = c->documents ? OPS_IN : OPS_ABSENT, .dtype = QD_I32, .rows = 1, .cols = rows};
    return TENSORS;
}

static float score_scale(const maxima_case *c)
{
    return 1.0f / sqrtf((float)c->head_dim);
}

static int64_t document_start(int64_t t)
{
    return t / 37 * 37;
}

static void derive(const void *p, double *const *v)
{
    const maxima_case *c = p;
    for (int64_t i = 0; i < c->batch * c->seq && c->documents; i++)
        v[DOC][i] = (double)document_start(i % c->seq);
}

/* One row of one head: scores, then its results. */
static double attend(const maxima_case *c, double *const *v, int64_t b, int h, int64_t t)
{
    static double scores[512];
    const int kv = h / (c->heads / c->kv_heads);
    const double *q = v[Q] + ((b * c->seq + t) * c->heads + h) * c->head_dim;
    double *o = v[O] + ((b * c->seq + t) * c->heads + h) * c->v_dim, most = -INFINITY, sum = 0.0;
    int64_t first = c->window > 0 && t >= c->window ? t - c->window + 1 : 0;
    first = c->documents && document_start(t) > first ? document_start(t) : first;
    for (int64_t j = first; j <= t; j++) {
        const double *k = v[K] + ((b * c->seq + j) * c->kv_heads + kv) * c->head_dim;
        scores[j] = 0.0;
        for (int i = 0; i < c->head_dim; i++)
            scores[j] += q[i] * k[i];
        scores[j] *= (double)score_scale(c);
        most = fmax(most, scores[j]);
    }
    memset(o, 0, (size_t)c->v_dim * sizeof *o);
    for (int64_t j = first; j <= t; j++) {
        const double w = exp(scores[j] - most);
        sum += w;
        for (int i = 0; i < c->v_dim; i++)
            o[i] += w * v[V][((b * c->seq + j) * c->kv_heads + kv) * c->v_dim + i];
    }
    for (int i = 0; i < c->v_dim; i++)
        o[i] /= sum;
    v[LSE][(b * c->heads + h) * c->seq + t] = most + log(sum);
    return most;
}

static void reference(const void *p, double *const *v)
{
    const maxima_case *c = p;
    for (int h = 0; h < c->heads; h++)
        for (int64_t b = 0; b < c->batch; b++)
            for (int64_t t = 0; t < c->seq; t++)
                v[MAXIMA][h] = fmax(v[MAXIMA][h], attend(c, v, b, h, t));
}

static qd_status run_parts(const qd_kernels *k, qd_stream *stream, const maxima_case *c, void *const *p)
{
    const int64_t cut = c->seq / 3, size = (int64_t)qd_dtype_size(c->dtype);
    const qd_row_run queries = {0, 0, c->seq}, keys[2] = {{0, 0, cut}, {0, cut, c->seq - cut}};
    for (int part = 0; part < 2; part++) {
        int64_t skipped = keys[part].position * c->kv_heads * size;
        qd_attention_part_args args = {
            .q = p[Q], .k = (char *)p[K] + skipped * c->head_dim, .v = (char *)p[V] + skipped * c->v_dim, .o = p[O], .lse = p[LSE],
            .maxima = p[MAXIMA], .doc_start = p[DOC], .q_runs = &queries, .k_runs = &keys[part], .q_run_count = 1, .k_run_count = 1,
            .batch = 1,
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
        .q = p[Q], .k = p[K], .v = p[V], .o = p[O], .lse = p[LSE], .maxima = p[MAXIMA], .doc_start = p[DOC], .batch = c->batch,
        .seq = c->seq,
        .q_stride = c->heads * c->head_dim, .k_stride = c->kv_heads * c->head_dim, .v_stride = c->kv_heads * c->v_dim,
        .o_stride = c->heads * c->v_dim, .window = c->window, .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim,
        .v_dim = c->v_dim, .scale = score_scale(c), .dtype = c->dtype});
}

/* On a GPU: fp32 multiply-adds; for bf16 cuDNN, or our tensor cores with documents and parts. */
static const maxima_case cases[] = {
    {1, 1, 0, 1, 1, 2, 2, QD_F32, false, false},       {2, 17, 0, 4, 2, 6, 6, QD_F32, false, false},
    {1, 203, 0, 3, 3, 32, 20, QD_F32, false, false},   {2, 301, 0, 2, 1, 20, 20, QD_F32, false, true},
    {1, 300, 7, 2, 2, 16, 16, QD_F32, false, false},   {1, 130, 0, 4, 2, 24, 24, QD_BF16, false, false},
    {1, 310, 0, 4, 2, 18, 18, QD_F32, true, false},    {1, 205, 40, 2, 1, 16, 12, QD_BF16, true, false},
    {2, 199, 0, 2, 2, 192, 128, QD_BF16, false, false}, {1, 256, 0, 2, 1, 128, 128, QD_BF16, false, false},
    {1, 300, 33, 2, 2, 64, 64, QD_BF16, false, false}, {1, 210, 0, 2, 2, 192, 128, QD_BF16, false, true},
    {1, 190, 0, 2, 1, 256, 256, QD_BF16, false, false}, {1, 210, 50, 2, 2, 64, 64, QD_BF16, true, true},
    {1, 210, 0, 2, 2, 192, 128, QD_BF16, true, false}, {1, 90, 0, 2, 1, 256, 256, QD_BF16, true, false},
};

/* Rescaling: elements [first, first + count) of a weight. The master weights of a bf16 parameter
 * are a buffer of their own. */
typedef struct clip_case {
    qd_head_rows rows;
    int heads, kv_heads, head_dim, nope, v_dim;
    int64_t first, count, cols;
    qd_dtype param;
} clip_case;

enum { PARAM, MASTER, SCORES, GRAD_SCALE, CLIP_TENSORS };
static const double limit = 1.5;

static void describe_clip(const void *p, char *text, size_t size)
{
    const clip_case *c = p;
    snprintf(text, size, "rows %d, heads %d/%d of %d, elements %lld + %lld by %lld, %s", (int)c->rows, c->heads, c->kv_heads, c->head_dim,
             (long long)c->first, (long long)c->count, (long long)c->cols, qd_dtype_name(c->param));
}

static int clip_tensors(const void *p, ops_tensor *t)
{
    const clip_case *c = p;
    t[PARAM] = (ops_tensor){.name = "param", .role = c->param == QD_BF16 ? OPS_INOUT : OPS_ABSENT, .dtype = QD_BF16, .cols = c->count};
    t[MASTER] = (ops_tensor){.name = "master", .role = OPS_INOUT, .dtype = QD_F32, .cols = c->count};
    t[SCORES] = (ops_tensor){.name = "scores", .role = OPS_IN, .dtype = QD_F32, .cols = c->heads};
    t[GRAD_SCALE] = (ops_tensor){.name = "grad_scale", .role = OPS_IN, .dtype = QD_F64, .cols = 1};
    return CLIP_TENSORS;
}

/* Heads below and above the limit, and one whose score is infinite. */
static void derive_clip(const void *p, double *const *v)
{
    const clip_case *c = p;
    for (int h = 0; h < c->heads; h++)
        v[SCORES][h] = h == 5 ? INFINITY : h % 3 == 0 ? 0.5 : 1.6 + h;
    for (int64_t i = 0; i < c->count && c->param == QD_BF16; i++)
        v[PARAM][i] = v[MASTER][i];
}

static double gamma_of(double score)
{
    return score > limit && !isinf(score) ? limit / score : 1.0;
}

/* In terms of what every head's scores must be multiplied by, gamma of the head. */
static double row_factor(const clip_case *c, const double *scores, int64_t row)
{
    const int64_t group = c->heads / c->kv_heads, each = c->nope + c->v_dim;
    const bool query = c->rows == QD_HEAD_ROWS_QUERY || c->rows == QD_HEAD_ROWS_LATENT_QUERY;
    const int64_t head = c->rows == QD_HEAD_ROWS_LATENT_KEY ? row / each : query ? row / c->head_dim : row / c->head_dim * group;
    double key = 1.0;
    for (int64_t i = head / group * group; i < head / group * group + group; i++)
        key = fmin(key, sqrt(gamma_of(scores[i])));
    if (c->rows == QD_HEAD_ROWS_LATENT_KEY)
        return row % each < c->nope ? key : 1.0;
    if (c->rows == QD_HEAD_ROWS_LATENT_QUERY && row % c->head_dim >= c->nope)
        return gamma_of(scores[head]);
    return query ? gamma_of(scores[head]) / key : key;
}

static void clip_reference(const void *p, double *const *v)
{
    const clip_case *c = p;
    for (int64_t i = 0; i < c->count; i++) {
        const double factor = row_factor(c, v[SCORES], (c->first + i) / c->cols);
        v[MASTER][i] *= factor;
        if (c->param == QD_BF16 && factor != 1.0)
            v[PARAM][i] = v[MASTER][i];
    }
}

static qd_status run_clip(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const clip_case *c = p;
    return k->head_clip(stream, &(qd_head_clip_args){
        .param = c->param == QD_BF16 ? t[PARAM] : t[MASTER], .master = t[MASTER], .scores = t[SCORES], .first = c->first, .count = c->count,
        .cols = c->cols, .rows = c->rows, .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim, .nope = c->nope,
        .v_dim = c->v_dim, .limit = limit, .grad_scale = t[GRAD_SCALE], .param_dtype = c->param});
}

static const clip_case clips[] = {
    {QD_HEAD_ROWS_QUERY, 8, 8, 6, 0, 0, 0, 8 * 6 * 33, 33, QD_F32},  {QD_HEAD_ROWS_QUERY, 8, 2, 6, 0, 0, 50, 600, 33, QD_BF16},
    {QD_HEAD_ROWS_QUERY, 4, 1, 64, 0, 0, 0, 256, 1, QD_F32},         {QD_HEAD_ROWS_KEY, 8, 2, 6, 0, 0, 0, 2 * 6 * 40, 40, QD_BF16},
    {QD_HEAD_ROWS_KEY, 4, 4, 10, 0, 0, 3, 1, 7, QD_F32},             {QD_HEAD_ROWS_LATENT_QUERY, 6, 6, 12, 8, 5, 0, 72 * 16, 16, QD_BF16},
    {QD_HEAD_ROWS_LATENT_KEY, 6, 6, 12, 8, 5, 100, 900, 16, QD_F32},
    {QD_HEAD_ROWS_LATENT_KEY, 4, 4, 192, 128, 128, 0, 1024 * 96, 96, QD_BF16},
};

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "attention_forward, largest scores", .cases = cases, .case_count = COUNT(cases), .case_size = sizeof *cases,
         .describe = describe, .tensors = tensors, .derive = derive, .reference = reference, .run = run},
        {.kernel = "head_clip", .cases = clips, .case_count = COUNT(clips), .case_size = sizeof *clips, .describe = describe_clip,
         .tensors = clip_tensors, .derive = derive_clip, .reference = clip_reference, .run = run_clip},
    };
    return ops_main(argc, argv, ops, COUNT(ops), NULL, 0);
}
