/* Inside the launcher: how this process came to be, and the ways to run the ranks. */
#ifndef QD_TRAIN_LAUNCH_LAUNCH_H
#define QD_TRAIN_LAUNCH_LAUNCH_H

#include "base/text/strbuf.h"
#include "train/run/run.h"

#include <signal.h>
#include <sys/types.h>

/* What a local rank hears from its launcher through the environment. */
#define QD_ENV_RANK "QUADRILLE_RANK"
#define QD_ENV_WORLD_FD "QUADRILLE_WORLD_FD"
#define QD_ENV_REPORT_FD "QUADRILLE_REPORT_FD"
#define QD_ENV_LAUNCHER "QUADRILLE_LAUNCHER"
#define QD_ENV_CONFIG_FD "QUADRILLE_CONFIG_FD" /* the configuration as the launcher understood it */

/* What the launcher sends a local rank instead of SIGINT, which a terminal sends to all processes
 * of a job. */
#define QD_SIGNAL_INTERRUPT SIGUSR2

/* ---- reports of a local rank to its launcher: one packet each ---- */

typedef enum qd_report_kind { QD_REPORT_STEP, QD_REPORT_END, QD_REPORT_FAILURE, QD_REPORT_NOTE } qd_report_kind;
#define QD_REPORT_MESSAGE_BYTES 2048

typedef struct qd_report {
    qd_report_kind kind;
    int rank;
    union {
        qd_train_step step;
        qd_train_end end;
        struct {
            qd_status status;
            char message[QD_REPORT_MESSAGE_BYTES]; /* "": another rank tells it */
        } failure; /* NOTE: the message alone */
    };
} qd_report;

/* A launcher that is gone is no failure here: the rank is about to be ended. */
void qd_report_send(int fd, const qd_report *report);
/* False when nothing (more) is there. */
bool qd_report_receive(int fd, qd_report *report);

/* ---- the failure of a run: of the rank that failed first, not the echo it had elsewhere ---- */

typedef struct qd_failure {
    qd_status status; /* QD_OK: none yet */
    char message[QD_REPORT_MESSAGE_BYTES];
} qd_failure;

/* Keeps what came first; a cause replaces an echo (QD_REMOTE, or a status that another rank
 * tells). */
void qd_failure_add(qd_failure *failure, qd_status status, const char *message);
/* Records it as this thread's failure and returns its status. */
qd_status qd_failure_raise(const qd_failure *failure);

/* A signal ended the run on all ranks after the same step: nobody has to be told. */
bool qd_ended_in_order(qd_status status);

/* ---- the configuration, from the launcher to its ranks ---- */

/* What the user set: "key=value" texts, each ended by a zero byte, in the order of the table. */
void qd_launch_config_put(const qd_options *options, qd_strbuf *text);
qd_status qd_launch_config_write(const qd_options *options, int *fd); /* *fd: a memfd */
qd_status qd_launch_config_read(int fd, qd_options **options);

/* ---- ways to run the ranks; `run` is complete ---- */

/* Starts one process per rank and returns when none is left. No thread may exist. */
qd_status qd_launch_processes(const qd_run *run, char *const *argv);
/* Ranks as threads of this process; with one rank, this thread. */
qd_status qd_launch_threads(const qd_run *run);
#endif
