/* Restarts local ranks, or those of a command, after a failure (run.restarts): they continue from
 * the state of the surviving ranks or from the newest intact checkpoint. With run.elastic it also
 * decides how many ranks there are.
 *
 * The launcher stays, so that signals, output and the observer are those of one run. A resumed run
 * is bit-identical to one that was not disturbed on the same layout, so the result does not depend
 * on the failures. */
#define _GNU_SOURCE
#include "train/launch/launch.h"
#include "train/launch/launch_elastic.h"
#include "train/launch/launch_hosts.h"
#include "train/launch/launch_journal.h"

#include "base/clock.h"
#include "base/file.h"
#include "train/run/run_state.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct keeper {
    qd_run *run;
    qd_train_observer passed; /* what the ranks report to: counts steps and passes them on */
    const qd_train_observer *observer;
    qd_journal journal;
    const qd_options *given;
    qd_options *options; /* of the present attempt; NULL: those that were given */
    bool over;           /* a decision that the run ends was made while ranks rested */
    bool in_memory;      /* the present attempt continues from the state that ranks had in memory */
    int left;            /* and with the processes of so many of them */
    qd_elastic elastic;
    qd_hosts hosts;
    int needs;           /* ranks of a run with hosts that is not elastic */
    double asked_hosts;  /* clock time when they were asked last */
    char noted[256];     /* by note_once() */
    struct stat replaced; /* metrics.jsonl before the first attempt of a command; its steps are of an earlier run */
    struct stat recorded; /* metrics.jsonl before the present command */
    qd_command *command;  /* the present one */
} keeper;

static void pass_step(void *context, const qd_train_step *step)
{
    keeper *k = context;
    qd_journal_step(&k->journal, step->step);
    if (k->observer->on_step)
        k->observer->on_step(k->observer->context, step);
}

static void pass_end(void *context, const qd_train_end *end)
{
    const keeper *k = context;
    if (k->observer->on_end)
        k->observer->on_end(k->observer->context, end);
}

static void pass_note(void *context, const char *text)
{
    const keeper *k = context;
    if (k->observer->on_note)
        k->observer->on_note(k->observer->context, text);
}

static void note_host(keeper *k, const char *event, const qd_host *host, const char *why)
{
    char text[512];
    qd_json_writer w = qd_journal_line(&k->journal, event);
    qd_json_put_string(&w, "host", host->name);
    qd_journal_end_line(&k->journal, &w);
    snprintf(text, sizeof text, "host %s %s", host->name, why);
    if (k->observer->on_note)
        k->observer->on_note(k->observer->context, text);
}

/* What is looked at again and again is reported when it changes. */
static void note_once(keeper *k, const char *text)
{
    if (strncmp(k->noted, text, sizeof k->noted - 1) == 0)
        return;
    snprintf(k->noted, sizeof k->noted, "%s", text);
    pass_note(k, k->noted);
}

/* A file that has become wrong does not end a run that knows its hosts. */
static qd_status read_hosts(keeper *k)
{
    char text[256];
    qd_status status = qd_hosts_read(&k->hosts);
    if (status == QD_OK || k->hosts.count == 0)
        return status;
    snprintf(text, sizeof text, "%.220s: hosts stay as they were", qd_error_message());
    qd_error_clear();
    note_once(k, text);
    return QD_OK;
}

