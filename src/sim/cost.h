/* What computing costs on one accelerator: by shapes and bytes, nothing else. */
#ifndef QD_SIM_COST_H
#define QD_SIM_COST_H

#include "sim/network.h"
#include "spec/program/program.h"

/* Axes of collectives inside a module, and the ranks that share out experts. */
enum { QD_COST_EXPERTS = QD_AXIS_COUNT, QD_COST_AXES };

/* Seconds by what they are spent on. */
typedef struct qd_cost {
    double product, attention, memory, optimizer, launch;
    double exchange[QD_COST_AXES]; /* waiting for collectives inside a module, by the first of their axes */
    double hidden[QD_COST_AXES];   /* of those collectives, what runs beside the above: no part of the total */
} qd_cost;

static inline double qd_cost_total(const qd_cost *c)
{
    double waits = 0.0;
    for (int axis = 0; axis < QD_COST_AXES; axis++)
        waits += c->exchange[axis];
    return c->product + c->attention + c->memory + c->optimizer + c->launch + waits;
}

void qd_cost_add(qd_cost *sum, const qd_cost *more);

/* (m, n) over k: tiles dealt to the multiprocessors in waves, at least `bytes` of traffic. */
double qd_cost_product(const qd_cluster *cluster, double m, double n, double k, double bytes);
/* `groups` of them in one launch, as over experts. */
double qd_cost_products(const qd_cluster *cluster, double groups, double m, double n, double k, double bytes);
/* A kernel that moves bytes. */
double qd_cost_stream(const qd_cluster *cluster, double bytes);

/* How much slower computation is beside a collective, as a share of its rate. */
double qd_cost_collective_load(const qd_cluster *cluster);

/* Every kind of op has a rule for what it costs. */
bool qd_op_has_cost(qd_op_kind kind);
/* One op of a class; ops that communicate cost nothing here. */
qd_cost qd_cost_op(const qd_cluster *cluster, const qd_model *model, const qd_module_class *class_, const qd_op *op);

/* An action that is no collective itself: its ops, those that communicate with them, or what it
 * moves. spans: of the program's groups. */
qd_cost qd_cost_action(const qd_cluster *cluster, const qd_program *program, const qd_span *spans, const qd_action *action);

/* A collective inside a module, in seconds after its action began; waited: from when on computation
 * stood still for it, `end` if it did not. */
typedef struct qd_cost_exchange {
    int op;
    double begin, end, waited;
} qd_cost_exchange;
/* Those of a module's action, in the order of its ops; `out` has room for all ops of the class.
 * Returns their number. */
int qd_cost_exchanges(const qd_cluster *cluster, const qd_program *program, const qd_span *spans, const qd_action *action,
                      qd_cost_exchange *out);
/* Adds the seconds of a module's action by kind of op (QD_OP_KIND_COUNT), as it runs: those that
 * communicate, and waits for them, left out. */
void qd_cost_ops(const qd_cluster *cluster, const qd_program *program, const qd_span *spans, const qd_action *action, double *seconds);
#endif
