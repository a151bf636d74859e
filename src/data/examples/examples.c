/* Reads examples: parses a batch of lines, encodes it on all threads, and appends the tokens in
 * file order. */
#include "data/examples/examples_impl.h"

#include "base/clock.h"
#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "base/thread.h"

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
    qd_example example[2]; /* the second: only of pairs */
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

size_t qd_example_common(const qd_tokens *a, const qd_tokens *b)
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

qd_status qd_example_count(qd_example *l, size_t from, size_t to)
{
    if (!l->counted && !(l->counted = calloc(l->tokens.count + 1, 1)))
        return QD_FAIL(QD_NO_MEMORY, "no memory for an example");
    for (size_t i = from; i < to; i++)
        l->counted[i] = 1;
    return QD_OK;
}

/* Unless the text ends with it: special tokens of trusted text are encoded as such. */
static qd_status append_end(const qd_text_encoder *e, qd_tokens *tokens)
{
    bool there = tokens->count > 0 && tokens->ids[tokens->count - 1] == e->document_end;
    return e->document_end < 0 || there ? QD_OK : qd_tokens_append(tokens, e->document_end);
}

qd_status qd_example_text(const qd_examples_job *job, int thread, const char *const text[2], const size_t length[2], qd_example *l,
                          size_t *from)
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
    *from = status == QD_OK ? qd_example_common(&prompt, &l->tokens) : 0;
    if (status == QD_OK)
        status = append_end(e, &l->tokens);
    qd_strbuf_free(&whole);
    qd_tokens_free(&prompt);
    return status;
}

qd_status qd_talk_render(const qd_examples_job *job, const qd_talk *talk, bool answer, qd_strbuf *text)
{
    const qd_chat_input input = {.messages = talk->messages, .message_count = talk->count, .more = talk->more, .tools = talk->tools,
                                 .add_generation_prompt = answer};
    QD_TRY(qd_chat_render(job->chat, &input, text, NULL));
    return text->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for an example") : QD_OK;
}

/* The first `count` messages. */
static qd_status render(const qd_examples_job *job, const qd_talk *talk, size_t count, bool answer, qd_strbuf *text)
{
    return qd_talk_render(job, &(qd_talk){.messages = talk->messages, .count = count, .tools = talk->tools}, answer, text);
}

qd_status qd_talk_encode(const qd_examples_job *job, int thread, const qd_strbuf *text, qd_tokens *out)
{
    const qd_text_encoder *e = job->encoder;
    return text->length > 0 ? e->encode_chat(e->context, thread, text->data, text->length, out) : QD_OK;
}

/* All strings of a message, also those in the parts of its content and in calls of tools. Messages
 * come from the data: text in them must not pass for a special token of the template. The reader of
 * JSON limits the depth. */
static qd_status check_node(const qd_text_encoder *e, int thread, const qd_json_node *node)
{
    size_t length = 0;
    const char *key, *text = qd_json_as_bytes(node, &length);
    const qd_json_node *value;
    if (text)
        return length > 0 ? e->check_plain(e->context, thread, text, length) : QD_OK;
    if (qd_json_kind_of(node) == QD_JSON_LIST)
        for (size_t i = 0; i < qd_json_count(node); i++)
            QD_TRY(check_node(e, thread, qd_json_item(node, i)));
    if (qd_json_kind_of(node) == QD_JSON_OBJECT)
        for (qd_json_iterator it = qd_json_begin(node); qd_json_next(&it, &key, &value);) {
            if (key[0] != '\0')
                QD_TRY(e->check_plain(e->context, thread, key, strlen(key)));
            QD_TRY(check_node(e, thread, value));
        }
    return QD_OK;
}

static qd_status check_contents(const qd_text_encoder *e, int thread, const qd_talk *talk)
{
    qd_status tools = talk->tools ? check_node(e, thread, talk->tools) : QD_OK;
    if (tools != QD_OK)
        return qd_error_prefix(tools, "'tools' (data.special=parse accepts them): ");
    const size_t count = qd_json_count(talk->messages);
    for (size_t i = 0; i < count + (talk->more ? qd_json_count(talk->more) : 0); i++) {
        qd_status status = check_node(e, thread, i < count ? qd_json_item(talk->messages, i) : qd_json_item(talk->more, i - count));
        if (status != QD_OK)
            return qd_error_prefix(status, "message %zu (data.special=parse accepts it): ", i + 1);
    }
    return QD_OK;
}

qd_status qd_conversation_check(const qd_text_encoder *encoder, int thread, const qd_json_node *messages, const qd_json_node *tools)
{
    return check_contents(encoder, thread, &(qd_talk){.messages = messages, .tools = tools});
}

static bool begins_with(const qd_strbuf *whole, const qd_strbuf *start)
{
    return start->length <= whole->length && (start->length == 0 || memcmp(whole->data, start->data, start->length) == 0);
}

/* Where the tokens of a part of the conversation end in those of the whole; a token that reaches
 * beyond the part is not in it. */
