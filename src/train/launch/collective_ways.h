/* How local collectives move data on this machine: measured once, kept in a file. */
#ifndef QD_TRAIN_LAUNCH_COLLECTIVE_WAYS_H
#define QD_TRAIN_LAUNCH_COLLECTIVE_WAYS_H

#include <quadrille/comm.h>

typedef struct qd_collective_ways {
    char text[QD_LOCAL_WAYS_MOST]; /* for qd_comm_config.ways */
    char path[1024];               /* of the file; "": none */
    double seconds;                /* of the measurement; 0: none */
    bool kept;                     /* it is in the file */
    bool disturbed;                /* other programs disturbed the measurement: it is not used */
} qd_collective_ways;

/* given: run.collectives. Reads what the file has for this machine. If it has nothing and
 * may_measure is set, measures for about 0.3 s and adds the result to the file, which fails
 * silently where the file cannot be written. A damaged file is reported and replaced. Several
 * processes may do this at once. text "" means what a machine uses that was not measured. */
void qd_collective_ways_find(const char *given, bool may_measure, qd_collective_ways *ways);
#endif
