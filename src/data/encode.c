/* The parallel encoder: reads text files in pieces, encodes a batch of pieces on all threads, and
 * passes the tokens to a sink in file order. */
#define _GNU_SOURCE
#include "data/encode.h"

#include "base/clock.h"
#include "base/text/json.h"
#include "base/thread.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A piece has about PIECE bytes, more when there is no good place to cut. A batch is what all
 * threads encode before the results are passed on: large enough to balance the load, small enough
 * not to need much memory. */
enum {
    PIECE = 1 << 20,
    LONGEST_TEXT = 16 << 20,  /* longer text is cut at any character */
    LONGEST_LINE = 256 << 20, /* of .jsonl */
    BATCH_BYTES_PER_THREAD = 4 << 20,
    MOST_PIECES = 1024,
    PIECES_KEPT_PER_THREAD = 8, /* whose buffers are kept from batch to batch */
};
#define PROGRESS_SECONDS 0.1

typedef struct piece {
    const qd_file *file;
    char *text;
    size_t length, capacity;
    int64_t first_line; /* number of its first line, for messages */
    bool begins_file, at_line_start;
    /* Results. */
    qd_tokens tokens;
    int64_t *starts; /* (start_count): token offsets where documents begin */
    int64_t start_count, start_capacity;
    qd_status status;
    char *message;
} piece;

typedef struct encode_state {
    const qd_encode_job *job;
    const qd_token_sink *sink;
    const char *separator, *field;
    int threads;
    /* Reading. */
    int64_t file; /* index of the current file */
    int fd;       /* -1: not opened yet */
    char *carry;  /* bytes read that belong to the next piece */
    size_t carry_length, carry_capacity;
    int64_t line;
    bool file_begun, at_line_start;
    /* Encoding. */
    piece *pieces; /* (MOST_PIECES) */
    int64_t piece_count;
    /* Output. */
    bool document_due;       /* a document has begun but has no token yet */
    int64_t document_tokens; /* of the open document */
    qd_tokenize_progress *total;
    double begun, last_progress;
} encode_state;

int qd_threads_or_all(int threads)
{
    if (threads > 0)
        return threads;
    cpu_set_t cores;
    int count = sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
    return count > 0 ? count : 1;
}

/* For text without a good place to cut: after the last line end, otherwise between characters.
 * Never 0. */
static size_t forced_cut(const char *text, size_t length)
{
    const char *line_end = memrchr(text, '\n', length);
    if (line_end)
        return (size_t)(line_end - text) + 1;
    size_t at = length;
    for (int back = 0; back < 3 && at > 1 && ((unsigned char)text[at - 1] & 0xc0) == 0x80; back++)
        at--;
    if (at > 1 && (unsigned char)text[at - 1] >= 0xc0)
        at--;
    return at;
}

/* Where the encoder allows a cut, or at the very end; at a line end if documents are separated by
 * lines. 0: nowhere. */
static size_t good_cut(const encode_state *s, const char *text, size_t length)
{
    const qd_text_encoder *e = s->job->encoder;
    if (!e->cut && !s->separator)
        return length;
    if (!e->cut) {
        const char *line_end = memrchr(text, '\n', length);
        return line_end ? (size_t)(line_end - text) + 1 : 0;
    }
    size_t cut = e->cut(e->context, text, length);
    while (s->separator && cut > 0 && text[cut - 1] != '\n')
        cut = e->cut(e->context, text, cut);
    return cut;
}

static qd_status piece_reserve(piece *p, size_t capacity)
{
    if (p->capacity >= capacity)
        return QD_OK;
    char *text = realloc(p->text, capacity);
    if (!text)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a piece of %zu bytes", p->file->path, capacity);
    p->text = text;
    p->capacity = capacity;
    return QD_OK;
}

