/* Choosing a layout: which axes, ZeRO stage, micro-batch, recompute and schedule train a model fastest on a cluster. Every layout
 * that fits is built as a step program and simulated. */
#ifndef QUADRILLE_PLAN_H
#define QUADRILLE_PLAN_H

#include <quadrille/sim.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_plan_choice {
    int dp, tp, cp, pp, vpp, ep, zero;
    int64_t micro_batch, micro_batches;
    const char *recompute, *schedule; /* "none", "1f1b", …; schedule "": no pipeline */
    double step_seconds, mfu;
    int64_t memory_bytes;
    bool fits;
    char layout[96];
    char loses[200]; /* why it is not the first choice: its largest loss that the first does not have; "" for the first */
} qd_plan_choice;

enum { QD_PLAN_CHOICES = 32, QD_PLAN_REASONS = 12 };
typedef struct qd_plan_report {
    qd_plan_choice choices[QD_PLAN_CHOICES]; /* best first */
    int count;
    qd_sim_report best;                      /* of the first choice */
    char reasons[QD_PLAN_REASONS][240];      /* the rules that the first choice follows, and what its neighbours lose */
    int reason_count;
    char next[240];                          /* what to change next */
    int tried, too_large, refused;           /* layouts simulated, without memory for them, and that cannot be built */
    char refusal[200];                       /* the first reason for a refusal */
    double wall_seconds;
    bool stopped;                            /* the time was up before all layouts were looked at */
} qd_plan_report;

/* Searches for the fastest layout of the model, sequence and global batch in `options` on parallel.ranks accelerators of the cluster
 * (tables of qd_config_table() and qd_cluster_table()). What the user has set among the axes stays as it is. QD_NO_MEMORY with
 * the smallest need when nothing fits, QD_USAGE when nothing can be built. */
qd_status qd_plan(const qd_options *options, qd_plan_report *report);

/* Puts the choice into the configuration keys of `options`. */
qd_status qd_plan_apply(const qd_plan_choice *choice, qd_options *options);
/* Writes the configuration part of `options` as a YAML file that train, check and simulate read. */
qd_status qd_plan_write(const qd_options *options, const char *path);

/* The fewest accelerators, in powers of two times the cluster's node, that train `tokens` tokens in `days`; *days_taken: what the first
 * choice there needs. QD_USAGE when `most` are not enough. */
qd_status qd_plan_gpus(const qd_options *options, double tokens, double days, int most, int *gpus, double *days_taken, qd_plan_report *report);

/* The largest preset that some layout fits into parallel.ranks accelerators; *name belongs to the library. */
qd_status qd_plan_largest(const qd_options *options, const char **name, qd_plan_report *report);

#ifdef __cplusplus
}
#endif
#endif
