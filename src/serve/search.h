/* Searches for layouts in threads, one after another: a new one takes the place of the one before,
 * which ends by itself. All figures come from qd_plan_watched(). Thread-safe; no call waits for a
 * search. */
#ifndef QD_SERVE_SEARCH_H
#define QD_SERVE_SEARCH_H

#include <quadrille/options.h>
#include <quadrille/strbuf.h>

typedef struct qd_search qd_search;

/* keys: those that a search decides, NULL-terminated; borrowed. */
qd_status qd_search_create(const char *const *keys, qd_search **search);
void qd_search_destroy(qd_search *search); /* stops it and waits for its end; NULL is legal */

/* Starts a search for a run, and stops the one before. layout: compared with the result; NULL:
 * none. Both belong to the search, also after an error. QD_BUSY while too many stopped searches are
 * still ending. */
qd_status qd_search_start(qd_search *search, qd_options *run, qd_options *layout);
/* Appends how far the search is and, at its end, its report or why it failed. */
qd_status qd_search_progress(qd_search *search, qd_strbuf *json);
/* Lets the search end with what it has found. */
void qd_search_stop(qd_search *search);
#endif
