/* Grouped GEMMs over experts, with SwiGLU and sums of squares, gates of shared experts, and norms
 * of queries and keys.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct head_case {
    int64_t rows, extra; /* extra: columns after queries and keys */
    int heads, kv_heads, head_dim;
    qd_dtype dtype;
    bool overwrite; /* backward: gradients of gammas */
    bool plus_one;
} head_case;
static const head_case head_cases[] = {{1, 0, 1, 1, 2, QD_F32, false, false},
                                       {7, 12, 4, 2, 6, QD_F32, false, false},
                                       {33, 128, 4, 2, 64, QD_F32, false, false},
                                       {5, 3, 2, 1, 130, QD_F32, false, false},
                                       {19, 64, 8, 1, 64, QD_BF16, false, false},
                                       {7, 12, 4, 2, 6, QD_F32, false, true},
                                       {9, 4, 2, 1, 20, QD_BF16, true, true}};
/* Without numerical gradients: more rows than an accelerator has blocks, head sizes of models. */
static const head_case head_long_cases[] = {
    {700, 256, 4, 2, 128, QD_BF16, false, true}, {601, 6, 3, 1, 36, QD_F32, true, false}, {40, 9, 2, 1, 33, QD_BF16, true, false}};
enum { HX, HQ, HK, HD, HY, HR, HDX, HDQ, HDK, HEAD_TENSORS };

static int64_t head_stride(const head_case *c)
{
    return (int64_t)(c->heads + c->kv_heads) * c->head_dim + c->extra;
}

static void head_describe(const void *p, char *text, size_t size)
{
    const head_case *c = p;
    snprintf(text, size, "%lld rows, %d+%d heads of %d, %s%s", (long long)c->rows, c->heads, c->kv_heads, c->head_dim,
             qd_dtype_name(c->dtype), c->plus_one ? ", 1 + gamma" : "");
}

static int head_tensors(const head_case *c, ops_tensor *t, bool backward)
{
    int64_t stride = head_stride(c);
    t[HX] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = stride};
    t[HQ] = (ops_tensor){.name = "q_gamma", .role = OPS_IN, .dtype = c->dtype, .cols = c->head_dim, .offset = 1, .scale = 0.3};
    t[HK] = t[HQ];
    t[HK].name = "k_gamma";
    t[HD] = (ops_tensor){.name = "dy", .role = backward ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = stride};
    t[HY] = (ops_tensor){.name = "y", .role = backward ? OPS_ABSENT : OPS_OUT, .dtype = c->dtype, .rows = c->rows, .cols = stride};
    t[HR] = (ops_tensor){.name = "rstd", .role = backward ? OPS_IN : OPS_OUT, .dtype = QD_F32, .rows = c->rows,
                         .cols = c->heads + c->kv_heads};
    t[HDX] = (ops_tensor){.name = "dx", .role = backward ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = stride,
                          .shares = 1 + HD};
    t[HDQ] = (ops_tensor){.name = "q_grad", .role = !backward ? OPS_ABSENT : c->overwrite ? OPS_OUT : OPS_INOUT, .dtype = QD_F32,
                          .cols = c->head_dim};
    t[HDK] = t[HDQ];
    t[HDK].name = "k_grad";
    return HEAD_TENSORS;
}

static int head_forward_tensors(const void *c, ops_tensor *t)
{
    return head_tensors(c, t, false);
}

static int head_backward_tensors(const void *c, ops_tensor *t)
{
    return head_tensors(c, t, true);
}

static double head_rstd(const head_case *c, double *const *v, int64_t row, int head)
{
    const double *x = v[HX] + row * head_stride(c) + (int64_t)head * c->head_dim;
    double sum = 0;
    for (int i = 0; i < c->head_dim; i++)
        sum += x[i] * x[i];
    return 1 / sqrt(sum / c->head_dim + 1e-5);
}

static double head_y(const head_case *c, double *const *v, int64_t row, int64_t col)
{
    int64_t head = col / c->head_dim, at = row * head_stride(c) + col;
    if (head >= c->heads + c->kv_heads)
        return v[HX][at];
    return v[HX][at] * head_rstd(c, v, row, (int)head) * (v[head < c->heads ? HQ : HK][col % c->head_dim] + c->plus_one);
}

static void head_forward_reference(const void *p, double *const *v)
{
    const head_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        for (int64_t i = 0; i < head_stride(c); i++)
            v[HY][r * head_stride(c) + i] = head_y(c, v, r, i);
        for (int h = 0; h < c->heads + c->kv_heads; h++)
            v[HR][r * (c->heads + c->kv_heads) + h] = head_rstd(c, v, r, h);
    }
}

static void head_derive(const void *p, double *const *v)
{
    const head_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int h = 0; h < c->heads + c->kv_heads; h++)
            v[HR][r * (c->heads + c->kv_heads) + h] = head_rstd(c, v, r, h);
}

static double head_loss(const void *p, double *const *v)
{
    const head_case *c = p;
    double sum = 0;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < head_stride(c); i++)
            sum += v[HD][r * head_stride(c) + i] * head_y(c, v, r, i);
    return sum;
}

