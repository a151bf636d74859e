/* Finds, loads or trains the tokenizer of a run, tokenizes its text, and opens the data set. */
#include "train/run/run_corpus.h"

#include "base/text/strbuf.h"
#include "data/chat/chat.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

typedef char file_path[PATH_MAX];

static qd_status join(const char *folder, const char *name, file_path path)
{
    int n = snprintf(path, sizeof(file_path), "%s/%s", folder, name);
    return n > 0 && n < PATH_MAX ? QD_OK : QD_FAIL(QD_USAGE, "run.dir is too long: %.64s…", folder);
}

static bool training_progress(void *context, const char *phase, int64_t done, int64_t total)
{
    (void)phase;
    const qd_run_corpus_progress *p = context;
    return !p || !p->report || p->report(p->context, "tokenizer", done, total);
}

static qd_status train_tokenizer(const qd_config *c, const qd_file_list *files, const qd_run_corpus_progress *progress,
                                 const char *path)
{
    const char **paths = calloc((size_t)files->count, sizeof *paths);
    if (!paths)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the list of texts");
    for (int64_t i = 0; i < files->count; i++)
        paths[i] = files->items[i].path;
    qd_tokenizer_training t = qd_tokenizer_training_for_run((int32_t)c->model.vocab);
    t.paths = paths;
    t.path_count = (size_t)files->count;
    if (c->data.field[0])
        t.field = c->data.field;
    t.separator = c->data.separator;
    t.progress = training_progress;
    t.progress_context = (void *)(uintptr_t)progress;
    qd_tokenizer *tokenizer = NULL;
    qd_status status = qd_tokenizer_train(&t, &tokenizer);
    if (status == QD_OK)
        status = qd_tokenizer_save(tokenizer, path);
    qd_tokenizer_destroy(tokenizer);
    free(paths);
    return status;
}

/* Identifies what a run's own tokenizer was trained on: the number of entries and a hash of the
 * text, of the member of its JSON lines that is used, and of the line that separates documents, if
 * any. The file also has a hash of the resulting tokenizer. */
enum { KEY_BYTES = 64 };
static qd_status training_key(const qd_config *c, const qd_file_list *files, char key[KEY_BYTES])
{
    uint64_t hash = XXH3_64bits_withSeed(c->data.field, strlen(c->data.field), (XXH64_hash_t)c->model.vocab);
    if (c->data.separator[0])
        hash = XXH3_64bits_withSeed(c->data.separator, strlen(c->data.separator), hash);
    for (int64_t i = 0; i < files->count; i++) {
        QD_TRY(qd_file_hash(files->items[i].path, hash, &hash));
    }
    snprintf(key, KEY_BYTES, "%lld %016llx", (long long)c->model.vocab, (unsigned long long)hash);
    return QD_OK;
}

static qd_status complete_key(char key[KEY_BYTES], const char *tokenizer)
{
    uint64_t hash;
    size_t length = strlen(key);
    QD_TRY(qd_file_hash(tokenizer, 0, &hash));
    snprintf(key + length, KEY_BYTES - length, " %016llx\n", (unsigned long long)hash);
    return QD_OK;
}

/* An existing tokenizer is valid if it was trained on the same text and has not changed since. */
static qd_status is_up_to_date(const char *path, const char *key_path, const char *key, bool *good)
{
    struct stat info;
    char *text = NULL, whole[KEY_BYTES];
    size_t length = 0;
    *good = false;
    if (stat(path, &info) != 0 || stat(key_path, &info) != 0)
        return QD_OK;
    snprintf(whole, sizeof whole, "%s", key);
    QD_TRY(complete_key(whole, path));
    QD_TRY(qd_file_read(key_path, 4096, &text, &length));
    *good = strcmp(text, whole) == 0;
    free(text);
    return QD_OK;
}

/* Under the lock. The key is written last: without it, the tokenizer is not trusted. A run that
 * will be replaced keeps its tokenizer until then: the new run's is stored under another name. */
