/* Muon in the step program: the two-dimensional weights of blocks are *matrices*, logical tensors
 * (q, k, v apart), each of which one rank orthogonalizes as a whole; everything else is AdamW's.
 *
 * Two groups of ranks do it together. Those of a matrix_group have parts of every matrix: the ranks
 * of a sharded copy, times tp, which cuts matrices by rows or columns. Those of a share_group have
 * the same parts: without sharding, the ranks of the data axes. Matrices are given to all of them
 * by cost, the most expensive first, each to the rank that has the least to do. The k-th matrices
 * of all ranks are round k: program->matrices lists the rounds one after another, in each the ranks
 * of one matrix_group after another, and an action names a run of that list by `param` and
 * `params`.
 *
 * Experts that are laid out apart are a family of parameters with groups of their own: etp in place
 * of tp, edp in place of the data axes. A rank takes part in the rounds of its own experts only.
 * Where etp and ZeRO both cut them, the ranks that do (etp times edp) are no neighbours: their
 * group is all ranks of a copy, and those of other experts send each other nothing.
 *
 * MOMENTUM writes this rank's boxes of the round's matrices that its matrix_group orthogonalizes
 * into `part`, one matrix after another; COLLECT brings those of one matrix together in `buffer` of
 * its owner; ORTHOGONALIZE; HAND_BACK brings boxes of the results back into `part`; UPDATE_MATRICES
 * applies them. The next round is collected, and the one before handed back, while this one is
 * computed. A rank that has whole matrices leaves out both exchanges: `part` is -1, and MOMENTUM
 * writes its own matrix into `buffer`. With a share_group, SHARE then brings this rank's box of
 * each result into `buffer` of all ranks of the group but one, which has it in `part`: where
 * HAND_BACK left it, or the matrix itself. ORTHOGONALIZE has its scratch in `part`.
 *
 * All ranks have the same actions and, boxes aside, the same buffers; a rank without a matrix in a
 * round computes nothing in it. */
#ifndef QD_SPEC_PROGRAM_MUON_H
#define QD_SPEC_PROGRAM_MUON_H

#include "spec/program/program.h"

/* Whether Muon orthogonalizes the gradient of a parameter. */
bool qd_muon_takes(const qd_ledger *ledger, int param);

/* The groups of a run's matrices, which are of one family. */
int qd_muon_matrix_group(const qd_program *program, int matrix);
int qd_muon_share_group(const qd_program *program, int matrix);
/* The ranks that cut a parameter into other boxes than ZeRO does: tp, or the experts' etp. */
qd_group qd_muon_cut_group(const qd_ledger *ledger, int param);

/* The matrix of a run that a rank orthogonalizes, -1: none. */
int qd_muon_own(const qd_program *program, const qd_action *run, int rank);
/* Whether the matrix_group of a rank orthogonalizes a matrix. */
bool qd_muon_is_near(const qd_program *program, int matrix, int rank);

/* What a rank has of a matrix. */
typedef struct qd_muon_box {
    qd_atom atom;
    int64_t count;
    int64_t at;  /* element of the owner's buffer at which it lies: boxes of the same columns lie one below the other, and columns
                    after columns. A matrix that is cut by rows only lies there as it is. */
    bool speaks; /* it is this rank that sends it, of those along tp that have the same */
} qd_muon_box;
qd_muon_box qd_muon_box_of(const qd_program *program, int matrix, int rank);
/* Whether boxes have some of the columns only, and the owner has to put them beside each other. */
bool qd_muon_cuts_columns(const qd_program *program, int matrix);

/* Where the parts of ORTHOGONALIZE's scratch begin, in bytes; r = min(rows, cols). */
typedef struct qd_muon_scratch {
    int64_t gram, poly; /* (r, r) */
    int64_t next;       /* (rows, cols) */
    int64_t squares;    /* (rows) of double */
    int64_t bytes;      /* in all */
} qd_muon_scratch;
qd_muon_scratch qd_muon_scratch_of(int64_t rows, int64_t cols);
#endif