static void head_backward_reference(const void *p, double *const *v)
{
    const head_case *c = p;
    for (int i = 0; c->overwrite && i < c->head_dim; i++)
        v[HDQ][i] = v[HDK][i] = 0;
    for (int64_t r = 0; r < c->rows; r++) {
        double *dx = v[HDX] + r * head_stride(c), *dy = v[HD] + r * head_stride(c), *x = v[HX] + r * head_stride(c);
        for (int h = 0; h < c->heads + c->kv_heads; h++) {
            double rstd = head_rstd(c, v, r, h), mean = 0, *gamma = v[h < c->heads ? HQ : HK], *grad = v[h < c->heads ? HDQ : HDK];
            int64_t at = (int64_t)h * c->head_dim;
            for (int i = 0; i < c->head_dim; i++) {
                mean += dy[at + i] * (gamma[i] + c->plus_one) * x[at + i] * rstd / c->head_dim;
                grad[i] += dy[at + i] * x[at + i] * rstd;
            }
            for (int i = 0; i < c->head_dim; i++)
                dx[at + i] = rstd * (dy[at + i] * (gamma[i] + c->plus_one) - x[at + i] * rstd * mean);
        }
        for (int64_t i = (int64_t)(c->heads + c->kv_heads) * c->head_dim; i < head_stride(c); i++)
            dx[i] = dy[i];
    }
}

static qd_head_norm_args head_arguments(const head_case *c, void *const *t)
{
    return (qd_head_norm_args){.x = t[HX], .q_gamma = t[HQ], .k_gamma = t[HK], .y = t[HY], .rstd = t[HR], .rows = c->rows,
                               .row_stride = head_stride(c), .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim,
                               .eps = 1e-5f, .plus_one = c->plus_one, .dtype = c->dtype, .param_dtype = c->dtype, .d = t[HDX],
                               .q_grad = t[HDQ], .k_grad = t[HDK], .accumulate = !c->overwrite, .grad_dtype = QD_F32};
}

static qd_status head_forward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_head_norm_args a = head_arguments(c, t);
    return k->head_norm(stream, &a);
}

static qd_status head_backward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_head_norm_args a = head_arguments(c, t);
    return k->head_norm_backward(stream, &a);
}

typedef struct gate_case {
    int64_t rows, cols;
    qd_dtype dtype;
    bool over; /* backward: dx replaces dy */
} gate_case;
static const gate_case gate_cases[] = {{1, 1, QD_F32, false}, {7, 33, QD_F32, true}, {130, 48, QD_F32, false}, {33, 64, QD_BF16, true},
                                       {5, 21, QD_BF16, false}};
enum { TX, TG, TD, TY, TDX, TDG, GATE_TENSORS };

static void gate_describe(const void *p, char *text, size_t size)
{
    const gate_case *c = p;
    snprintf(text, size, "%lld x %lld, %s%s", (long long)c->rows, (long long)c->cols, qd_dtype_name(c->dtype), c->over ? ", over dy" : "");
}

