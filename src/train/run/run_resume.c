/* Resumes a run: chooses the checkpoint, loads the same one on all ranks, and reports settings and
 * data that differ from those it was written with. */
#include "train/run/run_state.h"

#include "train/ranks/long_work.h"
#include "train/exec/model_run.h"
#include "train/run/run_data.h"
#include "train/exec/state.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Compares what determines a model's tensors and their meaning; rotary embeddings and dropout may
 * change during a run. */
static bool same_tensors(const qd_model *now, const qd_model *then)
{
    qd_model other = *then;
    other.rope = now->rope;
    other.dropout = now->dropout;
    other.init_std = now->init_std;
    if (now->position == QD_POSITION_ROPE)
        other.max_seq = now->max_seq;
    return qd_model_equal(now, &other);
}

/* What a run cannot change: the model, the order of its samples, and its optimizer state. Returns
 * the first key that differs; NULL: none. early: the data has not been opened yet; opening it
 * reports a different tokenizer. */
static const char *find_change(const qd_config *now, const qd_config *then, bool early)
{
    const struct {
        const char *key;
        bool same;
    } keys[] = {
        {"train.seed", now->seed == then->seed},
        {"train.optimizer", now->optimizer.kind == then->optimizer.kind},
        {"data.tokenizer", early || qd_run_corpus_is_bytes(now) == qd_run_corpus_is_bytes(then)},
        {"data.validation", now->data.validation == then->data.validation},
        {"data.document_mask", now->data.document_mask == then->data.document_mask},
        {"data.format", now->data.examples == then->data.examples && now->data.pairs == then->data.pairs},
        /* They decide how examples are packed, and so which of them a step has seen. */
        {"data.overlong", !now->data.examples || now->data.overlong == then->data.overlong},
        {"data.seq", !now->data.examples || now->strategy.seq == then->strategy.seq},
        {"run.weights", now->model.lora.rank == 0 || now->model.lora.stored == then->model.lora.stored},
        {"lora.rank", now->model.lora.rank == then->model.lora.rank},
        {"lora.targets", now->model.lora.targets == then->model.lora.targets},
        {"lora.alpha", now->model.lora.alpha == then->model.lora.alpha && now->model.lora.rslora == then->model.lora.rslora},
        {"the model", same_tensors(&now->model, &then->model)},
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!keys[i].same)
            return keys[i].key;
    return NULL;
}

static qd_status check_continues(const qd_config *now, const qd_config *then, bool early)
{
    const char *changed = find_change(now, then, early);
    if (!changed)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "run.resume: %s has changed since the checkpoint was written; omit it to resume the run as it was, or start "
                             "another", changed);
}

/* The length by train.epochs is a number of steps of equal size, from the first on: with others
 * before, the run would end early or late. */
static qd_status check_epochs(const qd_config *now, const qd_config *then, const qd_ckpt_meta *meta)
{
    if (now->epochs <= 0.0 || (now->strategy.seq == then->strategy.seq && meta->next_sample == meta->step * now->global_batch))
        return QD_OK;
    return QD_FAIL(QD_USAGE,
                   "run.resume: train.epochs=%g counts steps of %lld sequences of %lld tokens, and the %lld steps so far had %lld "
                   "sequences of %lld: keep train.global_batch and data.seq, or set train.steps instead",
                   now->epochs, (long long)now->global_batch, (long long)now->strategy.seq, (long long)meta->step,
                   (long long)meta->next_sample, (long long)then->strategy.seq);
}

/* The frozen values are those of the folder that the checkpoint names. run.weights may name a copy
 * of it, but not other weights: the next checkpoints would then name the wrong folder. */
static qd_status check_base(const qd_config *now, const qd_ckpt_meta *meta)
{
    char whole[PATH_MAX], found[QD_CKPT_BASE_TEXT], *folder = NULL;
    if (meta->base[0] == '\0' || !realpath(now->weights, whole))
        return QD_OK;
    size_t length = strlen(whole); /* a run, of which the base is a checkpoint */
    if (strncmp(whole, meta->base, length) == 0 && (meta->base[length] == '/' || meta->base[length] == '\0'))
        return QD_OK;
    qd_status status = qd_ckpt_base_fingerprint(whole, found, &folder);
    free(folder);
    QD_TRY(status);
    if (strcmp(found, meta->base_hash) == 0)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "run.resume: run.weights=%s are not the weights that the adapters were trained on, %s: omit it", now->weights,
                   meta->base);
}

