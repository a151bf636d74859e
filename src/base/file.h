/* Files as every reader of this program opens them, and how one is replaced as a whole.
 *
 * Nothing is mapped: an unreadable sector, or a file that becomes shorter while it is in use, is an
 * error of read() with the file's name instead of SIGBUS. Nothing is waited for: a named pipe in
 * place of a file is refused when it is opened. */
#ifndef QD_BASE_FILE_H
#define QD_BASE_FILE_H

#include <quadrille/status.h>
#include <stddef.h>
#include <stdint.h>

/* Opens a regular file for reading. QD_USAGE: it is missing, may not be read, or is no file
 * (folder, pipe, device, loop of links); QD_IO: the disk failed; QD_NO_MEMORY, QD_SYSTEM: this
 * process is out of memory or of descriptors. After a failure errno is the reason. */
qd_status qd_file_open(const char *path, int *fd, int64_t *bytes);

/* Bytes [offset, offset + bytes) of an open file; any thread. QD_CORRUPT: it ends before them.
 * QD_IO: they cannot be read. Both name the file and the position. */
qd_status qd_file_read_at(const char *path, int fd, int64_t offset, void *out, size_t bytes);

/* Reads a whole file of at most `most` bytes. *text is ended by '\0' (not counted) and freed with
 * free(). Statuses and errno as for qd_file_open(). An anonymous pipe ("<(command)" of a shell) and
 * a device are read to their end. */
qd_status qd_file_read(const char *path, size_t most, char **text, size_t *length);

/* All bytes to an open file, at its position. QD_IO: it took less. */
qd_status qd_file_write(const char *path, int fd, const void *data, size_t bytes);

/* Writes a file next to its place, flushes it to the disk and renames it: the file is old or new,
 * never half. What a process that was killed in the middle of this left next to the file
 * ("<path>.<pid>.tmp") is removed. */
qd_status qd_file_replace(const char *path, const char *text, size_t length);

#endif
