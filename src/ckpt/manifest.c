/* The manifest: merges the pieces that all ranks have written, sorted by tensor. */
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "ckpt/checkpoint_impl.h"

#include <quadrille/json_writer.h>
#include <quadrille/version.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

const char *const qd_ckpt_kind_names[QD_CKPT_KIND_COUNT] = {"value", "moment1", "moment2"};

void qd_ckpt_put_sizes(qd_json_writer *json, const char *key, const int64_t *sizes, int count)
{
    qd_json_list_begin(json, key);
    for (int d = 0; d < count; d++)
        qd_json_put_int(json, NULL, sizes[d]);
    qd_json_end(json);
}

typedef struct written {
    int param, kind;
    qd_atom box;
    const char *file, *key, *hash; /* pointers into the part's document */
} written;

typedef struct merger {
    const char *folder;
    const qd_ledger *ledger;
    int parts;
    qd_json **documents; /* per part */
    written *pieces;
    int count, capacity;
} merger;

static qd_status odd(const merger *m, int part, const char *what)
{
    return QD_FAIL(QD_SYSTEM, "%s: part %d: %s", m->folder, part, what);
}

static qd_status read_piece(const merger *m, int part, const qd_json_node *node, written *w)
{
    int64_t param, kind;
    if (!qd_json_as_int(qd_json_member(node, "param"), &param) || param < 0 || param >= m->ledger->param_count ||
        !qd_json_as_int(qd_json_member(node, "kind"), &kind) || kind < 0 || kind >= QD_CKPT_KIND_COUNT)
        return odd(m, part, "a piece of an unknown tensor");
    *w = (written){.param = (int)param, .kind = (int)kind, .box = {.length = {1, 1}}};
    w->file = qd_json_as_string(qd_json_member(node, "file"));
    w->key = qd_json_as_string(qd_json_member(node, "key"));
    w->hash = qd_json_as_string(qd_json_member(node, "xxh3"));
    bool good = w->file && w->key && w->hash;
    for (int d = 0; d < m->ledger->params[param].ndim; d++)
        good = good && qd_json_as_int(qd_json_item(qd_json_member(node, "begin"), (size_t)d), &w->box.begin[d]) &&
               qd_json_as_int(qd_json_item(qd_json_member(node, "length"), (size_t)d), &w->box.length[d]);
    return good ? QD_OK : odd(m, part, "a piece with an incomplete description");
}

