/* Whether a run can start on this machine. */
#ifndef QD_TRAIN_RUN_RUN_MACHINE_H
#define QD_TRAIN_RUN_RUN_MACHINE_H

#include "spec/config/config.h"

#include <quadrille/check.h>

typedef char qd_machine_warning[192];

/* Not collective. Its device is there, and what its ranks here need is free: QD_NO_MEMORY says what
 * would fit. warning: "", or that they need more than is free. */
qd_status qd_run_machine_check(const qd_config *config, const qd_check_report *plan, int local_ranks, qd_machine_warning warning);
#endif
