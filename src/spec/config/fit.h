/* Suggests changes that make a run fit into memory. */
#ifndef QD_SPEC_CONFIG_FIT_H
#define QD_SPEC_CONFIG_FIT_H

#include "spec/config/config.h"

#include <quadrille/strbuf.h>

/* Writes what the plan of `rank` needs, by kind of buffer, and which single changes of the
 * configuration need no more than `limit` bytes, the fastest first ("train.recompute=full needs
 * 31.2 GiB"), or that none does. host: the limit is that of host memory, so that state offloaded by
 * train.offload counts too. */
qd_status qd_fit_explain(const qd_config *config, int rank, int64_t limit, bool host, qd_strbuf *text);
#endif
