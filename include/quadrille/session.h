/* Training inside a program of one's own: the caller runs the loop.
 *
 * A session is a run of `quadrille train` with the same options, except that the caller asks for
 * each step. Losses, metrics and checkpoints are bit-identical. The ranks of any layout
 * (parallel.*) are threads of this process. Nothing is printed, the program is not started again,
 * no signal handler is installed, and the environment is not read; signals are blocked in the
 * session's threads.
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
 * (run.threads). One session serves one call at a time: a second call, from another thread or from
 * a callback, is refused. Callbacks are called on a thread of the session while the caller waits.
 *
 * After a failure of a step, of finish() or, where it says so, of another call, the session can
 * only be destroyed; further calls return the same status. Misuse is QD_USAGE and changes
 * nothing. */
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

/* Prepares the data, starts the ranks and draws the initial weights, or loads those of
 * run.weights or, with run.resume, of the newest checkpoint in run.dir. options:
 * qd_config_table(); they are copied. observer: as in qd_train(), without on_failure; it is
 * copied; may be NULL. run.backend=mpi is refused. On an accelerator, run.tuning should name a
 * file: without the environment there is no default place for it. */
QD_API qd_status qd_session_create(const qd_options *options, const qd_train_observer *observer, qd_session **session);

/* Resumes the run in `folder` with its saved configuration and the options that `changes` has
 * set (NULL: none), on this or another layout: see qd_train_resume_options(). */
QD_API qd_status qd_session_resume(const char *folder, const qd_options *changes, const qd_train_observer *observer,
                                   qd_session **session);

/* Waits for a call that is under way and completes a checkpoint that is being written. Not from a
 * callback. NULL is legal. */
QD_API void qd_session_destroy(qd_session *session);

/* Layout, memory and data of the session. Belongs to it. */
QD_API const qd_train_summary *qd_session_summary(const qd_session *session);
/* Steps that are done, those before a resume included. */
QD_API int64_t qd_session_steps_done(const qd_session *session);

/* The next step, up to train.steps. With run.dir, its line goes to metrics.jsonl, and a
 * checkpoint is written where run.save_every, run.save_minutes or the last step ask for one
 * (run.save=false: never). metrics: the step's figures; may be NULL. */
QD_API qd_status qd_session_step(qd_session *session, qd_train_step *metrics);

/* qd_evaluate() with the present weights: the same result as that of a checkpoint of this step.
 * options->model is NULL; options NULL: the held-out part of the data. options->device NULL:
 * that of the run. One rank computes, with a whole copy of the weights. A failure leaves the
 * session as it is. */
QD_API qd_status qd_session_evaluate(qd_session *session, const qd_evaluate_options *options, qd_evaluate_report *report);

/* qd_generate() with the present weights, in the same way. */
QD_API qd_status qd_session_generate(qd_session *session, const qd_generate_options *options, qd_generate_report *report);

/* Writes a checkpoint into run.dir and waits until it is complete. Of the older ones run.keep
 * stay. A failure to write leaves the session as it is. */
QD_API qd_status qd_session_save(qd_session *session);

/* Replaces weights, optimizer state and position by those of a checkpoint, or of the newest one
 * of a run folder: of the same model, optimizer, seed and held-out data, in any layout.
 * metrics.jsonl is cut after its step. A checkpoint that cannot be opened or does not fit leaves
 * the session as it is; one that turns out to be damaged while it is read does not. */
QD_API qd_status qd_session_load(qd_session *session, const char *path);

/* Ends the run as `quadrille train` does: completes the checkpoint that is being written, and
 * writes memory.json and, with run.trace, trace.json into run.dir. end: the figures of the run;
 * may be NULL. No step, load or save may follow. Optional. */
QD_API qd_status qd_session_finish(qd_session *session, qd_train_end *end);

#ifdef __cplusplus
}
#endif
#endif
