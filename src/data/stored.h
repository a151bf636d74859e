/* Files of a data set: bytes of any place, from any thread, for as long as a run lasts.
 *
 * They are read with pread() and not mapped, so that an unreadable sector or a file that somebody
 * cuts off during the run is an error with the file's name and not SIGBUS. A data set may have more
 * files than a process may have open: those that have not been used for longest are closed and
 * opened again when needed. */
#ifndef QD_DATA_STORED_H
#define QD_DATA_STORED_H

#include <quadrille/status.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_stored qd_stored;

/* QD_USAGE: it does not exist, is no file, or is empty. */
qd_status qd_stored_open(const char *path, qd_stored **file);
void qd_stored_close(qd_stored *file); /* NULL is legal */
int64_t qd_stored_bytes(const qd_stored *file); /* when it was opened */

/* Bytes [offset, offset + bytes). QD_CORRUPT: the file has become shorter, or is another than
 * before; QD_IO: the disk fails. Both name file and position. */
qd_status qd_stored_read(qd_stored *file, int64_t offset, void *out, size_t bytes);

#endif
