/* qd_evaluate(): opens the data set and chooses the tokens that are predicted. */
#include "ckpt/safetensors.h"
#include "data/windows.h"
#include "train/run/run_corpus.h"
#include "app/evaluate.h"
#include "app/generate.h"
#include "app/model_ranks.h"

#include "base/clock.h"
#include "base/sized.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Opens `text`, or, if it is NULL, the run's training data with the tokens that it stored. Writes
 * nothing. */
static qd_status open_corpus(const qd_evaluate_options *o, const char *text, const qd_model_run *run, qd_run_corpus *corpus)
{
    qd_config c = run->config;
    char tokens[PATH_MAX];
    struct stat info;
    bool kept = run->folder[0] != '\0' &&
                (size_t)snprintf(tokens, sizeof tokens, "%s/tokens", run->folder) < sizeof tokens && stat(tokens, &info) == 0;
    c.run_dir = "";
    if (!text) {
        if (c.data.pairs)
            return QD_FAIL(QD_UNSUPPORTED, "%s: was trained on preferences, whose held-out pairs are evaluated while training "
                                           "(train.eval_every): name a text", run->name);
        if (c.data.examples && o->seq > 0 && o->seq != c.strategy.seq)
            return QD_FAIL(QD_UNSUPPORTED, "%s: the held-out examples (data.format) are packed into windows of %lld tokens: omit --seq",
                           run->name, (long long)c.strategy.seq);
        if (c.data.examples && (o->baseline || o->logits))
            return QD_FAIL(QD_UNSUPPORTED, "%s: %s is for text, and the run was trained on examples (data.format)", run->name,
                           o->baseline ? "--baseline" : "--logits");
        if (c.data.validation <= 0.0)
            return QD_FAIL(QD_USAGE, "%s: no data was held out (data.validation is 0, data.eval_path is empty): name a text to evaluate",
                           run->name);
        if (kept && c.data.cache[0] == '\0')
            c.data.cache = tokens;
        return qd_run_corpus_open(&c, NULL, corpus);
    }
    if (o->baseline)
        return QD_FAIL(QD_USAGE, "the baseline is scored on the held-out part of the training data: omit the text %s", text);
    c.data.path = text;
    c.data.examples = c.data.pairs = false;
    c.data.validation = 0.0;
    c.data.cache = "";
    /* "bytes" that was not set explicitly is the default for text: leave it open. */
    if (strcmp(c.data.tokenizer, "bytes") == 0 && strcmp(qd_options_string(run->options, "data.tokenizer"), "bytes") != 0)
        c.data.tokenizer = "";
    c.strategy.seq = 1; /* a text shorter than a window is evaluated too */
    QD_TRY(c.data.tokenizer[0] != '\0' || c.model.vocab == 256
               ? QD_OK
               : QD_FAIL(QD_USAGE, "%s: has no tokenizer.json to encode text with its %lld tokens", run->name,
                         (long long)c.model.vocab));
    return qd_run_corpus_open(&c, NULL, corpus);
}

typedef struct logit_rows {
    qd_safetensors_writer *writer;
    qd_generator *generator;
    const char *path;
    const int32_t *tokens;
    float *logits;
    int64_t seq;
} logit_rows;

static qd_status write_rows(const logit_rows *r)
{
    qd_safetensors_writer *w = r->writer;
    qd_generator *g = r->generator;
    const int32_t *tokens = r->tokens;
    float *logits = r->logits;
    int64_t vocab = qd_generator_vocab(g), seq = r->seq;
    uint64_t hash;
    qd_generator_expect(g, seq);
    for (int64_t t = 0; t < seq; t++) {
        QD_TRY(qd_generator_feed(g, tokens + t, 1));
        memcpy(logits + t * vocab, qd_generator_logits(g), (size_t)vocab * sizeof *logits);
    }
    QD_TRY(qd_safetensors_declare(w, "tokens", QD_I32, 1, &seq));
    QD_TRY(qd_safetensors_declare(w, "logits", QD_F32, 2, (int64_t[]){seq, vocab}));
    QD_TRY(qd_safetensors_write(w, tokens, &hash));
    return qd_safetensors_write(w, logits, &hash);
}

