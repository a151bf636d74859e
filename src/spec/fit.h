/* What would make a run fit into a memory. */
#ifndef QD_SPEC_FIT_H
#define QD_SPEC_FIT_H

#include "spec/config.h"

#include <quadrille/strbuf.h>

/* Says what the plan of `rank` needs by kind, and which single change of the configuration, the cheapest in time first,
 * needs no more than `limit` bytes ("train.recompute=full needs 31.2 GiB"), or that none of them does. */
qd_status qd_fit_explain(const qd_config *config, int rank, int64_t limit, qd_strbuf *text);
#endif
