/* The HTML report of a run: one self-contained page with figures, curves, memory by kind and rank,
 * and timelines of all ranks. It is made from a run folder, or from a description in memory, as for
 * simulated runs.
 *
 * A description borrows everything it points to, for the duration of a call. Strings are UTF-8 and
 * may be NULL. Nothing here is collective or needs a device. */
#ifndef QUADRILLE_REPORT_H
#define QUADRILLE_REPORT_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/strbuf.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A figure in the summary at the top. */
typedef struct qd_report_figure {
    const char *name;  /* "final loss" */
    const char *value; /* "3.2140", as displayed */
    const char *unit;  /* "nats per token" */
    const char *note;  /* in small type below: "median of 300 steps" */
} qd_report_figure;

/* A curve. Series of one chart share its axes, which the first series labels. */
typedef struct qd_report_series {
    const char *chart;  /* the heading: "loss" */
    const char *name;   /* of this curve in the chart: "training" */
    const char *x_name; /* "step", "GPUs" */
    const char *unit;   /* of y: "tokens/s", "s", "B" (bytes) or "" */
    const double *x, *y; /* [count]; x must not decrease; a y that is not finite leaves a gap */
    int64_t count;
    bool log_x, log_y;
} qd_report_series;

/* A dashed line in all charts over steps. */
typedef struct qd_report_mark {
    double x;         /* the step */
    const char *text; /* "resumed on dp 4" */
} qd_report_mark;

/* A table: the first row is its head, the first column names the rows. */
typedef struct qd_report_table {
    const char *title, *lead; /* heading, and the sentence below it */
    const char *const *cells; /* [rows × columns], row by row */
    int columns, rows;
} qd_report_table;

/* Memory of one rank, or of identical ranks. */
typedef struct qd_report_memory_rank {
    const char *label;      /* "rank 3", "ranks 0 to 127" */
    const int64_t *planned; /* [kinds]: planned bytes at the rank's memory peak */
    int64_t allocated;      /* measured: bytes that the trainer allocated on the device; -1: not measured */
    int64_t resident;       /* measured by the system: peak resident size of the rank's process; -1: not measured */
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

/* An action on a timeline. Names are those of the step program's actions, so that timelines can be
 * compared row by row. */
typedef struct qd_report_event {
    int32_t rank;   /* as in the timeline's ranks */
    int32_t stream; /* index in the timeline's streams */
    const char *name;   /* "forward block.3", as in trace.json */
    const char *kind;   /* "forward": the kind of the action, which sets the colour */
    const char *module; /* "block.3" */
    const char *group;  /* communication: "dp", "dp×cp", "tp"; NULL: no communication */
    int64_t step;
    int32_t microbatch; /* -1: none */
    int64_t bytes;      /* communication, as in the program: sum over the ranks of the world if each sends as much as this
                           one; 0: unknown */
    double flops;       /* 0: unknown */
    double begin, end;  /* seconds; the page counts from the earliest */
    double waited;      /* communication inside a compute action: seconds at its end during which computation was stalled */
} qd_report_event;

typedef struct qd_report_rank {
    int32_t rank;
    const char *label;  /* "rank 3"; NULL: "rank N" */
    const char *place;  /* in the mesh: "pp 0 · dp 3" */
    int64_t stands_for; /* number of identical ranks drawn as this one; 1: only itself */
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
    int64_t world; /* number of ranks over which the bytes of an event are summed; 0: the sum of stands_for */
    /* The width of the drawing: neighbours that it could not show apart are written as one event.
     * 0: all events are written. Sums are over all events in either case. */
    int pixels;
    double window_begin, window_end; /* the part that is shown, in seconds from the earliest event; equal: everything */
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
    /* NULL: none. Both: drawn one above the other on one time scale, with a table by action
     * name. */
    const qd_report_timeline *measured, *simulated;
    const char *config; /* the configuration, collapsed at the end of the page */
    const qd_report_mark *marks;
    int mark_count;
    const qd_report_table *tables; /* below the curves */
    int table_count;
} qd_report;
QD_SIZED_DEFAULT(qd_report)

/* Appends the page to `html`. QD_USAGE for an inconsistent description, such as an event of an
 * unknown rank. */
QD_API qd_status qd_report_render(const qd_report *report, qd_strbuf *html);
/* Writes the page to a file atomically. QD_IO if it cannot be written; otherwise as
 * qd_report_render(). */
QD_API qd_status qd_report_write(const qd_report *report, const char *path);

/* Writes the report of a run folder. simulated: a second trace in the format of trace.json, or
 * NULL. path: the file to write; NULL: report.html in the folder. written: NULL, or receives the
 * path, which the caller frees with free(). QD_USAGE if the folder is not a run folder. */
QD_API qd_status qd_report_run(const char *folder, const char *simulated, const char *path, char **written);

/* The figures of a run folder. */
typedef struct qd_run_figures {
    size_t size;
    char model[64], layout[128]; /* layout: "" if this version cannot build it */
    int ranks;
    int64_t parameters;
    int64_t steps, steps_planned;
    double loss;        /* mean over the last loss_steps steps; NaN: no step is done */
    int64_t loss_steps;
    double best_loss;   /* lowest validation loss; NaN: none */
    int64_t best;       /* its step; -1: none */
    double tokens_per_second; /* median over the steps; NaN: no step is done */
    double seconds, tokens;   /* sums over the steps */
    bool running;       /* another process is writing the run now */
} qd_run_figures;
QD_SIZED_DEFAULT(qd_run_figures)

/* Reads the figures of a run folder. QD_USAGE if it is not one. */
QD_API qd_status qd_report_figures(const char *folder, qd_run_figures *figures);

/* Called for a key in which runs differ, with its value in each. */
typedef qd_status (*qd_report_difference)(void *context, const char *key, const char *const *values);
/* Compares the configurations of run folders, in the order of the option table. A failure of `each`
 * ends the call. */
QD_API qd_status qd_report_differences(const char *const *folders, int count, qd_report_difference each, void *context);

/* Writes a page that compares runs: their figures, their curves in the same charts, and the keys in
 * which their configurations differ. path: the file; NULL: comparison.html next to the first run.
 * written: as in qd_report_run(). */
QD_API qd_status qd_report_compare(const char *const *folders, int count, const char *path, char **written);

/* A trace that was read from a file. */
typedef struct qd_report_trace qd_report_trace;
/* Reads a file in the format of trace.json; the caller owns *trace. name: of the timeline. QD_USAGE
 * for another format. */
QD_API qd_status qd_report_trace_load(const char *path, const char *name, qd_report_trace **trace);
/* The same from memory; messages use `file` as the file name. */
QD_API qd_status qd_report_trace_load_text(const char *file, const char *text, const char *name, qd_report_trace **trace);
/* The trace as a timeline, which belongs to it. */
QD_API const qd_report_timeline *qd_report_trace_timeline(const qd_report_trace *trace);
QD_API void qd_report_trace_destroy(qd_report_trace *trace); /* NULL is legal */

#ifdef __cplusplus
}
#endif
#endif
