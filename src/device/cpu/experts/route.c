/* Routing: which experts a row chooses, the gradient of its weights, and the places of
 * assignments. */
#include "device/cpu/kernels_impl.h"

#include "base/half.h"

#include <math.h>
#include <string.h>

/* A thread's workspace: scores, values to compare, marks. */
typedef struct scratch {
    float *score, *value, *other;
    uint8_t *taken;
} scratch;

typedef struct route_job {
    const void *args; /* qd_route_args or qd_route_grad_args */
    const qd_cpu *cpu;
} route_job;

static scratch scratch_of(void *workspace, int experts)
{
    float *base = workspace;
    return (scratch){base, base + experts, base + 2 * (int64_t)experts, (uint8_t *)(base + 3 * (int64_t)experts)};
}

static qd_status check_rule(const char *kernel, const qd_route_rule *r)
{
    if (r->experts < 1 || r->experts > 65536 || r->per_token < 1 || r->per_token > r->experts || r->groups < 1 ||
        r->experts % r->groups != 0 || r->top_groups < 1 || r->top_groups > r->groups ||
        r->top_groups * (r->experts / r->groups) < r->per_token)
        return QD_FAIL(QD_USAGE, "%s: cannot choose %d of %d experts from %d of %d groups", kernel, r->per_token, r->experts,
                       r->top_groups, r->groups);
    return QD_OK;
}

static double row_max(const float *x, int n)
{
    double most = (double)x[0];
    for (int i = 1; i < n; i++)
        most = (double)x[i] > most ? (double)x[i] : most;
    return most;
}

static void row_scores(const qd_route_rule *r, const float *logits, float *score)
{
    if (r->sigmoid) {
        for (int e = 0; e < r->experts; e++)
            score[e] = 1.0f / (1.0f + expf(-logits[e]));
        return;
    }
    float most = (float)row_max(logits, r->experts);
    double sum = 0.0;
    for (int e = 0; e < r->experts; e++) {
        score[e] = expf(logits[e] - most);
        sum += (double)score[e];
    }
    for (int e = 0; e < r->experts; e++)
        score[e] = (float)((double)score[e] / sum);
}

/* Index of the largest value that is not taken, of equal ones the lowest; NaN comes last. */
static int take_best(const float *value, uint8_t *taken, int begin, int end)
{
    int best = -1;
    for (int i = begin; i < end; i++)
        if (!taken[i] && (best < 0 || value[i] > value[best] || (isnan(value[best]) && !isnan(value[i]))))
            best = i;
    taken[best] = 1;
    return best;
}

/* Marks the experts of all but the best groups as taken. */
static void limit_groups(const qd_route_rule *r, scratch *w)
{
    int size = r->experts / r->groups;
    for (int g = 0; g < r->groups; g++) {
        float sum = 0.0f;
        for (int i = 0; i < r->group_best && i < size; i++)
            sum += w->value[take_best(w->value, w->taken, g * size, (g + 1) * size)];
        w->other[g] = sum;
    }
    memset(w->taken, 0, (size_t)r->groups);
    for (int i = 0; i < r->top_groups; i++)
        take_best(w->other, w->taken, 0, r->groups);
    /* From the last group down: the marks of groups are stored where those of the first experts
     * will be. */
    for (int g = r->groups - 1; g >= 0; g--)
        memset(w->taken + (int64_t)g * size, w->taken[g] ? 0 : 1, (size_t)size);
}

