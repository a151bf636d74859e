/* Routers, positions of assignments, and the rows that permute and combine move.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct route_case {
    int64_t rows, load_rows, first_row;
    qd_route_rule rule;
    bool bias;
    double aux, z;
    qd_dtype grad; /* of d_logits */
} route_case;
static const route_case route_cases[] = {
    {9, 4, 1, {8, 2, 1, 1, 1, false, true, 1}, false, 0, 0, QD_F32},
    {9, 4, 0, {8, 2, 1, 1, 1, false, false, 1.5f}, false, 0.3, 0.01, QD_F32},
    {40, 8, 3, {16, 4, 4, 2, 2, true, true, 2.5f}, true, 0.2, 0, QD_F32},
    {33, 33, 0, {12, 3, 3, 2, 1, false, true, 1}, true, 0, 0.02, QD_F32},
    {17, 17, 0, {8, 8, 2, 2, 1, true, false, 1}, true, 0.1, 0.05, QD_F32},
    {6, 6, 0, {5, 1, 1, 1, 1, true, true, 1}, false, 0.1, 0, QD_F32},
    {70, 50, 20, {64, 6, 1, 1, 1, false, true, 1}, false, 0.1, 0.001, QD_BF16},
    {35, 16, 5, {96, 4, 1, 1, 1, true, true, 1}, true, 0.1, 0, QD_F32},
    {33, 33, 0, {256, 8, 8, 4, 2, true, true, 2.5f}, true, 0.01, 0, QD_F32},
    {9, 9, 0, {512, 16, 64, 16, 1, false, false, 1}, false, 0.01, 0.001, QD_F32},
};
static const route_case route_speed[] = {
    {16384, 4096, 0, {8, 2, 1, 1, 1, false, true, 1}, false, 0.01, 0, QD_BF16},
    {16384, 4096, 0, {64, 6, 1, 1, 1, false, true, 1}, false, 0.01, 0, QD_BF16},
    {16384, 4096, 0, {256, 8, 8, 4, 2, true, true, 2.5f}, true, 0.01, 0, QD_BF16},
};
enum { RL, RB, RC, RW, RN, RDW, RDL, ROUTE_TENSORS };

enum { EXPERTS_MOST = 512 };

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
    t[RDL] = (ops_tensor){.name = "d_logits", .role = backward ? OPS_OUT : OPS_ABSENT, .dtype = c->grad, .rows = c->rows, .cols = e};
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

/* Scores, and the choices of a row by them. */
static void route_choose(const route_case *c, double *const *v, int64_t row)
{
    const qd_route_rule *r = &c->rule;
    double score[EXPERTS_MOST], value[EXPERTS_MOST], groups[EXPERTS_MOST] = {0};
    int size = r->experts / r->groups, found = 0;
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
                v[RC][row * r->per_token + found++] = e;
}

/* Weights of the given choices. */
static void route_weigh(const route_case *c, double *const *v, int64_t row)
{
    const qd_route_rule *r = &c->rule;
    double score[EXPERTS_MOST], sum = 0;
    const double *choice = v[RC] + row * r->per_token;
    route_scores(c, v[RL] + row * r->experts, score);
    for (int j = 0; j < r->per_token; j++)
        sum += score[(int)choice[j]];
    for (int j = 0; j < r->per_token; j++)
        v[RW][row * r->per_token + j] = score[(int)choice[j]] * (double)r->scale / (r->normalised ? sum : 1);
}

static void route_forward_reference(const void *p, double *const *v)
{
    const route_case *c = p;
    for (int64_t i = 0; i < route_loads(c) * c->rule.experts; i++)
        v[RN][i] = 0;
    for (int64_t row = 0; row < c->rows; row++) {
        route_choose(c, v, row);
        route_weigh(c, v, row);
        for (int j = 0; j < c->rule.per_token; j++)
            v[RN][(c->first_row + row) / c->load_rows * c->rule.experts + (int64_t)v[RC][row * c->rule.per_token + j]] += 1;
    }
}

/* Results of the forward pass; with many rows, which are only timed, any choices will do. */
static void route_derive(const void *p, double *const *v)
{
    const route_case *c = p;
    if (c->rows < 1000) {
        route_forward_reference(p, v);
        return;
    }
    for (int64_t i = 0; i < c->rows * c->rule.per_token; i++) {
        v[RC][i] = (double)((i + i / c->rule.per_token * 7) % c->rule.experts);
        v[RW][i] = 1.0 / c->rule.per_token;
    }
}

