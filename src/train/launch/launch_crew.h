/* Internal to the launcher of local ranks: its children, shared by the file that starts and watches
 * them and the one that forms new worlds of those that are left. */
#ifndef QD_TRAIN_LAUNCH_CREW_H
#define QD_TRAIN_LAUNCH_CREW_H

#include "train/launch/collective_ways.h"
#include "train/launch/launch.h"
#include "train/ranks/patience.h"

typedef struct child {
    pid_t pid; /* 0: not started, or reaped */
    double stopped_at; /* clock time at which a signal stopped it; 0: it is not stopped */
    qd_status told; /* the failure it has reported */
    char last[256]; /* where it was at the last look */
    /* Of a supervised run: */
    int orders;    /* our end of the socket; -1: none */
    bool rests;    /* it has left its world, */
    int64_t has;   /* with the state after this step; -1: none */
    bool writes, written, complete; /* it was ordered to write its part; it has; all parts together are the state */
    bool leaves;   /* it is no longer a rank, and about to end */
} child;

typedef enum phase { PHASE_RUNNING, PHASE_RETURNING, PHASE_TERMINATING, PHASE_KILLING } phase;

typedef struct crew {
    const qd_run *run;
    qd_local_world *world;
    child *children;
    int size, alive;
    qd_collective_ways ways; /* how its worlds copy, once `chosen` */
    bool chosen;
    int report[2]; /* socket pair: [0] ours, [1] the ranks' */
    int config;    /* memfd: the configuration, for the ranks */
    int signals;   /* signalfd */
    sigset_t mask_before, watched;
    struct sigaction child_before;
    phase phase;
    double next; /* clock time at which the next phase begins */
    int stop_signal; /* sent by the user; 0: none */
    qd_patience patience;
    double looked_at; /* clock time of the last look at the ranks */
    bool excused;     /* a debugger holds a rank */
    double standing;  /* seconds for which no rank has advanced */
    qd_failure failure;
    char *const *argv;
    const qd_keeper *keeper; /* NULL: the run is not supervised */
    int count;       /* children, with those that leave: at least `size` */
    bool asked;      /* the ranks are asked to rest, because their number is to change */
    int state;       /* memfd: what the ranks hand over; -1: none */
    int64_t state_step; /* after this step; -1: it is not complete */
    int64_t below;   /* the states of this step and later are incomplete */
    double ordered_at;  /* clock time when they were ordered to write it */
    bool over;       /* the keeper has ended the run, with `failure` */
} crew;

enum { QD_CREW_MOST = 2 * QD_LOCAL_MAX_RANKS };

/* launch_processes.c */
/* A world of `size` ranks, with the run's deadline and copies that suit the processor: those of its
 * first world of several ranks. */
qd_status qd_crew_world(crew *c, int size, qd_local_world **world);
/* Starts the children of the ranks that have none. */
qd_status qd_crew_start(crew *c);

/* launch_reform.c. All are for supervised runs. */
/* Whether ranks have rested or failed, so that a new world is to be formed; the phases of the end
 * of a run are not for them. */
bool qd_crew_reforms(const crew *c);
/* Twice per second: asks the ranks to rest if the run should have another number of them. */
void qd_crew_look(crew *c);
/* After any event: does what is next on the way to the new world. */
void qd_crew_advance(crew *c);
/* When the time to return is over: ends the ranks that have not come to rest. */
void qd_crew_end_busy(crew *c);
/* Lets all ranks go that rest. */
void qd_crew_release(crew *c);
void qd_crew_take_report(crew *c, const qd_report *report);
#endif
