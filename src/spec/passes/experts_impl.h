/* Dispatch of rows to experts: state that the placement rules of a layer with experts share. */
#ifndef QD_SPEC_PASSES_EXPERTS_IMPL_H
#define QD_SPEC_PASSES_EXPERTS_IMPL_H

#include "spec/layout/nodes.h"
#include "spec/passes/passes.h"

/* Two-level dispatch (spec/layout/nodes.h), as slots. A copy is a row sent to one node. */
typedef struct qd_node_plan {
    int place, from, count;             /* copies of each row, one per node; rows per node */
    int counts, table;                  /* rows per expert and node, of this rank and of all ranks */
    int copies, chosen;                 /* rows sorted by node, with choices and weights of each */
    int relay, relay_chosen, relay_sum; /* the same for the rows that this rank relays; their results */
    int taken, relay_place, relay_from, relay_count, relay_weight;
    int sums;                             /* results sorted by node */
    int relay_dy, relay_d_weight, d_sums; /* gradients */
} qd_node_plan;

/* rows_in: rows of this rank's experts, at most `capacity`. sorted and back: this rank's own rows
 * sorted by expert, before and after the experts; back has them once per rank of etp. Without ep
 * rows_in is sorted. */
typedef struct qd_expert_plan {
    int up_w, down_w; /* weights of gate and up, of down */
    int64_t capacity, ffn, load_rows;
    /* Rows sorted by expert that this rank can send in one round: its assignments, or those of the
     * rows that it relays. */
    int64_t room;
    bool rounds;                 /* rows may exceed `capacity`, or relayed rows `room`, so that extra dispatch rounds are needed */
    /* Ranks of ep × etp, of one node if rows are relayed; experts that this rank holds, and the
     * first among theirs. */
    int ranks, etp, held, first;
    qd_group group;              /* these ranks */
    int nodes;                   /* that a row is sent to at most once (place_nodes.c); 1: dispatch is flat */
    int64_t relayed;             /* maximum number of rows that a rank relays */
    bool to_relay;               /* rows are in flight to nodes and not relayed yet */
    qd_node_plan by_node;
    int x, choice, weight, place, from, count, table, sorted, rows_in, back;
    int d_sorted, d_back, d_weight;
} qd_expert_plan;

/* Sends rows to the ranks of their experts (DISPATCH), or returns them (RETURN). */
void qd_place_dispatch(qd_class_writer *w, const qd_expert_plan *e, qd_op_kind kind, int from, int to);

/* place_nodes.c; used if e->nodes > 1. */
void qd_place_to_nodes(qd_class_writer *w, qd_expert_plan *e);              /* x -> relay and relay_chosen */
void qd_place_relay(qd_class_writer *w, qd_expert_plan *e);                 /* relay -> sorted */
void qd_place_from_nodes(qd_class_writer *w, qd_expert_plan *e);            /* back -> sums */
void qd_place_grad_to_nodes(qd_class_writer *w, qd_expert_plan *e, int dy); /* dy -> relay_dy */
void qd_place_grad_from_nodes(qd_class_writer *w, qd_expert_plan *e);       /* d_back -> d_sums, d_weight */
#endif
