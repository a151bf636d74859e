/* Pipeline schedules as data: for each pipeline rank the list of what it computes, in order. A
 * model is cut into consecutive *stages*; a rank holds one or several of them. A *turn* is one pass
 * of one stage for one micro-batch.
 *
 * Results do not depend on the schedule: on every stage the passes F, B or I, and W each process
 * the micro-batches in ascending order, so that losses and gradients are always summed in the same
 * order. qd_schedule_validate rejects lists that do not. */
#ifndef QD_SPEC_SCHEDULE_SCHEDULE_H
#define QD_SPEC_SCHEDULE_SCHEDULE_H

#include "base/arena.h"

#include <quadrille/types.h>

#include <stdio.h>

/* X(kind, name) */
#define QD_SCHEDULE_TABLE(X)                                                                                                \
    X(1F1B, "1f1b")               /* forward and backward alternate: rank r of p has at most p - r micro-batches in flight */  \
    X(GPIPE, "gpipe")             /* all forward, then all backward: every micro-batch is in flight */                      \
    X(INTERLEAVED, "interleaved") /* 1F1B with several stages per rank, assigned round robin: a smaller bubble */           \
    X(ZB_H1, "zb_h1")             /* 1F1B with a split backward pass: weight gradients fill the bubble */                   \
    X(ZB_V, "zb_v")               /* two stages per rank, placed as a V, split backward pass: almost no bubble */           \
    X(DUALPIPE_V, "dualpipe_v")   /* placed as zb_v; forward and backward of the two stages in pairs */                     \
    X(FILE, "file")               /* read from a file */

typedef enum qd_schedule_kind {
#define QD_SCHEDULE_ENUM(kind, name) QD_SCHEDULE_##kind,
    QD_SCHEDULE_TABLE(QD_SCHEDULE_ENUM)
#undef QD_SCHEDULE_ENUM
    QD_SCHEDULE_KIND_COUNT
} qd_schedule_kind;

/* F: forward; B: the whole backward pass; I and W: its two halves, gradients of inputs and of
 * weights. */
typedef enum qd_pass { QD_PASS_F, QD_PASS_B, QD_PASS_I, QD_PASS_W, QD_PASS_COUNT } qd_pass;

typedef struct qd_turn {
    uint8_t pass; /* qd_pass */
    int32_t stage, microbatch;
} qd_turn;

typedef struct qd_schedule {
    qd_schedule_kind kind;
    int ranks, stages, micro_batches;
    bool training;  /* false: forward only */
    bool splits;    /* some backward passes are split into I and W */
    int *rank_of;   /* per stage */
    qd_turn *turns; /* of all ranks, one rank after the other */
    int *begin;     /* ranks + 1: turns of rank r are begin[r] .. begin[r + 1] - 1 */
} qd_schedule;

const char *qd_schedule_name(qd_schedule_kind kind);
char qd_pass_letter(qd_pass pass);

/* The default number of stages per rank; *fixed: the kind allows no other number. */
int qd_schedule_stages(qd_schedule_kind kind, bool *fixed);
/* Pipeline rank of a stage: round robin, or as a V (zb_v, dualpipe_v). */
int qd_schedule_rank_of(qd_schedule_kind kind, int ranks, int stage);

/* Creates a schedule of any kind but FILE, in `arena`. QD_USAGE, with the reason, when the kind
 * does not support these numbers. training false: forward passes only, on the stages as the kind
 * places them. */
qd_status qd_schedule_create(qd_schedule_kind kind, int ranks, int stages, int micro_batches, bool training, qd_arena *arena,
                             qd_schedule **schedule);

/* Forward passes only, on the stages and ranks of another schedule. */
qd_status qd_schedule_forward(const qd_schedule *placed, int micro_batches, qd_arena *arena, qd_schedule **schedule);

/* Checks that every stage is on one rank; that each (stage, micro-batch) occurs once, F before B,
 * or F before I before W; that micro-batches ascend; and that there is no deadlock. QD_USAGE names
 * the first wrong turn. */
qd_status qd_schedule_validate(const qd_schedule *schedule);

/* Timing of a schedule when each pass takes the given time, transfers take `transfer`, and ranks
 * wait for what they need. */
typedef struct qd_schedule_times {
    double *start, *end; /* per turn */
    double *busy;        /* per rank */
    double makespan;
    double bubble;       /* fraction of ranks × makespan in which ranks wait */
} qd_schedule_times;
qd_status qd_schedule_replay(const qd_schedule *schedule, const double seconds[QD_PASS_COUNT], double transfer, qd_arena *arena,
                             qd_schedule_times *times);

/* The largest number of (stage, micro-batch) pairs of a rank whose activations are kept at once:
 * from F to B or W. */
int qd_schedule_in_flight(const qd_schedule *schedule, int rank);
/* The bubble in the literature for uniform stages, with backward passes twice as long as a forward
 * pass and halves as long as one; -1: none known. */
double qd_schedule_theory(const qd_schedule *schedule);

/* The rest is in schedule_text.c. */

/* One line per rank, turns separated by commas, each "stage, letter, micro-batch": 0F0,0F1,0B0.
 * Lines that begin with # are comments. The format of PyTorch. */
qd_status qd_schedule_write_csv(const qd_schedule *schedule, FILE *out);
/* The result is validated. `name` appears in messages. */
qd_status qd_schedule_read_csv(FILE *in, const char *name, qd_arena *arena, qd_schedule **schedule);
/* One row per rank and one column per unit of time (B takes two): letters F, B, I, W with
 * micro-batch numbers. */
qd_status qd_schedule_draw_text(const qd_schedule *schedule, FILE *out);
qd_status qd_schedule_draw_svg(const qd_schedule *schedule, FILE *out);
#endif
