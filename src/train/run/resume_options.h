/* The configuration of a resumed run: what was saved with it, below what is given now. */
#ifndef QD_TRAIN_RUN_RESUME_OPTIONS_H
#define QD_TRAIN_RUN_RESUME_OPTIONS_H

#include <quadrille/options.h>

/* qd_train_resume_options() with the number of ranks that a launcher has started; 0: parallel.ranks
 * decides. */
qd_status qd_resume_options(qd_options *options, int launched);
#endif
