/* Writes and reads safetensors files. Files are read with pread(), not mapped; base/file.h says
 * why. */
#include "ckpt/safetensors.h"

#include "base/file.h"
#include "base/text/json.h"

#include <quadrille/json_writer.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

/* Our types and their names in the format. */
static const struct {
    qd_dtype dtype;
    const char *name;
} type_names[] = {{QD_F32, "F32"}, {QD_BF16, "BF16"}, {QD_F16, "F16"}, {QD_I32, "I32"},
                  {QD_I64, "I64"}, {QD_F64, "F64"},   {QD_U8, "U8"},   {QD_U8, "BOOL"}, /* BOOL: masks, which are ignored */
                  {QD_F8E4M3, "F8_E4M3"}};
enum { TYPES = sizeof type_names / sizeof *type_names };

static const char *type_name(qd_dtype dtype)
{
    for (int i = 0; i < TYPES; i++)
        if (type_names[i].dtype == dtype)
            return type_names[i].name;
    return NULL;
}

typedef struct declared {
    char *name;
    qd_dtype dtype;
    int dims;
    int64_t shape[QD_SAFETENSORS_DIMS], bytes;
} declared;

enum { MOST_NOTES = 4 };

struct qd_safetensors_writer {
    char *path;
    int fd;
    const char *notes[MOST_NOTES][2];
    int note_count;
    qd_safetensors_summary summary;
    declared *tensors;
    int count, capacity, written;
};

qd_status qd_safetensors_create(const char *path, qd_safetensors_writer **writer)
{
    qd_safetensors_writer *w = calloc(1, sizeof *w);
    if (w)
        w->path = strdup(path);
    if (!w || !w->path) {
        free(w);
        return QD_FAIL(QD_NO_MEMORY, "no memory to write %s", path);
    }
    w->fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (w->fd < 0) {
        qd_status status = QD_FAIL(QD_IO, "%s: cannot be created: %s", path, strerror(errno));
        free(w->path);
        free(w);
        return status;
    }
    *writer = w;
    return QD_OK;
}

qd_status qd_safetensors_note(qd_safetensors_writer *w, const char *key, const char *value)
{
    if (w->note_count == MOST_NOTES)
        return QD_FAIL(QD_USAGE, "%s: more than %d notes", w->path, MOST_NOTES);
    w->notes[w->note_count][0] = key;
    w->notes[w->note_count++][1] = value;
    return QD_OK;
}

