/* One rank of a training run: preparation, start, steps with their checkpoints, and the end. */
#include "train/run/run_state.h"

#include "base/clock.h"
#include "base/error.h"
#include "base/process/stacks.h"
#include "comm/checked.h"
#include "comm/guard.h"
#include "device/ceiling.h"
#include "train/ranks/common.h"
#include "train/run/footprint.h"
#include "train/ranks/leftovers.h"
#include "train/ranks/long_work.h"
#include "train/run/run_machine.h"
#include "train/run/run_memory.h"

#include <math.h>
#include <quadrille/machine.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Signals that ask a run to stop, to be resumed later. */
static const char *signal_name(int number)
{
    return number == SIGUSR1   ? "SIGUSR1"
           : number == SIGHUP  ? "SIGHUP"
           : number == SIGPIPE ? "SIGPIPE (standard output is closed)"
                               : "SIGTERM";
}

qd_status qd_run_plan(const qd_options *options, int world, qd_config *config, qd_run_summary *summary)
{
    *summary = (qd_run_summary){.plan = qd_check_report_default(), .shown.plan = &summary->plan};
    if (qd_options_string(options, "run.from")[0] != '\0' && !qd_options_bool(options, "run.resume"))
        return QD_FAIL(QD_USAGE, "run.from is not a setting of the run itself: call qd_train_from_options() first");
    QD_TRY(qd_config_resolve(options, world, config));
    QD_TRY(qd_check(options, world, &summary->plan));
    summary->shown.steps = config->steps;
    return QD_OK;
}

