/* Starts a run with the weights of another run, of a checkpoint or of a Hugging Face folder. */
#include "train/run/run_state.h"

#include "ckpt/huggingface.h"
#include "model/field_table.h"
#include "train/exec/model_run.h"
#include "train/exec/state.h"
#include "train/ranks/long_work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct weights {
    const qd_rank_run *state;
    qd_run_file folder; /* of the run that wrote them, or of the model */
    char warning[QD_MODEL_WARNING];
} weights;

/* Fields of the model that differ from the folder's and change what its weights compute. */
static void note_fields(const qd_model *ours, const qd_model *theirs, char warning[QD_MODEL_WARNING])
{
    int count;
    const qd_model_field *fields = qd_model_fields(&count);
    size_t used = 0;
    for (const qd_model_field *f = fields; f < fields + count && used < QD_MODEL_WARNING; f++) {
        char here[QD_FIELD_TEXT], there[QD_FIELD_TEXT];
        bool trains = f->offset == offsetof(qd_model, dropout) || f->offset == offsetof(qd_model, init_std) ||
                      f->offset == offsetof(qd_model, max_seq);
        if (!qd_field_key(f) || trains || !qd_field_counts(f, ours))
            continue;
        qd_field_text(f, ours, here);
        qd_field_text(f, theirs, there);
        if (strcmp(here, there) != 0)
            used += (size_t)snprintf(warning + used, QD_MODEL_WARNING - used, "%smodel.%s is %s here and %s there",
                                     used ? "; " : "run.weights: ", qd_field_key(f), here, there);
    }
}

static qd_status load_opened(weights *w, qd_hf_source *source)
{
    const qd_program *program = qd_trainer_program(w->state->trainer);
    qd_arena *arena = NULL;
    note_fields(&program->ledger->model, qd_hf_model(source), w->warning);
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_hf_check(source, program->ledger, arena);
    if (status == QD_OK)
        status = qd_state_load_weights(w->state->trainer, qd_hf_read, NULL, source);
    qd_arena_destroy(arena);
    return status;
}

static qd_status load_folder(weights *w, const char *path)
{
    qd_hf_source *source = NULL;
    qd_strbuf notes = {0}; /* about training settings, which are this run's own */
    snprintf(w->folder, sizeof w->folder, "%s", path);
    qd_status status = qd_hf_open(path, &notes, &source);
    if (status == QD_OK)
        status = load_opened(w, source);
    qd_hf_close(source);
    qd_strbuf_free(&notes);
    return status;
}

static qd_status load_checkpoint(weights *w, const char *path)
{
    qd_checkpoint *checkpoint = NULL;
    qd_status status = qd_model_checkpoint_open(path, &checkpoint, w->folder, w->warning);
    if (status == QD_OK && qd_checkpoint_adapts(checkpoint)) /* this run may have none, or others */
        status = QD_FAIL(QD_USAGE, "%s: holds adapters (LoRA): merge them first ('quadrille convert %s FOLDER')", path, path);
    if (status == QD_OK)
        status = qd_state_load(w->state->trainer, checkpoint, true);
    qd_checkpoint_close(checkpoint);
    return status;
}

/* Every rank reads its own shards; an error in the folder is the same for all. */
static qd_status load_weights(void *context)
{
    weights *w = context;
    const char *path = w->state->run->config.weights;
    qd_status status = qd_hf_is_folder(path) ? load_folder(w, path) : load_checkpoint(w, path);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "run.weights: ");
}

/* Loading weights trained with a different tokenizer is allowed, with a warning. */
static void note_other_tokenizer(const qd_rank_run *s, const char *folder)
{
    char path[PATH_MAX + 32], text[PATH_MAX + 512];
    uint64_t theirs, ours = qd_data_tokenizer_hash(s->corpus.data);
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    if (qd_comm_rank(s->world) != 0 || access(path, F_OK) != 0)
        return;
    if (qd_run_corpus_tokenizer_hash(path, &theirs) != QD_OK)
        snprintf(text, sizeof text, "run.weights: cannot check whether they use the tokenizer of this run: %s", qd_error_message());
    else if (ours != 0 && ours != theirs)
        snprintf(text, sizeof text, "run.weights: they were trained with another tokenizer, %s (%016llx), than this run uses (%016llx): "
                                    "data.tokenizer can name it", path, (unsigned long long)theirs, (unsigned long long)ours);
    else
        return;
    qd_rank_note(s, text);
}

/* Collective. */
qd_status qd_run_load_weights(qd_rank_run *s)
{
    weights w = {.state = s};
    QD_TRY(qd_rank_agree(s, qd_long_work_run_all(s->control, load_weights, &w)));
    if (w.warning[0] != '\0')
        qd_rank_note(s, w.warning);
    note_other_tokenizer(s, w.folder);
    return QD_OK;
}
