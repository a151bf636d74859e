/* A trainer: one rank's model, bound to its device and world, with its optimizer state. */
#ifndef QD_TRAIN_EXEC_TRAINER_H
#define QD_TRAIN_EXEC_TRAINER_H

#include "spec/config/config.h"
#include "train/exec/interpret.h"

typedef struct qd_trainer qd_trainer;

/* Collective over `world`. Draws the initial weights. `source` and `config` are copied; what source
 * points to must outlive the trainer. */
qd_status qd_trainer_create(const qd_config *config, qd_comm *world, const qd_batch_source *source,
                            qd_trainer **trainer);
/* The same for a caller that loads all weights (qd_state_load): until then their values are
 * undefined. */
qd_status qd_trainer_create_blank(const qd_config *config, qd_comm *world, const qd_batch_source *source, qd_trainer **trainer);
void qd_trainer_destroy(qd_trainer *trainer); /* NULL is legal */

/* Collective. Runs the next step, starting with step 1. */
qd_status qd_trainer_step(qd_trainer *trainer, qd_step_output *output);
/* Collective, between steps: searches for a faster algorithm of one more GEMM; see
 * train/exec/tuning.h. *left, on rank 0: how many remain. */
qd_status qd_trainer_tune_more(qd_trainer *trainer, int *left);

/* Collective, between steps, for a run that validates: the loss of `source` on the samples of a
 * global batch from `first` on. Changes nothing of the training state and allocates nothing. */
qd_status qd_trainer_evaluate(qd_trainer *trainer, const qd_batch_source *source, int64_t first, qd_step_output *output);

/* Not collective, after an evaluation of pairs: copies the scores (as of kernel pair_sums) of this
 * rank's sequences, (sequences of the global batch on this rank, data.seq). *first: the number of
 * its first sequence in the global batch; -1: another rank has the same scores, or the model's
 * head. */
qd_status qd_trainer_scores(qd_trainer *trainer, double *scores, int64_t *first);

typedef enum qd_tensor_kind { QD_TENSOR_VALUE, QD_TENSOR_GRADIENT, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2 } qd_tensor_kind;
/* Collective. Reads a whole logical parameter as fp32: its value, its gradient (of the last step,
 * before clipping) or its optimizer state. `count` must be its number of elements. */
qd_status qd_trainer_read(qd_trainer *trainer, const char *name, qd_tensor_kind kind, float *out, int64_t count);
/* Collective. Replaces a logical parameter's value or optimizer state on all ranks. */
qd_status qd_trainer_write(qd_trainer *trainer, const char *name, qd_tensor_kind kind, const float *values, int64_t count);
/* Not collective. The shard of a parameter (an index of the ledger) that this rank owns, as
 * fp32. */
qd_holding qd_trainer_holding(const qd_trainer *trainer, int param, qd_tensor_kind kind);
int64_t qd_trainer_largest(const qd_trainer *trainer); /* elements of the largest shard, at least 1 */
qd_status qd_trainer_get(qd_trainer *trainer, int param, qd_tensor_kind kind, float *out);
qd_status qd_trainer_put(qd_trainer *trainer, int param, qd_tensor_kind kind, const float *values);
/* Whether the optimizer keeps state of this kind. */
bool qd_trainer_holds(const qd_trainer *trainer, qd_tensor_kind kind);

/* Position of the run: steps done, and the index of the next sample. */
typedef struct qd_position {
    int64_t step, next_sample;
} qd_position;
qd_position qd_trainer_position(const qd_trainer *trainer);
void qd_trainer_set_position(qd_trainer *trainer, qd_position position); /* the same on all ranks */

const qd_config *qd_trainer_config(const qd_trainer *trainer);
qd_comm *qd_trainer_world(const qd_trainer *trainer);
qd_comm *qd_trainer_data(const qd_trainer *trainer); /* the same ranks for device memory; NULL: host memory */
const qd_program *qd_trainer_program(const qd_trainer *trainer);
qd_comm *qd_trainer_group(const qd_trainer *trainer, unsigned axes); /* NULL: the program uses no such group */
qd_device *qd_trainer_device(const qd_trainer *trainer);
int64_t qd_trainer_allocated(const qd_trainer *trainer); /* bytes of the program's buffers on the device */
int64_t qd_trainer_allocated_host(const qd_trainer *trainer); /* and in host memory */
void qd_trainer_set_limits(qd_trainer *trainer, qd_step_limits limits); /* of the next steps, the same on all ranks */
void qd_trainer_set_trace(qd_trainer *trainer, qd_trace *trace);
void qd_trainer_set_profile(qd_trainer *trainer, qd_step_profile *profile);
void qd_trainer_set_cpu_seconds(qd_trainer *trainer, double *seconds); /* (actions of the program); see qd_step_input */
qd_bound *qd_trainer_bound(qd_trainer *trainer);
qd_dispatched qd_trainer_dispatched(const qd_trainer *trainer);
/* The sum over all ranks. Collective over `comm`, which contains all ranks. */
qd_status qd_trainer_dispatched_all(const qd_trainer *trainer, qd_comm *comm, qd_dispatched *sum);
uint64_t qd_trainer_seed(const qd_trainer *trainer);
/* Fills the rotary table of a bound program, for sequences of this length; 0: those of the program.
 * The model may have none. */
qd_status qd_rope_fill(const qd_bound *bound, int64_t length);
/* For tests: the program that the trainer interprets, to be changed before the first step. */
qd_program *qd_trainer_program_mutable(qd_trainer *trainer);
#endif
