/* Turns the files of a path into parts of a source: shards as they are, text through the encoder,
 * into the cache or into memory. */
#include "base/text/json.h"
#include "data/data_impl.h"
#include "data/encode.h"
#include "data/examples/examples.h"
#include "data/files.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

enum { HASH_BUFFER = 1 << 20 };
static const int64_t cache_shard_tokens = INT64_C(1) << 28;

void qd_token_part_free(qd_token_part *part)
{
    qd_shard_close(&part->shard);
    qd_stored_close(part->text);
    free(part->tokens);
    free(part->documents);
    free(part->path);
}

/* Takes ownership of the part, also on error. */
static qd_status add_part(qd_token_source *s, const char *path, qd_token_part part)
{
    if (s->part_count == s->part_capacity) {
        int64_t capacity = s->part_capacity ? s->part_capacity * 2 : 4;
        qd_token_part *parts = realloc(s->parts, (size_t)capacity * sizeof *parts);
        if (parts) {
            s->parts = parts;
            s->part_capacity = capacity;
        }
    }
    part.path = strdup(path);
    part.first = s->tokens;
    if (!part.path || s->part_count == s->part_capacity) {
        qd_token_part_free(&part);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to open it", path);
    }
    s->parts[s->part_count++] = part;
    s->tokens += part.count;
    s->documents += part.document_count;
    return QD_OK;
}

static const char *encoder_name(const qd_data_options *o)
{
    return o->encoder_name ? o->encoder_name : "data.tokenizer";
}

/* All tokens of a data set must come from one tokenizer. */
static qd_status agree_on_tokenizer(qd_data *d, uint64_t hash, const char *from)
{
    if (hash == 0 || hash == d->tokenizer_hash)
        return QD_OK;
    if (d->tokenizer_hash != 0)
        return QD_FAIL(QD_USAGE, "%s was made with another tokenizer (%016llx) than %s (%016llx); use the same tokenizer for all "
                                 "('quadrille tokenize --tokenizer')", from, (unsigned long long)hash, d->tokenizer_from,
                       (unsigned long long)d->tokenizer_hash);
    d->tokenizer_hash = hash;
    d->tokenizer_from = strdup(from);
    return d->tokenizer_from ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to open it", from);
}

static qd_status add_shard(const qd_data_options *o, const char *path, qd_data *d, qd_token_source *s)
{
    qd_shard shard;
    QD_TRY(qd_shard_open(path, o->verify, qd_threads_or_all(o->threads), &shard));
    qd_status status = agree_on_tokenizer(d, shard.tokenizer_hash, path);
    if (status == QD_OK && shard.vocab > o->vocab)
        status = QD_FAIL(QD_USAGE, "%s: tokens of a vocabulary of %lld, but model.vocab is %lld: increase it", path,
                         (long long)shard.vocab, (long long)o->vocab);
    if (status != QD_OK) {
        qd_shard_close(&shard);
        return status;
    }
    return add_part(s, path,
                    (qd_token_part){
                        .token_bytes = shard.token_bytes,
                        .count = shard.token_count,
                        .document_count = shard.document_count,
                        .shard = shard,
                    });
}

/* The number in a name written by `tokenize`; -1 for any other name. */
static int shard_number(const char *name)
{
    int number = -1, end = 0;
    if (strlen(name) != strlen("shard-00000.qds") || sscanf(name, "shard-%5d.qds%n", &number, &end) != 1 || name[end] != '\0')
        return -1;
    return number;
}

/* Length of the folder part of a path. */
static size_t folder_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? (size_t)(slash - path) + 1 : 0;
}

/* Compares the number of shards with shards.json of the folder of `path`, its last shard. Folders
 * written by earlier versions have no such file. */
static qd_status check_count(const char *path, int64_t shards)
{
    const size_t length = folder_of(path);
    char name[PATH_MAX];
    qd_json *document;
    int64_t expected;
    if (snprintf(name, sizeof name, "%.*s" QD_SHARD_COUNT_NAME, (int)length, path) >= (int)sizeof name || access(name, F_OK) != 0)
        return QD_OK;
    QD_TRY(qd_json_load(name, &document));
    qd_status status = qd_json_get_int(document, qd_json_root(document), "shards", &expected);
    qd_json_destroy(document);
    if (status == QD_OK && expected != shards)
        status = QD_FAIL(QD_CORRUPT, "%s lists %lld shards, but the folder has %lld: complete the folder, or remove that file", name,
                         (long long)expected, (long long)shards);
    return status;
}

/* Detects a folder that was copied partially: shards are numbered from 0, so gaps show, and the
 * folder records how many there are. */