qd_status qd_safetensors_declare(qd_safetensors_writer *w, const char *name, qd_dtype dtype, int dims, const int64_t *shape)
{
    if (w->count == w->capacity) {
        int capacity = w->capacity ? 2 * w->capacity : 64;
        declared *larger = realloc(w->tensors, (size_t)capacity * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the header of %s", w->path);
        w->tensors = larger;
        w->capacity = capacity;
    }
    declared *t = &w->tensors[w->count];
    *t = (declared){
        .name = strdup(name), .dtype = dtype, .dims = dims, .bytes = (int64_t)qd_dtype_size(dtype)};
    if (!t->name)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the header of %s", w->path);
    for (int d = 0; d < dims; d++) {
        t->shape[d] = shape[d];
        t->bytes *= shape[d];
    }
    w->count++;
    return QD_OK;
}

static uint64_t header_hash(const unsigned char prefix[8], const char *header, size_t length)
{
    return XXH3_64bits_withSeed(header, length, XXH3_64bits(prefix, 8));
}

static qd_status write_header(qd_safetensors_writer *w)
{
    qd_strbuf text = {0};
    qd_json_writer json = qd_json_writer_on(&text);
    int64_t offset = 0;
    qd_json_object_begin(&json, NULL);
    if (w->note_count > 0) {
        qd_json_object_begin(&json, "__metadata__");
        for (int i = 0; i < w->note_count; i++)
            qd_json_put_string(&json, w->notes[i][0], w->notes[i][1]);
        qd_json_end(&json);
    }
    for (int i = 0; i < w->count; i++) {
        const declared *t = &w->tensors[i];
        qd_json_object_begin(&json, t->name);
        qd_json_put_string(&json, "dtype", type_name(t->dtype));
        qd_json_list_begin(&json, "shape");
        for (int d = 0; d < t->dims; d++)
            qd_json_put_int(&json, NULL, t->shape[d]);
        qd_json_end(&json);
        qd_json_list_begin(&json, "data_offsets");
        qd_json_put_int(&json, NULL, offset);
        qd_json_put_int(&json, NULL, offset + t->bytes);
        qd_json_end(&json);
        qd_json_end(&json);
        offset += t->bytes;
    }
    qd_json_end(&json);
    qd_strbuf_pad(&text, ' ', (int)((120 - text.length % 64) % 64)); /* data starts at a multiple of 64 bytes, counting the 8-byte prefix */
    char *header = NULL;
    size_t length = text.length;
    QD_TRY(qd_strbuf_take(&text, &header));
    unsigned char prefix[8];
    for (int i = 0; i < 8; i++)
        prefix[i] = (unsigned char)(length >> (8 * i));
    qd_status status = qd_file_write(w->path, w->fd, prefix, sizeof prefix);
    if (status == QD_OK)
        status = qd_file_write(w->path, w->fd, header, length);
    w->summary = (qd_safetensors_summary){8 + (int64_t)length + offset, header_hash(prefix, header, length)};
    free(header);
    return status;
}

qd_status qd_safetensors_write(qd_safetensors_writer *w, const void *data, uint64_t *hash)
{
    if (w->written == 0)
        QD_TRY(write_header(w));
    if (w->written >= w->count)
        return QD_FAIL(QD_USAGE, "%s: more tensors written than declared", w->path);
    size_t bytes = (size_t)w->tensors[w->written].bytes;
    *hash = XXH3_64bits(data, bytes);
    QD_TRY(qd_file_write(w->path, w->fd, data, bytes));
    w->written++;
    return QD_OK;
}

static void free_writer(qd_safetensors_writer *w)
{
    for (int i = 0; i < w->count; i++)
        free(w->tensors[i].name);
    free(w->tensors);
    free(w->path);
    free(w);
}

qd_status qd_safetensors_finish(qd_safetensors_writer *w, qd_safetensors_summary *summary)
{
    qd_status status = QD_OK;
    if (w->written != w->count)
        status = QD_FAIL(QD_USAGE, "%s: %d tensors were declared, %d written", w->path, w->count, w->written);
    else if (w->count == 0)
        status = write_header(w);
    if (status == QD_OK && fsync(w->fd) != 0)
        status = QD_FAIL(QD_IO, "%s: cannot be flushed to the disk: %s", w->path, strerror(errno));
    if (close(w->fd) != 0 && status == QD_OK)
        status = QD_FAIL(QD_IO, "%s: cannot be closed: %s", w->path, strerror(errno));
    if (summary)
        *summary = w->summary;
    free_writer(w);
    return status;
}

void qd_safetensors_abandon(qd_safetensors_writer *w)
{
    if (!w)
        return;
    close(w->fd);
    unlink(w->path);
    free_writer(w);
}

struct qd_safetensors {
    char *path;
    int fd;                      /* -1: a view */
    const unsigned char *bytes;  /* of a view or a loaded file: the contents; otherwise NULL */
    char *owned;                 /* of a loaded file: the contents, owned */
    int64_t size, data_at;       /* size of the file; offset of the data */
    unsigned char prefix[8];     /* length of the header */
    uint64_t header_hash;
    qd_json *header;
    qd_safetensors_entry *entries; /* sorted by name */
    int count;
};

static qd_status corrupt(const qd_safetensors *f, const char *what, const char *tensor)
{
    return QD_FAIL(QD_CORRUPT, "%s: %s%s%s%s", f->path, tensor ? "tensor '" : "", tensor ? tensor : "", tensor ? "': " : "", what);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const qd_safetensors_entry *)a)->name, ((const qd_safetensors_entry *)b)->name);
}

static int by_place(const void *a, const void *b)
{
    const int64_t x = ((const qd_safetensors_entry *)a)->offset, y = ((const qd_safetensors_entry *)b)->offset;
    return x < y ? -1 : x > y;
}

static qd_status read_shape(const qd_safetensors *f, const qd_json_node *shape, qd_safetensors_entry *e)
{
    if (qd_json_kind_of(shape) != QD_JSON_LIST || qd_json_count(shape) > QD_SAFETENSORS_DIMS)
        return corrupt(f, "'shape' must be a list of at most 8 sizes", e->name);
    e->dims = (int)qd_json_count(shape);
    e->count = 1;
    for (int d = 0; d < e->dims; d++) {
        if (!qd_json_as_int(qd_json_item(shape, (size_t)d), &e->shape[d]) || e->shape[d] < 0 ||
            __builtin_mul_overflow(e->count, e->shape[d], &e->count))
            return corrupt(f, "'shape' contains an invalid size", e->name);
    }
    return QD_OK;
}

