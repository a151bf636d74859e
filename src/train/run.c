#include "train/run.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/strbuf.h"
#include "device/ceiling.h"
#include "train/common.h"
#include "train/run_corpus.h"
#include "train/run_data.h"
#include "train/run_memory.h"
#include "train/footprint.h"
#include "train/long_work.h"
#include "train/metrics.h"
#include "train/model_run.h"
#include "train/saver.h"
#include "train/state.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <quadrille/machine.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef char file_path[PATH_MAX];

/* What one rank holds while it runs. */
typedef struct rank_state {
    const qd_run *run;
    qd_comm *world;
    qd_comm *control; /* for agreements, apart from the program's traffic and its counters */
    qd_run_corpus corpus;
    qd_trainer *trainer;
    qd_saver *saver; /* with a run folder */
    qd_trace *trace;
    char *config_text; /* rank 0: the configuration as it is saved */
    qd_metrics *metrics; /* rank 0 with a run folder */
    int64_t traced; /* steps */
    qd_train_end end;
    qd_dispatched dispatched; /* by all ranks, in the steps so far; where experts are shared out */
    double peak_flops; /* rank 0: of all machines of the run, measured, or what a step has reached since; 0: unknown */
    int stop;      /* the signal that ends the run, on all ranks; 0: none */
    char unsaved[sizeof((qd_save_report *)0)->message]; /* why the checkpoint after the last step could not be written */
    int skipped;   /* steps in a row that were left out */
    bool agreed; /* all ranks know of the failure and return: no alarm is needed */
} rank_state;

/* ---- the run folder ---- */

static qd_status path_in(const qd_config *c, const char *name, file_path path)
{
    int n = snprintf(path, sizeof(file_path), "%s/%s", c->run_dir, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "run.dir is too long: %.64s…", c->run_dir);
}

/* The deepest part of the path that exists must be a folder in which something can be made. */
static qd_status check_place(const char *folder)
{
    file_path path;
    struct stat info;
    snprintf(path, sizeof path, "%s", folder);
    QD_TRY(qd_path_existing(path));
    if (stat(path, &info) == 0 && !S_ISDIR(info.st_mode))
        return QD_FAIL(QD_USAGE, "run.dir: %s is a file; it must be a folder or a new name", path);
    if (access(path, W_OK | X_OK) != 0)
        return QD_FAIL(QD_USAGE, "run.dir: nothing can be written in %s: %s", path, strerror(errno));
    return QD_OK;
}

/* A saved data.tokenizer may be gone: the run has kept its own. One that is named now is to be there. */
static qd_status check_named_now(const qd_options *options, const qd_config *c)
{
    const char *named = c->data.tokenizer;
    bool given = strcmp(qd_options_origin(options, "data.tokenizer"), "command line") == 0;
    if (!given || named[0] == '\0' || strcmp(named, "bytes") == 0 || access(named, F_OK) == 0)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "data.tokenizer: %s: %s; leave it out to go on with the run's own", named, strerror(errno));
}

/* Looks, writes nothing. */
static qd_status check_folder(const qd_options *options, const qd_config *c)
{
    file_path path;
    struct stat info;
    if (c->run_dir[0] == '\0')
        return QD_OK;
    QD_TRY(path_in(c, "metrics.jsonl", path));
    QD_TRY(check_place(c->run_dir));
    bool held = stat(path, &info) == 0;
    QD_TRY(qd_metrics_check_free(path));
    if (c->resume && qd_options_bool(options, "run.overwrite"))
        return QD_FAIL(QD_USAGE, "run.resume and run.overwrite are both set: go on with the run in %s, or replace it", c->run_dir);
    if (held && !c->resume && !qd_options_bool(options, "run.overwrite"))
        return QD_FAIL(QD_USAGE, "run.dir: %s holds another run: name another folder, go on with that run with --resume, or "
                                 "replace it with --overwrite", c->run_dir);
    if (!held && c->resume)
        return QD_FAIL(QD_USAGE, "run.resume: %s holds no run to go on with", c->run_dir);
    return c->resume ? check_named_now(options, c) : QD_OK;
}

