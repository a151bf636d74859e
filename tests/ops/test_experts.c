/* Routers, rows on their way to experts, products over experts, norms of queries and keys. ctest: processors 2 */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- norms of queries and keys ---- */

typedef struct head_case {
    int64_t rows, extra; /* extra: columns behind queries and keys */
    int heads, kv_heads, head_dim;
    qd_dtype dtype;
} head_case;
static const head_case head_cases[] = {{1, 0, 1, 1, 2, QD_F32},  {7, 12, 4, 2, 6, QD_F32},    {33, 128, 4, 2, 64, QD_F32},
                                       {5, 3, 2, 1, 130, QD_F32}, {19, 64, 8, 1, 64, QD_BF16}};
enum { HX, HQ, HK, HD, HY, HR, HDX, HDQ, HDK, HEAD_TENSORS };

static int64_t head_stride(const head_case *c)
{
    return (int64_t)(c->heads + c->kv_heads) * c->head_dim + c->extra;
}

static void head_describe(const void *p, char *text, size_t size)
{
    const head_case *c = p;
    snprintf(text, size, "%lld rows, %d+%d heads of %d, %s", (long long)c->rows, c->heads, c->kv_heads, c->head_dim, qd_dtype_name(c->dtype));
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
    t[HR] = (ops_tensor){.name = "rstd", .role = backward ? OPS_IN : OPS_OUT, .dtype = QD_F32, .rows = c->rows, .cols = c->heads + c->kv_heads};
    t[HDX] = (ops_tensor){.name = "dx", .role = backward ? OPS_OUT : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = stride, .shares = 1 + HD};
    t[HDQ] = (ops_tensor){.name = "q_grad", .role = backward ? OPS_INOUT : OPS_ABSENT, .dtype = QD_F32, .cols = c->head_dim};
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
    return v[HX][at] * head_rstd(c, v, row, (int)head) * v[head < c->heads ? HQ : HK][col % c->head_dim];
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
    for (int64_t r = 0; r < c->rows; r++) {
        double *dx = v[HDX] + r * head_stride(c), *dy = v[HD] + r * head_stride(c), *x = v[HX] + r * head_stride(c);
        for (int h = 0; h < c->heads + c->kv_heads; h++) {
            double rstd = head_rstd(c, v, r, h), mean = 0, *gamma = v[h < c->heads ? HQ : HK], *grad = v[h < c->heads ? HDQ : HDK];
            int64_t at = (int64_t)h * c->head_dim;
            for (int i = 0; i < c->head_dim; i++) {
                mean += dy[at + i] * gamma[i] * x[at + i] * rstd / c->head_dim;
                grad[i] += dy[at + i] * x[at + i] * rstd;
            }
            for (int i = 0; i < c->head_dim; i++)
                dx[at + i] = rstd * (dy[at + i] * gamma[i] - x[at + i] * rstd * mean);
        }
        for (int64_t i = (int64_t)(c->heads + c->kv_heads) * c->head_dim; i < head_stride(c); i++)
            dx[i] = dy[i];
    }
}