static double route_row_loss(const route_case *c, double *const *v, int64_t row)
{
    const double *logits = v[RL] + row * c->rule.experts, *load = v[RN] + (c->first_row + row) / c->load_rows * c->rule.experts;
    double total = 0, all = 0, loss = 0, score[EXPERTS_MOST];
    route_weigh(c, v, row);
    for (int j = 0; j < c->rule.per_token; j++)
        loss += v[RDW][row * c->rule.per_token + j] * v[RW][row * c->rule.per_token + j];
    route_scores(c, logits, score);
    for (int e = 0; e < c->rule.experts; e++) {
        total += score[e];
        all += exp(logits[e]);
    }
    for (int e = 0; e < c->rule.experts; e++)
        loss += c->aux * load[e] * 0.25 * score[e] / total;
    return loss + c->z * log(all) * log(all);
}

static double route_loss(const void *p, double *const *v)
{
    const route_case *c = p;
    double loss = 0;
    for (int64_t row = 0; row < c->rows; row++)
        loss += route_row_loss(c, v, row);
    return loss;
}

/* Differences of a row's loss by each of its logits, in double. */
static void route_backward_reference(const void *p, double *const *v)
{
    const route_case *c = p;
    const double h = 1e-5;
    for (int64_t i = 0; i < c->rows * c->rule.experts; i++) {
        double kept = v[RL][i], up, down;
        v[RL][i] = kept + h;
        up = route_row_loss(c, v, i / c->rule.experts);
        v[RL][i] = kept - h;
        down = route_row_loss(c, v, i / c->rule.experts);
        v[RL][i] = kept;
        v[RDL][i] = (up - down) / (2 * h);
    }
}

static qd_status route_forward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const route_case *c = p;
    return k->route(stream, &(qd_route_args){.logits = t[RL], .bias = t[RB], .choice = t[RC], .weight = t[RW], .load = t[RN],
                                             .rows = c->rows,
                                             .first_row = c->first_row, .load_rows = c->load_rows, .loads = route_loads(c),
                                             .rule = c->rule, .bias_dtype = QD_F32});
}

static qd_status route_backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const route_case *c = p;
    return k->route_grad(stream, &(qd_route_grad_args){.logits = t[RL], .weight = t[RW], .d_weight = t[RDW], .load = t[RN], .choice = t[RC],
                                                       .d_logits = t[RDL], .rows = c->rows, .first_row = c->first_row,
                                                       .load_rows = c->load_rows, .aux = (float)c->aux, .load_scale = 0.25f,
                                                       .z = (float)c->z, .rule = c->rule, .grad_dtype = c->grad});
}

typedef struct rows_case {
    int64_t rows, cols;
    int experts, per_token, copies;
    int dropped; /* every n-th assignment has no place; 0: all have */
    bool weighted, add, back;
    qd_dtype dtype;
    bool unplaced; /* permute works without the table of places */
} rows_case;
static const rows_case rows_cases[] = {
    {1, 1, 2, 1, 1, 0, true, true, false, QD_F32, false},    {7, 33, 4, 2, 1, 0, false, false, false, QD_F32, true},
    {19, 64, 8, 3, 1, 4, true, true, true, QD_F32, false},   {12, 40, 8, 2, 2, 3, true, false, true, QD_F32, false},
    {31, 128, 5, 2, 1, 0, true, true, true, QD_BF16, false}, {23, 1032, 40, 6, 1, 5, false, true, false, QD_BF16, true},
    {9, 1500, 16, 5, 3, 3, true, true, true, QD_BF16, false}, {5, 2051, 16, 9, 1, 0, true, false, true, QD_BF16, false},
};
static const rows_case rows_speed[] = {
    {4096, 2048, 64, 6, 1, 0, true, true, true, QD_BF16, false}, {4096, 2048, 64, 6, 1, 0, false, true, false, QD_BF16, false},
    {4096, 2048, 64, 6, 1, 0, false, true, false, QD_BF16, true},
};
enum { PX, PF, PP, PN, PW, PY, PO, PDW, PA, ROWS_TENSORS };