static qd_status ensure_tokenizer(const qd_config *c, const qd_file_list *files, const qd_run_corpus_progress *progress, file_path path)
{
    file_path key_path, metrics;
    char key[KEY_BYTES];
    struct stat info;
    bool good = false;
    QD_TRY(training_key(c, files, key));
    QD_TRY(join(c->run_dir, "metrics.jsonl", metrics));
    for (int waits = 0; waits < (stat(metrics, &info) == 0 ? 2 : 1) && !good; waits++) {
        QD_TRY(join(c->run_dir, waits ? QD_RUN_NEW_TOKENIZER : "tokenizer.json", path));
        QD_TRY(join(c->run_dir, waits ? QD_RUN_NEW_TOKENIZER_KEY : "tokenizer.key", key_path));
        QD_TRY(is_up_to_date(path, key_path, key, &good));
    }
    if (good)
        return QD_OK;
    unlink(key_path);
    QD_TRY(train_tokenizer(c, files, progress, path));
    QD_TRY(complete_key(key, path));
    return qd_file_replace(key_path, key, strlen(key));
}

/* run.dir/tokenizer.json, trained if it does not exist. The folder itself is locked, so that no
 * lock file is left behind. */
static qd_status own_tokenizer(const qd_config *c, const qd_file_list *files, const qd_run_corpus_progress *progress,
                               qd_tokenizer **tokenizer)
{
    file_path path;
    if (c->model.vocab < 257)
        return QD_FAIL(QD_USAGE, "model.vocab is %lld: bytes need 256 entries, a tokenizer more than 256",
                       (long long)c->model.vocab);
    if (c->run_dir[0] == '\0')
        return QD_FAIL(QD_USAGE, "model.vocab is %lld and the data is text: set data.tokenizer, or set run.dir, in which a tokenizer "
                                 "that is trained now can be stored", (long long)c->model.vocab);
    QD_TRY(join(c->run_dir, "tokenizer.json", path));
    if (c->resume) /* a newly trained tokenizer would change the meaning of the tokens that the weights were trained on */
        return QD_FAIL(QD_USAGE, "run.resume: there is no %s, and the data is text: set data.tokenizer to the tokenizer that the run "
                                 "was trained with", path);
    QD_TRY(qd_folder_make(c->run_dir));
    int lock = open(c->run_dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0 || flock(lock, LOCK_EX) != 0) {
        qd_status status = QD_FAIL(QD_IO, "%s: cannot be locked: %s", c->run_dir, strerror(errno));
        if (lock >= 0)
            close(lock);
        return status;
    }
    qd_status status = ensure_tokenizer(c, files, progress, path);
    close(lock);
    return status == QD_OK ? qd_tokenizer_load(path, NULL, tokenizer) : status;
}

static qd_status check_vocabulary(const qd_config *c, const qd_tokenizer *tokenizer)
{
    if (qd_tokenizer_size(tokenizer) <= c->model.vocab)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "the tokenizer has %d entries, model.vocab is %lld: raise it to %d", qd_tokenizer_size(tokenizer),
                   (long long)c->model.vocab, qd_tokenizer_size(tokenizer));
}

/* How text becomes tokens. */
typedef struct choice {
    const qd_text_encoder *encoder; /* NULL: its bytes are the tokens, or there is no text */
    file_path name;                 /* of the tokenizer's file; "": data.tokenizer */
} choice;

static qd_status use_tokenizer(const qd_config *c, qd_run_corpus *corpus, choice *chosen)
{
    QD_TRY(check_vocabulary(c, corpus->tokenizer));
    corpus->encoder = qd_text_encoder_default();
    qd_special_policy special;
    QD_TRY(qd_special_policy_parse(c->data.special, &special));
    QD_TRY(qd_text_encoder_create(corpus->tokenizer, NULL, &corpus->encoder));
    qd_text_encoder_set_special(&corpus->encoder, special);
    chosen->encoder = &corpus->encoder;
    return QD_OK;
}