static qd_head_norm_args head_arguments(const head_case *c, void *const *t)
{
    return (qd_head_norm_args){.x = t[HX], .q_gamma = t[HQ], .k_gamma = t[HK], .y = t[HY], .rstd = t[HR], .rows = c->rows,
                               .row_stride = head_stride(c), .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim,
                               .eps = 1e-5f, .dtype = c->dtype, .param_dtype = c->dtype, .d = t[HDX], .q_grad = t[HDQ], .k_grad = t[HDK],
                               .grad_dtype = QD_F32};
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

/* ---- the router ---- */

typedef struct route_case {
    int64_t rows, load_rows, first_row;
    qd_route_rule rule;
    bool bias;
    double aux, z;
} route_case;
static const route_case route_cases[] = {
    {9, 4, 1, {8, 2, 1, 1, 1, false, true, 1}, false, 0, 0},
    {9, 4, 0, {8, 2, 1, 1, 1, false, false, 1.5f}, false, 0.3, 0.01},
    {40, 8, 3, {16, 4, 4, 2, 2, true, true, 2.5f}, true, 0.2, 0},
    {33, 33, 0, {12, 3, 3, 2, 1, false, true, 1}, true, 0, 0.02},
    {17, 17, 0, {8, 8, 2, 2, 1, true, false, 1}, true, 0.1, 0.05},
    {6, 6, 0, {5, 1, 1, 1, 1, true, true, 1}, false, 0.1, 0},
};
enum { RL, RB, RC, RW, RN, RDW, RDL, ROUTE_TENSORS };

static int64_t route_loads(const route_case *c)
{
    return (c->first_row + c->rows - 1) / c->load_rows + 1;
}

static void route_describe(const void *p, char *text, size_t size)
{
    const route_case *c = p;
    snprintf(text, size, "%lld rows, %d of %d, %d of %d groups, %s%s", (long long)c->rows, c->rule.per_token, c->rule.experts,
             c->rule.top_groups, c->rule.groups, c->rule.sigmoid ? "sigmoid" : "softmax", c->rule.normalised ? "" : ", not normalised");
}

static int route_tensors(const route_case *c, ops_tensor *t, bool backward)
{
    ops_role out = backward ? OPS_IN : OPS_OUT, grad = backward ? OPS_IN : OPS_ABSENT;
    int k = c->rule.per_token, e = c->rule.experts;
    t[RL] = (ops_tensor){.name = "logits", .role = OPS_IN, .dtype = QD_F32, .rows = c->rows, .cols = e};
    t[RB] = (ops_tensor){.name = "bias", .role = c->bias ? OPS_IN : OPS_ABSENT, .dtype = QD_F32, .cols = e, .scale = 0.2};
    t[RC] = (ops_tensor){.name = "choice", .role = out, .dtype = QD_I32, .rows = c->rows, .cols = k};
    t[RW] = (ops_tensor){.name = "weight", .role = out, .dtype = QD_F32, .rows = c->rows, .cols = k};
    t[RN] = (ops_tensor){.name = "load", .role = out, .dtype = QD_F32, .rows = route_loads(c), .cols = e};
    t[RDW] = (ops_tensor){.name = "d_weight", .role = grad, .dtype = QD_F32, .rows = c->rows, .cols = k};
    t[RDL] = (ops_tensor){.name = "d_logits", .role = backward ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .rows = c->rows, .cols = e};
    return ROUTE_TENSORS;
}

static int route_forward_tensors(const void *c, ops_tensor *t)
{
    return route_tensors(c, t, false);
}

static int route_backward_tensors(const void *c, ops_tensor *t)
{
    return route_tensors(c, t, true);
}

static void route_scores(const route_case *c, const double *logits, double *score)
{
    double sum = 0;
    for (int e = 0; e < c->rule.experts; e++) {
        score[e] = c->rule.sigmoid ? 1 / (1 + exp(-logits[e])) : exp(logits[e]);
        sum += score[e];
    }
    for (int e = 0; e < c->rule.experts && !c->rule.sigmoid; e++)
        score[e] /= sum;
}

/* By counting how many are better: nothing in common with the kernel's search. */
static bool among_best(const double *value, int begin, int end, int index, int best)
{
    int better = 0;
    for (int i = begin; i < end; i++)
        better += value[i] > value[index] || (value[i] == value[index] && i < index);
    return better < best;
}

static void route_row(const route_case *c, double *const *v, int64_t row, bool choose)
{
    const qd_route_rule *r = &c->rule;
    double score[64], value[64], groups[64] = {0}, sum = 0;
    int size = r->experts / r->groups, found = 0, chosen[64];
    route_scores(c, v[RL] + row * r->experts, score);
    for (int e = 0; e < r->experts; e++)
        value[e] = score[e] + (c->bias ? v[RB][e] : 0);
    for (int e = 0; e < r->experts; e++)
        if (among_best(value, e / size * size, (e / size + 1) * size, e, r->group_best))
            groups[e / size] += value[e];
    for (int e = 0; e < r->experts; e++)
        if (!among_best(groups, 0, r->groups, e / size, r->top_groups))
            value[e] = -1e30;
    for (int rank = 1; rank <= r->per_token; rank++)
        for (int e = 0; e < r->experts; e++)
            if (among_best(value, 0, r->experts, e, rank) && !among_best(value, 0, r->experts, e, rank - 1))
                chosen[found++] = e;
    for (int j = 0; j < r->per_token; j++) {
        if (choose)
            v[RC][row * r->per_token + j] = chosen[j];
        sum += score[(int)v[RC][row * r->per_token + j]];
    }
    for (int j = 0; j < r->per_token; j++)
        v[RW][row * r->per_token + j] = score[(int)v[RC][row * r->per_token + j]] * (double)r->scale / (r->normalised ? sum : 1);
}

static void route_forward_reference(const void *p, double *const *v)
{
    const route_case *c = p;
    for (int64_t i = 0; i < route_loads(c) * c->rule.experts; i++)
        v[RN][i] = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        route_row(c, v, row, true);
        for (int j = 0; j < c->rule.per_token; j++)
            v[RN][(c->first_row + row) / c->load_rows * c->rule.experts + (int64_t)v[RC][row * c->rule.per_token + j]] += 1;
    }
}

