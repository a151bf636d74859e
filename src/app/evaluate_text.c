/* qd_evaluate(): opens the data set and chooses the tokens that are predicted. */
#include "ckpt/safetensors.h"
#include "train/run/run_corpus.h"
#include "app/evaluate.h"
#include "app/generate.h"

#include "base/clock.h"
#include "base/sized.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Tokens [first, end) of each source, cut into windows; all except the first of each are
 * predicted. */
typedef struct token_range {
    int64_t first, end, windows;
} token_range;

typedef struct range_windows {
    const qd_run_corpus *corpus;
    token_range *ranges; /* per source */
    int count;
    int64_t all; /* windows */
    int64_t bytes; /* of the targets so far */
} range_windows;

/* *seq: the requested length of a window; reduced to the longest text if that is shorter. */
static qd_status make_ranges(const qd_run_corpus *corpus, bool held_out, int64_t train_seq, int64_t *seq, range_windows *w)
{
    int64_t longest = 1;
    *w = (range_windows){.corpus = corpus, .count = qd_data_source_count(corpus->data)};
    w->ranges = calloc((size_t)w->count, sizeof *w->ranges);
    if (!w->ranges)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d sources", w->count);
    for (int s = 0; s < w->count; s++) {
        qd_data_source_info info = qd_data_source_info_default();
        qd_data_source_describe(corpus->data, s, &info);
        token_range *r = &w->ranges[s];
        r->first = held_out ? info.windows * train_seq : 0;
        r->end = held_out ? r->first + info.validation_windows * train_seq + 1 : info.tokens;
        longest = r->end - r->first - 1 > longest ? r->end - r->first - 1 : longest;
    }
    *seq = *seq < longest ? *seq : longest;
    for (int s = 0; s < w->count; s++) {
        w->ranges[s].windows = (w->ranges[s].end - w->ranges[s].first - 2) / *seq + 1;
        w->all += w->ranges[s].windows;
    }
    return QD_OK;
}

static void count_bytes(range_windows *w, const int32_t *targets, int64_t count)
{
    const qd_tokenizer *tokenizer = w->corpus->tokenizer;
    for (int64_t i = 0; i < count; i++) {
        size_t length = 1;
        if (tokenizer && targets[i] >= 0 && (qd_tokenizer_is_special(tokenizer, targets[i]) ||
                                             !qd_tokenizer_bytes(tokenizer, targets[i], &length)))
            length = 0; /* not part of the text */
        w->bytes += targets[i] >= 0 ? (int64_t)length : 0;
    }
}

/* Window `index` of all; positions past the end of its range, or of all ranges, do not count. */
static qd_status fill_one(range_windows *w, int64_t index, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    int64_t have = 0;
    int s = 0;
    for (; s < w->count && index >= w->ranges[s].windows; s++)
        index -= w->ranges[s].windows;
    if (s < w->count) {
        const token_range *r = &w->ranges[s];
        int64_t first = r->first + index * seq, left = r->end - 1 - first;
        have = left < seq ? left : seq;
        QD_TRY(qd_data_window(w->corpus->data, s, first, have, tokens, targets, doc_start));
        count_bytes(w, targets, have);
    }
    for (int64_t i = have; i < seq; i++) {
        tokens[i] = doc_start[i] = 0;
        targets[i] = -1;
    }
    return QD_OK;
}

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    for (int64_t i = 0; i < count; i++)
        QD_TRY(fill_one(context, first + i, seq, tokens + i * seq, targets + i * seq, doc_start + i * seq));
    return QD_OK;
}

/* Opens the given text, or the run's training data with the tokens that it stored. Writes
 * nothing. */