static qd_status read_entry(const qd_safetensors *f, const char *name, const qd_json_node *node, qd_safetensors_entry *e)
{
    e->name = name;
    e->file = f;
    const char *type = qd_json_as_string(qd_json_member(node, "dtype"));
    int t = 0;
    while (type && t < TYPES && strcmp(type_names[t].name, type) != 0)
        t++;
    if (!type || t == TYPES)
        return corrupt(f, "'dtype' is missing or of a kind this program does not read", name);
    e->dtype = type_names[t].dtype;
    const qd_json_node *shape = qd_json_member(node, "shape"), *place = qd_json_member(node, "data_offsets");
    if (!shape || !place)
        return corrupt(f, "'shape' or 'data_offsets' is missing", name);
    QD_TRY(read_shape(f, shape, e));
    int64_t begin, end, bytes;
    if (qd_json_count(place) != 2 || !qd_json_as_int(qd_json_item(place, 0), &begin) ||
        !qd_json_as_int(qd_json_item(place, 1), &end) || begin < 0 || end < begin || end > f->size - f->data_at)
        return corrupt(f, "'data_offsets' is outside the file: it is truncated or damaged", name);
    if (__builtin_mul_overflow(e->count, (int64_t)qd_dtype_size(e->dtype), &bytes) || bytes != end - begin)
        return corrupt(f, "'data_offsets' and 'shape' disagree about its size", name);
    e->offset = f->data_at + begin;
    e->data = f->bytes ? f->bytes + e->offset : NULL;
    return QD_OK;
}

/* Tensors must fill the data exactly, one after another, so that a damaged header cannot make two
 * names share data. */
static qd_status check_places(qd_safetensors *f)
{
    qsort(f->entries, (size_t)f->count, sizeof *f->entries, by_place);
    int64_t next = f->data_at;
    for (int i = 0; i < f->count; i++) {
        const qd_safetensors_entry *e = &f->entries[i];
        if (e->offset != next && e->count > 0)
            return corrupt(f, "its data does not follow the previous tensor", e->name);
        next += e->count * (int64_t)qd_dtype_size(e->dtype);
    }
    if (next != f->size)
        return corrupt(f, "the file is longer than its tensors", NULL);
    qsort(f->entries, (size_t)f->count, sizeof *f->entries, by_name);
    return QD_OK;
}

/* Maps an unusable file to damage, whose remedy is another copy. Missing permissions, memory or
 * descriptors are not damage: the user can fix these, and continuing without the file would hide
 * them. */
static qd_status as_damage(qd_status status, int error)
{
    if ((status != QD_USAGE && status != QD_IO) || error == EACCES || error == EPERM)
        return status == QD_USAGE ? QD_FAIL(QD_IO, "%s", qd_error_message()) : status;
    return QD_FAIL(QD_CORRUPT, "%s", qd_error_message());
}

static qd_status read_bytes(const qd_safetensors *f, int64_t offset, void *out, size_t bytes)
{
    if (f->bytes) {
        memcpy(out, f->bytes + offset, bytes);
        return QD_OK;
    }
    qd_status status = qd_file_read_at(f->path, f->fd, offset, out, bytes);
    return status == QD_OK ? QD_OK : as_damage(status, errno);
}

static qd_status parse_header(qd_safetensors *f, const char *header, size_t length)
{
    f->header_hash = header_hash(f->prefix, header, length);
    qd_status status = qd_json_load_text(f->path, header, length, &f->header);
    if (status != QD_OK)
        return status == QD_USAGE ? QD_FAIL(QD_CORRUPT, "%s", qd_error_message()) : status;
    const qd_json_node *root = qd_json_root(f->header);
    if (qd_json_kind_of(root) != QD_JSON_OBJECT)
        return corrupt(f, "the header is not a JSON object", NULL);
    f->entries = calloc(qd_json_count(root) + 1, sizeof *f->entries);
    if (!f->entries)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the header of %s", f->path);
    const char *name;
    const qd_json_node *node;
    for (qd_json_iterator it = qd_json_begin(root); qd_json_next(&it, &name, &node);) {
        if (strcmp(name, "__metadata__") == 0)
            continue;
        QD_TRY(read_entry(f, name, node, &f->entries[f->count]));
        f->count++;
    }
    return check_places(f);
}

