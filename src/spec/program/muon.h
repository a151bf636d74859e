/* Muon in the step program: the two-dimensional weights of blocks are *matrices*, logical tensors
 * (q, k and v are separate), each of which one rank orthogonalizes as a whole. AdamW updates
 * everything else.
 *
 * Two groups of ranks share the work. The ranks of a matrix_group hold parts of every matrix: the
 * ranks of a sharded copy, times tp, which shards matrices by rows or columns. The ranks of a
 * share_group hold the same parts: without sharding, the ranks of the data axes. Matrices are
 * assigned to all of them by cost, the most expensive first, each to the rank with the least work
 * so far. The k-th matrices of all ranks form round k: program->matrices lists the rounds one after
 * another, within a round by rank of the matrix_groups, and an action names a run of that list by
 * `param` and `params`.
 *
 * Experts that are reduced over ranks of their own are a separate family of parameters with their
 * own groups: etp in place of tp, edp in place of the data axes. A rank takes part only in the
 * rounds of its own experts. If both etp and ZeRO shard them, the ranks that hold parts (etp times
 * edp) are not neighbours: their group is all ranks of a copy, and ranks of other experts exchange
 * nothing.
 *
 * - MOMENTUM writes this rank's boxes of the round's matrices that its matrix_group orthogonalizes
 *   to `part`, one matrix after another.
 * - COLLECT gathers the boxes of one matrix in `buffer` of its owner.
 * - ORTHOGONALIZE works on it, with scratch in `part`.
 * - HAND_BACK returns boxes of the results to `part`.
 * - UPDATE_MATRICES applies them.
 *
 * The next round is collected, and the previous one handed back, while this one is computed. A rank
 * that holds whole matrices skips both exchanges: `part` is -1, and MOMENTUM writes its own matrix
 * to `buffer`. With a share_group, SHARE then broadcasts this rank's box of each result to `buffer`
 * of all other ranks of the group; the sender has it in `part`: where HAND_BACK left it, or the
 * matrix itself.
 *
 * All ranks have the same actions and, except for boxes, the same buffers; a rank without a matrix
 * in a round computes nothing in it. */
#ifndef QD_SPEC_PROGRAM_MUON_H
#define QD_SPEC_PROGRAM_MUON_H

#include "spec/program/program.h"

/* Whether Muon orthogonalizes the gradient of a parameter. */
bool qd_muon_takes(const qd_ledger *ledger, int param);

/* The groups of a run of matrices, which all belong to one family. */
int qd_muon_matrix_group(const qd_program *program, int matrix);
int qd_muon_share_group(const qd_program *program, int matrix);
/* The ranks that shard a parameter in addition to ZeRO: tp, or etp for experts. */
qd_group qd_muon_cut_group(const qd_ledger *ledger, int param);

/* The matrix of a run that a rank orthogonalizes, -1: none. */
int qd_muon_own(const qd_program *program, const qd_action *run, int rank);
/* Whether the matrix_group of a rank orthogonalizes a matrix. */
bool qd_muon_is_near(const qd_program *program, int matrix, int rank);

/* The part of a matrix that a rank holds. */
typedef struct qd_muon_box {
    qd_atom atom;
    int64_t count;
    /* Offset in the owner's buffer, in elements. Boxes with the same columns follow each other by
     * rows, then come the next columns. A matrix that is cut by rows only has its usual layout. */
    int64_t at;
    bool speaks; /* this rank sends it, of those along tp that hold the same box */
} qd_muon_box;
qd_muon_box qd_muon_box_of(const qd_program *program, int matrix, int rank);
/* Whether boxes have only some of the columns, so that the owner has to interleave them. */
bool qd_muon_cuts_columns(const qd_program *program, int matrix);

/* Offsets of the parts of ORTHOGONALIZE's scratch, in bytes; r = min(rows, cols). */
typedef struct qd_muon_scratch {
    int64_t gram, poly; /* (r, r) */
    int64_t next;       /* (rows, cols) */
    int64_t squares;    /* (rows) of double */
    int64_t bytes;      /* total */
} qd_muon_scratch;
qd_muon_scratch qd_muon_scratch_of(int64_t rows, int64_t cols);
#endif
