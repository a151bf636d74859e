/* Internals of `quadrille simulate`, shared with plan. */
#ifndef CLI_SIMULATE_H
#define CLI_SIMULATE_H

#include "cli.h"

#include <quadrille/sim.h>

/* Replaces a model that cannot be trained by the most similar one, and prints a note. */
qd_status simulate_nearest(cli_call *call);

/* Writes a simulated step as an HTML page. */
qd_status simulate_write_report(const qd_simulation *simulation, const char *path);
#endif
