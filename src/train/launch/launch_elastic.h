/* How many ranks a run with run.elastic has, and in which layout. */
#ifndef QD_TRAIN_LAUNCH_ELASTIC_H
#define QD_TRAIN_LAUNCH_ELASTIC_H

#include "train/ranks/failure.h"
#include "train/run/run.h"

#include <limits.h>

/* In the run folder, unless run.available names another file. */
#define QD_AVAILABLE_FILE "available"

typedef struct qd_elastic {
    int least, most;      /* of run.elastic; 0: the number of ranks is fixed */
    char path[PATH_MAX];  /* the file that says how many are available */
    int available;        /* what it has said last */
    int limit;            /* what the hosts can take, or how many ranks have come; below 0: not known */
    int lost;             /* ranks that failed again and again, since the file has changed */
    int allowed, ranks;   /* the most that may run, and how many of them a layout can use; 0: not known yet */
    qd_options *options;  /* with that layout */
    char reason[256];     /* for the present number */
    double asked_at;      /* when it became known */
} qd_elastic;

/* Refuses more local ranks than one machine starts. */
qd_status qd_elastic_check(const qd_config *config);
void qd_elastic_begin(qd_elastic *e, const qd_config *config);
void qd_elastic_end(qd_elastic *e);
/* What was said to the run that this one replaces does not hold for it. */
void qd_elastic_forget(const qd_elastic *e, const qd_config *config);
/* No more ranks than these are there, for that reason. */
void qd_elastic_limit(qd_elastic *e, int ranks, const char *reason);
/* The number of ranks that the run should have now; 0: no other than `ranks`, which it has; below
 * 0: it cannot run, and `reason` says why. */
int qd_elastic_wanted(qd_elastic *e, const qd_options *given, int ranks);
/* A copy of the options that were given, in the layout for that number. QD_SYSTEM: there are too
 * few ranks. */
qd_status qd_elastic_options(qd_elastic *e, const qd_options *given, qd_options **options);
/* A rank fails again and again. True if the run can continue without one. */
bool qd_elastic_exclude(qd_elastic *e, const qd_options *given, int ranks);
#endif