static double route_loss(const void *p, double *const *v)
{
    const route_case *c = p;
    double loss = 0, score[64];
    for (int64_t row = 0; row < c->rows; row++) {
        const double *logits = v[RL] + row * c->rule.experts, *load = v[RN] + (c->first_row + row) / c->load_rows * c->rule.experts;
        double total = 0, all = 0;
        route_row(c, v, row, false);
        for (int j = 0; j < c->rule.per_token; j++)
            loss += v[RDW][row * c->rule.per_token + j] * v[RW][row * c->rule.per_token + j];
        route_scores(c, logits, score);
        for (int e = 0; e < c->rule.experts; e++) {
            total += score[e];
            all += exp(logits[e]);
        }
        for (int e = 0; e < c->rule.experts; e++)
            loss += c->aux * load[e] * 0.25 * score[e] / total;
        loss += c->z * log(all) * log(all);
    }
    return loss;
}

/* Differences of the loss by one logit at a time, in double: only the row concerned changes. */
static void route_backward_reference(const void *p, double *const *v)
{
    const route_case *c = p;
    const double h = 1e-5;
    for (int64_t i = 0; i < c->rows * c->rule.experts; i++) {
        double kept = v[RL][i], up, down;
        v[RL][i] = kept + h;
        up = route_loss(p, v);
        v[RL][i] = kept - h;
        down = route_loss(p, v);
        v[RL][i] = kept;
        v[RDL][i] = (up - down) / (2 * h);
    }
}

static qd_status route_forward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const route_case *c = p;
    return k->route(stream, &(qd_route_args){.logits = t[RL], .bias = t[RB], .choice = t[RC], .weight = t[RW], .load = t[RN], .rows = c->rows,
                                             .first_row = c->first_row, .load_rows = c->load_rows, .loads = route_loads(c),
                                             .rule = c->rule, .bias_dtype = QD_F32});
}

static qd_status route_backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const route_case *c = p;
    return k->route_grad(stream, &(qd_route_grad_args){.logits = t[RL], .weight = t[RW], .d_weight = t[RDW], .load = t[RN], .choice = t[RC],
                                                       .d_logits = t[RDL], .rows = c->rows, .first_row = c->first_row,
                                                       .load_rows = c->load_rows, .aux = (float)c->aux, .load_scale = 0.25f,
                                                       .z = (float)c->z, .rule = c->rule});
}

/* ---- rows: permute, combine ---- */