/* A file of an earlier run, or none, is no longer there. */
static qd_status clear_file(const qd_config *c, const char *name)
{
    file_path path;
    QD_TRY(path_in(c, name, path));
    return unlink(path) == 0 || errno == ENOENT ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be replaced: %s", path, strerror(errno));
}

/* What stands beside the metrics. */
static qd_status write_files(rank_state *s)
{
    const qd_config *c = &s->run->config;
    file_path path;
    QD_TRY(clear_file(c, "trace.json"));
    QD_TRY(clear_file(c, "memory.json"));
    QD_TRY(path_in(c, "config.yaml", path));
    QD_TRY(qd_run_config_text(s->run->options, c, qd_trainer_program(s->trainer), &s->config_text));
    QD_TRY(qd_file_replace(path, s->config_text, strlen(s->config_text)));
    QD_TRY(path_in(c, "data.json", path));
    QD_TRY(qd_run_data_write(path, s->corpus.data));
    QD_TRY(path_in(c, "tokenizer.json", path));
    if (c->resume && access(path, F_OK) == 0) /* the checkpoints need it as it is */
        return QD_OK;
    if (!s->corpus.tokenizer)
        return clear_file(c, "tokenizer.json");
    QD_TRY(qd_tokenizer_save(s->corpus.tokenizer, path)); /* a model is of no use without the tokenizer it was trained with */
    file_path key, new_key;
    QD_TRY(path_in(c, "tokenizer.key", key));
    QD_TRY(path_in(c, QD_RUN_NEW_TOKENIZER_KEY, new_key));
    if (rename(new_key, key) != 0 && errno != ENOENT)
        return QD_FAIL(QD_IO, "%s: cannot be replaced: %s", key, strerror(errno));
    return clear_file(c, QD_RUN_NEW_TOKENIZER);
}

/* Rank 0, once everything else stands: the folder appears with its first files. The metrics come first, for they are locked: of two
 * runs that begin at the same time one gets the folder. */
static qd_status open_folder(rank_state *s)
{
    const qd_config *c = &s->run->config;
    file_path path;
    if (c->run_dir[0] == '\0' || qd_comm_rank(s->world) != 0)
        return QD_OK;
    QD_TRY(qd_folder_make(c->run_dir));
    QD_TRY(path_in(c, "metrics.jsonl", path));
    QD_TRY(qd_metrics_create(path, qd_trainer_position(s->trainer).step, &s->metrics));
    qd_status status = write_files(s);
    if (status != QD_OK && !c->resume)
        unlink(path); /* or the folder would hold a run that never was */
    return status;
}

/* ---- before the ranks exist ---- */

/* Of those that ask a run to end and to go on later. */
static const char *signal_name(int number)
{
    return number == SIGUSR1 ? "SIGUSR1" : "SIGTERM";
}

qd_status qd_run_prepare(const qd_options *options, int world, qd_config *config, qd_train_summary *summary)
{
    *summary = (qd_train_summary){0};
    QD_TRY(qd_config_resolve(options, world, config));
    QD_TRY(qd_check(options, world, &summary->plan));
    summary->steps = config->steps;
    return check_folder(options, config);
}

/* The run that is replaced leaves nothing that the new one could take for its own. */
static qd_status clear_folder(const qd_config *c)
{
    /* metrics.jsonl starts anew by itself */
    static const char *const files[] = {"config.yaml", "trace.json", "memory.json", "evaluations.jsonl"};
    file_path path;
    QD_TRY(path_in(c, "metrics.jsonl", path));
    QD_TRY(qd_metrics_check_free(path)); /* once more: text may have been read for hours since */
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        QD_TRY(clear_file(c, files[i]));
    QD_TRY(path_in(c, "checkpoints", path));
    return qd_store_clear(path);
}

typedef struct watcher {
    const qd_train_observer *observer;
    const atomic_int *stop;
} watcher;

static bool report_progress(void *context, const char *what, int64_t done, int64_t total)
{
    const watcher *w = context;
    if (w->observer && w->observer->on_prepare)
        w->observer->on_prepare(w->observer->context, what, done, total);
    return atomic_load(w->stop) == 0;
}

