/* run.dir/data.json: identifies the tokens that a run is trained on, so that a resumed run notices
 * when they have changed. */
#ifndef QD_TRAIN_RUN_RUN_DATA_H
#define QD_TRAIN_RUN_RUN_DATA_H

#include "data/data.h"

qd_status qd_run_data_write(const char *path, const qd_data *data);

enum { QD_RUN_DATA_WARNING = 2048 };
/* warning: what of the sources is no longer as it was, or that the file is missing; empty: nothing.
 * QD_USAGE: they are tokens of another tokenizer. */
qd_status qd_run_data_compare(const char *path, const qd_data *data, char warning[QD_RUN_DATA_WARNING]);

#endif
