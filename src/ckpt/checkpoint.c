/* Reading checkpoints. Writing is in save.c. */
#include "base/json.h"
#include "base/strbuf.h"
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
    const qd_safetensors_entry *entry; /* NULL: not looked for yet */
    qd_atom box;
    uint64_t hash;
    bool checked;
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
    qd_safetensors *open; /* NULL: not yet */
} stored_file;

struct qd_checkpoint {
    char *folder;
    qd_json *manifest;
    uint64_t hash; /* of the manifest */
    qd_ckpt_meta meta;
    stored_file *files; /* by name */
    int file_count;
    tensor *tensors;
    int tensor_count;
};

static qd_status damaged(const qd_checkpoint *c, const char *what, const char *name)
{
    return QD_FAIL(QD_CORRUPT, "%s/" QD_CKPT_MANIFEST ": %s%s%s", c->folder, what, name ? " " : "", name ? name : "");
}

/* The manifest's own checksum stands in a file beside it. */
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
    if (status == QD_USAGE) /* a file of the folder is missing */
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
            return damaged(c, "a piece lies outside the tensor", t->name);
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
            return damaged(c, "a file lies outside the folder:", f->name);
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
        return damaged(c, "a piece lies in a file that is not listed:", file);
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
            return damaged(c, "a shape makes no sense, of", t->name);
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

/* The file's size and header are as they were written, so its tensors are where they were. */
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
    return QD_FAIL(QD_CORRUPT, "%s/%s: its size or header is not what " QD_CKPT_MANIFEST " says", c->folder, f->name);
}

static qd_status check_piece(qd_checkpoint *c, const tensor *t, piece *p)
{
    stored_file *f = &c->files[p->file];
    if (p->checked)
        return QD_OK;
    qd_status status = open_file(c, f);
    if (status != QD_OK)
        return qd_error_prefix(status, "'%s' (%s): ", t->name, qd_ckpt_kind_names[t->kind]);
    p->entry = qd_safetensors_find(f->open, p->key);
    if (!p->entry || p->entry->dtype != QD_F32 || p->entry->count != qd_atom_count(&p->box, t->ndim))
        return QD_FAIL(QD_CORRUPT, "%s/%s: '%s' (%s) is missing or not what the manifest says", c->folder, f->name, t->name,
                       qd_ckpt_kind_names[t->kind]);
    if (XXH3_64bits(p->entry->data, (size_t)p->entry->count * sizeof(float)) != p->hash) {
        qd_safetensors_release(f->open, p->entry);
        return QD_FAIL(QD_CORRUPT, "%s/%s: the bytes of '%s' (%s) do not match their checksum", c->folder, f->name, t->name,
                       qd_ckpt_kind_names[t->kind]);
    }
    p->checked = true;
    return QD_OK;
}

/* What two boxes share; false: nothing. */
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

static void copy_shared(const piece *p, const qd_atom *box, const qd_atom *shared, float *out)
{
    for (int64_t row = shared->begin[0]; row < shared->begin[0] + shared->length[0]; row++) {
        int64_t from = (row - p->box.begin[0]) * p->box.length[1] + shared->begin[1] - p->box.begin[1];
        int64_t to = (row - box->begin[0]) * box->length[1] + shared->begin[1] - box->begin[1];
        memcpy(out + to, (const char *)p->entry->data + (size_t)from * sizeof(float), (size_t)shared->length[1] * sizeof(float));
    }
}

qd_status qd_checkpoint_read(qd_checkpoint *c, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    tensor *t = NULL;
    for (int i = 0; i < c->tensor_count && !t; i++)
        if (c->tensors[i].kind == kind && strcmp(c->tensors[i].name, param->name) == 0)
            t = &c->tensors[i];
    if (!t)
        return QD_FAIL(QD_USAGE, "%s: holds no '%s' (%s): it was written by another model", c->folder, param->name,
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
        QD_TRY(check_piece(c, t, p));
        copy_shared(p, box, &shared, out);
        copied += shared.length[0] * shared.length[1];
        qd_safetensors_release(c->files[p->file].open, p->entry);
    }
    if (copied != box->length[0] * box->length[1])
        return QD_FAIL(QD_CORRUPT, "%s: the pieces of '%s' do not make up the tensor", c->folder, param->name);
    return QD_OK;
}

qd_status qd_checkpoint_verify(qd_checkpoint *c)
{
    for (int i = 0; i < c->tensor_count; i++)
        for (int p = 0; p < c->tensors[i].piece_count; p++) {
            piece *one = &c->tensors[i].pieces[p];
            QD_TRY(check_piece(c, &c->tensors[i], one));
            qd_safetensors_release(c->files[one->file].open, one->entry);
        }
    return QD_OK;
}
