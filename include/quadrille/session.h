/* Training as a library: the caller runs the training loop.
 *
 * A session is a run of `quadrille train` with the same options, except that the caller asks for
 * each step. Losses, metrics and checkpoints are bit-identical. The ranks of any layout
 * (parallel.*) are threads of this process, so no call is collective. A session prints nothing,
 * starts no processes, installs no signal handler and does not read the environment. Signals are
 * blocked in its threads.
 *
 *     qd_session *session = NULL;
 *     qd_status status = qd_session_create(options, NULL, &session);
 *     for (int i = 0; i < 100 && status == QD_OK; i++) {
 *         qd_train_step metrics = qd_train_step_default();
 *         status = qd_session_step(session, &metrics);
 *     }
 *     qd_session_destroy(session);
 *
 * Several sessions may exist concurrently; each has its own ranks and compute threads
 * (run.threads). A session serves one call at a time: a concurrent call, from another thread or
 * from a callback, is QD_USAGE. Callbacks run on a thread of the session while the caller waits.
 *
 * After a step, finish() or, where noted, another call has failed, the session can only be
 * destroyed; later calls return the same status. Misuse is QD_USAGE and changes nothing. */
#ifndef QUADRILLE_SESSION_H
#define QUADRILLE_SESSION_H

#include <quadrille/evaluate.h>
#include <quadrille/export.h>
#include <quadrille/generate.h>
#include <quadrille/train.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_session qd_session;

/* Prepares the data, starts the ranks and initializes the weights: randomly, from run.weights or,
 * with run.resume, from the newest checkpoint in run.dir. The caller owns *session. options: of
 * qd_config_table(); copied. observer: as in qd_train(), without on_failure; copied; may be NULL.
 * On an accelerator, run.tuning should name a file: it has no default, because the environment is
 * not read. run.ranks_as does not apply. QD_USAGE for a configuration that cannot run and for
 * run.backend=mpi. */
QD_API qd_status qd_session_create(const qd_options *options, const qd_train_observer *observer, qd_session **session);

/* Resumes the run in `folder` with its saved configuration, overridden by the options that are set
 * in `changes` (NULL: none). The layout may differ: see qd_train_resume_options(). */
QD_API qd_status qd_session_resume(const char *folder, const qd_options *changes, const qd_train_observer *observer,
                                   qd_session **session);

/* Frees the session. Waits for a call in progress and for a checkpoint that is being written. Must
 * not be called from a callback. NULL is legal. */
QD_API void qd_session_destroy(qd_session *session);

/* Layout, memory and data of the session; owned by it. */
QD_API const qd_train_summary *qd_session_summary(const qd_session *session);
/* Number of completed steps, including those before a resume. */
QD_API int64_t qd_session_steps_done(const qd_session *session);

/* Runs the next step, up to train.steps, and an evaluation after it if train.eval_every is due; a
 * checkpoint of the lowest validation loss so far is written and kept (run.save_best). With
 * run.dir, appends a line to metrics.jsonl, and writes a checkpoint if run.save_every or
 * run.save_minutes is due or the step is the last (run.save=false: never). metrics: the figures of
 * the step; may be NULL. */
QD_API qd_status qd_session_step(qd_session *session, qd_train_step *metrics);

/* qd_evaluate() with the current weights; the result equals that of a checkpoint of this step.
 * options: NULL evaluates the held-out part of the data; model must be NULL; device NULL means that
 * of the run. One rank computes, with a full copy of the weights. A failure leaves the session
 * usable. */
QD_API qd_status qd_session_evaluate(qd_session *session, const qd_evaluate_options *options, qd_evaluate_report *report);

/* qd_generate() with the current weights, in the same way. */
QD_API qd_status qd_session_generate(qd_session *session, const qd_generate_options *options, qd_generate_report *report);

/* Writes a checkpoint into run.dir and waits until it is complete. Keeps the newest run.keep.
 * A failure to write leaves the session usable. */
QD_API qd_status qd_session_save(qd_session *session);

/* Replaces weights, optimizer state and position by those of a checkpoint, or of the newest one of
 * a run folder. Model, optimizer, seed and held-out data must match; the layout may differ.
 * Truncates metrics.jsonl after its step. A checkpoint that cannot be opened or does not match
 * leaves the session usable; one that proves to be damaged while it is read does not. */
QD_API qd_status qd_session_load(qd_session *session, const char *path);

/* Ends the run as `quadrille train` does: completes the checkpoint that is being written, and
 * writes memory.json and, with run.trace, trace.json into run.dir. end: the figures of the run; may
 * be NULL. Optional; no step, load or save may follow. */
QD_API qd_status qd_session_finish(qd_session *session, qd_train_end *end);

#ifdef __cplusplus
}
#endif
#endif
