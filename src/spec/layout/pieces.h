/* Which boxes of which logical tensors a rank writes to a checkpoint. The plan is pure arithmetic
 * and needs no communication: the boxes of all ranks cover each tensor once, and replicas share the
 * work evenly. */
#ifndef QD_SPEC_LAYOUT_PIECES_H
#define QD_SPEC_LAYOUT_PIECES_H

#include "spec/program/program.h"

typedef enum qd_ckpt_kind { QD_CKPT_VALUE, QD_CKPT_MOMENT1, QD_CKPT_MOMENT2, QD_CKPT_KIND_COUNT } qd_ckpt_kind;

/* Upper limit of one piece (a row is never cut), so that a reader verifies little more than it
 * needs. */
#define QD_PIECE_BYTES ((int64_t)64 << 20)

typedef struct qd_state_piece {
    int param;
    qd_ckpt_kind kind;
    qd_atom box;
    int64_t count;  /* elements */
    int64_t before; /* elements of the pieces before it in the list */
} qd_state_piece;

typedef struct qd_state_pieces {
    qd_state_piece *list; /* by kind, then by parameter, then by row */
    int count;
    int64_t elements, largest; /* total; of the largest piece */
} qd_state_pieces;

/* Whether checkpoints leave a parameter out: frozen values that are stored elsewhere. */
bool qd_pieces_omit(const qd_ledger *ledger, int param);
/* The kinds of state that a training program keeps, as bits 1 << qd_ckpt_kind. */
unsigned qd_pieces_kinds(const qd_program *program);
/* A bit among the kinds: also values that checkpoints leave out. */
#define QD_PIECES_OMITTED (1u << QD_CKPT_KIND_COUNT)
/* The pieces of the program's rank, for the given kinds. */
qd_status qd_pieces_plan(const qd_program *program, unsigned kinds, qd_arena *arena, qd_state_pieces *pieces);
/* The same where only the ranks in `left` (bits) have their state: each box that one of them holds
 * is a piece of one of them. *complete: these pieces are all of the state. */
qd_status qd_pieces_left(const qd_program *program, unsigned kinds, uint64_t left, qd_arena *arena, qd_state_pieces *pieces,
                         bool *complete);
/* Number of tensors that all ranks together write, over all kinds. */
int qd_pieces_tensors(const qd_program *program);
/* Bytes of this rank's state in fp32: the size of a snapshot. */
int64_t qd_pieces_bytes(const qd_program *program);
#endif