static qd_status open_corpus(const qd_evaluate_options *o, const qd_model_run *run, qd_run_corpus *corpus)
{
    qd_config c = run->config;
    char tokens[PATH_MAX];
    struct stat info;
    bool kept = run->folder[0] != '\0' &&
                (size_t)snprintf(tokens, sizeof tokens, "%s/tokens", run->folder) < sizeof tokens && stat(tokens, &info) == 0;
    c.run_dir = "";
    if (!o->text) {
        if (c.data.examples)
            return QD_FAIL(QD_UNSUPPORTED, "%s: the held-out part of examples (data.format) cannot be evaluated: name a text", run->name);
        if (c.data.validation <= 0.0)
            return QD_FAIL(QD_USAGE, "%s: no data was held out (data.validation is 0): name a text to evaluate", run->name);
        if (kept && c.data.cache[0] == '\0')
            c.data.cache = tokens;
        return qd_run_corpus_open(&c, NULL, corpus);
    }
    if (o->baseline)
        return QD_FAIL(QD_USAGE, "the baseline is scored on the held-out part of the training data: omit the text %s", o->text);
    c.data.path = o->text;
    c.data.examples = false;
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

static qd_status write_rows(qd_safetensors_writer *w, qd_generator *g, const int32_t *tokens, float *logits, int64_t seq)
{
    int64_t vocab = qd_generator_vocab(g);
    uint64_t hash;
    for (int64_t t = 0; t < seq; t++) {
        QD_TRY(qd_generator_feed(g, tokens + t, 1));
        memcpy(logits + t * vocab, qd_generator_logits(g), (size_t)vocab * sizeof *logits);
    }
    QD_TRY(qd_safetensors_declare(w, "tokens", QD_I32, 1, &seq));
    QD_TRY(qd_safetensors_declare(w, "logits", QD_F32, 2, (int64_t[]){seq, vocab}));
    QD_TRY(qd_safetensors_write(w, tokens, &hash));
    return qd_safetensors_write(w, logits, &hash);
}

/* Logits of the first window, token by token: the logits of a whole window are never in memory. */
static qd_status write_logits(const qd_model_source *model, const qd_evaluate_options *o, range_windows *w, int64_t seq)
{
    qd_generator *g = NULL;
    qd_safetensors_writer *writer = NULL;
    int32_t *tokens = NULL;
    float *logits = NULL;
    qd_status status = QD_OK;
    int64_t have = w->ranges[0].end - 1 - w->ranges[0].first;
    have = have < seq ? have : seq;
    QD_TRY_DONE(qd_generator_create(model, have, o->device, o->threads, &g));
    tokens = malloc((size_t)have * 3 * sizeof *tokens);
    logits = malloc((size_t)(have * qd_generator_vocab(g)) * sizeof *logits);
    if (!tokens || !logits)
        QD_TRY_DONE(QD_FAIL(QD_NO_MEMORY, "no memory for the logits of %lld tokens", (long long)have));
    QD_TRY_DONE(qd_data_window(w->corpus->data, 0, w->ranges[0].first, have, tokens, tokens + have, tokens + 2 * have));
    QD_TRY_DONE(qd_safetensors_create(o->logits, &writer));
    status = write_rows(writer, g, tokens, logits, have);
    if (status == QD_OK)
        status = qd_safetensors_finish(writer, NULL);
    else
        qd_safetensors_abandon(writer);
done:
    free(tokens);
    free(logits);
    qd_generator_destroy(g);
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

qd_status qd_evaluate_from(const qd_model_source *model, const qd_evaluate_options *o, qd_evaluate_report *report)
{
    qd_model_run run;
    qd_run_corpus corpus = {0};
    range_windows windows = {0};
    qd_evaluation result = {0};
    qd_status status = QD_OK;
    *report = qd_evaluate_report_default();
    QD_TRY_DONE(qd_model_run_open(model, o->device, &run));
    QD_TRY_DONE(open_corpus(o, &run, &corpus));
    int64_t train_seq = run.config.strategy.seq, seq = o->seq > 0 ? o->seq : train_seq;
    QD_TRY_DONE(make_ranges(&corpus, !o->text, train_seq, &seq, &windows));
    qd_batch_source source = {.fill = fill, .context = &windows, .documents = run.config.data.document_mask};
    qd_evaluate_passes passes = {.seq = seq, .per_pass = o->per_pass, .device = o->device, .threads = o->threads, .progress = o->progress,
                                 .context = o->context};
    double begin = qd_clock_now();
    QD_TRY_DONE(qd_evaluate_windows(&run, &source, windows.all, &passes, &result));
    report->seconds = qd_clock_now() - begin;
    snprintf(report->data, sizeof report->data, "%s", o->text ? o->text : run.config.data.path);
    report->step = run.step;
    snprintf(report->warning, sizeof report->warning, "%s", run.warning);
    report->loss = result.loss;
    report->tokens = result.tokens;
    report->windows = windows.all;
    report->seq = seq;
    if (run.config.data.tokenizer[0] != '\0' && windows.bytes > 0) {
        report->bytes = windows.bytes;
        report->bits_per_byte = result.loss * (double)result.tokens / ((double)windows.bytes * log(2.0));
    }
    if (o->logits)
        QD_TRY_DONE(write_logits(model, o, &windows, seq));
    if (o->baseline)
        QD_TRY_DONE(score_baseline(corpus.data, report));
done:
    free(windows.ranges);
    qd_run_corpus_close(&corpus);
    qd_model_run_close(&run);
    return status;
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