/* The hosts that answer now, if there are any. */
static qd_status ready_hosts(keeper *k)
{
    char reason[64];
    QD_TRY(read_hosts(k));
    if (k->hosts.count == 0)
        return QD_OK;
    bool *before = calloc((size_t)k->hosts.count, sizeof *before);
    if (!before)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d hosts", k->hosts.count);
    for (int i = 0; i < k->hosts.count; i++)
        before[i] = k->hosts.list[i].absent;
    qd_hosts_ask(&k->hosts);
    k->asked_hosts = qd_clock_now();
    for (int i = 0; i < k->hosts.count; i++) {
        const qd_host *host = &k->hosts.list[i];
        if (host->absent != before[i])
            note_host(k, host->absent ? "absent" : "returned", host, host->absent ? "does not answer" : "answers again");
    }
    free(before);
    const int slots = qd_hosts_slots(&k->hosts);
    snprintf(reason, sizeof reason, "hosts for %d rank%s are left", slots, slots == 1 ? "" : "s");
    qd_elastic_limit(&k->elastic, slots, reason);
    if (k->elastic.most == 0 && k->needs == 0)
        k->needs = qd_options_is_set(k->given, "parallel.ranks") ? (int)qd_options_int(k->given, "parallel.ranks") : slots;
    if (k->elastic.most == 0 && (slots < k->needs || slots == 0))
        return QD_FAIL(QD_SYSTEM, "run.hosts: the hosts that answer and are not excluded take %d ranks, and the run needs %d: add hosts, "
                                  "or let the number of ranks change with run.elastic", slots, k->needs);
    return QD_OK;
}

/* The options that were given, in the layout for the ranks that there are. */
static qd_status sized_options(keeper *k, qd_options **options)
{
    char text[24];
    QD_TRY(qd_elastic_options(&k->elastic, k->given, options));
    if (k->needs == 0)
        return QD_OK;
    snprintf(text, sizeof text, "%d", k->needs);
    qd_status status = qd_options_set(*options, "parallel.ranks", text);
    if (status != QD_OK)
        qd_options_destroy(*options);
    return status;
}

/* The options of the next attempt: it resumes or, where nothing was saved yet, starts again. Before
 * the first step, checkpoints may be those of a run that this one replaces. NULL: nothing is left
 * to do. */
static qd_status next_options(keeper *k, qd_options **options)
{
    qd_run_file checkpoints;
    QD_TRY(qd_run_path(&k->run->config, "checkpoints", checkpoints));
    bool resumes = (k->journal.past.resumed || k->journal.past.step >= 0) && qd_store_holds(checkpoints);
    qd_options *copy = NULL;
    if (k->in_memory)
        resumes = true;
    else if (k->journal.past.step >= k->run->config.steps && qd_run_is_complete(&k->run->config))
        return QD_OK;
    QD_TRY(ready_hosts(k));
    QD_TRY(sized_options(k, &copy));
    qd_status status = qd_options_set(copy, "run.resume", resumes ? "true" : "false");
    if (status == QD_OK)
        status = qd_options_set(copy, "run.overwrite", resumes ? "false" : "true");
    if (status == QD_OK)
        *options = copy;
    else
        qd_options_destroy(copy);
    return status;
}

/* How the ranks of this attempt differ from those before: in the journal, and as a note. */
static void note_ranks(keeper *k, int before)
{
    char text[512];
    const int now = k->run->config.world;
    if (k->run->config.elastic_most == 0 || now == before)
        return;
    qd_json_writer w = qd_journal_line(&k->journal, "resize");
    qd_json_put_int(&w, "from", before);
    qd_json_put_int(&w, "ranks", now);
    qd_json_put_string(&w, "reason", k->elastic.reason);
    qd_json_put_bool(&w, "in_memory", k->in_memory);
    qd_json_put_double(&w, "seconds", qd_clock_now() - k->elastic.asked_at);
    qd_journal_end_line(&k->journal, &w);
    if (k->journal.failed_at == 0.0) /* until the first step in the new layout */
        k->journal.failed_at = k->elastic.asked_at;
    snprintf(text, sizeof text, "%s: the run continues with %d ranks instead of %d", k->elastic.reason, now, before);
    pass_note(k, text);
}

/* Before each attempt but the first. */
static qd_status prepare_again(keeper *k, bool failed, bool *complete)
{
    qd_options *next = NULL;
    qd_run_summary summary = {0};
    const bool command = k->run->config.launcher[0] != '\0';
    const int before = k->run->config.world;
    QD_TRY(next_options(k, &next));
    *complete = !next;
    if (*complete)
        return QD_OK;
    k->run->options = next;
    k->run->state_in_memory = k->in_memory;
    k->run->ranks_stay = k->left > 0;
    qd_status status = command ? qd_run_prepare(next, 0, k->run->stop, &k->run->config, &summary)
                               : qd_run_prepare_local(k->run, NULL, &summary);
    qd_options_destroy(k->options);
    k->options = next;
    if (status != QD_OK)
        return qd_error_prefix(status, "restart %lld: ", (long long)k->journal.past.attempt - 1);
    if (failed)
        qd_journal_restart(&k->journal, k->in_memory, k->left);
    note_ranks(k, before);
    return QD_OK;
}

