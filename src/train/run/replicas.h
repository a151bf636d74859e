/* Compares replicas: ranks that hold the same part of a tensor must be bit-identical there. A
 * flipped bit in memory, a damaged message or a processor that computes wrongly shows up here. */
#ifndef QD_TRAIN_RUN_REPLICAS_H
#define QD_TRAIN_RUN_REPLICAS_H

#include "train/exec/trainer.h"

typedef struct qd_replicas qd_replicas;

/* What a rank holds of one class of tensors, and its bits. Where `part` is equal and not 0, `bits`
 * must be. */
typedef struct qd_replica_mark {
    int64_t part, bits;
} qd_replica_mark;
enum { QD_REPLICA_MARKS = 2 * QD_FAMILY_COUNT }; /* tensors that a rank holds whole have more replicas (along tp) than its shards */

/* Collective over `control`, which has all ranks of the trainer's world. Both must outlive it. */
qd_status qd_replicas_create(qd_trainer *trainer, qd_comm *control, qd_replicas **replicas);
void qd_replicas_destroy(qd_replicas *replicas); /* NULL is legal */

/* Whether any part of the state has replicas; the same on all ranks. */
bool qd_replicas_exist(const qd_replicas *replicas);

/* Not collective: hashes all that this rank holds. */
qd_status qd_replicas_mark(qd_replicas *replicas, qd_replica_mark marks[QD_REPLICA_MARKS]);
bool qd_replica_marks_differ(const qd_replica_mark *a, const qd_replica_mark *b);

/* Collective: compares weights and optimizer state of all replicas. QD_DIFFERENT, with the same
 * message on all ranks, names the tensor and the rank that the majority contradicts, or the ranks
 * that differ where there is no majority. heal: a rank that is contradicted gets the tensors of the
 * majority; `healed` then says so, otherwise it is "". */
qd_status qd_replicas_compare(qd_replicas *replicas, bool heal, char healed[512]);
#endif