static qd_status check_numbers(const qd_file_list *files)
{
    int expected = 0;
    for (int64_t i = 0; i < files->count; i++) {
        const char *path = files->items[i].path, *next = i + 1 < files->count ? files->items[i + 1].path : NULL;
        const size_t length = folder_of(path);
        const int number = shard_number(path + length);
        if (number > expected)
            return QD_FAIL(QD_CORRUPT, "%s exists, but %.*sshard-%05d.qds is missing: complete the folder, or rename the shards",
                           path, (int)length, path, expected);
        expected = number + 1;
        if (next && folder_of(next) == length && strncmp(next, path, length) == 0)
            continue;
        if (number >= 0)
            QD_TRY(check_count(path, expected));
        expected = 0;
    }
    return QD_OK;
}

static qd_status add_shard_folder(const qd_data_options *o, const char *folder, qd_data *d, qd_token_source *s)
{
    qd_file_list files = {0};
    qd_status status = qd_file_list_add(&files, folder);
    if (status == QD_OK)
        status = check_numbers(&files);
    for (int64_t i = 0; status == QD_OK && i < files.count; i++)
        status = add_shard(o, files.items[i].path, d, s);
    qd_file_list_free(&files);
    return status;
}

typedef struct memory_sink {
    unsigned char *tokens;
    int token_bytes;
    int64_t count, capacity;
    uint64_t *documents;
    int64_t document_count, document_capacity;
} memory_sink;

static qd_status grow(void **data, int64_t *capacity, int64_t need, size_t size)
{
    if (need <= *capacity)
        return QD_OK;
    int64_t next = *capacity ? *capacity : 1024;
    while (next < need)
        next += next / 2;
    void *larger = realloc(*data, (size_t)next * size);
    if (!larger)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld tokens of text: set a cache folder to keep them on disk",
                       (long long)next);
    *data = larger;
    *capacity = next;
    return QD_OK;
}

static qd_status memory_document(void *context)
{
    memory_sink *m = context;
    void *documents = m->documents;
    QD_TRY(grow(&documents, &m->document_capacity, m->document_count + 1, sizeof *m->documents));
    m->documents = documents;
    m->documents[m->document_count++] = (uint64_t)m->count;
    return QD_OK;
}

static qd_status memory_append(void *context, const int32_t *tokens, int64_t count)
{
    memory_sink *m = context;
    void *data = m->tokens;
    QD_TRY(grow(&data, &m->capacity, m->count + count, (size_t)m->token_bytes));
    m->tokens = data;
    if (m->token_bytes == 1)
        for (int64_t i = 0; i < count; i++)
            m->tokens[m->count + i] = (unsigned char)tokens[i];
    else if (m->token_bytes == 2)
        for (int64_t i = 0; i < count; i++)
            ((uint16_t *)data)[m->count + i] = (uint16_t)tokens[i];
    else
        memcpy((uint32_t *)data + m->count, tokens, (size_t)count * sizeof *tokens);
    m->count += count;
    return QD_OK;
}

static qd_status add_text_in_memory(const qd_encode_job *job, const char *path, qd_token_source *s)
{
    memory_sink m = {.token_bytes = job->encoder->vocab <= 256 ? 1 : qd_shard_token_bytes(job->encoder->vocab)};
    qd_token_sink sink = {.context = &m, .document = memory_document, .append = memory_append};
    qd_tokenize_progress total;
    qd_status status = qd_encode_files(job, &sink, &total);
    if (status == QD_OK && m.count == 0)
        status = QD_FAIL(QD_USAGE, "%s: the text yields no tokens", path);
    if (status != QD_OK) {
        free(m.tokens);
        free(m.documents);
        return status;
    }
    return add_part(s, path,
                    (qd_token_part){
                        .tokens = m.tokens,
                        .token_bytes = m.token_bytes,
                        .count = m.count,
                        .documents = m.documents,
                        .document_count = m.document_count,
                    });
}

static qd_status hash_file(XXH3_state_t *hash, const char *path, char *buffer)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "%s: cannot be opened: %s", path, strerror(errno));
    ssize_t got;
    int64_t bytes = 0;
    while ((got = read(fd, buffer, HASH_BUFFER)) > 0 || (got < 0 && errno == EINTR)) {
        if (got < 0)
            continue;
        XXH3_128bits_update(hash, buffer, (size_t)got);
        bytes += got;
    }
    qd_status status = got == 0 ? QD_OK : QD_FAIL(QD_IO, "%s: cannot be read: %s", path, strerror(errno));
    close(fd);
    /* Hash the length of each file too, so that text that moves from one file to the next changes
     * the key. */
    XXH3_128bits_update(hash, &bytes, sizeof bytes);
    return status;
}

static void hash_text(XXH3_state_t *hash, const char *text)
{
    XXH3_128bits_update(hash, text ? text : "", text ? strlen(text) + 1 : 1);
}