static bool excludes(void *context)
{
    keeper *k = context;
    return qd_elastic_exclude(&k->elastic, k->given, k->run->config.world);
}

/* After a failure. QD_OK: the ranks are started again; otherwise the run ends with this status. */
static qd_status judge(keeper *k, qd_status status)
{
    k->journal.failed_at = qd_clock_now();
    return qd_journal_judge(&k->journal, status, excludes, k);
}

/* The ranks that are left of a world rest. */
static bool again(void *context, qd_status failure, bool in_memory, int left, qd_status *result)
{
    keeper *k = context;
    bool complete = false;
    const bool failed = failure != QD_OK;
    *result = failed ? judge(k, failure) : QD_OK;
    k->in_memory = in_memory;
    k->left = left;
    if (*result == QD_OK)
        *result = prepare_again(k, failed, &complete);
    k->over = *result != QD_OK || complete;
    return !k->over;
}

static int wanted(void *context, int ranks)
{
    keeper *k = context;
    int number = qd_elastic_wanted(&k->elastic, k->given, ranks);
    if (number < 0)
        note_once(k, k->elastic.reason);
    return number;
}

static void listen_for_hosts(void *context, const char *line)
{
    keeper *k = context;
    qd_hosts_listen(&k->hosts, line);
}

#define SECONDS_BETWEEN_HOSTS 10.0

/* metrics.jsonl as it is now; zeros: there is none. */
static struct stat metrics_now(const keeper *k)
{
    char path[PATH_MAX + 16];
    struct stat now = {0};
    snprintf(path, sizeof path, "%s/metrics.jsonl", k->run->config.run_dir);
    return stat(path, &now) == 0 ? now : (struct stat){0};
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_ino == b->st_ino && a->st_dev == b->st_dev && a->st_size == b->st_size && a->st_mtim.tv_sec == b->st_mtim.tv_sec &&
           a->st_mtim.tv_nsec == b->st_mtim.tv_nsec;
}

/* Whether a rank of the present command has done a step. */
static bool has_begun(const keeper *k)
{
    const struct stat now = metrics_now(k);
    return !is_same(&now, &k->recorded);
}

/* Ranks of a command stop with a checkpoint and are started again. Hosts are asked now and then,
 * whether more of them can be used. That those in use are gone is noticed by the ranks, unless
 * there are none: srun waits in a queue for a machine that went down just before. */
static bool resizes(void *context)
{
    keeper *k = context;
    if (k->elastic.most == 0)
        return false;
    if (k->hosts.count > 0 && qd_clock_now() - k->asked_hosts > SECONDS_BETWEEN_HOSTS && ready_hosts(k) != QD_OK)
        qd_error_clear();
    const int world = k->run->config.world, number = wanted(k, world);
    if (number < 0 && k->elastic.available < k->elastic.least)
        raise(SIGUSR1); /* as if a scheduler had: the ranks write a checkpoint and end */
    k->command->futile = k->hosts.count > 0 && number > 0 && number < world && !has_begun(k);
    return k->command->futile || number > world || (number > 0 && k->elastic.available < world);
}

/* The host that the failure is due to is excluded, if it was not the first one. */
static void blame_host(keeper *k)
{
    char why[96];
    const qd_host *host = qd_hosts_blame(&k->hosts);
    if (!host)
        return;
    snprintf(why, sizeof why, "is excluded after %d failure%s in a row", host->failures, host->failures == 1 ? "" : "s");
    note_host(k, "excluded", host, why);
    k->journal.past.equal = 0;
}