/* Text is read, perhaps for hours, and there is nothing to keep yet: who asks to stop need not wait for a step. */
static qd_status tell_early_end(int asked)
{
    if (asked == SIGINT)
        return QD_FAIL(QD_INTERRUPTED, "interrupted before the first step, while text became tokens");
    return QD_FAIL(QD_STOPPED, "%s: stopped before the first step, while text became tokens: start again", signal_name(asked));
}

qd_status qd_run_make_ready(const qd_config *config, const qd_train_observer *observer, const atomic_int *stop, qd_train_summary *summary)
{
    qd_run_corpus corpus;
    watcher w = {observer, stop};
    qd_status status = qd_run_corpus_open(config, &(qd_run_corpus_progress){report_progress, &w}, &corpus);
    if (status == QD_INTERRUPTED)
        return tell_early_end(atomic_load(stop));
    QD_TRY(status);
    summary->samples = qd_data_windows(corpus.data);
    qd_run_corpus_close(&corpus);
    return QD_OK;
}

/* ---- one rank ---- */

/* Collective. */
static qd_status agree(rank_state *s, qd_status mine)
{
    return qd_agree_alone(s->control, mine, &s->agreed);
}

/* Collective: all ranks learn of a signal that has reached any of them, so that they stop after the same step. Where there are
 * several, the highest number counts: SIGINT, SIGUSR1, SIGTERM. */
static qd_status ask_to_stop(rank_state *s)
{
    int32_t asked = atomic_load(s->run->stop);
    QD_TRY(qd_comm_all_reduce(s->control, &asked, &asked, 1, QD_I32, QD_MAX, NULL));
    s->stop = asked;
    return QD_OK;
}

/* SIGTERM and SIGUSR1 come from schedulers: the run is to go on later. */
static bool wants_checkpoint(const rank_state *s)
{
    return s->stop != 0 && s->stop != SIGINT && s->run->config.run_dir[0] != '\0';
}

/* Rank 0, while the others wait: what MFU is measured against. Machines are taken to be alike. Processes have a GPU
 * each; threads share those that there are. */
static qd_status measure_peak(rank_state *s)
{
    if (qd_comm_rank(s->world) != 0)
        return QD_OK;
    qd_device *device = qd_trainer_device(s->trainer);
    const qd_device_caps *caps = qd_device_get_caps(device);
    if (caps->host_memory) {
        QD_TRY(qd_machine_peak(&s->peak_flops));
        s->peak_flops *= qd_comm_locate(s->world).machines;
        return QD_OK;
    }
    int ranks = qd_comm_size(s->world);
    bool one_each = strcmp(qd_comm_backend(s->world), "mpi") == 0 || ranks < caps->count;
    QD_TRY(qd_device_measure_fma(device, 20, &s->peak_flops));
    s->peak_flops *= one_each ? ranks : caps->count;
    return QD_OK;
}

static void note(const rank_state *s, const char *text)
{
    const qd_train_observer *o = s->run->observer;
    if (qd_comm_rank(s->world) == 0 && o && o->on_note)
        o->on_note(o->context, text);
}

/* What gives a model its tensors and their meaning; rotary embeddings and dropout may change on the way. */
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

/* What a run cannot change on its way: the model, the order of its samples, and what its optimizer keeps. */
static qd_status check_continues(const qd_config *now, const qd_config *then)
{
    const struct {
        const char *key;
        bool same;
    } keys[] = {
        {"train.seed", now->seed == then->seed},
        {"train.optimizer", now->optimizer.kind == then->optimizer.kind},
        {"data.tokenizer", qd_run_corpus_is_bytes(now) == qd_run_corpus_is_bytes(then)},
        {"data.validation", now->data.validation == then->data.validation},
        {"data.document_mask", now->data.document_mask == then->data.document_mask},
        {"the model", same_tensors(&now->model, &then->model)},
    };
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!keys[i].same)
            return QD_FAIL(QD_USAGE, "run.resume: %s is not what it was when the checkpoint was written; leave it out to go on with the "
                                     "run as it was, or start another", keys[i].key);
    return QD_OK;
}

/* Samples are windows of data.seq tokens. With another length the run goes on at as many tokens as it has seen, in the order
 * that the new windows have. */