qd_status qd_run_prepare(const qd_options *options, int world, const atomic_int *stop, qd_config *config,
                         qd_run_summary *summary)
{
    QD_TRY(qd_run_plan(options, world, config, summary));
    return qd_run_folder_check(options, config, stop);
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

/* Tokenizing may take hours, and there is no state to save yet: a request to stop need not wait for
 * a step. */
qd_status qd_run_early_end(int asked, const char *during)
{
    if (asked == SIGINT)
        return QD_FAIL(QD_INTERRUPTED, "interrupted before the first step, while %s", during);
    return QD_FAIL(QD_STOPPED, "%s: stopped before the first step, while %s: start again", signal_name(asked), during);
}

static qd_status end_tokenizing(const atomic_int *stop)
{
    return qd_run_early_end(atomic_load(stop), "the text was tokenized");
}

/* How many examples there are, how well they fill the sequences, and what was lost of them. */
static void note_examples(const qd_config *c, const qd_train_observer *observer, const qd_data *data)
{
    int64_t examples = 0, tokens = 0, cut = 0, skipped = 0, windows = qd_data_windows(data) + qd_data_validation_windows(data);
    char text[320];
    for (int i = 0; i < qd_data_source_count(data); i++) {
        qd_data_source_info s = qd_data_source_info_default();
        qd_data_source_describe(data, i, &s);
        examples += s.documents;
        tokens += s.tokens - s.documents; /* the last token of an example is only a target */
        cut += s.cut_examples;
        skipped += s.skipped_examples;
    }
    int n = snprintf(text, sizeof text, "%lld %s fill %lld sequences to %.1f %%", (long long)(c->data.pairs ? examples / 2 : examples),
                     c->data.pairs ? "pairs" : "examples", (long long)windows,
                     100.0 * (double)tokens / ((double)windows * (double)c->strategy.seq));
    if (cut > 0)
        n += snprintf(text + n, sizeof text - (size_t)n, "; %lld were longer than data.seq + 1 and lost their end", (long long)cut);
    if (skipped > 0)
        snprintf(text + n, sizeof text - (size_t)n, "; %lld were skipped: too long, or nothing of the completion counts",
                 (long long)skipped);
    if (observer && observer->on_note)
        observer->on_note(observer->context, text);
}

qd_status qd_run_make_ready(qd_config *config, const qd_train_observer *observer, const atomic_int *stop, qd_run_summary *summary)
{
    qd_run_corpus corpus;
    watcher w = {observer, stop};
    qd_status status = qd_run_corpus_open(config, &(qd_run_corpus_progress){report_progress, &w}, &corpus);
    if (status == QD_INTERRUPTED)
        return end_tokenizing(stop);
    QD_TRY(status);
    summary->shown.samples = qd_data_windows(corpus.data);
    if (config->data.examples)
        note_examples(config, observer, corpus.data);
    status = qd_config_set_length(config, summary->shown.samples);
    summary->shown.steps = config->steps;
    qd_data *text = NULL;
    if (status == QD_OK)
        status = qd_run_corpus_open_evaluation(config, &corpus, &(qd_run_corpus_progress){report_progress, &w}, &text);
    qd_data_close(text);
    qd_run_corpus_close(&corpus);
    return status == QD_INTERRUPTED ? end_tokenizing(stop) : status;
}

qd_status qd_run_prepare_local(qd_run *run, const qd_train_observer *observer, qd_run_summary *summary)
{
    if (qd_options_int(run->options, "parallel.ranks") > QD_LOCAL_MAX_RANKS)
        return QD_FAIL(QD_USAGE, "parallel.ranks is %lld, and one machine starts at most %d local ranks: mpirun or srun start more",
                       (long long)qd_options_int(run->options, "parallel.ranks"), QD_LOCAL_MAX_RANKS);
    QD_TRY(qd_run_prepare(run->options, 0, run->stop, &run->config, summary));
    if (!run->state_in_memory)
        QD_TRY(qd_run_resume_check(&run->config));
    if (!run->ranks_stay) /* what they use now does not count as free */
        QD_TRY(qd_run_machine_check(&run->config, &summary->plan, run->config.world, summary->shown.warning));
    QD_TRY(qd_run_make_ready(&run->config, observer, run->stop, summary));
    summary->shown.backend = "local";
    summary->shown.machines = 1;
    return QD_OK;
}

qd_status qd_rank_agree(qd_rank_run *s, qd_status mine)
{
    return qd_agree_alone(s->control, mine, &s->agreed);
}

void qd_rank_note(const qd_rank_run *s, const char *text)
{
    const qd_train_observer *o = s->run->observer;
    if (qd_comm_rank(s->world) == 0 && o && o->on_note)
        o->on_note(o->context, text);
}

static bool keeps_checkpoints(const qd_rank_run *s)
{
    return s->run->config.save && s->run->config.run_dir[0] != '\0';
}

/* Collective, after each step: all ranks learn of a signal that any of them received, so that they
 * stop after the same step. If there are several signals, the highest of SIGINT, SIGUSR1 and
 * SIGTERM is used. Rank 0 decides whether it is time for a checkpoint, or for a search, because
 * clocks differ. */
static qd_status ask_ranks(qd_rank_run *s, int64_t step, double step_seconds)
{
    /* Begun early by the time it takes, a checkpoint is complete when the interval ends: the state
     * on disk is never older than one interval. */
    double seconds = s->run->config.save_seconds, early = fmin(s->save_took, seconds / 2);
    bool due = qd_comm_rank(s->control) == 0 && seconds > 0.0 && qd_clock_now() - s->saved_at >= seconds - early;
    qd_rest rest = qd_comm_rank(s->control) == 0 && s->run->asks_rest ? s->run->asks_rest(s->run->rest_context) : QD_REST_NOT;
    int32_t asked[4] = {atomic_load(s->run->stop), due, qd_run_tuning_due(s, step, step_seconds), rest};
    QD_TRY(qd_comm_all_reduce(s->control, asked, asked, 4, QD_I32, QD_MAX, NULL));
    s->stop = asked[0];
    s->time_to_save = asked[1] != 0;
    s->time_to_tune = asked[2] != 0;
    s->rests = asked[3] != QD_REST_NOT;
    s->time_to_save = s->time_to_save || asked[3] == QD_REST_SAVED;
    return QD_OK;
}

/* Rank 0, while the others wait: measures the peak that MFU refers to. Machines are assumed to be
 * equal. Processes have a GPU each; threads share the available ones. */
static qd_status measure_peak(qd_rank_run *s)
{
    if (qd_comm_rank(s->world) != 0)
        return QD_OK;
    qd_device *device = qd_trainer_device(s->trainer);
    const qd_device_caps *caps = qd_device_get_caps(device);
    if (caps->host_memory) {
        QD_TRY(qd_machine_peak_for(s->run->config.strategy.activation, &s->peak_flops));
        s->peak_flops *= qd_comm_locate(s->world).machines;
        return QD_OK;
    }
    int ranks = qd_comm_size(s->world);
    bool one_each = strcmp(qd_comm_backend(s->world), "local") != 0 || ranks < caps->count;
    QD_TRY(qd_device_measure_fma(device, 20, &s->peak_flops));
    s->peak_flops *= one_each ? ranks : caps->count;
    return QD_OK;
}

static qd_status open_saver(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_run_file root;
    if (!keeps_checkpoints(s))
        return QD_OK;
    QD_TRY(qd_run_path(c, "checkpoints", root));
    QD_TRY(qd_saver_create(s->trainer, s->control, root, c->keep, qd_config_snapshot(c), &s->saver));
    /* The path in the checkpoint is absolute; run.weights may be relative to another folder. */
    return c->model.lora.rank > 0 && c->model.lora.stored ? qd_saver_set_base(s->saver, s->base[0] ? s->base : c->weights) : QD_OK;
}

/* The state is not finite: further training would be wasted, and every later save would fail. All
 * ranks end, and the earlier checkpoints stay. */
static qd_status tell_not_finite(qd_rank_run *s, const qd_save_report *report)
{
    char before[64] = "there is no earlier checkpoint";
    s->agreed = true;
    if (s->kept >= 0)
        snprintf(before, sizeof before, "the last one is from step %lld (--resume)", (long long)s->kept);
    if (qd_comm_rank(s->world) == 0)
        return QD_FAIL(QD_NOT_FINITE, "no checkpoint is written after step %lld, and the run ends, because its state is not finite: %s; %s",
                       (long long)report->step, report->message, before);
    qd_error_clear();
    return QD_NOT_FINITE;
}

static void note_saved(qd_rank_run *s, int64_t step)
{
    s->rollbacks = 0;
    s->end.saved = s->kept = step;
    if (step == s->best_saving)
        s->best_kept = step;
}

/* Collective. Starts a save. The checkpoint of the best validation loss is kept in addition. */
static qd_status begin_save(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    int64_t step = qd_trainer_position(s->trainer).step;
    bool best = qd_config_validates(c) && c->evaluation.save_best && s->validation.best == step;
    s->best_saving = best ? step : -1;
    s->saved_at = qd_clock_now();
    qd_saver_set_best(s->saver, best ? step : s->best_kept);
    return qd_saver_begin(s->saver, s->config_text);
}

/* Collective. Checks the checkpoint that is being written. A failed write is reported and training
 * continues; after the last step it fails the run (tell_unsaved), and so does a state that is not
 * finite. */
static qd_status poll_save(qd_rank_run *s, bool wait)
{
    qd_save_report report;
    char text[640];
    QD_TRY(qd_saver_poll(s->saver, wait, &report));
    if (report.state == QD_SAVE_DONE)
        note_saved(s, report.step);
    if (report.state == QD_SAVE_DONE && report.message[0] != '\0')
        qd_rank_note(s, report.message);
    if (report.state == QD_SAVE_FAILED && report.status == QD_NOT_FINITE)
        return tell_not_finite(s, &report);
    if (report.state == QD_SAVE_FAILED && report.step == s->run->config.steps) {
        snprintf(s->unsaved, sizeof s->unsaved, "%s", report.message);
    } else if (report.state == QD_SAVE_FAILED) {
        snprintf(text, sizeof text, "no checkpoint after step %lld: %s", (long long)report.step, report.message);
        qd_rank_note(s, text);
    }
    return QD_OK;
}

/* Collective: compares replicas, once per step. If they differ and are not healed, all ranks end:
 * the state is wrong on at least one of them. */
static qd_status compare_replicas(qd_rank_run *s)
{
    char healed[512], text[600];
    int64_t step = qd_trainer_position(s->trainer).step;
    if (!s->replicas || s->compared == step)
        return QD_OK;
    s->compared = step;
    qd_status status = qd_replicas_compare(s->replicas, s->run->config.heal, healed);
    if (healed[0] != '\0') {
        snprintf(text, sizeof text, "after step %lld, %s", (long long)step, healed);
        qd_rank_note(s, text);
    }
    if (status != QD_DIFFERENT)
        return status;
    s->agreed = true;
    if (qd_comm_rank(s->world) == 0)
        return qd_error_prefix(status, "after step %lld, ", (long long)step);
    qd_error_clear();
    return status;
}

/* Gradients differed when they were computed twice. The update contains them: no checkpoint is
 * written, and all ranks end. */
static qd_status tell_different(qd_rank_run *s, int64_t step, const qd_step_output *output)
{
    s->agreed = true;
    if (qd_comm_rank(s->world) == 0)
        return QD_FAIL(QD_DIFFERENT, "step %lld: %s: a processor or memory of that machine is faulty", (long long)step, output->different);
    qd_error_clear();
    return QD_DIFFERENT;
}

/* Collective. Only one save is in progress; the last one of a run, and one without memory for a
 * copy, is waited for. */
qd_status qd_rank_run_checkpoint(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    QD_TRY(poll_save(s, true));
    QD_TRY(compare_replicas(s));
    const char *unsynced = qd_metrics_sync(s->metrics);
    if (unsynced)
        qd_rank_note(s, unsynced);
    QD_TRY(begin_save(s));
    s->saving = qd_trainer_position(s->trainer).step;
    bool last = s->stop != 0 || s->saving == c->steps;
    QD_TRY(poll_save(s, last || !qd_saver_copies(s->saver)));
    s->save_took = qd_clock_now() - s->saved_at;
    return QD_OK;
}

qd_status qd_rank_run_save(qd_rank_run *s)
{
    qd_save_report report;
    int64_t step = qd_trainer_position(s->trainer).step;
    QD_TRY(poll_save(s, true));
    if (s->kept == step)
        return QD_OK;
    QD_TRY(compare_replicas(s));
    qd_metrics_sync(s->metrics);
    QD_TRY(begin_save(s));
    QD_TRY(qd_saver_poll(s->saver, true, &report));
    if (report.state != QD_SAVE_FAILED) {
        note_saved(s, step);
        s->unsaved[0] = '\0';
        if (report.message[0] != '\0')
            qd_rank_note(s, report.message);
        return QD_OK;
    }
    s->agreed = true;
    if (qd_comm_rank(s->world) == 0)
        return QD_FAIL(report.status, "no checkpoint after step %lld: %s", (long long)step, report.message);
    qd_error_clear();
    return report.status;
}

/* Rank 0, after everything else was checked on all ranks: removed files cannot be restored.
 * Removing large checkpoints takes long. */
static qd_status replace_run(void *state)
{
    const qd_run *run = ((const qd_rank_run *)state)->run;
    bool replaces = run->config.run_dir[0] != '\0' && qd_options_bool(run->options, "run.overwrite");
    return replaces ? qd_run_folder_clear(&run->config) : QD_OK;
}

/* Collective, where an MPI library may have created shared memory. */
static qd_status note_shared_memory(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_run_file path;
    if (c->run_dir[0] == '\0' || strcmp(qd_comm_backend(s->world), "mpi") != 0)
        return QD_OK;
    QD_TRY(qd_run_path(c, QD_LEFTOVERS_FILE, path));
    return qd_rank_agree(s, qd_leftovers_note(s->control, path));
}

/* A run that ends normally closes the world, and the MPI library removes its memory itself. */
static void forget_shared_memory(const qd_rank_run *s)
{
    qd_run_file path;
    if (s->metrics && qd_run_path(&s->run->config, QD_LEFTOVERS_FILE, path) == QD_OK)
        unlink(path);
}

/* Collective. */
static qd_status open_validation(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    if (!qd_config_validates(c))
        return QD_OK;
    QD_TRY(qd_rank_agree(s, qd_validation_open(c, &s->corpus, &s->validation)));
    return s->validation.text ? qd_common_data(s->control, "data.eval_path", s->validation.text, 1, &s->agreed) : QD_OK;
}

qd_status qd_rank_run_restore_validation(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    int64_t step = qd_trainer_position(s->trainer).step;
    qd_run_file path;
    if (qd_comm_rank(s->world) != 0 || c->run_dir[0] == '\0')
        return QD_OK;
    QD_TRY(qd_run_path(c, "checkpoints", path));
    s->best_kept = qd_store_best(path);
    s->best_kept = s->best_kept <= step ? s->best_kept : -1;
    if (!qd_config_validates(c))
        return QD_OK;
    QD_TRY(qd_run_path(c, "metrics.jsonl", path));
    QD_TRY(qd_validation_restore(path, step, &s->validation));
    if (s->other_validation)
        s->validation.best = -1;
    return QD_OK;
}

qd_status qd_rank_run_start(qd_rank_run *s)
{
    const qd_run *run = s->run;
    qd_comm_check_messages(s->world, run->config.check_messages);
    QD_TRY(qd_comm_split(s->world, 0, qd_comm_rank(s->world), "control", &s->control));
    QD_TRY(qd_rank_agree(s, qd_run_corpus_open(&run->config, NULL, &s->corpus)));
    QD_TRY(qd_rank_agree(s, qd_samples_check(&run->config, &s->corpus)));
    QD_TRY(qd_common_data(s->control, "data.path", s->corpus.data, run->config.strategy.seq, &s->agreed));
    if (run->config.epochs > 0.0) { /* the run is shared by ranks as threads */
        s->with_length = *run;
        s->run = run = &s->with_length;
        QD_TRY(qd_rank_agree(s, qd_config_set_length(&s->with_length.config, qd_data_windows(s->corpus.data))));
    }
    QD_TRY(open_validation(s));
    qd_batch_source source = qd_data_source(s->corpus.data);
    const bool loads = run->handover || run->config.resume || run->config.weights[0] != '\0';
    qd_position at = {0};
    QD_TRY((loads ? qd_trainer_create_blank : qd_trainer_create)(&run->config, s->world, &source, &s->trainer));
    QD_TRY(qd_rank_agree(s, measure_peak(s)));
    if (run->config.resume || run->handover) {
        QD_TRY(run->handover ? qd_run_take_over(s, &at) : qd_run_resume(s));
        QD_TRY(qd_rank_agree(s, qd_run_compare_data(s)));
        QD_TRY(qd_rank_agree(s, qd_rank_run_restore_validation(s)));
    } else if (run->config.weights[0] != '\0') {
        QD_TRY(qd_run_load_weights(s));
    }
    QD_TRY(qd_rank_agree(s, qd_long_work_run(s->control, replace_run, s)));
    QD_TRY(qd_run_spikes_open(s));
    if (run->config.check_replicas > 0 && qd_comm_size(s->world) > 1)
        QD_TRY(qd_replicas_create(s->trainer, s->control, &s->replicas));
    QD_TRY(qd_rank_agree(s, open_saver(s)));
    QD_TRY(qd_rank_agree(s, qd_run_folder_open(s)));
    QD_TRY(note_shared_memory(s));
    QD_TRY(qd_run_reference(s));
    if (run->config.samples.every > 0)
        QD_TRY(qd_samples_create(&run->config, &s->corpus, s->trainer, &s->samples));
    else if (run->config.resume)
        QD_TRY(qd_rank_agree(s, s->metrics ? qd_samples_cut(run->config.run_dir, qd_trainer_position(s->trainer).step) : QD_OK));
    if (run->config.trace) {
        QD_TRY(qd_trace_create(s->control, &s->trace));
        qd_trainer_set_trace(s->trainer, s->trace);
    }
    s->saved_at = qd_clock_now();
    if (run->handover)
        qd_trainer_set_position(s->trainer, at);
    else
        s->followed = qd_trainer_position(s->trainer).step;
    s->started = true;
    return QD_OK;
}

/* The tokens of a step that speed refers to. The loss of pairs counts pairs: all positions. */
static double step_tokens(const qd_config *c, const qd_step_output *output)
{
    return c->data.pairs ? (double)c->global_batch * (double)c->strategy.seq : output->tokens;
}

static qd_status report_step(qd_rank_run *s, int64_t step, const qd_step_output *output, double seconds, const qd_dispatched *moved)
{
    const qd_run *run = s->run;
    const bool pairs = run->config.data.pairs;
    const double tokens = step_tokens(&run->config, output), rate = seconds > 0.0 ? tokens / seconds : 0.0;
    double flops = rate * qd_model_flops_per_token(&run->config.model, run->config.strategy.seq);
    if (s->peak_flops > 0.0) /* a machine that was busy during the measurement may be faster later */
        s->peak_flops = fmax(s->peak_flops, flops);
    s->line = (qd_train_step){
        .size = sizeof s->line,
        .step = step,
        .steps = run->config.steps,
        .loss = output->loss,
        .grad_norm = output->grad_norm,
        .lr = output->lr,
        .tokens = tokens,
        .pairs = pairs ? (int64_t)output->tokens : 0,
        .reward_margin = output->margin,
        .reward_chosen = output->chosen_reward,
        .reward_accuracy = output->accuracy,
        .step_seconds = seconds,
        .tokens_per_second = rate,
        .mfu = s->peak_flops > 0.0 ? flops / s->peak_flops : 0.0,
        .memory_peak_bytes = qd_trainer_allocated(s->trainer),
        .dispatch_bytes = moved->bytes,
        .across_bytes = moved->crossed,
        .across_flat_bytes = moved->flat,
        .validation_tokens = s->validated.tokens,
        .validation_loss = s->validated.loss,
        .validation_seconds = s->validated.seconds,
        .validation_best = s->improved,
        .skipped = output->skipped,
        .mtp_loss = output->mtp_loss,
        .max_score = output->max_score,
        .validation_margin = s->validated.margin,
        .validation_accuracy = s->validated.accuracy,
    };
    const char *warning = NULL;
    if (s->metrics)
        QD_TRY(qd_metrics_write(s->metrics, &s->line, &warning));
    if (warning)
        qd_rank_note(s, warning);
    warning = s->recorder ? qd_recorder_write(s->recorder, &s->line) : NULL;
    if (warning)
        qd_rank_note(s, warning);
    if (run->observer && run->observer->on_step)
        run->observer->on_step(run->observer->context, &s->line);
    return QD_OK;
}

/* Collective. Evaluates the weights after a step if that is due. Rank 0 decides by time, because
 * clocks differ, and which loss is the best. */
static qd_status validate(qd_rank_run *s, int64_t step, double seconds)
{
    const qd_config *c = &s->run->config;
    s->validated = (qd_validated){0};
    s->improved = false;
    if (!qd_config_validates(c))
        return QD_OK;
    s->validation.since += seconds;
    int32_t due = qd_validation_due(&s->validation, c, step), better;
    if (c->evaluation.seconds > 0.0)
        QD_TRY(qd_comm_broadcast(s->control, &due, 1, QD_I32, 0, NULL));
    if (!due)
        return QD_OK;
    QD_TRY(qd_validation_run(&s->validation, s->trainer, c, &s->validated));
    better = qd_validation_note(&s->validation, step, s->validated.loss);
    QD_TRY(qd_comm_broadcast(s->control, &better, 1, QD_I32, 0, NULL));
    s->improved = better != 0;
    return QD_OK;
}

/* Collective. Sample texts; what they dispatch to experts is not counted as the next step's. */
static qd_status write_samples(qd_rank_run *s, int64_t step)
{
    char note[512];
    if (!s->samples || !qd_samples_due(&s->run->config, step))
        return QD_OK;
    QD_TRY(qd_samples_write(s->samples, step, note, sizeof note));
    if (note[0] != '\0')
        qd_rank_note(s, note);
    return s->run->config.ep * s->run->config.etp > 1 ? qd_trainer_dispatched_all(s->trainer, s->control, &s->dispatched) : QD_OK;
}

/* Collective: sums the bytes dispatched to experts in the step over all ranks. */
static qd_status count_dispatched(qd_rank_run *s, qd_dispatched *moved)
{
    qd_dispatched before = s->dispatched;
    *moved = (qd_dispatched){0};
    if (s->run->config.ep * s->run->config.etp == 1)
        return QD_OK;
    QD_TRY(qd_trainer_dispatched_all(s->trainer, s->control, &s->dispatched));
    *moved = (qd_dispatched){.bytes = s->dispatched.bytes - before.bytes,
                             .crossed = s->dispatched.crossed - before.crossed,
                             .flat = s->dispatched.flat - before.flat};
    s->end.dispatch_bytes += moved->bytes;
    s->end.across_bytes += moved->crossed;
    s->end.across_flat_bytes += moved->flat;
    return QD_OK;
}

/* Reports skipped steps. A run that skips many consecutive steps makes no progress and ends. */
static qd_status note_skipped(qd_rank_run *s, int64_t step, const qd_step_output *output)
{
    enum { MOST = 20 };
    char text[256], why[sizeof output->not_finite];
    s->skipped = output->skipped ? s->skipped + 1 : 0;
    if (!output->skipped)
        return QD_OK;
    if (output->spike)
        qd_spikes_describe(&s->spikes, output, why, sizeof why);
    else
        snprintf(why, sizeof why, "%s", output->not_finite);
    snprintf(text, sizeof text, "step %lld was skipped: %s", (long long)step, why);
    qd_rank_note(s, text);
    if (s->skipped < MOST)
        return QD_OK;
    return QD_FAIL(QD_NOT_FINITE, "%d consecutive steps were skipped; of the last, %lld: %s; the weights are those of step %lld",
                   MOST, (long long)step, why, (long long)(step - MOST));
}

/* Non-finite steps end the run in order, on all ranks. The checkpoint that is being written is
 * completed, and the state, which such steps have not changed, is saved: a run with other settings
 * can resume from it. */
static qd_status end_saving(qd_rank_run *s, qd_status status)
{
    qd_error_record why;
    if (status != QD_NOT_FINITE || !s->saver)
        return status;
    qd_error_keep(&why);
    qd_status saving = poll_save(s, true); /* a failed save is reported by a note, failed communication at the end */
    if (saving == QD_OK && qd_trainer_position(s->trainer).step > s->kept)
        saving = qd_rank_run_checkpoint(s);
    if (saving == QD_OK)
        (void)poll_save(s, true);
    qd_error_put_back(&why);
    return status;
}

qd_status qd_rank_run_follow(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    const qd_step_output *output = &s->output;
    const int64_t step = qd_trainer_position(s->trainer).step, every = c->save_every;
    if (!output->skipped)
        qd_spikes_add(&s->spikes, output->grad_norm, output->loss);
    /* A step counts as done when no more than one interval would be lost with it. */
    if (s->saver)
        QD_TRY(poll_save(s, step - s->saving >= c->save_overlap));
    qd_dispatched moved;
    QD_TRY(count_dispatched(s, &moved));
    QD_TRY(end_saving(s, validate(s, step, s->seconds)));
    if (qd_comm_rank(s->world) == 0)
        QD_TRY(report_step(s, step, output, s->seconds, &moved));
    s->end.steps = step;
    s->end.loss = output->loss;
    s->end.tokens += step_tokens(c, output);
    QD_TRY(end_saving(s, note_skipped(s, step, output)));
    QD_TRY(write_samples(s, step));
    QD_TRY(ask_ranks(s, step, s->seconds));
    if (s->time_to_tune && s->stop == 0)
        QD_TRY(qd_run_tune_more(s));
    if (c->check_replicas > 0 && step % c->check_replicas == 0)
        QD_TRY(compare_replicas(s));
    bool due = s->saver && ((every > 0 && step % every == 0) || s->time_to_save || s->stop != 0 || step == c->steps ||
                            (s->improved && c->evaluation.save_best));
    if (due)
        QD_TRY(qd_rank_run_checkpoint(s));
    s->followed = step;
    return QD_OK;
}

qd_status qd_rank_run_step(qd_rank_run *s)
{
    int64_t step = qd_trainer_position(s->trainer).step + 1;
    double from = qd_clock_now();
    if (s->trace && s->traced++ == s->run->config.trace_steps)
        qd_trainer_set_trace(s->trainer, NULL);
    qd_trainer_set_limits(s->trainer, qd_spikes_limits(&s->spikes));
    QD_TRY(end_saving(s, qd_trainer_step(s->trainer, &s->output)));
    if (s->output.different[0] != '\0')
        return tell_different(s, step, &s->output);
    s->seconds = qd_clock_now() - from;
    bool went_back = false;
    qd_patience_add(&s->patience, s->seconds);
    qd_comm_guard_patience(s->world, qd_patience_stopped(&s->patience, s->run->config.deadline));
    if (s->output.spike)
        QD_TRY(end_saving(s, qd_run_spike(s, &s->output, &went_back)));
    if (!went_back)
        return qd_rank_run_follow(s);
    s->followed = qd_trainer_position(s->trainer).step;
    return ask_ranks(s, step, s->seconds);
}

qd_status qd_rank_run_settle(qd_rank_run *s)
{
    return s->saver ? poll_save(s, true) : QD_OK;
}

/* Until all are done, or a signal has asked to stop. */
static qd_status run_steps(qd_rank_run *s)
{
    double begin = qd_clock_now();
    bool first = s->run->on_first_step != NULL;
    for (; qd_trainer_position(s->trainer).step < s->run->config.steps && s->stop == 0 && !s->rests; first = false) {
        QD_TRY(qd_rank_run_step(s));
        if (first)
            s->run->on_first_step(s->run->first_step_context);
    }
    QD_TRY(qd_rank_run_settle(s));
    s->rests = s->rests && s->stop == 0 && qd_trainer_position(s->trainer).step < s->run->config.steps;
    s->end.seconds = qd_clock_now() - begin;
    s->end.interrupted = s->stop != 0 && s->end.steps < s->run->config.steps;
    return QD_OK;
}

/* The status of an interrupted run: rank 0 has the message, the others return the same status. */
static qd_status tell_end(qd_rank_run *s)
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
        return QD_FAIL(status, "%s%s after step %lld of %lld with a checkpoint: resume with --dir %s --resume",
                       user ? "" : signal_name(s->stop), user ? "interrupted" : ": stopped", (long long)s->end.steps, (long long)c->steps,
                       c->run_dir);
    return QD_FAIL(status, "interrupted after step %lld of %lld%s", (long long)s->end.steps, (long long)c->steps,
                   c->run_dir[0] == '\0' ? " without a checkpoint: there is no run.dir"
                   : !c->save              ? " without a checkpoint: run.save is false"
                                           : " without a checkpoint");
}

