/* Kernels that only some families of models need: limits on values and their gradient, scaling,
 * soft-caps, and RMSNorm of all queries of a row and of all its keys, in the steps between which
 * ranks sum.
 * ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))
#define LIMIT 0.75
#define EPS 1e-5

typedef struct map_case {
    int64_t n;
    bool in_place;
    qd_dtype dtype;
} map_case;

static const map_case maps[] = {
    {1, false, QD_F32}, {7, true, QD_F32}, {4096, false, QD_F32}, {10007, true, QD_F32}, {777, false, QD_BF16}, {8192, true, QD_BF16},
};

static void describe_map(const void *p, char *text, size_t size)
{
    const map_case *c = p;
    snprintf(text, size, "%lld %s%s", (long long)c->n, qd_dtype_name(c->dtype), c->in_place ? ", in place" : "");
}

enum { X, DY, Y, MAP_TENSORS };

static int map_tensors(const map_case *c, ops_tensor *t, bool backward)
{
    t[X] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .cols = c->n};
    t[DY] = (ops_tensor){.name = "dy", .role = backward ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .cols = c->n};
    t[Y] = (ops_tensor){.name = "y", .role = OPS_OUT, .dtype = c->dtype, .cols = c->n, .floor = 1e-3};
    t[Y].shares = !c->in_place ? 0 : backward ? 1 + DY : 1 + X;
    return MAP_TENSORS;
}
static int forward_tensors(const void *c, ops_tensor *t)
{
    return map_tensors(c, t, false);
}
static int backward_tensors(const void *c, ops_tensor *t)
{
    return map_tensors(c, t, true);
}

static void clip_reference(const void *p, double *const *v)
{
    for (int64_t i = 0; i < ((const map_case *)p)->n; i++)
        v[Y][i] = fmax(-LIMIT, fmin(LIMIT, v[X][i]));
}
static void clip_backward_reference(const void *p, double *const *v)
{
    for (int64_t i = 0; i < ((const map_case *)p)->n; i++)
        v[Y][i] = fabs(v[X][i]) > LIMIT ? 0 : v[DY][i];
}
static void scale_reference(const void *p, double *const *v)
{
    for (int64_t i = 0; i < ((const map_case *)p)->n; i++)
        v[Y][i] = v[X][i] * LIMIT;
}

static qd_clip_args clip_arguments(const map_case *c, void *const *t)
{
    return (qd_clip_args){.x = t[X], .dy = t[DY], .y = t[Y], .n = c->n, .limit = (float)LIMIT, .dtype = c->dtype};
}
static qd_status clip_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    qd_clip_args a = clip_arguments(p, t);
    return k->clip(stream, &a);
}
static qd_status clip_backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    qd_clip_args a = clip_arguments(p, t);
    return k->clip_backward(stream, &a);
}
static qd_status scale_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const map_case *c = p;
    return k->scale(stream, &(qd_scale_args){.x = t[X], .y = t[Y], .n = c->n, .factor = (float)LIMIT, .dtype = c->dtype});
}

static int cap_tensors(const void *p, ops_tensor *t)
{
    const map_case *c = p;
    t[X] = (ops_tensor){.name = "x", .role = OPS_INOUT, .dtype = c->dtype, .cols = c->n, .scale = 3};
    return 1;
}
static void cap_reference(const void *p, double *const *v)
{
    for (int64_t i = 0; i < ((const map_case *)p)->n; i++)
        v[X][i] = 2 * tanh(v[X][i] / 2);
}
static qd_status cap_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const map_case *c = p;
    return k->softcap(stream, &(qd_softcap_args){.x = t[X], .n = c->n, .cap = 2, .dtype = c->dtype});
}

/* Norms of all queries and of all keys. The columns are those of one of `ranks` ranks. */
typedef struct qk_case {
    int64_t rows, q_cols, k_cols, rest;
    int ranks;
    bool counts_keys, accumulate;
    qd_dtype dtype, param_dtype, grad_dtype;
} qk_case;

static const qk_case qks[] = {
    {1, 1, 1, 0, 1, true, false, QD_F32, QD_F32, QD_F32},
    {5, 12, 6, 6, 1, true, true, QD_F32, QD_F32, QD_F32},
    {33, 64, 16, 16, 2, false, false, QD_F32, QD_F32, QD_F32},
    {70, 256, 128, 128, 2, true, false, QD_BF16, QD_BF16, QD_F32},
    {9, 37, 11, 3, 1, true, false, QD_BF16, QD_F32, QD_BF16},
    {300, 2048, 512, 512, 4, true, true, QD_BF16, QD_BF16, QD_BF16},
};

