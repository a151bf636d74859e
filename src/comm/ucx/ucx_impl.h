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

/* ports.c: the sockets on which UCX listens, over TCP. No peer proves anything there, so they are
 * open only while the ranks connect to each other. */
typedef struct qd_ucx_ports {
    int *before, befores; /* sockets that the process had before */
    int *listening, count; /* those on which UCX listens */
    bool warned; /* that they cannot be closed */
} qd_ucx_ports;
qd_status qd_ucx_ports_begin(qd_ucx_ports *ports); /* before UCX makes sockets */
qd_status qd_ucx_ports_find(qd_ucx_ports *ports);  /* after it has; closed until opened */
void qd_ucx_ports_open(qd_ucx_ports *ports, bool open);
/* Ends every connection to this rank whose other end is no rank's. Collective; the ports are
 * closed. */
qd_status qd_ucx_ports_cut_strangers(const qd_ucx_ports *ports, qd_rendezvous *meeting);
void qd_ucx_ports_free(qd_ucx_ports *ports);

#endif
