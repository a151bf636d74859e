/* Requests of the planner's page: see planner.h. */
#include "serve/planner.h"

#include "base/clock.h"
#include "base/text/json_writer.h"
#include "report/page.h"

#include <pthread.h>
#include <quadrille/config.h>
#include <quadrille/plan.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The keys that a search decides; the page sets them to a choice. */
static const char *const layout_keys[] = {
    "parallel.dp",       "parallel.tp",       "parallel.tp_overlap",     "parallel.cp", "parallel.cp_mode",
    "parallel.pp",       "parallel.schedule", "parallel.virtual_stages", "parallel.ep", "parallel.etp",
    "parallel.zero",     "parallel.bucket_mb", "train.micro_batch",      "train.recompute", "train.offload",
};
/* The keys of the run that the page offers. */
static const char *const run_keys[] = {
    "model.layers",  "model.hidden", "model.heads",        "model.kv_heads",  "model.ffn",       "model.vocab",
    "model.experts", "data.seq",     "train.global_batch", "train.precision", "train.optimizer", "parallel.ranks",
};
enum { LAYOUT_KEYS = sizeof layout_keys / sizeof *layout_keys, RUN_KEYS = sizeof run_keys / sizeof *run_keys };

struct qd_planner {
    pthread_mutex_t mutex; /* of the thread and what follows */
    bool started;          /* the thread has to be joined */
    pthread_t thread;
    qd_options *options, *layout; /* of the search; layout NULL: none */
    atomic_bool stop;
    pthread_mutex_t state; /* of what follows, which the search changes */
    enum { NONE, RUNNING, DONE, FAILED } phase;
    double begin, seconds;
    int tried, too_large, refused;
    char best[128];
    double best_seconds;
    qd_strbuf result; /* JSON members of the end */
};

/* Whether a request may set a key: numbers and enumerated words, and the name of a preset. */
static qd_status check_key(const qd_options *o, const char *assignment)
{
    static const char *const sections[] = {"model.", "data.seq", "train.",    "parallel.", "accelerator.",
                                           "node.",  "network.", "software.", "cost."};
    char key[128];
    size_t length = strcspn(assignment, "=");
    const char *const *presets;
    bool known = false;
    if (assignment[length] != '=' || length >= sizeof key)
        return QD_FAIL(QD_USAGE, "'%.100s' is not of the form key=value", assignment);
    memcpy(key, assignment, length);
    key[length] = '\0';
    const qd_option *option = qd_options_find(o, key);
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        known = known || strncmp(key, sections[i], strlen(sections[i])) == 0;
    if (!option || !known || (option->type == QD_OPTION_STRING && strcmp(key, "model.preset") != 0))
        return QD_FAIL(QD_USAGE, "'%.100s' cannot be set here", key);
    if (option->type != QD_OPTION_STRING)
        return QD_OK;
    QD_TRY(qd_config_presets(false, &presets));
    for (int i = 0; presets[i]; i++)
        if (strcmp(presets[i], assignment + length + 1) == 0)
            return QD_OK;
    return QD_FAIL(QD_USAGE, "there is no preset '%.100s'", assignment + length + 1);
}

static qd_status load_cluster(qd_options *o, const char *name)
{
    const char *const *names = qd_cluster_names();
    for (int i = 0; names[i]; i++)
        if (strcmp(names[i], name) == 0)
            return qd_cluster_load(o, name);
    return QD_FAIL(QD_USAGE, "there is no built-in cluster '%.100s'", name);
}

/* What else a request contains. */
typedef struct request_flags {
    bool layout, timeline;
} request_flags;

