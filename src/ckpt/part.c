/* Writes the pieces of one rank into two safetensors files, and a list of them for the manifest.
 * Values and optimizer state are in separate files, so that a model can be used without the
 * latter. */
#include "base/text/strbuf.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/safetensors.h"

#include <quadrille/json_writer.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct part_writer {
    const char *folder;
    int part;
    const qd_ledger *ledger;
    const qd_state_pieces *pieces;
    qd_ckpt_fetch fetch;
    void *context;
    float *values;    /* buffer for one piece */
    uint64_t *hashes; /* per piece */
    qd_json_writer json;
} part_writer;

static const char *const file_kinds[] = {"model", "optimizer"};
enum { FILES = 2 };

static int file_of(const qd_state_piece *piece)
{
    return piece->kind == QD_CKPT_VALUE ? 0 : 1;
}

static void file_name(const part_writer *w, int file, char *name, size_t size)
{
    snprintf(name, size, "%s-%05d.safetensors", file_kinds[file], w->part);
}

/* "block.0.attn.q.weight"; optimizer state "….moment1"; a slice of rows "…[16:32]". */
static void key_of(const part_writer *w, const qd_state_piece *piece, char *key, size_t size)
{
    const qd_param *p = &w->ledger->params[piece->param];
    int n = snprintf(key, size, "%s%s%s", p->name, piece->kind == QD_CKPT_VALUE ? "" : ".",
                     piece->kind == QD_CKPT_VALUE ? "" : qd_ckpt_kind_names[piece->kind]);
    bool whole = true;
    for (int d = 0; d < p->ndim; d++)
        whole = whole && piece->box.length[d] == p->shape[d];
    for (int d = 0; d < p->ndim && !whole && n > 0 && (size_t)n < size; d++)
        n += snprintf(key + n, size - (size_t)n, "%s%lld:%lld%s", d == 0 ? "[" : ",", (long long)piece->box.begin[d],
                      (long long)(piece->box.begin[d] + piece->box.length[d]), d == p->ndim - 1 ? "]" : "");
}

/* A checkpoint with a value that is not finite would pass every checksum and break any run that
 * resumes from it. */
static qd_status check_finite(const part_writer *w, const qd_state_piece *piece)
{
    const int64_t at = qd_ckpt_first_not_finite(w->values, piece->count), width = piece->box.length[1];
    if (at < 0)
        return QD_OK;
    return QD_FAIL(QD_NOT_FINITE, "element [%lld, %lld] of '%s' (%s) is %g", (long long)(piece->box.begin[0] + at / width),
                   (long long)(piece->box.begin[1] + at % width), w->ledger->params[piece->param].name, qd_ckpt_kind_names[piece->kind],
                   (double)w->values[at]);
}

static qd_status write_tensors(part_writer *w, int file, qd_safetensors_writer *writer)
{
    char key[256];
    for (int i = 0; i < w->pieces->count; i++) {
        const qd_state_piece *piece = &w->pieces->list[i];
        if (file_of(piece) != file)
            continue;
        key_of(w, piece, key, sizeof key);
        QD_TRY(qd_safetensors_declare(writer, key, QD_F32, w->ledger->params[piece->param].ndim, piece->box.length));
    }
    for (int i = 0; i < w->pieces->count; i++) {
        const qd_state_piece *piece = &w->pieces->list[i];
        if (file_of(piece) != file)
            continue;
        QD_TRY(w->fetch(w->context, piece, w->values));
        QD_TRY(check_finite(w, piece));
        QD_TRY(qd_safetensors_write(writer, w->values, &w->hashes[i]));
    }
    return QD_OK;
}

