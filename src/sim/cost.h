/* What computing costs on one accelerator: by shapes and bytes, nothing else. */
#ifndef QD_SIM_COST_H
#define QD_SIM_COST_H

#include "sim/cluster.h"
#include "spec/program.h"

/* Seconds by what they are spent on. */
typedef struct qd_cost {
    double product, attention, memory, optimizer, launch;
} qd_cost;

static inline double qd_cost_total(const qd_cost *c)
{
    return c->product + c->attention + c->memory + c->optimizer + c->launch;
}

void qd_cost_add(qd_cost *sum, const qd_cost *more);

/* (m, n) over k: tiles dealt to the multiprocessors in waves, at least `bytes` of traffic. */
double qd_cost_product(const qd_cluster *cluster, double m, double n, double k, double bytes);
/* `groups` of them in one launch, as over experts. */
double qd_cost_products(const qd_cluster *cluster, double groups, double m, double n, double k, double bytes);
/* A kernel that moves bytes. */
double qd_cost_stream(const qd_cluster *cluster, double bytes);

/* One op of a class; ops that communicate cost nothing here. */
qd_cost qd_cost_op(const qd_cluster *cluster, const qd_model *model, const qd_module_class *class_, const qd_op *op);

/* An action without collectives: its ops, or what it moves. */
qd_cost qd_cost_action(const qd_cluster *cluster, const qd_program *program, const qd_action *action);
#endif
