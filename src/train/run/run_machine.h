/* Checks whether a run can start on this machine. */
#ifndef QD_TRAIN_RUN_RUN_MACHINE_H
#define QD_TRAIN_RUN_RUN_MACHINE_H

#include "spec/config/config.h"

#include <quadrille/check.h>

typedef char qd_machine_warning[192];

/* Not collective. Checks that the run's device exists and that the memory its ranks need here is
 * free: QD_NO_MEMORY names what would fit. warning: "", or that they need more than is free. */
qd_status qd_run_machine_check(const qd_config *config, const qd_check_report *plan, int local_ranks, qd_machine_warning warning);
#endif