/* A resumed run uses the tokenizer that it stored: the file that data.tokenizer names may have
 * changed since, or be gone. */
static qd_status find_kept(const qd_config *c, file_path path, bool *found)
{
    struct stat info;
    *found = false;
    if (!c->resume || c->run_dir[0] == '\0')
        return QD_OK;
    QD_TRY(join(c->run_dir, "tokenizer.json", path));
    *found = stat(path, &info) == 0;
    return *found || errno == ENOENT ? QD_OK : QD_FAIL(QD_IO, "%s: %s", path, strerror(errno));
}

bool qd_run_corpus_is_bytes(const qd_config *c)
{
    return strcmp(c->data.tokenizer, "bytes") == 0 || (c->data.tokenizer[0] == '\0' && c->model.vocab == 256);
}

qd_status qd_run_corpus_tokenizer_hash(const char *tokenizer, uint64_t *hash)
{
    qd_tokenizer *loaded = NULL;
    qd_text_encoder encoder = qd_text_encoder_bytes();
    *hash = encoder.hash;
    if (strcmp(tokenizer, "bytes") == 0)
        return QD_OK;
    QD_TRY(qd_tokenizer_load(tokenizer, NULL, &loaded));
    qd_status status = qd_text_encoder_create(loaded, NULL, &encoder);
    *hash = encoder.hash;
    qd_text_encoder_destroy(&encoder);
    qd_tokenizer_destroy(loaded);
    return status;
}

/* data.tokenizer must not name another tokenizer than the run has stored. A missing file is
 * ignored. */
static qd_status check_named(const char *named, const char *kept, uint64_t hash)
{
    struct stat info;
    uint64_t other;
    if (named[0] == '\0' || (strcmp(named, "bytes") != 0 && stat(named, &info) != 0))
        return QD_OK;
    QD_TRY(qd_run_corpus_tokenizer_hash(named, &other));
    if (other == hash)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "run.resume: data.tokenizer is %s (%016llx), but the run was trained with %s (%016llx): data.tokenizer=%s "
                             "resumes it, another tokenizer needs another run", named, (unsigned long long)other, kept,
                   (unsigned long long)hash, kept);
}

static qd_status choose_encoder(const qd_config *c, const qd_file_list *files, const qd_run_corpus_progress *progress,
                                qd_run_corpus *corpus, choice *chosen)
{
    bool bytes = qd_run_corpus_is_bytes(c), kept;
    *chosen = (choice){0};
    QD_TRY(find_kept(c, chosen->name, &kept));
    if (kept) {
        QD_TRY(qd_tokenizer_load(chosen->name, NULL, &corpus->tokenizer));
        QD_TRY(use_tokenizer(c, corpus, chosen));
        return check_named(c->data.tokenizer, chosen->name, corpus->encoder.hash);
    }
    chosen->name[0] = '\0';
    if (bytes && c->model.vocab < 256)
        return QD_FAIL(QD_USAGE, "model.vocab is %lld, but the tokens are bytes: it must be at least 256", (long long)c->model.vocab);
    if (bytes) {
        corpus->encoder = qd_text_encoder_bytes();
        chosen->encoder = c->model.vocab == 256 ? NULL : &corpus->encoder;
        return QD_OK;
    }
    if (c->data.tokenizer[0] != '\0')
        QD_TRY(qd_tokenizer_load(c->data.tokenizer, NULL, &corpus->tokenizer));
    else if (c->data.examples)
        return QD_FAIL(QD_USAGE, "data.format=%s: set data.tokenizer; a tokenizer is trained on plain text only",
                       c->data.pairs ? "preferences" : "examples");
    else if (files->count > 0)
        QD_TRY(own_tokenizer(c, files, progress, &corpus->tokenizer));
    else
        return QD_OK;
    return use_tokenizer(c, corpus, chosen);
}

static bool encoding_progress(void *context, const qd_tokenize_progress *progress)
{
    const qd_run_corpus_progress *p = context;
    return !p || !p->report || p->report(p->context, "tokens", progress->bytes, progress->bytes_total);
}