static void rescale_position(rank_state *s, const qd_config *then)
{
    qd_position at = qd_trainer_position(s->trainer);
    int64_t seq = s->run->config.strategy.seq;
    if (seq == then->strategy.seq)
        return;
    at.next_sample = at.next_sample / seq * then->strategy.seq + (at.next_sample % seq * then->strategy.seq + seq - 1) / seq;
    qd_trainer_set_position(s->trainer, at);
}

static void note_changes(const rank_state *s, const qd_config *then)
{
    const qd_config *now = &s->run->config;
    const qd_rope *rope = &now->model.rope, *before = &then->model.rope;
    char text[160];
    if (strcmp(then->data.path, now->data.path) != 0)
        note(s, "data.path is another than before");
    if (then->strategy.seq != now->strategy.seq) {
        snprintf(text, sizeof text, "data.seq was %lld and is %lld: samples are other windows from here on", (long long)then->strategy.seq,
                 (long long)now->strategy.seq);
        note(s, text);
    }
    if (then->global_batch != now->global_batch) {
        snprintf(text, sizeof text, "train.global_batch was %lld and is %lld", (long long)then->global_batch, (long long)now->global_batch);
        note(s, text);
    }
    if (rope->base != before->base || rope->scaled != before->scaled) {
        snprintf(text, sizeof text, "the rotary embedding had the base %g%s and has %g%s", before->base, before->scaled ? " (scaled)" : "",
                 rope->base, rope->scaled ? " (scaled)" : "");
        note(s, text);
    }
}

/* Compares this run with the configuration a checkpoint was written with; loaded: the checkpoint's state is in place. */
static qd_status check_checkpoint(rank_state *s, const qd_checkpoint *checkpoint, bool loaded)
{
    const char *text = qd_checkpoint_meta(checkpoint)->config;
    qd_option_table table = qd_config_table();
    qd_options *options = NULL;
    qd_config then;
    QD_TRY(qd_options_create(&table, 1, &options));
    qd_status status = qd_options_load_text(options, "the checkpoint's configuration", text, strlen(text));
    if (status == QD_OK)
        status = qd_config_resolve(options, 0, &then);
    if (status == QD_OK)
        status = check_continues(&s->run->config, &then);
    if (status == QD_OK && loaded) {
        rescale_position(s, &then);
        note_changes(s, &then);
    }
    qd_options_destroy(options);
    return status;
}

typedef struct opening {
    const char *root;
    int64_t below; /* steps from here on are damaged */
    qd_checkpoint *checkpoint;
    char *passed_over;
} opening;

static qd_status open_newest(void *context)
{
    opening *o = context;
    qd_status status = qd_store_open(o->root, o->below, false, &o->checkpoint, &o->passed_over);
    if (status == QD_USAGE && o->below != INT64_MAX)
        return QD_FAIL(QD_CORRUPT, "%s: no sound checkpoint is left", o->root);
    return status;
}

static void note_passed_over(const rank_state *s, const char *why)
{
    char text[1200];
    snprintf(text, sizeof text, "a damaged checkpoint was passed over: %s", why);
    note(s, text);
}

/* Collective. Rank 0 chooses the newest checkpoint below o->below whose manifest is sound; all open it. */
static qd_status open_agreed(rank_state *s, opening *o, int64_t *step)
{
    qd_status status = qd_long_work_run(s->control, open_newest, o);
    *step = -1;
    if (status == QD_OK && o->checkpoint) {
        *step = qd_checkpoint_meta(o->checkpoint)->step;
        status = check_checkpoint(s, o->checkpoint, false);
    }
    if (o->passed_over)
        note_passed_over(s, o->passed_over);
    free(o->passed_over);
    o->passed_over = NULL;
    QD_TRY(agree(s, status));
    QD_TRY(qd_comm_broadcast(s->control, step, 1, QD_I64, 0, NULL));
    return QD_OK;
}

typedef struct loading {
    rank_state *state;
    opening *opening;
    int64_t step;
} loading;

static qd_status load_step(void *context)
{
    const loading *l = context;
    opening *o = l->opening;
    if (!o->checkpoint)
        QD_TRY(qd_store_open_step(o->root, l->step, &o->checkpoint));
    return qd_state_load(l->state->trainer, o->checkpoint, false);
}

