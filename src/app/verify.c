/* qd_verify(): trains two layouts step by step and compares losses, gradients and weights. */
#include <quadrille/verify.h>

#include "base/sized.h"
#include "train/run/run_corpus.h"
#include "train/exec/team.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct side {
    qd_config config;
    qd_run_corpus corpus;
    qd_batch_source source;
    qd_team *team;
    float *values; /* of one tensor */
} side;

/* Differences of all tensors of one kind after a step: ‖a−b‖ against max(‖b‖, 1e-3 · RMS of all
 * norms), because some gradients are zero in exact arithmetic and consist of rounding alone. */
typedef struct comparison {
    double worst;
    char name[128];
    bool bit_equal;
} comparison;

/* *raised: whether eps has replaced the configuration's own. */
static qd_status open_side(const qd_options *options, double eps, side *s, bool *raised)
{
    QD_TRY(qd_config_resolve(options, 0, &s->config));
    *raised = s->config.optimizer.kind != QD_OPTIM_SGD && s->config.optimizer.eps < eps;
    if (*raised)
        s->config.optimizer.eps = eps;
    QD_TRY(qd_run_corpus_open(&s->config, NULL, &s->corpus));
    s->source = qd_data_source(s->corpus.data);
    return qd_team_create(&s->config, &s->source, &s->team);
}

static void close_side(side *s)
{
    qd_team_destroy(s->team);
    qd_run_corpus_close(&s->corpus);
    free(s->values);
}

/* The two must be the same run in everything that the layout does not decide. */
static qd_status check_same_run(const qd_config *a, const qd_config *b)
{
    if (!qd_model_equal(&a->model, &b->model))
        return QD_FAIL(QD_USAGE, "verify: the two configurations have different models; only the layout may differ");
    if (a->global_batch != b->global_batch || a->strategy.seq != b->strategy.seq || a->seed != b->seed)
        return QD_FAIL(QD_USAGE, "verify: train.global_batch, data.seq and train.seed must be the same in both layouts");
    return QD_OK;
}

static double norm_of(const float *x, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * x[i];
    return sqrt(sum);
}

static double distance(const float *a, const float *b, int64_t n)
{
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++)
        sum += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
    return sqrt(sum);
}

/* Frozen parameters have no gradients. */
static bool has_tensor(const qd_param *param, qd_tensor_kind kind)
{
    return param->tied_to < 0 && !(param->frozen && kind == QD_TENSOR_GRADIENT);
}

static qd_status compare_tensors(side *a, side *b, qd_tensor_kind kind, double *distances, double *norms, comparison *out)
{
    const qd_program *p = qd_team_program(a->team);
    double squares = 0.0;
    int count = 0;
    out->bit_equal = true;
    out->worst = 0.0;
    for (int i = 0; i < p->ledger->param_count; i++) {
        const qd_param *param = &p->ledger->params[i];
        int64_t n = param->shape[0] * param->shape[1];
        if (!has_tensor(param, kind))
            continue;
        QD_TRY(qd_team_read(a->team, param->name, kind, a->values, n));
        QD_TRY(qd_team_read(b->team, param->name, kind, b->values, n));
        distances[i] = distance(a->values, b->values, n);
        norms[i] = norm_of(b->values, n);
        out->bit_equal = out->bit_equal && memcmp(a->values, b->values, (size_t)n * sizeof(float)) == 0;
        squares += norms[i] * norms[i];
        count++;
    }
    double floor = 1e-3 * sqrt(squares / (count > 0 ? count : 1));
    for (int i = 0; i < p->ledger->param_count; i++) {
        if (!has_tensor(&p->ledger->params[i], kind))
            continue;
        double scale = norms[i] > floor ? norms[i] : floor;
        double relative = scale > 0.0 ? distances[i] / scale : distances[i];
        if (!(relative <= out->worst) || out->name[0] == '\0') { /* also true for NaN */
            out->worst = relative;
            snprintf(out->name, sizeof out->name, "%s", p->ledger->params[i].name);
        }
    }
    return QD_OK;
}

