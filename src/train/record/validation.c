/* Evaluates held-out windows with the trainer's forward-only program, and follows when that is due
 * and which result was the best. The times and results of earlier parts of a run come from
 * metrics.jsonl, so a resumed run continues the same schedule. */
#include "train/record/validation.h"

#include "base/clock.h"
#include "train/record/lines.h"

#include <math.h>
#include <string.h>

qd_status qd_validation_open(const qd_config *c, const qd_run_corpus *corpus, qd_validation *v)
{
    *v = (qd_validation){.best = -1};
    QD_TRY(qd_run_corpus_open_evaluation(c, corpus, NULL, &v->text));
    int64_t most = c->evaluation.batches > 0 ? c->evaluation.batches * c->global_batch : 0;
    return qd_windows_open(v->text ? v->text : corpus->data, corpus->tokenizer, !v->text, c->strategy.seq, c->strategy.seq, most,
                           c->data.document_mask, &v->windows);
}

void qd_validation_close(qd_validation *v)
{
    qd_windows_close(&v->windows);
    qd_data_close(v->text);
    memset(v, 0, sizeof *v);
}

static void follow_line(void *context, const char *line)
{
    qd_validation *v = context;
    double number, value;
    if (qd_line_number(line, "\"step_seconds\":", &value))
        v->since += value;
    if (strstr(line, "\"validation_loss\":"))
        v->since = 0.0;
    /* Not the lowest of all: losses of another text, before it was changed, do not count. */
    if (qd_line_number(line, "\"validation_loss\":", &value) && strstr(line, "\"validation_best\":true") &&
        qd_line_number(line, "{\"step\":", &number)) {
        v->best = (int64_t)number;
        v->best_loss = value;
    }
}

qd_status qd_validation_restore(const char *metrics, int64_t step, qd_validation *v)
{
    v->since = 0.0;
    v->best = -1;
    return qd_lines_each(metrics, step, follow_line, v);
}

bool qd_validation_due(const qd_validation *v, const qd_config *c, int64_t step)
{
    return (c->evaluation.every > 0 && step % c->evaluation.every == 0) || step == c->steps ||
           (c->evaluation.seconds > 0.0 && v->since >= c->evaluation.seconds);
}

/* A loss that is not finite is a result, not a failure of the run: all ranks have the same. */
qd_status qd_validation_run(qd_validation *v, qd_trainer *trainer, const qd_config *c, qd_validated *result)
{
    qd_batch_source source = qd_windows_source(&v->windows);
    double begin = qd_clock_now(), sum = 0.0, counted = 0.0, margin = 0.0, right = 0.0;
    for (int64_t first = 0; first < v->windows.chosen && isfinite(sum); first += c->global_batch) {
        qd_step_output out;
        qd_status status = qd_trainer_evaluate(trainer, &source, first, &out);
        if (status == QD_NOT_FINITE) {
            qd_error_clear();
            sum = NAN;
            counted = (double)(v->windows.chosen * v->windows.seq); /* there was an evaluation, even if nothing was counted */
            continue;
        }
        QD_TRY(status);
        sum += out.loss * out.tokens;
        counted += out.tokens;
        margin += out.margin * out.tokens;
        right += out.accuracy * out.tokens;
    }
    *result = (qd_validated){.loss = sum / counted, .tokens = (int64_t)counted, .seconds = qd_clock_now() - begin,
                             .margin = margin / counted, .accuracy = right / counted};
    return QD_OK;
}

bool qd_validation_note(qd_validation *v, int64_t step, double loss)
{
    v->since = 0.0;
    if (!isfinite(loss) || (v->best >= 0 && loss >= v->best_loss))
        return false;
    v->best = step;
    v->best_loss = loss;
    return true;
}
