/* `quadrille tokenize`: writes encoded text as a folder of shards that appears only when
 * complete. */
#include "base/text/json_writer.h"
#include "base/sized.h"
#include "base/text/strbuf.h"
#include "data/encode.h"
#include "data/shard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct shard_set {
    const char *folder;
    const qd_text_encoder *encoder;
    int64_t shard_tokens;
    qd_shard_writer *writer;
    int64_t shards, bytes;
} shard_set;

static qd_status finish_shard(shard_set *set)
{
    if (!set->writer)
        return QD_OK;
    qd_shard_writer *writer = set->writer;
    int64_t bytes = 0;
    set->writer = NULL;
    QD_TRY(qd_shard_writer_finish(writer, &bytes));
    set->bytes += bytes;
    set->shards++;
    return QD_OK;
}

/* Writes the number of shards: without it, missing last shards of a partially copied folder would
 * go unnoticed. */
static qd_status write_count(const shard_set *set, const qd_tokenize_progress *total)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    qd_json_object_begin(&w, NULL);
    qd_json_put_int(&w, "shards", set->shards);
    qd_json_put_int(&w, "tokens", total->tokens);
    qd_json_put_int(&w, "documents", total->documents);
    qd_json_end(&w);
    qd_json_newline(&w);
    char *json = NULL, *path = qd_path_join(set->folder, QD_SHARD_COUNT_NAME);
    qd_status status = path ? qd_strbuf_take(&text, &json) : QD_FAIL(QD_NO_MEMORY, "%s: no memory to write shards", set->folder);
    if (status == QD_OK)
        status = qd_file_replace(path, json, strlen(json));
    qd_strbuf_free(&text);
    free(json);
    free(path);
    return status;
}

/* The shard that takes the next token. */
static qd_status current_shard(shard_set *set)
{
    if (set->writer && qd_shard_writer_tokens(set->writer) < set->shard_tokens)
        return QD_OK;
    QD_TRY(finish_shard(set));
    char name[64];
    snprintf(name, sizeof name, "shard-%05" PRId64 QD_SHARD_SUFFIX, set->shards);
    char *path = qd_path_join(set->folder, name);
    if (!path)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to write shards", set->folder);
    qd_status status = qd_shard_writer_create(path, set->encoder->vocab, set->encoder->hash, &set->writer);
    free(path);
    return status;
}

static qd_status set_document(void *context)
{
    shard_set *set = context;
    QD_TRY(current_shard(set));
    return qd_shard_writer_document(set->writer);
}

/* A document that does not fit continues in the next shard, before the first document there. */
static qd_status set_append(void *context, const int32_t *tokens, int64_t count)
{
    shard_set *set = context;
    while (count > 0) {
        QD_TRY(current_shard(set));
        int64_t room = set->shard_tokens - qd_shard_writer_tokens(set->writer);
        int64_t part = count < room ? count : room;
        QD_TRY(qd_shard_writer_append(set->writer, tokens, part));
        tokens += part;
        count -= part;
    }
    return QD_OK;
}

static qd_status check_output(const char *folder)
{
    DIR *dir = opendir(folder);
    if (!dir)
        return errno == ENOENT ? QD_OK
                               : QD_FAIL(QD_USAGE, "%s: cannot be used as output folder: %s", folder, strerror(errno));
    bool empty = true;
    for (struct dirent *entry; (entry = readdir(dir));)
        empty = empty && (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0);
    closedir(dir);
    return empty ? QD_OK : QD_FAIL(QD_USAGE, "%s: the folder is not empty: remove it or choose another", folder);
}

/* Creates and locks the temporary folder. Files of a killed process are removed; those of a running
 * process are not. */
static qd_status open_partial(const char *partial, int *lock)
{
    QD_TRY(qd_folder_make(partial));
    int fd = open(partial, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_IO, "%s: cannot be opened: %s", partial, strerror(errno));
    struct stat here, there;
    /* Another process may rename the folder between our open and our lock. */
    if (flock(fd, LOCK_EX | LOCK_NB) != 0 || fstat(fd, &here) != 0 || stat(partial, &there) != 0 ||
        here.st_ino != there.st_ino || here.st_dev != there.st_dev) {
        close(fd);
        return QD_FAIL(QD_USAGE, "%s: another process is writing it", partial);
    }
    qd_folder_empty(partial);
    *lock = fd;
    return QD_OK;
}