static qd_status write_file(part_writer *w, int file)
{
    char name[64], hash[QD_CKPT_HASH_TEXT];
    qd_safetensors_writer *writer = NULL;
    qd_safetensors_summary summary;
    bool any = false;
    for (int i = 0; i < w->pieces->count && !any; i++)
        any = file_of(&w->pieces->list[i]) == file;
    if (!any)
        return QD_OK;
    file_name(w, file, name, sizeof name);
    char *path = qd_ckpt_path(w->folder, name);
    qd_status status = path ? qd_safetensors_create(path, &writer) : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", w->folder);
    free(path);
    QD_TRY(status);
    status = write_tensors(w, file, writer);
    if (status != QD_OK) {
        qd_safetensors_abandon(writer);
        return status;
    }
    QD_TRY(qd_safetensors_finish(writer, &summary));
    qd_ckpt_hash_text(summary.header_hash, hash);
    qd_json_object_begin(&w->json, NULL);
    qd_json_put_string(&w->json, "name", name);
    qd_json_put_int(&w->json, "bytes", summary.bytes);
    qd_json_put_string(&w->json, "header_xxh3", hash);
    qd_json_end(&w->json);
    return QD_OK;
}

static void put_piece(part_writer *w, int index)
{
    const qd_state_piece *piece = &w->pieces->list[index];
    char name[64], key[256], hash[QD_CKPT_HASH_TEXT];
    int ndim = w->ledger->params[piece->param].ndim;
    file_name(w, file_of(piece), name, sizeof name);
    key_of(w, piece, key, sizeof key);
    qd_ckpt_hash_text(w->hashes[index], hash);
    qd_json_object_begin(&w->json, NULL);
    qd_json_put_int(&w->json, "param", piece->param);
    qd_json_put_int(&w->json, "kind", piece->kind);
    qd_json_put_string(&w->json, "file", name);
    qd_json_put_string(&w->json, "key", key);
    qd_ckpt_put_sizes(&w->json, "begin", piece->box.begin, ndim);
    qd_ckpt_put_sizes(&w->json, "length", piece->box.length, ndim);
    qd_json_put_string(&w->json, "xxh3", hash);
    qd_json_end(&w->json);
}

static qd_status write_all(part_writer *w, qd_strbuf *list)
{
    w->json = qd_json_writer_on(list);
    qd_json_object_begin(&w->json, NULL);
    qd_json_list_begin(&w->json, "files");
    for (int file = 0; file < FILES; file++)
        QD_TRY(write_file(w, file));
    qd_json_end(&w->json);
    qd_json_list_begin(&w->json, "pieces");
    for (int i = 0; i < w->pieces->count; i++)
        put_piece(w, i);
    qd_json_end(&w->json);
    qd_json_end(&w->json);
    return QD_OK;
}

qd_status qd_store_write(const char *root, int64_t step, int part, const qd_ledger *ledger, const qd_state_pieces *pieces,
                         qd_ckpt_fetch fetch, void *context)
{
    char name[64], *text = NULL, *path = NULL;
    qd_strbuf list = {0};
    part_writer w = {.part = part, .ledger = ledger, .pieces = pieces, .fetch = fetch, .context = context};
    qd_status status = QD_OK;
    char *folder = qd_ckpt_step_path(root, step, QD_CKPT_ASIDE);
    snprintf(name, sizeof name, QD_CKPT_PART, part);
    path = folder ? qd_ckpt_path(folder, name) : NULL;
    w.folder = folder;
    w.values = malloc(((size_t)pieces->largest + 1) * sizeof *w.values);
    w.hashes = calloc((size_t)pieces->count + 1, sizeof *w.hashes);
    if (!path || !w.values || !w.hashes)
        status = QD_FAIL(QD_NO_MEMORY, "no memory to write %s", root);
    if (status == QD_OK)
        status = write_all(&w, &list);
    size_t length = list.length;
    if (status == QD_OK)
        status = qd_strbuf_take(&list, &text);
    if (status == QD_OK)
        status = qd_file_replace(path, text, length);
    qd_strbuf_free(&list);
    free(text);
    free(path);
    free(folder);
    free(w.values);
    free(w.hashes);
    return status;
}
