/* Threads that search for layouts: see search.h. */
#include "serve/search.h"

#include "base/clock.h"
#include "base/text/json_writer.h"
#include "base/thread.h"

#include <pthread.h>
#include <quadrille/plan.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A search notices that it is stopped between two layouts, which takes seconds for the largest
 * ones. */
enum { MOST_SEARCHES = 4 };

typedef struct job {
    qd_search *owner;
    bool used; /* the thread has to be joined */
    pthread_t thread;
    qd_options *run, *layout;
    atomic_bool stop;
    /* With the owner's mutex. */
    enum { RUNNING, DONE, FAILED } phase;
    double begin, seconds;
    int tried, too_large, refused;
    char best[128];
    double best_seconds;
    qd_strbuf result; /* JSON members of the end */
} job;

struct qd_search {
    const char *const *keys;
    pthread_mutex_t mutex;
    job jobs[MOST_SEARCHES];
    job *current; /* NULL: none was started */
};

static bool on_progress(void *context, const qd_plan_progress *progress)
{
    job *j = context;
    pthread_mutex_lock(&j->owner->mutex);
    j->seconds = progress->seconds;
    j->tried = progress->tried;
    j->too_large = progress->too_large;
    j->refused = progress->refused;
    snprintf(j->best, sizeof j->best, "%s", progress->layout);
    j->best_seconds = progress->step_seconds;
    pthread_mutex_unlock(&j->owner->mutex);
    return !atomic_load(&j->stop);
}

/* What a choice sets, as an object of keys. */
static qd_status put_keys(qd_json_writer *w, const char *const *keys, const qd_plan_choice *choice, const qd_options *options)
{
    qd_options *o = NULL;
    qd_status status = qd_options_copy(options, &o);
    if (status == QD_OK)
        status = qd_plan_apply(choice, o);
    qd_json_object_begin(w, NULL);
    for (int i = 0; keys[i] && status == QD_OK; i++) {
        char *text = NULL;
        if (!qd_options_is_set(o, keys[i]))
            continue;
        status = qd_options_value_text(o, keys[i], &text);
        if (status == QD_OK)
            qd_json_put_string(w, keys[i], text);
        free(text);
    }
    qd_json_end(w);
    qd_options_destroy(o);
    return status;
}

static qd_status put_result(const job *j, const qd_plan_report *report, qd_strbuf *out)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_status status = QD_OK;
    qd_json_list_begin(&w, NULL);
    for (int i = 0; i < report->count && status == QD_OK; i++)
        status = put_keys(&w, j->owner->keys, report->choices[i], j->run);
    qd_json_end(&w);
    qd_strbuf_puts(out, ",\"plan\":");
    qd_plan_report_json(report, out);
    qd_strbuf_puts(out, ",\"keys\":");
    qd_strbuf_puts(out, text.failed ? "[]" : text.data);
    qd_strbuf_free(&text);
    return status;
}

/* Why a search failed, as a member of the answer. */
static void put_error(qd_strbuf *out)
{
    qd_json_writer w = qd_json_writer_on(out);
    qd_strbuf_clear(out);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "error", qd_error_message());
    qd_json_end(&w);
    qd_error_clear();
    if (!out->failed) { /* without the braces */
        out->data[0] = ',';
        out->data[--out->length] = '\0';
    }
}

static void *run_job(void *context)
{
    job *j = context;
    qd_plan_report *report = NULL;
    qd_strbuf result = {0};
    qd_status status = qd_plan_watched(j->run, j->layout, on_progress, j, &report);
    if (status == QD_OK)
        status = put_result(j, report, &result);
    if (status != QD_OK)
        put_error(&result);
    qd_plan_report_destroy(report);
    pthread_mutex_lock(&j->owner->mutex);
    j->result = result;
    j->seconds = qd_clock_now() - j->begin;
    j->phase = status == QD_OK ? DONE : FAILED;
    pthread_mutex_unlock(&j->owner->mutex);
    return NULL;
}

