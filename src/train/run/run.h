/* One rank of a training run. */
#ifndef QD_TRAIN_RUN_RUN_H
#define QD_TRAIN_RUN_RUN_H

#include "spec/config/config.h"

#include <quadrille/comm.h>
#include <quadrille/train.h>
#include <stdatomic.h>

typedef struct qd_run {
    const qd_options *options;
    qd_config config;
    const qd_train_observer *observer; /* of rank 0: on_step and on_end */
    const atomic_int *stop;            /* 0, or the signal that asks to end after this step */
} qd_run;

/* What can be wrong with a run before it starts: configuration, layout, run folder. Needs no ranks
 * and writes nothing. world: as in qd_config_resolve(). stop: as in qd_run, ends a wait for the
 * folder. Fills `config` and what the summary knows of the plan. */
qd_status qd_run_prepare(const qd_options *options, int world, const atomic_int *stop, qd_config *config,
                         qd_train_summary *summary);

/* Whether run.dir has a checkpoint that this run can resume from; not asked to resume, it has
 * nothing to find. Reads a manifest. */
qd_status qd_run_resume_check(const qd_config *config);

/* Once, by the first process, before the ranks run: trains the tokenizer and encodes the text where
 * the configuration asks for it. Fills in the samples of the summary. stop, as in qd_run, ends it
 * on the way: QD_INTERRUPTED after SIGINT, QD_STOPPED after the others. */
qd_status qd_run_make_ready(const qd_config *config, const qd_train_observer *observer, const atomic_int *stop, qd_train_summary *summary);

/* Collective over `world`. When one rank fails, all return: the one with its failure, the others
 * with QD_REMOTE or, where they could agree on it, with its status and an empty message. */
qd_status qd_run_rank(const qd_run *run, qd_comm *world);

/* The configuration as YAML. The model is that of the run, with all of its sizes: a preset may mean
 * something else one day. program NULL: the rest as it was asked for, config.yaml of a run folder:
 * what was left open (ranks, degrees, micro-batch) is decided anew where it is read. Otherwise with
 * everything filled in, effective.yaml and what checkpoints hold: it describes the same run on its
 * own. free() it. */
qd_status qd_run_config_text(const qd_options *options, const qd_config *config, const qd_program *program, char **text);
/* The values behind the text, without those that a layout decides: what two starts of a run are
 * compared by. */
qd_status qd_run_config_values(const qd_options *options, const qd_config *config, qd_options **values);
#endif
