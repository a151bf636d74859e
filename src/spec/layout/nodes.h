/* Two-level dispatch (parallel.dispatch=node): each row crosses to a node at most once.
 *
 * Nodes hold consecutive ranks. When the ranks that together hold all experts span several nodes, a
 * row that chose experts on another node is sent to that node once, with the list of its choices,
 * to the rank at the same position within that node. That rank *relays* it: inside the node it
 * sends the row to the chosen experts, as flat dispatch does, sums the weighted results and returns
 * one row. The row's own node is handled like the others, except that no data crosses the
 * network. */
#ifndef QD_SPEC_LAYOUT_NODES_H
#define QD_SPEC_LAYOUT_NODES_H

#include "spec/layout/experts.h"
#include "spec/program/program.h"

/* QD_USAGE, with the reason, when ranks, nodes and experts cannot be combined. */
qd_status qd_nodes_check(const qd_model *model, const qd_mesh *mesh);

int qd_nodes_spanned(const qd_mesh *mesh);      /* nodes that a row is dispatched to at most once; 1: dispatch is flat */
qd_group qd_nodes_group(const qd_mesh *mesh);   /* ranks at the same position in each of these nodes */
qd_group qd_relay_group(const qd_mesh *mesh);   /* the ranks of one of these nodes */
int qd_node_of(const qd_mesh *mesh, int rank);  /* the node of a world rank */

/* Expected number of nodes that a row is sent to, out of `nodes`, if all experts are equally
 * likely. Groups of experts limit it (model.router_top_groups). */
double qd_nodes_expected(const qd_moe *moe, int nodes);
/* Bytes per step that all ranks of a program's stage send to experts on other nodes and back, if
 * all experts are equally likely: with flat dispatch, and with dispatch by node (0 unless the ranks
 * that hold all experts span several whole nodes). */
typedef struct qd_across {
    int nodes; /* that these ranks span */
    int64_t flat, by_node;
} qd_across;
qd_across qd_nodes_across(const qd_program *program);

/* One dispatch. table (nodes · locals, experts + nodes): for each rank of the group the number of
 * rows for each expert, then the number of distinct rows for each node. Buffer space per round:
 * `room` rows sorted by expert on a relay, `capacity` rows on an expert's rank. */
typedef struct qd_nodes {
    const int32_t *table;
    int nodes, locals, etp; /* locals: ranks of a node; etp of them share each expert */
    int position;           /* of this rank in the group: node · locals + position in the node */
    int experts, per_token; /* experts: total number */
    int64_t room, capacity;
} qd_nodes;
/* The dispatch for a mesh and a model. */
qd_nodes qd_nodes_of(const qd_model *model, const qd_mesh *mesh, int position, int64_t room, int64_t capacity, const int32_t *table);
static inline int qd_nodes_experts(const qd_nodes *n) /* experts per node */
{
    return n->experts / n->nodes;
}

int64_t qd_nodes_relayed(const qd_nodes *nodes); /* rows that this rank relays */
/* Send and receive counts in rows, per node, with the first row of each: in this rank's rows sorted
 * by node, and in the rows that it relays. */
void qd_nodes_lists(const qd_nodes *nodes, int64_t *send, int64_t *send_first, int64_t *receive, int64_t *receive_first);
/* This rank's choices of experts on other nodes: the rows that flat dispatch would send across. */
int64_t qd_nodes_far(const qd_nodes *nodes);

/* Rounds inside a node, needed when rows exceed `room` or `capacity`. taken, rows (locals, experts
 * of a node): rows per relay and expert in the rounds before, and in this round. Start with both
 * zeroed; each call adds rows to taken and fills rows with the next round. Returns false when
 * nothing is left, also on the first call. The result is the same on all ranks of a node. */
bool qd_relay_next(const qd_nodes *nodes, int node, int32_t *taken, int32_t *rows);
/* Whether any node needs more than one round; the same on all ranks of the group. taken and rows
 * are scratch. */
bool qd_relay_further(const qd_nodes *nodes, int32_t *taken, int32_t *rows);

/* Workspace of the ops that run extra dispatch rounds: offsets of the arrays and their total size,
 * first in elements of the activation type, then in 4-byte elements. The forward pass uses in, up,
 * active, out, sorted and back. */
typedef struct qd_relay_room {
    int64_t sorted, in, up, active, out, back, d_active, d_up, d_sorted, elements;
    int64_t taken, rows, place, from, count, d_weight, numbers;
} qd_relay_room;
qd_relay_room qd_relay_room_of(const qd_nodes *nodes, int64_t relayed, int64_t hidden, int64_t ffn, bool backward);
#endif
