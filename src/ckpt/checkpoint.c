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
    const qd_safetensors_entry *entry;
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

struct qd_checkpoint {
    char *folder;
    qd_json *manifest;
    qd_ckpt_meta meta;
    char **file_names;
    qd_safetensors **files;
    int file_count;
    tensor *tensors;
    int tensor_count;
};

const char *const qd_ckpt_kind_names[QD_CKPT_KIND_COUNT] = {"value", "moment1", "moment2"};

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
        qd_ckpt_hash_text(XXH3_64bits(text, length), expected);
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

static qd_status find_file(qd_checkpoint *c, const char *name, int *index)
{
    for (*index = 0; *index < c->file_count; (*index)++)
        if (strcmp(c->file_names[*index], name) == 0)
            return QD_OK;
    if (strchr(name, '/') || name[0] == '.' || name[0] == '\0')
        return damaged(c, "a piece is in a file outside the folder:", name);
    char **names = realloc(c->file_names, (size_t)(c->file_count + 1) * sizeof *names);
    if (names)
        c->file_names = names;
    qd_safetensors **files = realloc(c->files, (size_t)(c->file_count + 1) * sizeof *files);
    if (files)
        c->files = files;
    char *path = qd_ckpt_path(c->folder, name);
    if (!names || !files || !path || !(c->file_names[c->file_count] = strdup(name))) {
        free(path);
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", c->folder);
    }
    qd_status status = qd_safetensors_open(path, &c->files[c->file_count]);
    if (status == QD_OK)
        c->file_count++;
    else
        free(c->file_names[c->file_count]);
    free(path);
    return status;
}

static qd_status read_piece(qd_checkpoint *c, const tensor *t, const qd_json_node *node, piece *p)
{
    const char *file = qd_json_as_string(qd_json_member(node, "file"));
    const char *key = qd_json_as_string(qd_json_member(node, "key"));
    const char *hash = qd_json_as_string(qd_json_member(node, "xxh3"));
    if (!file || !key || !hash)
        return damaged(c, "'file', 'key' or 'xxh3' is missing in a piece of", t->name);
    QD_TRY(read_box(c, t, node, &p->box));
    QD_TRY(find_file(c, file, &p->file));
    char *end;
    p->hash = strtoull(hash, &end, 16);
    p->entry = qd_safetensors_find(c->files[p->file], key);
    if (*end != '\0' || !p->entry || p->entry->dtype != QD_F32 || p->entry->count != qd_atom_count(&p->box, t->ndim))
        return QD_FAIL(QD_CORRUPT, "%s/%s: tensor '%s' is missing or not what the manifest says", c->folder, file, key);
    return QD_OK;
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
    const qd_json_node *root = qd_json_root(c->manifest), *tensors;
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
    QD_TRY(qd_json_get_node(c->manifest, root, "tensors", QD_JSON_LIST, &tensors));
    c->meta.seed = (uint64_t)seed;
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
    for (int i = 0; i < c->file_count; i++) {
        qd_safetensors_close(c->files[i]);
        free(c->file_names[i]);
    }
    for (int i = 0; i < c->tensor_count; i++)
        free(c->tensors[i].pieces);
    free(c->files);
    free(c->file_names);
    free(c->tensors);
    qd_json_destroy(c->manifest);
    free(c->folder);
    free(c);
}

const qd_ckpt_meta *qd_checkpoint_meta(const qd_checkpoint *c)
{
    return &c->meta;
}

bool qd_checkpoint_has(const qd_checkpoint *c, qd_ckpt_kind kind)
{
    for (int i = 0; i < c->tensor_count; i++)
        if (c->tensors[i].kind == kind)
            return true;
    return false;
}

static qd_status check_piece(const qd_checkpoint *c, const tensor *t, piece *p)
{
    if (p->checked)
        return QD_OK;
    uint64_t hash = XXH3_64bits(p->entry->data, (size_t)p->entry->count * sizeof(float));
    if (hash != p->hash)
        return QD_FAIL(QD_CORRUPT, "%s/%s: the bytes of '%s' (%s) do not match their checksum", c->folder, c->file_names[p->file],
                       t->name, qd_ckpt_kind_names[t->kind]);
    p->checked = true;
    return QD_OK;
}

/* Copies what a piece and the wanted box share, row by row; returns the number of elements. */
static int64_t copy_shared(const piece *p, const qd_atom *box, float *out)
{
    int64_t begin[QD_PARAM_DIMS], end[QD_PARAM_DIMS];
    for (int d = 0; d < QD_PARAM_DIMS; d++) {
        int64_t box_end = box->begin[d] + box->length[d], piece_end = p->box.begin[d] + p->box.length[d];
        begin[d] = box->begin[d] > p->box.begin[d] ? box->begin[d] : p->box.begin[d];
        end[d] = box_end < piece_end ? box_end : piece_end;
        if (begin[d] >= end[d])
            return 0;
    }
    for (int64_t row = begin[0]; row < end[0]; row++) {
        int64_t from = (row - p->box.begin[0]) * p->box.length[1] + begin[1] - p->box.begin[1];
        int64_t to = (row - box->begin[0]) * box->length[1] + begin[1] - box->begin[1];
        memcpy(out + to, (const char *)p->entry->data + (size_t)from * sizeof(float), (size_t)(end[1] - begin[1]) * sizeof(float));
    }
    return (end[0] - begin[0]) * (end[1] - begin[1]);
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
        QD_TRY(check_piece(c, t, &t->pieces[i]));
        copied += copy_shared(&t->pieces[i], box, out);
        qd_safetensors_release(t->pieces[i].entry);
    }
    if (copied != box->length[0] * box->length[1])
        return QD_FAIL(QD_CORRUPT, "%s: the pieces of '%s' do not make up the tensor", c->folder, param->name);
    return QD_OK;
}

qd_status qd_checkpoint_verify(qd_checkpoint *c)
{
    for (int i = 0; i < c->tensor_count; i++)
        for (int p = 0; p < c->tensors[i].piece_count; p++) {
            QD_TRY(check_piece(c, &c->tensors[i], &c->tensors[i].pieces[p]));
            qd_safetensors_release(c->tensors[i].pieces[p].entry);
        }
    return QD_OK;
}
