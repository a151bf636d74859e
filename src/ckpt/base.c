/* The base of an adapter checkpoint: a folder with the frozen weights, which the checkpoint names
 * with a fingerprint instead of containing them. */
#include "base/file.h"
#include "ckpt/checkpoint_impl.h"
#include "ckpt/huggingface.h"
#include "ckpt/safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { MOST_CONFIG = 16 << 20, SAMPLE = 1 << 16 };

struct qd_ckpt_base {
    qd_hf_source *folder;      /* one of the two */
    qd_checkpoint *checkpoint;
    qd_arena *arena;
};

static bool exists(const char *folder, const char *name)
{
    char *path = qd_ckpt_path(folder, name);
    bool there = path && access(path, F_OK) == 0;
    free(path);
    return there;
}

/* A run folder's newest checkpoint, or a checkpoint. */
static qd_status open_checkpoint(const char *path, qd_checkpoint **checkpoint)
{
    if (exists(path, QD_CKPT_MANIFEST))
        return qd_checkpoint_open(path, checkpoint);
    char *root = qd_ckpt_path(path, "checkpoints");
    qd_status status = root ? qd_store_open(root, INT64_MAX, false, checkpoint, NULL) : QD_FAIL(QD_NO_MEMORY, "no memory to open %s", path);
    free(root);
    return status;
}

static int is_weights(const struct dirent *entry)
{
    size_t length = strlen(entry->d_name);
    return length > 12 && strcmp(entry->d_name + length - 12, ".safetensors") == 0;
}

/* Size, header and a sample from the middle of a file. */
static qd_status mix_file(const char *path, XXH3_state_t *hash)
{
    static _Thread_local char sample[SAMPLE];
    qd_safetensors *file = NULL;
    QD_TRY(qd_safetensors_open(path, &file));
    qd_safetensors_summary summary = qd_safetensors_look(file);
    qd_safetensors_close(file);
    int64_t at = summary.bytes / 2, count = summary.bytes - at < SAMPLE ? summary.bytes - at : SAMPLE;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_IO, "%s: %s", path, strerror(errno));
    qd_status status = qd_file_read_at(path, fd, at, sample, (size_t)count);
    close(fd);
    QD_TRY(status);
    XXH3_64bits_update(hash, &summary, sizeof summary);
    XXH3_64bits_update(hash, sample, (size_t)count);
    return QD_OK;
}

static qd_status mix_folder(const char *path, XXH3_state_t *hash)
{
    char *config = qd_ckpt_path(path, QD_HF_CONFIG), *text = NULL;
    size_t length = 0;
    struct dirent **list = NULL;
    qd_status status = config ? qd_file_read(config, MOST_CONFIG, &text, &length) : QD_FAIL(QD_NO_MEMORY, "no memory to read %s", path);
    int count = status == QD_OK ? scandir(path, &list, is_weights, alphasort) : 0;
    if (status == QD_OK)
        XXH3_64bits_update(hash, text, length);
    for (int i = 0; i < count; i++) {
        char *file = qd_ckpt_path(path, list[i]->d_name);
        if (status == QD_OK)
            status = file ? mix_file(file, hash) : QD_FAIL(QD_NO_MEMORY, "no memory to read %s", path);
        free(file);
        free(list[i]);
    }
    free(list);
    free(text);
    free(config);
    return status;
}

static qd_status whole_path(const char *path, char **whole)
{
    *whole = realpath(path, NULL);
    return *whole ? QD_OK : QD_FAIL(QD_USAGE, "%s: %s", path, strerror(errno));
}

static qd_status mix_checkpoint(const char *path, uint64_t *hash, char **folder)
{
    qd_checkpoint *checkpoint = NULL;
    QD_TRY(open_checkpoint(path, &checkpoint));
    *hash = qd_checkpoint_hash(checkpoint);
    qd_status status = qd_checkpoint_meta(checkpoint)->base[0] == '\0' ? whole_path(qd_checkpoint_folder(checkpoint), folder)
        : QD_FAIL(QD_USAGE, "%s: holds adapters of another model: merge them first ('quadrille convert %s FOLDER')", path, path);
    qd_checkpoint_close(checkpoint);
    return status;
}

qd_status qd_ckpt_base_fingerprint(const char *path, char text[QD_CKPT_BASE_TEXT], char **folder)
{
    uint64_t hash = 0;
    qd_status status;
    *folder = NULL;
    if (qd_hf_is_folder(path)) {
        XXH3_state_t *state = XXH3_createState();
        if (!state)
            return QD_FAIL(QD_NO_MEMORY, "no memory to read %s", path);
        XXH3_64bits_reset(state);
        status = mix_folder(path, state);
        hash = XXH3_64bits_digest(state);
        XXH3_freeState(state);
        if (status == QD_OK)
            status = whole_path(path, folder);
    } else {
        status = mix_checkpoint(path, &hash, folder);
    }
    qd_ckpt_hash_text(hash, text);
    return status;
}

qd_status qd_ckpt_base_check(const qd_ckpt_meta *meta, const char *path)
{
    char found[QD_CKPT_BASE_TEXT], *folder = NULL;
    qd_status status = qd_ckpt_base_fingerprint(path, found, &folder);
    free(folder);
    if (status == QD_OK && strcmp(found, meta->base_hash) != 0)
        return QD_FAIL(QD_USAGE, "%s: its fingerprint is %s, and the adapters were trained on %s of %s: the weights have changed, or are "
                                 "others", path, found, meta->base_hash, meta->base);
    return status;
}

qd_status qd_ckpt_base_open(const qd_ckpt_meta *meta, const qd_ledger *ledger, qd_ckpt_base **base)
{
    struct stat info;
    if (stat(meta->base, &info) != 0)
        return QD_FAIL(QD_USAGE, "%s: %s; the frozen weights of these adapters are there: put the folder back, or export the adapters "
                                 "(convert --adapter) and import them with --base", meta->base, strerror(errno));
    QD_TRY(qd_ckpt_base_check(meta, meta->base));
    qd_ckpt_base *b = calloc(1, sizeof *b);
    if (!b)
        return QD_FAIL(QD_NO_MEMORY, "no memory to open %s", meta->base);
    qd_strbuf notes = {0}; /* about training settings, which are the run's own */
    qd_status status = QD_OK;
    if (qd_hf_is_folder(meta->base)) {
        status = qd_hf_open(meta->base, &notes, &b->folder);
        if (status == QD_OK)
            status = qd_arena_create(&b->arena);
        if (status == QD_OK)
            status = qd_hf_check(b->folder, ledger, b->arena);
    } else {
        status = open_checkpoint(meta->base, &b->checkpoint);
    }
    qd_strbuf_free(&notes);
    if (status != QD_OK) {
        qd_ckpt_base_close(b);
        return status;
    }
    *base = b;
    return QD_OK;
}

void qd_ckpt_base_close(qd_ckpt_base *b)
{
    if (!b)
        return;
    qd_hf_close(b->folder);
    qd_checkpoint_close(b->checkpoint);
    qd_arena_destroy(b->arena);
    free(b);
}

qd_status qd_ckpt_base_read(qd_ckpt_base *b, const qd_param *param, const qd_atom *box, float *out)
{
    return b->folder ? qd_hf_read(b->folder, param, QD_CKPT_VALUE, box, out)
                     : qd_checkpoint_read(b->checkpoint, param, QD_CKPT_VALUE, box, out);
}