static int gate_tensors(const gate_case *c, ops_tensor *t, bool backward)
{
    t[TX] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[TG] = (ops_tensor){.name = "gate", .role = OPS_IN, .dtype = QD_F32, .cols = c->rows, .scale = 2};
    t[TD] = (ops_tensor){.name = "dy", .role = backward ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[TY] = (ops_tensor){.name = "y", .role = backward ? OPS_ABSENT : OPS_OUT, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    t[TDX] = (ops_tensor){.name = "dx", .role = backward ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = c->cols,
                          .shares = c->over ? 1 + TD : 0};
    t[TDG] = (ops_tensor){.name = "d_gate", .role = backward ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .cols = c->rows};
    return GATE_TENSORS;
}

static int gate_forward_tensors(const void *c, ops_tensor *t)
{
    return gate_tensors(c, t, false);
}

static int gate_backward_tensors(const void *c, ops_tensor *t)
{
    return gate_tensors(c, t, true);
}

static double opened(double *const *v, int64_t row)
{
    return 1 / (1 + exp(-v[TG][row]));
}

static void gate_forward_reference(const void *p, double *const *v)
{
    const gate_case *c = p;
    for (int64_t i = 0; i < c->rows * c->cols; i++)
        v[TY][i] = v[TX][i] * opened(v, i / c->cols);
}

static void gate_backward_reference(const void *p, double *const *v)
{
    const gate_case *c = p;
    for (int64_t r = 0; r < c->rows; r++) {
        double open = opened(v, r), dot = 0;
        for (int64_t i = r * c->cols; i < (r + 1) * c->cols; i++) {
            dot += v[TD][i] * v[TX][i];
            v[TDX][i] = v[TD][i] * open;
        }
        v[TDG][r] = dot * open * (1 - open);
    }
}

static double gate_loss(const void *p, double *const *v)
{
    const gate_case *c = p;
    double sum = 0;
    for (int64_t i = 0; i < c->rows * c->cols; i++)
        sum += v[TD][i] * v[TX][i] * opened(v, i / c->cols);
    return sum;
}

static qd_gate_args gate_arguments(const gate_case *c, void *const *t)
{
    return (qd_gate_args){.x = t[TX], .gate = t[TG], .dy = t[TDX] && c->over ? t[TDX] : t[TD], .y = t[TY], .dx = t[TDX], .d_gate = t[TDG],
                          .rows = c->rows, .cols = c->cols, .dtype = c->dtype};
}

static qd_status gate_forward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_gate_args a = gate_arguments(c, t);
    return k->gate(stream, &a);
}

static qd_status gate_backward_run(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_gate_args a = gate_arguments(c, t);
    return k->gate_backward(stream, &a);
}

/* By experts. OVERWRITE: earlier contents of b are ignored; SQUARES: sums of squares of b's rows
 * are requested. By rows. SWIGLU: SwiGLU of the results is requested too; GRADIENT: the gradient of
 * SwiGLU replaces the results, and AGAIN is recomputed SwiGLU. BIASED: the results contain biases;
 * CLAMPED: SwiGLU is clamped. PART: matrices are parts of wider ones, and by rows the result is
 * added. */
enum { PLAIN, OVERWRITE = 1, SQUARES = 2, SWIGLU = 4, GRADIENT = 8, AGAIN = 16, BIASED = 32, CLAMPED = 64, PART = 128 };

/* Of the clamped SwiGLU. */
#define ALPHA 1.702
#define LIMIT 1.5

typedef struct grouped_case {
    int sources, experts;
    int64_t counts[12]; /* (sources, experts) */
    int64_t begin, rows, n, k;
    bool trans_b, by_experts;
    qd_dtype dtype, b_dtype;
    unsigned way;
} grouped_case;
static const grouped_case grouped_cases[] = {
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, true, false, QD_F32, QD_F32, PLAIN},
    {1, 3, {5, 0, 9}, 0, 20, 17, 23, false, false, QD_F32, QD_F32, PLAIN},
    {2, 3, {4, 0, 3, 2, 6, 0}, 0, 15, 16, 32, true, false, QD_F32, QD_F32, PLAIN},
    {2, 3, {4, 0, 3, 2, 6, 0}, 3, 8, 16, 32, false, false, QD_F32, QD_F32, PLAIN},
    {2, 3, {4, 0, 3, 2, 6, 0}, 11, 8, 16, 32, true, false, QD_F32, QD_F32, PLAIN},
    {1, 4, {0, 0, 0, 0}, 0, 8, 16, 8, true, false, QD_F32, QD_F32, PLAIN},
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, false, true, QD_F32, QD_F32, PLAIN},
    {2, 3, {4, 0, 3, 2, 6, 0}, 2, 9, 16, 32, false, true, QD_F32, QD_F32, PLAIN},
    {1, 4, {0, 40, 0, 0}, 0, 40, 64, 48, true, false, QD_BF16, QD_BF16, PLAIN},
    {2, 2, {30, 1, 0, 20}, 0, 51, 64, 48, false, true, QD_BF16, QD_BF16, PLAIN},
    /* several tiles of rows, columns and depth on a GPU, with remainders */
    {1, 3, {130, 0, 70}, 0, 210, 264, 136, true, false, QD_BF16, QD_BF16, PLAIN},
    {2, 2, {65, 3, 0, 129}, 5, 180, 520, 72, false, false, QD_BF16, QD_BF16, PLAIN},
    {2, 2, {65, 3, 0, 129}, 5, 180, 136, 264, false, true, QD_BF16, QD_BF16, PLAIN},
    {1, 3, {130, 0, 70}, 0, 210, 130, 257, false, true, QD_BF16, QD_BF16, PLAIN},
    {1, 3, {130, 0, 70}, 0, 210, 131, 77, true, false, QD_BF16, QD_BF16, PLAIN},
    {1, 2, {70, 66}, 0, 136, 70, 67, false, false, QD_F32, QD_F32, PLAIN},
    {2, 2, {65, 3, 0, 129}, 5, 200, 136, 264, false, true, QD_BF16, QD_F32, PLAIN},
    /* overwritten gradients: experts without rows become 0, also when there are no rows at all */
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, false, true, QD_F32, QD_F32, OVERWRITE},
    {2, 3, {4, 0, 3, 2, 6, 0}, 2, 9, 16, 32, false, true, QD_F32, QD_F32, OVERWRITE},
    {1, 3, {70, 0, 66}, 0, 136, 70, 67, false, true, QD_BF16, QD_BF16, OVERWRITE},
    {2, 3, {65, 3, 0, 129, 0, 0}, 5, 180, 136, 264, false, true, QD_BF16, QD_BF16, OVERWRITE},
    {1, 4, {130, 0, 70, 0}, 0, 210, 136, 520, false, true, QD_BF16, QD_F32, OVERWRITE},
    {1, 4, {0, 0, 0, 0}, 0, 8, 136, 264, false, true, QD_BF16, QD_BF16, OVERWRITE},
    {1, 3, {130, 0, 70}, 0, 210, 264, 384, false, true, QD_BF16, QD_BF16, OVERWRITE},
    /* with sums of squares: several tiles, an expert without rows that keeps or loses its values,
     * no rows at all */
    {1, 3, {130, 0, 70}, 0, 210, 264, 384, false, true, QD_BF16, QD_BF16, OVERWRITE | SQUARES},
    {2, 3, {65, 3, 0, 129, 0, 0}, 5, 180, 136, 520, false, true, QD_BF16, QD_BF16, SQUARES},
    {1, 4, {0, 0, 0, 0}, 0, 8, 136, 264, false, true, QD_BF16, QD_BF16, SQUARES},
    {1, 3, {70, 0, 66}, 0, 136, 70, 67, false, true, QD_BF16, QD_BF16, OVERWRITE | SQUARES},
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, false, true, QD_F32, QD_F32, SQUARES},
    {1, 3, {130, 0, 70}, 0, 210, 136, 520, false, true, QD_BF16, QD_F32, SQUARES},
    {1, 2, {0, 0}, 0, 0, 16, 24, false, true, QD_BF16, QD_BF16, SQUARES},
    /* the last tiles have half the columns, or half the rows */
    {1, 3, {130, 0, 190}, 0, 330, 384, 136, true, false, QD_BF16, QD_BF16, PLAIN},
    {2, 2, {65, 3, 0, 129}, 5, 180, 640, 72, false, false, QD_BF16, QD_BF16, PLAIN},
    {1, 3, {64, 1, 320}, 0, 390, 128, 200, false, false, QD_BF16, QD_BF16, PLAIN},
    {1, 3, {300, 0, 70}, 0, 370, 136, 384, false, true, QD_BF16, QD_F32, PLAIN},
    /* more tiles than a GPU has multiprocessors, and more steps than it has in flight: even and odd
     * numbers of tiles in rows and columns, all rows on one expert */
    {1, 6, {130, 1, 260, 0, 129, 5}, 0, 525, 3848, 136, true, false, QD_BF16, QD_BF16, PLAIN},
    {1, 6, {130, 1, 260, 0, 129, 5}, 0, 530, 3592, 136, false, false, QD_BF16, QD_BF16, PLAIN},
    {1, 4, {0, 0, 700, 0}, 0, 700, 520, 328, true, false, QD_BF16, QD_BF16, PLAIN},
    {1, 4, {0, 0, 700, 0}, 0, 700, 264, 520, false, true, QD_BF16, QD_BF16, OVERWRITE},
    {1, 4, {300, 0, 70, 20}, 0, 390, 400, 2312, false, true, QD_BF16, QD_BF16, OVERWRITE},
    {2, 4, {260, 0, 30, 20, 0, 9, 0, 1}, 0, 320, 328, 2824, false, true, QD_BF16, QD_BF16, PLAIN},
    {1, 4, {40, 0, 330, 0}, 0, 370, 584, 264, false, true, QD_BF16, QD_F32, PLAIN},
    /* with SwiGLU, and as many rows as the lists have. Many rows and little depth select another
     * kernel on a GPU */
    {1, 3, {5, 0, 9}, 0, 14, 34, 23, true, false, QD_F32, QD_F32, SWIGLU},
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, false, false, QD_F32, QD_F32, GRADIENT},
    {2, 2, {65, 3, 0, 129}, 0, 197, 272, 72, true, false, QD_BF16, QD_BF16, SWIGLU},
    {2, 2, {65, 3, 0, 129}, 0, 197, 136, 72, false, false, QD_BF16, QD_BF16, GRADIENT | AGAIN},
    {1, 1, {2900}, 0, 2900, 264, 72, true, false, QD_BF16, QD_BF16, PLAIN},
    {1, 2, {2100, 3700}, 0, 5800, 136, 40, false, false, QD_BF16, QD_BF16, PLAIN},
    {1, 2, {2100, 3700}, 0, 5800, 272, 40, true, false, QD_BF16, QD_BF16, SWIGLU},
    {1, 1, {2900}, 0, 2900, 656, 136, true, false, QD_BF16, QD_BF16, SWIGLU},
    {1, 2, {2100, 3700}, 0, 5800, 136, 40, false, false, QD_BF16, QD_BF16, GRADIENT},
    {1, 1, {2900}, 0, 2900, 328, 136, false, false, QD_BF16, QD_BF16, GRADIENT | AGAIN},
    {1, 3, {5, 0, 9}, 0, 14, 34, 23, true, false, QD_F32, QD_F32, SWIGLU | BIASED | CLAMPED},
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, false, false, QD_F32, QD_F32, GRADIENT | AGAIN | CLAMPED},
    {2, 3, {4, 0, 3, 2, 6, 0}, 3, 8, 17, 32, true, false, QD_F32, QD_F32, BIASED},
    {2, 2, {65, 3, 0, 129}, 0, 197, 272, 72, true, false, QD_BF16, QD_BF16, SWIGLU | BIASED | CLAMPED},
    {1, 2, {2100, 3700}, 0, 5800, 136, 40, true, false, QD_BF16, QD_BF16, BIASED},
    {1, 2, {2100, 3700}, 0, 5800, 272, 40, true, false, QD_BF16, QD_BF16, SWIGLU | BIASED},
    {1, 2, {2100, 3700}, 0, 5800, 272, 40, true, false, QD_BF16, QD_BF16, SWIGLU | BIASED | CLAMPED},
    {1, 1, {2900}, 0, 2900, 328, 136, false, false, QD_BF16, QD_BF16, GRADIENT | AGAIN | CLAMPED},
    {1, 1, {2900}, 0, 2900, 40, 1544, false, false, QD_BF16, QD_BF16, GRADIENT | AGAIN | CLAMPED},
    /* as of adapters */
    {2, 3, {4, 0, 3, 2, 6, 0}, 0, 15, 17, 5, true, false, QD_F32, QD_F32, PART},
    {2, 3, {4, 0, 3, 2, 6, 0}, 0, 15, 5, 17, false, false, QD_F32, QD_F32, PART},
    {2, 3, {4, 0, 3, 2, 6, 0}, 0, 15, 17, 5, false, true, QD_F32, QD_F32, PART},
    {1, 3, {130, 0, 70}, 0, 200, 136, 16, true, false, QD_BF16, QD_BF16, PART},
    {1, 3, {130, 0, 70}, 0, 200, 16, 136, false, false, QD_BF16, QD_BF16, PART},
    {1, 3, {130, 0, 70}, 0, 200, 136, 16, false, true, QD_BF16, QD_F32, PART | OVERWRITE},
    {1, 3, {0, 0, 0}, 0, 0, 136, 16, false, true, QD_BF16, QD_BF16, PART | OVERWRITE},
};
enum { GA, GB, GC, GN, GS, GE, GU, GD, GBIAS, GROUPED_TENSORS };

