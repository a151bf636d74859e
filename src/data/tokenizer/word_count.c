/* Counts words of text files in parallel: each thread counts chunks, then the tables are merged. */
#include "data/tokenizer/word_count.h"

#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "data/tokenizer/split/unicode.h"

#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CHUNK = 1 << 20 };

void qd_word_counts_free(qd_word_counts *counts)
{
    free(counts->slots);
    free(counts->bytes);
    *counts = (qd_word_counts){0};
}

static qd_status enlarge(qd_word_counts *counts)
{
    size_t slot_count = counts->slot_count ? counts->slot_count * 2 : 1 << 14;
    qd_word_entry *larger = calloc(slot_count, sizeof *larger);
    if (!larger)
        return QD_FAIL(QD_NO_MEMORY, "no memory to count %zu different words", slot_count / 2);
    for (size_t i = 0; i < counts->slot_count; i++) {
        if (counts->slots[i].length == 0)
            continue;
        size_t slot = counts->slots[i].hash & (slot_count - 1);
        while (larger[slot].length)
            slot = (slot + 1) & (slot_count - 1);
        larger[slot] = counts->slots[i];
    }
    free(counts->slots);
    counts->slots = larger;
    counts->slot_count = slot_count;
    return QD_OK;
}

static qd_status add_word(qd_word_counts *counts, const uint8_t *word, size_t length, uint64_t hash, int64_t times)
{
    if (counts->used * 4 >= counts->slot_count * 3)
        QD_TRY(enlarge(counts));
    size_t slot = hash & (counts->slot_count - 1);
    for (; counts->slots[slot].length; slot = (slot + 1) & (counts->slot_count - 1)) {
        qd_word_entry *entry = &counts->slots[slot];
        if (entry->hash == hash && entry->length == length && memcmp(counts->bytes + entry->offset, word, length) == 0) {
            entry->count += times;
            return QD_OK;
        }
    }
    if (counts->bytes_capacity - counts->bytes_used < length) {
        size_t capacity = counts->bytes_capacity * 2 + length + 65536;
        uint8_t *larger = realloc(counts->bytes, capacity);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory to count words");
        counts->bytes = larger;
        counts->bytes_capacity = capacity;
    }
    memcpy(counts->bytes + counts->bytes_used, word, length);
    counts->slots[slot] = (qd_word_entry){hash, counts->bytes_used, (uint32_t)length, times};
    counts->bytes_used += length;
    counts->used++;
    return QD_OK;
}

/* State of one thread. */
typedef struct counter {
    qd_word_counts counts;
    qd_regex_state *regex;
    uint8_t *buffer;
    size_t capacity;
    qd_strbuf replaced;
} counter;

typedef struct count_job {
    const qd_file_list *files;
    const qd_tokenizer *cutter;
    const qd_tokenizer_training *training;
    const int64_t *first_chunk; /* (files + 1) */
    counter *counters;
    int64_t bytes_done; /* as seen by thread 0, for progress */
    pthread_mutex_t mutex;
    qd_status status;
    char message[512];
} count_job;

static qd_status cut(const qd_tokenizer *cutter, counter *own, int stage, const uint8_t *text, size_t length);

typedef struct cut_call {
    const qd_tokenizer *cutter;
    counter *own;
    int stage;
    const uint8_t *text;
} cut_call;

static qd_status cut_emit(void *context, size_t offset, size_t length, bool matched)
{
    (void)matched;
    const cut_call *call = context;
    return cut(call->cutter, call->own, call->stage + 1, call->text + offset, length);
}

static qd_status cut(const qd_tokenizer *cutter, counter *own, int stage, const uint8_t *text, size_t length)
{
    if (stage == cutter->stage_count) {
        if (length >= UINT32_MAX)
            return QD_FAIL(QD_USAGE, "a word of more than 4 GiB");
        return add_word(&own->counts, text, length, XXH3_64bits(text, length), 1);
    }
    const qd_stage *now = &cutter->stages[stage];
    if (now->pattern == QD_PATTERN_CUSTOM) {
        cut_call call = {cutter, own, stage, text};
        return qd_regex_split(now->regex, own->regex, text, length, cut_emit, &call);
    }
    const uint8_t *end = text + length;
    for (const uint8_t *at = text, *next; at < end; at = next) {
        next = qd_pattern_next(now->pattern, at, end);
        QD_TRY(cut(cutter, own, stage + 1, at, (size_t)(next - at)));
    }
    return QD_OK;
}