/* On rank 0. */
static qd_status write_file(void *context)
{
    logit_rows *r = context;
    QD_TRY(qd_safetensors_create(r->path, &r->writer));
    qd_status status = write_rows(r);
    if (status == QD_OK)
        return qd_safetensors_finish(r->writer, NULL);
    qd_safetensors_abandon(r->writer);
    return status;
}

/* Logits of the first window, token by token. Collective over the model's world. */
static qd_status write_logits(const qd_model_source *model, const qd_evaluate_options *o, qd_windows *w, int64_t seq)
{
    qd_model_generator g = {.generator = NULL};
    int32_t *tokens = NULL;
    float *logits = NULL;
    qd_status status = QD_OK;
    int64_t have = w->ranges[0].end - 1 - w->ranges[0].first;
    have = have < seq ? have : seq;
    QD_TRY_DONE(qd_model_generator_open(model, have, o->device, o->threads, &g));
    tokens = malloc((size_t)have * 3 * sizeof *tokens);
    logits = malloc((size_t)(have * qd_generator_vocab(g.generator)) * sizeof *logits);
    if (!tokens || !logits)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for the logits of %lld tokens", (long long)have));
    QD_TRY_DONE(qd_data_window(w->data, 0, w->ranges[0].first, have, tokens, tokens + have, tokens + 2 * have));
    logit_rows rows = {.generator = g.generator, .path = o->logits, .tokens = tokens, .logits = logits, .seq = have};
    QD_TRY_DONE(qd_generator_lead(g.generator, write_file, &rows));
done:
    free(tokens);
    free(logits);
    qd_model_generator_close(&g);
    return status;
}

static qd_status score_baseline(const qd_data *data, qd_evaluate_report *report)
{
    qd_trigram_report r = qd_trigram_report_default();
    QD_TRY(qd_data_trigram(data, &r));
    report->baseline_loss = r.loss;
    report->baseline_trained = r.trained;
    report->baseline_scored = r.scored;
    report->baseline_trigrams = r.trigrams;
    report->baseline_seconds = r.seconds;
    return QD_OK;
}

/* A run that validates while it trains is evaluated in passes of the same windows: on the layout of
 * one rank the losses are bit-identical. Sums do not depend on how a pass is split further, so
 * that keeps to about as many tokens as other passes. */
static void choose_passes(const qd_config *c, int64_t seq, qd_evaluate_passes *passes)
{
    if (passes->per_pass > 0 || passes->seq != c->strategy.seq || !qd_config_validates(c))
        return;
    passes->per_pass = passes->micro = c->global_batch;
    while (passes->micro > 1 && (passes->micro * seq > 4096 || passes->per_pass % passes->micro != 0))
        passes->micro--;
}

/* Collective. Each rank of dp has counted the bytes of its windows; ranks of tp and pp read the
 * same ones. */
static qd_status sum_bytes(const qd_model_run *run, int64_t *bytes)
{
    const qd_mesh *mesh = &qd_trainer_program(run->trainer)->ledger->mesh;
    int64_t own = qd_mesh_group_coord(mesh, QD_AXIS_BIT(QD_AXIS_TP) | QD_AXIS_BIT(QD_AXIS_PP), qd_comm_rank(run->world)) == 0 ? *bytes : 0;
    if (qd_comm_size(run->world) == 1)
        return QD_OK;
    return qd_comm_all_reduce(run->world, &own, bytes, 1, QD_I64, QD_SUM, NULL);
}