static void grouped_describe(const void *p, char *text, size_t size)
{
    const grouped_case *c = p;
    snprintf(text, size, "%d sources, %d experts, rows %lld+%lld, (%lld, %lld)%s%s%s%s%s %s %s", c->sources, c->experts,
             (long long)c->begin, (long long)c->rows, (long long)c->n, (long long)c->k, c->trans_b ? "ᵀ" : "",
             c->way & OVERWRITE ? " by experts, over b"
             : c->by_experts    ? " by experts"
                                : "",
             c->way & SQUARES    ? ", squares"
             : c->way & SWIGLU   ? ", SwiGLU"
             : c->way & GRADIENT ? ", SwiGLU's gradient"
                                 : "",
             c->way & CLAMPED ? ", clamped" : c->way & PART ? ", part" : "", c->way & BIASED ? ", biases" : "",
             qd_dtype_name(c->dtype), qd_dtype_name(c->b_dtype));
}

/* Elements between the rows of a part, or the matrices of experts. */
static int64_t gap(const grouped_case *c)
{
    return !(c->way & PART) ? 0 : c->dtype == QD_BF16 ? 8 : 3;
}

static int grouped_tensors(const void *p, ops_tensor *t)
{
    const grouped_case *c = p;
    t[GA] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->k, .ld = c->k + gap(c)};
    t[GB] = (ops_tensor){.name = "b", .role = !c->by_experts ? OPS_IN : c->way & OVERWRITE ? OPS_OUT : OPS_INOUT, .dtype = c->b_dtype,
                         .rows = c->experts, .cols = c->n * c->k, .ld = c->n * c->k + gap(c)};
    t[GC] = (ops_tensor){.name = "c", .role = c->by_experts ? OPS_IN : c->way & GRADIENT ? OPS_SCRATCH : OPS_INOUT, .dtype = c->dtype,
                         .rows = c->rows, .cols = c->n, .ld = c->n + gap(c)};
    t[GN] = (ops_tensor){.name = "counts", .role = OPS_IN, .dtype = QD_I32, .rows = c->sources, .cols = c->experts};
    t[GS] = (ops_tensor){.name = "squares", .role = c->way & SQUARES ? OPS_OUT : OPS_ABSENT, .dtype = QD_F64, .rows = c->experts,
                         .cols = c->n,
                         .tol = c->b_dtype == QD_BF16 ? 1e-3 : 1e-5}; /* of the rounded b */
    const int64_t half = c->way & GRADIENT ? c->n : c->n / 2;
    const double rounded = c->dtype == QD_BF16 ? 8e-3 : 0; /* of rounded results, too */
    t[GE] = (ops_tensor){.name = "active", .role = c->way & (SWIGLU | AGAIN) ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows,
                         .cols = half, .tol = rounded};
    t[GU] = (ops_tensor){.name = "gate_up", .role = c->way & GRADIENT ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows,
                         .cols = 2 * half};
    t[GD] = (ops_tensor){.name = "d_gate_up", .role = c->way & GRADIENT ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows,
                         .cols = 2 * half, .tol = rounded};
    t[GBIAS] = (ops_tensor){.name = "bias", .role = c->way & BIASED ? OPS_IN : OPS_ABSENT, .dtype = c->b_dtype, .rows = c->experts,
                            .cols = c->n};
    return GROUPED_TENSORS;
}

