/* Requests of the planner's page: see planner.h. */
#include "serve/planner.h"

#include "base/clock.h"
#include "base/text/json_writer.h"
#include "report/page.h"
#include "serve/search.h"

#include <math.h>
#include <pthread.h>
#include <quadrille/config.h>
#include <quadrille/plan.h>
#include <quadrille/report.h>
#include <stdlib.h>
#include <string.h>

/* The keys that a search decides; the page sets them to a choice. */
static const char *const layout_keys[] = {
    "parallel.dp",       "parallel.tp",       "parallel.tp_overlap",     "parallel.cp", "parallel.cp_mode",
    "parallel.pp",       "parallel.schedule", "parallel.virtual_stages", "parallel.ep", "parallel.etp",
    "parallel.zero",     "parallel.bucket_mb", "train.micro_batch",      "train.recompute", "train.offload",
    NULL,
};
/* The keys of the run that the page offers. */
static const char *const run_keys[] = {
    "model.layers",  "model.hidden", "model.heads",        "model.kv_heads",  "model.ffn",       "model.vocab",
    "model.experts", "data.seq",     "train.global_batch", "train.precision", "train.optimizer", "parallel.ranks",
};
enum { LAYOUT_KEYS = sizeof layout_keys / sizeof *layout_keys - 1, RUN_KEYS = sizeof run_keys / sizeof *run_keys };

/* A simulated step with the options that it was read from. The page asks for the figures first,
 * then for the timeline of the same step and, when the user zooms, for parts of it; it is simulated
 * once. */
typedef struct simulated {
    char *request;
    qd_options *options;
    qd_simulation *simulation;
} simulated;