static void note(qd_verify_report *r, int64_t step, double difference, double tolerance, const char *what, const char *name)
{
    if (r->first_step != 0 || difference <= tolerance)
        return;
    r->first_step = step;
    snprintf(r->first_what, sizeof r->first_what, "%s%s: relative difference %.2e", what, name, difference);
}

static void keep_worst(double difference, const char *name, double *worst, char *worst_name, size_t size)
{
    if (difference < *worst && worst_name[0] != '\0')
        return;
    *worst = difference;
    snprintf(worst_name, size, "%s", name);
}

static qd_status compare_step(side *a, side *b, int64_t step, double tolerance, double *work, qd_verify_report *r)
{
    qd_step_output first, second;
    QD_TRY(qd_team_step(a->team, &first));
    QD_TRY(qd_team_step(b->team, &second));
    int params = qd_team_program(a->team)->ledger->param_count;
    comparison gradient = {0}, weight = {0};
    QD_TRY(compare_tensors(a, b, QD_TENSOR_GRADIENT, work, work + params, &gradient));
    QD_TRY(compare_tensors(a, b, QD_TENSOR_VALUE, work, work + params, &weight));
    double loss = fabs(first.loss - second.loss) / fmax(fabs(second.loss), 1e-30);
    r->steps = step;
    r->worst_loss = loss <= r->worst_loss ? r->worst_loss : loss;
    keep_worst(gradient.worst, gradient.name, &r->worst_gradient, r->worst_gradient_name, sizeof r->worst_gradient_name);
    keep_worst(weight.worst, weight.name, &r->worst_weight, r->worst_weight_name, sizeof r->worst_weight_name);
    r->bit_equal = r->bit_equal && loss == 0.0 && gradient.bit_equal && weight.bit_equal;
    note(r, step, loss, tolerance, "loss", "");
    note(r, step, gradient.worst, tolerance, "gradient of ", gradient.name);
    note(r, step, weight.worst, tolerance, "weight ", weight.name);
    return QD_OK;
}

static int64_t largest_param(const qd_ledger *l)
{
    int64_t largest = 0;
    for (int i = 0; i < l->param_count; i++)
        largest = l->params[i].shape[0] * l->params[i].shape[1] > largest ? l->params[i].shape[0] * l->params[i].shape[1] : largest;
    return largest;
}

static qd_status verify(const qd_options *layout, const qd_options *against, int64_t steps, double tolerance, double eps,
                        qd_verify_report *report)
{
    report->bit_equal = true;
    side a = {0}, b = {0};
    double *work = NULL;
    bool raised[2] = {false, false};
    qd_status status = QD_OK;
    QD_TRY_DONE(open_side(layout, eps, &a, &raised[0]));
    QD_TRY_DONE(open_side(against, eps, &b, &raised[1]));
    report->eps = raised[0] || raised[1] ? eps : 0.0;
    QD_TRY_DONE(check_same_run(&a.config, &b.config));
    const qd_ledger *ledger = qd_team_program(a.team)->ledger;
    size_t most = (size_t)largest_param(ledger) * sizeof(float);
    a.values = malloc(most);
    b.values = malloc(most);
    work = calloc(2 * (size_t)ledger->param_count, sizeof *work);
    if (!a.values || !b.values || !work) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory to compare two layouts");
        goto done;
    }
    for (int64_t step = 1; step <= steps && report->first_step == 0; step++)
        QD_TRY_DONE(compare_step(&a, &b, step, tolerance, work, report));
    if (report->first_step != 0)
        status = QD_FAIL(QD_DIFFERENT, "step %lld: %s, more than %g", (long long)report->first_step, report->first_what, tolerance);
done:
    free(work);
    close_side(&a);
    close_side(&b);
    return status;
}

qd_status qd_verify(const qd_options *layout, const qd_options *against, int64_t steps, double tolerance, double eps,
                    qd_verify_report *report)
{
    qd_verify_report r = qd_verify_report_default();
    QD_TRY(QD_SIZED_CHECK(report, qd_verify_report));
    qd_status status = verify(layout, against, steps, tolerance, eps, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
