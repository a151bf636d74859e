/* The state of one rank of a run, shared by the files that implement it: run.c (start, steps,
 * saving, end), run_folder.c (the files of run.dir) and run_resume.c (state and settings of an
 * earlier part of the run). */
#ifndef QD_TRAIN_RUN_RUN_STATE_H
#define QD_TRAIN_RUN_RUN_STATE_H

#include "ckpt/checkpoint.h"
#include "train/ranks/patience.h"
#include "train/record/recorder.h"
#include "train/record/samples.h"
#include "train/record/spikes.h"
#include "train/record/validation.h"
#include "train/run/metrics.h"
#include "train/run/replicas.h"
#include "train/run/run.h"
#include "train/run/run_corpus.h"
#include "train/run/saver.h"
#include "train/exec/trace.h"
#include "train/exec/trainer.h"

#include <limits.h>

typedef char qd_run_file[PATH_MAX];

/* Rank 0: the searches for GEMM algorithms between steps. */
typedef struct qd_run_tuning {
    int64_t steps;  /* of this process */
    int searches;
    double begin, seconds; /* when the first began, and what all took */
    bool done;
} qd_run_tuning;

typedef struct qd_rank_run {
    const qd_run *run;
    qd_run with_length; /* train.epochs: the same with its number of steps */
    qd_comm *world;
    qd_comm *control; /* for agreement, separate from the program's traffic and its statistics */
    qd_run_corpus corpus;
    qd_trainer *trainer;
    qd_validation validation; /* of a run that validates; rank 0 knows when it is due and what is the best */
    qd_validated validated;   /* after the last step; tokens 0: not evaluated */
    bool improved;            /* it was the lowest loss so far; known to all ranks */
    bool other_validation;    /* the losses of earlier parts of the run are of another text */
    int64_t best_saving, best_kept; /* steps of the checkpoint of the best loss: being written, and complete; -1: none */
    qd_saver *saver; /* with a run folder */
    qd_run_file base; /* folder with the frozen values of the adapters that were loaded; "": none */
    double *reference;     /* of pairs (qd_data_set_reference); NULL: not trained on preferences */
    qd_replicas *replicas; /* NULL: not compared */
    int64_t compared; /* step after which they were compared last */
    qd_trace *trace;
    char *config_text; /* rank 0: effective.yaml, which checkpoints contain too */
    qd_metrics *metrics; /* rank 0 with a run folder */
    qd_recorder *recorder; /* the same */
    qd_samples *samples;   /* of a run that samples */
    int64_t traced; /* steps */
    qd_train_step line; /* rank 0: of the last step */
    qd_train_end end;
    qd_dispatched dispatched; /* of all ranks, in the steps so far; with expert parallelism */
    double peak_flops; /* rank 0: of all machines of the run, measured, or the most that a step has reached; 0: unknown */
    int64_t kept;  /* step of the newest checkpoint of this state, loaded or written; -1: none */
    double saved_at; /* when the last checkpoint, or the first step, began */
    double save_took; /* seconds that training waited for the last checkpoint */
    int64_t saving;  /* step of the last checkpoint that was begun */
    bool time_to_save; /* run.save_minutes have passed on rank 0; known to all ranks */
    bool time_to_tune; /* known to all ranks */
    qd_run_tuning tuning;
    qd_patience patience; /* with stopped ranks, where the ranks watch each other */
    int stop;      /* the signal that ends the run, on all ranks; 0: none */
    char unsaved[sizeof((qd_save_report *)0)->message]; /* why the checkpoint after the last step could not be written */
    int skipped;   /* consecutive skipped steps */
    qd_spikes spikes;
    int rollbacks; /* to the checkpoint `kept` */
    bool agreed; /* all ranks know of the failure and return: no abort is needed */
    bool started; /* qd_rank_run_start() is done: the trainer has the state of the run */
    bool rests;   /* the ranks are to continue in another world; known to all */
    int64_t followed; /* step after which everything that follows a step is done */
    qd_step_output output; /* of the last step, and how long it took */
    double seconds;
} qd_rank_run;

/* ---- run.c: the life of a rank. All are collective over its world, unless they say otherwise
 * ---- */

/* Before the start: nothing is there yet. Not collective. */
static inline qd_rank_run qd_rank_run_of(const qd_run *run, qd_comm *world)
{
    return (qd_rank_run){
        .run = run, .world = world, .line.size = sizeof(qd_train_step), .end = {.size = sizeof(qd_train_end), .saved = -1, .best = -1},
        .kept = -1, .best_saving = -1, .best_kept = -1};
}
/* Data, trainer, state and folder. */
qd_status qd_rank_run_start(qd_rank_run *s);
/* One step, its line of the metrics, and a checkpoint where one is due. */
qd_status qd_rank_run_step(qd_rank_run *s);
/* What follows a step: its line of the metrics, validation, samples, a checkpoint where one is due.
 */
