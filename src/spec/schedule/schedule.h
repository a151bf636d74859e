/* Pipeline schedules as data: for each pipeline rank the list of what it computes, in order. A
 * model is cut into *stages* that follow each other; a rank holds one of them or several. A *turn*
 * is one pass of one stage for one micro-batch.
 *
 * Numbers do not depend on the schedule: on every stage the passes F, B or I, and W each go through
 * the micro-batches in ascending order, so that losses and gradients are added in one order.
 * qd_schedule_validate refuses lists that do not. */
#ifndef QD_SPEC_SCHEDULE_SCHEDULE_H
#define QD_SPEC_SCHEDULE_SCHEDULE_H

#include "base/arena.h"

#include <quadrille/types.h>

#include <stdio.h>

/* X(kind, name) */
#define QD_SCHEDULE_TABLE(X)                                                                                                \
    X(1F1B, "1f1b")               /* forward and backward in turn: rank r of p has at most p - r micro-batches in flight */ \
    X(GPIPE, "gpipe")             /* all forward, then all backward: every micro-batch is in flight */                      \
    X(INTERLEAVED, "interleaved") /* 1F1B with several stages per rank, dealt out round robin: a shorter bubble */          \
    X(ZB_H1, "zb_h1")             /* 1F1B with the backward pass in two halves: gradients of weights fill the bubble */     \
    X(ZB_V, "zb_v")               /* two stages per rank, there and back, halves as above: next to no bubble */             \
    X(DUALPIPE_V, "dualpipe_v")   /* placed as zb_v; forward and backward of the two stages in pairs */                     \
    X(FILE, "file")               /* read from a file */

typedef enum qd_schedule_kind {
#define QD_SCHEDULE_ENUM(kind, name) QD_SCHEDULE_##kind,
    QD_SCHEDULE_TABLE(QD_SCHEDULE_ENUM)
#undef QD_SCHEDULE_ENUM
    QD_SCHEDULE_KIND_COUNT
} qd_schedule_kind;

/* F: forward; B: the whole backward pass; I and W: its halves, gradients of inputs and gradients of
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
    bool splits;    /* some backward pass is in halves */
    int *rank_of;   /* per stage */
    qd_turn *turns; /* rank after rank */
    int *begin;     /* ranks + 1: turns of rank r are begin[r] .. begin[r + 1] - 1 */
} qd_schedule;

const char *qd_schedule_name(qd_schedule_kind kind);
char qd_pass_letter(qd_pass pass);

/* Stages per rank that a kind wants when the user says nothing; *fixed: it takes no other
 * number. */
int qd_schedule_stages(qd_schedule_kind kind, bool *fixed);
/* Pipeline rank of a stage: round robin, or there and back (zb_v, dualpipe_v). */
int qd_schedule_rank_of(qd_schedule_kind kind, int ranks, int stage);

/* Any kind but FILE. QD_USAGE with the reason when the kind does not go with these numbers. Forward
 * only (training false): every micro-batch through all stages of the kind's placement. Lives in
 * `arena`. */
qd_status qd_schedule_create(qd_schedule_kind kind, int ranks, int stages, int micro_batches, bool training, qd_arena *arena,
                             qd_schedule **schedule);

/* Forward passes alone, on the stages and ranks of another schedule. */
qd_status qd_schedule_forward(const qd_schedule *placed, int micro_batches, qd_arena *arena, qd_schedule **schedule);

/* Every stage on one rank; each (stage, micro-batch) once, F before B, or F before I before W;
 * ascending micro-batches; and no rank waits for ever. QD_USAGE names the first turn that is
 * wrong. */
qd_status qd_schedule_validate(const qd_schedule *schedule);

/* What happens when each pass takes the given time, transfers take `transfer`, and ranks wait for
 * what they need. */
typedef struct qd_schedule_times {
    double *start, *end; /* per turn */
    double *busy;        /* per rank */
    double makespan;
    double bubble;       /* part of ranks × makespan in which ranks wait */
} qd_schedule_times;
qd_status qd_schedule_replay(const qd_schedule *schedule, const double seconds[QD_PASS_COUNT], double transfer, qd_arena *arena,
                             qd_schedule_times *times);

/* Most (stage, micro-batch) pairs of a rank whose activations are kept at once: from F to B or
 * W. */
int qd_schedule_in_flight(const qd_schedule *schedule, int rank);
/* The textbook's bubble for uniform stages, backward passes taking twice a forward pass and halves
 * as long as it; -1: none known. */
double qd_schedule_theory(const qd_schedule *schedule);

/* ---- schedule_text.c ---- */

/* One line per rank, turns separated by commas, each "stage, letter, micro-batch": 0F0,0F1,0B0.
 * Lines that begin with # are comments. As PyTorch writes and reads them. */
qd_status qd_schedule_write_csv(const qd_schedule *schedule, FILE *out);
/* Validated. `name` appears in messages. */
qd_status qd_schedule_read_csv(FILE *in, const char *name, qd_arena *arena, qd_schedule **schedule);
/* A row per rank and a column per unit of time (B takes two): letters F, B, I, W with micro-batch
 * numbers. */
qd_status qd_schedule_draw_text(const qd_schedule *schedule, FILE *out);
qd_status qd_schedule_draw_svg(const qd_schedule *schedule, FILE *out);
#endif