static void route_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const route_job *job = context;
    const qd_route_args *a = job->args;
    const qd_route_rule *r = &a->rule;
    scratch w = scratch_of(qd_cpu_workspace(job->cpu, thread), r->experts);
    for (int64_t row = begin; row < end; row++) {
        int32_t *choice = a->choice + row * r->per_token;
        float *weight = a->weight + row * r->per_token, sum = 0.0f;
        row_scores(r, a->logits + row * r->experts, w.score);
        for (int e = 0; e < r->experts; e++) {
            float bias = !a->bias                  ? 0.0f
                         : a->bias_dtype == QD_F32 ? ((const float *)a->bias)[e]
                                                   : qd_bf16_to_f32(((const uint16_t *)a->bias)[e]);
            w.value[e] = w.score[e] + bias;
        }
        memset(w.taken, 0, (size_t)r->experts);
        if (r->top_groups < r->groups)
            limit_groups(r, &w);
        for (int j = 0; j < r->per_token; j++) {
            choice[j] = take_best(w.value, w.taken, 0, r->experts);
            weight[j] = w.score[choice[j]];
            sum += weight[j];
        }
        for (int j = 0; j < r->per_token; j++)
            weight[j] = (r->normalised ? weight[j] / sum : weight[j]) * r->scale;
    }
}

qd_status qd_cpu_route(qd_stream *stream, const qd_route_args *a)
{
    QD_TRY(check_rule("route", &a->rule));
    if (a->bias)
        QD_TRY(qd_check_float("route", "bias", a->bias_dtype));
    const route_job job = {a, qd_cpu_of(stream)};
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(64 * (int64_t)a->rule.experts), route_rows, &job);
    memset(a->load, 0, (size_t)(a->loads * a->rule.experts) * sizeof *a->load);
    for (int64_t row = 0; row < a->rows; row++) {
        float *load = a->load + (a->first_row + row) / a->load_rows % a->loads * a->rule.experts;
        for (int j = 0; j < a->rule.per_token; j++)
            load[a->choice[row * a->rule.per_token + j]] += 1.0f;
    }
    return QD_OK;
}

/* d_score (d) -> d_logits, through softmax or sigmoid. */
static void through_scores(const qd_route_rule *r, const float *score, const double *d, float *d_logits)
{
    double dot = 0.0;
    for (int e = 0; e < r->experts && !r->sigmoid; e++)
        dot += d[e] * (double)score[e];
    for (int e = 0; e < r->experts; e++)
        d_logits[e] = (float)((double)score[e] * (r->sigmoid ? d[e] * (1.0 - (double)score[e]) : d[e] - dot));
}

static void grad_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const route_job *job = context;
    const qd_route_grad_args *a = job->args;
    const qd_route_rule *r = &a->rule;
    double *d = qd_cpu_workspace(job->cpu, thread);
    float *score = (float *)(d + r->experts);
    for (int64_t row = begin; row < end; row++) {
        const float *logits = a->logits + row * r->experts, *dw = a->d_weight + row * r->per_token;
        const int32_t *choice = a->choice + row * r->per_token;
        float *out = score; /* in place, element by element */
        row_scores(r, logits, score);
        memset(d, 0, (size_t)r->experts * sizeof *d);
        double sum = 0.0, dot = 0.0;
        for (int j = 0; j < r->per_token; j++) {
            sum += (double)score[choice[j]];
            dot += (double)dw[j] * (double)score[choice[j]];
        }
        /* w = scale s / sum(s): ds = scale (dw - <dw, s> / sum) / sum; without the division ds =
         * scale dw. */
        for (int j = 0; j < r->per_token; j++)
            d[choice[j]] = (double)r->scale * (r->normalised ? ((double)dw[j] - dot / sum) / sum : (double)dw[j]);
        if (a->aux != 0.0f) {
            const float *load = a->load + (a->first_row + row) / a->load_rows * r->experts;
            double total = 0.0, mean = 0.0;
            for (int e = 0; e < r->experts; e++)
                total += r->sigmoid ? (double)score[e] : 0.0;
            total = r->sigmoid ? total : 1.0;
            for (int e = 0; e < r->experts && r->sigmoid; e++)
                mean += (double)(load[e] * a->load_scale) * (double)score[e] / total;
            for (int e = 0; e < r->experts; e++)
                d[e] += (double)a->aux * ((double)(load[e] * a->load_scale) - mean) / total;
        }
        through_scores(r, score, d, out);
        if (a->z != 0.0f) {
            double most = row_max(logits, r->experts), all = 0.0;
            for (int e = 0; e < r->experts; e++)
                all += exp((double)logits[e] - most);
            for (int e = 0; e < r->experts; e++)
                out[e] += (float)(2.0 * (double)a->z * (most + log(all)) * exp((double)logits[e] - most) / all);
        }
        if (a->grad_dtype == QD_F32)
            memcpy((float *)a->d_logits + row * r->experts, out, (size_t)r->experts * sizeof *out);
        for (int e = 0; e < r->experts && a->grad_dtype == QD_BF16; e++)
            ((uint16_t *)a->d_logits)[row * r->experts + e] = qd_f32_to_bf16(out[e]);
    }
}

