/* Reads checkpoints: manifest, checksums, boxes of logical tensors. Writing is in part.c,
 * manifest.c and store.c. */
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/safetensors.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

enum { MOST_MANIFEST = 256 << 20 };

typedef struct piece {
    int file;
    const char *key;
    const qd_safetensors_entry *entry; /* NULL: not looked up yet */
    qd_atom box;
    uint64_t hash;
    bool checked; /* its checksum has been verified */
} piece;

typedef struct tensor {
    const char *name;
    qd_ckpt_kind kind;
    int ndim;
    int64_t shape[QD_PARAM_DIMS];
    piece *pieces;
    int piece_count;
} tensor;

typedef struct stored_file {
    const char *name;
    int64_t bytes;
    uint64_t header_hash;
    qd_safetensors *open; /* NULL: not opened yet */
} stored_file;

struct qd_checkpoint {
    char *folder;
    qd_json *manifest;
    uint64_t hash; /* of the manifest */
    qd_ckpt_meta meta;
    stored_file *files; /* sorted by name */
    int file_count;
    tensor *tensors;
    int tensor_count;
    qd_ckpt_base *base; /* NULL: not attached */
    char *moved;        /* NULL, or where the base is now */
    float *chunk; /* (CHUNK_ELEMENTS) read buffer; NULL: not allocated yet */
    XXH3_state_t *hasher; /* hash state of the current piece */
};

/* Fits a core's caches, so that the checksum and the copy read cached data. */
enum { CHUNK_ELEMENTS = 1 << 18 };

static qd_status damaged(const qd_checkpoint *c, const char *what, const char *name)
{
    return QD_FAIL(QD_CORRUPT, "%s/" QD_CKPT_MANIFEST ": %s%s%s", c->folder, what, name ? " " : "", name ? name : "");
}

/* Loads the manifest and verifies its checksum, which is in a separate file. */
static qd_status load_manifest(qd_checkpoint *c)
{
    char *path = qd_ckpt_path(c->folder, QD_CKPT_MANIFEST), *hash_path = qd_ckpt_path(c->folder, QD_CKPT_MANIFEST_HASH);
    char *text = NULL, *hash_text = NULL;
    size_t length = 0, hash_length = 0;
    qd_status status = path && hash_path ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", c->folder);
    if (status == QD_OK)
        status = qd_file_read(path, MOST_MANIFEST, &text, &length);
    if (status == QD_OK)
        status = qd_file_read(hash_path, MOST_MANIFEST, &hash_text, &hash_length);
    int error = errno;
    if (status == QD_USAGE && (error == EACCES || error == EPERM)) /* fixable by the user; falling back to an older one would hide it */
        status = QD_FAIL(QD_IO, "%s", qd_error_message());
    else if (status == QD_USAGE || status == QD_IO) /* a file is missing, not a regular file or not readable */
        status = QD_FAIL(QD_CORRUPT, "%s: %s", c->folder, qd_error_message());
    if (status == QD_OK) {
        char expected[QD_CKPT_HASH_TEXT];
        c->hash = XXH3_64bits(text, length);
        qd_ckpt_hash_text(c->hash, expected);
        if (hash_length != strlen(expected) || memcmp(hash_text, expected, hash_length) != 0)
            status = QD_FAIL(QD_CORRUPT, "%s: does not match its checksum in " QD_CKPT_MANIFEST_HASH, path);
    }
    if (status == QD_OK)
        status = qd_json_load_text(path, text, length, &c->manifest);
    free(text);
    free(hash_text);
    free(path);
    free(hash_path);
    return status;
}

static qd_status read_box(const qd_checkpoint *c, const tensor *t, const qd_json_node *node, qd_atom *box)
{
    const qd_json_node *begin = qd_json_member(node, "begin"), *length = qd_json_member(node, "length");
    for (int d = 0; d < QD_PARAM_DIMS; d++) {
        box->begin[d] = 0;
        box->length[d] = 1;
        if (d >= t->ndim)
            continue;
        if (!qd_json_as_int(qd_json_item(begin, (size_t)d), &box->begin[d]) ||
            !qd_json_as_int(qd_json_item(length, (size_t)d), &box->length[d]) || box->begin[d] < 0 || box->length[d] < 0 ||
            box->begin[d] > t->shape[d] - box->length[d])
            return damaged(c, "a piece is outside the tensor", t->name);
    }
    return QD_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const stored_file *)a)->name, ((const stored_file *)b)->name);
}

