/* A simulated step as the description of a report: figures, memory and timeline. */
#include "sim/simulate_impl.h"

#include "base/arena.h"
#include "base/text/text.h"

#include <quadrille/report.h>
#include <stdio.h>
#include <stdlib.h>

enum { FIGURES = 10, KINDS = QD_SIM_LINES };

struct qd_simulation_view {
    qd_report report;
    qd_report_timeline timeline;
    qd_arena *arena; /* owns the timeline's contents */
    char values[FIGURES][96], remarks[FIGURES][160];
    qd_report_figure figures[FIGURES];
    int figure_count;
    const char *notes[QD_SIM_LOSSES];
    const char *kinds[KINDS];
    int64_t planned[KINDS];
    qd_report_memory_rank rank;
    qd_report_memory memory;
    char label[64], subtitle[256];
};

/* A figure whose value and note are written by the caller. */
static qd_report_figure *add_figure(qd_simulation_view *p, const char *name, const char *unit, char **value, char **note)
{
    qd_report_figure *f = &p->figures[p->figure_count];
    *value = p->values[p->figure_count];
    *note = p->remarks[p->figure_count++];
    *f = (qd_report_figure){.name = name, .value = *value, .unit = unit, .note = *note};
    return f;
}

/* "dp 8.9 ms, tp 120 ms": communication that is not overlapped, by axis. Returns the sum. */
static double put_exposed(const qd_sim_report *r, char *text, size_t size)
{
    double sum = 0.0;
    size_t used = 0;
    for (int i = 0; i < r->exposed_count && used < size; i++) {
        char time[32];
        qd_text_unit(r->exposed[i].value, "s", time, sizeof time);
        used += (size_t)snprintf(text + used, size - used, "%s%s %s", i ? ", " : "", r->exposed[i].name, time);
        sum += r->exposed[i].value;
    }
    return sum;
}

static void fill_figures(qd_simulation_view *p, const qd_sim_report *r)
{
    char *value, *note, amount[32];
    const size_t room = sizeof p->values[0], wide = sizeof p->remarks[0];
    add_figure(p, "step time", NULL, &value, &note);
    qd_text_unit(r->step_seconds, "s", value, room);
    qd_text_count((double)r->tokens_per_step, amount, sizeof amount);
    snprintf(note, wide, "%lld × %lld = %s tokens", (long long)r->global_batch, (long long)r->seq, amount);
    add_figure(p, "speed", "tokens/s", &value, &note);
    qd_text_count(r->tokens_per_second, value, room);
    qd_text_count(r->tokens_per_gpu_second, amount, sizeof amount);
    snprintf(note, wide, "%s per GPU", amount);
    add_figure(p, "MFU", "%", &value, &note);
    snprintf(value, room, "%.1f", 100.0 * r->mfu);
    snprintf(note, wide, "%.1f %% with causal attention, %.1f %% of all FLOPs", 100.0 * r->mfu_causal, 100.0 * r->hfu);
    add_figure(p, "communication exposed", "%", &value, &note);
    snprintf(value, room, "%.1f", 100.0 * put_exposed(r, note, wide) / r->step_seconds);
    if (r->stages > 1) {
        add_figure(p, "bubble", "%", &value, &note);
        snprintf(value, room, "%.1f", 100.0 * r->bubble_seconds / r->step_seconds);
        snprintf(note, wide, "waiting for other stages, mean of %d", r->stages);
    }
    add_figure(p, "memory per rank", NULL, &value, &note);
    qd_text_bytes(r->memory_bytes, value, room);
    qd_text_bytes(r->memory_limit, amount, sizeof amount);
    snprintf(note, wide, r->fits ? "of %s" : "does not fit: the device has %s", amount);
    if (r->watts > 0.0) {
        add_figure(p, "energy per step", NULL, &value, &note);
        qd_text_unit(r->joules_per_step, "J", value, room);
        qd_text_unit(r->watts, "W", note, wide);
    }
    if (r->cost_per_step > 0.0) {
        add_figure(p, "cost per step", NULL, &value, &note);
        snprintf(value, room, "%.4g", r->cost_per_step);
        snprintf(note, wide, "%.4g per million tokens", 1e6 * r->cost_per_step / (double)r->tokens_per_step);
    }
    add_figure(p, "layout", NULL, &value, &note);
    snprintf(value, room, "%s", r->layout[0] ? r->layout : "1 rank");
    snprintf(note, wide, "%d × %s", r->gpus, r->cluster);
}

static void fill(qd_simulation_view *p, const qd_sim_report *r)
{
    char parameters[32];
    fill_figures(p, r);
    for (int i = 0; i < r->loss_count; i++)
        p->notes[i] = r->loss[i];
    for (int i = 0; i < r->memory_count; i++) {
        p->kinds[i] = r->memory[i].name;
        p->planned[i] = (int64_t)r->memory[i].value;
    }
    qd_text_count((double)r->parameters, parameters, sizeof parameters);
    snprintf(p->label, sizeof p->label, r->stages > 1 ? "stage %d, the fullest" : "every rank", r->fullest_stage);
    snprintf(p->subtitle, sizeof p->subtitle, "%s parameters · a step simulated with the software profile %s", parameters, r->profile);
    p->rank = (qd_report_memory_rank){.label = p->label, .planned = p->planned, .allocated = -1, .resident = -1};
    p->memory = (qd_report_memory){
        .size = sizeof p->memory,
        .kinds = p->kinds, .kind_count = r->memory_count, .ranks = &p->rank, .rank_count = 1, .capacity = r->memory_limit};
    p->report = (qd_report){.size = sizeof p->report,
                          .title = r->model, .subtitle = p->subtitle, .figures = p->figures, .figure_count = p->figure_count,
                          .notes = p->notes, .note_count = r->loss_count, .memory = &p->memory};
}

static qd_status add_timeline(qd_simulation_view *v, const qd_simulation *simulation)
{
    QD_TRY(qd_arena_create(&v->arena));
    QD_TRY(qd_simulation_timeline(simulation, v->arena, &v->timeline));
    v->report.simulated = &v->timeline;
    return QD_OK;
}

qd_status qd_simulation_describe(const qd_simulation *simulation, bool timeline, qd_simulation_view **view)
{
    qd_simulation_view *v = calloc(1, sizeof *v);
    *view = NULL;
    if (!v)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the report of a simulation");
    fill(v, qd_simulation_report(simulation));
    qd_status status = timeline ? add_timeline(v, simulation) : QD_OK;
    if (status != QD_OK) {
        qd_simulation_view_destroy(v);
        return status;
    }
    *view = v;
    return QD_OK;
}

const qd_report *qd_simulation_view_report(const qd_simulation_view *view)
{
    return &view->report;
}

void qd_simulation_view_destroy(qd_simulation_view *view)
{
    if (!view)
        return;
    qd_arena_destroy(view->arena);
    free(view);
}