struct qd_planner {
    qd_search *search;
    pthread_mutex_t mutex; /* of `last` */
    simulated last;
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

/* Reads a request into two sets of options: with and without the layout. has_layout: the request
 * has one. */
static qd_status read_request(const char *request, qd_options **run, qd_options **layout, bool *has_layout)
{
    const qd_option_table tables[] = {qd_config_table(), qd_cluster_table()};
    char *copy = strdup(request), *rest = NULL;
    const char *cluster = "h100";
    qd_status status = copy ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for a request");
    *has_layout = false;
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
        else if (!set && !chosen)
            status = QD_FAIL(QD_USAGE, "'%.100s': a line starts with cluster, set or layout; timeline is the last one", line);
        else if ((status = check_key(*run, value)) == QD_OK)
            status = qd_options_assign(*layout, value);
        if (status == QD_OK && set)
            status = qd_options_assign(*run, value);
        *has_layout = *has_layout || chosen;
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

static void free_simulated(simulated *s)
{
    qd_simulation_destroy(s->simulation);
    qd_options_destroy(s->options);
    free(s->request);
    *s = (simulated){0};
}

/* Exchanges the step that is kept. */
static simulated swap_last(qd_planner *p, simulated with)
{
    pthread_mutex_lock(&p->mutex);
    simulated last = p->last;
    p->last = with;
    pthread_mutex_unlock(&p->mutex);
    return last;
}

static qd_status simulate(const char *request, simulated *out)
{
    qd_options *run = NULL;
    bool has_layout;
    *out = (simulated){.request = strdup(request)};
    qd_status status = out->request ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for a request");
    if (status == QD_OK)
        status = read_request(request, &run, &out->options, &has_layout);
    if (status == QD_OK)
        status = qd_simulate(out->options, &out->simulation);
    qd_options_destroy(run);
    if (status != QD_OK)
        free_simulated(out);
    return status;
}

/* What a request wants of the timeline. */
typedef struct wanted {
    bool timeline;
    int pixels;         /* of the drawing; 0: all events */
    double begin, end;  /* the part that is shown; equal: everything */
} wanted;

static qd_status put_report(const simulated *s, const wanted *want, qd_strbuf *json)
{
    qd_simulation_view *view = NULL;
    QD_TRY(qd_simulation_describe(s->simulation, want->timeline, &view));
    qd_report report = *qd_simulation_view_report(view);
    qd_report_timeline timeline = qd_report_timeline_default();
    if (report.simulated) {
        timeline = *report.simulated;
        timeline.pixels = want->pixels;
        timeline.window_begin = want->begin;
        timeline.window_end = want->end;
        report.simulated = &timeline;
    }
    qd_strbuf_puts(json, "{\"report\":");
    qd_status status = qd_report_data(&report, json);
    qd_simulation_view_destroy(view);
    return status;
}

static qd_status put_step(const simulated *s, const wanted *want, double begin, qd_strbuf *json)
{
    char *yaml = NULL;
    qd_status status = qd_plan_yaml(s->options, &yaml);
    if (status == QD_OK)
        status = put_report(s, want, json);
    if (status == QD_OK) {
        qd_strbuf text = {0};
        qd_json_writer w = qd_json_writer_on(&text);
        qd_strbuf_puts(json, ",\"simulation\":");
        qd_simulation_json(s->simulation, json);
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "yaml", yaml);
        qd_json_put_double(&w, "seconds", qd_clock_now() - begin);
        qd_json_end(&w);
        qd_strbuf_puts(json, ",");
        qd_strbuf_puts(json, text.failed ? "\"yaml\":\"\"}" : text.data + 1);
        qd_strbuf_free(&text);
    }
    free(yaml);
    return status;
}

/* Whether the last line of a request asks for the timeline. Removes that line. */
static qd_status take_timeline(char *request, wanted *want)
{
    static const char word[] = "timeline";
    enum { LENGTH = sizeof word - 1, MOST_PIXELS = 1 << 16 };
    char *before = strrchr(request, '\n'), *line = before ? before + 1 : request, *rest;
    *want = (wanted){0};
    if (strncmp(line, word, LENGTH) != 0 || (line[LENGTH] != ' ' && line[LENGTH] != '\0'))
        return QD_OK;
    want->timeline = true;
    rest = line + LENGTH;
    if (*rest) {
        long pixels = strtol(rest, &rest, 10);
        want->pixels = pixels > 0 && pixels <= MOST_PIXELS ? (int)pixels : 0;
        if (*rest) {
            want->begin = strtod(rest, &rest);
            want->end = strtod(rest, &rest);
        }
        if (want->pixels == 0 || *rest || !(want->end >= want->begin) || !isfinite(want->end - want->begin))
            return QD_FAIL(QD_USAGE, "'%.100s' is not of the form timeline [PIXELS [BEGIN END]]", line);
    }
    *(before ? before : line) = '\0';
    return QD_OK;
}

qd_status qd_planner_step(qd_planner *p, const char *request, qd_strbuf *json)
{
    double begin = qd_clock_now();
    char *text = strdup(request);
    simulated s = {0};
    wanted want;
    if (!text)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a request");
    qd_status status = take_timeline(text, &want);
    if (want.timeline)
        s = swap_last(p, (simulated){0});
    if (status == QD_OK && (!s.request || strcmp(s.request, text) != 0)) {
        free_simulated(&s);
        status = simulate(text, &s);
    }
    if (status == QD_OK)
        status = put_step(&s, &want, begin, json);
    if (s.request)
        s = swap_last(p, s);
    free_simulated(&s);
    free(text);
    return status;
}

qd_status qd_planner_create(qd_planner **planner)
{
    qd_planner *p = calloc(1, sizeof *p);
    if (!p)
        return QD_FAIL(QD_NO_MEMORY, "serve: no memory for the planner");
    qd_status status = qd_search_create(layout_keys, &p->search);
    if (status != QD_OK) {
        free(p);
        return status;
    }
    pthread_mutex_init(&p->mutex, NULL);
    *planner = p;
    return QD_OK;
}

void qd_planner_destroy(qd_planner *p)
{
    if (!p)
        return;
    qd_search_destroy(p->search);
    free_simulated(&p->last);
    pthread_mutex_destroy(&p->mutex);
    free(p);
}

qd_status qd_planner_search(qd_planner *p, const char *request, qd_strbuf *json)
{
    qd_options *run = NULL, *layout = NULL;
    bool has_layout;
    qd_status status = read_request(request, &run, &layout, &has_layout);
    if (status != QD_OK || !has_layout) {
        qd_options_destroy(layout);
        layout = NULL;
    }
    if (status != QD_OK) {
        qd_options_destroy(run);
        return status;
    }
    QD_TRY(qd_search_start(p->search, run, layout));
    return qd_search_progress(p->search, json);
}

qd_status qd_planner_progress(qd_planner *p, qd_strbuf *json)
{
    return qd_search_progress(p->search, json);
}

qd_status qd_planner_stop(qd_planner *p, qd_strbuf *json)
{
    qd_search_stop(p->search);
    return qd_search_progress(p->search, json);
}
