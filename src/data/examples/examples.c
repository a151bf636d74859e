/* Reads examples: parses a batch of lines, encodes it on all threads, and appends the tokens in
 * file order. */
#include "data/examples/examples.h"

#include "base/clock.h"
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "base/thread.h"
#include "data/encode.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 4096 }; /* lines that are encoded before their tokens are appended */
static const size_t most_bytes = (size_t)1 << 34; /* of a file, which is read at once */

typedef struct line {
    const char *text;
    size_t length;
    int64_t number;
    /* Results. */
    qd_tokens tokens;
    size_t counted_from; /* tokens from here on count */
    qd_status status;
    char *message;
} line;

typedef struct reading {
    const qd_examples_job *job;
    const char *path;
    line *lines; /* (BATCH) */
    qd_pool *pool;
    qd_tokenize_progress shown;
    double begun;
    int64_t token_capacity, count_capacity;
    qd_examples *out;
} reading;

/* How many tokens two lists have in common at their start. */
static size_t common_start(const qd_tokens *a, const qd_tokens *b)
{
    size_t n = 0;
    while (n < a->count && n < b->count && a->ids[n] == b->ids[n])
        n++;
    return n;
}

static qd_status begin(const qd_text_encoder *e, qd_tokens *out)
{
    return e->begin ? e->begin(e->context, out) : QD_OK;
}

/* Encodes prompt and completion together, so that the tokens are those of the whole text. What the
 * prompt alone has in common with them is the prompt; from the first token on that reaches into the
 * completion, all count. */
static qd_status encode_pair(const qd_examples_job *job, int thread, const char *const text[2], const size_t length[2], line *l)
{
    const qd_text_encoder *e = job->encoder;
    qd_strbuf whole = {0};
    qd_tokens prompt = {0};
    qd_strbuf_append(&whole, text[0], length[0]);
    qd_strbuf_append(&whole, text[1], length[1]);
    qd_status status = whole.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for an example") : begin(e, &l->tokens);
    if (status == QD_OK)
        status = begin(e, &prompt);
    if (status == QD_OK && length[0] > 0)
        status = e->encode(e->context, thread, text[0], length[0], &prompt);
    if (status == QD_OK && whole.length > 0)
        status = e->encode(e->context, thread, whole.data, whole.length, &l->tokens);
    if (status == QD_OK)
        l->counted_from = common_start(&prompt, &l->tokens);
    if (status == QD_OK && e->document_end >= 0)
        status = qd_tokens_append(&l->tokens, e->document_end);
    qd_strbuf_free(&whole);
    qd_tokens_free(&prompt);
    return status;
}

static qd_status work_on(const reading *r, line *l, int thread)
{
    char name[PATH_MAX + 32];
    qd_json *document;
    const char *text[2];
    size_t length[2];
    snprintf(name, sizeof name, "%s (line %lld)", r->path, (long long)l->number);
    QD_TRY(qd_json_load_collected(name, l->text, l->length, &document));
    const qd_json_node *root = qd_json_root(document);
    qd_status status = QD_OK;
    if (qd_json_member(root, "messages"))
        status = QD_FAIL(QD_UNSUPPORTED, "%s: 'messages' need a chat template, which is not supported: write 'prompt' and 'completion'",
                         name);
    else if (!qd_json_member(root, "prompt") || !qd_json_member(root, "completion"))
        status = QD_FAIL(QD_USAGE, "%s: an example needs 'prompt' and 'completion'%s", name,
                         qd_json_member(root, "text") ? "; lines with 'text' are read with data.format=text" : "");
    if (status == QD_OK)
        status = qd_json_get_bytes(document, root, "prompt", &text[0], &length[0]);
    if (status == QD_OK)
        status = qd_json_get_bytes(document, root, "completion", &text[1], &length[1]);
    if (status == QD_OK)
        status = encode_pair(r->job, thread, text, length, l);
    qd_json_destroy(document);
    return status;
}

static void work(void *context, int64_t first, int64_t end, int thread)
{
    const reading *r = context;
    for (int64_t i = first; i < end; i++) {
        line *l = &r->lines[i];
        l->status = work_on(r, l, thread);
        if (l->status != QD_OK) /* the error record belongs to this thread */
            l->message = strdup(qd_error_message());
    }
}

static qd_status reserve(void *array, int64_t *capacity, int64_t need, size_t size)
{
    if (need <= *capacity)
        return QD_OK;
    int64_t next = *capacity ? *capacity : 1024;
    while (next < need)
        next += next / 2;
    void *larger = realloc(*(void **)array, (size_t)next * size);
    if (!larger)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %lld tokens of examples", (long long)next);
    *(void **)array = larger;
    *capacity = next;
    return QD_OK;
}

