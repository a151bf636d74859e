/* A simulated step as an HTML report. */
#include "simulate.h"

#include <errno.h>
#include <quadrille/report.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FIGURES = 8, KINDS = QD_SIM_LINES };

typedef struct page {
    char values[FIGURES][64];
    qd_report_figure figures[FIGURES];
    int figure_count;
    const char *notes[QD_SIM_LOSSES];
    const char *kinds[KINDS];
    int64_t planned[KINDS];
    qd_report_memory_rank rank;
    qd_report_memory memory;
    char label[64], subtitle[256];
} page;

static void put_figure(page *p, const char *name, const char *unit, const char *format, double value)
{
    qd_report_figure *f = &p->figures[p->figure_count];
    snprintf(p->values[p->figure_count], sizeof p->values[0], format, value);
    *f = (qd_report_figure){.name = name, .value = p->values[p->figure_count++], .unit = unit};
}

static void fill(page *p, const qd_sim_report *r, qd_report *report)
{
    put_figure(p, "step", "s", "%.4g", r->step_seconds);
    put_figure(p, "tokens per second", "", "%.4g", r->tokens_per_second);
    put_figure(p, "per GPU", "tokens/s", "%.4g", r->tokens_per_gpu_second);
    put_figure(p, "MFU", "%", "%.1f", 100.0 * r->mfu);
    put_figure(p, "MFU, causal attention", "%", "%.1f", 100.0 * r->mfu_causal);
    put_figure(p, "waiting for other stages", "s", "%.4g", r->bubble_seconds);
    put_figure(p, "memory", "GiB", "%.1f", (double)r->memory_bytes / 1073741824.0);
    for (int i = 0; i < r->loss_count; i++)
        p->notes[i] = r->loss[i];
    for (int i = 0; i < r->memory_count; i++) {
        p->kinds[i] = r->memory[i].name;
        p->planned[i] = (int64_t)r->memory[i].value;
    }
    snprintf(p->label, sizeof p->label, r->stages > 1 ? "stage %d, the fullest" : "every rank", r->fullest_stage);
    snprintf(p->subtitle, sizeof p->subtitle, "%s on %d x %s, simulated", r->layout[0] ? r->layout : "one rank", r->gpus, r->cluster);
    p->rank = (qd_report_memory_rank){.label = p->label, .planned = p->planned, .allocated = -1, .resident = -1};
    p->memory = (qd_report_memory){.kinds = p->kinds, .kind_count = r->memory_count, .ranks = &p->rank, .rank_count = 1, .capacity = r->memory_limit};
    *report = (qd_report){.title = r->model, .subtitle = p->subtitle, .figures = p->figures, .figure_count = p->figure_count,
                          .notes = p->notes, .note_count = r->loss_count, .memory = &p->memory};
}

/* The timeline goes through a trace, which is what reports of measured runs are made from too. */
qd_status simulate_write_report(const qd_simulation *simulation, const char *path)
{
    page p = {0};
    qd_report report;
    qd_report_trace *trace = NULL;
    char file[512];
    if (snprintf(file, sizeof file, "%s.XXXXXX", path) >= (int)sizeof file)
        return QD_FAIL(QD_USAGE, "simulate: --report: the name is too long");
    int fd = mkstemp(file);
    if (fd < 0)
        return QD_FAIL(QD_IO, "%s cannot be written: %s", path, strerror(errno));
    close(fd);
    qd_status status = qd_simulation_trace(simulation, file);
    if (status == QD_OK)
        status = qd_report_trace_load(file, "simulated", &trace);
    unlink(file);
    if (status == QD_OK) {
        fill(&p, qd_simulation_report(simulation), &report);
        report.simulated = qd_report_trace_timeline(trace);
        status = qd_report_write(&report, path);
    }
    qd_report_trace_destroy(trace);
    return status;
}