static void free_job(job *j)
{
    if (j->used)
        pthread_join(j->thread, NULL);
    qd_options_destroy(j->run);
    qd_options_destroy(j->layout);
    qd_strbuf_free(&j->result);
    memset(j, 0, sizeof *j);
}

qd_status qd_search_create(const char *const *keys, qd_search **search)
{
    qd_search *s = calloc(1, sizeof *s);
    if (!s)
        return QD_FAIL(QD_NO_MEMORY, "serve: no memory for the planner");
    s->keys = keys;
    pthread_mutex_init(&s->mutex, NULL);
    *search = s;
    return QD_OK;
}

void qd_search_destroy(qd_search *s)
{
    if (!s)
        return;
    for (int i = 0; i < MOST_SEARCHES; i++)
        atomic_store(&s->jobs[i].stop, true);
    for (int i = 0; i < MOST_SEARCHES; i++)
        free_job(&s->jobs[i]);
    pthread_mutex_destroy(&s->mutex);
    free(s);
}

/* A job that is not in use; the caller holds the mutex. NULL: none. */
static job *take_job(qd_search *s)
{
    for (int i = 0; i < MOST_SEARCHES; i++) {
        job *j = &s->jobs[i];
        if (j->used && j->phase == RUNNING)
            continue;
        free_job(j); /* its thread has nothing left to do */
        if (s->current == j)
            s->current = NULL;
        return j;
    }
    return NULL;
}

qd_status qd_search_start(qd_search *s, qd_options *run, qd_options *layout)
{
    qd_status status = QD_OK;
    pthread_mutex_lock(&s->mutex);
    if (s->current)
        atomic_store(&s->current->stop, true);
    job *j = take_job(s);
    if (!j) {
        status = QD_FAIL(QD_BUSY, "stopped searches have not ended yet: try again in a few seconds");
        qd_options_destroy(run);
        qd_options_destroy(layout);
    } else {
        j->owner = s;
        j->run = run;
        j->layout = layout;
        j->begin = qd_clock_now();
        int error = pthread_create(&j->thread, NULL, run_job, j);
        j->used = error == 0;
        if (error == 0)
            s->current = j;
        else {
            status = QD_FAIL(QD_SYSTEM, "cannot start a thread: %s", qd_thread_why(error));
            free_job(j);
        }
    }
    pthread_mutex_unlock(&s->mutex);
    return status;
}

qd_status qd_search_progress(qd_search *s, qd_strbuf *json)
{
    static const char *const phases[] = {"running", "done", "failed"};
    static const job none;
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    pthread_mutex_lock(&s->mutex);
    const job *j = s->current ? s->current : &none;
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "phase", j->used ? phases[j->phase] : "none");
    qd_json_put_double(&w, "seconds", j->used && j->phase == RUNNING ? qd_clock_now() - j->begin : j->seconds);
    qd_json_put_int(&w, "tried", j->tried);
    qd_json_put_int(&w, "too_large", j->too_large);
    qd_json_put_int(&w, "refused", j->refused);
    qd_json_put_string(&w, "best", j->best);
    qd_json_put_double(&w, "best_seconds", j->best_seconds);
    qd_json_end(&w);
    if (!text.failed) {
        qd_strbuf_append(json, text.data, text.length - 1);
        if (j->result.data)
            qd_strbuf_puts(json, j->result.data);
        qd_strbuf_puts(json, "}");
    }
    json->failed = json->failed || text.failed || j->result.failed;
    pthread_mutex_unlock(&s->mutex);
    qd_strbuf_free(&text);
    return QD_OK;
}

void qd_search_stop(qd_search *s)
{
    pthread_mutex_lock(&s->mutex);
    if (s->current)
        atomic_store(&s->current->stop, true);
    pthread_mutex_unlock(&s->mutex);
}
