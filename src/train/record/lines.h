/* Files with one JSON object per line that begins with its step: metrics.jsonl, starts.jsonl,
 * samples.jsonl, spikes.jsonl. */
#ifndef QD_TRAIN_RECORD_LINES_H
#define QD_TRAIN_RECORD_LINES_H

#include <quadrille/strbuf.h>
#include <stdbool.h>
#include <stdint.h>

/* Appends the whole lines of steps up to `step`; none for step 0 or if the file is missing. */
qd_status qd_lines_keep(const char *path, int64_t step, qd_strbuf *out);
/* Replaces the file by these lines, and frees them; nothing is written, and `status` is returned,
 * if they could not be kept. */
qd_status qd_lines_replace(const char *path, qd_status status, qd_strbuf *lines);
/* Calls `visit` for each whole line (without its newline) of a file whose steps ascend, up to
 * `step`; none if the file is missing. */
qd_status qd_lines_each(const char *path, int64_t step, void (*visit)(void *context, const char *line), void *context);
/* The number after a key, which includes its quotes and the colon; false: there is none. */
bool qd_line_number(const char *line, const char *key, double *value);
#endif