qd_status qd_cpu_route_grad(qd_stream *stream, const qd_route_grad_args *a)
{
    QD_TRY(check_rule("route_grad", &a->rule));
    QD_TRY(qd_check_float("route_grad", "d_logits", a->grad_dtype));
    const route_job job = {a, qd_cpu_of(stream)};
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(64 * (int64_t)a->rule.experts), grad_rows, &job);
    return QD_OK;
}

/* Whether assignment x comes before y: by weight, heaviest first, or by number. */
static bool before(const float *weight, int32_t x, int32_t y)
{
    if (weight && weight[x] != weight[y])
        return weight[x] > weight[y];
    return x < y;
}

static void sift(int32_t *list, int64_t root, int64_t count, const float *weight)
{
    for (int64_t child; (child = 2 * root + 1) < count; root = child) {
        if (child + 1 < count && before(weight, list[child], list[child + 1]))
            child++;
        if (!before(weight, list[root], list[child]))
            return;
        int32_t kept = list[root];
        list[root] = list[child];
        list[child] = kept;
    }
}

/* Heapsort: in place, for any length. */
static void sort(int32_t *list, int64_t count, const float *weight)
{
    for (int64_t i = count / 2 - 1; i >= 0; i--)
        sift(list, i, count, weight);
    for (int64_t end = count - 1; end > 0; end--) {
        int32_t kept = list[0];
        list[0] = list[end];
        list[end] = kept;
        sift(list, 0, end, weight);
    }
}

qd_status qd_cpu_route_plan(qd_stream *stream, const qd_route_plan_args *a)
{
    int64_t assignments = a->rows * a->per_token, next = 0;
    (void)stream;
    memset(a->count, 0, (size_t)a->experts * sizeof *a->count);
    for (int64_t i = 0; i < assignments; i++) {
        if (a->choice[i] < 0 || a->choice[i] >= a->experts)
            return QD_FAIL(QD_USAGE, "route_plan: row %lld chose expert %d of %d", (long long)(i / a->per_token), a->choice[i], a->experts);
        a->count[a->choice[i]]++;
        a->place[i] = -1;
    }
    /* count[e] becomes the end of expert e's list, moves back to its start while the list is filled
     * from the end, and becomes its length again when lists above the limit are truncated. */
    for (int e = 0; e < a->experts; e++)
        a->count[e] += e > 0 ? a->count[e - 1] : 0;
    for (int64_t i = assignments - 1; i >= 0; i--)
        a->from[--a->count[a->choice[i]]] = (int32_t)i;
    for (int e = 0; e < a->experts; e++) {
        int64_t first = a->count[e], last = e + 1 < a->experts ? a->count[e + 1] : assignments, length = last - first;
        int32_t *list = a->from + first;
        if (a->limit > 0 && length > a->limit) {
            if (a->least) {
                sort(list, length, a->weight);
                sort(list, a->limit, NULL);
            }
            length = a->limit;
        }
        memmove(a->from + next, list, (size_t)length * sizeof *list);
        for (int64_t i = 0; i < length; i++, next++)
            a->place[a->from[next]] = (int32_t)next;
        a->count[e] = (int32_t)length;
    }
    return QD_OK;
}

qd_status qd_cpu_route_load(qd_stream *stream, const qd_route_load_args *a)
{
    (void)stream;
    for (int64_t i = 0; i < a->assignments; i++)
        a->total[a->choice[i]] += 1.0f;
    return QD_OK;
}
