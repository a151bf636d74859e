/* Writing checkpoints: aside, flushed, then renamed; and the store of one run's checkpoints. */
#include "base/strbuf.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/safetensors.h"

#include <quadrille/json_writer.h>

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

/* Values apart from optimizer state: a model can be taken without it. */
static const char *const file_of_kind[QD_CKPT_KIND_COUNT] = {"model-00000.safetensors", "optimizer-00000.safetensors",
                                                             "optimizer-00000.safetensors"};

typedef struct saver {
    const char *folder;
    const qd_ledger *ledger;
    unsigned kinds;
    qd_ckpt_fetch fetch;
    void *context;
    float *values;    /* of one tensor */
    uint64_t *hashes; /* per parameter and kind */
} saver;

static bool wanted(const saver *s, int param, int kind, const char *file)
{
    return (s->kinds & (1u << kind)) && s->ledger->params[param].tied_to < 0 && (!file || strcmp(file_of_kind[kind], file) == 0);
}

static void key_of(const qd_param *param, int kind, char *key, size_t size)
{
    if (kind == QD_CKPT_VALUE)
        snprintf(key, size, "%s", param->name);
    else
        snprintf(key, size, "%s.%s", param->name, qd_ckpt_kind_names[kind]);
}

static qd_status write_tensors(saver *s, const char *file, qd_safetensors_writer *writer)
{
    char key[256];
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        for (int i = 0; i < s->ledger->param_count; i++) {
            const qd_param *p = &s->ledger->params[i];
            if (!wanted(s, i, kind, file))
                continue;
            key_of(p, kind, key, sizeof key);
            QD_TRY(qd_safetensors_declare(writer, key, QD_F32, p->ndim, p->shape));
        }
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        for (int i = 0; i < s->ledger->param_count; i++) {
            if (!wanted(s, i, kind, file))
                continue;
            QD_TRY(s->fetch(s->context, i, (qd_ckpt_kind)kind, s->values));
            QD_TRY(qd_safetensors_write(writer, s->values, &s->hashes[i * QD_CKPT_KIND_COUNT + kind]));
        }
    return QD_OK;
}

static qd_status write_tensor_file(saver *s, const char *file)
{
    qd_safetensors_writer *writer = NULL;
    char *path = qd_ckpt_path(s->folder, file);
    if (!path)
        return QD_FAIL(QD_NO_MEMORY, "no memory to write %s", s->folder);
    qd_status status = qd_safetensors_create(path, &writer);
    free(path);
    if (status != QD_OK)
        return status;
    status = write_tensors(s, file, writer);
    if (status == QD_OK)
        return qd_safetensors_finish(writer);
    qd_safetensors_abandon(writer);
    return status;
}

static void put_sizes(qd_json_writer *json, const char *key, const int64_t *sizes, int count)
{
    qd_json_list_begin(json, key);
    for (int d = 0; d < count; d++)
        qd_json_put_int(json, NULL, sizes ? sizes[d] : 0);
    qd_json_end(json);
}

static void put_tensor(const saver *s, qd_json_writer *json, int param, int kind)
{
    const qd_param *p = &s->ledger->params[param];
    char key[256], hash[QD_CKPT_HASH_TEXT];
    key_of(p, kind, key, sizeof key);
    qd_ckpt_hash_text(s->hashes[param * QD_CKPT_KIND_COUNT + kind], hash);
    qd_json_object_begin(json, NULL);
    qd_json_put_string(json, "name", p->name);
    qd_json_put_string(json, "kind", qd_ckpt_kind_names[kind]);
    put_sizes(json, "shape", p->shape, p->ndim);
    qd_json_list_begin(json, "pieces");
    qd_json_object_begin(json, NULL);
    qd_json_put_string(json, "file", file_of_kind[kind]);
    qd_json_put_string(json, "key", key);
    put_sizes(json, "begin", NULL, p->ndim);
    put_sizes(json, "length", p->shape, p->ndim);
    qd_json_put_string(json, "xxh3", hash);
    qd_json_end(json);
    qd_json_end(json);
    qd_json_end(json);
}