static qd_status read_files(qd_checkpoint *c, const qd_json_node *list)
{
    size_t count = qd_json_count(list);
    c->files = calloc(count + 1, sizeof *c->files);
    if (!c->files)
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", c->folder);
    for (size_t i = 0; i < count; i++) {
        const qd_json_node *node = qd_json_item(list, i);
        stored_file *f = &c->files[c->file_count++];
        f->name = qd_json_as_string(qd_json_member(node, "name"));
        if (!f->name || !qd_json_as_int(qd_json_member(node, "bytes"), &f->bytes) ||
            !qd_ckpt_hash_parse(qd_json_as_string(qd_json_member(node, "header_xxh3")), &f->header_hash))
            return damaged(c, "a file lacks its name, size or checksum:", f->name);
        if (strchr(f->name, '/') || f->name[0] == '.' || f->name[0] == '\0')
            return damaged(c, "a file is outside the folder:", f->name);
    }
    qsort(c->files, count, sizeof *c->files, by_name);
    return QD_OK;
}

static qd_status read_piece(qd_checkpoint *c, const tensor *t, const qd_json_node *node, piece *p)
{
    const char *file = qd_json_as_string(qd_json_member(node, "file"));
    p->key = qd_json_as_string(qd_json_member(node, "key"));
    if (!file || !p->key || !qd_ckpt_hash_parse(qd_json_as_string(qd_json_member(node, "xxh3")), &p->hash))
        return damaged(c, "'file', 'key' or 'xxh3' is missing in a piece of", t->name);
    const stored_file wanted = {.name = file}, *found = bsearch(&wanted, c->files, (size_t)c->file_count, sizeof wanted, by_name);
    if (!found)
        return damaged(c, "a piece is in a file that is not listed:", file);
    p->file = (int)(found - c->files);
    return read_box(c, t, node, &p->box);
}

static qd_status read_tensor(qd_checkpoint *c, const qd_json_node *node, tensor *t)
{
    t->name = qd_json_as_string(qd_json_member(node, "name"));
    const char *kind = qd_json_as_string(qd_json_member(node, "kind"));
    const qd_json_node *shape = qd_json_member(node, "shape"), *pieces = qd_json_member(node, "pieces");
    int k = 0;
    while (kind && k < QD_CKPT_KIND_COUNT && strcmp(qd_ckpt_kind_names[k], kind) != 0)
        k++;
    size_t ndim = shape ? qd_json_count(shape) : 0;
    if (!t->name || !kind || k == QD_CKPT_KIND_COUNT || ndim < 1 || ndim > QD_PARAM_DIMS || !pieces)
        return damaged(c, "a tensor lacks its name, kind, shape or pieces", t->name);
    t->kind = (qd_ckpt_kind)k;
    t->ndim = (int)ndim;
    for (int d = 0; d < QD_PARAM_DIMS; d++) {
        t->shape[d] = 1;
        if (d < t->ndim && (!qd_json_as_int(qd_json_item(shape, (size_t)d), &t->shape[d]) || t->shape[d] < 1))
            return damaged(c, "invalid shape of", t->name);
    }
    size_t count = qd_json_count(pieces);
    t->pieces = calloc(count + 1, sizeof *t->pieces);
    if (!t->pieces)
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", c->folder);
    for (size_t i = 0; i < count; i++)
        QD_TRY(read_piece(c, t, qd_json_item(pieces, i), &t->pieces[t->piece_count++]));
    return QD_OK;
}