/* Reads a request into two sets of options: with and without the layout. */
static qd_status read_request(const char *request, qd_options **run, qd_options **layout, request_flags *flags)
{
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    char *copy = strdup(request), *rest = NULL;
    const char *cluster = "h100";
    qd_status status = copy ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for a request");
    *flags = (request_flags){0};
    if (status == QD_OK)
        status = qd_options_create(tables, 2, run);
    if (status == QD_OK)
        status = qd_options_create(tables, 2, layout);
    for (char *line = copy ? strtok_r(copy, "\n", &rest) : NULL; line && status == QD_OK; line = strtok_r(NULL, "\n", &rest)) {
        size_t word = strcspn(line, " ");
        const char *value = line[word] ? line + word + 1 : "";
        bool set = strncmp(line, "set ", 4) == 0, chosen = strncmp(line, "layout ", 7) == 0;
        if (strncmp(line, "cluster ", 8) == 0)
            cluster = value;
        else if (strcmp(line, "timeline") == 0)
            flags->timeline = true;
        else if (!set && !chosen)
            status = QD_FAIL(QD_USAGE, "'%.100s': a line starts with cluster, set, layout or timeline", line);
        else if ((status = check_key(*run, value)) == QD_OK)
            status = qd_options_assign(*layout, value);
        if (status == QD_OK && set)
            status = qd_options_assign(*run, value);
        flags->layout = flags->layout || chosen;
    }
    if (status == QD_OK)
        status = load_cluster(*run, cluster);
    if (status == QD_OK)
        status = load_cluster(*layout, cluster);
    free(copy);
    return status;
}

static void put_key(qd_json_writer *w, const qd_option_table *table, const char *key, bool layout)
{
    const qd_option *o = NULL;
    for (int i = 0; i < table->count && !o; i++)
        o = strcmp(table->options[i].key, key) == 0 ? &table->options[i] : NULL;
    if (!o)
        return;
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "key", key);
    qd_json_put_bool(w, "layout", layout);
    qd_json_put_string(w, "default", o->fallback ? o->fallback : "");
    if (o->type == QD_OPTION_ENUM)
        qd_json_put_string(w, "choices", o->choices);
    qd_json_put_string(w, "help", o->help);
    qd_json_end(w);
}

qd_status qd_planner_choices(qd_strbuf *json)
{
    qd_json_writer w = qd_json_writer_on(json);
    const char *const *presets, *const *clusters = qd_cluster_names();
    const qd_option_table table = qd_config_table();
    QD_TRY(qd_config_presets(true, &presets));
    qd_json_object_begin(&w, NULL);
    qd_json_list_begin(&w, "presets");
    for (int i = 0; presets[i]; i++) {
        int64_t parameters = 0;
        char text[200] = "";
        QD_TRY(qd_config_preset_text(presets[i], &parameters, text, sizeof text));
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "name", presets[i]);
        qd_json_put_int(&w, "parameters", parameters);
        qd_json_put_string(&w, "text", text);
        qd_json_end(&w);
    }
    qd_json_end(&w);
    qd_json_list_begin(&w, "clusters");
    for (int i = 0; clusters[i]; i++)
        qd_json_put_string(&w, NULL, clusters[i]);
    qd_json_end(&w);
    qd_json_list_begin(&w, "keys");
    for (int i = 0; i < RUN_KEYS; i++)
        put_key(&w, &table, run_keys[i], false);
    for (int i = 0; i < LAYOUT_KEYS; i++)
        put_key(&w, &table, layout_keys[i], true);
    qd_json_end(&w);
    qd_json_end(&w);
    return QD_OK;
}

