/* run.dir/data.json: the tokens that a run is trained on, so that one that goes on notices when
 * they are others. */
#ifndef QD_TRAIN_RUN_RUN_DATA_H
#define QD_TRAIN_RUN_RUN_DATA_H

#include "data/data.h"

qd_status qd_run_data_write(const char *path, const qd_data *data);

enum { QD_RUN_DATA_REMARK = 2048 };
/* remark: what of the sources is no longer as it was, or that the file is missing; empty: nothing.
 * QD_USAGE: they are tokens of another tokenizer. */
qd_status qd_run_data_compare(const char *path, const qd_data *data, char remark[QD_RUN_DATA_REMARK]);

#endif
