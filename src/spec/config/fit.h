/* What would make a run fit into a memory. */
#ifndef QD_SPEC_CONFIG_FIT_H
#define QD_SPEC_CONFIG_FIT_H

#include "spec/config/config.h"

#include <quadrille/strbuf.h>

/* Says what the plan of `rank` needs by kind, and which single change of the configuration, the
 * cheapest in time first, needs no more than `limit` bytes ("train.recompute=full needs 31.2 GiB"),
 * or that none of them does. host: the memory is the host's own, so that state which train.offload
 * keeps there counts as well. */
qd_status qd_fit_explain(const qd_config *config, int rank, int64_t limit, bool host, qd_strbuf *text);
#endif