static void rows_describe(const void *p, char *text, size_t size)
{
    const rows_case *c = p;
    snprintf(text, size, "%lldx%lld, %d of %d, %d copies%s%s%s %s", (long long)c->rows, (long long)c->cols, c->per_token, c->experts,
             c->copies, c->dropped ? ", some dropped" : "", c->back ? ", back" : "", c->unplaced ? ", no places" : "",
             qd_dtype_name(c->dtype));
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
    t[PY] = (ops_tensor){.name = "y", .role = combine ? OPS_OUT : OPS_INOUT, .dtype = c->dtype, .rows = combine ? c->rows : n,
                         .cols = c->cols};
    t[PO] = (ops_tensor){.name = "old", .role = back ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->copies * n, .cols = c->cols};
    t[PDW] = (ops_tensor){.name = "d_weight", .role = back ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .cols = n, .tol = 2e-5};
    t[PA] = (ops_tensor){.name = "add", .role = combine && c->add ? OPS_IN : OPS_ABSENT, .dtype = c->dtype, .rows = c->rows,
                         .cols = c->cols};
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
    return k->permute(stream, &(qd_permute_args){.x = t[PX], .from = t[PF], .place = c->unplaced ? NULL : t[PP], .count = t[PN],
                                                 .weight = t[PW], .y = t[PY],
                                                 .old = t[PO], .d_weight = t[PDW], .rows = c->rows, .cols = c->cols,
                                                 .per_token = c->per_token, .experts = c->experts, .copies = c->copies, .dtype = c->dtype});
}

static qd_status combine_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const rows_case *c = p;
    return k->combine(stream, &(qd_combine_args){.x = t[PX], .add = t[PA], .place = t[PP], .weight = t[PW], .y = t[PY], .rows = c->rows,
                                                 .cols = c->cols, .per_token = c->per_token, .copies = c->copies, .dtype = c->dtype});
}

/* Bytes: rows of the side that has fewer are read or written once. */
static double permute_bytes(const void *p)
{
    const rows_case *c = p;
    return (double)(c->rows * (1 + c->per_token * (c->back ? 1 + c->copies : 1)) * c->cols) * (double)qd_dtype_size(c->dtype);
}

static double combine_bytes(const void *p)
{
    const rows_case *c = p;
    return (double)(c->rows * (1 + c->add + c->per_token * c->copies) * c->cols) * (double)qd_dtype_size(c->dtype);
}

typedef struct plan_case {
    int64_t rows, limit;
    int experts, per_token;
    bool least;
    double skew; /* 0: experts are chosen evenly; otherwise the first ones more often */
} plan_case;
static const plan_case plan_cases[] = {
    {1, 0, 1, 1, false, 0},     {5, 0, 4, 2, false, 0},        {700, 0, 8, 2, false, 1},    {3000, 0, 64, 6, false, 2},
    {257, 0, 300, 8, false, 0}, {900, 0, 512, 16, false, 1},   {700, 150, 8, 2, false, 1},  {700, 150, 8, 2, true, 1},
    {5000, 700, 16, 3, true, 3}, {2000, 0, 16, 2, false, 100}, {2000, 100, 16, 2, true, 100},
};
static const plan_case plan_speed[] = {
    {16384, 0, 8, 2, false, 0}, {16384, 0, 64, 6, false, 0}, {16384, 0, 256, 8, false, 0}, {16384, 1600, 64, 6, true, 0}};
enum { LC, LW, LP, LF, LN, PLAN_TENSORS };

static void plan_describe(const void *p, char *text, size_t size)
{
    const plan_case *c = p;
    snprintf(text, size, "%lld rows, %d of %d, limit %lld%s, skew %g", (long long)c->rows, c->per_token, c->experts, (long long)c->limit,
             c->least ? " (least)" : "", c->skew);
}

static int plan_tensors(const void *p, ops_tensor *t)
{
    const plan_case *c = p;
    int64_t n = c->rows * c->per_token;
    t[LC] = (ops_tensor){.name = "choice", .role = OPS_IN, .dtype = QD_I32, .cols = n};
    t[LW] = (ops_tensor){.name = "weight", .role = OPS_IN, .dtype = QD_F32, .cols = n};
    t[LP] = (ops_tensor){.name = "place", .role = OPS_OUT, .dtype = QD_I32, .cols = n};
    /* Contents after the last place are undefined. */
    t[LF] = (ops_tensor){.name = "from", .role = c->limit ? OPS_SCRATCH : OPS_OUT, .dtype = QD_I32, .cols = n};
    t[LN] = (ops_tensor){.name = "count", .role = OPS_OUT, .dtype = QD_I32, .cols = c->experts};
    return PLAN_TENSORS;
}

