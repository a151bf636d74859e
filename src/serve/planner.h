/* The planner as requests: simulates a layout, and searches for the best one in a thread
 * (search.h). All figures come from qd_simulate() and qd_plan_watched(), as on the command line.
 * Thread-safe.
 *
 * A request is text, one word and its argument per line:
 *   cluster h100                   a built-in cluster
 *   set model.preset=llama3-8b     the run, which a search keeps
 *   layout parallel.tp=8           the layout, which a search chooses
 *   timeline [PIXELS [BEGIN END]]  last: a step with its timeline, merged to what a drawing of so
 *                                  many pixels shows of all, or of a part in seconds
 * Keys with free text, which may name files, are refused. */
#ifndef QD_SERVE_PLANNER_H
#define QD_SERVE_PLANNER_H

#include <quadrille/strbuf.h>

typedef struct qd_planner qd_planner;

qd_status qd_planner_create(qd_planner **planner);
void qd_planner_destroy(qd_planner *planner); /* ends a search; NULL is legal */

/* Appends the presets, the clusters and the keys that the page offers. */
qd_status qd_planner_choices(qd_strbuf *json);
/* Appends the simulated step of a request: the data of a report, the figures of `simulate --json`
 * and the configuration as YAML. */
qd_status qd_planner_step(qd_planner *planner, const char *request, qd_strbuf *json);

/* Starts a search for the run of the request, and stops an earlier one. A layout in the request is
 * compared with the result. Appends what qd_planner_progress() does. */
qd_status qd_planner_search(qd_planner *planner, const char *request, qd_strbuf *json);
/* Appends how far the search is and, at its end, its report or why it failed. */
qd_status qd_planner_progress(qd_planner *planner, qd_strbuf *json);
/* Lets the search end with what it has found. */
qd_status qd_planner_stop(qd_planner *planner, qd_strbuf *json);
#endif