static qd_status put_step(const qd_options *o, bool timeline, qd_strbuf *json)
{
    qd_simulation *simulation = NULL;
    qd_simulation_view *view = NULL;
    char *yaml = NULL;
    double begin = qd_clock_now();
    qd_status status = qd_simulate(o, &simulation);
    if (status == QD_OK)
        status = qd_simulation_describe(simulation, timeline, &view);
    if (status == QD_OK)
        status = qd_plan_yaml(o, &yaml);
    if (status == QD_OK) {
        qd_strbuf_puts(json, "{\"report\":");
        status = qd_report_data(qd_simulation_view_report(view), json);
    }
    if (status == QD_OK) {
        qd_strbuf text = {0};
        qd_json_writer w = qd_json_writer_on(&text);
        qd_strbuf_puts(json, ",\"simulation\":");
        qd_simulation_json(simulation, json);
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "yaml", yaml);
        qd_json_put_double(&w, "seconds", qd_clock_now() - begin);
        qd_json_end(&w);
        qd_strbuf_puts(json, ",");
        qd_strbuf_puts(json, text.failed ? "\"yaml\":\"\"}" : text.data + 1);
        qd_strbuf_free(&text);
    }
    free(yaml);
    qd_simulation_view_destroy(view);
    qd_simulation_destroy(simulation);
    return status;
}

qd_status qd_planner_step(const char *request, qd_strbuf *json)
{
    qd_options *run = NULL, *layout = NULL;
    request_flags flags;
    qd_status status = read_request(request, &run, &layout, &flags);
    if (status == QD_OK)
        status = put_step(layout, flags.timeline, json);
    qd_options_destroy(run);
    qd_options_destroy(layout);
    return status;
}

static bool on_progress(void *context, const qd_plan_progress *progress)
{
    qd_planner *p = context;
    pthread_mutex_lock(&p->state);
    p->seconds = progress->seconds;
    p->tried = progress->tried;
    p->too_large = progress->too_large;
    p->refused = progress->refused;
    snprintf(p->best, sizeof p->best, "%s", progress->layout);
    p->best_seconds = progress->step_seconds;
    pthread_mutex_unlock(&p->state);
    return !atomic_load(&p->stop);
}

/* What a choice sets, as an object of keys. */
static qd_status put_keys(qd_json_writer *w, const qd_plan_choice *choice, const qd_options *options)
{
    qd_options *o = NULL;
    qd_status status = qd_options_copy(options, &o);
    if (status == QD_OK)
        status = qd_plan_apply(choice, o);
    qd_json_object_begin(w, NULL);
    for (int i = 0; i < LAYOUT_KEYS && status == QD_OK; i++) {
        char *text = NULL;
        if (!qd_options_is_set(o, layout_keys[i]))
            continue;
        status = qd_options_value_text(o, layout_keys[i], &text);
        if (status == QD_OK)
            qd_json_put_string(w, layout_keys[i], text);
        free(text);
    }
    qd_json_end(w);
    qd_options_destroy(o);
    return status;
}

static qd_status put_result(const qd_planner *p, const qd_plan_report *report, qd_strbuf *out)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_status status = QD_OK;
    qd_json_list_begin(&w, NULL);
    for (int i = 0; i < report->count && status == QD_OK; i++)
        status = put_keys(&w, report->choices[i], p->options);
    qd_json_end(&w);
    qd_strbuf_puts(out, ",\"plan\":");
    qd_plan_report_json(report, out);
    qd_strbuf_puts(out, ",\"keys\":");
    qd_strbuf_puts(out, text.failed ? "[]" : text.data);
    qd_strbuf_free(&text);
    return status;
}

static void *search(void *context)
{
    qd_planner *p = context;
    qd_plan_report *report = NULL;
    qd_strbuf result = {0};
    qd_status status = qd_plan_watched(p->options, p->layout, on_progress, p, &report);
    if (status == QD_OK)
        status = put_result(p, report, &result);
    if (status != QD_OK) {
        qd_json_writer w = qd_json_writer_on(&result);
        qd_strbuf_clear(&result);
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "error", qd_error_message());
        qd_json_end(&w);
        qd_error_clear();
        if (!result.failed) { /* a member of the answer: without the braces */
            result.data[0] = ',';
            result.data[--result.length] = '\0';
        }
    }
    qd_plan_report_destroy(report);
    pthread_mutex_lock(&p->state);
    qd_strbuf_free(&p->result);
    p->result = result;
    p->seconds = qd_clock_now() - p->begin;
    p->phase = status == QD_OK ? DONE : FAILED;
    pthread_mutex_unlock(&p->state);
    return NULL;
}

