/* Files with one JSON object per line that begins with its step: starts.jsonl, samples.jsonl. */
#ifndef QD_TRAIN_RECORD_LINES_H
#define QD_TRAIN_RECORD_LINES_H

#include <quadrille/strbuf.h>
#include <stdint.h>

/* Appends the whole lines of steps up to `step`; none for step 0 or if the file is missing. */
qd_status qd_lines_keep(const char *path, int64_t step, qd_strbuf *out);
#endif