/* Name of the cache folder for this text and encoder: 32 hexadecimal digits of a hash of everything
 * that determines the tokens. */
static qd_status cache_key(const qd_encode_job *job, char key[40])
{
    XXH3_state_t *hash = XXH3_createState();
    char *buffer = malloc(HASH_BUFFER);
    qd_status status = hash && buffer ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to look for tokens in the cache");
    if (status == QD_OK) {
        const qd_text_encoder *e = job->encoder;
        uint64_t figures[] = {1, e->hash, (uint64_t)e->vocab, (uint64_t)(int64_t)e->document_end};
        XXH3_128bits_reset(hash);
        XXH3_128bits_update(hash, figures, sizeof figures);
        if (e->rules)
            XXH3_128bits_update(hash, &e->rules, sizeof e->rules);
        hash_text(hash, job->documents.separator);
        hash_text(hash, job->documents.field);
    }
    for (int64_t i = 0; status == QD_OK && i < job->files->count; i++) {
        int32_t kind = (int32_t)job->files->items[i].kind;
        XXH3_128bits_update(hash, &kind, sizeof kind);
        status = hash_file(hash, job->files->items[i].path, buffer);
    }
    if (status == QD_OK) {
        XXH128_hash_t value = XXH3_128bits_digest(hash);
        snprintf(key, 40, "%016" PRIx64 "%016" PRIx64, (uint64_t)value.high64, (uint64_t)value.low64);
    }
    XXH3_freeState(hash);
    free(buffer);
    return status;
}

/* One of the ranks and runs that need this folder creates it; the others wait for the lock and find
 * it complete. */
static qd_status make_cached(const qd_encode_job *job, const char *folder)
{
    qd_tokenize_report report;
    struct stat info;
    /* The folder gets its name only when complete, so an existing one can be used even if the cache
     * is read-only. */
    if (stat(folder, &info) == 0)
        return QD_OK;
    char *lock_path = qd_path_with(folder, ".lock");
    if (!lock_path)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to create it", folder);
    qd_status status = QD_OK;
    int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    int locked = -1;
    while (lock >= 0 && (locked = flock(lock, LOCK_EX)) != 0 && errno == EINTR)
        ;
    if (locked != 0)
        status = QD_FAIL(QD_IO, "%s: cannot be locked: %s", lock_path, strerror(errno));
    else if (stat(folder, &info) != 0)
        status = qd_encode_to_folder(job, folder, cache_shard_tokens, &report);
    if (lock >= 0)
        close(lock);
    free(lock_path);
    return status;
}

static qd_status add_text_cached(const qd_data_options *o, const qd_encode_job *job, qd_data *d, qd_token_source *s)
{
    char key[40];
    QD_TRY(cache_key(job, key));
    QD_TRY(qd_folder_make(o->cache));
    char *folder = qd_path_join(o->cache, key);
    if (!folder)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to open it", o->cache);
    qd_status status = make_cached(job, folder);
    if (status == QD_OK) {
        status = add_shard_folder(o, folder, d, s);
        if (status == QD_CORRUPT)
            qd_error_prefix(status, "cached tokens of an earlier run (remove %s to recreate them): ", folder);
    }
    free(folder);
    return status;
}

/* A file whose bytes are the tokens needs no copy. */
static qd_status add_bytes(const char *path, qd_token_source *s)
{
    qd_stored *text;
    QD_TRY(qd_stored_open(path, &text));
    return add_part(s, path, (qd_token_part){.token_bytes = 1, .count = qd_stored_bytes(text), .document_count = 1, .text = text});
}

static qd_status add_text(const qd_data_options *o, const char *path, const qd_file_list *files, qd_data *d,
                          qd_token_source *s)
{
    const qd_text_encoder bytes = qd_text_encoder_bytes();
    const qd_text_encoder *encoder = o->encoder ? o->encoder : &bytes;
    if (!o->encoder && o->vocab != bytes.vocab)
        return QD_FAIL(QD_USAGE,
                       "%s is text, and model.vocab is %lld: set data.tokenizer, or model.vocab=256 to train on bytes",
                       path, (long long)o->vocab);
    QD_TRY(qd_text_encoder_check(encoder));
    if (!o->any_bytes)
        QD_TRY(qd_file_list_check_text(files));
    QD_TRY(agree_on_tokenizer(d, encoder->hash, o->encoder ? encoder_name(o) : path));
    const bool separated = o->documents.separator && o->documents.separator[0] != '\0';
    if (!o->encoder && files->count == 1 && files->items[0].kind == QD_FILE_TEXT && !separated)
        return add_bytes(files->items[0].path, s);
    qd_encode_job job = {
        .files = files,
        .encoder = encoder,
        .documents = o->documents,
        .threads = o->threads,
        .progress = o->progress,
        .progress_context = o->progress_context,
    };
    if (o->cache && o->cache[0] != '\0')
        return add_text_cached(o, &job, d, s);
    return add_text_in_memory(&job, path, s);
}

