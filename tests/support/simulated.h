/* Simulated steps in tests: a configuration on a cluster, from words. */
#ifndef QD_TESTS_SUPPORT_SIMULATED_H
#define QD_TESTS_SUPPORT_SIMULATED_H

#include <quadrille/plan.h>

/* Options of "key=value key=value" on a cluster; the caller destroys them. Fails the test on a bad
 * word. */
qd_options *simulated_options(const char *cluster, const char *words);
/* Simulates them; fails the test on any error. */
qd_sim_report simulated(const char *cluster, const char *format, ...) __attribute__((format(printf, 2, 3)));
#endif
