/* A training run from options to the last step: starts the ranks, or joins the world that mpirun or
 * srun started. A program that runs the loop itself uses <quadrille/session.h>.
 *
 * With local ranks as processes (run.ranks_as, the default for several ranks on the CPU),
 * qd_train() starts the program again once per rank, with the same arguments. Such a process runs
 * the same code up to its call of qd_train(), becomes a rank there, and exits there: only the
 * process that the user started returns. So call qd_train() early and before threads exist, in a
 * program that is controlled by its arguments and has had no side effects that must not be repeated
 * per rank.
 *
 * Under mpirun and srun all processes return. One process reports to the user: the observer is
 * called only there, and qd_train_report() is false in the others. */
#ifndef QUADRILLE_TRAIN_H
#define QUADRILLE_TRAIN_H

#include <quadrille/check.h>
#include <quadrille/export.h>
#include <quadrille/json_writer.h>
#include <quadrille/sized.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Known before the first step. */
typedef struct qd_train_summary {
    const qd_check_report *plan; /* model, layout, memory, communication */
    const char *backend;  /* "local", "mpi" or "ucx" */
    const char *ranks_as; /* "processes", "threads" or, for one rank, "this process" */
    int machines;         /* on which the ranks run */
    /* Placement of the ranks, "alpha 0 to 3, beta 4 to 7"; "" on one machine or if the list is too
     * long. */
    char hosts[256];
    int64_t steps;
    int64_t samples; /* sequences in one epoch of the data */
    char warning[192]; /* "", or a warning that the ranks need more memory than is free */
} qd_train_summary;

/* The figures of a step: one line of metrics.jsonl. */
typedef struct qd_train_step {
    size_t size;
    int64_t step, steps;
    double loss, grad_norm, lr, tokens;
    double step_seconds, tokens_per_second;
    double mfu; /* model FLOP/s over the multiply-add rate of all cores of the run's machines: the measured rate, or the
                 * highest that a step has reached; 0: unknown */
    int64_t memory_peak_bytes; /* of the program's buffers on rank 0 */
    int64_t dispatch_bytes;    /* sent to experts of other ranks and back, sum over ranks */
    int64_t across_bytes, across_flat_bytes; /* the part between nodes (parallel.nodes); what flat dispatch would send there */
    int64_t validation_tokens; /* predicted by the evaluation after this step; 0: there was none */
    double validation_loss;    /* mean over them, nats per token; NaN: not finite */
    double validation_seconds; /* not part of step_seconds */
    bool validation_best;      /* whether validation_loss is the lowest so far */
    bool skipped; /* the weights were not updated: a number was not finite, or the step was a spike (train.on_spike) */
    double mtp_loss;           /* of the modules that predict further tokens (model.mtp_modules), their mean; 0: there are none */
    /* data.format=preferences: the loss is a mean over pairs. A reward is dpo.beta times how much
     * more probable a completion is than for the reference model, as a logarithm. */
    int64_t pairs;             /* compared in this step; 0: another format */
    double reward_margin, reward_chosen; /* means: chosen minus rejected, and chosen */
    double reward_accuracy;    /* fraction of pairs with a positive margin */
    double validation_margin, validation_accuracy; /* of the evaluation; its tokens are pairs */
    double max_score; /* train.qk_clip: the largest attention score of the step; 0: not known */
} qd_train_step;
QD_SIZED_DEFAULT(qd_train_step)

/* Puts the members of a step into the current JSON object, as in metrics.jsonl. */
QD_API void qd_train_put_step(qd_json_writer *writer, const qd_train_step *step);

typedef struct qd_train_end {
    size_t size;
    int64_t steps; /* completed */
    double loss;   /* of the last step */
    double tokens, seconds;
    int64_t allocated_bytes; /* largest of the ranks */
    int64_t host_bytes;      /* in addition, host memory: optimizer state */
    int64_t resident_bytes;  /* peak resident size of the largest process, since its start */
    int64_t dispatch_bytes, across_bytes, across_flat_bytes; /* as in qd_train_step, sum over steps */
    int64_t saved;    /* step of the newest checkpoint that this run has written; -1: none */
    bool interrupted; /* by a signal */
    int64_t best;     /* step with the lowest validation loss so far; -1: none */
    double best_loss; /* its validation loss */
} qd_train_end;
QD_SIZED_DEFAULT(qd_train_end)

