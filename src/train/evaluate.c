#include "train/evaluate.h"

#include "train/model_run.h"

typedef struct windows {
    const int32_t *tokens;
    int64_t count;
} windows;

/* Window `first` of the text; what lies behind its end is not counted. */
static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    const windows *w = context;
    for (int64_t i = 0; i < count * seq; i++) {
        int64_t at = first * seq + i;
        tokens[i] = at < w->count ? w->tokens[at] : 0;
        targets[i] = at + 1 < w->count ? w->tokens[at + 1] : -1;
        doc_start[i] = 0;
    }
    return QD_OK;
}

static qd_status check_tokens(const int32_t *tokens, int64_t count, int64_t vocab)
{
    if (count < 2)
        return QD_FAIL(QD_USAGE, "the text has %lld tokens: at least 2 are needed to predict one", (long long)count);
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            return QD_FAIL(QD_USAGE, "token %lld of the text is %d, but the model's vocabulary has %lld: another tokenizer?",
                           (long long)i, tokens[i], (long long)vocab);
    return QD_OK;
}

qd_status qd_evaluate_tokens(const char *model, const int32_t *tokens, int64_t count, int64_t seq, int threads,
                             qd_evaluate_progress progress, void *context, qd_evaluation *result)
{
    qd_model_run run;
    windows w = {tokens, count};
    qd_batch_source source = {.fill = fill, .context = &w};
    double sum = 0.0, counted = 0.0;
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_model_run_open(model, &run));
    QD_TRY_DONE(check_tokens(tokens, count, run.config.model.vocab));
    if (seq > 0)
        run.config.strategy.seq = seq;
    if (run.config.model.position == QD_POSITION_LEARNED && run.config.strategy.seq > run.config.model.max_seq) {
        status = QD_FAIL(QD_USAGE, "windows of %lld tokens are longer than the model's %lld positions",
                         (long long)run.config.strategy.seq, (long long)run.config.model.max_seq);
        goto done;
    }
    run.config.threads = threads;
    QD_TRY_DONE(qd_model_run_start(&run, &source));
    int64_t all = (count - 2) / run.config.strategy.seq + 1;
    for (int64_t i = 0; i < all; i++) {
        qd_step_output out;
        QD_TRY_DONE(qd_trainer_step(run.trainer, &out));
        sum += out.loss * out.tokens;
        counted += out.tokens;
        if (progress)
            progress(context, i + 1, all);
    }
    *result = (qd_evaluation){.loss = sum / counted, .tokens = (int64_t)counted};
done:
    qd_model_run_close(&run);
    return status;
}