/* Collective. Every rank checks what it loads; *damaged: one has found damage, and all go on to an older one. */
static qd_status load_agreed(rank_state *s, opening *o, int64_t step, bool *damaged)
{
    enum { MESSAGE = 1024 };
    char message[MESSAGE] = "";
    int size = qd_comm_size(s->control);
    qd_status status = qd_long_work_run_all(s->control, load_step, &(loading){s, o, step});
    if (status == QD_OK)
        status = check_checkpoint(s, o->checkpoint, true);
    int32_t found = status == QD_CORRUPT ? size - qd_comm_rank(s->control) : 0;
    if (found)
        snprintf(message, sizeof message, "%s", qd_error_message());
    QD_TRY(qd_comm_all_reduce(s->control, &found, &found, 1, QD_I32, QD_MAX, NULL));
    *damaged = found > 0;
    if (!*damaged)
        return agree(s, status);
    QD_TRY(qd_comm_broadcast(s->control, message, MESSAGE, QD_U8, size - found, NULL));
    note_passed_over(s, message);
    return QD_OK;
}

/* Collective. Goes on from the newest sound checkpoint. */
static qd_status resume(rank_state *s)
{
    const qd_config *c = &s->run->config;
    file_path root;
    char text[128];
    opening o = {.root = root, .below = INT64_MAX};
    int64_t step = -1;
    qd_status status = QD_OK;
    QD_TRY(path_in(c, "checkpoints", root));
    for (bool damaged = true; damaged;) {
        QD_TRY_DONE(open_agreed(s, &o, &step));
        QD_TRY_DONE(load_agreed(s, &o, step, &damaged));
        qd_checkpoint_close(o.checkpoint);
        o.checkpoint = NULL;
        o.below = step;
    }
    if (step >= c->steps)
        QD_TRY_DONE(agree(s, QD_FAIL(QD_USAGE, "run.resume: the run has done all of its %lld steps: raise train.steps to go on",
                                     (long long)step)));
    snprintf(text, sizeof text, "goes on after step %lld", (long long)step);
    note(s, text);
done:
    qd_checkpoint_close(o.checkpoint);
    return status;
}

/* Rank 0's. */
static qd_status compare_data(const rank_state *s)
{
    file_path path;
    char remark[QD_RUN_DATA_REMARK];
    if (qd_comm_rank(s->world) != 0)
        return QD_OK;
    QD_TRY(path_in(&s->run->config, "data.json", path));
    QD_TRY(qd_run_data_compare(path, s->corpus.data, remark));
    if (remark[0] != '\0')
        note(s, remark);
    return QD_OK;
}

typedef struct weights {
    const rank_state *state;
    file_path folder; /* of the run that they come from */
} weights;

/* Every rank reads its own part; what is wrong with the folder is the same for all. */
static qd_status load_weights(void *context)
{
    weights *w = context;
    qd_checkpoint *checkpoint = NULL;
    qd_status status = qd_model_checkpoint_open(w->state->run->config.weights, &checkpoint, w->folder);
    if (status == QD_OK)
        status = qd_state_load(w->state->trainer, checkpoint, true);
    qd_checkpoint_close(checkpoint);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "run.weights: ");
}

/* Weights may be wanted although they know other tokens, but not without a word. */
static void note_other_tokenizer(const rank_state *s, const char *folder)
{
    char path[PATH_MAX + 32], text[PATH_MAX + 512];
    uint64_t theirs, ours = qd_data_tokenizer_hash(s->corpus.data);
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    if (qd_comm_rank(s->world) != 0 || access(path, F_OK) != 0)
        return;
    if (qd_run_corpus_tokenizer_hash(path, &theirs) != QD_OK)
        snprintf(text, sizeof text, "run.weights: whether they know the tokens of this run is unknown: %s", qd_error_message());
    else if (ours != 0 && ours != theirs)
        snprintf(text, sizeof text, "run.weights: they were trained with another tokenizer, %s (%016llx), than that of this run (%016llx): "
                                    "data.tokenizer can name it", path, (unsigned long long)theirs, (unsigned long long)ours);
    else
        return;
    note(s, text);
}

/* Collective. */
static qd_status begin_with_weights(rank_state *s)
{
    weights w = {.state = s};
    QD_TRY(agree(s, qd_long_work_run_all(s->control, load_weights, &w)));
    note_other_tokenizer(s, w.folder);
    return QD_OK;
}