static qd_status write_manifest(const saver *s, const qd_ckpt_meta *meta)
{
    qd_strbuf text = {0};
    qd_json_writer json = qd_json_writer_on(&text);
    qd_json_object_begin(&json, NULL);
    qd_json_put_string(&json, "format", QD_CKPT_FORMAT);
    qd_json_put_int(&json, "version", QD_CKPT_VERSION);
    qd_json_put_string(&json, "quadrille", QD_VERSION);
    qd_json_put_int(&json, "step", meta->step);
    qd_json_put_int(&json, "next_sample", meta->next_sample);
    qd_json_put_int(&json, "seed", (int64_t)meta->seed);
    qd_json_put_string(&json, "config", meta->config);
    qd_json_list_begin(&json, "tensors");
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        for (int i = 0; i < s->ledger->param_count; i++)
            if (wanted(s, i, kind, NULL))
                put_tensor(s, &json, i, kind);
    qd_json_end(&json);
    qd_json_end(&json);
    qd_strbuf_puts(&text, "\n");
    char *manifest = NULL, hash[QD_CKPT_HASH_TEXT];
    size_t length = text.length;
    QD_TRY(qd_strbuf_take(&text, &manifest));
    qd_ckpt_hash_text(XXH3_64bits(manifest, length), hash);
    char *path = qd_ckpt_path(s->folder, QD_CKPT_MANIFEST), *hash_path = qd_ckpt_path(s->folder, QD_CKPT_MANIFEST_HASH);
    qd_status status = path && hash_path ? qd_file_replace(path, manifest, length)
                                         : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", s->folder);
    if (status == QD_OK)
        status = qd_file_replace(hash_path, hash, strlen(hash));
    free(path);
    free(hash_path);
    free(manifest);
    return status;
}

static qd_status write_folder(saver *s, const qd_ckpt_meta *meta)
{
    int64_t largest = 1;
    for (int i = 0; i < s->ledger->param_count; i++) {
        int64_t count = s->ledger->params[i].shape[0] * s->ledger->params[i].shape[1];
        largest = count > largest ? count : largest;
    }
    s->values = malloc((size_t)largest * sizeof *s->values);
    s->hashes = calloc((size_t)s->ledger->param_count * QD_CKPT_KIND_COUNT, sizeof *s->hashes);
    qd_status status = QD_OK;
    if (!s->values || !s->hashes)
        status = QD_FAIL(QD_NO_MEMORY, "no memory to write %s", s->folder);
    if (status == QD_OK && mkdir(s->folder, 0755) != 0)
        status = QD_FAIL(QD_IO, "%s: cannot be created: %s", s->folder, strerror(errno));
    if (status == QD_OK)
        status = write_tensor_file(s, file_of_kind[QD_CKPT_VALUE]);
    if (status == QD_OK && (s->kinds & ~(1u << QD_CKPT_VALUE)))
        status = write_tensor_file(s, file_of_kind[QD_CKPT_MOMENT1]);
    if (status == QD_OK)
        status = write_manifest(s, meta);
    if (status == QD_OK)
        status = qd_ckpt_sync_folder(s->folder);
    free(s->values);
    free(s->hashes);
    return status;
}

/* Renames `aside` to `folder`. One that is there already makes room first and is removed last. */
static qd_status move_into_place(const char *aside, const char *folder)
{
    char *old = malloc(strlen(folder) + 8);
    if (!old)
        return QD_FAIL(QD_NO_MEMORY, "no memory to write %s", folder);
    sprintf(old, "%s.old", folder);
    qd_status status = qd_ckpt_remove_folder(old);
    bool replaces = status == QD_OK && rename(folder, old) == 0;
    if (status == QD_OK && rename(aside, folder) != 0) {
        status = QD_FAIL(QD_IO, "%s: cannot be put in place: %s", folder, strerror(errno));
        if (replaces)
            rename(old, folder);
        replaces = false;
    }
    if (replaces)
        status = qd_ckpt_remove_folder(old);
    free(old);
    return status;
}

qd_status qd_checkpoint_save(const char *folder, const qd_ledger *ledger, const qd_ckpt_meta *meta, unsigned kinds,
                             qd_ckpt_fetch fetch, void *context)
{
    char *aside = malloc(strlen(folder) + 8);
    if (!aside)
        return QD_FAIL(QD_NO_MEMORY, "no memory to write %s", folder);
    sprintf(aside, "%s.part", folder);
    saver s = {.folder = aside, .ledger = ledger, .kinds = kinds | 1u << QD_CKPT_VALUE, .fetch = fetch, .context = context};
    qd_status status = qd_ckpt_remove_folder(aside); /* what a killed run left */
    if (status == QD_OK)
        status = write_folder(&s, meta);
    if (status == QD_OK)
        status = move_into_place(aside, folder);
    if (status != QD_OK) {
        char message[1024];
        snprintf(message, sizeof message, "%s", qd_error_message());
        qd_ckpt_remove_folder(aside);
        status = QD_FAIL(status, "%s", message);
    }
    free(aside);
    return status;
}

/* ---- the store ---- */

#define STEP_FORMAT "step-%012lld"

static bool parse_step(const char *name, long long *step)
{
    int used = 0;
    return sscanf(name, "step-%lld%n", step, &used) == 1 && name[used] == '\0';
}