/* Callbacks of a run. Each may be NULL. They are never called concurrently. */
typedef struct qd_train_observer {
    size_t size;
    void *context;
    void (*on_start)(void *context, const qd_train_summary *summary);
    void (*on_step)(void *context, const qd_train_step *step);
    void (*on_end)(void *context, const qd_train_end *end); /* also after an interruption, not after a failure */
    /* Progress before the first step. what: "tokenizer" or "tokens"; done and total: bytes or
     * merges. */
    void (*on_prepare)(void *context, const char *what, int64_t done, int64_t total);
    /* A note for the user while the run continues: a checkpoint was written, or could not be. */
    void (*on_note)(void *context, const char *text);
    /* Under MPI, a failure, in the one process that reports it, which need not be rank 0. Called
     * before that process exits, because mpirun kills the others once one has exited with a status
     * other than 0. qd_train_report() is false afterwards. */
    void (*on_failure)(void *context, const char *message);
} qd_train_observer;
QD_SIZED_DEFAULT(qd_train_observer)

/* Trains, and returns when all ranks have ended. Under mpirun or srun it is collective over their
 * world. argv: of this process, NULL-terminated; local ranks get the same. A failure is that of the
 * rank that failed first.
 *
 * Signals: SIGINT ends the run after the current step, with QD_INTERRUPTED. SIGTERM and SIGUSR1, to
 * this process or any rank, do the same after writing a checkpoint to run.dir: QD_STOPPED, or
 * QD_INTERRUPTED if none could be written. While text is tokenized, before the first step, they end
 * the run at once. So does a second SIGINT or SIGTERM. */
QD_API qd_status qd_train(const qd_options *options, char *const *argv, const qd_train_observer *observer);

/* Loads the configuration of the run in run.dir if run.resume is set; otherwise does nothing.
 * Values from qd_options_set(), qd_options_assign() and qd_options_parse() override it. Saved
 * layout keys that contradict them, such as degrees for another number of ranks, revert to their
 * defaults. Call it instead of loading a file. Not collective. */
QD_API qd_status qd_train_resume_options(qd_options *options);

/* Applies run.from (a Hugging Face folder, a run folder or a checkpoint): sets the model's keys,
 * data.tokenizer and run.weights from it, except keys that are set already. Does nothing if
 * run.from is empty or run.resume is set. Call it before qd_train(). QD_USAGE for a folder that is
 * none of these, or together with model.preset or run.weights; QD_UNSUPPORTED names a feature of
 * the model that ours lacks. Not collective. */
QD_API qd_status qd_train_from_options(qd_options *options);

/* Tells a run with run.elastic that is in progress in `folder` how many ranks may run from now on.
 * QD_USAGE if its configuration does not allow another number, or reads it from elsewhere. Not
 * collective. */
QD_API qd_status qd_train_resize(const char *folder, int ranks);

/* Whether qd_train() started this process as a local rank. Such a process gets its configuration
 * from its parent and need not read the configuration file. */
QD_API bool qd_train_is_rank(void);

/* Handles a failure before qd_train() was called, such as a configuration file that is missing on
 * one machine. A rank of mpirun or srun joins the others, which may have seen no failure, so that
 * all end and one reports. Returns the status to exit with; call qd_train_report() next. In other
 * processes, and after qd_train() was called, it returns `status`. */
QD_API qd_status qd_train_not_started(qd_status status, const qd_train_observer *observer);

/* The number of ranks that mpirun or srun started; 0: unknown, or this process is not one of
 * them. */
QD_API int qd_train_world(void);
/* The rank of this process, as started by qd_train(), mpirun or srun; -1: unknown, or none. */
QD_API int qd_train_rank(void);

/* Passes a failure, of qd_train() or of the program before it, to the process that reports to the
 * user. True if that is this one: the caller then shows qd_error_message(). In both cases the
 * caller exits with a status other than 0. */
QD_API bool qd_train_report(qd_status status);

#ifdef __cplusplus
}
#endif
#endif