/* A run whose result should have been saved but was not has failed, on all ranks. */
static qd_status tell_unsaved(qd_rank_run *s)
{
    s->agreed = true;
    if (qd_comm_rank(s->world) == 0)
        return QD_FAIL(QD_IO, "all %lld steps are done, but there is no checkpoint after the last: %s", (long long)s->end.steps,
                       s->unsaved);
    qd_error_clear();
    return QD_IO;
}

qd_status qd_rank_run_finish(qd_rank_run *s)
{
    const qd_run *run = s->run;
    qd_footprint footprint;
    qd_run_memory most;
    qd_run_file path;
    QD_TRY(qd_footprint_read(&footprint));
    QD_TRY(qd_run_path(&run->config, "memory.json", path));
    /* Mapped memory of other ranks is counted on those ranks. */
    int64_t staging, shared = qd_comm_shared_bytes(s->world, &staging), others = shared < 0 ? 0 : footprint.shared - shared;
    int64_t resident = footprint.peak - (others > 0 ? others : 0);
    QD_TRY(qd_run_memory_write(s->control,
                               (qd_run_memory){qd_trainer_allocated(s->trainer), qd_trainer_allocated_host(s->trainer), staging, resident},
                               run->config.run_dir[0] != '\0' ? path : NULL, &most));
    s->end.allocated_bytes = most.allocated;
    s->end.host_bytes = most.host;
    s->end.resident_bytes = most.resident;
    if (qd_config_validates(&run->config)) {
        s->end.best = s->validation.best;
        s->end.best_loss = s->validation.best_loss;
    }
    const char *lost = qd_metrics_lost(s->metrics);
    if (lost)
        qd_rank_note(s, lost);
    if (s->trace) {
        QD_TRY(qd_run_path(&run->config, "trace.json", path));
        QD_TRY(qd_trace_write(s->trace, qd_trainer_program(s->trainer), s->control, path));
    }
    if (qd_comm_rank(s->world) == 0 && run->observer && run->observer->on_end)
        run->observer->on_end(run->observer->context, &s->end);
    return s->end.interrupted ? tell_end(s) : s->unsaved[0] != '\0' ? tell_unsaved(s) : QD_OK;
}