static qd_status parse(qd_safetensors *f)
{
    if (f->size < 8)
        return corrupt(f, "it is shorter than the 8 bytes every safetensors file starts with", NULL);
    QD_TRY(read_bytes(f, 0, f->prefix, sizeof f->prefix));
    uint64_t length = 0;
    for (int i = 0; i < 8; i++)
        length |= (uint64_t)f->prefix[i] << (8 * i);
    if (length > (uint64_t)f->size - 8 || length > ((uint64_t)100 << 20))
        return corrupt(f, "the header is longer than the file: it is truncated or not a safetensors file", NULL);
    f->data_at = 8 + (int64_t)length;
    if (f->bytes)
        return parse_header(f, (const char *)f->bytes + 8, (size_t)length);
    char *header = malloc((size_t)length + 1);
    qd_status status = header ? read_bytes(f, 8, header, (size_t)length) : QD_FAIL(QD_NO_MEMORY, "no memory for the header of %s", f->path);
    if (status == QD_OK)
        status = parse_header(f, header, (size_t)length);
    free(header);
    return status;
}

static qd_status new_file(const char *path, const void *bytes, size_t size, qd_safetensors **file)
{
    *file = NULL;
    qd_safetensors *f = calloc(1, sizeof *f);
    if (f)
        f->path = strdup(path);
    if (!f || !f->path) {
        free(f);
        return QD_FAIL(QD_NO_MEMORY, "no memory to read %s", path);
    }
    f->fd = -1;
    f->bytes = bytes;
    f->size = (int64_t)size;
    qd_status status = QD_OK;
    if (!bytes && (status = qd_file_open(path, &f->fd, &f->size)) != QD_OK) {
        f->fd = -1;
        status = as_damage(status, errno);
    }
    if (status == QD_OK)
        status = parse(f);
    if (status == QD_OK)
        *file = f;
    else
        qd_safetensors_close(f);
    return status;
}

qd_status qd_safetensors_open(const char *path, qd_safetensors **file)
{
    return new_file(path, NULL, 0, file);
}

qd_status qd_safetensors_load(const char *path, qd_safetensors **file)
{
    char *bytes = NULL;
    size_t size = 0;
    *file = NULL;
    qd_status status = qd_file_read(path, SIZE_MAX / 4, &bytes, &size);
    if (status != QD_OK)
        return as_damage(status, errno);
    status = new_file(path, bytes, size, file);
    if (status == QD_OK)
        (*file)->owned = bytes;
    else
        free(bytes);
    return status;
}

qd_status qd_safetensors_view(const char *name, const void *bytes, size_t size, qd_safetensors **file)
{
    return new_file(name, bytes, size, file);
}

void qd_safetensors_close(qd_safetensors *f)
{
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    free(f->owned);
    qd_json_destroy(f->header);
    free(f->entries);
    free(f->path);
    free(f);
}

int qd_safetensors_count(const qd_safetensors *f)
{
    return f->count;
}

const qd_safetensors_entry *qd_safetensors_at(const qd_safetensors *f, int index)
{
    return &f->entries[index];
}

const qd_safetensors_entry *qd_safetensors_find(const qd_safetensors *f, const char *name)
{
    const qd_safetensors_entry key = {.name = name};
    return bsearch(&key, f->entries, (size_t)f->count, sizeof key, by_name);
}

qd_status qd_safetensors_read(const qd_safetensors_entry *e, int64_t first, int64_t count, void *out)
{
    const int64_t each = (int64_t)qd_dtype_size(e->dtype);
    if (first < 0 || count < 0 || first > e->count - count)
        return QD_FAIL(QD_USAGE, "%s: tensor '%s' has %lld elements; [%lld, %lld) is outside", e->file->path, e->name, (long long)e->count,
                       (long long)first, (long long)(first + count));
    return read_bytes(e->file, e->offset + first * each, out, (size_t)(count * each));
}

qd_safetensors_summary qd_safetensors_look(const qd_safetensors *f)
{
    return (qd_safetensors_summary){f->size, f->header_hash};
}

const char *qd_safetensors_metadata(const qd_safetensors *f, const char *key)
{
    return qd_json_as_string(qd_json_member(qd_json_member(qd_json_root(f->header), "__metadata__"), key));
}
