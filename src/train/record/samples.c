/* Generates sample texts and appends them to samples.jsonl. */
#include "train/record/samples.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/text/json_writer.h"
#include "base/text/strbuf.h"
#include "train/generate/continue_text.h"
#include "train/record/lines.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct qd_samples {
    const qd_config *config;
    qd_generator *generator;
    qd_model_text text; /* rank 0 */
    bool open;
    char path[PATH_MAX];
};

/* One call of qd_samples_write(). */
typedef struct writing {
    qd_samples *samples;
    int64_t step;
    qd_strbuf text;  /* of the present prompt */
    qd_strbuf first; /* of the first prompt, with it */
    qd_strbuf lines;
    char *note;
    size_t size;
} writing;

static void name_tokenizer(const qd_config *c, const qd_run_corpus *corpus, char *path, size_t size)
{
    if (corpus->tokenizer)
        snprintf(path, size, "%s/tokenizer.json", c->run_dir);
    else
        snprintf(path, size, "%s", c->data.tokenizer[0] == '\0' && qd_run_corpus_is_bytes(c) ? "bytes" : c->data.tokenizer);
}

qd_status qd_samples_check(const qd_config *c, const qd_run_corpus *corpus)
{
    char tokenizer[PATH_MAX];
    name_tokenizer(c, corpus, tokenizer, sizeof tokenizer);
    return c->samples.every == 0 || tokenizer[0] != '\0'
               ? QD_OK
               : QD_FAIL(QD_USAGE, "run.sample_every: the data are token ids without a tokenizer: data.tokenizer can name it");
}

static qd_status name_file(const char *run_dir, char path[PATH_MAX])
{
    int n = snprintf(path, PATH_MAX, "%s/samples.jsonl", run_dir);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "run.dir is too long: %.64s…", run_dir);
}

static qd_status keep_until(const char *path, int64_t step)
{
    qd_strbuf kept = {0};
    qd_status status = qd_lines_keep(path, step, &kept);
    if (status == QD_OK)
        status = qd_file_replace(path, kept.data ? kept.data : "", kept.length);
    qd_strbuf_free(&kept);
    return status;
}

/* Rank 0: the tokenizer, and the lines of a resumed run. */
static qd_status open_text(qd_samples *s, const qd_run_corpus *corpus, int64_t step)
{
    char tokenizer[PATH_MAX];
    qd_config c = *s->config;
    name_tokenizer(&c, corpus, tokenizer, sizeof tokenizer);
    c.data.tokenizer = tokenizer;
    QD_TRY(qd_model_text_open(&c, false, &s->text));
    s->open = true;
    QD_TRY(name_file(c.run_dir, s->path));
    return qd_samples_rewind(s, step);
}

qd_status qd_samples_rewind(qd_samples *s, int64_t step)
{
    return s && s->open ? keep_until(s->path, step) : QD_OK;
}

qd_status qd_samples_cut(const char *run_dir, int64_t step)
{
    char path[PATH_MAX];
    QD_TRY(name_file(run_dir, path));
    return access(path, F_OK) == 0 ? keep_until(path, step) : QD_OK;
}

qd_status qd_samples_create(const qd_config *c, const qd_run_corpus *corpus, qd_trainer *trainer, qd_samples **samples)
{
    qd_samples *s = calloc(1, sizeof *s);
    if (!s)
        return QD_FAIL(QD_NO_MEMORY, "no memory for sample texts");
    s->config = c;
    qd_status status = QD_OK;
    if (qd_comm_rank(qd_trainer_world(trainer)) == 0)
        status = open_text(s, corpus, qd_trainer_position(trainer).step);
    if (status == QD_OK)
        status = qd_generator_create(trainer, c->strategy.seq, &s->generator);
    if (status != QD_OK) {
        qd_samples_destroy(s);
        return status;
    }
    *samples = s;
    return QD_OK;
}

void qd_samples_destroy(qd_samples *s)
{
    if (!s)
        return;
    qd_generator_destroy(s->generator);
    if (s->open)
        qd_model_text_close(&s->text);
    free(s);
}

bool qd_samples_due(const qd_config *c, int64_t step)
{
    return c->samples.every > 0 && (step % c->samples.every == 0 || step == c->steps);
}

static bool take_text(void *context, const char *text, size_t length)
{
    writing *w = context;
    qd_strbuf_append_utf8(&w->text, text, length);
    return true;
}

