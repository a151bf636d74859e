/* Inside `quadrille simulate`. */
#ifndef CLI_SIMULATE_H
#define CLI_SIMULATE_H

#include <quadrille/sim.h>

qd_status simulate_write_report(const qd_simulation *simulation, const char *path);
#endif
