/* A training run, from options to the last step: starts the ranks, or joins the world that mpirun
 * or srun made. A program that wants to run the loop itself uses <quadrille/session.h>.
 *
 * With local ranks as processes (run.ranks_as, the default for several ranks on the CPU),
 * qd_train() starts the program again once per rank, with the same arguments. Such a process runs
 * the same code up to its call of qd_train(), becomes a rank there, and ends there: only the
 * process that the user started returns. So call qd_train() early, before threads exist, from a
 * program whose arguments say what to do and which has done nothing that must not be done once per
 * rank.
 *
 * Under mpirun and srun all processes return. Only one process speaks to the user: the observer
 * is called there and nowhere else, and a failure that another process reports comes back with
 * qd_train_report() == false. */
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
    const char *backend;  /* "local" or "mpi" */
    const char *ranks_as; /* "processes", "threads" or, for one rank, "this process" */
    int machines;         /* that the ranks lie on */
    /* "alpha 0 to 3, beta 4 to 7": where each rank lies; "" on one machine, or where they are too
     * many to list. */
    char hosts[256];
    int64_t steps;
    int64_t samples; /* sequences in the data: one epoch */
    char warning[192]; /* "", or that the ranks need more memory than is free */
} qd_train_summary;

/* A line of metrics.jsonl. */
typedef struct qd_train_step {
    size_t size;
    int64_t step, steps;
    double loss, grad_norm, lr, tokens;
    double step_seconds, tokens_per_second;
    double mfu; /* model FLOP/s over the multiply-add rate of all cores of the run's machines: the measured one, or the
                 * highest that a step has reached; 0: unknown */
    int64_t memory_peak_bytes; /* what the program's buffers take on rank 0 */
    int64_t dispatch_bytes;    /* sent to experts of other ranks and back, all ranks together */
    int64_t across_bytes, across_flat_bytes; /* of these between nodes (parallel.nodes); what flat dispatch would have sent there */
} qd_train_step;
QD_SIZED_DEFAULT(qd_train_step)

/* Its members, as metrics.jsonl has them. */
QD_API void qd_train_put_step(qd_json_writer *writer, const qd_train_step *step);

typedef struct qd_train_end {
    size_t size;
    int64_t steps; /* done */
    double loss;   /* of the last step */
    double tokens, seconds;
    int64_t allocated_bytes; /* largest of the ranks */
    int64_t host_bytes;      /* beside that, in host memory: optimizer state */
    int64_t resident_bytes;  /* resident peak of the largest process, from its start */
    int64_t dispatch_bytes, across_bytes, across_flat_bytes; /* as in qd_train_step, of all steps */
    int64_t saved;    /* step of the newest checkpoint that this run has written; -1: none */
    bool interrupted; /* by a signal */
} qd_train_end;
QD_SIZED_DEFAULT(qd_train_end)

/* Each may be NULL. Called from one thread at a time. */
typedef struct qd_train_observer {
    size_t size;
    void *context;
    void (*on_start)(void *context, const qd_train_summary *summary);
    void (*on_step)(void *context, const qd_train_step *step);
    void (*on_end)(void *context, const qd_train_end *end); /* also after an interruption, not after a failure */
    /* Before the first step: `what` is "tokenizer" or "tokens"; text is being read, out of `total`
     * bytes or merges. */
    void (*on_prepare)(void *context, const char *what, int64_t done, int64_t total);
    /* Something the user should know and the run goes on: a checkpoint that was written, or could
     * not be. */
    void (*on_note)(void *context, const char *text);
    /* Under MPI, in the one process that tells of a failure, which need not be rank 0, before it
     * leaves the world: when one has left with another status than 0, mpirun ends the others.
     * qd_train_report() is false afterwards. */
    void (*on_failure)(void *context, const char *message);
} qd_train_observer;
QD_SIZED_DEFAULT(qd_train_observer)

/* argv: of this process, ended by NULL; the ranks get the same. SIGINT ends the run after the step
 * that runs: QD_INTERRUPTED. SIGTERM and SIGUSR1, sent to this process or to any rank, do so with a
 * checkpoint in run.dir: QD_STOPPED, or QD_INTERRUPTED where none could be written; before the
 * first step, while text becomes tokens, at once. A second SIGINT or SIGTERM ends it at once.
 * Returns when no rank is left; the failure is that of the rank that failed first. */
QD_API qd_status qd_train(const qd_options *options, char *const *argv, const qd_train_observer *observer);

/* For resuming the run in run.dir, where run.resume is set (else nothing happens): puts the
 * configuration that the run has saved below what was given with qd_options_set(),
 * qd_options_assign() and qd_options_parse(). Keys of the saved layout that do not fit what is
 * given, such as degrees under another number of ranks, revert to their defaults. Call it
 * instead of loading a file. */
QD_API qd_status qd_train_resume_options(qd_options *options);

/* True in a process that qd_train() started as a local rank: it gets its configuration from there,
 * and need not read the configuration file. */
QD_API bool qd_train_is_rank(void);

/* For a failure before qd_train() could be called (a configuration file that is missing on one
 * machine): ranks of mpirun or srun join the others, which may have seen no failure, so that all
 * end and one tells. Returns the status to end with; then qd_train_report(). Elsewhere, and after
 * qd_train() was called, it returns `status`. */
QD_API qd_status qd_train_not_started(qd_status status, const qd_train_observer *observer);

/* How many ranks mpirun or srun has started; 0: this process is not one of theirs, or they do not
 * say. */
QD_API int qd_train_world(void);
/* Which of the ranks that qd_train(), mpirun or srun has started this process is; -1: none of them,
 * or they do not say. */
QD_API int qd_train_rank(void);

/* Hands a failure, of qd_train() or of what the program did before it, to the process that speaks
 * to the user. True when that is this one: the caller shows qd_error_message() and exits with a
 * status other than 0 in any case. */
QD_API bool qd_train_report(qd_status status);

#ifdef __cplusplus
}
#endif
#endif