static qd_status find_end(const qd_examples_job *job, int thread, const qd_strbuf *part, const qd_tokens *whole, size_t *end)
{
    qd_tokens tokens = {0};
    qd_status status = qd_talk_encode(job, thread, part, &tokens);
    *end = qd_example_common(&tokens, whole);
    qd_tokens_free(&tokens);
    return status;
}

/* An answer of the assistant, message `index`: what the conversation up to it has beyond the
 * prompt. */
static qd_status count_answer(const qd_examples_job *job, int thread, const qd_talk *talk, size_t index, const qd_strbuf *whole,
                              qd_example *l)
{
    qd_strbuf prompt = {0}, upto = {0};
    size_t from = 0, to = 0;
    qd_status status = render(job, talk, index, true, &prompt);
    if (status == QD_OK)
        status = render(job, talk, index + 1, false, &upto);
    if (status == QD_OK && (!begins_with(whole, &prompt) || !begins_with(whole, &upto)))
        status = QD_FAIL(QD_USAGE, "the template renders message %zu differently when others follow, so the tokens of the assistant cannot "
                                   "be found: write 'prompt' and 'completion'", index + 1);
    if (status == QD_OK)
        status = find_end(job, thread, &prompt, &l->tokens, &from);
    if (status == QD_OK)
        status = find_end(job, thread, &upto, &l->tokens, &to);
    if (status == QD_OK)
        status = qd_example_count(l, from, to);
    qd_strbuf_free(&prompt);
    qd_strbuf_free(&upto);
    return status;
}

static qd_status encode_rendered(const qd_examples_job *job, int thread, const qd_talk *talk, const qd_strbuf *whole, qd_example *l)
{
    QD_TRY(qd_talk_encode(job, thread, whole, &l->tokens));
    QD_TRY(qd_example_count(l, 0, 0));
    for (size_t i = 1; i < qd_json_count(talk->messages); i++) { /* an answer has a message before it */
        const char *role = qd_json_as_string(qd_json_member(qd_json_item(talk->messages, i), "role"));
        if (role && strcmp(role, "assistant") == 0)
            QD_TRY(count_answer(job, thread, talk, i, whole, l));
    }
    return QD_OK;
}

qd_status qd_talk_check(const qd_examples_job *job, int thread, const qd_talk *talk)
{
    if (!job->chat)
        return QD_FAIL(QD_USAGE, "'messages' need a chat template (data.chat_template, or in the folder of data.tokenizer): %s",
                       job->no_chat ? job->no_chat : "there is none");
    if (!job->encoder->encode_chat)
        return QD_FAIL(QD_USAGE, "'messages' need a tokenizer (data.tokenizer): bytes have no special tokens");
    if (qd_json_kind_of(talk->messages) != QD_JSON_LIST || (talk->more && qd_json_kind_of(talk->more) != QD_JSON_LIST))
        return QD_FAIL(QD_USAGE, "'messages' must be a list of objects with 'role' and 'content'");
    if (talk->tools && qd_json_kind_of(talk->tools) != QD_JSON_LIST)
        return QD_FAIL(QD_USAGE, "'tools' must be a list");
    return check_contents(job->encoder, thread, talk);
}

static qd_status encode_conversation(const qd_examples_job *job, int thread, const qd_talk *talk, qd_example *l)
{
    qd_strbuf whole = {0};
    QD_TRY(qd_talk_check(job, thread, talk));
    qd_status status = render(job, talk, 0, false, &whole);
    if (status == QD_OK)
        status = encode_rendered(job, thread, talk, &whole, l);
    qd_strbuf_free(&whole);
    return status;
}

static qd_status encode_completion(const qd_examples_job *job, int thread, const char *const text[2], const size_t length[2], qd_example *l)
{
    size_t from;
    QD_TRY(qd_example_text(job, thread, text, length, l, &from));
    return qd_example_count(l, from, l->tokens.count);
}

static qd_status encode_example(const reading *r, const qd_json *document, int thread, line *l)
{
    const qd_json_node *root = qd_json_root(document);
    const char *text[2];
    size_t length[2];
    if (r->job->pairs) {
        qd_status status = qd_preference_encode(r->job, thread, document, l->example);
        return status == QD_OK ? QD_OK : qd_error_prefix(status, "%s: ", qd_json_name(document));
    }
    if (qd_json_member(root, "messages")) {
        const qd_json_node *tools = qd_json_member(root, "tools");
        const qd_talk talk = {.messages = qd_json_member(root, "messages"),
                              .tools = tools && qd_json_kind_of(tools) != QD_JSON_NULL ? tools : NULL};
        qd_status status = encode_conversation(r->job, thread, &talk, &l->example[0]);
        return status == QD_OK ? QD_OK : qd_error_prefix(status, "%s: ", qd_json_name(document));
    }
    if (!qd_json_member(root, "prompt") || !qd_json_member(root, "completion"))
        return QD_FAIL(QD_USAGE, "%s: an example needs 'prompt' and 'completion', or 'messages'%s", qd_json_name(document),
                       qd_json_member(root, "text")     ? "; lines with 'text' are read with data.format=text"
                       : qd_json_member(root, "chosen") ? "; lines with 'chosen' are read with data.format=preferences"
                                                        : "");
    QD_TRY(qd_json_get_bytes(document, root, "prompt", &text[0], &length[0]));
    QD_TRY(qd_json_get_bytes(document, root, "completion", &text[1], &length[1]));
    qd_status status = encode_completion(r->job, thread, text, length, &l->example[0]);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "%s: ", qd_json_name(document));
}