qd_status qd_rank_run_follow(qd_rank_run *s);
/* The checkpoint that is being written, if any, is complete. */
qd_status qd_rank_run_settle(qd_rank_run *s);
/* With a saver: starts a checkpoint of the present state. A failure to write it is a note. */
qd_status qd_rank_run_checkpoint(qd_rank_run *s);
/* With a saver: a checkpoint of the present state, complete when this returns, unless there is
 * one. A failure to write it is agreed on and leaves the run as it is. */
qd_status qd_rank_run_save(qd_rank_run *s);
/* The figures of the run, and the files that come last. */
qd_status qd_rank_run_finish(qd_rank_run *s);
/* Not collective: after a failure that the other ranks do not know of, they learn of it and end. */
void qd_rank_run_alert(qd_rank_run *s, qd_status status);
/* All of these, from start to end, or until the ranks are to rest. */
qd_status qd_rank_run_live(qd_rank_run *s);
/* Not collective. Frees everything, also of a half-started one. */
void qd_rank_run_close(qd_rank_run *s);

/* Rank 0, after a checkpoint was loaded: the state of validation after its step. */
qd_status qd_rank_run_restore_validation(qd_rank_run *s);
/* Collective: qd_agree_alone() over the control group. */
qd_status qd_rank_agree(qd_rank_run *s, qd_status mine);
/* Rank 0 passes the note to its observer; other ranks do nothing. */
void qd_rank_note(const qd_rank_run *s, const char *text);

/* run_folder.c */
/* The path of a file of run.dir. */
qd_status qd_run_path(const qd_config *config, const char *name, qd_run_file path);
/* Whether the run can use its folder. Writes nothing. Waits some seconds for a run that is just
 * ending; QD_BUSY if it does not end. stop: see qd_metrics_wait_free(). */
qd_status qd_run_folder_check(const qd_options *options, const qd_config *config, const atomic_int *stop);
/* Rank 0, after everything else is ready: creates the folder with its first files. */
qd_status qd_run_folder_open(qd_rank_run *s);
/* Removes everything of the replaced run that the new one could mistake for its own. */
qd_status qd_run_folder_clear(const qd_config *config);

/* run_weights.c */

/* Collective. Loads initial weights from run.weights. */
qd_status qd_run_load_weights(qd_rank_run *s);

/* run_spikes.c. All are collective, except the limits. */

/* Of a new run, or the history of the steps so far of a resumed one. */
qd_status qd_run_spikes_open(qd_rank_run *s);
/* After the position has changed. */
qd_status qd_run_spikes_restore(qd_rank_run *s);
/* After a step that was not applied because it was a spike: notes it, and goes back to the last
 * checkpoint where train.on_spike says so. *went_back: the step is undone, and those before it
 * since that checkpoint. QD_NOT_FINITE: the run is to stop. */
qd_status qd_run_spike(qd_rank_run *s, const qd_step_output *output, bool *went_back);

/* record/reference.c */

/* Collective. For a run on preferences: the log-probabilities of the reference model, which is the
 * model before the first step, read from run.dir or computed and written there. */
qd_status qd_run_reference(qd_rank_run *s);

/* elastic/keep.c */

/* Collective. Loads what other ranks have handed over. *at: the position of the run; until the
 * ranks have read the files of the run, that of the trainer is before it, if what follows the step
 * must be done again. */
qd_status qd_run_take_over(qd_rank_run *s, qd_position *at);
/* Collective, after the start: does that. */
qd_status qd_run_catch_up(qd_rank_run *s);

/* run_tuning.c */

/* Rank 0, after each step, which took `step_seconds`: whether now is the time for a search. */
bool qd_run_tuning_due(qd_rank_run *s, int64_t step, double step_seconds);
/* Collective. Searches for a faster algorithm of one GEMM. */
qd_status qd_run_tune_more(qd_rank_run *s);

/* run_resume.c */

/* Collective. Loads the newest valid checkpoint. */
qd_status qd_run_resume(qd_rank_run *s);
/* Rank 0: compares the data with what the run was trained on. */
qd_status qd_run_compare_data(const qd_rank_run *s);
/* Collective. Replaces state and position by those of a checkpoint: `path` names it, or a run
 * folder. It must be of the same model, optimizer and data order. Failures are agreed on, or
 * alert the others; *begun: when it failed, the old state is no longer whole. */
qd_status qd_run_load(qd_rank_run *s, const char *path, bool *begun);
#endif
