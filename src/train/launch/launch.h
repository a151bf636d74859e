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
#define QD_ENV_ORDER_FD "QUADRILLE_ORDER_FD"   /* supervised: orders of the launcher to this rank; else -1 */
#define QD_ENV_STATE_FD "QUADRILLE_STATE_FD"   /* supervised: state that other ranks hand over; -1: none */

/* The stacks of ranks that hang, in the run folder. */
#define QD_STACKS_FILE "stacks.txt"

/* The launcher sends this to local ranks in place of SIGINT, which a terminal sends to all
 * processes of a job. */
#define QD_SIGNAL_INTERRUPT SIGUSR2

/* Reports of a local rank to its launcher: one packet each. */
typedef enum qd_report_kind {
    QD_REPORT_STEP,
    QD_REPORT_END,
    QD_REPORT_FAILURE,
    QD_REPORT_NOTE,
    QD_REPORT_RESTS,  /* it has left its world, and waits for an order */
    QD_REPORT_WRITTEN /* it has done what QD_ORDER_WRITE asks for */
} qd_report_kind;

typedef struct qd_report {
    qd_report_kind kind;
    int rank;
    union {
        qd_train_step step;
        qd_train_end end;
        qd_failure failure; /* message "": another rank reports it. NOTE: the message alone */
        int64_t rests;      /* the step whose state it has; -1: none */
        bool complete;      /* WRITTEN: the ranks that write have all of the state */
    };
} qd_report;

/* Orders of the launcher to one rank of a supervised run, with file descriptors. A rank whose
 * orders end, because the launcher has closed them, ends silently. */
typedef enum qd_order_kind {
    QD_ORDER_REST,  /* all ranks are to leave their world after the present step */
    QD_ORDER_WRITE, /* write your part of the state to descriptor 0, if `left` are the ranks that do */
    QD_ORDER_JOIN   /* the world of descriptor 0 as `rank`, with the configuration of 1 and the state of 2, if there is one */
} qd_order_kind;
enum { QD_ORDER_FDS = 3 };
typedef struct qd_order {
    qd_order_kind kind;
    int rank;
    uint64_t left;
} qd_order;
/* False if the rank has ended. */
bool qd_order_send(int socket, const qd_order *order, const int *fds, int count);
/* Descriptors that are not there are -1. False when there is no (further) order; wait: only once
 * the launcher has closed the socket. */
bool qd_order_receive(int socket, bool wait, qd_order *order, int fds[QD_ORDER_FDS]);

/* A launcher that is gone is not an error here: this rank is about to be killed. */
void qd_report_send(int fd, const qd_report *report);
/* False when there is no (further) report. */
bool qd_report_receive(int fd, qd_report *report);

/* The configuration, from the launcher to its ranks: the keys that the user set, as
 * zero-terminated "key=value" texts in the order of the option table. */
void qd_launch_config_put(const qd_options *options, qd_strbuf *text);
qd_status qd_launch_config_write(const qd_options *options, int *fd); /* *fd: a memfd */
qd_status qd_launch_config_read(int fd, qd_options **options);
qd_status qd_launch_config_parse(const char *text, size_t length, qd_options **options);

/* Ways to run the ranks; `run` is complete. */
/* Decides for a supervised run what follows when ranks are lost or their number is to change. */
typedef struct qd_keeper {
    void *context;
    /* The ranks that are left, `left` of them, rest. failure: why; QD_OK: their number is to
     * change. in_memory: together they have the state of the run. True: the run continues with the
     * options and the configuration that are now in the qd_run. False: it ends with *result. */
    bool (*again)(void *context, qd_status failure, bool in_memory, int left, qd_status *result);
    /* The number of ranks that the run should have now; 0: no other than it has. */
    int (*wanted)(void *context, int ranks);
} qd_keeper;

/* Starts one process per rank and returns when all have ended. The caller must be
 * single-threaded. keeper: NULL, or surviving processes continue after a failure. *stopped: the
 * signal by which the user ended the run; 0: none. */
qd_status qd_launch_processes(const qd_run *run, char *const *argv, const qd_keeper *keeper, int *stopped);
/* The same, and starts the ranks again after a failure, up to run.restarts times. Changes the
 * configuration of `run`. */
qd_status qd_launch_restarting(qd_run *run, char *const *argv, const qd_train_observer *observer);
/* What qd_launch_command() starts. */
typedef struct qd_command {
    const char *text; /* run.launcher, with its braces replaced */
    bool sized;       /* the number of ranks was chosen here: the layout of run->options holds */
    void *context;
    void (*line)(void *context, const char *line); /* a line of standard error */
    bool (*resizes)(void *context); /* each second: whether the ranks are to stop, because their number is to change */
    bool resized;     /* they were asked to */
    bool futile;      /* set by resizes(): it waits for machines that are gone, and no rank has done a step; it is ended if it does
                       * not end by itself */
} qd_command;

/* Starts the ranks with run.launcher, which ends when all have ended. *stopped: as above. */
qd_status qd_launch_command(const qd_run *run, char *const *argv, qd_command *command, int *stopped);
/* The last step in metrics.jsonl; -1: none. */
int64_t qd_launch_last_step(const qd_config *config);
/* Ranks as threads of this process; with one rank, this thread. */
qd_status qd_launch_threads(const qd_run *run);
#endif
