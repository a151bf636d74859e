/* The cost of computation on one accelerator, from shapes and bytes alone. */
#ifndef QD_SIM_COST_H
#define QD_SIM_COST_H

#include "sim/network.h"
#include "spec/program/program.h"

/* Axes of collectives inside a module, and the group of ranks that share experts. */
enum { QD_COST_EXPERTS = QD_AXIS_COUNT, QD_COST_AXES };

/* Seconds by category. */
typedef struct qd_cost {
    double product, attention, memory, optimizer, launch;
    double exchange[QD_COST_AXES]; /* waiting for collectives inside a module, by the first of their axes */
    double hidden[QD_COST_AXES];   /* overlapped part of those collectives; not part of the total */
} qd_cost;

static inline double qd_cost_total(const qd_cost *c)
{
    double waits = 0.0;
    for (int axis = 0; axis < QD_COST_AXES; axis++)
        waits += c->exchange[axis];
    return c->product + c->attention + c->memory + c->optimizer + c->launch + waits;
}

void qd_cost_add(qd_cost *sum, const qd_cost *more);

/* An (m, n, k) GEMM: tiles distributed over the multiprocessors in waves, at least `bytes` of
 * traffic. */
double qd_cost_product(const qd_cluster *cluster, double m, double n, double k, double bytes);
/* A grouped GEMM: `groups` of them in one launch. */
double qd_cost_products(const qd_cluster *cluster, double groups, double m, double n, double k, double bytes);
/* A memory-bound kernel. */
double qd_cost_stream(const qd_cluster *cluster, double bytes);

/* Slowdown of computation that overlaps with a collective, as a share of its rate. */
double qd_cost_collective_load(const qd_cluster *cluster);

/* Whether a kind of op has a cost rule; every kind must. */
bool qd_op_has_cost(qd_op_kind kind);
/* One op of a class; ops that communicate cost nothing here. */
qd_cost qd_cost_op(const qd_cluster *cluster, const qd_model *model, const qd_module_class *class_, const qd_op *op);

/* An action that is not a collective itself: its ops, including those that communicate, or the
 * bytes it moves. spans: of the program's groups. */
qd_cost qd_cost_action(const qd_cluster *cluster, const qd_program *program, const qd_span *spans, const qd_action *action);

/* A collective inside a module, in seconds after the start of its action. waited: when computation
 * began to wait for it, `end` if it did not. */
typedef struct qd_cost_exchange {
    int op;
    double begin, end, waited;
} qd_cost_exchange;
/* The collectives of a module's action, in the order of its ops; `out` has space for all ops of the
 * class. Returns their number. */
int qd_cost_exchanges(const qd_cluster *cluster, const qd_program *program, const qd_span *spans, const qd_action *action,
                      qd_cost_exchange *out);
/* Adds the seconds of a module's action by kind of op (QD_OP_KIND_COUNT), without communication and
 * waiting for it. */
void qd_cost_ops(const qd_cluster *cluster, const qd_program *program, const qd_span *spans, const qd_action *action, double *seconds);
#endif