static qd_status read_part(merger *m, int part)
{
    char name[64];
    const qd_json_node *pieces;
    snprintf(name, sizeof name, QD_CKPT_PART, part);
    char *path = qd_ckpt_path(m->folder, name);
    qd_status status = path ? qd_json_load(path, &m->documents[part]) : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", m->folder);
    free(path);
    QD_TRY(status);
    QD_TRY(qd_json_get_node(m->documents[part], qd_json_root(m->documents[part]), "pieces", QD_JSON_LIST, &pieces));
    int more = (int)qd_json_count(pieces);
    if (m->count + more > m->capacity) {
        int capacity = 2 * (m->count + more);
        written *larger = realloc(m->pieces, (size_t)capacity * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory for the manifest of %s", m->folder);
        m->pieces = larger;
        m->capacity = capacity;
    }
    for (int i = 0; i < more; i++)
        QD_TRY(read_piece(m, part, qd_json_item(pieces, (size_t)i), &m->pieces[m->count++]));
    return QD_OK;
}

static int by_tensor(const void *a, const void *b)
{
    const written *x = a, *y = b;
    if (x->kind != y->kind)
        return x->kind - y->kind;
    if (x->param != y->param)
        return x->param - y->param;
    for (int d = 0; d < QD_PARAM_DIMS; d++)
        if (x->box.begin[d] != y->box.begin[d])
            return x->box.begin[d] < y->box.begin[d] ? -1 : 1;
    return 0;
}

/* Writes one tensor, whose pieces are [first, end). */
static qd_status put_tensor(const merger *m, qd_json_writer *json, int first, int end)
{
    const qd_param *p = &m->ledger->params[m->pieces[first].param];
    int64_t count = 0;
    qd_json_object_begin(json, NULL);
    qd_json_put_string(json, "name", p->name);
    qd_json_put_string(json, "kind", qd_ckpt_kind_names[m->pieces[first].kind]);
    qd_ckpt_put_sizes(json, "shape", p->shape, p->ndim);
    qd_json_list_begin(json, "pieces");
    for (int i = first; i < end; i++) {
        const written *w = &m->pieces[i];
        count += qd_atom_count(&w->box, p->ndim);
        qd_json_object_begin(json, NULL);
        qd_json_put_string(json, "file", w->file);
        qd_json_put_string(json, "key", w->key);
        qd_ckpt_put_sizes(json, "begin", w->box.begin, p->ndim);
        qd_ckpt_put_sizes(json, "length", w->box.length, p->ndim);
        qd_json_put_string(json, "xxh3", w->hash);
        qd_json_end(json);
    }
    qd_json_end(json);
    qd_json_end(json);
    if (count == p->shape[0] * p->shape[1])
        return QD_OK;
    return QD_FAIL(QD_SYSTEM, "%s: the ranks have written %lld of the %lld elements of '%s'", m->folder, (long long)count,
                   (long long)(p->shape[0] * p->shape[1]), p->name);
}

static qd_status put_files(const merger *m, qd_json_writer *json)
{
    qd_json_list_begin(json, "files");
    for (int part = 0; part < m->parts; part++) {
        const qd_json_node *files;
        QD_TRY(qd_json_get_node(m->documents[part], qd_json_root(m->documents[part]), "files", QD_JSON_LIST, &files));
        for (size_t i = 0; i < qd_json_count(files); i++) {
            const qd_json_node *file = qd_json_item(files, i);
            int64_t bytes = 0;
            qd_json_as_int(qd_json_member(file, "bytes"), &bytes);
            qd_json_object_begin(json, NULL);
            qd_json_put_string(json, "name", qd_json_as_string(qd_json_member(file, "name")));
            qd_json_put_int(json, "bytes", bytes);
            qd_json_put_string(json, "header_xxh3", qd_json_as_string(qd_json_member(file, "header_xxh3")));
            qd_json_end(json);
        }
    }
    qd_json_end(json);
    return QD_OK;
}

static qd_status put_manifest(const merger *m, const qd_ckpt_meta *meta, qd_strbuf *text)
{
    int tensors = 0, wanted = meta->tensors;
    qd_json_writer json = qd_json_writer_on(text);
    qd_json_object_begin(&json, NULL);
    qd_json_put_string(&json, "format", QD_CKPT_FORMAT);
    qd_json_put_int(&json, "version", QD_CKPT_VERSION);
    qd_json_put_string(&json, "quadrille", QD_VERSION);
    qd_json_put_int(&json, "step", meta->step);
    qd_json_put_int(&json, "next_sample", meta->next_sample);
    qd_json_put_int(&json, "seed", (int64_t)meta->seed);
    qd_json_put_int(&json, "ranks", m->parts);
    if (meta->run && meta->run[0] != '\0')
        qd_json_put_string(&json, "run", meta->run);
    if (meta->base && meta->base[0] != '\0') {
        qd_json_put_string(&json, "base", meta->base);
        qd_json_put_string(&json, "base_xxh3", meta->base_hash);
    }
    qd_json_put_string(&json, "config", meta->config);
    QD_TRY(put_files(m, &json));
    qd_json_list_begin(&json, "tensors");
    for (int first = 0, end; first < m->count; first = end) {
        for (end = first; end < m->count && m->pieces[end].param == m->pieces[first].param && m->pieces[end].kind == m->pieces[first].kind;)
            end++;
        QD_TRY(put_tensor(m, &json, first, end));
        tensors++;
    }
    qd_json_end(&json);
    qd_json_end(&json);
    qd_strbuf_puts(text, "\n");
    for (int i = 0; i < m->ledger->param_count && meta->tensors == 0; i++)
        wanted += m->ledger->params[i].tied_to < 0 && !qd_pieces_omit(m->ledger, i);
    if (tensors != wanted)
        return QD_FAIL(QD_SYSTEM, "%s: the ranks have written %d tensors of %d", m->folder, tensors, wanted);
    return QD_OK;
}

static qd_status replace_both(const merger *m, const char *text, size_t length)
{
    char hash[QD_CKPT_HASH_TEXT];
    char *path = qd_ckpt_path(m->folder, QD_CKPT_MANIFEST), *hash_path = qd_ckpt_path(m->folder, QD_CKPT_MANIFEST_HASH);
    qd_ckpt_hash_text(XXH3_64bits(text, length), hash);
    qd_status status = path && hash_path ? qd_file_replace(path, text, length)
                                         : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", m->folder);
    if (status == QD_OK)
        status = qd_file_replace(hash_path, hash, strlen(hash));
    free(path);
    free(hash_path);
    return status;
}

/* Removes the lists of the parts, which the manifest replaces. */
static void remove_parts(const merger *m)
{
    for (int part = 0; part < m->parts; part++) {
        char name[64];
        snprintf(name, sizeof name, QD_CKPT_PART, part);
        char *path = qd_ckpt_path(m->folder, name);
        if (path)
            unlink(path);
        free(path);
    }
}

qd_status qd_ckpt_manifest_write(const char *folder, const qd_ledger *ledger, const qd_ckpt_meta *meta, int parts)
{
    merger m = {.folder = folder, .ledger = ledger, .parts = parts, .documents = calloc((size_t)parts, sizeof(qd_json *))};
    qd_strbuf text = {0};
    char *manifest = NULL;
    qd_status status = m.documents ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for the manifest of %s", folder);
    for (int part = 0; part < parts && status == QD_OK; part++)
        status = read_part(&m, part);
    if (status == QD_OK) {
        qsort(m.pieces, (size_t)m.count, sizeof *m.pieces, by_tensor);
        status = put_manifest(&m, meta, &text);
    }
    size_t length = text.length;
    if (status == QD_OK)
        status = qd_strbuf_take(&text, &manifest);
    if (status == QD_OK)
        status = replace_both(&m, manifest, length);
    if (status == QD_OK)
        remove_parts(&m);
    qd_strbuf_free(&text);
    free(manifest);
    for (int part = 0; m.documents && part < parts; part++)
        qd_json_destroy(m.documents[part]);
    free(m.documents);
    free(m.pieces);
    return status;
}
