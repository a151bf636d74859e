/* The safetensors format: 8 bytes (length of the header, little-endian), a JSON header with each
 * tensor's type, shape and offset, then the raw data. */
#ifndef QD_CKPT_SAFETENSORS_H
#define QD_CKPT_SAFETENSORS_H

#include <quadrille/status.h>
#include <quadrille/types.h>

#define QD_SAFETENSORS_DIMS 8

/* Writing: declare all tensors, then write their data in the same order. */

typedef struct qd_safetensors_writer qd_safetensors_writer;

qd_status qd_safetensors_create(const char *path, qd_safetensors_writer **writer);
/* Before the first write: adds a string under `key` to the header's "__metadata__". Both must
 * outlive the writer. */
qd_status qd_safetensors_note(qd_safetensors_writer *writer, const char *key, const char *value);
/* Before the first write. Names must be distinct. */
qd_status qd_safetensors_declare(qd_safetensors_writer *writer, const char *name, qd_dtype dtype, int dims,
                                 const int64_t *shape);
/* Writes the complete data of the next tensor. *hash: XXH3 of the bytes. */
qd_status qd_safetensors_write(qd_safetensors_writer *writer, const void *data, uint64_t *hash);
typedef struct qd_safetensors_summary {
    int64_t bytes;        /* of the file */
    uint64_t header_hash; /* XXH3 of the header and the 8 bytes before it */
} qd_safetensors_summary;
/* Flushes to disk (fsync) and closes. QD_USAGE if declared tensors were not written. summary: NULL
 * is legal. */
qd_status qd_safetensors_finish(qd_safetensors_writer *writer, qd_safetensors_summary *summary);
void qd_safetensors_abandon(qd_safetensors_writer *writer); /* closes and removes the file; NULL is legal */

typedef struct qd_safetensors qd_safetensors;
typedef struct qd_safetensors_entry {
    const char *name;
    qd_dtype dtype;
    int dims;
    int64_t shape[QD_SAFETENSORS_DIMS];
    int64_t count; /* elements */
    const qd_safetensors *file;
    int64_t offset;   /* of its first byte in the file */
    const void *data; /* of a view or a loaded file: in memory, may be unaligned; of an opened file: NULL */
} qd_safetensors_entry;

/* Opens a file and checks its whole header: QD_CORRUPT names the file, the tensor and the problem.
 * A file that is missing, not a regular file or not readable is QD_CORRUPT too, like a damaged one;
 * missing permissions are QD_IO. */
qd_status qd_safetensors_open(const char *path, qd_safetensors **file);
/* The same with the whole file read into memory, for small files: entries have their data. */
qd_status qd_safetensors_load(const char *path, qd_safetensors **file);
/* The same for bytes in memory, which must outlive it. name: for messages. */
qd_status qd_safetensors_view(const char *name, const void *bytes, size_t size, qd_safetensors **file);
void qd_safetensors_close(qd_safetensors *file);
qd_safetensors_summary qd_safetensors_look(const qd_safetensors *file); /* of a file that was read */
int qd_safetensors_count(const qd_safetensors *file);
const qd_safetensors_entry *qd_safetensors_at(const qd_safetensors *file, int index);
const qd_safetensors_entry *qd_safetensors_find(const qd_safetensors *file, const char *name); /* NULL: none */
/* Reads elements [first, first + count) of a tensor, as stored; thread-safe. Unreadable sectors and
 * a file that has shrunk are QD_CORRUPT with file and position. */
qd_status qd_safetensors_read(const qd_safetensors_entry *entry, int64_t first, int64_t count, void *out);
const char *qd_safetensors_metadata(const qd_safetensors *file, const char *key); /* a string of __metadata__; NULL: none */
#endif
