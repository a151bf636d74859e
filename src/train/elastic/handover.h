/* The state of a run in memory: when ranks are lost, or their number changes, those that stay hand
 * weights, optimizer state and position over to the ranks of the next world. No step is lost, and
 * nothing is read from disk.
 *
 * It is in anonymous files in memory (memfd): one that the launcher creates and passes to its
 * local ranks, or, in a world without a launcher, one of each rank that stays, whose contents the
 * ranks of the next world broadcast. Like a checkpoint it holds boxes of logical tensors in fp32,
 * so the next layout may be any. Replicas are written once. */
#ifndef QD_TRAIN_ELASTIC_HANDOVER_H
#define QD_TRAIN_ELASTIC_HANDOVER_H

#include "ckpt/checkpoint.h"
#include "train/exec/trainer.h"
#include "train/run/replicas.h"

#include <limits.h>

/* Where the run is, apart from its tensors. */
typedef struct qd_handover_facts {
    qd_position position;
    int64_t kept, saving;      /* steps of the newest checkpoint and of the last one that was begun; -1: none */
    int32_t followed;          /* what follows the step is done: metrics, validation, samples, checkpoint */
    int32_t skipped, rollbacks, other_validation; /* as in qd_rank_run */
    qd_step_output output;     /* of the step, if that is not done; and how long it took */
    double seconds;
    char base[PATH_MAX];       /* adapters: folder of the frozen values; "": none is known */
    qd_replica_mark marks[QD_REPLICA_MARKS]; /* of the state; parts 0: replicas are not compared */
} qd_handover_facts;

/* An empty one. The caller closes the descriptor. */
qd_status qd_handover_create(int *fd);
/* Not collective. Whether the ranks in `left` (bits) have all of the state between them. */
qd_status qd_handover_covers(qd_trainer *trainer, uint64_t left, bool *complete);
/* Not collective. Adds what this rank has to hand over if only the ranks in `left` (bits) have the
 * state. *complete: together they have all of it; otherwise nothing is written. */
qd_status qd_handover_write(int fd, qd_trainer *trainer, uint64_t left, const qd_handover_facts *facts, bool *complete);

typedef struct qd_handover qd_handover;
/* After all have written. The descriptor stays the caller's. */
qd_status qd_handover_open(int fd, qd_handover **handover);
/* Collective over `comm`, which must outlive the handover, in place of open(): each rank has a file
 * of its own, with what it has written, or none (-1). */
qd_status qd_handover_gather(int fd, qd_comm *comm, qd_handover **handover);
/* Whether it was gathered: load() is collective. */
bool qd_handover_is_gathered(const qd_handover *handover);
void qd_handover_close(qd_handover *handover); /* NULL is legal */
const qd_handover_facts *qd_handover_get_facts(const qd_handover *handover);
/* Whether ranks that hold the same part of the state have other bits there. */
bool qd_handover_differs(const qd_handover *handover);
/* Fills weights and optimizer state of a trainer of any layout, and its position. Gathered: every
 * rank sends what it has written to all others, a few MiB at a time. */
qd_status qd_handover_load(qd_handover *handover, qd_trainer *trainer);
#endif