/* SwiGLU of the rows' results, or its gradient. */
static void swiglu_reference(const grouped_case *c, double *const *v)
{
    const int64_t half = c->way & GRADIENT ? c->n : c->n / 2;
    const double *both = c->way & GRADIENT ? v[GU] : v[GC];
    for (int64_t i = 0; i < c->rows * half; i++) {
        const int64_t gate = i / half * 2 * half + i % half, up = gate + half;
        const bool clamped = c->way & CLAMPED;
        const double alpha = clamped ? ALPHA : 1, x = clamped ? fmin(both[gate], LIMIT) : both[gate];
        const double factor = clamped ? fmin(fmax(both[up], -LIMIT), LIMIT) + 1 : both[up];
        const double s = 1.0 / (1.0 + exp(-alpha * x)), value = x * s;
        if (c->way & (SWIGLU | AGAIN))
            v[GE][i] = value * factor;
        if (c->way & GRADIENT) {
            v[GD][gate] = clamped && both[gate] > LIMIT ? 0 : v[GC][i] * factor * (s + alpha * x * s * (1.0 - s));
            v[GD][up] = clamped && fabs(both[up]) > LIMIT ? 0 : v[GC][i] * value;
        }
    }
}

static void grouped_derive(const void *p, double *const *v)
{
    const grouped_case *c = p;
    for (int i = 0; i < c->sources * c->experts; i++)
        v[GN][i] = (double)c->counts[i];
}