/* ---- checkpoints ---- */

static qd_status open_saver(rank_state *s)
{
    const qd_config *c = &s->run->config;
    file_path root;
    if (c->run_dir[0] == '\0')
        return QD_OK;
    QD_TRY(path_in(c, "checkpoints", root));
    return qd_saver_create(s->trainer, s->control, root, c->keep, c->save_every > 0 && c->async_save, &s->saver);
}

/* Collective. How the checkpoint that is being written stands; one that could not be written is told, and training goes on. Without
 * the one after the last step the run has failed (tell_unsaved). */
static qd_status poll_save(rank_state *s, bool wait)
{
    qd_save_report report;
    char text[640];
    QD_TRY(qd_saver_poll(s->saver, wait, &report));
    if (report.state == QD_SAVE_DONE)
        s->end.saved = report.step;
    if (report.state == QD_SAVE_DONE && report.message[0] != '\0')
        note(s, report.message);
    if (report.state == QD_SAVE_FAILED && report.step == s->run->config.steps) {
        snprintf(s->unsaved, sizeof s->unsaved, "%s", report.message);
    } else if (report.state == QD_SAVE_FAILED) {
        snprintf(text, sizeof text, "no checkpoint after step %lld: %s", (long long)report.step, report.message);
        note(s, text);
    }
    return QD_OK;
}

/* Collective. One is written at a time; the last of a run, and one without room for a copy, is waited for. */
static qd_status save(rank_state *s)
{
    const qd_config *c = &s->run->config;
    QD_TRY(poll_save(s, true));
    QD_TRY(qd_saver_begin(s->saver, s->config_text));
    bool last = s->stop != 0 || qd_trainer_position(s->trainer).step == c->steps;
    return poll_save(s, last || qd_saver_snapshot(s->saver) == 0);
}

/* When everything else is right, on all ranks: what is taken away cannot come back. Rank 0's; large checkpoints take long to go. */
static qd_status replace_run(void *state)
{
    const qd_run *run = ((const rank_state *)state)->run;
    bool replaces = run->config.run_dir[0] != '\0' && qd_options_bool(run->options, "run.overwrite");
    return replaces ? clear_folder(&run->config) : QD_OK;
}

static qd_status start(rank_state *s)
{
    const qd_run *run = s->run;
    QD_TRY(agree(s, qd_run_corpus_open(&run->config, NULL, &s->corpus)));
    QD_TRY(qd_common_data(s->control, s->corpus.data, run->config.strategy.seq, &s->agreed));
    qd_batch_source source = qd_data_source(s->corpus.data);
    QD_TRY(qd_trainer_create(&run->config, s->world, &source, &s->trainer));
    QD_TRY(agree(s, measure_peak(s)));
    if (run->config.resume) {
        QD_TRY(resume(s));
        QD_TRY(agree(s, compare_data(s)));
    } else if (run->config.weights[0] != '\0') {
        QD_TRY(begin_with_weights(s));
    }
    QD_TRY(agree(s, qd_long_work_run(s->control, replace_run, s)));
    QD_TRY(agree(s, open_saver(s)));
    QD_TRY(agree(s, open_folder(s)));
    if (run->config.trace) {
        QD_TRY(qd_trace_create(s->control, &s->trace));
        qd_trainer_set_trace(s->trainer, s->trace);
    }
    return QD_OK;
}

static qd_status report_step(rank_state *s, int64_t step, const qd_step_output *output, double seconds, const qd_dispatched *moved)
{
    const qd_run *run = s->run;
    double rate = seconds > 0.0 ? output->tokens / seconds : 0.0;
    double flops = rate * qd_model_flops_per_token(&run->config.model, run->config.strategy.seq);
    if (s->peak_flops > 0.0) /* a machine that was busy when it was measured shows later what it can do */
        s->peak_flops = fmax(s->peak_flops, flops);
    qd_train_step line = {
        .step = step,
        .steps = run->config.steps,
        .loss = output->loss,
        .grad_norm = output->grad_norm,
        .lr = output->lr,
        .tokens = output->tokens,
        .step_seconds = seconds,
        .tokens_per_second = rate,
        .mfu = s->peak_flops > 0.0 ? flops / s->peak_flops : 0.0,
        .memory_peak_bytes = qd_trainer_allocated(s->trainer),
        .dispatch_bytes = moved->bytes,
        .across_bytes = moved->crossed,
        .across_flat_bytes = moved->flat,
    };
    const char *remark = NULL;
    if (s->metrics)
        QD_TRY(qd_metrics_write(s->metrics, &line, &remark));
    if (remark)
        note(s, remark);
    if (run->observer && run->observer->on_step)
        run->observer->on_step(run->observer->context, &line);
    return QD_OK;
}

