/* Muon in the step program: the two-dimensional weights of blocks are *matrices*, logical tensors (q, k, v apart), each of
 * which one rank orthogonalizes as a whole; everything else is AdamW's.
 *
 * The ranks that share the work are those of a sharded copy, or without sharding all of the data axes. Matrices are given to
 * them by cost, the most expensive first, each to the rank that has the least to do. The k-th matrices of all ranks are round
 * k: program->matrices lists the rounds one after another, and an action names a run of that list by `param` and `params`.
 *
 * A round, sharded: MOMENTUM writes this rank's rows of the round's matrices into `part`, one matrix after another; COLLECT
 * makes the rank's own matrix of them in `buffer`; ORTHOGONALIZE; HAND_BACK brings rows of the results back into `part`;
 * UPDATE_MATRICES applies them. The next round is collected, and the one before handed back, while this one is computed.
 * Not sharded: MOMENTUM writes the rank's own matrix into `buffer`; ORTHOGONALIZE; then for each matrix SHARE brings the result
 * into `buffer` of all ranks but its owner, which has it in `part`; UPDATE_MATRICES applies it.
 * ORTHOGONALIZE has its scratch in `part`.
 *
 * All ranks have the same actions and, rows aside, the same buffers; a rank without a matrix in a round computes nothing in it. */
#ifndef QD_SPEC_MUON_H
#define QD_SPEC_MUON_H

#include "spec/program.h"

/* Whether Muon orthogonalizes the gradient of a parameter. */
bool qd_muon_takes(const qd_ledger *ledger, int param);

/* The place of a rank among those that share the work. */
int qd_muon_place(const qd_program *program, int rank);
/* The matrix of a run that belongs to a place, -1: none. */
int qd_muon_own(const qd_program *program, const qd_action *run, int place);

/* Where the parts of ORTHOGONALIZE's scratch begin, in bytes; r = min(rows, cols). */
typedef struct qd_muon_scratch {
    int64_t gram, poly; /* (r, r) */
    int64_t next;       /* (rows, cols) */
    int64_t squares;    /* (rows) of double */
    int64_t bytes;      /* in all */
} qd_muon_scratch;
qd_muon_scratch qd_muon_scratch_of(int64_t rows, int64_t cols);
#endif
