/* Rows that go to the experts of a node once (parallel.dispatch=node).
 *
 * Ranks lie on nodes one after another. Where the ranks that hold all experts together lie on
 * several nodes, a row that chose experts of a node crosses to it once, with the list of its
 * choices: to the rank that has the same place in its node as the row's own rank has in its. That
 * rank *relays* it: inside the node it sends the row to its experts, as flat dispatch does, adds up
 * what comes back, weighted, and returns one row. The row's own node is a node like the others, but
 * nothing crosses to it. */
#ifndef QD_SPEC_LAYOUT_NODES_H
#define QD_SPEC_LAYOUT_NODES_H

#include "spec/layout/experts.h"
#include "spec/program/program.h"

/* QD_USAGE, with the reason, when ranks, nodes and experts do not fit together. */
qd_status qd_nodes_check(const qd_model *model, const qd_mesh *mesh);

int qd_nodes_spanned(const qd_mesh *mesh);      /* nodes that rows are dispatched to once each; 1: dispatch is flat */
qd_group qd_nodes_group(const qd_mesh *mesh);   /* ranks with the same place in each of these nodes */
qd_group qd_relay_group(const qd_mesh *mesh);   /* the ranks of one of these nodes */
int qd_node_of(const qd_mesh *mesh, int rank);  /* of a rank of the world */

/* How many of `nodes` nodes a row goes to, if all experts are as likely; groups of experts limit it
 * (model.router_top_groups). */
double qd_nodes_expected(const qd_moe *moe, int nodes);
/* What all ranks of a program's stage send to experts on other nodes and back in one step, if all
 * experts are as likely: by flat dispatch, and by node (0: the ranks that hold all experts do not
 * lie on several whole nodes). */
typedef struct qd_across {
    int nodes; /* that these ranks lie on */
    int64_t flat, by_node;
} qd_across;
qd_across qd_nodes_across(const qd_program *program);

/* One exchange. table (nodes · locals, experts + nodes): for each rank of the group how many rows
 * it has for each expert, then how many different ones for each node. A relay has room for `room`
 * rows by expert at a time, an expert's rank for `capacity`. */
typedef struct qd_nodes {
    const int32_t *table;
    int nodes, locals, etp; /* ranks of a node, of which etp share each expert */
    int position;           /* of this rank in the group: node · locals + place in the node */
    int experts, per_token; /* experts in all */
    int64_t room, capacity;
} qd_nodes;
/* Of a program's mesh and model. */
qd_nodes qd_nodes_of(const qd_model *model, const qd_mesh *mesh, int position, int64_t room, int64_t capacity, const int32_t *table);
static inline int qd_nodes_experts(const qd_nodes *n) /* of a node */
{
    return n->experts / n->nodes;
}

int64_t qd_nodes_relayed(const qd_nodes *nodes); /* rows that this rank relays */
/* In rows, per node: what this rank sends there, from which of its rows by node on; what it relays
 * from there, from which row on. */
void qd_nodes_lists(const qd_nodes *nodes, int64_t *send, int64_t *send_first, int64_t *receive, int64_t *receive_first);
/* This rank's choices of experts on other nodes: rows that flat dispatch would send across. */
int64_t qd_nodes_far(const qd_nodes *nodes);

/* Rounds inside a node, for what exceeds room or capacity. taken, rows (locals, experts of a node):
 * rows per relay and expert of the rounds before, and of this one. next begins with both at 0, adds
 * rows to taken and fills rows with the next round; false when nothing is left, or (first round)
 * when there is nothing at all. All ranks of a node find the same. */
bool qd_relay_next(const qd_nodes *nodes, int node, int32_t *taken, int32_t *rows);
/* Whether any node needs more than one round: the same on all ranks of the group. taken, rows:
 * room. */
bool qd_relay_further(const qd_nodes *nodes, int32_t *taken, int32_t *rows);

/* Room of the ops that carry out further rounds: where arrays begin, and what they take together;
 * in elements of the activations' type, and of 4 bytes. Forward uses in, up, active, out, sorted
 * and back. */
typedef struct qd_relay_room {
    int64_t sorted, in, up, active, out, back, d_active, d_up, d_sorted, elements;
    int64_t taken, rows, place, from, count, d_weight, numbers;
} qd_relay_room;
qd_relay_room qd_relay_room_of(const qd_nodes *nodes, int64_t relayed, int64_t hidden, int64_t ffn, bool backward);
#endif
