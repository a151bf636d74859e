/* One step of a configuration on a cluster: the programs of representative ranks, the costs of
 * their actions, and when each of them runs. Ranks that differ only along the data, context and
 * tensor axes do the same at the same time; one rank represents each stage of the pipeline. */
#ifndef QD_SIM_STEP_H
#define QD_SIM_STEP_H

#include "sim/cost.h"
#include "sim/engine.h"
#include "sim/network.h"
#include "spec/config/config.h"

/* One stage, represented by one rank. */
typedef struct qd_step_stage {
    int rank;
    qd_arena *arena; /* owns the program */
    const qd_program *program;
    qd_sim_item *items;
    int item_count;
    int32_t *action;   /* action of each item */
    int32_t *deps;
    float *exchange;   /* of each item, the share of its time spent waiting for collectives inside it */
    int meetings;      /* number so far, over all stages */
    qd_cost cost;      /* of its computation */
    double flops, recompute_flops;
    qd_memory_report memory;
} qd_step_stage;

typedef struct qd_step {
    const qd_config *config;
    qd_cluster own;            /* with the resources of one rank, if ranks share a machine */
    const qd_cluster *cluster; /* points to `own` */
    qd_arena *arena;
    qd_step_stage *stages;
    int stage_count;
    int messages, meetings;
    qd_sim_result result;
} qd_step;

/* The configuration as it would run there: with the op lists of accelerators, unless the cluster
 * trains on CPUs. It points into the cluster. */
qd_status qd_cluster_config(const qd_options *options, const qd_cluster *cluster, qd_config *config);

/* Builds the programs and the memory plan. */
qd_status qd_step_create(const qd_config *config, const qd_cluster *cluster, qd_step *step);
/* Simulates it: fills step->result and the costs of actions. */
qd_status qd_step_run(qd_step *step);
void qd_step_free(qd_step *step);

/* Reports memory only, or times too, always or only if the step fits. */
typedef enum qd_step_extent { QD_STEP_MEMORY, QD_STEP_TIMES, QD_STEP_TIMES_IF_FITS } qd_step_extent;
qd_status qd_step_report(const qd_config *config, const qd_cluster *cluster, qd_step_extent extent, qd_sim_report *report);

/* The placement of a program's groups in the cluster, as seen by its stage; spans has
 * QD_GROUP_LIMIT entries. */
void qd_step_spans(const qd_step *step, const qd_step_stage *stage, qd_span *spans);

/* Actions of modules with the same key, below QD_STEP_KEYS, have the same costs and exchanges; -1:
 * not an action of a module. */
enum { QD_STEP_KEYS = QD_ACTION_KIND_COUNT * QD_DECLARATIONS_MOST * QD_RECOMPUTE_COUNT * 2 };
int qd_step_key(const qd_program *program, const qd_action *action);

/* Whether an action does more than allocate or free memory. */
bool qd_step_takes_time(const qd_action *action);

#endif