static void grouped_reference(const void *p, double *const *v)
{
    const grouped_case *c = p;
    int64_t row = -c->begin, a_ld = c->k + gap(c), c_ld = c->n + gap(c), b_ld = c->n * c->k + gap(c);
    for (int64_t i = 0; (c->way & OVERWRITE) && i < c->experts * c->n * c->k; i++)
        v[GB][i / (c->n * c->k) * b_ld + i % (c->n * c->k)] = 0;
    for (int i = 0; i < c->sources * c->experts; i++)
        for (int64_t j = 0; j < c->counts[i]; j++, row++) {
            double *b = v[GB] + i % c->experts * b_ld;
            for (int64_t n = 0; n < c->n && row >= 0 && row < c->rows; n++) {
                double sum = 0;
                for (int64_t k = 0; k < c->k; k++) {
                    if (c->by_experts)
                        b[n * c->k + k] += v[GC][row * c_ld + n] * v[GA][row * a_ld + k];
                    else
                        sum += v[GA][row * a_ld + k] * b[c->trans_b ? n * c->k + k : k * c->n + n];
                }
                if (!c->by_experts)
                    v[GC][row * c_ld + n] = sum + (c->way & BIASED ? v[GBIAS][i % c->experts * c->n + n]
                                                   : c->way & PART ? v[GC][row * c_ld + n]
                                                                   : 0);
            }
        }
    if (c->way & (SWIGLU | GRADIENT))
        swiglu_reference(c, v);
    for (int64_t i = 0; (c->way & SQUARES) && i < c->experts * c->n; i++) {
        v[GS][i] = 0;
        for (int64_t k = 0; k < c->k; k++)
            v[GS][i] += v[GB][i * c->k + k] * v[GB][i * c->k + k];
    }
}

static qd_status grouped_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const grouped_case *c = p;
    return k->grouped(stream, &(qd_grouped_args){.a = t[GA], .b = t[GB], .c = t[GC], .squares = t[GS], .counts = t[GN],
                                                 .count_stride = c->experts,
                                                 .begin = c->begin, .rows = c->rows, .n = c->n, .k = c->k, .sources = c->sources,
                                                 .experts = c->experts, .trans_b = c->trans_b, .by_experts = c->by_experts,
                                                 .accumulate = !(c->way & OVERWRITE), .active = t[GE], .gate_up = t[GU], .d_gate_up = t[GD],
                                                 .a_stride = c->way & PART ? c->k + gap(c) : 0,
                                                 .b_stride = c->way & PART ? c->n * c->k + gap(c) : 0,
                                                 .c_stride = c->way & PART ? c->n + gap(c) : 0,
                                                 .add_rows = c->way & PART && !c->by_experts, .bias = t[GBIAS], .alpha = (float)ALPHA,
                                                 .limit = c->way & CLAMPED ? (float)LIMIT : 0.0f,
                                                 .a_dtype = c->dtype, .b_dtype = c->b_dtype, .c_dtype = c->dtype,
                                                 .bias_dtype = c->b_dtype});
}

/* Long lists: on a GPU another kernel, with several tiles per block. */

typedef struct long_case {
    int sources, experts;
    int32_t counts[4]; /* per source and expert */
    int64_t begin, rows, n, k;
    bool trans_b;
    int way;
} long_case;