static qd_status read_manifest(qd_checkpoint *c)
{
    const qd_json_node *root = qd_json_root(c->manifest), *tensors, *files;
    const char *format;
    int64_t version, seed;
    QD_TRY(qd_json_get_string(c->manifest, root, "format", &format));
    QD_TRY(qd_json_get_int(c->manifest, root, "version", &version));
    if (strcmp(format, QD_CKPT_FORMAT) != 0 || version != QD_CKPT_VERSION)
        return QD_FAIL(QD_UNSUPPORTED, "%s: format '%s' version %lld; this program reads '" QD_CKPT_FORMAT "' version %d", c->folder,
                       format, (long long)version, QD_CKPT_VERSION);
    QD_TRY(qd_json_get_int(c->manifest, root, "step", &c->meta.step));
    QD_TRY(qd_json_get_int(c->manifest, root, "next_sample", &c->meta.next_sample));
    QD_TRY(qd_json_get_int(c->manifest, root, "seed", &seed));
    QD_TRY(qd_json_get_string(c->manifest, root, "config", &c->meta.config));
    QD_TRY(qd_json_get_node(c->manifest, root, "files", QD_JSON_LIST, &files));
    QD_TRY(qd_json_get_node(c->manifest, root, "tensors", QD_JSON_LIST, &tensors));
    QD_TRY(read_files(c, files));
    c->meta.seed = (uint64_t)seed;
    const char *run = qd_json_as_string(qd_json_member(root, "run"));
    c->meta.run = run ? run : "";
    const char *base = qd_json_as_string(qd_json_member(root, "base")), *hash = qd_json_as_string(qd_json_member(root, "base_xxh3"));
    c->meta.base = base && hash ? base : "";
    c->meta.base_hash = base && hash ? hash : "";
    size_t count = qd_json_count(tensors);
    c->tensors = calloc(count + 1, sizeof *c->tensors);
    if (!c->tensors)
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", c->folder);
    for (size_t i = 0; i < count; i++)
        QD_TRY(read_tensor(c, qd_json_item(tensors, i), &c->tensors[c->tensor_count++]));
    return QD_OK;
}

qd_status qd_checkpoint_open(const char *folder, qd_checkpoint **checkpoint)
{
    qd_checkpoint *c = calloc(1, sizeof *c);
    if (!c || !(c->folder = strdup(folder))) {
        free(c);
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", folder);
    }
    qd_status status = load_manifest(c);
    if (status == QD_OK)
        status = read_manifest(c);
    if (status != QD_OK) {
        qd_checkpoint_close(c);
        return status;
    }
    *checkpoint = c;
    return QD_OK;
}

void qd_checkpoint_close(qd_checkpoint *c)
{
    if (!c)
        return;
    for (int i = 0; i < c->file_count; i++)
        qd_safetensors_close(c->files[i].open);
    for (int i = 0; i < c->tensor_count; i++)
        free(c->tensors[i].pieces);
    free(c->files);
    free(c->tensors);
    free(c->chunk);
    XXH3_freeState(c->hasher);
    qd_ckpt_base_close(c->base);
    free(c->moved);
    qd_json_destroy(c->manifest);
    free(c->folder);
    free(c);
}

const qd_ckpt_meta *qd_checkpoint_meta(const qd_checkpoint *c)
{
    return &c->meta;
}

uint64_t qd_checkpoint_hash(const qd_checkpoint *c)
{
    return c->hash;
}

const char *qd_checkpoint_folder(const qd_checkpoint *c)
{
    return c->folder;
}

bool qd_checkpoint_has(const qd_checkpoint *c, qd_ckpt_kind kind)
{
    for (int i = 0; i < c->tensor_count; i++)
        if (c->tensors[i].kind == kind)
            return true;
    return false;
}

bool qd_checkpoint_adapts(const qd_checkpoint *c)
{
    for (int i = 0; i < c->tensor_count; i++)
        if (strstr(c->tensors[i].name, ".lora_A."))
            return true;
    return false;
}

bool qd_checkpoint_holds(const qd_checkpoint *c, const char *name)
{
    for (int i = 0; i < c->tensor_count; i++)
        if (c->tensors[i].kind == QD_CKPT_VALUE && strcmp(c->tensors[i].name, name) == 0)
            return true;
    return false;
}

/* If size and header are unchanged, all tensors are at the recorded offsets. */
static qd_status open_file(qd_checkpoint *c, stored_file *f)
{
    if (f->open)
        return QD_OK;
    char *path = qd_ckpt_path(c->folder, f->name);
    qd_status status = path ? qd_safetensors_open(path, &f->open) : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", c->folder);
    free(path);
    QD_TRY(status);
    qd_safetensors_summary summary = qd_safetensors_look(f->open);
    if (summary.bytes == f->bytes && summary.header_hash == f->header_hash)
        return QD_OK;
    qd_safetensors_close(f->open);
    f->open = NULL;
    return QD_FAIL(QD_CORRUPT, "%s/%s: its size or header does not match " QD_CKPT_MANIFEST, c->folder, f->name);
}

