/* Restarts ranks after a failure (run.restarts): decides from the status whether a restart can
 * help, continues from the state of the surviving ranks or from the newest intact checkpoint, and
 * keeps a journal in the run folder. With run.elastic it also decides how many ranks there are.
 *
 * The launcher stays, so that signals, output and the observer are those of one run. A resumed run
 * is bit-identical to one that was not disturbed on the same layout, so the result does not depend
 * on the failures. */
#define _GNU_SOURCE
#include "train/launch/launch.h"
#include "train/launch/launch_elastic.h"
#include "train/launch/launch_hosts.h"

#include "base/clock.h"
#include "base/file.h"
#include "base/text/json_writer.h"
#include "data/files.h"
#include "train/run/run_state.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

/* Consecutive failures after the same step with the same message: the next one would be the same.
 * Non-finite numbers are reproduced bit by bit, unless a flipped bit was the reason. */
enum { MOST_EQUAL = 3, MOST_EQUAL_NOT_FINITE = 2 };

typedef struct keeper {
    qd_run *run;
    qd_train_observer passed; /* what the ranks report to: counts steps and passes them on */
    const qd_train_observer *observer;
    qd_strbuf journal;
    bool resumed;      /* the first attempt resumed a run: what the folder holds is of this one */
    int64_t attempt;   /* from 1 */
    int64_t step;      /* last step that was reported, in this attempt or an earlier one; -1: none */
    double failed_at;  /* clock time of the failure that the present attempt follows; 0: none, or it has recovered */
    qd_failure before; /* the failure before the present one */
    int64_t before_step;
    int equal;         /* consecutive equal failures */
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

/* Why a run failed, in the words of the journal; NULL: a restart would fail in the same way. */
static const char *cause_of(qd_status status)
{
    switch (status) {
    case QD_SYSTEM:
    case QD_REMOTE: return "rank lost";
    case QD_TIMEOUT: return "rank missing";
    case QD_MISMATCH: return "ranks disagree";
    case QD_NO_MEMORY: return "out of memory";
    case QD_IO: return "input or output";
    case QD_NOT_FINITE: return "not finite";
    case QD_DIFFERENT: return "replicas differ";
    default: return NULL; /* configuration, damaged files, a signal, a folder in use */
    }
}

static void put_time(qd_json_writer *w)
{
    char text[32] = "";
    struct tm parts;
    time_t now = time(NULL);
    if (gmtime_r(&now, &parts))
        strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
    qd_json_put_string(w, "time", text);
}

static qd_json_writer begin_line(keeper *k, const char *event)
{
    qd_json_writer w = qd_json_writer_on(&k->journal);
    qd_json_object_begin(&w, NULL);
    put_time(&w);
    qd_json_put_string(&w, "event", event);
    qd_json_put_int(&w, "attempt", k->attempt);
    return w;
}

/* Writes the whole journal: a restart without a checkpoint clears the folder. The journal is for
 * people, so a disk that refuses it does not end the run. */
static void write_journal(keeper *k)
{
    qd_run_file path;
    qd_error_record record;
    qd_error_keep(&record);
    if (k->journal.failed || qd_folder_make(k->run->config.run_dir) != QD_OK ||
        qd_run_path(&k->run->config, QD_JOURNAL_FILE, path) != QD_OK ||
        qd_file_replace(path, k->journal.data, k->journal.length) != QD_OK) {
        if (k->observer->on_note)
            k->observer->on_note(k->observer->context, qd_error_message());
    }
    qd_error_put_back(&record);
}

static void end_line(keeper *k, qd_json_writer *w)
{
    qd_json_end(w);
    qd_json_newline(w);
    write_journal(k);
}

/* A resumed run continues the journal of its folder. */
static void load_journal(keeper *k)
{
    qd_run_file path;
    char *text = NULL;
    size_t length = 0;
    if (k->run->config.resume && qd_run_path(&k->run->config, QD_JOURNAL_FILE, path) == QD_OK &&
        qd_file_read(path, (size_t)64 << 20, &text, &length) == QD_OK)
        qd_strbuf_append(&k->journal, text, length);
    qd_error_clear();
    free(text);
}

static void pass_step(void *context, const qd_train_step *step)
{
    keeper *k = context;
    k->step = step->step;
    if (k->failed_at > 0.0) {
        qd_json_writer w = begin_line(k, "recovered");
        qd_json_put_int(&w, "step", step->step);
        qd_json_put_double(&w, "seconds", qd_clock_now() - k->failed_at);
        end_line(k, &w);
        k->failed_at = 0.0;
    }
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

/* Whether two messages describe the same failure. Where in the step a rank was lost, and the number
 * of its last operation, vary between attempts that start from different checkpoints. */
static bool same_failure(const char *a, const char *b)
{
    const char *place = strstr(a, " at '");
    return place ? strncmp(a, b, (size_t)(place - a)) == 0 : strcmp(a, b) == 0;
}

/* Records the failure and counts how often it has occurred in a row. */
static void record_failure(keeper *k, qd_status status)
{
    const char *cause = cause_of(status), *message = qd_error_message();
    bool equal = k->before.status == status && k->before_step == k->step && same_failure(k->before.message, message);
    k->equal = equal ? k->equal + 1 : 1;
    k->before = (qd_failure){0};
    qd_failure_add_own(&k->before, status);
    k->before_step = k->step;
    k->failed_at = qd_clock_now();
    qd_json_writer w = begin_line(k, "failure");
    qd_json_put_string(&w, "cause", cause ? cause : qd_status_text(status));
    if (k->step >= 0)
        qd_json_put_int(&w, "step", k->step);
    else
        qd_json_put_null(&w, "step");
    qd_json_put_string(&w, "message", message);
    end_line(k, &w);
}

/* Ends the run with the evidence: why there is no further restart, and the last failure. */
static qd_status give_up(keeper *k, qd_status status, const char *why)
{
    qd_json_writer w = begin_line(k, "given up");
    qd_json_put_string(&w, "reason", why);
    end_line(k, &w);
    qd_failure last = k->before;
    (void)qd_failure_raise(&last);
    return qd_error_prefix(status, "%s, see %.200s/" QD_JOURNAL_FILE ": ", why, k->run->config.run_dir);
}

/* Whether the last checkpoint of the run is there: ranks may fail after it, while they end. */
static bool is_complete(const keeper *k, const char *checkpoints)
{
    qd_checkpoint *checkpoint = NULL;
    bool complete = qd_store_open(checkpoints, INT64_MAX, true, &checkpoint, NULL) == QD_OK &&
                    qd_checkpoint_meta(checkpoint)->step >= k->run->config.steps;
    qd_checkpoint_close(checkpoint);
    qd_error_clear();
    return complete;
}

static void note_host(keeper *k, const char *event, const qd_host *host, const char *why)
{
    char text[512];
    qd_json_writer w = begin_line(k, event);
    qd_json_put_string(&w, "host", host->name);
    end_line(k, &w);
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
    qd_elastic_limit(&k->elastic, slots);
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
    bool resumes = (k->resumed || k->step >= 0) && qd_store_holds(checkpoints);
    qd_options *copy = NULL;
    if (k->in_memory)
        resumes = true;
    else if (k->step >= k->run->config.steps && is_complete(k, checkpoints))
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

static void tell_restart(const keeper *k, bool resumes)
{
    char text[QD_ERROR_MESSAGE_BYTES + 256], from[128];
    if (k->in_memory)
        snprintf(from, sizeof from, "the state of the other %d rank%s", k->left, k->left == 1 ? "" : "s");
    else
        snprintf(from, sizeof from, "%s", resumes ? "the newest checkpoint" : "the beginning");
    snprintf(text, sizeof text, "%s: restart %lld of %lld from %s", k->before.message, (long long)k->attempt - 1,
             (long long)k->run->config.restarts, from);
    pass_note((void *)(uintptr_t)k, text);
}

/* How the ranks of this attempt differ from those before: in the journal, and as a note. */
static void note_ranks(keeper *k, int before)
{
    char text[512];
    const int now = k->run->config.world;
    if (k->run->config.elastic_most == 0 || now == before)
        return;
    qd_json_writer w = begin_line(k, "resize");
    qd_json_put_int(&w, "from", before);
    qd_json_put_int(&w, "ranks", now);
    qd_json_put_string(&w, "reason", k->elastic.reason);
    qd_json_put_bool(&w, "in_memory", k->in_memory);
    qd_json_put_double(&w, "seconds", qd_clock_now() - k->elastic.asked_at);
    end_line(k, &w);
    if (k->failed_at == 0.0) /* until the first step in the new layout */
        k->failed_at = k->elastic.asked_at;
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
        return qd_error_prefix(status, "restart %lld: ", (long long)k->attempt - 1);
    if (failed) {
        qd_json_writer w = begin_line(k, "restart");
        qd_json_put_bool(&w, "resumes", k->run->config.resume);
        qd_json_put_bool(&w, "in_memory", k->in_memory);
        qd_json_put_int(&w, "surviving", k->left);
        qd_json_put_double(&w, "seconds", qd_clock_now() - k->failed_at);
        end_line(k, &w);
        tell_restart(k, k->run->config.resume);
    }
    note_ranks(k, before);
    return QD_OK;
}

/* After a failure. QD_OK: the ranks are started again; otherwise the run ends with this status. */
static qd_status judge(keeper *k, qd_status status)
{
    char why[96];
    record_failure(k, status);
    if (!cause_of(status)) {
        snprintf(why, sizeof why, "%s: no restart can help", qd_status_text(status));
        return give_up(k, status, why);
    }
    const bool repeated = k->equal >= (status == QD_NOT_FINITE ? MOST_EQUAL_NOT_FINITE : MOST_EQUAL);
    if (repeated && (status == QD_NOT_FINITE || !qd_elastic_exclude(&k->elastic, k->given, k->run->config.world))) {
        if (k->step >= 0)
            snprintf(why, sizeof why, "%d equal failures in a row after step %lld", k->equal, (long long)k->step);
        else
            snprintf(why, sizeof why, "%d equal failures in a row before the first step", k->equal);
        return give_up(k, status, why);
    }
    if (k->attempt > k->run->config.restarts) {
        snprintf(why, sizeof why, "failed after %lld restart%s", (long long)k->attempt - 1, k->attempt == 2 ? "" : "s");
        return give_up(k, status, why);
    }
    if (repeated)
        k->equal = 0;
    k->attempt++;
    return QD_OK;
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
    k->equal = 0;
}

/* The last step that the ranks of a command have done; -1: none. A command that fails at once
 * leaves the metrics of the run that it was to replace. */
static int64_t last_step(const keeper *k)
{
    const struct stat now = metrics_now(k);
    return is_same(&now, &k->replaced) && !k->resumed ? -1 : qd_launch_last_step(&k->run->config);
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
    k->step = last_step(k);
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
    keeper k = {.run = run, .observer = observer, .resumed = run->config.resume, .attempt = 1, .step = -1, .before_step = -1,
                .given = run->options};
    /* Where SIGCHLD is ignored, the system keeps no exit status of children. */
    struct sigaction before, action = {.sa_handler = SIG_DFL};
    sigemptyset(&action.sa_mask);
    sigaction(SIGCHLD, &action, &before);
    k.passed = (qd_train_observer){.size = sizeof k.passed, .context = &k, .on_step = pass_step, .on_end = pass_end, .on_note = pass_note};
    load_journal(&k);
    qd_elastic_begin(&k.elastic, &run->config);
    if (qd_options_bool(run->options, "run.overwrite"))
        qd_elastic_forget(&k.elastic, &run->config);
    qd_hosts_begin(&k.hosts, &run->config);
    qd_status status = prepare_first(&k);
    if (status == QD_OK)
        status = run_attempts(&k, argv);
    if (k.journal.length > 0) /* the ranks of the last attempt may have cleared the folder */
        write_journal(&k);
    run->options = k.given;
    qd_options_destroy(k.options);
    qd_elastic_end(&k.elastic);
    qd_hosts_end(&k.hosts);
    qd_strbuf_free(&k.journal);
    sigaction(SIGCHLD, &before, NULL);
    return status;
}