static void describe_qk(const void *p, char *text, size_t size)
{
    const qk_case *c = p;
    snprintf(text, size, "%lld rows of %lld + %lld + %lld, %d ranks, %s, gamma %s, gradients %s%s%s", (long long)c->rows,
             (long long)c->q_cols, (long long)c->k_cols, (long long)c->rest, c->ranks, qd_dtype_name(c->dtype),
             qd_dtype_name(c->param_dtype), qd_dtype_name(c->grad_dtype), c->counts_keys ? "" : ", keys counted elsewhere",
             c->accumulate ? ", accumulate" : "");
}

enum { IN, Q_GAMMA, K_GAMMA, SUMS, DOTS, OUT, D, Q_GRAD, K_GRAD, QK_TENSORS };
typedef enum qk_step { SQUARES, NORM, DOTS_STEP, BACKWARD } qk_step;

static int64_t stride(const qk_case *c)
{
    return c->q_cols + c->k_cols + c->rest;
}

static int qk_tensors(const qk_case *c, ops_tensor *t, qk_step step)
{
    ops_role gammas = step == SQUARES ? OPS_ABSENT : OPS_IN, grads = step != BACKWARD ? OPS_ABSENT : c->accumulate ? OPS_INOUT : OPS_OUT;
    t[IN] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = stride(c)};
    t[Q_GAMMA] = (ops_tensor){.name = "q_gamma", .role = gammas, .dtype = c->param_dtype, .cols = c->q_cols, .offset = 1};
    t[K_GAMMA] = (ops_tensor){.name = "k_gamma", .role = gammas, .dtype = c->param_dtype, .cols = c->k_cols, .offset = 1};
    t[SUMS] = (ops_tensor){.name = "sums", .role = step == SQUARES ? OPS_OUT : step == DOTS_STEP ? OPS_ABSENT : OPS_IN, .dtype = QD_F32,
                           .rows = c->rows, .cols = 2};
    t[DOTS] = (ops_tensor){.name = "dots", .role = step == DOTS_STEP ? OPS_OUT : step == BACKWARD ? OPS_IN : OPS_ABSENT, .dtype = QD_F32,
                           .rows = c->rows, .cols = 2, .floor = 1};
    t[OUT] = (ops_tensor){.name = "y", .role = step == NORM ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = stride(c)};
    t[D] = (ops_tensor){.name = "d", .role = step == BACKWARD ? OPS_INOUT : step == DOTS_STEP ? OPS_IN : OPS_ABSENT, .dtype = c->dtype,
                        .rows = c->rows, .cols = stride(c)};
    t[Q_GRAD] = (ops_tensor){.name = "q_grad", .role = grads, .dtype = c->grad_dtype, .cols = c->q_cols};
    t[K_GRAD] = (ops_tensor){.name = "k_grad", .role = grads, .dtype = c->grad_dtype, .cols = c->k_cols};
    return QK_TENSORS;
}
static int squares_tensors(const void *c, ops_tensor *t)
{
    return qk_tensors(c, t, SQUARES);
}
static int norm_tensors(const void *c, ops_tensor *t)
{
    return qk_tensors(c, t, NORM);
}
static int dots_tensors(const void *c, ops_tensor *t)
{
    return qk_tensors(c, t, DOTS_STEP);
}
static int qk_backward_tensors(const void *c, ops_tensor *t)
{
    return qk_tensors(c, t, BACKWARD);
}

/* Squares that all ranks together might have. */
static void derive_sums(const void *p, double *const *v)
{
    const qk_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int which = 0; which < 2; which++)
            v[SUMS][2 * r + which] = (0.5 + ops_uniform()) * (double)((which ? c->k_cols : c->q_cols) * c->ranks);
}

/* The sum of x², or of d * gamma * x, of queries or keys. */
static double total(const qk_case *c, double *const *v, int64_t row, int which, bool dots)
{
    double sum = 0;
    for (int64_t i = 0; i < (which ? c->k_cols : c->q_cols); i++) {
        int64_t at = row * stride(c) + (which ? c->q_cols : 0) + i;
        sum += v[IN][at] * (dots ? v[D][at] * v[which ? K_GAMMA : Q_GAMMA][i] : v[IN][at]);
    }
    return sum;
}

static void squares_reference(const void *p, double *const *v)
{
    const qk_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int which = 0; which < 2; which++)
            v[SUMS][2 * r + which] = which == 0 || c->counts_keys ? total(c, v, r, which, false) : 0;
}

