/* Where experts lie on the mesh, and who sends which rows to whom.
 *
 * The ranks of tp, cp and dp, tp fastest, are folded a second way for experts: etp · ep · edp of
 * them, etp fastest. A rank of ep holds its share of the experts, ranks of etp hold parts of each
 * (of its inner width), ranks of edp hold the same. Rows go to experts within the etp · ep
 * neighbours of a rank. */
#ifndef QD_SPEC_LAYOUT_EXPERTS_H
#define QD_SPEC_LAYOUT_EXPERTS_H

#include "spec/layout/ledger.h"

/* QD_USAGE, with the reason, when the experts cannot be shared out so. */
qd_status qd_experts_check(const qd_model *model, const qd_mesh *mesh);

int qd_expert_ranks(const qd_mesh *mesh);             /* etp · ep */
qd_group qd_expert_group(const qd_mesh *mesh);        /* ranks that hold all experts together */
qd_group qd_expert_data_group(const qd_mesh *mesh);   /* edp: ranks that hold the same parts of experts */
/* The ranks whose loads of experts are summed for the auxiliary loss: those with tokens of the same
 * sequence, or of the same batch. Size 1: no loads are summed. */
qd_group qd_expert_load_group(const qd_model *model, const qd_mesh *mesh);
/* Whether experts are reduced over other ranks than the rest of the parameters. */
bool qd_experts_apart(const qd_model *model, const qd_mesh *mesh);
/* The ranks whose sums of squares make the norm: all that hold different parameters, along tp and
 * the experts' ranks. */
qd_group qd_norm_group(const qd_model *model, const qd_mesh *mesh);

/* The experts of a rank: [*first, *first + count). */
int qd_experts_of(const qd_model *model, const qd_mesh *mesh, int rank, int *first);
/* What a rank holds of an expert's matrix, whose dimension `dim` etp cuts. */
qd_atom qd_expert_atom(const qd_ledger *ledger, const qd_param *param, int rank);

/* One exchange. Each rank has its rows by expert; table (ranks, experts): how many each rank has
 * for each expert. An expert's rank has room for `capacity` rows at a time and takes them in
 * rounds: its list is the rows of rank 0 for its experts, by expert, then those of rank 1 …, and a
 * round is `capacity` of it. So what a rank sends to another in a round is one stretch. */
typedef struct qd_dispatch {
    const int32_t *table;
    int ep, etp, position; /* of this rank among the ranks */
    int experts;           /* in all */
    int64_t capacity;
} qd_dispatch;
int64_t qd_dispatch_rounds(const qd_dispatch *dispatch); /* the same on all ranks; at least 1 */
int64_t qd_dispatch_rows(const qd_dispatch *dispatch, int64_t round); /* that this rank's experts get in a round */
/* In rows, per rank: what this one sends, from which of its rows on; what it gets, to which row of
 * its room. */
void qd_dispatch_lists(const qd_dispatch *dispatch, int64_t round, int64_t *send, int64_t *send_first, int64_t *receive,
                       int64_t *receive_first);

/* Room of the ops that carry out further rounds, in elements: where each array of `capacity` rows
 * begins, and what they take together. Forward uses in, up, active and out. */
typedef struct qd_round_room {
    int64_t in, up, active, out, d_active, d_up, sorted, elements;
} qd_round_room;
qd_round_room qd_round_room_of(int64_t capacity, int64_t hidden, int64_t ffn, int64_t assignments, bool backward);
#endif
