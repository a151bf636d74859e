/* Configurations and batches for tests that train small models. */
#ifndef QD_TESTS_SUPPORT_LAYOUT_H
#define QD_TESTS_SUPPORT_LAYOUT_H

#include "support/golden.h"
#include "train/exec/team.h"

/* Options set from "key=value" words separated by spaces, on top of the defaults, then resolved.
 * Fails the test on bad words. The options live until the process ends. */
qd_config layout_config(const char *words);
/* The same as options, for public functions; destroy with qd_options_destroy. */
qd_options *layout_options(const char *words);

/* The configuration and the batches of a golden fixture; samples are consecutive, step after
 * step. */
qd_config golden_layout(const qd_golden *golden, const char *words);
qd_batch_source golden_source(qd_golden *golden);
#endif
