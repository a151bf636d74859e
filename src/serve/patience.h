/* Ends connections of slow clients, so that they cannot hold all of them: libmicrohttpd's own time
 * limit starts over with every byte. Thread-safe. */
#ifndef QD_SERVE_PATIENCE_H
#define QD_SERVE_PATIENCE_H

#include <quadrille/status.h>

typedef struct qd_patience qd_patience;

/* Makes a watch over at most `capacity` connections, with a thread of its own. quiet: seconds that
 * a connection may take to send a request; busy: to receive the answer. */
qd_status qd_patience_create(int capacity, double quiet, double busy, qd_patience **watch);
void qd_patience_destroy(qd_patience *watch); /* after the last connection has ended; NULL is legal */

/* Returns the number of a new connection; -1: there is no place for it. */
int qd_patience_add(qd_patience *watch, int fd);
void qd_patience_remove(qd_patience *watch, int number); /* before its socket is closed */
/* The headers of a request have arrived; the answer was sent. */
void qd_patience_busy(qd_patience *watch, int number);
void qd_patience_quiet(qd_patience *watch, int number);
#endif
