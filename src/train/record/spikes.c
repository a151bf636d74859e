/* Medians of the last losses and gradient norms, and the journal of spikes. */
#include "train/record/spikes.h"

#include "base/text/json_writer.h"
#include "base/text/strbuf.h"
#include "train/record/lines.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

qd_status qd_spikes_open(const qd_spike_config *config, qd_spikes *s)
{
    *s = (qd_spikes){.config = config};
    if (config->action == QD_SPIKE_IGNORE)
        return QD_OK;
    double *room = calloc((size_t)(3 * config->window), sizeof *room);
    if (!room)
        return QD_FAIL(QD_NO_MEMORY, "no memory for train.spike_window=%lld", (long long)config->window);
    s->norms = room;
    s->losses = room + config->window;
    s->sorted = room + 2 * config->window;
    return QD_OK;
}

void qd_spikes_close(qd_spikes *s)
{
    free(s->norms);
    *s = (qd_spikes){0};
}

static int ascending(const void *x, const void *y)
{
    double a = *(const double *)x, b = *(const double *)y;
    return (a > b) - (a < b);
}

/* The upper one of two in the middle. */
static double median(const qd_spikes *s, const double *values)
{
    const size_t n = (size_t)s->config->window;
    memcpy(s->sorted, values, n * sizeof *values);
    qsort(s->sorted, n, sizeof *values, ascending);
    return s->sorted[n / 2];
}

/* A median of 0 gives no limit: the steps before had no gradient. */
qd_step_limits qd_spikes_limits(const qd_spikes *s)
{
    qd_step_limits limits = {0};
    if (!s->norms || s->count < s->config->window)
        return limits;
    if (s->config->norm > 0.0)
        limits.norm = s->config->norm * median(s, s->norms);
    if (s->config->loss > 0.0)
        limits.loss = s->config->loss + median(s, s->losses);
    return limits;
}

void qd_spikes_add(qd_spikes *s, double norm, double loss)
{
    if (!s->norms)
        return;
    int64_t at = s->count++ % s->config->window;
    s->norms[at] = norm;
    s->losses[at] = loss;
}

static void add_line(void *context, const char *line)
{
    double norm, loss;
    if (!strstr(line, "\"skipped\":true") && qd_line_number(line, "\"grad_norm\":", &norm) && qd_line_number(line, "\"loss\":", &loss))
        qd_spikes_add(context, norm, loss);
}

qd_status qd_spikes_restore(const char *metrics, int64_t step, qd_spikes *s)
{
    s->count = 0;
    return s->norms ? qd_lines_each(metrics, step, add_line, s) : QD_OK;
}

void qd_spikes_describe(const qd_spikes *s, const qd_step_output *output, char *text, size_t size)
{
    const qd_step_limits limits = qd_spikes_limits(s);
    const long long window = (long long)s->config->window;
    if (limits.norm > 0.0 && output->grad_norm > limits.norm)
        snprintf(text, size, "its gradient norm %.4g is %.3g times the median of %lld steps before (train.spike_norm=%g)",
                 output->grad_norm, output->grad_norm * s->config->norm / limits.norm, window, s->config->norm);
    else
        snprintf(text, size, "its loss %.4f exceeds the median of %lld steps before by %.3f (train.spike_loss=%g)", output->loss, window,
                 output->loss + s->config->loss - limits.loss, s->config->loss);
}

qd_status qd_spikes_write(const char *path, const qd_spike_record *r)
{
    qd_strbuf text = {0};
    qd_status status = qd_lines_keep(path, INT64_MAX, &text); /* spikes are rare, the file is small */
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_int(&w, "step", r->step);
    qd_json_put_int(&w, "time", (int64_t)time(NULL));
    qd_json_put_string(&w, "action", r->back_to < 0 ? "skip" : "rollback");
    if (r->back_to >= 0)
        qd_json_put_int(&w, "continues_after", r->back_to);
    qd_json_put_int(&w, "first_sample", r->first_sample);
    qd_json_put_int(&w, "samples", r->samples);
    qd_json_put_double(&w, "loss", r->loss);
    qd_json_put_double(&w, "grad_norm", r->norm);
    qd_json_put_double(&w, "most_loss", r->limits.loss > 0.0 ? r->limits.loss : NAN);
    qd_json_put_double(&w, "most_grad_norm", r->limits.norm > 0.0 ? r->limits.norm : NAN);
    qd_json_end(&w);
    qd_json_newline(&w);
    return qd_lines_replace(path, status, &text);
}