/* data.chat_template, or that of data.tokenizer; "": none. */
static qd_status find_template(const qd_config *c, file_path template)
{
    const char *tokenizer = c->data.tokenizer;
    if (c->data.chat_template[0] != '\0' && access(c->data.chat_template, R_OK) != 0)
        return QD_FAIL(QD_USAGE, "data.chat_template: %s: %s", c->data.chat_template, strerror(errno));
    if (c->data.chat_template[0] != '\0' || tokenizer[0] == '\0')
        snprintf(template, sizeof(file_path), "%s", c->data.chat_template);
    else
        qd_chat_find(tokenizer, template);
    return QD_OK;
}

static qd_status open_data(const qd_config *c, const choice *chosen, const qd_run_corpus_progress *progress, qd_data **data)
{
    file_path cache = "";
    if (c->data.cache[0] != '\0')
        snprintf(cache, sizeof cache, "%s", c->data.cache);
    else if (c->run_dir[0] != '\0')
        QD_TRY(join(c->run_dir, "tokens", cache));
    file_path template;
    QD_TRY(find_template(c, template));
    qd_data_options o = qd_data_options_default();
    o.path = c->data.path;
    o.seq = c->strategy.seq;
    o.vocab = c->model.vocab;
    o.seed = c->seed;
    o.encoder = chosen->encoder;
    o.any_bytes = strcmp(c->data.tokenizer, "bytes") == 0;
    o.encoder_name = chosen->name[0] != '\0' ? chosen->name : NULL;
    o.documents = (qd_document_rule){.separator = c->data.separator, .field = c->data.field};
    o.cache = cache;
    o.validation = c->data.validation;
    o.document_mask = c->data.document_mask;
    o.examples = c->data.examples;
    o.pairs = c->data.pairs;
    o.unpacked = c->model.position == QD_POSITION_LEARNED;
    o.overlong = (qd_overlong)c->data.overlong;
    o.chat_template = template;
    o.verify = c->data.verify;
    o.progress = encoding_progress;
    o.progress_context = (void *)(uintptr_t)progress;
    return qd_data_open(&o, data);
}

qd_status qd_run_corpus_open(const qd_config *c, const qd_run_corpus_progress *progress, qd_run_corpus *corpus)
{
    memset(corpus, 0, sizeof *corpus);
    if (c->data.path[0] == '\0')
        return QD_FAIL(QD_USAGE, "data.path is not set: name the file to train on, for example data.path=corpus.txt");
    qd_file_list files;
    choice chosen;
    QD_TRY(qd_data_text_files(c->data.path, &files));
    qd_status status = choose_encoder(c, &files, progress, corpus, &chosen);
    if (status == QD_OK)
        status = open_data(c, &chosen, progress, &corpus->data);
    qd_file_list_free(&files);
    if (status != QD_OK)
        qd_run_corpus_close(corpus);
    return status;
}

qd_status qd_run_corpus_open_evaluation(const qd_config *config, const qd_run_corpus *corpus, const qd_run_corpus_progress *progress,
                                        qd_data **data)
{
    qd_config c = *config;
    *data = NULL;
    if (c.evaluation.path[0] == '\0')
        return QD_OK;
    c.data.path = c.evaluation.path;
    c.data.validation = 0.0;
    c.strategy.seq = 1; /* a text shorter than a window is evaluated too */
    bool encoded = corpus->tokenizer || (qd_run_corpus_is_bytes(config) && config->model.vocab != 256);
    qd_status status = open_data(&c, &(choice){.encoder = encoded ? &corpus->encoder : NULL}, progress, data);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "data.eval_path: ");
}

void qd_run_corpus_close(qd_run_corpus *corpus)
{
    qd_data_close(corpus->data);
    if (corpus->tokenizer)
        qd_text_encoder_destroy(&corpus->encoder);
    qd_tokenizer_destroy(corpus->tokenizer);
    memset(corpus, 0, sizeof *corpus);
}
