/* The safetensors format: 8 bytes (length of the header, little-endian), a JSON header that names
 * each tensor's type, shape and place, then the raw data. */
#ifndef QD_CKPT_SAFETENSORS_H
#define QD_CKPT_SAFETENSORS_H

#include <quadrille/status.h>
#include <quadrille/types.h>

#define QD_SAFETENSORS_DIMS 8

/* ---- writing: declare all tensors, then write their data in the same order ---- */

typedef struct qd_safetensors_writer qd_safetensors_writer;

qd_status qd_safetensors_create(const char *path, qd_safetensors_writer **writer);
/* Before the first write: a text under `key` in the header's "__metadata__". Both must outlive the
 * writer. */
qd_status qd_safetensors_note(qd_safetensors_writer *writer, const char *key, const char *value);
/* Before the first write. Names must differ. */
qd_status qd_safetensors_declare(qd_safetensors_writer *writer, const char *name, qd_dtype dtype, int dims,
                                 const int64_t *shape);
/* The next tensor's data, whole. *hash: XXH3 of the bytes. */
qd_status qd_safetensors_write(qd_safetensors_writer *writer, const void *data, uint64_t *hash);
typedef struct qd_safetensors_summary {
    int64_t bytes;        /* of the file */
    uint64_t header_hash; /* XXH3 of the header and the 8 bytes before it */
} qd_safetensors_summary;
/* Flushes to the disk (fsync) and closes. QD_USAGE when declared tensors were not written. summary:
 * NULL is legal. */
qd_status qd_safetensors_finish(qd_safetensors_writer *writer, qd_safetensors_summary *summary);
void qd_safetensors_abandon(qd_safetensors_writer *writer); /* closes and removes the file; NULL is legal */

/* ---- reading ---- */

typedef struct qd_safetensors qd_safetensors;
typedef struct qd_safetensors_entry {
    const char *name;
    qd_dtype dtype;
    int dims;
    int64_t shape[QD_SAFETENSORS_DIMS];
    int64_t count; /* elements */
    const qd_safetensors *file;
    int64_t offset;   /* of its first byte in the file */
    const void *data; /* of a view or a loaded file: in memory, may be unaligned; of an opened file NULL */
} qd_safetensors_entry;

/* Opens a file and checks all of its header: QD_CORRUPT names the file, the tensor and what is
 * wrong. A file that is missing, is no file or cannot be read is QD_CORRUPT too, as a damaged one;
 * one that may not be read (permissions) is QD_IO. */
qd_status qd_safetensors_open(const char *path, qd_safetensors **file);
/* The same with all of the file read into memory, for small ones: entries have their data. */
qd_status qd_safetensors_load(const char *path, qd_safetensors **file);
/* The same with bytes in memory, which must outlive it. name: for messages. */
qd_status qd_safetensors_view(const char *name, const void *bytes, size_t size, qd_safetensors **file);
void qd_safetensors_close(qd_safetensors *file);
qd_safetensors_summary qd_safetensors_look(const qd_safetensors *file); /* of a file that is read */
int qd_safetensors_count(const qd_safetensors *file);
const qd_safetensors_entry *qd_safetensors_at(const qd_safetensors *file, int index);
const qd_safetensors_entry *qd_safetensors_find(const qd_safetensors *file, const char *name); /* NULL: none */
/* Elements [first, first + count) of a tensor, as stored; any thread. Sectors that cannot be read,
 * and a file that has become shorter, are QD_CORRUPT with file and position. */
qd_status qd_safetensors_read(const qd_safetensors_entry *entry, int64_t first, int64_t count, void *out);
const char *qd_safetensors_metadata(const qd_safetensors *file, const char *key); /* a string of __metadata__; NULL: none */
#endif