/* Samples are windows of data.seq tokens. With another length the run continues at the same number
 * of tokens, in the order of the new windows. */
static void rescale_position(qd_rank_run *s, const qd_config *then)
{
    qd_position at = qd_trainer_position(s->trainer);
    int64_t seq = s->run->config.strategy.seq;
    if (seq == then->strategy.seq)
        return;
    at.next_sample = at.next_sample / seq * then->strategy.seq + (at.next_sample % seq * then->strategy.seq + seq - 1) / seq;
    qd_trainer_set_position(s->trainer, at);
}

/* Whether a setting changes what is trained. Of the others, some are compared elsewhere, and some
 * change only speed or memory. */
static bool is_compared(const char *key)
{
    static const char *const others[] = {"data.tokenizer", "data.cache", "data.verify", "model.init_std", "train.micro_batch",
                                         "train.grad_sync", "train.swiglu", "train.recompute", "train.recompute_layers",
                                         "train.offload", "train.offload_chunk_mb", "train.deterministic",
                                         "train.eval_every", "fp8.weights"};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (strcmp(key, others[i]) == 0)
            return false;
    return strncmp(key, "model.", 6) == 0 || strncmp(key, "data.", 5) == 0 || strncmp(key, "train.", 6) == 0 ||
           strncmp(key, "fp8.", 4) == 0 || strncmp(key, "lora.", 5) == 0 || strncmp(key, "dpo.", 4) == 0 ||
           strcmp(key, "run.kernels") == 0;
}

static bool is_evaluated_on(const char *key)
{
    return strcmp(key, "data.eval_path") == 0 || strcmp(key, "train.eval_batches") == 0;
}

/* Validation losses are comparable if they are of the same windows. */
static bool same_validation(const qd_config *now, const qd_config *then)
{
    const qd_evaluation_config *a = &now->evaluation, *b = &then->evaluation;
    bool held_out = a->path[0] == '\0'; /* of data.path */
    return strcmp(a->path, b->path) == 0 && (!held_out || strcmp(now->data.path, then->data.path) == 0) && a->batches == b->batches &&
           now->strategy.seq == then->strategy.seq && (a->batches == 0 || now->global_batch == then->global_batch);
}

/* Writes a note if a setting has changed. */
static qd_status note_change(const qd_rank_run *s, const char *key, const qd_options *then, const qd_options *now)
{
    char *before = NULL, *after = NULL, text[1200];
    qd_status status = qd_options_value_text(then, key, &before);
    if (status == QD_OK)
        status = qd_options_value_text(now, key, &after);
    if (status == QD_OK && strcmp(before, after) != 0) {
        bool samples = strcmp(key, "data.path") == 0 || strcmp(key, "data.seq") == 0;
        snprintf(text, sizeof text, "%s was %.500s and is %.500s%s", key, before, after,
                 samples                ? ": samples differ from here on"
                 : is_evaluated_on(key) ? ": validation losses are of other text from here on, and the best is chosen anew"
                                        : "");
        qd_rank_note(s, text);
    }
    free(before);
    free(after);
    return status;
}

/* Reports a jump of the learning rate, whatever the reason. */
static void note_rate(const qd_rank_run *s, const qd_config *then, int64_t step)
{
    const qd_optim *now = &s->run->config.optimizer;
    const double before = qd_optim_lr(&then->optimizer, step), next = qd_optim_lr(now, step + 1), same = 1e-9 * fabs(before);
    char text[160];
    if (step == 0 || fabs(qd_optim_lr(now, step) - before) <= same || fabs(next - before) <= same)
        return;
    snprintf(text, sizeof text, "the learning rate jumps from %.4g in step %lld to %.4g in step %lld", before, (long long)step, next,
             (long long)step + 1);
    qd_rank_note(s, text);
}

/* Rank 0: names every setting that differs from what the checkpoint was written with, also if
 * config.yaml was edited or damaged since. */