typedef struct rows_case {
    int64_t rows, cols;
    int experts, per_token, copies;
    int dropped; /* every so many-th assignment has no place; 0: all have */
    bool weighted, add, back;
    qd_dtype dtype;
} rows_case;
static const rows_case rows_cases[] = {
    {1, 1, 2, 1, 1, 0, true, true, false, QD_F32},    {7, 33, 4, 2, 1, 0, false, false, false, QD_F32},
    {19, 64, 8, 3, 1, 4, true, true, true, QD_F32},   {12, 40, 8, 2, 2, 3, true, false, true, QD_F32},
    {31, 128, 5, 2, 1, 0, true, true, true, QD_BF16},
};
enum { PX, PF, PP, PN, PW, PY, PO, PDW, PA, ROWS_TENSORS };

static void rows_describe(const void *p, char *text, size_t size)
{
    const rows_case *c = p;
    snprintf(text, size, "%lldx%lld, %d of %d, %d copies%s %s", (long long)c->rows, (long long)c->cols, c->per_token, c->experts, c->copies,
             c->dropped ? ", some dropped" : "", qd_dtype_name(c->dtype));
}

static int rows_tensors(const rows_case *c, ops_tensor *t, bool combine)
{
    int64_t n = c->rows * c->per_token;
    bool back = c->back && !combine;
    t[PX] = (ops_tensor){.name = "x", .role = OPS_IN, .dtype = c->dtype, .rows = combine ? c->copies * n : c->rows, .cols = c->cols};
    t[PF] = (ops_tensor){.name = "from", .role = OPS_IN, .dtype = QD_I32, .cols = n};
    t[PP] = (ops_tensor){.name = "place", .role = OPS_IN, .dtype = QD_I32, .cols = n};
    t[PN] = (ops_tensor){.name = "count", .role = OPS_IN, .dtype = QD_I32, .cols = c->experts};
    t[PW] = (ops_tensor){.name = "weight", .role = c->weighted ? OPS_IN : OPS_ABSENT, .dtype = QD_F32, .cols = n};
    t[PY] = (ops_tensor){.name = "y", .role = combine ? OPS_OUT : OPS_INOUT, .dtype = c->dtype, .rows = combine ? c->rows : n, .cols = c->cols};
    t[PO] = (ops_tensor){.name = "old", .role = back ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->copies * n, .cols = c->cols};
    t[PDW] = (ops_tensor){.name = "d_weight", .role = back ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .cols = n, .tol = 2e-5};
    t[PA] = (ops_tensor){.name = "add", .role = combine && c->add ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows, .cols = c->cols};
    return ROWS_TENSORS;
}

static int permute_tensors(const void *c, ops_tensor *t)
{
    return rows_tensors(c, t, false);
}

static int combine_tensors(const void *c, ops_tensor *t)
{
    return rows_tensors(c, t, true);
}

/* Random choices, and places that count through the experts. */
static void rows_derive(const void *p, double *const *v)
{
    const rows_case *c = p;
    int64_t n = c->rows * c->per_token, next = 0;
    int *choice = malloc((size_t)n * sizeof *choice);
    for (int64_t i = 0; i < n; i++)
        choice[i] = c->dropped && i % c->dropped == 1 ? -1 : (int)(ops_uniform() * c->experts);
    for (int64_t i = 0; i < n; i++)
        v[PP][i] = -1;
    for (int e = 0; e < c->experts; e++) {
        int64_t first = next;
        for (int64_t i = 0; i < n; i++) {
            if (choice[i] != e)
                continue;
            v[PF][next] = (double)i;
            v[PP][i] = (double)next++;
        }
        v[PN][e] = (double)(next - first);
    }
    for (; next < n; next++)
        v[PF][next] = 0;
    free(choice);
}