/* The piece's entry in its file, which is opened on demand. */
static qd_status find_entry(qd_checkpoint *c, const tensor *t, piece *p)
{
    stored_file *f = &c->files[p->file];
    if (p->entry)
        return QD_OK;
    qd_status status = open_file(c, f);
    if (status != QD_OK)
        return qd_error_prefix(status, "'%s' (%s): ", t->name, qd_ckpt_kind_names[t->kind]);
    const qd_safetensors_entry *e = qd_safetensors_find(f->open, p->key);
    if (!e || e->dtype != QD_F32 || e->count != qd_atom_count(&p->box, t->ndim))
        return QD_FAIL(QD_CORRUPT, "%s/%s: '%s' (%s) is missing or does not match the manifest", c->folder, f->name, t->name,
                       qd_ckpt_kind_names[t->kind]);
    p->entry = e;
    return QD_OK;
}

static qd_status make_chunk(qd_checkpoint *c)
{
    if (!c->chunk)
        c->chunk = malloc(CHUNK_ELEMENTS * sizeof *c->chunk);
    if (!c->hasher)
        c->hasher = XXH3_createState();
    return c->chunk && c->hasher ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to read %s", c->folder);
}

/* The intersection of two boxes; false if it is empty. */
static bool intersect(const qd_atom *a, const qd_atom *b, qd_atom *shared)
{
    for (int d = 0; d < QD_PARAM_DIMS; d++) {
        int64_t a_end = a->begin[d] + a->length[d], b_end = b->begin[d] + b->length[d], end = a_end < b_end ? a_end : b_end;
        shared->begin[d] = a->begin[d] > b->begin[d] ? a->begin[d] : b->begin[d];
        shared->length[d] = end - shared->begin[d];
        if (shared->length[d] <= 0)
            return false;
    }
    return true;
}

/* Elements [first, first + count) of a piece, in c->chunk: copies those of the shared box to their
 * positions in `out`, a box. */
static void copy_chunk(const qd_checkpoint *c, const piece *p, int64_t first, int64_t count, const qd_atom *shared, const qd_atom *box,
                       float *out)
{
    const int64_t width = p->box.length[1], end = first + count;
    for (int64_t row = first / width; row * width < end; row++) {
        const int64_t logical = p->box.begin[0] + row;
        if (logical < shared->begin[0] || logical >= shared->begin[0] + shared->length[0])
            continue;
        int64_t from = row * width + shared->begin[1] - p->box.begin[1], until = from + shared->length[1];
        from = from > first ? from : first;
        until = until < end ? until : end;
        if (from >= until)
            continue;
        const int64_t column = p->box.begin[1] + from - row * width;
        float *to = out + (logical - box->begin[0]) * box->length[1] + column - box->begin[1];
        memcpy(to, c->chunk + (from - first), (size_t)(until - from) * sizeof *to);
    }
}

/* Reads a piece once, verifies it (checksum, all values finite) unless that is done, and copies its
 * intersection with a box; shared NULL: none. The copied data is valid only if this succeeds. */