/* Generates one text. Weights that are not finite, or a prompt that cannot be encoded, have no
 * text. */
static qd_status continue_prompt(writing *w, const char *prompt, size_t length)
{
    const qd_config *c = w->samples->config;
    qd_generate_options o = qd_generate_options_default();
    qd_generate_report report = qd_generate_report_default();
    o.prompt = prompt;
    o.prompt_length = length;
    o.tokens = c->samples.tokens;
    o.temperature = c->samples.temperature;
    o.seed = c->seed;
    o.on_text = take_text;
    o.callback_context = w;
    qd_strbuf_clear(&w->text);
    qd_status status = qd_continue_text(w->samples->generator, &w->samples->text, &o, &report);
    if (status == QD_NOT_FINITE || status == QD_USAGE) {
        snprintf(w->note, w->size, "no sample text after step %lld: %s", (long long)w->step, qd_error_message());
        qd_error_clear();
        return QD_OK;
    }
    QD_TRY(status);
    qd_json_writer json = qd_json_writer_on(&w->lines);
    qd_json_object_begin(&json, NULL);
    qd_json_put_int(&json, "step", w->step);
    qd_json_put_bytes(&json, "prompt", prompt, length);
    qd_json_put_bytes(&json, "text", w->text.data, w->text.length);
    qd_json_put_int(&json, "tokens", report.tokens);
    qd_json_put_double(&json, "seconds", report.prompt_seconds + report.seconds);
    qd_json_end(&json);
    qd_json_newline(&json);
    if (w->first.length == 0) {
        qd_strbuf_append(&w->first, prompt, length);
        qd_strbuf_append(&w->first, w->text.data ? w->text.data : "", w->text.length);
    }
    return QD_OK;
}

/* Each line of run.sample_prompts; none: one empty prompt. */
static qd_status continue_prompts(void *context)
{
    writing *w = context;
    const char *at = w->samples->config->samples.prompts;
    bool any = false;
    while (*at) {
        size_t length = strcspn(at, "\n");
        if (length > 0)
            QD_TRY(continue_prompt(w, at, length));
        any = any || length > 0;
        at += length + (at[length] == '\n');
    }
    return any ? QD_OK : continue_prompt(w, "", 0);
}

/* A disk that is full loses texts, not the run, and leaves no half line that spoils the next. */
static void append_lines(const writing *w)
{
    int fd = open(w->samples->path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    off_t before = fd < 0 ? -1 : lseek(fd, 0, SEEK_END);
    ssize_t written = fd < 0 || w->lines.failed ? -1 : write(fd, w->lines.data ? w->lines.data : "", w->lines.length);
    const bool part = written >= 0 && written != (ssize_t)w->lines.length, left = part && (before < 0 || ftruncate(fd, before) != 0);
    if (written != (ssize_t)w->lines.length)
        snprintf(w->note, w->size, "%s: the texts after step %lld could not be written: %s%s", w->samples->path, (long long)w->step,
                 w->lines.failed ? "no memory" : written >= 0 ? "the disk is full" : strerror(errno), left ? "; a part is left" : "");
    if (fd >= 0)
        close(fd);
}

/* The beginning of the first text on one line. */
static void put_note(const writing *w)
{
    enum { SHOWN = 100 };
    size_t length = w->first.length < SHOWN ? w->first.length : SHOWN;
    if (w->note[0] != '\0' || w->first.failed || length == 0)
        return;
    length = length < w->first.length ? qd_utf8_whole(w->first.data, length) : length;
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)w->first.data[i] < 0x20 || w->first.data[i] == 0x7f)
            w->first.data[i] = ' ';
    snprintf(w->note, w->size, "sample after step %lld: %.*s%s", (long long)w->step, (int)length, w->first.data,
             length < w->first.length ? "…" : "");
}

qd_status qd_samples_write(qd_samples *s, int64_t step, char *note, size_t size)
{
    writing w = {.samples = s, .step = step, .note = note, .size = size};
    note[0] = '\0';
    qd_status status = qd_generator_lead(s->generator, continue_prompts, &w);
    if (status == QD_OK && s->open) {
        append_lines(&w);
        put_note(&w);
    }
    qd_strbuf_free(&w.text);
    qd_strbuf_free(&w.first);
    qd_strbuf_free(&w.lines);
    return status;
}
