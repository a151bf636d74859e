/* Evaluation: forward passes over windows of tokens. */
#include "app/evaluate.h"

#include "train/generate/side_program.h"

static qd_status check_seq(const qd_config *c)
{
    if (c->model.position != QD_POSITION_LEARNED || c->strategy.seq <= c->model.max_seq)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "windows of %lld tokens are longer than the model's %lld positions", (long long)c->strategy.seq,
                   (long long)c->model.max_seq);
}

static int64_t round_up(int64_t count, int64_t to)
{
    return (count + to - 1) / to * to;
}

/* Enough rows for large GEMMs, few enough to stay in the caches; a multiple of the ranks of dp. */
static int64_t choose_per_pass(int64_t wanted, int64_t seq, int64_t all, int dp)
{
    int64_t count = wanted > 0 ? wanted : 4096 / seq * dp;
    count = count < all ? count : all;
    return round_up(count > 1 ? count : 1, dp);
}

/* The last windows, if they are fewer than a pass has: a program for as many micro-batches as they
 * need, which shares the weights. Rows of a pass are independent, so the losses are those of a pass
 * filled up with windows that do not count. */
static qd_status run_rest(qd_model_run *run, const qd_batch_source *source, int64_t first, int64_t count, qd_step_output *out)
{
    qd_side_program side;
    qd_config c = run->config;
    int dp = c.degrees[QD_AXIS_DP];
    if (c.strategy.micro_batch * dp == c.global_batch)
        c.strategy.micro_batch = (count + dp - 1) / dp;
    c.global_batch = round_up(count, c.strategy.micro_batch * dp);
    qd_status status = qd_side_program_open(run->trainer, qd_trainer_bound(run->trainer), &c, &side);
    const qd_step_input input = {.step = 1, .first_sample = first, .global_batch = c.global_batch, .source = source, .optim = &c.optimizer};
    if (status == QD_OK)
        status = qd_interpret(side.interpreter, &input, out);
    if (status == QD_OK && out->skipped)
        status = QD_FAIL(QD_NOT_FINITE, "windows %lld to %lld: %s", (long long)first, (long long)(first + count - 1), out->not_finite);
    qd_side_program_close(&side);
    return status == QD_NO_MEMORY ? qd_trainer_step(run->trainer, out) : status; /* computes windows that do not count, too */
}

qd_status qd_evaluate_windows(qd_model_run *run, const qd_batch_source *source, int64_t all,
                              const qd_evaluate_passes *passes, qd_evaluation *result)
{
    qd_config *c = &run->config;
    double sum = 0.0, counted = 0.0;
    if (passes->seq > 0)
        c->strategy.seq = passes->seq;
    QD_TRY(check_seq(c));
    c->threads = passes->threads;
    int dp = c->degrees[QD_AXIS_DP];
    c->global_batch = choose_per_pass(passes->per_pass, c->strategy.seq, passes->micro > 0 ? INT64_MAX : all, dp);
    c->strategy.micro_batch = passes->micro > 0 ? passes->micro : c->global_batch / dp;
    if (c->global_batch % (c->strategy.micro_batch * dp) != 0)
        c->strategy.micro_batch = 1;
    QD_TRY(qd_model_run_start(run, source));
    for (int64_t done = 0; done < all;) {
        qd_step_output out;
        int64_t count = all - done < c->global_batch ? all - done : c->global_batch;
        QD_TRY(count < c->global_batch ? run_rest(run, source, done, count, &out) : qd_trainer_step(run->trainer, &out));
        sum += out.loss * out.tokens;
        counted += out.tokens;
        done += count;
        if (passes->progress && !passes->progress(passes->context, done, all))
            return QD_FAIL(QD_INTERRUPTED, "interrupted after %lld of %lld windows", (long long)done, (long long)all);
    }
    if (counted == 0.0)
        return QD_FAIL(QD_USAGE, "the text has no token to predict: each document is one token long");
    *result = (qd_evaluation){.loss = sum / counted, .tokens = (int64_t)counted};
    return QD_OK;
}

typedef struct memory_windows {
    const int32_t *tokens;
    int64_t count;
} memory_windows;

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    const memory_windows *w = context;
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

qd_status qd_evaluate_tokens(const char *model, const int32_t *tokens, int64_t count, const qd_evaluate_passes *passes,
                             qd_evaluation *result)
{
    qd_model_run run;
    memory_windows windows = {tokens, count};
    qd_batch_source source = {.fill = fill, .context = &windows};
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_model_run_open(&(qd_model_source){.path = model}, passes->device, &run));
    QD_TRY_DONE(check_tokens(tokens, count, run.config.model.vocab));
    int64_t seq = passes->seq > 0 ? passes->seq : run.config.strategy.seq;
    QD_TRY_DONE(qd_evaluate_windows(&run, &source, (count - 2) / seq + 1, passes, result));
done:
    qd_model_run_close(&run);
    return status;
}
