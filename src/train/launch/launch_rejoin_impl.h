/* Internal to launch_rejoin.c and launch_rejoin_size.c. */
#ifndef QD_TRAIN_LAUNCH_REJOIN_IMPL_H
#define QD_TRAIN_LAUNCH_REJOIN_IMPL_H

#include "base/thread.h"
#include "comm/rendezvous/door.h"
#include "train/launch/launch_elastic.h"
#include "train/launch/launch_rejoin.h"

enum { MOST_LEFT = 64 };  /* ranks whose parts make up a state: bits of a word */

/* What a rank tells the others. Plain data. */
typedef struct offer {
    int64_t attempt;    /* of the world that it has left; 0: it is a new process, or knows as little as one */
    int64_t step, has;  /* the last that it has done; that whose state it has in its trainer; -1: none */
    int64_t part;       /* step of the state of which it has written a part; -1: none */
    int64_t writers;    /* of how many */
    int64_t rank, ranks; /* in the world that it has left, and how many it had; 0: there was none */
    int64_t place;      /* the number that the process was started with (RANK) */
    double since;       /* seconds since it has failed */
    int64_t status;
    char message[QD_ERROR_MESSAGE_BYTES];
} offer;

struct qd_rejoin {
    qd_run *run;
    qd_journal journal;
    const qd_options *given, *started; /* started: what the user gave to this process, if that is not what the others have */
    qd_options *adopted;
    qd_options *options; /* of the present world; NULL: those that were given */
    int rank, places;    /* RANK and WORLD_SIZE */
    bool stayed;
    bool knows; /* the past of the run: it has once agreed with the others on how to go on */
    bool knew;  /* when it joined the present world */
    bool waits; /* a layout has left it out once; it may outlive the run of which it has the configuration */
    bool fresh; /* no rank of the present world has known it */
    bool final; /* the run ends, whatever is new in it */
    qd_door *door; /* rank 0 */
    bool cored;
    qd_cores_set cores; /* of this process: a trainer may restrict it to some of them */
    qd_elastic elastic; /* most 0: the number of ranks is fixed */
    qd_options *sized;  /* those that were given, in the layout for the ranks that have met; NULL: as they were given */
    double looked;      /* rank 0: clock time when the number of ranks was last looked at */
    bool noted_few;
    bool judged;        /* a failure, after which the run has not continued yet */
    int staying;        /* ranks that had stayed then */
    int before;         /* ranks of the world before; 0: none */
    int spares;         /* rank 0: ranks that wait because no layout uses them */
    double begin;       /* clock time since which this rank waits for the others */
    /* Of the world that it has left: */
    qd_comm *left;
    qd_kept *kept;
    qd_failure failure;
    int64_t step;
    /* The part of the state that it has written: */
    int fd; /* -1: none */
    int64_t part, writers;
};

/* launch_rejoin_size.c */

/* The number of ranks that this run may have, from run->options. */
void qd_rejoin_begin_size(qd_rejoin *r);
/* The run may use its folder: what was said there to one that it replaces does not hold for it. */
void qd_rejoin_forget_size(qd_rejoin *r);
/* Collective. Configuration of the run in the layout for the ranks of `world`, or for as many of
 * them as a layout can use. */
qd_status qd_rejoin_fit(qd_rejoin *r, qd_comm *world, bool *agreed);
/* Collective, after fit(): if a layout uses only a part of the ranks, chooses those that have the
 * state between them. *narrows: the ranks leave this world, and those chosen meet again; the others
 * have become new processes, which wait until there are more. */
qd_status qd_rejoin_narrow(qd_rejoin *r, qd_comm *world, const offer *offers, bool *narrows);
/* Rank 0: that the run continues with another number of ranks, in the journal and as a note. */
void qd_rejoin_note_size(qd_rejoin *r, const offer *offers, bool in_memory);
/* As qd_run.asks_rest. */
qd_rest qd_rejoin_asks_rest(void *rejoin);

/* launch_rejoin.c: the latest of the states below `below` that ranks have in their trainers, or
 * that ranks have written of which none is lost. -1: none. */
int64_t qd_rejoin_latest(const offer *offers, int size, int64_t below, bool *written);
/* launch_rejoin.c: this rank becomes one that knows nothing of the run. */
void qd_rejoin_forget(qd_rejoin *r);
#endif