/* Adds this rank to the message, unless it names a rank already: several ranks may report the same
 * non-finite number or the same missing rank. */
static void name_rank(const qd_comm *world, qd_status status)
{
    if (qd_comm_size(world) > 1 && !strstr(qd_error_message(), "rank "))
        qd_error_prefix(status, "rank %d: ", qd_comm_rank(world));
}

void qd_rank_run_alert(qd_rank_run *s, qd_status status)
{
    if (status == QD_OK || status == QD_REMOTE || s->agreed)
        return;
    name_rank(s->world, status);
    if (status == QD_TIMEOUT)
        qd_stacks_write();
    qd_comm_abort(s->world, qd_error_message());
}

void qd_rank_run_close(qd_rank_run *s)
{
    qd_metrics_destroy(s->metrics);
    qd_recorder_destroy(s->recorder);
    qd_saver_destroy(s->saver);
    qd_replicas_destroy(s->replicas);
    qd_samples_destroy(s->samples);
    qd_trainer_destroy(s->trainer);
    qd_trace_destroy(s->trace);
    qd_validation_close(&s->validation);
    qd_spikes_close(&s->spikes);
    qd_run_corpus_close(&s->corpus);
    free(s->config_text);
    free(s->reference);
    qd_comm_destroy(s->control);
    *s = (qd_rank_run){0};
}

qd_status qd_rank_run_live(qd_rank_run *s)
{
    qd_status status = QD_OK;
    QD_TRY_DONE(qd_rank_run_start(s));
    if (s->run->handover)
        QD_TRY_DONE(qd_run_catch_up(s));
    QD_TRY_DONE(run_steps(s));
    if (!s->rests)
        QD_TRY_DONE(qd_rank_run_finish(s));
done:
    qd_rank_run_alert(s, status);
    if ((status == QD_OK && !s->rests) || status == QD_STOPPED || status == QD_INTERRUPTED)
        forget_shared_memory(s);
    return status;
}