static qd_status note_changes(const qd_rank_run *s, const qd_options *then_options, const qd_config *then, int64_t step)
{
    qd_option_table table = qd_config_table();
    qd_options *now = NULL;
    if (qd_comm_rank(s->world) != 0)
        return QD_OK;
    QD_TRY(qd_run_config_values(s->run->options, &s->run->config, &now));
    qd_status status = QD_OK;
    for (int i = 0; i < table.count && status == QD_OK; i++)
        if (is_compared(table.options[i].key))
            status = note_change(s, table.options[i].key, then_options, now);
    qd_options_destroy(now);
    if (status == QD_OK)
        note_rate(s, then, step);
    return status;
}

/* Reads the configuration that a checkpoint was written with; `then` refers to *options. */
static qd_status read_config(const qd_checkpoint *checkpoint, qd_options **options, qd_config *then)
{
    const char *text = qd_checkpoint_meta(checkpoint)->config;
    qd_option_table table = qd_config_table();
    QD_TRY(qd_options_create(&table, 1, options));
    QD_TRY(qd_options_load_text(*options, "the checkpoint's configuration", text, strlen(text)));
    return qd_config_resolve(*options, 0, then);
}

/* Compares this run with the configuration that a checkpoint was written with; loaded: the
 * checkpoint's state has been loaded. */
static qd_status check_checkpoint(qd_rank_run *s, const qd_checkpoint *checkpoint, bool loaded)
{
    qd_options *options = NULL;
    qd_config then;
    qd_status status = read_config(checkpoint, &options, &then);
    if (status == QD_OK)
        status = check_continues(&s->run->config, &then, false);
    if (status == QD_OK)
        status = check_epochs(&s->run->config, &then, qd_checkpoint_meta(checkpoint));
    if (status == QD_OK)
        status = check_base(&s->run->config, qd_checkpoint_meta(checkpoint));
    if (status == QD_OK && loaded) {
        snprintf(s->base, sizeof s->base, "%s", qd_checkpoint_meta(checkpoint)->base);
        rescale_position(s, &then);
        s->other_validation = !same_validation(&s->run->config, &then);
        status = note_changes(s, options, &then, qd_checkpoint_meta(checkpoint)->step);
    }
    qd_options_destroy(options);
    return status;
}

qd_status qd_run_resume_check(const qd_config *c)
{
    qd_run_file root;
    qd_checkpoint *checkpoint = NULL;
    qd_options *options = NULL;
    qd_config then;
    if (!c->resume)
        return QD_OK;
    QD_TRY(qd_run_path(c, "checkpoints", root));
    qd_status status = qd_store_open(root, INT64_MAX, false, &checkpoint, NULL);
    if (status == QD_OK && qd_checkpoint_meta(checkpoint)->step == 0 && qd_checkpoint_meta(checkpoint)->base[0] != '\0')
        status = QD_FAIL(QD_USAGE, "run.resume: %s holds converted adapters, not a run: 'quadrille convert %s FOLDER' merges them, and "
                                   "--from FOLDER starts a run", c->run_dir, c->run_dir);
    else if (status == QD_OK && qd_checkpoint_meta(checkpoint)->step == 0)
        status = QD_FAIL(QD_USAGE,
                         "run.resume: %s holds converted weights, not a run: run.weights=%s with another run.dir starts a run from "
                         "them",
                         c->run_dir, c->run_dir);
    if (status == QD_OK)
        status = read_config(checkpoint, &options, &then);
    if (status == QD_OK)
        status = check_continues(c, &then, true);
    if (status == QD_OK)
        status = check_epochs(c, &then, qd_checkpoint_meta(checkpoint));
    if (status == QD_OK)
        status = check_base(c, qd_checkpoint_meta(checkpoint));
    qd_options_destroy(options);
    qd_checkpoint_close(checkpoint);
    return status;
}

typedef struct opening {
    const char *root;
    int64_t below; /* checkpoints of this step and later are damaged */
    qd_checkpoint *checkpoint;
    char *passed_over;
} opening;

