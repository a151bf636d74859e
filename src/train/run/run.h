/* A training run: preparation before the ranks exist, and the run of one rank. */
#ifndef QD_TRAIN_RUN_RUN_H
#define QD_TRAIN_RUN_RUN_H

#include "spec/config/config.h"

#include <quadrille/comm.h>
#include <quadrille/train.h>
#include <stdatomic.h>

/* QD_REST_SAVED: with a checkpoint. */
typedef enum qd_rest { QD_REST_NOT, QD_REST, QD_REST_SAVED } qd_rest;

typedef struct qd_run {
    const qd_options *options;
    qd_config config;
    const qd_train_observer *observer; /* of rank 0: on_step and on_end */
    const atomic_int *stop;            /* 0, or the signal that asks the run to end after the current step */
    struct qd_handover *handover;      /* the state to start with, from other ranks (handover.h); NULL: none */
    bool state_in_memory;              /* it will be handed over: no checkpoint is needed */
    bool ranks_stay;                   /* processes of the present ranks, with their memory, become those of the next */
    qd_rest (*asks_rest)(void *context); /* rank 0, after each step: whether all ranks are to rest; NULL: never */
    void *rest_context;
    void (*on_first_step)(void *context); /* on every rank, once it has done a step: the handover is not needed any more; may be NULL */
    void *first_step_context;
} qd_run;

/* What the observer is shown, and the plan that it points to. */
typedef struct qd_run_summary {
    qd_train_summary shown;
    qd_check_report plan;
} qd_run_summary;

/* Checks configuration and layout of a run: the first part of qd_run_prepare(). */
qd_status qd_run_plan(const qd_options *options, int world, qd_config *config, qd_run_summary *summary);

/* Checks a run before it starts: configuration, layout, run folder. Needs no ranks and writes
 * nothing. world: as in qd_config_resolve(). stop: as in qd_run, ends a wait for the folder. Fills
 * `config` and the planned figures of the summary. */
qd_status qd_run_prepare(const qd_options *options, int world, const atomic_int *stop, qd_config *config,
                         qd_run_summary *summary);

/* Whether run.dir has a checkpoint that this run can resume from; QD_OK if it is not asked to
 * resume. Reads a manifest. */
qd_status qd_run_resume_check(const qd_config *config);

/* Once, in the first process, before the ranks run: trains the tokenizer and tokenizes the text
 * where the configuration asks for it. Fills in the samples of the summary and, with train.epochs,
 * the steps of the configuration. A signal in `stop`, as
 * in qd_run, ends it early: QD_INTERRUPTED after SIGINT, QD_STOPPED after the others. */
qd_status qd_run_make_ready(qd_config *config, const qd_train_observer *observer, const atomic_int *stop, qd_run_summary *summary);

/* The status of a run that the signal `asked` ends before its first step, with a message. */
qd_status qd_run_early_end(int asked, const char *during);

/* All of these for a run whose ranks are on this machine, in the process that starts them. Fills
 * `config` and the summary; run->options and run->stop are set. */
qd_status qd_run_prepare_local(qd_run *run, const qd_train_observer *observer, qd_run_summary *summary);

/* What a rank keeps of a run that it is to continue in another world. */
typedef struct qd_kept qd_kept;

/* Collective over `world`. When one rank fails, all return: that rank with its failure, the others
 * with QD_REMOTE or, if the ranks agreed on it, with its status and an empty message.
 *
 * kept: NULL, or where a rank that is not to blame (QD_REMOTE, QD_TIMEOUT, the loss of a rank that
 * it watches), or that rests because asks_rest() said so (QD_OK), leaves its state. Then `run`, its
 * options and `world` must outlive *kept; otherwise *kept is NULL. */
qd_status qd_run_rank(const qd_run *run, qd_comm *world, qd_kept **kept);

/* elastic/keep.c. The step after which the state is that of the run; -1: it is incomplete. */
int64_t qd_kept_step(const qd_kept *kept);
int64_t qd_kept_last(const qd_kept *kept); /* the last step that it has done, in whatever state that left it; -1: none */
/* Whether the ranks in `left` have all of that state between them. */
qd_status qd_kept_covers(const qd_kept *kept, uint64_t left, bool *complete);
/* As qd_handover_write(). */
qd_status qd_kept_write(qd_kept *kept, int fd, uint64_t left, bool *complete);
void qd_kept_destroy(qd_kept *kept); /* NULL is legal */

/* The configuration as YAML. The model is written with all of its sizes, because a preset may
 * change later. program NULL: the rest as it was given, for config.yaml of a run folder; what was
 * left open (ranks, degrees, micro-batch) is decided again when it is read. Otherwise with
 * everything filled in, for effective.yaml and checkpoints: it describes the same run on its own.
 * The caller frees it. */
qd_status qd_run_config_text(const qd_options *options, const qd_config *config, const qd_program *program, char **text);
/* The values of that text without those that the layout decides: used to compare two starts of a
 * run. */
qd_status qd_run_config_values(const qd_options *options, const qd_config *config, qd_options **values);
#endif