/* Collective: what the step's ranks have sent to experts. */
static qd_status count_dispatched(rank_state *s, qd_dispatched *moved)
{
    qd_dispatched before = s->dispatched;
    *moved = (qd_dispatched){0};
    if (s->run->config.ep * s->run->config.etp == 1)
        return QD_OK;
    QD_TRY(qd_trainer_dispatched_all(s->trainer, s->control, &s->dispatched));
    *moved = (qd_dispatched){.bytes = s->dispatched.bytes - before.bytes, .crossed = s->dispatched.crossed - before.crossed,
                             .flat = s->dispatched.flat - before.flat};
    s->end.dispatch_bytes += moved->bytes;
    s->end.across_bytes += moved->crossed;
    s->end.across_flat_bytes += moved->flat;
    return QD_OK;
}

/* A step that was left out is told; a run that leaves out all of them makes no progress. */
static qd_status note_skipped(rank_state *s, int64_t step, const qd_step_output *output)
{
    enum { MOST = 20 };
    char text[256];
    s->skipped = output->skipped ? s->skipped + 1 : 0;
    if (!output->skipped)
        return QD_OK;
    snprintf(text, sizeof text, "step %lld was left out: %s", (long long)step, output->not_finite);
    note(s, text);
    if (s->skipped < MOST)
        return QD_OK;
    return QD_FAIL(QD_NOT_FINITE, "%d steps in a row were left out, the last, %lld, because of %s; the weights are those of step %lld",
                   MOST, (long long)step, output->not_finite, (long long)(step - MOST));
}

/* A step that is not finite ends the run, on all ranks alike and in order: the checkpoint that is being written is still completed. */
static qd_status end_saving(rank_state *s, qd_status status)
{
    qd_error_record why;
    if (status != QD_NOT_FINITE || !s->saver)
        return status;
    qd_error_keep(&why);
    (void)poll_save(s, true); /* its failure is told by a note, that of communication by the end */
    qd_error_put_back(&why);
    return status;
}

static qd_status run_steps(rank_state *s)
{
    const qd_run *run = s->run;
    double begin = qd_clock_now();
    int64_t every = run->config.save_every;
    for (int64_t step = qd_trainer_position(s->trainer).step + 1; step <= run->config.steps && s->stop == 0; step++) {
        qd_step_output output;
        double from = qd_clock_now();
        if (s->trace && s->traced++ == run->config.trace_steps)
            qd_trainer_set_trace(s->trainer, NULL);
        QD_TRY(end_saving(s, qd_trainer_step(s->trainer, &output)));
        double seconds = qd_clock_now() - from;
        qd_dispatched moved;
        QD_TRY(count_dispatched(s, &moved));
        if (qd_comm_rank(s->world) == 0)
            QD_TRY(report_step(s, step, &output, seconds, &moved));
        s->end.steps = step;
        s->end.loss = output.loss;
        s->end.tokens += output.tokens;
        QD_TRY(end_saving(s, note_skipped(s, step, &output)));
        QD_TRY(ask_to_stop(s));
        if (s->saver)
            QD_TRY(poll_save(s, false));
        bool due = every > 0 && (step % every == 0 || step == run->config.steps || s->stop != 0);
        if (due || wants_checkpoint(s))
            QD_TRY(save(s));
    }
    if (s->saver)
        QD_TRY(poll_save(s, true));
    s->end.seconds = qd_clock_now() - begin;
    s->end.interrupted = s->stop != 0 && s->end.steps < run->config.steps;
    return QD_OK;
}