static qd_status open_newest(void *context)
{
    opening *o = context;
    qd_status status = qd_store_open(o->root, o->below, false, &o->checkpoint, &o->passed_over);
    if (status == QD_USAGE && o->below != INT64_MAX)
        return QD_FAIL(QD_CORRUPT, "%s: no valid checkpoint is left", o->root);
    return status;
}

static void note_passed_over(const qd_rank_run *s, const char *why)
{
    char text[1200];
    snprintf(text, sizeof text, "a checkpoint was skipped: %s", why);
    qd_rank_note(s, text);
}

/* Identifies the checkpoint that all ranks open: its step, and the hash of its manifest. */
typedef struct checkpoint_name {
    int64_t step, hash;
} checkpoint_name;

/* Collective. Rank 0 chooses the newest checkpoint below o->below that has a valid manifest; all
 * ranks open that one. */
static qd_status open_agreed(qd_rank_run *s, opening *o, checkpoint_name *name)
{
    qd_status status = qd_long_work_run(s->control, open_newest, o);
    *name = (checkpoint_name){-1, 0};
    if (status == QD_OK && o->checkpoint) {
        *name = (checkpoint_name){qd_checkpoint_meta(o->checkpoint)->step,
                                  (int64_t)qd_checkpoint_hash(o->checkpoint)};
        status = check_checkpoint(s, o->checkpoint, false);
    }
    if (o->passed_over)
        note_passed_over(s, o->passed_over);
    free(o->passed_over);
    o->passed_over = NULL;
    QD_TRY(qd_rank_agree(s, status));
    QD_TRY(qd_comm_broadcast(s->control, name, 2, QD_I64, 0, NULL));
    return QD_OK;
}

typedef struct loading {
    qd_rank_run *state;
    opening *opening;
    checkpoint_name name;
} loading;

static qd_status load_step(void *context)
{
    const loading *l = context;
    opening *o = l->opening;
    if (!o->checkpoint)
        QD_TRY(qd_store_open_step(o->root, l->name.step, &o->checkpoint));
    if ((int64_t)qd_checkpoint_hash(o->checkpoint) != l->name.hash)
        return QD_FAIL(QD_IO, "%s: has a different manifest here than on rank 0: all ranks must see the same run.dir",
                       qd_checkpoint_folder(o->checkpoint));
    if (l->state->run->config.weights[0] != '\0') {
        qd_status status = qd_checkpoint_move_base(o->checkpoint, l->state->run->config.weights);
        if (status != QD_OK)
            return qd_error_prefix(status, "run.weights: ");
    }
    return qd_state_load(l->state->trainer, o->checkpoint, false);
}

/* Collective. Every rank checks what it loads; *damaged: a rank has found damage, and all continue
 * with an older checkpoint. */
static qd_status load_agreed(qd_rank_run *s, opening *o, checkpoint_name name, bool *damaged)
{
    enum { MESSAGE = 1024 };
    char message[MESSAGE] = "";
    int size = qd_comm_size(s->control);
    qd_status status = qd_long_work_run_all(s->control, load_step, &(loading){s, o, name});
    if (status == QD_OK)
        status = check_checkpoint(s, o->checkpoint, true);
    int32_t found = status == QD_CORRUPT ? size - qd_comm_rank(s->control) : 0;
    if (found)
        snprintf(message, sizeof message, "%s", qd_error_message());
    QD_TRY(qd_comm_all_reduce(s->control, &found, &found, 1, QD_I32, QD_MAX, NULL));
    *damaged = found > 0;
    if (!*damaged)
        return qd_rank_agree(s, status);
    QD_TRY(qd_comm_broadcast(s->control, message, MESSAGE, QD_U8, size - found, NULL));
    note_passed_over(s, message);
    return QD_OK;
}