/* Steps of the checkpoints under `root`, newest first. Returns how many, -1 when memory is out. */
static int list_steps(const char *root, long long **steps)
{
    DIR *dir = opendir(root);
    int count = 0, capacity = 0;
    *steps = NULL;
    for (struct dirent *entry; dir && (entry = readdir(dir)) != NULL;) {
        long long step;
        if (!parse_step(entry->d_name, &step))
            continue;
        if (count == capacity) {
            capacity = capacity ? 2 * capacity : 16;
            long long *larger = realloc(*steps, (size_t)capacity * sizeof *larger);
            if (!larger) {
                closedir(dir);
                return -1;
            }
            *steps = larger;
        }
        int at = count++;
        while (at > 0 && (*steps)[at - 1] < step) {
            (*steps)[at] = (*steps)[at - 1];
            at--;
        }
        (*steps)[at] = step;
    }
    if (dir)
        closedir(dir);
    return count;
}

static char *step_folder(const char *root, long long step)
{
    char name[40];
    snprintf(name, sizeof name, STEP_FORMAT, step);
    return qd_ckpt_path(root, name);
}

/* Removes all but the newest `keep` of those up to `newest`. Later ones are of a run that was left (damaged, or overtaken by
 * a resume from before them) and do not count. */
static qd_status prune(const char *root, int keep, long long newest)
{
    long long *steps;
    int count = list_steps(root, &steps);
    qd_status status = count < 0 ? QD_FAIL(QD_NO_MEMORY, "no memory to list %s", root) : QD_OK;
    for (int i = 0, kept = 0; i < count && status == QD_OK; i++) {
        if (steps[i] <= newest && kept++ < keep)
            continue;
        char *folder = step_folder(root, steps[i]);
        status = folder ? qd_ckpt_remove_folder(folder) : QD_FAIL(QD_NO_MEMORY, "no memory to prune %s", root);
        free(folder);
    }
    free(steps);
    return status;
}

qd_status qd_store_save(const char *root, const qd_ledger *ledger, const qd_ckpt_meta *meta, unsigned kinds, int keep,
                        qd_ckpt_fetch fetch, void *context)
{
    if (mkdir(root, 0755) != 0 && errno != EEXIST)
        return QD_FAIL(QD_IO, "%s: cannot be created: %s", root, strerror(errno));
    char *folder = step_folder(root, meta->step);
    qd_status status = folder ? qd_checkpoint_save(folder, ledger, meta, kinds, fetch, context)
                              : QD_FAIL(QD_NO_MEMORY, "no memory to write %s", root);
    if (status == QD_OK)
        status = qd_ckpt_sync_folder(root);
    if (status == QD_OK && keep > 0)
        status = prune(root, keep, meta->step);
    free(folder);
    return status;
}

static void note_passed_over(char **notes, const char *message)
{
    if (!notes)
        return;
    size_t old = *notes ? strlen(*notes) : 0;
    char *longer = realloc(*notes, old + strlen(message) + 3);
    if (!longer)
        return;
    sprintf(longer + old, "%s%s", old ? "; " : "", message);
    *notes = longer;
}

qd_status qd_store_open(const char *root, qd_checkpoint **checkpoint, char **passed_over)
{
    long long *steps;
    int count = list_steps(root, &steps);
    qd_status status = count < 0 ? QD_FAIL(QD_NO_MEMORY, "no memory to list %s", root)
                                 : QD_FAIL(QD_USAGE, "%s: holds no checkpoint", root);
    *checkpoint = NULL;
    if (passed_over)
        *passed_over = NULL;
    for (int i = 0; i < count && status != QD_OK; i++) {
        char *folder = step_folder(root, steps[i]);
        if (!folder)
            break;
        status = qd_checkpoint_open(folder, checkpoint);
        if (status == QD_OK && (status = qd_checkpoint_verify(*checkpoint)) != QD_OK) {
            qd_checkpoint_close(*checkpoint);
            *checkpoint = NULL;
        }
        free(folder);
        if (status != QD_OK && status != QD_CORRUPT)
            break; /* no damage, but something to mend: going on from an older one would hide it */
        if (status != QD_OK)
            note_passed_over(passed_over, qd_error_message());
    }
    free(steps);
    return status;
}

qd_status qd_store_open_step(const char *root, int64_t step, qd_checkpoint **checkpoint)
{
    char *folder = step_folder(root, step);
    qd_status status = folder ? qd_checkpoint_open(folder, checkpoint) : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", root);
    free(folder);
    return status;
}

qd_status qd_store_clear(const char *root)
{
    return prune(root, 0, LLONG_MAX);
}
