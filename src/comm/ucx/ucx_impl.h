/* Internal to src/comm/ucx: what its files share. */
#ifndef QD_COMM_UCX_UCX_IMPL_H
#define QD_COMM_UCX_UCX_IMPL_H

#include "comm/remote/remote.h"
#include "comm/rendezvous/rendezvous.h"

#include <ucp/api/ucp.h>

/* library.c: QD_UNSUPPORTED, with the loader's reason, when UCX cannot be loaded. */
qd_status qd_ucx_load(void);

/* QD_SYSTEM with the library's text when `status` is an error. */
qd_status qd_ucx_check(ucs_status_t status, const char *call);

/* guard.c: the sockets on which UCX listens, over TCP. No peer proves anything there, so they are
 * open only while the ranks connect to each other. */
typedef struct qd_guard {
    int *before, befores; /* sockets that the process had before */
    int *listening, count; /* those on which UCX listens */
} qd_guard;
qd_status qd_guard_begin(qd_guard *guard); /* before UCX makes sockets */
qd_status qd_guard_find(qd_guard *guard);  /* after it has; closed until opened */
void qd_guard_open(qd_guard *guard, bool open);
/* Ends every connection to this rank whose other end is no rank's. Collective; the guard is
 * closed. */
qd_status qd_guard_cut_strangers(const qd_guard *guard, qd_rendezvous *meeting);
void qd_guard_free(qd_guard *guard);

#endif