static qd_status count_text(const count_job *job, counter *own, const uint8_t *text, size_t length)
{
    if (job->training->broken == QD_BROKEN_REPLACE && qd_utf8_valid((const char *)text, length) != length) {
        qd_utf8_replace(text, length, &own->replaced);
        if (own->replaced.failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory to count words");
        text = (const uint8_t *)own->replaced.data;
        length = own->replaced.length;
    }
    return cut(job->cutter, own, 0, text, length);
}

static qd_status count_lines(const count_job *job, counter *own, const uint8_t *text, size_t length)
{
    for (const uint8_t *at = text, *end = text + length; at < end;) {
        const uint8_t *newline = memchr(at, '\n', (size_t)(end - at));
        const uint8_t *next = newline ? newline + 1 : end;
        QD_TRY(count_text(job, own, at, (size_t)(next - at)));
        at = next;
    }
    return QD_OK;
}

/* Counts the text between lines that equal the separator. Parts begin with a line. */
static qd_status count_separated(const count_job *job, counter *own, bool by_line, const uint8_t *text, size_t length)
{
    qd_status (*count)(const count_job *, counter *, const uint8_t *, size_t) = by_line ? count_lines : count_text;
    const char *separator = job->training->separator;
    size_t from = 0, inner;
    for (size_t at = 0, whole; separator && separator[0] && at < length; at += whole) {
        whole = qd_line_length((const char *)text + at, length - at, &inner);
        if (inner == strlen(separator) && memcmp(text + at, separator, inner) == 0) {
            QD_TRY(count(job, own, text + from, at - from));
            from = at + whole;
        }
    }
    return count(job, own, text + from, length - from);
}

/* Lines of a .jsonl file from byte `place` on: counts the texts that would be encoded, without the
 * surrounding JSON. */
static qd_status count_documents(const count_job *job, counter *own, const char *path, int64_t place, const uint8_t *text,
                                 size_t length)
{
    qd_status status = QD_OK;
    const uint8_t *at = text + (place == 0 ? qd_byte_order_mark(text, length) : 0), *end = text + length;
    while (status == QD_OK && at < end) {
        const uint8_t *newline = memchr(at, '\n', (size_t)(end - at)), *stop = newline ? newline : end;
        const uint8_t *line = at;
        at = newline ? newline + 1 : end;
        while (line < stop && (*line == ' ' || *line == '\t' || *line == '\r'))
            line++;
        if (line == stop)
            continue;
        char name[PATH_MAX + 64];
        qd_json *document;
        const char *value;
        size_t bytes;
        snprintf(name, sizeof name, "%s (the line at byte %lld)", path, (long long)(place + (line - text)));
        QD_TRY(qd_json_load_collected(name, (const char *)line, (size_t)(stop - line), &document));
        status = qd_json_get_bytes(document, qd_json_root(document), job->training->field, &value, &bytes);
        if (status == QD_OK)
            status = count_text(job, own, (const uint8_t *)value, bytes);
        qd_json_destroy(document);
    }
    return status;
}

/* Appends [begin, end) of a file to the first `used` bytes of the buffer. */
static qd_status read_range(counter *own, int fd, const char *path, size_t used, int64_t begin, int64_t end)
{
    size_t length = (size_t)(end - begin);
    if (own->capacity < used + length) {
        size_t capacity = (used + length) * 3 / 2;
        uint8_t *larger = realloc(own->buffer, capacity);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory to read %zu bytes of %s", capacity, path);
        own->buffer = larger;
        own->capacity = capacity;
    }
    for (size_t got = 0; got < length;) {
        ssize_t part = pread(fd, own->buffer + used + got, length - got, begin + (int64_t)got);
        if (part < 0 && errno == EINTR)
            continue;
        if (part <= 0)
            return QD_FAIL(QD_IO, "%s: %s", path, part < 0 ? strerror(errno) : "the file was truncated while it was read");
        got += (size_t)part;
    }
    return QD_OK;
}

/* First position in the buffer, from `from` on, where a part may begin: after a line end, or, for
 * whole files, where the pattern always splits. -1: none. */
static int64_t part_start(const count_job *job, const counter *own, bool by_line, size_t from, size_t length)
{
    if (by_line) {
        const uint8_t *newline = memchr(own->buffer + from, '\n', length - from);
        return newline ? newline - own->buffer + 1 : -1;
    }
    for (size_t at = from + 2; at < length; at++) {
        const uint8_t *newline = memchr(own->buffer + at - 1, '\n', length - at);
        if (!newline)
            return -1;
        at = (size_t)(newline - own->buffer) + 1;
        if (qd_tokenizer_cut(job->cutter, (const char *)own->buffer + at - 2, 2) == 2)
            return (int64_t)at;
    }
    return -1;
}

/* Counts the parts that begin in chunk `chunk` of a file: each part belongs to the chunk with its
 * first byte. A file without such positions is one part of its first chunk. */
static qd_status count_chunk(const count_job *job, counter *own, const qd_file *file, int64_t chunk)
{
    /* Two bytes earlier, to see what precedes the first position. */
    int64_t begin = chunk * CHUNK, end = begin + CHUNK, start = begin >= 2 ? begin - 2 : 0;
    const bool objects = file->kind == QD_FILE_LINES && job->training->field;
    const bool by_line = objects || !job->training->whole_files;
    int fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return QD_FAIL(QD_USAGE, "cannot open %s: %s", file->path, strerror(errno));
    qd_status status = QD_OK;
    int64_t read_end = end + 2 < file->bytes ? end + 2 : file->bytes, first = 0, stop;
    QD_TRY_DONE(read_range(own, fd, file->path, 0, start, read_end));
    /* By lines, a part may begin exactly at `begin` if the previous byte is a line end. */
    size_t from = by_line && begin > start ? (size_t)(begin - start) - 1 : 0;
    if (begin > 0)
        first = part_start(job, own, by_line, from, (size_t)(read_end - start));
    if (first < 0 || start + first >= end)
        goto done;
    from = (size_t)(end - start) - (by_line ? 1 : 2);
    for (int64_t step = CHUNK;; step *= 2) {
        size_t length = (size_t)(read_end - start);
        stop = from < length ? part_start(job, own, by_line, from, length) : -1;
        if (stop >= 0 || read_end == file->bytes)
            break;
        from = length - 2;
        int64_t more = read_end + step < file->bytes ? read_end + step : file->bytes;
        QD_TRY_DONE(read_range(own, fd, file->path, length, read_end, more));
        read_end = more;
    }
    if (stop < 0)
        stop = read_end - start;
    status = objects ? count_documents(job, own, file->path, start + first, own->buffer + first, (size_t)(stop - first))
                     : count_separated(job, own, by_line, own->buffer + first, (size_t)(stop - first));
done:
    close(fd);
    return status;
}

static void count_body(void *context, int64_t begin, int64_t end, int thread)
{
    count_job *job = context;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t low = 0, high = job->files->count - 1; /* the file is in [low, high] */
        while (low < high) {
            int64_t middle = (low + high + 1) / 2;
            if (job->first_chunk[middle] <= chunk)
                low = middle;
            else
                high = middle - 1;
        }
        pthread_mutex_lock(&job->mutex);
        bool failed = job->status != QD_OK;
        pthread_mutex_unlock(&job->mutex);
        if (failed)
            return;
        qd_status status = count_chunk(job, &job->counters[thread], &job->files->items[low], chunk - job->first_chunk[low]);
        pthread_mutex_lock(&job->mutex);
        if (status != QD_OK && job->status == QD_OK) {
            job->status = status;
            strncpy(job->message, qd_error_message(), sizeof job->message - 1);
        }
        job->bytes_done += CHUNK;
        int64_t done = job->bytes_done;
        pthread_mutex_unlock(&job->mutex);
        if (thread != 0 || !job->training->progress ||
            job->training->progress(job->training->progress_context, "reading", done < job->files->bytes ? done : job->files->bytes,
                                    job->files->bytes))
            continue;
        pthread_mutex_lock(&job->mutex);
        if (job->status == QD_OK) {
            job->status = QD_INTERRUPTED;
            strcpy(job->message, "interrupted");
        }
        pthread_mutex_unlock(&job->mutex);
    }
}