static qd_status encode_into(const qd_encode_job *job, const char *partial, int64_t shard_tokens,
                             qd_tokenize_report *report)
{
    shard_set set = {.folder = partial, .encoder = job->encoder, .shard_tokens = shard_tokens};
    qd_token_sink sink = {.context = &set, .document = set_document, .append = set_append};
    qd_tokenize_progress total = {0};
    qd_status status = qd_encode_files(job, &sink, &total);
    if (status == QD_OK)
        status = finish_shard(&set);
    if (status == QD_OK && set.shards == 0)
        status = QD_FAIL(QD_USAGE, "%s: the text yields no tokens", job->files->items[0].path);
    if (status == QD_OK)
        status = write_count(&set, &total);
    qd_shard_writer_abandon(set.writer);
    report->bytes = total.bytes;
    report->tokens = total.tokens;
    report->documents = total.documents;
    report->files = total.files;
    report->seconds = total.seconds;
    report->shards = set.shards;
    report->shard_bytes = set.bytes;
    report->token_bytes = qd_shard_token_bytes(job->encoder->vocab);
    report->skipped = job->files->skipped;
    return status;
}

qd_status qd_encode_to_folder(const qd_encode_job *job, const char *folder, int64_t shard_tokens,
                              qd_tokenize_report *report)
{
    *report = qd_tokenize_report_default();
    QD_TRY(check_output(folder));
    size_t length = strlen(folder);
    while (length > 1 && folder[length - 1] == '/')
        length--;
    qd_status status = QD_OK;
    int lock = -1;
    char *name = strndup(folder, length);
    char *partial = name ? qd_path_with(name, ".partial") : NULL;
    if (!partial)
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", folder);
    if (status == QD_OK)
        status = open_partial(partial, &lock);
    if (status == QD_OK) {
        status = encode_into(job, partial, shard_tokens, report);
        if (status == QD_OK && rename(partial, name) != 0)
            status = QD_FAIL(QD_IO, "%s: cannot be renamed to %s: %s", partial, name, strerror(errno));
        if (status == QD_OK) {
            status = qd_folder_sync_of(name);
        } else {
            qd_folder_empty(partial);
            rmdir(partial);
        }
        close(lock);
    }
    free(partial);
    free(name);
    return status;
}

void qd_tokenize_options_init(qd_tokenize_options *options, size_t size)
{
    const qd_tokenize_options own = {.shard_tokens = INT64_C(1) << 28, .documents = {.field = "text"}};
    qd_sized_init(options, size, &own, sizeof own);
}

static qd_status tokenize_files(const qd_tokenize_options *options, qd_tokenize_report *report)
{
    QD_TRY(qd_text_encoder_check(options->encoder));
    if (!options->output || options->output[0] == '\0')
        return QD_FAIL(QD_USAGE, "tokenize: the output folder is not set");
    if (options->input_count < 1)
        return QD_FAIL(QD_USAGE, "tokenize: name at least one file or folder of text");
    if (options->shard_tokens < 1)
        return QD_FAIL(QD_USAGE, "tokenize: shards of %lld tokens; must be at least 1",
                       (long long)options->shard_tokens);
    qd_file_list files = {0};
    qd_status status = QD_OK;
    for (int i = 0; status == QD_OK && i < options->input_count; i++)
        status = qd_file_list_add(&files, options->inputs[i]);
    for (int64_t i = 0; status == QD_OK && i < files.count; i++)
        if (files.items[i].kind == QD_FILE_SHARD)
            status = QD_FAIL(QD_USAGE, "%s: already a token shard, not text", files.items[i].path);
    if (status == QD_OK && options->encoder->hash != qd_text_encoder_bytes().hash)
        status = qd_file_list_check_text(&files);
    qd_encode_job job = {
        .files = &files,
        .encoder = options->encoder,
        .documents = options->documents,
        .threads = options->threads,
        .progress = options->progress,
        .progress_context = options->progress_context,
    };
    if (status == QD_OK)
        status = qd_encode_to_folder(&job, options->output, options->shard_tokens, report);
    qd_file_list_free(&files);
    return status;
}

qd_status qd_tokenize_files(const qd_tokenize_options *options, qd_tokenize_report *report)
{
    qd_tokenize_options o = qd_tokenize_options_default();
    qd_tokenize_report r = qd_tokenize_report_default();
    qd_text_encoder encoder = qd_text_encoder_default();
    QD_TRY(QD_SIZED_CHECK(report, qd_tokenize_report));
    QD_TRY(QD_SIZED_READ(options, qd_tokenize_options, &o));
    if (o.encoder)
        QD_TRY(QD_SIZED_READ(o.encoder, qd_text_encoder, &encoder));
    o.encoder = o.encoder ? &encoder : NULL;
    qd_status status = tokenize_files(&o, &r);
    QD_SIZED_WRITE(report, &r);
    return status;
}
