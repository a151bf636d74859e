/* The judgement over failures of a supervised run, and its journal. See launch_journal.h. */
#include "train/launch/launch_journal.h"

#include "base/clock.h"
#include "base/file.h"
#include "data/files.h"
#include "train/run/run_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Consecutive failures after the same step with the same message: the next one would be the same.
 * Non-finite numbers are reproduced bit by bit, unless a flipped bit was the reason. */
enum { MOST_EQUAL = 3, MOST_EQUAL_NOT_FINITE = 2 };

const char *qd_journal_cause(qd_status status)
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

void qd_journal_begin(qd_journal *j, const qd_run *run, const qd_train_observer *observer)
{
    *j = (qd_journal){.run = run, .observer = observer,
                      .past = {.attempt = 1, .step = -1, .before_step = -1, .resumed = run->config.resume}};
    if (run->config.resume)
        qd_journal_load(j);
}

void qd_journal_load(qd_journal *j)
{
    qd_run_file path;
    char *text = NULL;
    size_t length = 0;
    if (qd_run_path(&j->run->config, QD_JOURNAL_FILE, path) == QD_OK && qd_file_read(path, (size_t)64 << 20, &text, &length) == QD_OK)
        qd_strbuf_append(&j->text, text, length);
    qd_error_clear();
    free(text);
}

void qd_journal_end(qd_journal *j)
{
    qd_strbuf_free(&j->text);
}

void qd_journal_note(const qd_journal *j, const char *text)
{
    if (j->observer && j->observer->on_note)
        j->observer->on_note(j->observer->context, text);
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

qd_json_writer qd_journal_line(qd_journal *j, const char *event)
{
    qd_json_writer w = qd_json_writer_on(&j->text);
    qd_json_object_begin(&w, NULL);
    put_time(&w);
    qd_json_put_string(&w, "event", event);
    qd_json_put_int(&w, "attempt", j->past.attempt);
    return w;
}

void qd_journal_write(qd_journal *j)
{
    qd_run_file path;
    qd_error_record record;
    if (!j->observer || j->held)
        return;
    qd_error_keep(&record);
    if (j->text.failed || qd_folder_make(j->run->config.run_dir) != QD_OK ||
        qd_run_path(&j->run->config, QD_JOURNAL_FILE, path) != QD_OK || qd_file_replace(path, j->text.data, j->text.length) != QD_OK)
        qd_journal_note(j, qd_error_message());
    qd_error_put_back(&record);
}

void qd_journal_end_line(qd_journal *j, qd_json_writer *w)
{
    qd_json_end(w);
    qd_json_newline(w);
    qd_journal_write(j);
}

void qd_journal_step(qd_journal *j, int64_t step)
{
    j->past.step = step;
    if (j->failed_at <= 0.0)
        return;
    qd_json_writer w = qd_journal_line(j, "recovered");
    qd_json_put_int(&w, "step", step);
    qd_json_put_double(&w, "seconds", qd_clock_now() - j->failed_at);
    qd_journal_end_line(j, &w);
    j->failed_at = 0.0;
}

/* Whether two messages describe the same failure. Where in the step a rank was lost, and the number
 * of its last operation, vary between attempts that start from different checkpoints. */
static bool same_failure(const char *a, const char *b)
{
    const char *place = strstr(a, " at '");
    return place ? strncmp(a, b, (size_t)(place - a)) == 0 : strcmp(a, b) == 0;
}

/* Records the failure and counts how often it has occurred in a row. */
static void record_failure(qd_journal *j, qd_status status)
{
    qd_past *p = &j->past;
    const char *cause = qd_journal_cause(status), *message = qd_error_message();
    bool equal = p->before.status == status && p->before_step == p->step && same_failure(p->before.message, message);
    p->equal = equal ? p->equal + 1 : 1;
    p->before = (qd_failure){0};
    qd_failure_add_own(&p->before, status);
    p->before_step = p->step;
    qd_json_writer w = qd_journal_line(j, "failure");
    qd_json_put_string(&w, "cause", cause ? cause : qd_status_text(status));
    if (p->step >= 0)
        qd_json_put_int(&w, "step", p->step);
    else
        qd_json_put_null(&w, "step");
    qd_json_put_string(&w, "message", message);
    qd_journal_end_line(j, &w);
}

qd_status qd_journal_give_up(qd_journal *j, qd_status status, const char *why)
{
    qd_json_writer w = qd_journal_line(j, "given up");
    qd_json_put_string(&w, "reason", why);
    qd_journal_end_line(j, &w);
    qd_failure last = j->past.before;
    (void)qd_failure_raise(&last);
    return qd_error_prefix(status, "%s, see %.200s/" QD_JOURNAL_FILE ": ", why, j->run->config.run_dir);
}

qd_status qd_journal_judge(qd_journal *j, qd_status status, bool (*excludes)(void *context), void *context)
{
    qd_past *p = &j->past;
    char why[96];
    record_failure(j, status);
    if (!qd_journal_cause(status)) {
        snprintf(why, sizeof why, "%s: no restart can help", qd_status_text(status));
        return qd_journal_give_up(j, status, why);
    }
    const bool repeated = p->equal >= (status == QD_NOT_FINITE ? MOST_EQUAL_NOT_FINITE : MOST_EQUAL);
    if (repeated && (status == QD_NOT_FINITE || !excludes || !excludes(context))) {
        if (p->step >= 0)
            snprintf(why, sizeof why, "%d equal failures in a row after step %lld", p->equal, (long long)p->step);
        else
            snprintf(why, sizeof why, "%d equal failures in a row before the first step", p->equal);
        return qd_journal_give_up(j, status, why);
    }
    if (p->attempt > j->run->config.restarts) {
        snprintf(why, sizeof why, "failed after %lld restart%s", (long long)p->attempt - 1, p->attempt == 2 ? "" : "s");
        return qd_journal_give_up(j, status, why);
    }
    if (repeated)
        p->equal = 0;
    p->attempt++;
    return QD_OK;
}

void qd_journal_restart(qd_journal *j, bool in_memory, int surviving)
{
    char text[QD_ERROR_MESSAGE_BYTES + 256], from[128];
    const bool resumes = j->run->config.resume;
    qd_json_writer w = qd_journal_line(j, "restart");
    qd_json_put_bool(&w, "resumes", resumes);
    qd_json_put_bool(&w, "in_memory", in_memory);
    qd_json_put_int(&w, "surviving", surviving);
    qd_json_put_double(&w, "seconds", qd_clock_now() - j->failed_at);
    qd_journal_end_line(j, &w);
    if (in_memory)
        snprintf(from, sizeof from, "the state of the other %d rank%s", surviving, surviving == 1 ? "" : "s");
    else
        snprintf(from, sizeof from, "%s", resumes ? "the newest checkpoint" : "the beginning");
    snprintf(text, sizeof text, "%s: restart %lld of %lld from %s", j->past.before.message, (long long)j->past.attempt - 1,
             (long long)j->run->config.restarts, from);
    qd_journal_note(j, text);
}

bool qd_run_is_complete(const qd_config *c)
{
    qd_run_file checkpoints;
    qd_checkpoint *checkpoint = NULL;
    bool complete = qd_run_path(c, "checkpoints", checkpoints) == QD_OK &&
                    qd_store_open(checkpoints, INT64_MAX, true, &checkpoint, NULL) == QD_OK &&
                    qd_checkpoint_meta(checkpoint)->step >= c->steps;
    qd_checkpoint_close(checkpoint);
    qd_error_clear();
    return complete;
}
