/* Writing schedules: what schedule.c and schedule_zero.c share. */
#ifndef QD_SPEC_SCHEDULE_SCHEDULE_IMPL_H
#define QD_SPEC_SCHEDULE_SCHEDULE_IMPL_H

#include "spec/schedule/schedule.h"

/* Turns are appended rank by rank. The table has space for every (stage, micro-batch) in three
 * passes. */
typedef struct qd_schedule_writer {
    qd_schedule *s;
    int count;
} qd_schedule_writer;

static inline void qd_schedule_add(qd_schedule_writer *w, qd_pass pass, int stage, int microbatch)
{
    if (microbatch < w->s->micro_batches) /* skips turns of patterns that assume more micro-batches */
        w->s->turns[w->count++] = (qd_turn){(uint8_t)pass, stage, microbatch};
}

/* dualpipe_v keeps a list of this size on the stack. */
#define QD_DUALPIPE_RANKS 4096

/* schedule_zero.c: schedules that split the backward pass. */
void qd_schedule_write_zb_h1(qd_schedule_writer *w, int rank);
void qd_schedule_write_zb_v(qd_schedule_writer *w, int rank);
void qd_schedule_write_dualpipe_v(qd_schedule_writer *w, int rank);
#endif
