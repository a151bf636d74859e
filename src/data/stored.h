/* Files of a data set: random access from any thread for the duration of a run.
 *
 * They are read with pread() and not mapped, so that an unreadable sector, or a file truncated
 * during the run, is an error that names the file instead of a SIGBUS. A data set may have more
 * files than a process may open: the least recently used ones are closed and reopened on demand. */
#ifndef QD_DATA_STORED_H
#define QD_DATA_STORED_H

#include <quadrille/status.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_stored qd_stored;

/* QD_USAGE: it does not exist, is not a regular file, or is empty. */
qd_status qd_stored_open(const char *path, qd_stored **file);
void qd_stored_close(qd_stored *file); /* NULL is legal */
int64_t qd_stored_bytes(const qd_stored *file); /* size when it was opened */

/* Reads bytes [offset, offset + bytes). QD_CORRUPT: the file has shrunk or was replaced; QD_IO: the
 * disk failed. Both name the file and the position. */
qd_status qd_stored_read(qd_stored *file, int64_t offset, void *out, size_t bytes);

#endif