/* Ends the thread; the caller holds `mutex`. */
static void end_search(qd_planner *p)
{
    if (p->started) {
        atomic_store(&p->stop, true);
        pthread_join(p->thread, NULL);
        p->started = false;
    }
    qd_options_destroy(p->options);
    qd_options_destroy(p->layout);
    p->options = p->layout = NULL;
}

qd_status qd_planner_create(qd_planner **planner)
{
    qd_planner *p = calloc(1, sizeof *p);
    if (!p)
        return QD_FAIL(QD_NO_MEMORY, "serve: no memory for the planner");
    pthread_mutex_init(&p->mutex, NULL);
    pthread_mutex_init(&p->state, NULL);
    *planner = p;
    return QD_OK;
}

void qd_planner_destroy(qd_planner *p)
{
    if (!p)
        return;
    end_search(p);
    qd_strbuf_free(&p->result);
    pthread_mutex_destroy(&p->mutex);
    pthread_mutex_destroy(&p->state);
    free(p);
}

/* The caller holds `mutex`. */
static qd_status start_search(qd_planner *p, const char *request)
{
    request_flags flags;
    end_search(p);
    QD_TRY(read_request(request, &p->options, &p->layout, &flags));
    if (!flags.layout) {
        qd_options_destroy(p->layout);
        p->layout = NULL;
    }
    atomic_store(&p->stop, false);
    pthread_mutex_lock(&p->state);
    p->phase = RUNNING;
    p->begin = qd_clock_now();
    p->tried = p->too_large = p->refused = 0;
    p->seconds = p->best_seconds = 0.0;
    p->best[0] = '\0';
    qd_strbuf_free(&p->result);
    pthread_mutex_unlock(&p->state);
    int error = pthread_create(&p->thread, NULL, search, p);
    if (error != 0) {
        pthread_mutex_lock(&p->state);
        p->phase = NONE;
        pthread_mutex_unlock(&p->state);
        return QD_FAIL(QD_SYSTEM, "cannot start a thread: %s", strerror(error));
    }
    p->started = true;
    return QD_OK;
}

qd_status qd_planner_search(qd_planner *p, const char *request, qd_strbuf *json)
{
    pthread_mutex_lock(&p->mutex);
    qd_status status = start_search(p, request);
    pthread_mutex_unlock(&p->mutex);
    QD_TRY(status);
    return qd_planner_progress(p, json);
}

qd_status qd_planner_progress(qd_planner *p, qd_strbuf *json)
{
    static const char *const phases[] = {"none", "running", "done", "failed"};
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    pthread_mutex_lock(&p->state);
    qd_json_object_begin(&w, NULL);
    qd_json_put_string(&w, "phase", phases[p->phase]);
    qd_json_put_double(&w, "seconds", p->phase == RUNNING ? qd_clock_now() - p->begin : p->seconds);
    qd_json_put_int(&w, "tried", p->tried);
    qd_json_put_int(&w, "too_large", p->too_large);
    qd_json_put_int(&w, "refused", p->refused);
    qd_json_put_string(&w, "best", p->best);
    qd_json_put_double(&w, "best_seconds", p->best_seconds);
    qd_json_end(&w);
    if (!text.failed) {
        qd_strbuf_append(json, text.data, text.length - 1);
        if (p->phase >= DONE && p->result.data)
            qd_strbuf_puts(json, p->result.data);
        qd_strbuf_puts(json, "}");
    }
    json->failed = json->failed || text.failed;
    pthread_mutex_unlock(&p->state);
    qd_strbuf_free(&text);
    return QD_OK;
}

qd_status qd_planner_stop(qd_planner *p, qd_strbuf *json)
{
    atomic_store(&p->stop, true);
    return qd_planner_progress(p, json);
}