static const long_case long_cases[] = {
    {1, 2, {0, 5800}, 0, 5900, 2056, 72, true, PLAIN}, /* no rows, rows after the list, and a last tile with columns for half a pair */
    {2, 1, {3000, 2900}, 5, 5700, 2056, 72, false, PLAIN},
    {1, 2, {2100, 3700}, 0, 5800, 3088, 72, true, SWIGLU},
    {1, 2, {2100, 3700}, 0, 5800, 1544, 72, false, GRADIENT | AGAIN},
    {1, 2, {2100, 3700}, 0, 5800, 392, 1544, false, GRADIENT | AGAIN}, /* deep enough for one kernel */
    {1, 1, {3001}, 0, 3001, 4112, 456, true, SWIGLU},
    {1, 1, {3001}, 0, 3001, 520, 1608, false, GRADIENT},
    {1, 2, {2100, 3700}, 0, 5800, 3088, 72, true, SWIGLU | BIASED | CLAMPED},
    {1, 2, {2100, 3700}, 0, 5800, 392, 1544, false, GRADIENT | AGAIN | CLAMPED},
    {2, 1, {3000, 2900}, 5, 5700, 2056, 72, true, BIASED},
};

static void *device_table(qd_device *device, int64_t elements, bool filled)
{
    uint16_t *host = malloc((size_t)elements * 2);
    void *p;
    assert_non_null(host);
    for (int64_t i = 0; i < elements; i++) /* 0.5 to 2 of both signs; or NaN, which must not be read */
        host[i] = filled ? (uint16_t)(0x3f00 + (int)(ops_uniform() * 256) + (ops_uniform() < 0.5 ? 0x8000 : 0)) : 0x7fff;
    ops_assert_ok(qd_device_alloc(device, elements * 2, &p));
    ops_assert_ok(qd_copy(qd_device_compute_stream(device), p, host, elements * 2));
    ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
    free(host);
    return p;
}

static void assert_same_bits(qd_device *device, const char *what, int number, const void *x, const void *y, int64_t elements)
{
    uint16_t *host[2];
    for (int i = 0; i < 2; i++) {
        host[i] = malloc((size_t)elements * 2);
        assert_non_null(host[i]);
        ops_assert_ok(qd_copy(qd_device_compute_stream(device), host[i], i ? y : x, elements * 2));
        ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
    }
    for (int64_t i = 0; i < elements; i++)
        if (host[0][i] != host[1][i])
            fail_msg("case %d: %s: element %lld is %04x and %04x", number, what, (long long)i, host[0][i], host[1][i]);
    free(host[0]);
    free(host[1]);
}

/* The GEMM of all rows with SwiGLU, against GEMMs of 1000 rows each and SwiGLU in a separate
 * pass. */
static void long_case_on(qd_device *device, int number)
{
    const long_case *c = &long_cases[number];
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const bool gradient = c->way & GRADIENT;
    const int64_t half = gradient ? c->n : c->n / 2;
    int64_t listed = -c->begin;
    for (int i = 0; i < c->sources * c->experts; i++)
        listed += c->counts[i];
    listed = listed < c->rows ? listed : c->rows;
    void *a = device_table(device, c->rows * c->k, true), *b = device_table(device, c->experts * c->n * c->k, true);
    void *gate_up = gradient ? device_table(device, c->rows * 2 * half, true) : NULL;
    void *bias = c->way & BIASED ? device_table(device, c->experts * c->n, true) : NULL;
    const float limit = c->way & CLAMPED ? (float)LIMIT : 0.0f;
    void *results[2], *active[2] = {NULL, NULL}, *grads[2] = {NULL, NULL}, *counts;
    for (int i = 0; i < 2; i++) {
        results[i] = device_table(device, c->rows * c->n, false);
        active[i] = c->way & (SWIGLU | AGAIN) ? device_table(device, c->rows * half, false) : NULL;
        grads[i] = gradient ? device_table(device, c->rows * 2 * half, false) : NULL;
    }
    ops_assert_ok(qd_device_alloc(device, sizeof c->counts, &counts));
    ops_assert_ok(qd_copy(stream, counts, c->counts, sizeof c->counts));
    qd_grouped_args args = {.a = a, .b = b, .c = results[0], .counts = counts, .count_stride = c->experts, .begin = c->begin,
                            .rows = c->rows, .n = c->n, .k = c->k, .sources = c->sources, .experts = c->experts, .trans_b = c->trans_b,
                            .active = active[0], .gate_up = gate_up, .d_gate_up = grads[0], .bias = bias, .alpha = (float)ALPHA,
                            .limit = limit, .a_dtype = QD_BF16, .b_dtype = QD_BF16, .c_dtype = QD_BF16, .bias_dtype = QD_BF16};
    ops_assert_ok(k->grouped(stream, &args));
    args.active = args.d_gate_up = NULL;
    args.gate_up = args.bias = NULL;
    for (int64_t row = 0; row < c->rows; row += 1000) {
        args.a = (const uint16_t *)a + row * c->k;
        args.c = (uint16_t *)results[1] + row * c->n;
        args.begin = c->begin + row;
        args.rows = c->rows - row < 1000 ? c->rows - row : 1000;
        ops_assert_ok(k->grouped(stream, &args));
    }
    if (bias)
        ops_assert_ok(k->grouped_bias(stream, &(qd_grouped_bias_args){
            .x = results[1], .bias = bias, .counts = counts, .count_stride = c->experts, .begin = c->begin, .rows = c->rows, .width = c->n,
            .n = c->n, .sources = c->sources, .experts = c->experts, .dtype = QD_BF16, .bias_dtype = QD_BF16}));
    qd_activation_args swiglu = {.kind = limit > 0 ? QD_ACT_SWIGLU_CLAMPED : QD_ACT_SWIGLU, .alpha = (float)ALPHA, .limit = limit,
                                 .x = gradient ? gate_up : results[1], .dy = gradient ? results[1] : NULL,
                                 .dx = grads[1], .y = active[1], .rows = listed, .cols = half, .dtype = QD_BF16};
    if (c->way & (SWIGLU | GRADIENT))
        ops_assert_ok(gradient ? k->activation_backward(stream, &swiglu) : k->activation_forward(stream, &swiglu));
    if (gradient)
        assert_same_bits(device, "gradients", number, grads[0], grads[1], listed * 2 * half);
    else
        assert_same_bits(device, "results", number, results[0], results[1], listed * c->n);
    if (active[0])
        assert_same_bits(device, "active", number, active[0], active[1], listed * half);
    qd_device_free(device, a, c->rows * c->k * 2);
    qd_device_free(device, b, c->experts * c->n * c->k * 2);
    qd_device_free(device, counts, sizeof c->counts);
    if (bias)
        qd_device_free(device, bias, c->experts * c->n * 2);
    if (gate_up)
        qd_device_free(device, gate_up, c->rows * 2 * half * 2);
    for (int i = 0; i < 2; i++) {
        qd_device_free(device, results[i], c->rows * c->n * 2);
        if (active[i])
            qd_device_free(device, active[i], c->rows * half * 2);
        if (grads[i])
            qd_device_free(device, grads[i], c->rows * 2 * half * 2);
    }
}