/* Moves the examples of some files into a part, and what counts of them into the source. */
static qd_status keep_examples(const char *path, qd_examples *x, qd_token_source *s)
{
    uint8_t *counted = realloc(s->counted, (size_t)(s->tokens + x->token_count));
    s->counted = counted ? counted : s->counted;
    int64_t *begins = realloc(s->examples, (size_t)(s->documents + x->count + 1) * sizeof *begins);
    s->examples = begins ? begins : s->examples;
    uint64_t *documents = malloc((size_t)x->count * sizeof *documents);
    if (!counted || !begins || !documents) {
        free(documents);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %lld examples", path, (long long)x->count);
    }
    memcpy(counted + s->tokens, x->counted, (size_t)x->token_count);
    for (int64_t i = 0; i < x->count; i++) {
        documents[i] = (uint64_t)x->first[i];
        begins[s->documents + i] = s->tokens + x->first[i];
    }
    begins[s->documents + x->count] = s->tokens + x->token_count;
    s->cut_examples += x->cut;
    s->skipped_examples += x->skipped;
    qd_token_part part = {.tokens = x->tokens,
                          .token_bytes = 4,
                          .count = x->token_count,
                          .documents = documents,
                          .document_count = x->count};
    x->tokens = NULL;
    return add_part(s, path, part);
}

static qd_status add_examples(const qd_data_options *o, const char *path, const qd_file_list *files, qd_data *d, qd_token_source *s)
{
    const qd_text_encoder bytes = qd_text_encoder_bytes();
    qd_examples_job job = {
        .files = files,
        .encoder = o->encoder ? o->encoder : &bytes,
        .most = o->seq + 1,
        .pairs = o->pairs,
        .overlong = o->overlong,
        .threads = o->threads,
        .progress = o->progress,
        .progress_context = o->progress_context,
    };
    qd_examples examples;
    if (!o->encoder && o->vocab != bytes.vocab)
        return QD_FAIL(QD_USAGE, "%s: examples, and model.vocab is %lld: set data.tokenizer, or model.vocab=256 to train on bytes", path,
                       (long long)o->vocab);
    QD_TRY(qd_text_encoder_check(job.encoder));
    QD_TRY(agree_on_tokenizer(d, job.encoder->hash, o->encoder ? encoder_name(o) : path));
    qd_chat *chat = NULL;
    char *no_chat = NULL;
    struct stat info;
    qd_status status = o->chat_template && o->chat_template[0] != '\0' ? qd_chat_load(o->chat_template, &chat) : QD_OK;
    bool file = status != QD_OK && stat(o->chat_template, &info) == 0 && !S_ISDIR(info.st_mode);
    if (!file && (status == QD_USAGE || status == QD_UNSUPPORTED)) { /* prompts with completions do not need a template */
        no_chat = strdup(qd_error_message());
        qd_error_clear();
        status = no_chat ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", path);
    }
    job.chat = chat;
    job.no_chat = no_chat;
    if (status == QD_OK)
        status = qd_examples_read(&job, &examples);
    qd_chat_destroy(chat);
    free(no_chat);
    QD_TRY(status);
    if (examples.count == 0)
        status = QD_FAIL(QD_USAGE, "%s: no example can be used: %lld were skipped, because they are longer than data.seq + 1 = %lld "
                                   "tokens, or nothing of their completion counts", path, (long long)examples.skipped, (long long)job.most);
    else
        status = keep_examples(path, &examples, s);
    qd_examples_free(&examples);
    return status;
}

qd_status qd_token_source_add(const qd_data_options *o, const char *path, qd_data *d, qd_token_source *s)
{
    qd_file_list files = {0};
    qd_status status = qd_file_list_add(&files, path);
    if (status == QD_OK && o->encoder)
        status = agree_on_tokenizer(d, o->encoder->hash, encoder_name(o));
    if (status == QD_OK) {
        s->files += files.count;
        s->skipped += files.skipped;
        if (o->examples)
            status = add_examples(o, path, &files, d, s);
        else if (files.items[0].kind != QD_FILE_SHARD)
            status = add_text(o, path, &files, d, s);
        else if (strcmp(files.items[0].path, path) != 0) /* a folder, not one of its shards */
            status = check_numbers(&files);
        if (!o->examples && files.items[0].kind == QD_FILE_SHARD)
            for (int64_t i = 0; status == QD_OK && i < files.count; i++)
                status = add_shard(o, files.items[i].path, d, s);
    }
    qd_file_list_free(&files);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "data.path: ");
}
