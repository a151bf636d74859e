/* The proof of gradients: that a finished step computes, on every rank, the gradient of the mean
 * loss over the global batch.
 *
 * It reads only the programs (actions, op lists, the ledger's placements of parameters) and shares
 * no code with what built them. Op by op it computes how each value is placed on each axis of the
 * mesh: replicated, a shard, or a partial sum. Then it follows the gradients action by action. See
 * docs/architecture.md, "The proof of gradients". */
#ifndef QD_SPEC_PROOF_PROOF_H
#define QD_SPEC_PROOF_PROOF_H

#include "spec/program/program.h"

typedef struct qd_proof_report {
    int64_t values, ops; /* placements computed and ops followed; each class of modules of a program counts once */
} qd_proof_report;

/* programs[rank] for each rank of the mesh; ranks that share a program have the same pointer.
 * QD_MISMATCH names rank, op or action, value, axis and what is wrong. Assumes that their
 * communication matches (qd_check_programs). `report` may be NULL. */
qd_status qd_prove_programs(const qd_mesh *mesh, const qd_program *const *programs, qd_proof_report *report);

/* Whether the proof has a rule for an op. Programs with an op that has none are rejected. */
bool qd_proof_knows(qd_op_kind kind);
#endif