static void long_lists(void **state)
{
    (void)state;
    qd_device *const devices[] = {ops_device("best", 1), ops_cuda()};
    for (int d = 0; d < 2; d++)
        for (int i = 0; devices[d] && i < (int)COUNT(long_cases); i++)
            long_case_on(devices[d], i);
}

static void refuses(void **state)
{
    (void)state;
    qd_device *device = ops_device("best", 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    int32_t counts[] = {1};
    float x[8] = {0};
    qd_grouped_args args = {.a = x, .b = x, .c = x, .counts = counts, .count_stride = 1, .rows = 1, .n = 1, .k = 1, .sources = 1,
                            .experts = 1, .active = x, .a_dtype = QD_F32, .b_dtype = QD_F32, .c_dtype = QD_F32};
    ops_assert_fails(k->grouped(stream, &args), QD_USAGE, "n must be even");
    args.n = 2;
    args.by_experts = true;
    ops_assert_fails(k->grouped(stream, &args), QD_USAGE, "by rows");
    args.by_experts = false;
    args.gate_up = x;
    ops_assert_fails(k->grouped(stream, &args), QD_USAGE, "must be given together");
    args.d_gate_up = args.active = x;
    args.bias = x;
    ops_assert_fails(k->grouped(stream, &args), QD_USAGE, "a bias can be fused");
    args.add_rows = true;
    ops_assert_fails(k->grouped(stream, &args), QD_USAGE, "exclude a bias");
}

int main(int argc, char **argv)
{
#define CASES(list) .cases = list, .case_size = sizeof *list, .case_count = COUNT(list)
#define HEAD_FORWARD \
    .describe = head_describe, .tensors = head_forward_tensors, .reference = head_forward_reference, .run = head_forward_run
#define HEAD_BACKWARD \
    .describe = head_describe, .tensors = head_backward_tensors, .derive = head_derive, .reference = head_backward_reference, \
    .run = head_backward_run
    const ops_op ops[] = {
        {.kernel = "head_norm", CASES(head_cases), HEAD_FORWARD},
        {.kernel = "head_norm", CASES(head_long_cases), HEAD_FORWARD},
        {.kernel = "head_norm_backward", CASES(head_cases), HEAD_BACKWARD, .loss = head_loss,
         .gradients = {{HX, HDX}, {HQ, HDQ}, {HK, HDK}}, .gradient_count = 3},
        {.kernel = "head_norm_backward", CASES(head_long_cases), HEAD_BACKWARD},
        {.kernel = "gate", CASES(gate_cases), .describe = gate_describe, .tensors = gate_forward_tensors,
         .reference = gate_forward_reference, .run = gate_forward_run},
        {.kernel = "gate_backward", CASES(gate_cases), .describe = gate_describe, .tensors = gate_backward_tensors,
         .reference = gate_backward_reference, .run = gate_backward_run, .loss = gate_loss, .gradients = {{TX, TDX}, {TG, TDG}},
         .gradient_count = 2},
        {.kernel = "grouped", .cases = grouped_cases, .case_size = sizeof *grouped_cases, .case_count = COUNT(grouped_cases),
         .describe = grouped_describe, .tensors = grouped_tensors, .derive = grouped_derive, .reference = grouped_reference,
         .run = grouped_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(long_lists), cmocka_unit_test(refuses)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