/* Few distinct weights, so that many are equal. */
static void plan_derive(const void *p, double *const *v)
{
    const plan_case *c = p;
    for (int64_t i = 0; i < c->rows * c->per_token; i++) {
        v[LC][i] = floor(pow(ops_uniform(), 1 + c->skew) * c->experts);
        v[LW][i] = floor(20 * ops_uniform()) / 16;
    }
}

/* By counting the earlier ones within the expert. */
static void plan_reference(const void *p, double *const *v)
{
    const plan_case *c = p;
    int64_t n = c->rows * c->per_token, next = 0;
    for (int e = 0; e < c->experts; e++) {
        int64_t first = next;
        for (int64_t i = 0; i < n; i++) {
            if ((int)v[LC][i] != e)
                continue;
            int64_t before = 0;
            for (int64_t j = 0; j < n && c->limit > 0; j++)
                before += (int)v[LC][j] == e && (c->least && v[LW][j] != v[LW][i] ? v[LW][j] > v[LW][i] : j < i);
            bool stays = c->limit == 0 || before < c->limit;
            v[LP][i] = stays ? (double)next : -1;
            if (stays)
                v[LF][next++] = (double)i;
        }
        v[LN][e] = (double)(next - first);
    }
}

static qd_status plan_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const plan_case *c = p;
    return k->route_plan(stream, &(qd_route_plan_args){.choice = t[LC], .weight = t[LW], .place = t[LP], .from = t[LF], .count = t[LN],
                                                       .rows = c->rows, .limit = c->limit, .experts = c->experts, .per_token = c->per_token,
                                                       .least = c->least});
}

/* Places, loads, biases and ties, on the CPU and on a GPU if there is one. */

static void *give(qd_device *device, const void *host, int64_t bytes)
{
    void *address;
    ops_assert_ok(qd_device_alloc(device, bytes, &address));
    ops_assert_ok(qd_copy(qd_device_compute_stream(device), address, host, bytes));
    ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
    return address;
}

static void assert_holds(qd_device *device, const void *address, const void *expected, int64_t bytes)
{
    char got[256];
    assert_true(bytes <= (int64_t)sizeof got);
    ops_assert_ok(qd_copy(qd_device_compute_stream(device), got, address, bytes));
    ops_assert_ok(qd_stream_wait(qd_device_compute_stream(device)));
    assert_memory_equal(got, expected, (size_t)bytes);
}