/* Collective over the model's world, if it has one. */
static qd_status evaluate_on_rank(const qd_model_source *model, const qd_evaluate_options *o, qd_evaluate_report *report)
{
    qd_model_run run;
    qd_run_corpus corpus = {0};
    qd_windows windows = {0};
    qd_evaluation result = {0};
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_model_run_open(model, o->device, &run));
    const char *text = o->text ? o->text : run.config.evaluation.path[0] != '\0' && !o->baseline ? run.config.evaluation.path : NULL;
    const qd_config trained = run.trained;
    QD_TRY_DONE(open_corpus(o, text, &run, &corpus));
    int64_t train_seq = trained.strategy.seq, seq = o->seq > 0 ? o->seq : train_seq;
    int64_t longest = qd_windows_longest(corpus.data, !text, train_seq);
    qd_evaluate_passes passes = {.seq = seq < longest ? seq : longest, .per_pass = o->per_pass, .device = o->device, .threads = o->threads,
                                 .progress = o->progress, .context = o->context};
    choose_passes(&trained, seq, &passes);
    QD_TRY_DONE(qd_windows_open(corpus.data, corpus.tokenizer, !text, train_seq, passes.seq, o->windows, trained.data.document_mask,
                                &windows));
    qd_batch_source source = qd_windows_source(&windows);
    double begin = qd_clock_now();
    QD_TRY_DONE(qd_evaluate_windows(&run, &source, windows.chosen, &passes, &result));
    report->seconds = qd_clock_now() - begin;
    QD_TRY_DONE(sum_bytes(&run, &windows.bytes));
    snprintf(report->data, sizeof report->data, "%s", text ? text : run.config.data.path);
    report->held_out = !text;
    report->step = run.step;
    snprintf(report->warning, sizeof report->warning, "%s", run.warning);
    report->loss = result.loss;
    report->tokens = result.tokens;
    report->windows = windows.chosen;
    report->seq = passes.seq;
    if (run.config.data.tokenizer[0] != '\0' && windows.bytes > 0) {
        report->bytes = windows.bytes;
        report->bits_per_byte = result.loss * (double)result.tokens / ((double)windows.bytes * log(2.0));
    }
    if (o->logits)
        QD_TRY_DONE(write_logits(model, o, &windows, passes.seq));
    if (o->baseline)
        QD_TRY_DONE(score_baseline(corpus.data, report));
done:
    qd_windows_close(&windows);
    qd_run_corpus_close(&corpus);
    qd_model_run_close(&run);
    return status;
}

typedef struct evaluating {
    const qd_evaluate_options *options;
    qd_evaluate_report *report;
} evaluating;

/* Every rank reads the text; rank 0 reports. */
static qd_status evaluate_rank(void *context, const qd_model_source *model)
{
    const evaluating *e = context;
    bool first = !model->world || qd_comm_rank(model->world) == 0;
    qd_evaluate_options o = *e->options;
    qd_evaluate_report other = qd_evaluate_report_default();
    if (!first) {
        o.progress = NULL;
        o.baseline = false;
    }
    return evaluate_on_rank(model, &o, first ? e->report : &other);
}

qd_status qd_evaluate_from(const qd_model_source *model, const qd_evaluate_options *o, qd_evaluate_report *report)
{
    *report = qd_evaluate_report_default();
    return qd_model_ranks_call(&(qd_model_ranks){o->tp, o->pp, o->ep}, model, evaluate_rank, &(evaluating){o, report});
}

qd_status qd_evaluate(const qd_evaluate_options *options, qd_evaluate_report *report)
{
    qd_evaluate_options o = qd_evaluate_options_default();
    qd_evaluate_report r;
    QD_TRY(QD_SIZED_READ(options, qd_evaluate_options, &o));
    QD_TRY(QD_SIZED_CHECK(report, qd_evaluate_report));
    if (!o.model)
        return QD_FAIL(QD_USAGE, "qd_evaluate: no model is named; give a run folder or a checkpoint");
    qd_status status = qd_evaluate_from(&(qd_model_source){.path = o.model}, &o, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
