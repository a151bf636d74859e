/* Opening, reading and atomically replacing files, as every reader of this program does it.
 *
 * Nothing is mapped: an unreadable sector, or a file that shrinks while it is in use, is a read()
 * error that names the file instead of a SIGBUS. Nothing blocks: a named pipe in place of a file is
 * refused when it is opened. */
#ifndef QD_BASE_FILE_H
#define QD_BASE_FILE_H

#include <quadrille/status.h>
#include <stddef.h>
#include <stdint.h>

/* Opens a regular file for reading. QD_USAGE: it is missing, not readable, or not a regular file
 * (folder, pipe, device, symlink loop); QD_IO: the disk failed; QD_NO_MEMORY, QD_SYSTEM: this
 * process is out of memory or file descriptors. After a failure errno holds the reason. */
qd_status qd_file_open(const char *path, int *fd, int64_t *bytes);

/* Reads bytes [offset, offset + bytes) of an open file; thread-safe. QD_CORRUPT: the file ends
 * before them. QD_IO: they cannot be read. Both messages name the file and the position. */
qd_status qd_file_read_at(const char *path, int fd, int64_t offset, void *out, size_t bytes);

/* Reads a whole file of at most `most` bytes. *text is NUL-terminated (the NUL is not counted) and
 * freed with free(). Statuses and errno as for qd_file_open(). An anonymous pipe ("<(command)" of a
 * shell) or a device is read to its end. */
qd_status qd_file_read(const char *path, size_t most, char **text, size_t *length);

/* Writes all bytes to an open file, at its position. QD_IO: fewer were written. */
qd_status qd_file_write(const char *path, int fd, const void *data, size_t bytes);

/* Writes a temporary file next to `path`, flushes it to disk and renames it: readers see the old or
 * the new file, never a partial one. Removes temporary files ("<path>.<pid>.tmp") left by processes
 * that were killed in between. */
qd_status qd_file_replace(const char *path, const char *text, size_t length);

/* Copies a file of at most `most` bytes. */
qd_status qd_file_copy(const char *from, const char *to, size_t most);

/* Flushes the folder that contains `path`, so that a new name in it survives a power failure. */
qd_status qd_folder_sync_of(const char *path);

#endif
