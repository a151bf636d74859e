/* Placement of experts on the mesh, and the row counts of the all-to-all that dispatches rows to
 * them.
 *
 * For experts, the ranks of tp, cp and dp (tp fastest) are folded a second time into etp · ep ·
 * edp, etp fastest. Ranks of ep hold different experts, ranks of etp hold slices of the same
 * experts (along their inner width), ranks of edp are replicas. Rows are dispatched within groups
 * of etp · ep neighbouring ranks. */
#ifndef QD_SPEC_LAYOUT_EXPERTS_H
#define QD_SPEC_LAYOUT_EXPERTS_H

#include "spec/layout/ledger.h"

/* QD_USAGE, with the reason, when the experts cannot be divided over the mesh. */
qd_status qd_experts_check(const qd_model *model, const qd_mesh *mesh);

int qd_expert_ranks(const qd_mesh *mesh);             /* etp · ep */
qd_group qd_expert_group(const qd_mesh *mesh);        /* ranks that together hold all experts */
qd_group qd_expert_data_group(const qd_mesh *mesh);   /* edp: ranks that hold the same slices of the same experts */
/* The ranks over which expert loads are summed for the auxiliary loss: those that hold tokens of
 * the same sequence, or of the same batch. Size 1: nothing is summed. */
qd_group qd_expert_load_group(const qd_model *model, const qd_mesh *mesh);
/* Whether gradients of experts are reduced over different ranks than those of the other
 * parameters. */
bool qd_experts_apart(const qd_model *model, const qd_mesh *mesh);
/* The ranks over which the gradient norm is summed: all ranks along tp and the expert axes that
 * hold different parameters. */
qd_group qd_norm_group(const qd_model *model, const qd_mesh *mesh);

/* A rank holds the experts [*first, *first + returned count). */
int qd_experts_of(const qd_model *model, const qd_mesh *mesh, int rank, int *first);
/* The box of an expert's matrix that a rank holds; etp cuts its dimension `expert_dim`. */
qd_atom qd_expert_atom(const qd_ledger *ledger, const qd_param *param, int rank);

/* One dispatch. Each rank has its rows sorted by expert; table (ranks, experts) has the number of
 * rows of each rank for each expert. The owner of an expert has buffer space for `capacity` rows
 * and receives them in rounds: its list is the rows of rank 0 for its experts, by expert, then
 * those of rank 1, and so on; a round is `capacity` rows of that list. So the rows that one rank
 * sends to another in a round are contiguous. */
typedef struct qd_dispatch {
    const int32_t *table;
    int ep, etp, position; /* of this rank in the group of etp · ep */
    int experts;           /* total number of experts */
    int64_t capacity;
} qd_dispatch;
int64_t qd_dispatch_rounds(const qd_dispatch *dispatch); /* the same on all ranks; at least 1 */
int64_t qd_dispatch_rows(const qd_dispatch *dispatch, int64_t round); /* rows that this rank's experts receive in a round */
/* Send and receive counts of a round in rows, per rank, with the first row of each in this rank's
 * sorted rows and in its receive buffer. */
void qd_dispatch_lists(const qd_dispatch *dispatch, int64_t round, int64_t *send, int64_t *send_first, int64_t *receive,
                       int64_t *receive_first);

/* Workspace of the ops that run extra dispatch rounds, in elements: the offset of each array of
 * `capacity` rows, and the total. The forward pass uses in, up, active and out. */
typedef struct qd_round_room {
    int64_t in, up, active, out, d_active, d_up, sorted, elements;
} qd_round_room;
qd_round_room qd_round_room_of(int64_t capacity, int64_t hidden, int64_t ffn, int64_t assignments, bool backward);
#endif