static void permute_reference(const void *p, double *const *v)
{
    const rows_case *c = p;
    int64_t n = c->rows * c->per_token;
    for (int64_t i = 0; i < n; i++) {
        int64_t place = (int64_t)v[PP][i];
        const double *x = v[PX] + i / c->per_token * c->cols;
        double dot = 0;
        for (int64_t k = 0; k < c->cols && place >= 0; k++) {
            v[PY][place * c->cols + k] = x[k] * (c->weighted ? v[PW][i] : 1);
            for (int copy = 0; copy < c->copies && c->back; copy++)
                dot += x[k] * v[PO][(copy * n + place) * c->cols + k];
        }
        if (c->back)
            v[PDW][i] = dot;
    }
}

static void combine_reference(const void *p, double *const *v)
{
    const rows_case *c = p;
    int64_t n = c->rows * c->per_token;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t k = 0; k < c->cols; k++) {
            double sum = c->add ? v[PA][r * c->cols + k] : 0;
            for (int64_t i = r * c->per_token; i < (r + 1) * c->per_token; i++)
                for (int copy = 0; copy < c->copies && v[PP][i] >= 0; copy++)
                    sum += (c->weighted ? v[PW][i] : 1) * v[PX][(copy * n + (int64_t)v[PP][i]) * c->cols + k];
            v[PY][r * c->cols + k] = sum;
        }
}

static qd_status permute_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const rows_case *c = p;
    return k->permute(stream, &(qd_permute_args){.x = t[PX], .from = t[PF], .place = t[PP], .count = t[PN], .weight = t[PW], .y = t[PY],
                                                 .old = t[PO], .d_weight = t[PDW], .rows = c->rows, .cols = c->cols,
                                                 .per_token = c->per_token, .experts = c->experts, .copies = c->copies, .dtype = c->dtype});
}

static qd_status combine_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const rows_case *c = p;
    return k->combine(stream, &(qd_combine_args){.x = t[PX], .add = t[PA], .place = t[PP], .weight = t[PW], .y = t[PY], .rows = c->rows,
                                                 .cols = c->cols, .per_token = c->per_token, .copies = c->copies, .dtype = c->dtype});
}

/* ---- products over experts ---- */

typedef struct grouped_case {
    int sources, experts;
    int64_t counts[12]; /* (sources, experts) */
    int64_t begin, rows, n, k;
    bool trans_b, by_experts;
    qd_dtype dtype;
} grouped_case;
static const grouped_case grouped_cases[] = {
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, true, false, QD_F32},      {1, 3, {5, 0, 9}, 0, 20, 17, 23, false, false, QD_F32},
    {2, 3, {4, 0, 3, 2, 6, 0}, 0, 15, 16, 32, true, false, QD_F32}, {2, 3, {4, 0, 3, 2, 6, 0}, 3, 8, 16, 32, false, false, QD_F32},
    {2, 3, {4, 0, 3, 2, 6, 0}, 11, 8, 16, 32, true, false, QD_F32}, {1, 4, {0, 0, 0, 0}, 0, 8, 16, 8, true, false, QD_F32},
    {1, 3, {5, 0, 9}, 0, 14, 17, 23, false, true, QD_F32},      {2, 3, {4, 0, 3, 2, 6, 0}, 2, 9, 16, 32, false, true, QD_F32},
    {1, 4, {0, 40, 0, 0}, 0, 40, 64, 48, true, false, QD_BF16}, {2, 2, {30, 1, 0, 20}, 0, 51, 64, 48, false, true, QD_BF16},
};
enum { GA, GB, GC, GN, GROUPED_TENSORS };

static void grouped_describe(const void *p, char *text, size_t size)
{
    const grouped_case *c = p;
    snprintf(text, size, "%d sources, %d experts, rows %lld+%lld, (%lld, %lld)%s%s %s", c->sources, c->experts, (long long)c->begin,
             (long long)c->rows, (long long)c->n, (long long)c->k, c->trans_b ? "ᵀ" : "", c->by_experts ? " by experts" : "", qd_dtype_name(c->dtype));
}

