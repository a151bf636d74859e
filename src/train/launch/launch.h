/* Internal to the launcher: what a local rank gets from its launcher and reports to it, and the
 * ways to run the ranks. */
#ifndef QD_TRAIN_LAUNCH_LAUNCH_H
#define QD_TRAIN_LAUNCH_LAUNCH_H

#include "base/text/strbuf.h"
#include "train/ranks/failure.h"
#include "train/run/run.h"

#include <signal.h>
#include <sys/types.h>

/* Environment variables that a launcher sets for its local ranks. */
#define QD_ENV_RANK "QUADRILLE_RANK"
#define QD_ENV_WORLD_FD "QUADRILLE_WORLD_FD"
#define QD_ENV_REPORT_FD "QUADRILLE_REPORT_FD"
#define QD_ENV_LAUNCHER "QUADRILLE_LAUNCHER"
#define QD_ENV_CONFIG_FD "QUADRILLE_CONFIG_FD" /* the configuration as the launcher parsed it */

/* The journal of restarts, in the run folder. */
#define QD_JOURNAL_FILE "restarts.jsonl"

/* The stacks of ranks that hang, in the run folder. */
#define QD_STACKS_FILE "stacks.txt"

/* The launcher sends this to local ranks in place of SIGINT, which a terminal sends to all
 * processes of a job. */
#define QD_SIGNAL_INTERRUPT SIGUSR2

/* Reports of a local rank to its launcher: one packet each. */
typedef enum qd_report_kind { QD_REPORT_STEP, QD_REPORT_END, QD_REPORT_FAILURE, QD_REPORT_NOTE } qd_report_kind;

typedef struct qd_report {
    qd_report_kind kind;
    int rank;
    union {
        qd_train_step step;
        qd_train_end end;
        qd_failure failure; /* message "": another rank reports it. NOTE: the message alone */
    };
} qd_report;

/* A launcher that is gone is not an error here: this rank is about to be killed. */
void qd_report_send(int fd, const qd_report *report);
/* False when there is no (further) report. */
bool qd_report_receive(int fd, qd_report *report);

/* The configuration, from the launcher to its ranks: the keys that the user set, as
 * zero-terminated "key=value" texts in the order of the option table. */
void qd_launch_config_put(const qd_options *options, qd_strbuf *text);
qd_status qd_launch_config_write(const qd_options *options, int *fd); /* *fd: a memfd */
qd_status qd_launch_config_read(int fd, qd_options **options);

/* Ways to run the ranks; `run` is complete. */
/* Starts one process per rank and returns when all have ended. The caller must be
 * single-threaded. *stopped: the signal by which the user ended the run; 0: none. */
qd_status qd_launch_processes(const qd_run *run, char *const *argv, int *stopped);
/* The same, and starts the ranks again after a failure, up to run.restarts times. Changes the
 * configuration of `run`. */
qd_status qd_launch_restarting(qd_run *run, char *const *argv, const qd_train_observer *observer);
/* Starts the ranks with run.launcher, which ends when all have ended. *stopped: as above. */
qd_status qd_launch_command(const qd_run *run, char *const *argv, int *stopped);
/* The last step in metrics.jsonl; -1: none. */
int64_t qd_launch_last_step(const qd_config *config);
/* Ranks as threads of this process; with one rank, this thread. */
qd_status qd_launch_threads(const qd_run *run);
#endif
