/* qd_train_from_options(): the model, tokenizer and weights of a folder as options of a run. */
#include "ckpt/huggingface.h"
#include "model/field_table.h"
#include "train/exec/model_run.h"

#include <quadrille/config.h>
#include <quadrille/train.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What a folder determines. */
typedef struct origin {
    qd_model model;
    char tokenizer[PATH_MAX]; /* "": unknown */
} origin;

static qd_status look_into_folder(const char *path, origin *o)
{
    qd_hf_source *source = NULL;
    qd_strbuf notes = {0}; /* about training settings, which are the run's own */
    qd_status status = qd_hf_open(path, &notes, &source);
    if (status == QD_OK)
        o->model = *qd_hf_model(source);
    if (status == QD_OK && (size_t)snprintf(o->tokenizer, sizeof o->tokenizer, "%s/" QD_HF_TOKENIZER, path) >= sizeof o->tokenizer)
        status = QD_FAIL(QD_USAGE, "the name of a folder is too long: %.64s…", path);
    if (access(o->tokenizer, F_OK) != 0)
        snprintf(o->tokenizer, sizeof o->tokenizer, "%.*s/" QD_HF_SENTENCEPIECE, PATH_MAX - 32, path);
    if (access(o->tokenizer, F_OK) != 0)
        o->tokenizer[0] = '\0';
    qd_hf_close(source);
    qd_strbuf_free(&notes);
    return status;
}

static qd_status look_into_run(const char *path, origin *o)
{
    qd_model_run run;
    qd_status status = qd_model_run_open(&(qd_model_source){.path = path}, NULL, &run);
    if (status == QD_OK && qd_checkpoint_meta(run.checkpoint)->base[0] != '\0')
        status = QD_FAIL(QD_USAGE, "%s: holds adapters of another model: merge them first ('quadrille convert %s FOLDER')", path, path);
    if (status == QD_OK) {
        o->model = run.config.model;
        snprintf(o->tokenizer, sizeof o->tokenizer, "%s", run.config.data.tokenizer);
    }
    qd_model_run_close(&run);
    return status;
}

static qd_status set_open(qd_options *options, const char *key, const char *value)
{
    return qd_options_is_set(options, key) ? QD_OK : qd_options_set(options, key, value);
}

/* Sets the keys of all fields that apply to the model. */
static qd_status set_model(qd_options *options, const qd_model *model)
{
    int count;
    const qd_model_field *fields = qd_model_fields(&count);
    for (const qd_model_field *f = fields; f < fields + count; f++) {
        char text[QD_FIELD_TEXT];
        if (!f->option.key || !qd_field_counts(f, model))
            continue;
        qd_field_text(f, model, text);
        QD_TRY(set_open(options, f->option.key, text));
    }
    return QD_OK;
}

static qd_status take_from(qd_options *options, const char *path)
{
    static const char *const rivals[] = {"model.preset", "run.weights"};
    origin o = {0};
    for (size_t i = 0; i < sizeof rivals / sizeof *rivals; i++)
        if (qd_options_string(options, rivals[i])[0] != '\0')
            return QD_FAIL(QD_USAGE, "run.from (--from) gives the model and its weights, and %s is set too: omit one of them", rivals[i]);
    QD_TRY(qd_hf_is_folder(path) ? look_into_folder(path, &o) : look_into_run(path, &o));
    QD_TRY(set_model(options, &o.model));
    if (o.tokenizer[0] != '\0')
        QD_TRY(set_open(options, "data.tokenizer", o.tokenizer));
    QD_TRY(qd_options_set(options, "run.weights", path));
    return qd_options_set(options, "run.from", "");
}

qd_status qd_train_from_options(qd_options *options)
{
    const char *from = qd_options_string(options, "run.from");
    if (from[0] == '\0' || qd_options_bool(options, "run.resume") || qd_train_is_rank())
        return QD_OK;
    char *path = strdup(from);
    if (!path)
        return QD_FAIL(QD_NO_MEMORY, "no memory for run.from");
    qd_status status = take_from(options, path);
    free(path);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "run.from: ");
}