static qd_status keep(reading *r, const line *l)
{
    qd_examples *x = r->out;
    const qd_examples_job *job = r->job;
    int64_t count = (int64_t)l->tokens.count;
    if (l->status != QD_OK)
        return QD_FAIL(l->status, "%s", l->message ? l->message : "out of memory while recording an error message");
    if (count > job->most && job->overlong == QD_OVERLONG_REFUSE)
        return QD_FAIL(QD_USAGE, "%s (line %lld): an example of %lld tokens, but a sequence has data.seq + 1 = %lld: raise data.seq, or "
                                 "set data.overlong to cut or skip", r->path, (long long)l->number, (long long)count, (long long)job->most);
    bool cut = count > job->most && job->overlong == QD_OVERLONG_CUT;
    count = cut ? job->most : count;
    if (count > job->most || count < 2 || (int64_t)l->counted_from >= count) {
        x->skipped++;
        return QD_OK;
    }
    int64_t counted_capacity = r->token_capacity;
    QD_TRY(reserve(&x->tokens, &r->token_capacity, x->token_count + count, sizeof *x->tokens));
    QD_TRY(reserve(&x->counted, &counted_capacity, x->token_count + count, sizeof *x->counted));
    QD_TRY(reserve(&x->first, &r->count_capacity, x->count + 1, sizeof *x->first));
    memcpy(x->tokens + x->token_count, l->tokens.ids, (size_t)count * sizeof *x->tokens);
    for (int64_t i = 0; i < count; i++)
        x->counted[x->token_count + i] = i >= (int64_t)l->counted_from;
    x->first[x->count++] = x->token_count;
    x->token_count += count;
    x->cut += cut;
    return QD_OK;
}

static qd_status encode_batch(reading *r, int64_t count)
{
    qd_status status = QD_OK;
    qd_pool_for(r->pool, count, 1, work, r);
    for (int64_t i = 0; i < count; i++) {
        line *l = &r->lines[i];
        if (status == QD_OK)
            status = keep(r, l);
        qd_tokens_free(&l->tokens);
        free(l->message);
        *l = (line){0};
    }
    r->shown.tokens = r->out->token_count;
    r->shown.documents = r->out->count;
    r->shown.seconds = qd_clock_now() - r->begun;
    if (status == QD_OK && r->job->progress && !r->job->progress(r->job->progress_context, &r->shown))
        status = QD_FAIL(QD_INTERRUPTED, "interrupted");
    return status;
}

static bool is_blank(const char *text, size_t length)
{
    while (length > 0 && (text[length - 1] == ' ' || text[length - 1] == '\t'))
        length--;
    return length == 0;
}

static qd_status read_lines(reading *r, const char *text, size_t length)
{
    int64_t number = 0, count = 0;
    size_t at = qd_byte_order_mark(text, length), inner;
    while (at < length) {
        size_t whole = qd_line_length(text + at, length - at, &inner);
        number++;
        if (!is_blank(text + at, inner))
            r->lines[count++] = (line){.text = text + at, .length = inner, .number = number};
        at += whole;
        r->shown.bytes += (int64_t)whole;
        if (count == BATCH || at == length) {
            QD_TRY(encode_batch(r, count));
            count = 0;
        }
    }
    return QD_OK;
}

static qd_status read_file(reading *r, const qd_file *file)
{
    char *text = NULL;
    size_t length = 0;
    r->path = file->path;
    if (file->kind != QD_FILE_LINES)
        return QD_FAIL(QD_USAGE, "%s: data.format=examples reads .jsonl files, one example per line", file->path);
    QD_TRY(qd_file_read(file->path, most_bytes, &text, &length));
    qd_status status = read_lines(r, text, length);
    free(text);
    r->shown.files++;
    return status;
}

qd_status qd_examples_read(const qd_examples_job *job, qd_examples *examples)
{
    const int threads = qd_threads_or_all(job->threads);
    reading r = {.job = job, .out = examples, .begun = qd_clock_now()};
    r.shown = (qd_tokenize_progress){.bytes_total = job->files->bytes, .files_total = job->files->count};
    *examples = (qd_examples){0};
    r.lines = calloc(BATCH, sizeof *r.lines);
    qd_status status = r.lines ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory to read examples");
    if (status == QD_OK && job->encoder->prepare)
        status = job->encoder->prepare(job->encoder->context, threads);
    if (status == QD_OK)
        status = qd_pool_create(threads, -1, &r.pool);
    for (int64_t i = 0; status == QD_OK && i < job->files->count; i++)
        status = read_file(&r, &job->files->items[i]);
    qd_pool_destroy(r.pool);
    free(r.lines);
    if (status != QD_OK)
        qd_examples_free(examples);
    return status;
}

void qd_examples_free(qd_examples *x)
{
    free(x->tokens);
    free(x->counted);
    free(x->first);
    *x = (qd_examples){0};
}