static qd_status add_all(qd_word_counts *to, const qd_word_counts *from)
{
    for (size_t i = 0; i < from->slot_count; i++) {
        const qd_word_entry *entry = &from->slots[i];
        if (entry->length)
            QD_TRY(add_word(to, from->bytes + entry->offset, entry->length, entry->hash, entry->count));
    }
    return QD_OK;
}

qd_status qd_word_count(const qd_file_list *files, const qd_tokenizer *cutter, const qd_tokenizer_training *training,
                        qd_pool *pool, qd_word_counts *counts)
{
    qd_status status = QD_OK;
    int threads = qd_pool_threads(pool);
    int64_t *first_chunk = calloc((size_t)files->count + 1, sizeof *first_chunk);
    counter *counters = calloc((size_t)threads, sizeof *counters);
    count_job job = {files, cutter, training, first_chunk, counters, 0, PTHREAD_MUTEX_INITIALIZER, QD_OK, ""};
    if (!first_chunk || !counters) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory to count words");
        goto done;
    }
    for (int64_t i = 0; i < files->count; i++)
        first_chunk[i + 1] = first_chunk[i] + (files->items[i].bytes + CHUNK - 1) / CHUNK;
    for (int i = 0; i < threads; i++)
        QD_TRY_DONE(qd_regex_state_create(&counters[i].regex));
    qd_pool_for(pool, first_chunk[files->count], 1, count_body, &job);
    if (job.status != QD_OK) {
        status = QD_FAIL(job.status, "%s", job.message);
        goto done;
    }
    *counts = counters[0].counts;
    counters[0].counts = (qd_word_counts){0};
    for (int i = 1; i < threads; i++) {
        QD_TRY_DONE(add_all(counts, &counters[i].counts));
        qd_word_counts_free(&counters[i].counts);
    }
done:
    for (int i = 0; counters && i < threads; i++) {
        qd_word_counts_free(&counters[i].counts);
        qd_regex_state_destroy(counters[i].regex);
        free(counters[i].buffer);
        qd_strbuf_free(&counters[i].replaced);
    }
    free(counters);
    free(first_chunk);
    return status;
}
