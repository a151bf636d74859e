/* The report: one HTML page, complete in itself, that shows a run: figures, curves, memory by kind
 * and rank, timelines of all ranks. It is made from the folder of a run, or from a description in
 * memory, which is how simulated runs are shown.
 *
 * A description borrows everything it points to; nothing of it is kept after a call. Texts are
 * UTF-8 and may be NULL where nothing is to be said. Nothing here is collective, and nothing needs
 * a device. */
#ifndef QUADRILLE_REPORT_H
#define QUADRILLE_REPORT_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/strbuf.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A figure of the summary on top. */
typedef struct qd_report_figure {
    const char *name;  /* "final loss" */
    const char *value; /* "3.2140", as it is to be read */
    const char *unit;  /* "nats per token" */
    const char *note;  /* smaller, below: "median of 300 steps" */
} qd_report_figure;

/* A curve. Series of one chart are drawn on the same axes; the first of them gives these their
 * names. */
typedef struct qd_report_series {
    const char *chart;  /* the heading: "loss" */
    const char *name;   /* of this curve among those of the chart: "training" */
    const char *x_name; /* "step", "GPUs" */
    const char *unit;   /* of y: "tokens/s", "s", "B" (bytes) or "" */
    const double *x, *y; /* [count]; x does not decrease; a y that is not finite leaves a gap */
    int64_t count;
    bool log_x, log_y;
} qd_report_series;

/* Memory of one rank, or of ranks that are alike. */
typedef struct qd_report_memory_rank {
    const char *label;      /* "rank 3", "ranks 0 to 127" */
    const int64_t *planned; /* [kinds]: the accountant's lines at the rank's peak */
    int64_t allocated;      /* measured: all that the trainer took from the device; -1: not measured */
    int64_t resident;       /* measured from outside: peak of the process the rank is in; -1: not measured */
} qd_report_memory_rank;

typedef struct qd_report_memory {
    size_t size;
    const char *const *kinds; /* "parameters", "gradients", … */
    int kind_count;
    const qd_report_memory_rank *ranks;
    int rank_count;
    int64_t capacity; /* of the device of one rank; 0: unknown */
} qd_report_memory;
QD_SIZED_DEFAULT(qd_report_memory)

/* What ran when. Names are those of the step program's actions, so that timelines can be compared
 * line by line. */
typedef struct qd_report_event {
    int32_t rank;   /* as in the timeline's ranks */
    int32_t stream; /* index in the timeline's streams */
    const char *name;   /* "forward block.3", as in trace.json */
    const char *kind;   /* "forward": the action's kind, decides the colour */
    const char *module; /* "block.3" */
    const char *group;  /* of communication: "dp", "dp×cp", "tp"; NULL: it is none */
    int64_t step;
    int32_t microbatch; /* -1: none */
    int64_t bytes;      /* communication, as in the program: what all ranks of the world together send, if all do as this one
                           does; 0: nothing to say */
    double flops;       /* 0: nothing to say */
    double begin, end;  /* seconds; the page counts from the earliest */
    double waited;      /* communication inside an action that computes: seconds at its end for which that stood still */
} qd_report_event;

typedef struct qd_report_rank {
    int32_t rank;
    const char *label;  /* "rank 3"; NULL: "rank N" */
    const char *place;  /* in the mesh: "pp 0 · dp 3" */
    int64_t stands_for; /* ranks that do the same and are drawn once; 1: only itself */
} qd_report_rank;

typedef struct qd_report_timeline {
    size_t size;
    const char *name; /* "measured", "simulated" */
    const qd_report_rank *ranks;
    int rank_count;
    const char *const *streams; /* "compute", "communication", … */
    int stream_count;
    const qd_report_event *events; /* in any order */
    int64_t event_count;
    int64_t world; /* ranks that an event's bytes are the sum of; 0: the sum of stands_for */
} qd_report_timeline;
QD_SIZED_DEFAULT(qd_report_timeline)

typedef struct qd_report {
    size_t size;
    const char *title;    /* "demo" */
    const char *subtitle; /* "llama-tiny, 1.2 M parameters · dp 4, zero 3" */
    const qd_report_figure *figures;
    int figure_count;
    const char *const *notes; /* sentences below the figures */
    int note_count;
    const qd_report_series *series;
    int series_count;
    const qd_report_memory *memory; /* NULL: none */
    /* NULL: none. Both: drawn above each other on one time scale, with a table by action name. */
    const qd_report_timeline *measured, *simulated;
    const char *config; /* the configuration, shown folded at the end */
} qd_report;
QD_SIZED_DEFAULT(qd_report)

/* Appends the page to `html`. QD_USAGE for a description that contradicts itself, such as an event
 * of an unknown rank. */
QD_API qd_status qd_report_render(const qd_report *report, qd_strbuf *html);
/* Writes it to a file, which is old or new and never half. */
QD_API qd_status qd_report_write(const qd_report *report, const char *path);

/* The report of a run's folder. simulated: a second trace in the format of trace.json, or NULL.
 * path: where the page goes; NULL: report.html in the folder. *written, if not NULL, is the path,
 * to be freed with free(). */
QD_API qd_status qd_report_run(const char *folder, const char *simulated, const char *path, char **written);

/* A trace in the format of trace.json as a timeline, which belongs to the object. */
typedef struct qd_report_trace qd_report_trace;
QD_API qd_status qd_report_trace_load(const char *path, const char *name, qd_report_trace **trace);
QD_API const qd_report_timeline *qd_report_trace_timeline(const qd_report_trace *trace);
QD_API void qd_report_trace_destroy(qd_report_trace *trace); /* NULL is legal */

#ifdef __cplusplus
}
#endif
#endif
