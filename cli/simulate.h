/* Inside `quadrille simulate`. */
#ifndef CLI_SIMULATE_H
#define CLI_SIMULATE_H

#include "cli.h"

#include <quadrille/sim.h>

/* A model that cannot be trained yet is replaced by its nearest; says so. */
qd_status simulate_nearest(cli_call *call);

qd_status simulate_write_report(const qd_simulation *simulation, const char *path);
#endif