static void places_on(qd_device *device)
{
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const int32_t choices[] = {2, 0, 2, 1, 2, 0, 0, 2}, wrong[] = {0, 4}, zeros[8] = {0};
    const float weights[] = {0.5f, 0.1f, 0.2f, 0.9f, 0.5f, 0.3f, 0.1f, 0.4f};
    int32_t *choice = give(device, choices, sizeof choices), *wrong_choice = give(device, wrong, sizeof wrong);
    int32_t *place = give(device, zeros, sizeof zeros), *from = give(device, zeros, sizeof zeros), *count = give(device, zeros, 16);
    float *weight = give(device, weights, sizeof weights);
    qd_route_plan_args a = {.choice = choice, .weight = weight, .place = place, .from = from, .count = count, .rows = 4, .experts = 4,
                            .per_token = 2};
    ops_assert_ok(k->route_plan(stream, &a));
    assert_holds(device, count, (int32_t[]){3, 1, 4, 0}, 16);
    assert_holds(device, from, (int32_t[]){1, 5, 6, 3, 0, 2, 4, 7}, 32);
    assert_holds(device, place, (int32_t[]){4, 0, 5, 3, 6, 1, 2, 7}, 32);
    a.limit = 2;
    ops_assert_ok(k->route_plan(stream, &a)); /* the last ones are dropped */
    assert_holds(device, count, (int32_t[]){2, 1, 2, 0}, 16);
    assert_holds(device, place, (int32_t[]){3, 0, 4, 2, -1, 1, -1, -1}, 32);
    assert_holds(device, from, (int32_t[]){1, 5, 3, 0, 2}, 20);
    a.least = true;
    ops_assert_ok(k->route_plan(stream, &a)); /* the lightest ones are; of 0.1 and 0.1 the last */
    assert_holds(device, place, (int32_t[]){3, 0, -1, 2, 4, 1, -1, -1}, 32);
    assert_holds(device, from, (int32_t[]){1, 5, 3, 0, 4}, 20);
    float *total = give(device, (float[]){1, 0, 0, 0}, 16), *bias = give(device, (float[]){0.5f, 0, 0, 0}, 16);
    uint16_t *half = give(device, zeros, 8);
    double *scales = give(device, (double[]){NAN, 0.5}, 16);
    ops_assert_ok(k->route_load(stream, &(qd_route_load_args){.choice = choice, .total = total, .assignments = 8, .experts = 4}));
    assert_holds(device, total, (float[]){4, 1, 4, 0}, 16);
    ops_assert_ok(k->expert_bias(stream, &(qd_expert_bias_args){.bias = bias, .total = total, .param = bias, .experts = 4, .mean = 4,
                                                                .rate = 0.25,
                                                                .param_dtype = QD_F32}));
    assert_holds(device, bias, (float[]){0.5f, 0.25f, 0, 0.25f}, 16);
    assert_holds(device, total, (float[]){4, 1, 4, 0}, 16);
    for (int step = 0; step < 2; step++) /* the first has a scale that is not finite: nothing is changed */
        ops_assert_ok(k->expert_bias(stream, &(qd_expert_bias_args){.bias = bias, .total = total, .param = half, .experts = 4, .mean = 2,
                                                                    .rate = 0.25, .grad_scale = scales + step, .param_dtype = QD_BF16}));
    assert_holds(device, bias, (float[]){0.25f, 0.5f, -0.25f, 0.5f}, 16);
    assert_holds(device, half, (uint16_t[]){0x3e80, 0x3f00, 0xbe80, 0x3f00}, 8);
    int16_t *rest = give(device, zeros, 8); /* split masters: 0.25, 0.5, -0.25, 0.5, then less or more by 0.001 */
    for (int step = 0; step < 2; step++)
        ops_assert_ok(k->expert_bias(stream, &(qd_expert_bias_args){.rest = rest, .total = total, .param = half, .experts = 4,
            .mean = 2, .rate = 0.001,
                                                                    .grad_scale = scales + step, .param_dtype = QD_BF16}));
    const float moved[] = {0.249f, 0.501f, -0.251f, 0.501f};
    uint16_t halves[4];
    int16_t rests[4];
    for (int i = 0; i < 4; i++) {
        halves[i] = qd_f32_to_bf16(moved[i]);
        rests[i] = qd_f32_rest(moved[i], halves[i]);
        assert_true(rests[i] != 0);
    }
    assert_holds(device, half, halves, 8);
    assert_holds(device, rest, rests, 8);
    a = (qd_route_plan_args){.choice = wrong_choice, .place = place, .from = from, .count = count, .rows = 1, .experts = 4, .per_token = 2};
    qd_status status = k->route_plan(stream, &a);
    ops_assert_fails(status == QD_OK ? qd_stream_wait(stream) : status, QD_USAGE, "expert 4"); /* a GPU reports it later */
    void *all[] = {choice, wrong_choice, place, from, count, weight, total, bias, half, scales, rest};
    const int64_t bytes[] = {32, 8, 32, 32, 16, 32, 16, 16, 8, 16, 8};
    for (int i = 0; i < COUNT(all); i++)
        qd_device_free(device, all[i], bytes[i]);
}

/* Equal scores: the lowest index. NaN scores: still existing experts, each once. */
static void ties_on(qd_device *device)
{
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const float numbers[] = {1, 1, 1, 1, 1, 1, 0, 2, 2, 0, 2, 0, NAN, NAN, NAN, NAN, NAN, NAN, 3, NAN, 1, NAN, NAN, 0};
    void *logits = give(device, numbers, sizeof numbers), *choice = give(device, numbers, 48), *weight = give(device, numbers, 48),
         *load = give(device, numbers, 24);
    qd_route_args a = {.logits = logits, .choice = choice, .weight = weight, .load = load, .rows = 4, .load_rows = 4, .loads = 1,
                       .rule = {6, 3, 1, 1, 1, true, true, 1}};
    ops_assert_ok(k->route(stream, &a));
    assert_holds(device, choice, (int32_t[]){0, 1, 2, 1, 2, 4, 0, 1, 2, 0, 2, 5}, 48);
    assert_holds(device, load, (float[]){3, 3, 4, 0, 1, 1}, 24);
    a.rule.groups = 3;
    a.rule.top_groups = 2;
    a.rule.group_best = 2;
    ops_assert_ok(k->route(stream, &a));
    assert_holds(device, choice, (int32_t[]){0, 1, 2, 1, 2, 0}, 24);
    qd_device_free(device, logits, sizeof numbers);
    qd_device_free(device, choice, 48);
    qd_device_free(device, weight, 48);
    qd_device_free(device, load, 24);
}

