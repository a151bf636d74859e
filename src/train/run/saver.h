/* Checkpoints of a run that trains on: each rank writes its part in a thread of its own, from a
 * copy of its state. */
#ifndef QD_TRAIN_RUN_SAVER_H
#define QD_TRAIN_RUN_SAVER_H

#include "ckpt/checkpoint.h"
#include "train/exec/trainer.h"

typedef struct qd_saver qd_saver;

typedef enum qd_save_state { QD_SAVE_IDLE, QD_SAVE_GOING_ON, QD_SAVE_DONE, QD_SAVE_FAILED } qd_save_state;
typedef struct qd_save_report {
    qd_save_state state; /* DONE and FAILED are told once */
    int64_t step;
    qd_status status; /* FAILED: of the rank that failed. QD_NOT_FINITE: the state itself is bad, and no later save can succeed */
    char message[512]; /* FAILED: why, with the rank; the same on all ranks. DONE: "", or on rank 0 what old one could not be removed */
} qd_save_report;

/* root: <root>/step-… are the checkpoints; keep: how many stay, 0: all. snapshot: room for a copy
 * of what this rank writes is taken now (qd_saver_snapshot() bytes, as qd_pieces_bytes() planned);
 * without it a save must be waited for. */
qd_status qd_saver_create(qd_trainer *trainer, qd_comm *control, const char *root, int keep, bool snapshot, qd_saver **saver);
void qd_saver_destroy(qd_saver *saver); /* lets this rank's writing end; NULL is legal */
int64_t qd_saver_snapshot(const qd_saver *saver);

/* Collective, while none is going on. Copies this rank's state and starts to write; what goes wrong
 * comes back from the polls. config: of rank 0, copied. Only failures of communication are
 * returned, here and below. */
qd_status qd_saver_begin(qd_saver *saver, const char *config);
/* Collective and cheap: how the save that is going on stands. wait: until it has ended, keeping
 * ranks in touch. Without a snapshot, training must not go on before that. */
qd_status qd_saver_poll(qd_saver *saver, bool wait, qd_save_report *report);
#endif