/* The last step that the ranks of a command have done; -1: none. A command that fails at once
 * leaves the metrics of the run that it was to replace. */
static int64_t last_step(const keeper *k)
{
    const struct stat now = metrics_now(k);
    return is_same(&now, &k->replaced) && !k->journal.past.resumed ? -1 : qd_launch_last_step(&k->run->config);
}

static qd_status run_command(keeper *k, char *const *argv, bool *resized, int *stopped)
{
    const qd_config *c = &k->run->config;
    qd_strbuf text = {0};
    qd_hosts_attempt(&k->hosts);
    QD_TRY(qd_hosts_command(&k->hosts, c->launcher, c->world, &text));
    qd_command command = {.text = text.data, .sized = k->elastic.most > 0 || k->hosts.count > 0, .context = k, .line = listen_for_hosts,
                          .resizes = resizes};
    k->command = &command;
    k->recorded = metrics_now(k);
    qd_status status = qd_launch_command(k->run, argv, &command, stopped);
    *resized = command.resized && *stopped == 0 && (status == QD_STOPPED || (command.futile && status != QD_OK));
    k->journal.past.step = last_step(k);
    qd_strbuf_free(&text);
    return status;
}

static qd_status run_attempts(keeper *k, char *const *argv)
{
    const qd_keeper decides = {.context = k, .again = again, .wanted = wanted};
    const bool keeps = !k->run->config.from_checkpoint;
    for (bool complete = false;;) {
        int stopped = 0;
        bool resized = false;
        k->run->observer = &k->passed;
        qd_status status = k->run->config.launcher[0] != '\0' ? run_command(k, argv, &resized, &stopped)
                                                              : qd_launch_processes(k->run, argv, keeps ? &decides : NULL, &stopped);
        if (k->over || status == QD_OK || stopped != 0 || (qd_ended_in_order(status) && !resized))
            return status;
        if (!resized) {
            blame_host(k);
            QD_TRY(judge(k, status));
        }
        k->in_memory = false;
        k->left = 0;
        status = prepare_again(k, !resized, &complete);
        if (status != QD_OK || complete)
            return status;
    }
}

/* The first attempt of a command: hosts and layout as they are now. */
static qd_status prepare_first(keeper *k)
{
    qd_run_summary summary = {0};
    k->replaced = metrics_now(k);
    if (k->run->config.launcher[0] == '\0' || (k->elastic.most == 0 && k->hosts.path[0] == '\0'))
        return QD_OK;
    QD_TRY(ready_hosts(k));
    QD_TRY(sized_options(k, &k->options));
    k->run->options = k->options;
    return qd_run_prepare(k->options, 0, k->run->stop, &k->run->config, &summary);
}

qd_status qd_launch_restarting(qd_run *run, char *const *argv, const qd_train_observer *observer)
{
    keeper k = {.run = run, .observer = observer, .given = run->options};
    /* Where SIGCHLD is ignored, the system keeps no exit status of children. */
    struct sigaction before, action = {.sa_handler = SIG_DFL};
    sigemptyset(&action.sa_mask);
    sigaction(SIGCHLD, &action, &before);
    k.passed = (qd_train_observer){.size = sizeof k.passed, .context = &k, .on_step = pass_step, .on_end = pass_end, .on_note = pass_note};
    qd_journal_begin(&k.journal, run, observer);
    qd_elastic_begin(&k.elastic, &run->config);
    if (qd_options_bool(run->options, "run.overwrite"))
        qd_elastic_forget(&k.elastic, &run->config);
    qd_hosts_begin(&k.hosts, &run->config);
    qd_status status = prepare_first(&k);
    if (status == QD_OK)
        status = run_attempts(&k, argv);
    if (k.journal.text.length > 0) /* the ranks of the last attempt may have cleared the folder */
        qd_journal_write(&k.journal);
    run->options = k.given;
    qd_options_destroy(k.options);
    qd_elastic_end(&k.elastic);
    qd_hosts_end(&k.hosts);
    qd_journal_end(&k.journal);
    sigaction(SIGCHLD, &before, NULL);
    return status;
}