static qd_status work_on(const reading *r, line *l, int thread)
{
    char name[PATH_MAX + 32];
    qd_json *document;
    snprintf(name, sizeof name, "%s (line %lld)", r->path, (long long)l->number);
    QD_TRY(qd_json_load_collected(name, l->text, l->length, &document));
    qd_status status = encode_example(r, document, thread, l);
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

/* Whether a token counts; the first one is never predicted. */
static bool counts(const qd_example *e, int64_t tokens)
{
    bool any = false;
    for (int64_t i = 1; i < tokens; i++)
        any = any || (e->counted && e->counted[i]);
    return any;
}

/* Appends the first `count` tokens of an example. */
static qd_status append(reading *r, const qd_example *e, int64_t count)
{
    qd_examples *x = r->out;
    int64_t counted_capacity = r->token_capacity;
    QD_TRY(reserve(&x->tokens, &r->token_capacity, x->token_count + count, sizeof *x->tokens));
    QD_TRY(reserve(&x->counted, &counted_capacity, x->token_count + count, sizeof *x->counted));
    QD_TRY(reserve(&x->first, &r->count_capacity, x->count + 1, sizeof *x->first));
    memcpy(x->tokens + x->token_count, e->tokens.ids, (size_t)count * sizeof *x->tokens);
    memcpy(x->counted + x->token_count, e->counted, (size_t)count);
    x->first[x->count++] = x->token_count;
    x->token_count += count;
    return QD_OK;
}

/* A pair is in one sequence: its last tokens are only targets. Pairs are not cut, because the loss
 * would compare other completions. */
static qd_status keep_pair(reading *r, const line *l)
{
    const qd_examples_job *job = r->job;
    const int64_t chosen = (int64_t)l->example[0].tokens.count, rejected = (int64_t)l->example[1].tokens.count;
    const bool overlong = chosen + rejected - 2 > job->most - 1;
    if (overlong && job->overlong != QD_OVERLONG_SKIP)
        return QD_FAIL(QD_USAGE, "%s (line %lld): a pair of %lld and %lld tokens, which are compared in one sequence of data.seq = %lld: "
                                 "raise it to %lld, or set data.overlong=skip", r->path, (long long)l->number, (long long)chosen,
                       (long long)rejected, (long long)(job->most - 1), (long long)(chosen + rejected - 2));
    if (overlong || !counts(&l->example[0], chosen) || !counts(&l->example[1], rejected)) {
        r->out->skipped++;
        return QD_OK;
    }
    QD_TRY(append(r, &l->example[0], chosen));
    return append(r, &l->example[1], rejected);
}

static qd_status keep(reading *r, const line *l)
{
    const qd_examples_job *job = r->job;
    int64_t count = (int64_t)l->example[0].tokens.count;
    if (l->status != QD_OK)
        return QD_FAIL(l->status, "%s", l->message ? l->message : "out of memory while recording an error message");
    if (job->pairs)
        return keep_pair(r, l);
    if (count > job->most && job->overlong == QD_OVERLONG_REFUSE)
        return QD_FAIL(QD_USAGE, "%s (line %lld): an example of %lld tokens, but a sequence has data.seq + 1 = %lld: raise data.seq, or "
                                 "set data.overlong to cut or skip", r->path, (long long)l->number, (long long)count, (long long)job->most);
    bool cut = count > job->most && job->overlong == QD_OVERLONG_CUT;
    count = cut ? job->most : count;
    if (count > job->most || !counts(&l->example[0], count)) {
        r->out->skipped++;
        return QD_OK;
    }
    r->out->cut += cut;
    return append(r, &l->example[0], count);
}

static qd_status encode_batch(reading *r, int64_t count)
{
    qd_status status = QD_OK;
    qd_pool_for(r->pool, count, 1, work, r);
    for (int64_t i = 0; i < count; i++) {
        line *l = &r->lines[i];
        if (status == QD_OK)
            status = keep(r, l);
        qd_example_free(&l->example[0]);
        qd_example_free(&l->example[1]);
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
        return QD_FAIL(QD_USAGE, "%s: data.format=%s reads .jsonl files, one example per line", file->path,
                       r->job->pairs ? "preferences" : "examples");
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

void qd_example_free(qd_example *e)
{
    qd_tokens_free(&e->tokens);
    free(e->counted);
    *e = (qd_example){0};
}