/* Reads until the piece has `want` bytes or the file ends. */
static qd_status read_more(encode_state *s, piece *p, size_t want, bool *end)
{
    QD_TRY(piece_reserve(p, want));
    *end = false;
    while (p->length < want) {
        ssize_t got = read(s->fd, p->text + p->length, want - p->length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return QD_FAIL(QD_IO, "%s: cannot be read: %s", p->file->path, strerror(errno));
        if (got == 0) {
            *end = true;
            return QD_OK;
        }
        p->length += (size_t)got;
    }
    return QD_OK;
}

static qd_status keep_rest(encode_state *s, piece *p, size_t cut)
{
    size_t rest = p->length - cut;
    if (s->carry_capacity < rest) {
        char *carry = realloc(s->carry, rest);
        if (!carry)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", p->file->path);
        s->carry = carry;
        s->carry_capacity = rest;
    }
    if (rest > 0)
        memcpy(s->carry, p->text + cut, rest);
    s->carry_length = rest;
    p->length = cut;
    return QD_OK;
}

/* Finds the end of the piece, reading more until there is a place to cut. */
static qd_status cut_piece(encode_state *s, piece *p, bool *end)
{
    const bool lines = p->file->kind == QD_FILE_LINES;
    const size_t longest = lines ? LONGEST_LINE : LONGEST_TEXT;
    while (!*end) {
        const char *line_end = lines ? memrchr(p->text, '\n', p->length) : NULL;
        size_t cut = !lines ? good_cut(s, p->text, p->length) : line_end ? (size_t)(line_end - p->text) + 1 : 0;
        if (cut == 0 && p->length >= longest) {
            if (lines)
                return QD_FAIL(QD_USAGE, "%s:%lld: a line of more than %d MiB", p->file->path, (long long)p->first_line,
                               LONGEST_LINE >> 20);
            cut = forced_cut(p->text, p->length);
        }
        if (cut > 0)
            return keep_rest(s, p, cut);
        QD_TRY(read_more(s, p, p->length * 2, end));
    }
    return keep_rest(s, p, p->length);
}

static int64_t count_lines(const char *text, size_t length)
{
    int64_t lines = 0;
    for (const char *at = text; (at = memchr(at, '\n', length - (size_t)(at - text))); at++)
        lines++;
    return lines;
}

static qd_status open_next(encode_state *s)
{
    const qd_file *file = &s->job->files->items[s->file];
    s->fd = open(file->path, O_RDONLY | O_CLOEXEC);
    if (s->fd < 0)
        return QD_FAIL(QD_USAGE, "%s: cannot be opened: %s", file->path, strerror(errno));
    s->line = 1;
    s->file_begun = false;
    s->at_line_start = true;
    s->carry_length = 0;
    return QD_OK;
}

/* The next piece of the current file; length 0 at its end. */
static qd_status read_piece(encode_state *s, piece *p)
{
    if (s->fd < 0)
        QD_TRY(open_next(s));
    p->file = &s->job->files->items[s->file];
    p->length = s->carry_length;
    /* Small files need no large buffer; one extra byte detects the end with the first read. */
    size_t want = (size_t)(p->file->bytes < PIECE ? p->file->bytes + 1 : PIECE);
    want = want > p->length + 1 ? want : p->length + 1;
    QD_TRY(piece_reserve(p, want));
    if (p->length > 0)
        memcpy(p->text, s->carry, p->length);
    p->first_line = s->line;
    p->begins_file = !s->file_begun;
    p->at_line_start = s->at_line_start;
    bool end;
    QD_TRY(read_more(s, p, want, &end));
    QD_TRY(cut_piece(s, p, &end));
    s->file_begun = true;
    s->line += count_lines(p->text, p->length);
    s->at_line_start = p->length > 0 && p->text[p->length - 1] == '\n';
    if (end && s->carry_length == 0) {
        close(s->fd);
        s->fd = -1;
        s->file++;
    }
    return QD_OK;
}

static qd_status read_batch(encode_state *s)
{
    const size_t enough = (size_t)s->threads * BATCH_BYTES_PER_THREAD;
    s->piece_count = 0;
    for (size_t bytes = 0; bytes < enough && s->piece_count < MOST_PIECES && s->file < s->job->files->count;) {
        piece *p = &s->pieces[s->piece_count];
        QD_TRY(read_piece(s, p));
        bytes += p->length;
        s->piece_count += p->length > 0;
    }
    return QD_OK;
}

static qd_status begin_document(piece *p)
{
    if (p->start_count == p->start_capacity) {
        int64_t capacity = p->start_capacity ? p->start_capacity * 2 : 64;
        int64_t *starts = realloc(p->starts, (size_t)capacity * sizeof *starts);
        if (!starts)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its documents", p->file->path);
        p->starts = starts;
        p->start_capacity = capacity;
    }
    p->starts[p->start_count++] = (int64_t)p->tokens.count;
    return QD_OK;
}

static qd_status encode_part(const encode_state *s, piece *p, int thread, const char *text, size_t length)
{
    const qd_text_encoder *e = s->job->encoder;
    return length == 0 ? QD_OK : e->encode(e->context, thread, text, length, &p->tokens);
}

static qd_status work_on_text(const encode_state *s, piece *p, int thread)
{
    if (p->begins_file)
        QD_TRY(begin_document(p));
    if (!s->separator)
        return encode_part(s, p, thread, p->text, p->length);
    const size_t mark = strlen(s->separator);
    size_t from = 0;
    for (size_t at = 0, inner; at < p->length;) {
        size_t whole = qd_line_length(p->text + at, p->length - at, &inner);
        if (inner == mark && memcmp(p->text + at, s->separator, mark) == 0 && (at > 0 || p->at_line_start)) {
            QD_TRY(encode_part(s, p, thread, p->text + from, at - from));
            QD_TRY(begin_document(p));
            from = at + whole;
        }
        at += whole;
    }
    return encode_part(s, p, thread, p->text + from, p->length - from);
}

static qd_status work_on_line(const encode_state *s, piece *p, int thread, int64_t number, const char *text,
                              size_t length)
{
    char name[PATH_MAX + 32];
    snprintf(name, sizeof name, "%s (line %lld)", p->file->path, (long long)number);
    qd_json *document;
    QD_TRY(qd_json_load_collected(name, text, length, &document));
    const char *value;
    size_t bytes;
    qd_status status = qd_json_get_bytes(document, qd_json_root(document), s->field, &value, &bytes);
    if (status == QD_OK)
        status = begin_document(p);
    if (status == QD_OK)
        status = encode_part(s, p, thread, value, bytes);
    qd_json_destroy(document);
    return status;
}

static qd_status work_on_lines(const encode_state *s, piece *p, int thread)
{
    int64_t number = p->first_line;
    size_t at = p->begins_file ? qd_byte_order_mark(p->text, p->length) : 0;
    for (size_t inner; at < p->length; number++) {
        size_t whole = qd_line_length(p->text + at, p->length - at, &inner);
        size_t blank = 0;
        while (blank < inner && (p->text[at + blank] == ' ' || p->text[at + blank] == '\t'))
            blank++;
        if (blank < inner)
            QD_TRY(work_on_line(s, p, thread, number, p->text + at, inner));
        at += whole;
    }
    return QD_OK;
}

static void work(void *context, int64_t begin, int64_t end, int thread)
{
    const encode_state *s = context;
    for (int64_t i = begin; i < end; i++) {
        piece *p = &s->pieces[i];
        p->tokens.count = 0;
        p->start_count = 0;
        p->status = p->file->kind == QD_FILE_LINES ? work_on_lines(s, p, thread) : work_on_text(s, p, thread);
        /* The error record is thread-local: copy the message for the thread that reports it. */
        if (p->status != QD_OK)
            p->message = strdup(qd_error_message());
    }
}

static qd_status end_document(encode_state *s)
{
    const int32_t mark = s->job->encoder->document_end;
    if (s->document_tokens > 0 && mark >= 0) {
        QD_TRY(s->sink->append(s->sink->context, &mark, 1));
        s->total->tokens++;
    }
    s->document_tokens = 0;
    s->document_due = true;
    return QD_OK;
}

/* Passes tokens [from, to) of a piece to the sink. */
static qd_status hand_on(encode_state *s, const piece *p, int64_t from, int64_t to)
{
    if (from == to) /* a piece without tokens may have no buffer */
        return QD_OK;
    const int64_t count = to - from;
    if (s->document_due) {
        QD_TRY(s->sink->document(s->sink->context));
        s->total->documents++;
        s->document_due = false;
    }
    QD_TRY(s->sink->append(s->sink->context, p->tokens.ids + from, count));
    s->document_tokens += count;
    s->total->tokens += count;
    return QD_OK;
}

static qd_status hand_on_piece(encode_state *s, const piece *p)
{
    int64_t from = 0;
    if (p->status != QD_OK)
        return QD_FAIL(p->status, "%s", p->message ? p->message : "out of memory while recording an error message");
    for (int64_t i = 0; i < p->start_count; i++) {
        QD_TRY(hand_on(s, p, from, p->starts[i]));
        QD_TRY(end_document(s));
        from = p->starts[i];
    }
    QD_TRY(hand_on(s, p, from, (int64_t)p->tokens.count));
    s->total->bytes += (int64_t)p->length;
    s->total->files += p->begins_file;
    return QD_OK;
}

static void piece_free(piece *p)
{
    free(p->text);
    free(p->tokens.ids);
    free(p->starts);
    free(p->message);
    *p = (piece){0};
}

static qd_status show_progress(encode_state *s, bool last)
{
    double now = qd_clock_now();
    s->total->seconds = now - s->begun;
    if (!s->job->progress || (!last && now - s->last_progress < PROGRESS_SECONDS))
        return QD_OK;
    s->last_progress = now;
    return s->job->progress(s->job->progress_context, s->total) ? QD_OK : QD_FAIL(QD_INTERRUPTED, "interrupted");
}

static qd_status run_batches(encode_state *s, qd_pool *pool)
{
    while (s->file < s->job->files->count) {
        QD_TRY(read_batch(s));
        qd_pool_for(pool, s->piece_count, 1, work, s);
        for (int64_t i = 0; i < s->piece_count; i++)
            QD_TRY(hand_on_piece(s, &s->pieces[i]));
        for (int64_t i = (int64_t)s->threads * PIECES_KEPT_PER_THREAD; i < s->piece_count; i++)
            piece_free(&s->pieces[i]);
        QD_TRY(show_progress(s, false));
    }
    QD_TRY(end_document(s));
    return show_progress(s, true);
}

qd_status qd_encode_files(const qd_encode_job *job, const qd_token_sink *sink, qd_tokenize_progress *total)
{
    *total = (qd_tokenize_progress){
        .bytes_total = job->files->bytes, .files_total = job->files->count};
    encode_state s = {
        .job = job,
        .sink = sink,
        .separator = job->documents.separator && job->documents.separator[0] ? job->documents.separator : NULL,
        .field = job->documents.field && job->documents.field[0] ? job->documents.field : "text",
        .threads = qd_threads_or_all(job->threads),
        .fd = -1,
        .document_due = true,
        .total = total,
        .begun = qd_clock_now(),
    };
    qd_pool *pool = NULL;
    qd_status status = QD_OK;
    s.pieces = calloc(MOST_PIECES, sizeof *s.pieces);
    if (!s.pieces)
        status = QD_FAIL(QD_NO_MEMORY, "no memory to read text");
    if (status == QD_OK && job->encoder->prepare)
        status = job->encoder->prepare(job->encoder->context, s.threads);
    if (status == QD_OK)
        status = qd_pool_create(s.threads, -1, &pool);
    if (status == QD_OK)
        status = run_batches(&s, pool);
    qd_pool_destroy(pool);
    if (s.fd >= 0)
        close(s.fd);
    for (int64_t i = 0; s.pieces && i < MOST_PIECES; i++)
        if (s.pieces[i].text) /* pieces that were used; most never are */
            piece_free(&s.pieces[i]);
    free(s.pieces);
    free(s.carry);
    return status;
}