static qd_status read_piece_data(qd_checkpoint *c, const tensor *t, piece *p, const qd_atom *shared, const qd_atom *box, float *out)
{
    QD_TRY(find_entry(c, t, p));
    QD_TRY(make_chunk(c));
    /* Once a piece is verified, only the shared rows are read. */
    const int64_t width = p->box.length[1];
    int64_t first = p->checked && shared ? (shared->begin[0] - p->box.begin[0]) * width : 0;
    const int64_t end = p->checked && shared ? first + shared->length[0] * width : p->entry->count;
    int64_t not_finite = -1;
    XXH3_64bits_reset(c->hasher);
    for (int64_t count; first < end; first += count) {
        count = end - first < CHUNK_ELEMENTS ? end - first : CHUNK_ELEMENTS;
        qd_status status = qd_safetensors_read(p->entry, first, count, c->chunk);
        if (status != QD_OK)
            return qd_error_prefix(status, "'%s' (%s): ", t->name, qd_ckpt_kind_names[t->kind]);
        if (!p->checked)
            XXH3_64bits_update(c->hasher, c->chunk, (size_t)count * sizeof *c->chunk);
        const int64_t bad = p->checked || not_finite >= 0 ? -1 : qd_ckpt_first_not_finite(c->chunk, count);
        not_finite = bad >= 0 ? first + bad : not_finite;
        if (shared)
            copy_chunk(c, p, first, count, shared, box, out);
    }
    if (!p->checked && XXH3_64bits_digest(c->hasher) != p->hash)
        return QD_FAIL(QD_CORRUPT, "%s/%s: the bytes of '%s' (%s) do not match their checksum", c->folder, c->files[p->file].name, t->name,
                       qd_ckpt_kind_names[t->kind]);
    if (not_finite >= 0) /* earlier versions could write it, with matching checksums */
        return QD_FAIL(QD_CORRUPT, "%s/%s: element [%lld, %lld] of '%s' (%s) is not finite", c->folder, c->files[p->file].name,
                       (long long)(p->box.begin[0] + not_finite / width), (long long)(p->box.begin[1] + not_finite % width), t->name,
                       qd_ckpt_kind_names[t->kind]);
    p->checked = true;
    return QD_OK;
}

qd_status qd_checkpoint_read(qd_checkpoint *c, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    tensor *t = NULL;
    for (int i = 0; i < c->tensor_count && !t; i++)
        if (c->tensors[i].kind == kind && strcmp(c->tensors[i].name, param->name) == 0)
            t = &c->tensors[i];
    if (!t && c->base && kind == QD_CKPT_VALUE && param->frozen)
        return qd_ckpt_base_read(c->base, param, box, out);
    if (!t)
        return QD_FAIL(QD_USAGE, "%s: contains no '%s' (%s): it was written by another model", c->folder, param->name,
                       qd_ckpt_kind_names[kind]);
    if (t->shape[0] != param->shape[0] || t->shape[1] != param->shape[1])
        return QD_FAIL(QD_USAGE, "%s: '%s' is %lld x %lld, the model's is %lld x %lld", c->folder, param->name,
                       (long long)t->shape[0], (long long)t->shape[1], (long long)param->shape[0], (long long)param->shape[1]);
    int64_t copied = 0;
    for (int i = 0; i < t->piece_count; i++) {
        piece *p = &t->pieces[i];
        qd_atom shared;
        if (!intersect(&p->box, box, &shared))
            continue;
        QD_TRY(read_piece_data(c, t, p, &shared, box, out));
        copied += shared.length[0] * shared.length[1];
    }
    if (copied != box->length[0] * box->length[1])
        return QD_FAIL(QD_CORRUPT, "%s: the pieces of '%s' do not cover the tensor", c->folder, param->name);
    return QD_OK;
}

/* Whether `inner` is `outer` or below it. */
static bool is_below(const char *inner, const char *outer)
{
    size_t length = strlen(outer);
    return strncmp(inner, outer, length) == 0 && (inner[length] == '/' || inner[length] == '\0');
}

qd_status qd_checkpoint_move_base(qd_checkpoint *c, const char *path)
{
    char *whole = c->meta.base[0] != '\0' ? realpath(path, NULL) : NULL;
    if (!whole || is_below(c->meta.base, whole)) {
        free(whole);
        return QD_OK;
    }
    qd_status status = qd_ckpt_base_check(&c->meta, whole);
    if (status != QD_OK) {
        free(whole);
        return status;
    }
    c->meta.base = c->moved = whole;
    return QD_OK;
}

qd_status qd_checkpoint_attach(qd_checkpoint *c, const qd_ledger *ledger)
{
    return c->meta.base[0] == '\0' || c->base ? QD_OK : qd_ckpt_base_open(&c->meta, ledger, &c->base);
}

qd_status qd_checkpoint_verify(qd_checkpoint *c)
{
    for (int i = 0; i < c->tensor_count; i++)
        for (int p = 0; p < c->tensors[i].piece_count; p++) {
            piece *one = &c->tensors[i].pieces[p];
            if (!one->checked)
                QD_TRY(read_piece_data(c, &c->tensors[i], one, NULL, NULL, NULL));
        }
    return QD_OK;
}
