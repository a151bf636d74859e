/* How rows reach experts: what the placement rules of a layer with experts share. */
#ifndef QD_SPEC_PASSES_EXPERTS_IMPL_H
#define QD_SPEC_PASSES_EXPERTS_IMPL_H

#include "spec/layout/nodes.h"
#include "spec/passes/passes.h"

/* Rows that go to experts once per node (spec/layout/nodes.h), as slots. A copy is a row on its way
 * to one node. */
typedef struct qd_node_plan {
    int place, from, count;             /* copies of each row, one per node; rows per node */
    int counts, table;                  /* rows per expert and node, of this rank and of all */
    int copies, chosen;                 /* rows by node, choices and weights of each */
    int relay, relay_chosen, relay_sum; /* the same of the rows that this rank relays; their results */
    int taken, relay_place, relay_from, relay_count, relay_weight;
    int sums;                             /* results by node */
    int relay_dy, relay_d_weight, d_sums; /* gradients */
} qd_node_plan;

/* rows_in: rows of this rank's experts, `capacity` of them. sorted and back: this rank's own
 * rows by expert, the second once for each rank of etp. Without ep rows_in is sorted. */
typedef struct qd_expert_plan {
    int up_w, down_w; /* weights of gate and up, of down */
    int64_t capacity, ffn, load_rows;
    int64_t room;                /* rows by expert that this rank sends at a time: its assignments, or those of rows that it relays */
    bool rounds;                 /* more rows than `capacity` may come, or than `room` be relayed */
    int ranks, etp, held, first; /* ranks of ep × etp, of one node if rows are relayed; experts that this rank holds, among theirs */
    qd_group group;              /* these ranks */
    int nodes;                   /* that rows go to once each (place_nodes.c); 1: dispatch is flat */
    int64_t relayed;             /* rows that a rank relays at most */
    bool to_relay;               /* rows are on their way to nodes, and have not been relayed so far */
    qd_node_plan by_node;
    int x, choice, weight, place, from, count, table, sorted, rows_in, back;
    int d_sorted, d_back, d_weight;
} qd_expert_plan;

/* Rows go to the ranks of their experts (DISPATCH), or come back (RETURN). */
void qd_place_dispatch(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, int from, int to);

/* place_nodes.c, where e->nodes is above 1. */
void qd_place_to_nodes(qd_class_writer *w, qd_expert_plan *e);              /* x -> relay and relay_chosen */
void qd_place_relay(qd_class_writer *w, qd_expert_plan *e);                 /* relay -> sorted */
void qd_place_from_nodes(qd_class_writer *w, qd_expert_plan *e);            /* back -> sums */
void qd_place_grad_to_nodes(qd_class_writer *w, qd_expert_plan *e, int dy); /* dy -> relay_dy */
void qd_place_grad_from_nodes(qd_class_writer *w, qd_expert_plan *e);       /* d_back -> d_sums, d_weight */
#endif