/* How an interrupted run ends: rank 0 says it, the others return the same status. */
static qd_status tell_end(rank_state *s)
{
    const qd_config *c = &s->run->config;
    bool saved = s->end.saved == s->end.steps, user = s->stop == SIGINT;
    qd_status status = saved && !user ? QD_STOPPED : QD_INTERRUPTED;
    s->agreed = true;
    if (qd_comm_rank(s->world) != 0) {
        qd_error_clear();
        return status;
    }
    if (saved)
        return QD_FAIL(status, "%s%s after step %lld of %lld with a checkpoint: go on with --dir %s --resume",
                       user ? "" : signal_name(s->stop), user ? "interrupted" : ": stopped", (long long)s->end.steps, (long long)c->steps,
                       c->run_dir);
    return QD_FAIL(status, "interrupted after step %lld of %lld%s", (long long)s->end.steps, (long long)c->steps,
                   user                        ? ""
                   : c->run_dir[0] == '\0' ? " without a checkpoint: there is no run.dir"
                                              : " without a checkpoint");
}

/* A run whose result was to be kept and is not has failed, on all ranks. */
static qd_status tell_unsaved(rank_state *s)
{
    s->agreed = true;
    if (qd_comm_rank(s->world) == 0)
        return QD_FAIL(QD_IO, "all %lld steps are done, but there is no checkpoint after the last: %s", (long long)s->end.steps,
                       s->unsaved);
    qd_error_clear();
    return QD_IO;
}

static qd_status finish(rank_state *s)
{
    const qd_run *run = s->run;
    qd_footprint footprint;
    qd_run_memory most;
    file_path path;
    QD_TRY(qd_footprint_read(&footprint));
    QD_TRY(path_in(&run->config, "memory.json", path));
    /* Memory of other ranks that this process has mapped counts for them. */
    int64_t staging, shared = qd_comm_shared_bytes(s->world, &staging), others = shared < 0 ? 0 : footprint.shared - shared;
    int64_t resident = footprint.peak - (others > 0 ? others : 0);
    QD_TRY(qd_run_memory_write(s->control,
                               (qd_run_memory){qd_trainer_allocated(s->trainer), qd_trainer_allocated_host(s->trainer), staging, resident},
                               run->config.run_dir[0] != '\0' ? path : NULL, &most));
    s->end.allocated_bytes = most.allocated;
    s->end.host_bytes = most.host;
    s->end.resident_bytes = most.resident;
    const char *lost = qd_metrics_lost(s->metrics);
    if (lost)
        note(s, lost);
    if (s->trace) {
        QD_TRY(path_in(&run->config, "trace.json", path));
        QD_TRY(qd_trace_write(s->trace, qd_trainer_program(s->trainer), s->control, path));
    }
    if (qd_comm_rank(s->world) == 0 && run->observer && run->observer->on_end)
        run->observer->on_end(run->observer->context, &s->end);
    return s->end.interrupted ? tell_end(s) : s->unsaved[0] != '\0' ? tell_unsaved(s) : QD_OK;
}

/* A failure of one of several says whose it is, unless it names a rank: many know of what is not finite, or who is missing. */
static void name_rank(const qd_comm *world, qd_status status)
{
    if (qd_comm_size(world) > 1 && !strstr(qd_error_message(), "rank "))
        qd_error_prefix(status, "rank %d: ", qd_comm_rank(world));
}

qd_status qd_run_rank(const qd_run *run, qd_comm *world)
{
    rank_state s = {.run = run, .world = world, .end.saved = -1};
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_comm_split(world, 0, qd_comm_rank(world), "control", &s.control));
    QD_TRY_DONE(start(&s));
    QD_TRY_DONE(run_steps(&s));
    QD_TRY_DONE(finish(&s));
done:
    if (status != QD_OK && status != QD_REMOTE && !s.agreed) {
        name_rank(world, status);
        qd_comm_abort(world, qd_error_message());
    }
    qd_metrics_destroy(s.metrics);
    qd_saver_destroy(s.saver);
    qd_trainer_destroy(s.trainer);
    qd_trace_destroy(s.trace);
    qd_run_corpus_close(&s.corpus);
    free(s.config_text);
    qd_comm_destroy(s.control);
    return status;
}