static int grouped_tensors(const void *p, ops_tensor *t)
{
    const grouped_case *c = p;
    t[GA] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = c->k};
    t[GB] = (ops_tensor){.name = "b", .role = c->by_experts ? OPS_INOUT : OPS_IN, .dtype = c->dtype, .rows = c->experts, .cols = c->n * c->k};
    t[GC] = (ops_tensor){.name = "c", .role = c->by_experts ? OPS_IN : OPS_INOUT, .dtype = c->dtype, .rows = c->rows, .cols = c->n};
    t[GN] = (ops_tensor){.name = "counts", .role = OPS_IN, .dtype = QD_I32, .rows = c->sources, .cols = c->experts};
    return GROUPED_TENSORS;
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
    int64_t row = -c->begin;
    for (int i = 0; i < c->sources * c->experts; i++)
        for (int64_t j = 0; j < c->counts[i]; j++, row++) {
            double *b = v[GB] + i % c->experts * c->n * c->k;
            for (int64_t n = 0; n < c->n && row >= 0 && row < c->rows; n++) {
                double sum = 0;
                for (int64_t k = 0; k < c->k; k++) {
                    if (c->by_experts)
                        b[n * c->k + k] += v[GC][row * c->n + n] * v[GA][row * c->k + k];
                    else
                        sum += v[GA][row * c->k + k] * b[c->trans_b ? n * c->k + k : k * c->n + n];
                }
                if (!c->by_experts)
                    v[GC][row * c->n + n] = sum;
            }
        }
}

static qd_status grouped_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const grouped_case *c = p;
    return k->grouped(stream, &(qd_grouped_args){.a = t[GA], .b = t[GB], .c = t[GC], .counts = t[GN], .count_stride = c->experts,
                                                 .begin = c->begin, .rows = c->rows, .n = c->n, .k = c->k, .sources = c->sources,
                                                 .experts = c->experts, .trans_b = c->trans_b, .by_experts = c->by_experts,
                                                 .a_dtype = c->dtype, .b_dtype = c->dtype, .c_dtype = c->dtype});
}

/* ---- places, loads, biases, ties ---- */

