/* What a rank of an MPI world reports to its observer, from two threads: the one that trains, and
 * the one that watches another rank (comm/guard.h). mpirun kills all ranks one second after it has
 * lost one, and the training thread may be busy for longer: in a step, or with a disk. */
#ifndef QD_TRAIN_LAUNCH_LAUNCH_TOLD_H
#define QD_TRAIN_LAUNCH_LAUNCH_TOLD_H

#include "train/launch/launch_journal.h"

#include <pthread.h>
#include <quadrille/train.h>
#include <stdatomic.h>

typedef struct qd_told {
    qd_train_observer observer; /* for the training thread: passes on what it gets, one call at a time */
    const qd_train_observer *to;
    pthread_mutex_t lock;
    atomic_int *failure; /* 1: a failure has been reported */
    qd_journal *journal; /* records steps; NULL: none is kept */
} qd_told;

/* failure: set by the thread that reports one first; outlives *told, as does the observer. */
void qd_told_begin(qd_told *told, const qd_train_observer *to, atomic_int *failure);
void qd_told_end(qd_told *told);
/* For the watching thread; a qd_guard_tell. Gives the training thread a moment to report it. */
void qd_told_lost(void *told, const char *message);
#endif