/* Equal logits give equal choices on both devices, also where scores differ in their last digits
 * only. */
static void same_choices(void **state)
{
    (void)state;
    enum { ROWS = 512, EXPERTS = 160, CHOICES = 8 };
    qd_device *devices[] = {ops_device("best", 1), ops_cuda()};
    int32_t *choices[2] = {NULL, NULL};
    static float numbers[ROWS * EXPERTS];
    for (int i = 0; i < ROWS * EXPERTS; i++) /* many that are equal or nearly so */
        numbers[i] = (float)(floor(ops_normal() * 8) / 8) + (i % 3 == 0 ? 1e-6f : 0.0f);
    for (int d = 0; d < 2 && devices[1]; d++) {
        const int64_t chosen = (int64_t)ROWS * CHOICES * 4;
        void *logits = give(devices[d], numbers, sizeof numbers), *choice = give(devices[d], numbers, chosen);
        void *weight = give(devices[d], numbers, chosen), *load = give(devices[d], numbers, EXPERTS * 4);
        qd_route_args a = {.logits = logits, .choice = choice, .weight = weight, .load = load, .rows = ROWS, .load_rows = ROWS, .loads = 1,
                           .rule = {EXPERTS, CHOICES, 8, 3, 2, true, true, 1}};
        ops_assert_ok(qd_device_kernels(devices[d])->route(qd_device_compute_stream(devices[d]), &a));
        choices[d] = malloc((size_t)chosen);
        ops_assert_ok(qd_copy(qd_device_compute_stream(devices[d]), choices[d], choice, chosen));
        ops_assert_ok(qd_stream_wait(qd_device_compute_stream(devices[d])));
        qd_device_free(devices[d], logits, sizeof numbers);
        qd_device_free(devices[d], choice, chosen);
        qd_device_free(devices[d], weight, chosen);
        qd_device_free(devices[d], load, EXPERTS * 4);
    }
    if (devices[1])
        assert_memory_equal(choices[0], choices[1], ROWS * CHOICES * sizeof(int32_t));
    free(choices[0]);
    free(choices[1]);
}

static void places(void **state)
{
    (void)state;
    places_on(ops_device("best", 1));
    if (ops_cuda())
        places_on(ops_cuda());
}

static void ties(void **state)
{
    (void)state;
    ties_on(ops_device("best", 1));
    if (ops_cuda())
        ties_on(ops_cuda());
}

int main(int argc, char **argv)
{
#define CASES(list) .cases = list, .case_size = sizeof *list, .case_count = COUNT(list)
#define SPEED(list) .speed_cases = list, .speed_count = COUNT(list)
    const ops_op ops[] = {
        {.kernel = "route", CASES(route_cases), SPEED(route_speed), .describe = route_describe, .tensors = route_forward_tensors,
         .reference = route_forward_reference, .run = route_forward_run},
        {.kernel = "route_grad", CASES(route_cases), SPEED(route_speed), .describe = route_describe, .tensors = route_backward_tensors,
         .derive = route_derive, .reference = route_backward_reference, .run = route_backward_run, .loss = route_loss,
         .gradients = {{RL, RDL}}, .gradient_count = 1},
        {.kernel = "route_plan", CASES(plan_cases), SPEED(plan_speed), .describe = plan_describe, .tensors = plan_tensors,
         .derive = plan_derive,
         .reference = plan_reference, .run = plan_run},
        {.kernel = "permute", CASES(rows_cases), SPEED(rows_speed), .describe = rows_describe, .tensors = permute_tensors,
         .derive = rows_derive,
         .reference = permute_reference, .run = permute_run, .bytes = permute_bytes},
        {.kernel = "combine", CASES(rows_cases), SPEED(rows_speed), .describe = rows_describe, .tensors = combine_tensors,
         .derive = rows_derive,
         .reference = combine_reference, .run = combine_run, .bytes = combine_bytes},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(places), cmocka_unit_test(ties), cmocka_unit_test(same_choices)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