static void places(void **state)
{
    (void)state;
    qd_device *device = ops_device("best", 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const int32_t choice[] = {2, 0, 2, 1, 2, 0, 0, 2};
    const float weight[] = {0.5f, 0.1f, 0.2f, 0.9f, 0.5f, 0.3f, 0.1f, 0.4f};
    int32_t place[8], from[8], count[4];
    qd_route_plan_args a = {.choice = choice, .weight = weight, .place = place, .from = from, .count = count, .rows = 4, .experts = 4, .per_token = 2};
    ops_assert_ok(k->route_plan(stream, &a));
    assert_memory_equal(count, ((int32_t[]){3, 1, 4, 0}), sizeof count);
    assert_memory_equal(from, ((int32_t[]){1, 5, 6, 3, 0, 2, 4, 7}), sizeof from);
    assert_memory_equal(place, ((int32_t[]){4, 0, 5, 3, 6, 1, 2, 7}), sizeof place);
    a.limit = 2;
    ops_assert_ok(k->route_plan(stream, &a)); /* the last ones are dropped */
    assert_memory_equal(count, ((int32_t[]){2, 1, 2, 0}), sizeof count);
    assert_memory_equal(place, ((int32_t[]){3, 0, 4, 2, -1, 1, -1, -1}), sizeof place);
    a.least = true;
    ops_assert_ok(k->route_plan(stream, &a)); /* the lightest ones are; of 0.1 and 0.1 the last */
    assert_memory_equal(place, ((int32_t[]){3, 0, -1, 2, 4, 1, -1, -1}), sizeof place);
    float total[4] = {1, 0, 0, 0};
    ops_assert_ok(k->route_load(stream, &(qd_route_load_args){.choice = choice, .total = total, .assignments = 8, .experts = 4}));
    assert_true(total[0] == 4 && total[1] == 1 && total[2] == 4 && total[3] == 0);
    float bias[4] = {0.5f, 0, 0, 0};
    total[0] = 2;
    ops_assert_ok(k->expert_bias(stream, &(qd_expert_bias_args){.bias = bias, .total = total, .param = bias, .experts = 4, .mean = 2, .rate = 0.25,
                                                                .zero_total = true, .param_dtype = QD_F32}));
    assert_true(bias[0] == 0.5f && bias[1] == 0.25f && bias[2] == -0.25f && bias[3] == 0.25f && total[2] == 0);
    const int32_t wrong[] = {0, 4};
    a = (qd_route_plan_args){.choice = wrong, .place = place, .from = from, .count = count, .rows = 1, .experts = 4, .per_token = 2};
    ops_assert_fails(k->route_plan(stream, &a), QD_USAGE, "expert 4 of 4");
}

/* Equal scores: the lowest index. Numbers that are not numbers: still experts that exist, each once. */
static void ties(void **state)
{
    (void)state;
    qd_device *device = ops_device("best", 1);
    const qd_kernels *k = qd_device_kernels(device);
    const float logits[] = {1, 1, 1, 1, 1, 1, 0, 2, 2, 0, 2, 0, NAN, NAN, NAN, NAN, NAN, NAN, 3, NAN, 1, NAN, NAN, 0};
    int32_t choice[12];
    float weight[12], load[6];
    qd_route_args a = {.logits = logits, .choice = choice, .weight = weight, .load = load, .rows = 4, .load_rows = 4, .loads = 1,
                       .rule = {6, 3, 1, 1, 1, true, true, 1}};
    ops_assert_ok(k->route(qd_device_compute_stream(device), &a));
    assert_memory_equal(choice, ((int32_t[]){0, 1, 2, 1, 2, 4, 0, 1, 2, 0, 2, 5}), sizeof choice);
    a.rule.groups = 3;
    a.rule.top_groups = 2;
    a.rule.group_best = 2;
    ops_assert_ok(k->route(qd_device_compute_stream(device), &a));
    assert_memory_equal(choice, ((int32_t[]){0, 1, 2, 1, 2, 0}), 6 * sizeof *choice);
}

int main(int argc, char **argv)
{
#define CASES(list) .cases = list, .case_size = sizeof *list, .case_count = COUNT(list), .cpu_only = true
    const ops_op ops[] = {
        {.kernel = "head_norm", CASES(head_cases), .describe = head_describe, .tensors = head_forward_tensors,
         .reference = head_forward_reference, .run = head_forward_run},
        {.kernel = "head_norm_backward", CASES(head_cases), .describe = head_describe, .tensors = head_backward_tensors, .derive = head_derive,
         .reference = head_backward_reference, .run = head_backward_run, .loss = head_loss,
         .gradients = {{HX, HDX}, {HQ, HDQ}, {HK, HDK}}, .gradient_count = 3},
        {.kernel = "route", CASES(route_cases), .describe = route_describe, .tensors = route_forward_tensors,
         .reference = route_forward_reference, .run = route_forward_run},
        {.kernel = "route_grad", CASES(route_cases), .describe = route_describe, .tensors = route_backward_tensors,
         .derive = route_forward_reference, .reference = route_backward_reference, .run = route_backward_run, .loss = route_loss,
         .gradients = {{RL, RDL}}, .gradient_count = 1},
        {.kernel = "permute", CASES(rows_cases), .describe = rows_describe, .tensors = permute_tensors, .derive = rows_derive,
         .reference = permute_reference, .run = permute_run},
        {.kernel = "combine", CASES(rows_cases), .describe = rows_describe, .tensors = combine_tensors, .derive = rows_derive,
         .reference = combine_reference, .run = combine_run},
        {.kernel = "grouped", CASES(grouped_cases), .describe = grouped_describe, .tensors = grouped_tensors, .derive = grouped_derive,
         .reference = grouped_reference, .run = grouped_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(places), cmocka_unit_test(ties)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
