/* Asynchronous checkpoints: each rank writes its part in a thread of its own, from a copy of its
 * state, while training continues. */
#ifndef QD_TRAIN_RUN_SAVER_H
#define QD_TRAIN_RUN_SAVER_H

#include "ckpt/checkpoint.h"
#include "train/exec/trainer.h"

typedef struct qd_saver qd_saver;

typedef enum qd_save_state { QD_SAVE_IDLE, QD_SAVE_GOING_ON, QD_SAVE_DONE, QD_SAVE_FAILED } qd_save_state;
typedef struct qd_save_report {
    qd_save_state state; /* DONE and FAILED are reported once */
    int64_t step;
    qd_status status; /* FAILED: of the rank that failed. QD_NOT_FINITE: the state itself is bad, and no later save can succeed */
    char message[512]; /* FAILED: why, with the rank; the same on all ranks. DONE: "", or on rank 0 which old one was not removed */
} qd_save_report;

/* root: <root>/step-… are the checkpoints; keep: how many to keep, 0: all. snapshot: allocates
 * memory for a copy of what this rank writes (qd_saver_snapshot() bytes, as planned by
 * qd_pieces_bytes()); without it the caller must wait for each save. */
qd_status qd_saver_create(qd_trainer *trainer, qd_comm *control, const char *root, int keep, bool snapshot, qd_saver **saver);
void qd_saver_destroy(qd_saver *saver); /* waits for this rank's thread; NULL is legal */
int64_t qd_saver_snapshot(const qd_saver *saver);
bool qd_saver_copies(const qd_saver *saver); /* has such memory, if only for 0 bytes: the same on all ranks */
/* Whether its thread is in a call that does not return: it uses the trainer, so nothing may be
 * freed. */
bool qd_saver_is_stuck(const qd_saver *saver); /* NULL is legal */
/* Not collective, after a failure: the current save ends with its next tensor, incomplete. */
void qd_saver_abandon(qd_saver *saver); /* NULL is legal */

/* Not collective, between saves: the checkpoint that is kept in addition to the newest, as in
 * qd_store_commit(). */
void qd_saver_set_best(qd_saver *saver, int64_t step);
/* Adapters: the folder with the frozen values, which checkpoints name instead of containing
 * them. */
qd_status qd_saver_set_base(qd_saver *saver, const char *path);

/* Collective, while no save is in progress. Copies this rank's state and starts writing; failures
 * are reported by qd_saver_poll(). config: of rank 0, copied. Only communication failures are
 * returned, here and below. */
qd_status qd_saver_begin(qd_saver *saver, const char *config);
/* Collective and cheap: the state of the current save. wait: blocks until it has ended, while the
 * ranks keep communicating. Without a snapshot, training must not continue before that. */
qd_status qd_saver_poll(qd_saver *saver, bool wait, qd_save_report *report);
#endif