/* Collective. Resumes from the newest valid checkpoint. */
qd_status qd_run_resume(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_run_file root;
    char text[128];
    opening o = {.root = root, .below = INT64_MAX};
    checkpoint_name name;
    qd_status status = QD_OK;
    QD_TRY(qd_run_path(c, "checkpoints", root));
    for (bool damaged = true; damaged;) {
        QD_TRY_DONE(open_agreed(s, &o, &name));
        QD_TRY_DONE(load_agreed(s, &o, name, &damaged));
        qd_checkpoint_close(o.checkpoint);
        o.checkpoint = NULL;
        o.below = name.step;
    }
    int64_t step = name.step;
    if (step >= c->steps) {
        if (qd_comm_rank(s->world) == 0) /* the run may have been killed before the link named this one */
            qd_store_repair_latest(root, step);
        QD_TRY_DONE(qd_rank_agree(s, QD_FAIL(QD_USAGE, "run.resume: the run has done all of its %lld steps: raise train.steps to resume it",
                                             (long long)step)));
    }
    s->kept = step;
    snprintf(text, sizeof text, "resumes after step %lld", (long long)step);
    qd_rank_note(s, text);
done:
    qd_checkpoint_close(o.checkpoint);
    return status;
}

/* Rank 0. */
qd_status qd_run_compare_data(const qd_rank_run *s)
{
    qd_run_file path;
    char warning[QD_RUN_DATA_WARNING];
    if (qd_comm_rank(s->world) != 0)
        return QD_OK;
    QD_TRY(qd_run_path(&s->run->config, "data.json", path));
    QD_TRY(qd_run_data_compare(path, s->corpus.data, warning));
    if (warning[0] != '\0')
        qd_rank_note(s, warning);
    return QD_OK;
}

typedef struct replacement {
    qd_rank_run *state;
    const char *path;
    qd_checkpoint *checkpoint;
    qd_run_file folder;
    char warning[QD_MODEL_WARNING];
} replacement;

static qd_status open_replacement(void *context)
{
    replacement *r = context;
    QD_TRY(qd_model_checkpoint_open(r->path, &r->checkpoint, r->folder, r->warning));
    if (qd_checkpoint_meta(r->checkpoint)->step == 0)
        return QD_FAIL(QD_USAGE, "%s: holds the weights of a conversion, without optimizer state: run.weights starts a run with them",
                       r->path);
    qd_options *options = NULL;
    qd_config then;
    qd_status status = read_config(r->checkpoint, &options, &then);
    const char *other = status == QD_OK ? find_change(&r->state->run->config, &then, false) : NULL;
    if (other)
        status = QD_FAIL(QD_USAGE, "%s: %s of this checkpoint is not that of the run", r->path, other);
    qd_options_destroy(options);
    return status;
}

static qd_status load_replacement(void *context)
{
    replacement *r = context;
    return qd_state_load(r->state->trainer, r->checkpoint, false);
}

qd_status qd_run_load(qd_rank_run *s, const char *path, bool *begun)
{
    replacement r = {.state = s, .path = path};
    char text[128];
    qd_status status = QD_OK;
    *begun = false;
    QD_TRY_DONE(qd_rank_run_settle(s));
    QD_TRY_DONE(qd_rank_agree(s, qd_long_work_run_all(s->control, open_replacement, &r)));
    *begun = true;
    QD_TRY_DONE(qd_rank_agree(s, qd_long_work_run_all(s->control, load_replacement, &r)));
    QD_TRY_DONE(qd_rank_agree(s, check_checkpoint(s, r.checkpoint, true)));
    QD_TRY_DONE(qd_rank_agree(s, s->saver && s->base[0] ? qd_saver_set_base(s->saver, s->base) : QD_OK));
    int64_t step = qd_trainer_position(s->trainer).step;
    QD_TRY_DONE(qd_rank_agree(s, s->metrics ? qd_metrics_rewind(s->metrics, step) : QD_OK));
    QD_TRY_DONE(qd_rank_agree(s, s->recorder ? qd_recorder_rewind(s->recorder, step) : QD_OK));
    QD_TRY_DONE(qd_rank_agree(s, qd_samples_rewind(s->samples, step)));
    QD_TRY_DONE(qd_rank_agree(s, qd_rank_run_restore_validation(s)));
    QD_TRY_DONE(qd_run_spikes_restore(s));
    s->kept = -1; /* where it comes from need not be run.dir */
    s->skipped = 0;
    snprintf(text, sizeof text, "continues after step %lld", (long long)step);
    if (r.warning[0] != '\0')
        qd_rank_note(s, r.warning);
    qd_rank_note(s, text);
done:
    qd_checkpoint_close(r.checkpoint);
    return status;
}
