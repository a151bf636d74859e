/* What one rank of a run holds while it runs, shared by the files that make up a rank: run.c
 * (start, steps, saving, end), run_folder.c (the files of run.dir) and run_resume.c (state and
 * settings of an earlier part of the run). */
#ifndef QD_TRAIN_RUN_RUN_STATE_H
#define QD_TRAIN_RUN_RUN_STATE_H

#include "ckpt/checkpoint.h"
#include "train/run/metrics.h"
#include "train/run/run.h"
#include "train/run/run_corpus.h"
#include "train/run/saver.h"
#include "train/exec/trace.h"
#include "train/exec/trainer.h"

#include <limits.h>

typedef char qd_run_file[PATH_MAX];

typedef struct qd_rank_run {
    const qd_run *run;
    qd_comm *world;
    qd_comm *control; /* for agreements, apart from the program's traffic and its counters */
    qd_run_corpus corpus;
    qd_trainer *trainer;
    qd_saver *saver; /* with a run folder */
    qd_trace *trace;
    char *config_text; /* rank 0: effective.yaml, which checkpoints hold too */
    qd_metrics *metrics; /* rank 0 with a run folder */
    int64_t traced; /* steps */
    qd_train_end end;
    qd_dispatched dispatched; /* by all ranks, in the steps so far; where experts are shared out */
    double peak_flops; /* rank 0: of all machines of the run, measured, or what a step has reached since; 0: unknown */
    int64_t kept;  /* step of the newest checkpoint that holds this state: loaded or written; -1: none */
    double saved_at; /* when the last checkpoint was begun, or the first step */
    bool time_to_save; /* run.save_minutes have passed on rank 0, known to all ranks */
    int stop;      /* the signal that ends the run, on all ranks; 0: none */
    char unsaved[sizeof((qd_save_report *)0)->message]; /* why the checkpoint after the last step could not be written */
    int skipped;   /* steps in a row that were left out */
    bool agreed; /* all ranks know of the failure and return: no alarm is needed */
} qd_rank_run;

/* Collective: qd_agree_alone() over the control group. */
qd_status qd_rank_agree(qd_rank_run *s, qd_status mine);
/* Rank 0's observer gets a note; other ranks do nothing. */
void qd_rank_note(const qd_rank_run *s, const char *text);

/* ---- run_folder.c ---- */

/* The path of a file of run.dir. */
qd_status qd_run_path(const qd_config *config, const char *name, qd_run_file path);
/* Whether the run can have its folder. Looks, writes nothing. Waits some seconds for a run that is
 * just ending; QD_BUSY when it does not. stop: see qd_metrics_wait_free(). */
qd_status qd_run_folder_check(const qd_options *options, const qd_config *config, const atomic_int *stop);
/* Rank 0, once everything else is in place: the folder appears with its first files. */
qd_status qd_run_folder_open(qd_rank_run *s);
/* The run that is replaced leaves nothing that the new one could take for its own. */
qd_status qd_run_folder_clear(const qd_config *config);

/* ---- run_resume.c ---- */

/* Collective. Loads the newest sound checkpoint. */
qd_status qd_run_resume(qd_rank_run *s);
/* Rank 0: compares the data with what the run was trained on. */
qd_status qd_run_compare_data(const qd_rank_run *s);
/* Collective. First values from run.weights. */
qd_status qd_run_load_weights(qd_rank_run *s);
#endif
