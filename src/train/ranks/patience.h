/* How long a rank may be stopped by a signal before the run ends, by the time of its steps. */
#ifndef QD_TRAIN_RANKS_PATIENCE_H
#define QD_TRAIN_RANKS_PATIENCE_H

#include <stdint.h>

enum { QD_PATIENCE_STEPS = 15 };

typedef struct qd_patience {
    double seconds[QD_PATIENCE_STEPS]; /* of the last steps */
    int64_t steps;
} qd_patience;

static inline void qd_patience_add(qd_patience *patience, double step_seconds)
{
    patience->seconds[patience->steps++ % QD_PATIENCE_STEPS] = step_seconds;
}

/* Seconds of a step: the median of the last ones; 0: there was none. */
double qd_patience_step(const qd_patience *patience);

/* With the time to notice it, a stopped rank ends the run within max(5 s, 3 steps); run.deadline
 * holds where it is less. */
double qd_patience_stopped(const qd_patience *patience, double deadline);
#endif