static void dots_reference(const void *p, double *const *v)
{
    const qk_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int which = 0; which < 2; which++)
            v[DOTS][2 * r + which] = total(c, v, r, which, true);
}

static double rstd(const qk_case *c, double *const *v, int64_t row, int which)
{
    return 1 / sqrt(v[SUMS][2 * row + which] / (double)((which ? c->k_cols : c->q_cols) * c->ranks) + EPS);
}

static void norm_reference(const void *p, double *const *v)
{
    const qk_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < stride(c); i++) {
            int which = i >= c->q_cols;
            int64_t at = r * stride(c) + i, col = which ? i - c->q_cols : i;
            v[OUT][at] = v[IN][at] * (i < c->q_cols + c->k_cols ? rstd(c, v, r, which) * v[which ? K_GAMMA : Q_GAMMA][col] : 1);
        }
}

static void qk_backward_reference(const void *p, double *const *v)
{
    const qk_case *c = p;
    for (int64_t i = 0; i < c->q_cols + c->k_cols; i++) {
        int which = i >= c->q_cols;
        int64_t col = which ? i - c->q_cols : i;
        double *grad = &v[which ? K_GRAD : Q_GRAD][col], sum = 0, width = (double)((which ? c->k_cols : c->q_cols) * c->ranks);
        for (int64_t r = 0; r < c->rows; r++) {
            double *d = &v[D][r * stride(c) + i], by = rstd(c, v, r, which), hat = v[IN][r * stride(c) + i] * by;
            double dots = which == 0 || c->counts_keys ? v[DOTS][2 * r + which] : 0;
            sum += *d * hat;
            *d = (*d * v[which ? K_GAMMA : Q_GAMMA][col] - hat * dots * by / width) * by;
        }
        *grad = sum + (c->accumulate ? *grad : 0);
    }
}

static qd_qk_norm_args qk_arguments(const qk_case *c, void *const *t)
{
    return (qd_qk_norm_args){.x = t[IN], .q_gamma = t[Q_GAMMA], .k_gamma = t[K_GAMMA], .y = t[OUT], .d = t[D], .sums = t[SUMS],
                             .dots = t[DOTS], .rows = c->rows, .row_stride = stride(c), .q_cols = c->q_cols, .k_cols = c->k_cols,
                             .q_width = c->q_cols * c->ranks, .k_width = c->k_cols * c->ranks, .counts_keys = c->counts_keys,
                             .eps = (float)EPS, .dtype = c->dtype, .param_dtype = c->param_dtype, .q_grad = t[Q_GRAD],
                             .k_grad = t[K_GRAD], .accumulate = c->accumulate, .grad_dtype = c->grad_dtype};
}
static qd_status squares_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    qd_qk_norm_args a = qk_arguments(p, t);
    return k->qk_squares(stream, &a);
}
static qd_status norm_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    qd_qk_norm_args a = qk_arguments(p, t);
    return k->qk_norm(stream, &a);
}
static qd_status dots_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    qd_qk_norm_args a = qk_arguments(p, t);
    return k->qk_dots(stream, &a);
}
static qd_status qk_backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    qd_qk_norm_args a = qk_arguments(p, t);
    return k->qk_norm_backward(stream, &a);
}

int main(int argc, char **argv)
{
#define MAP(name) .kernel = name, .cases = maps, .case_size = sizeof *maps, .case_count = COUNT(maps), .describe = describe_map
#define QK(name) .kernel = name, .cases = qks, .case_size = sizeof *qks, .case_count = COUNT(qks), .describe = describe_qk
    const ops_op ops[] = {
        {MAP("clip"), .tensors = forward_tensors, .reference = clip_reference, .run = clip_run},
        {MAP("clip_backward"), .tensors = backward_tensors, .reference = clip_backward_reference, .run = clip_backward_run},
        {MAP("scale"), .tensors = forward_tensors, .reference = scale_reference, .run = scale_run},
        {MAP("softcap"), .tensors = cap_tensors, .reference = cap_reference, .run = cap_run},
        {QK("qk_squares"), .tensors = squares_tensors, .reference = squares_reference, .run = squares_run},
        {QK("qk_norm"), .tensors = norm_tensors, .derive = derive_sums, .reference = norm_reference, .run = norm_run},
        {QK("qk_dots"), .tensors = dots_tensors, .reference = dots_reference, .run = dots_run},
        {QK("qk_norm_backward"), .tensors = qk_backward_tensors, .derive = derive_sums, .reference = qk_backward_reference,
         .run = qk_backward_run},
    };
    return ops_main(argc, argv, ops, COUNT(ops), NULL, 0);
}
