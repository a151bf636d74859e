/* Layout search: which axes, ZeRO stage, micro-batch, recompute and schedule train a model fastest
 * on a cluster. Layouts that fit are built as step programs and simulated. Needs no device; nothing
 * here is collective. */
#ifndef QUADRILLE_PLAN_H
#define QUADRILLE_PLAN_H

#include <quadrille/export.h>
#include <quadrille/json_writer.h>
#include <quadrille/sim.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_plan_choice {
    int dp, tp, cp, pp, vpp, ep, etp, zero;
    int tp_overlap; /* pieces of a GEMM, overlapped with the collectives of tp; 1: no overlap */
    int64_t micro_batch, micro_batches;
    const char *recompute, *schedule; /* "none", "1f1b", …; schedule "": no pipeline */
    const char *cp_mode;              /* "ring", …; "": cp is 1 */
    bool offload;                     /* optimizer state in host memory, because nothing fits otherwise */
    int64_t host_bytes;               /* host memory that it needs per rank */
    double step_seconds, mfu;
    int64_t memory_bytes;
    bool fits;
    char layout[128];
    char loses[200]; /* why it is not the first choice: its largest loss compared with the first; "" for the first */
} qd_plan_choice;

/* A given layout, compared with the first choice. */
typedef struct qd_plan_against {
    bool possible;     /* it can be built */
    char refusal[200]; /* why not */
    const qd_plan_choice *choice; /* simulated even if it does not fit */
    double behind;                /* its step time over that of the first choice, minus 1 */
    char why[5][200];      /* if it is more than 5 % slower or does not fit: its losses, largest first */
    int why_count;
} qd_plan_against;

/* Owned by the caller, with everything it points to: qd_plan_report_destroy(). */
typedef struct qd_plan_report {
    const qd_plan_choice *const *choices; /* best first */
    int count;
    const qd_sim_report *best;      /* of the first choice */
    const char *const *reasons;     /* the rules that the first choice follows, and what similar layouts lose */
    int reason_count;
    const char *next;               /* what to change next */
    int tried, too_large, refused;  /* layouts that were simulated, that do not fit, and that cannot be built */
    const char *refusal;            /* why the first of these cannot be built; "": none */
    double wall_seconds;
    const qd_plan_against *against; /* of qd_plan_beside(); NULL: none was given */
    const char *nearest;            /* qd_plan_row_run(): which model was simulated instead of an unsupported one; "": none */
    bool stopped;                   /* the search spent its work budget, or was ended by `watch`, before it saw all layouts */
    bool late;                      /* the search reached its time limit first: the result depends on this machine's speed */
} qd_plan_report;

/* Frees the report. NULL is legal. */
QD_API void qd_plan_report_destroy(qd_plan_report *report);

/* Searches for the fastest layout of the model, sequence length and global batch in `options` on
 * parallel.ranks accelerators of the cluster (tables of qd_config_table() and qd_cluster_table()).
 * Axes that the user has set stay fixed. QD_NO_MEMORY, with the smallest requirement, if nothing
 * fits; QD_USAGE if nothing can be built. After a failure *report is NULL, here and below. */
QD_API qd_status qd_plan(const qd_options *options, qd_plan_report **report);

/* The same, and compares the layout of `layout` (a copy of `options` with keys changed) with the
 * first choice: how much slower it is, and why. QD_USAGE if the two differ in model, batch,
 * sequence length or number of accelerators. */
QD_API qd_status qd_plan_beside(const qd_options *options, const qd_options *layout, qd_plan_report **report);

/* The progress of a search. */
typedef struct qd_plan_progress {
    double seconds; /* since its start */
    int tried, too_large, refused; /* as in qd_plan_report, so far */
    const char *layout; /* the fastest so far; "": none */
    double step_seconds; /* its step time */
} qd_plan_progress;

/* As qd_plan_beside(), and calls `watch` before every layout that it simulates, from the calling
 * thread. If `watch` returns false, the search ends: with the layouts found so far (`stopped` is
 * set), or with QD_INTERRUPTED if there are none. layout: as in qd_plan_beside(); NULL: none is
 * compared, as in qd_plan(). */
QD_API qd_status qd_plan_watched(const qd_options *options, const qd_options *layout,
                                 bool (*watch)(void *context, const qd_plan_progress *progress), void *context, qd_plan_report **report);

/* Appends the report as one JSON object. */
QD_API void qd_plan_report_json(const qd_plan_report *report, qd_strbuf *out);
/* Writes the comparison with a given layout as the member "against" of an object. */
QD_API void qd_plan_put_against(qd_json_writer *writer, const qd_plan_against *against);

/* A published layout: the run and the layout as key=value words, and the source. */
typedef struct qd_plan_row {
    char name[96], cluster[32], run[400], layout[200], source[200];
} qd_plan_row;

/* Reads a file in the format of data/published/layouts.json; the caller frees *rows with free().
 * QD_USAGE for another format. */
QD_API qd_status qd_plan_rows(const char *path, qd_plan_row **rows, int *count);
/* Plans the run of a row and compares its layout with the first choice, as qd_plan_beside()
 * does. */
QD_API qd_status qd_plan_row_run(const qd_plan_row *row, qd_plan_report **report);

/* Sets the configuration keys of `options` to the choice. */
QD_API qd_status qd_plan_apply(const qd_plan_choice *choice, qd_options *options);
/* The configuration keys of `options` that are not at their defaults, as YAML for train, check and
 * simulate; the caller frees *yaml with free(). */
QD_API qd_status qd_plan_yaml(const qd_options *options, char **yaml);
/* Writes the configuration keys of `options` as a YAML file for train, check and simulate. QD_IO if
 * it cannot be written. */
QD_API qd_status qd_plan_write(const qd_options *options, const char *path);

/* Finds the fewest accelerators, in powers of two times the size of the cluster's node, that train
 * `tokens` tokens in `days` days; *days_taken: the days with the first choice. QD_USAGE if `most`
 * are not enough. */
QD_API qd_status qd_plan_gpus(const qd_options *options, double tokens, double days, int most, int *gpus, double *days_taken,
                              qd_plan_report **report);

/* Finds the largest preset for which a layout fits on parallel.ranks accelerators; *name belongs to
 * the library. QD_NO_MEMORY if none fits. */
QD_API qd_status qd_plan_largest(const qd_options *options, const char **name, qd_plan_report **report);

#ifdef __cplusplus
}
#endif
#endif
