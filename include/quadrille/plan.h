/* Choosing a layout: which axes, ZeRO stage, micro-batch, recompute and schedule train a model
 * fastest on a cluster. Every layout that fits is built as a step program and simulated. */
#ifndef QUADRILLE_PLAN_H
#define QUADRILLE_PLAN_H

#include <quadrille/export.h>
#include <quadrille/sim.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_plan_choice {
    int dp, tp, cp, pp, vpp, ep, etp, zero;
    int tp_overlap; /* pieces of products beside the exchanges of tp; 1: whole */
    int64_t micro_batch, micro_batches;
    const char *recompute, *schedule; /* "none", "1f1b", …; schedule "": no pipeline */
    const char *cp_mode;              /* "ring", …; "": cp is 1 */
    bool offload;                     /* optimizer state in host memory, because nothing fits otherwise */
    int64_t host_bytes;               /* of which it takes so much on each rank */
    double step_seconds, mfu;
    int64_t memory_bytes;
    bool fits;
    char layout[128];
    char loses[200]; /* why it is not the first choice: its largest loss that the first does not have; "" for the first */
} qd_plan_choice;

/* A layout that was asked about, compared with the first choice. */
typedef struct qd_plan_against {
    bool possible; /* not possible: refusal says why */
    char refusal[200];
    const qd_plan_choice *choice; /* simulated also if it does not fit */
    double behind;                /* its step time over the first choice's, less 1 */
    char why[5][200];      /* where it is more than 5 % behind, or does not fit: what it loses, largest first */
    int why_count;
} qd_plan_against;

/* The library's, with all that it points to. */
typedef struct qd_plan_report {
    const qd_plan_choice *const *choices; /* best first */
    int count;
    const qd_sim_report *best;      /* of the first choice */
    const char *const *reasons;     /* the rules that the first choice follows, and what its neighbours lose */
    int reason_count;
    const char *next;               /* what to change next */
    int tried, too_large, refused;  /* layouts simulated, without memory for them, and that cannot be built */
    const char *refusal;            /* the first reason for a refusal; "": none */
    double wall_seconds;
    const qd_plan_against *against; /* of qd_plan_beside(); NULL: none was asked about */
    const char *nearest;            /* rows of a file: by which model the program stands in for another; "" */
    bool stopped;                   /* the search ended before all layouts were looked at: it has a budget of work */
    bool late;                      /* the clock ended it before that: another machine may find another answer */
} qd_plan_report;

/* NULL is legal. */
QD_API void qd_plan_report_destroy(qd_plan_report *report);

/* Searches for the fastest layout of the model, sequence and global batch in `options` on
 * parallel.ranks accelerators of the cluster (tables of qd_config_table() and qd_cluster_table()).
 * What the user has set among the axes stays as it is. QD_NO_MEMORY with the smallest need when
 * nothing fits, QD_USAGE when nothing can be built; *report is NULL then, here and below. */
QD_API qd_status qd_plan(const qd_options *options, qd_plan_report **report);

/* The same, and the layout that `layout` sets (a copy of `options` with its keys) beside the first
 * choice: by how much it is behind, and why. Both must have the same model, batch, sequence and
 * number of accelerators. */
QD_API qd_status qd_plan_beside(const qd_options *options, const qd_options *layout, qd_plan_report **report);

/* A published layout: the run and the layout as words key=value, and where it was read. */
typedef struct qd_plan_row {
    char name[96], cluster[32], run[400], layout[200], source[200];
} qd_plan_row;

/* Reads a file in the format of data/published/layouts.json; the rows are freed by the caller. */
QD_API qd_status qd_plan_rows(const char *path, qd_plan_row **rows, int *count);
/* Plans the run of a row, with its layout beside the first choice. */
QD_API qd_status qd_plan_row_run(const qd_plan_row *row, qd_plan_report **report);

/* Puts the choice into the configuration keys of `options`. */
QD_API qd_status qd_plan_apply(const qd_plan_choice *choice, qd_options *options);
/* Writes the configuration part of `options` as a YAML file that train, check and simulate read. */
QD_API qd_status qd_plan_write(const qd_options *options, const char *path);

/* The fewest accelerators, in powers of two times the cluster's node, that train `tokens` tokens in
 * `days`; *days_taken: what the first choice there needs. QD_USAGE when `most` are not enough. */
QD_API qd_status qd_plan_gpus(const qd_options *options, double tokens, double days, int most, int *gpus, double *days_taken,
                              qd_plan_report **report);

/* The largest preset that some layout fits into parallel.ranks accelerators; *name belongs to the
 * library. */
QD_API qd_status qd_plan_largest(const qd_options *options, const char **name, qd_plan_report **report);

#ifdef __cplusplus
}
#endif
#endif
