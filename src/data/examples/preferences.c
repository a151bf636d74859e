/* Reads a preference: a prompt with a chosen and a rejected completion, as text or as messages, or
 * two conversations that begin alike. */
#include "data/examples/examples_impl.h"

#include <stdlib.h>
#include <string.h>

/* Completions count from the first token on that is not the prompt's in both of them. */
static qd_status count_completions(qd_example pair[2], const size_t from[2])
{
    const size_t first = from[0] < from[1] ? from[0] : from[1];
    for (int i = 0; i < 2; i++)
        QD_TRY(qd_example_count(&pair[i], first, pair[i].tokens.count));
    return QD_OK;
}

static bool equal_nodes(const qd_json_node *a, const qd_json_node *b);

static bool equal_members(const qd_json_node *a, const qd_json_node *b)
{
    const char *key;
    const qd_json_node *value;
    bool equal = qd_json_count(a) == qd_json_count(b);
    for (qd_json_iterator it = qd_json_begin(a); equal && qd_json_next(&it, &key, &value);) {
        const qd_json_node *other = qd_json_member(b, key);
        equal = other && equal_nodes(value, other);
    }
    return equal;
}

/* The reader of JSON limits the depth. */
static bool equal_nodes(const qd_json_node *a, const qd_json_node *b)
{
    size_t length[2] = {0, 0};
    double number[2];
    bool flag[2], equal = true;
    if (qd_json_kind_of(a) != qd_json_kind_of(b))
        return false;
    switch (qd_json_kind_of(a)) {
    case QD_JSON_NULL: return true;
    case QD_JSON_BOOL: return qd_json_as_bool(a, &flag[0]) && qd_json_as_bool(b, &flag[1]) && flag[0] == flag[1];
    case QD_JSON_INT:
    case QD_JSON_REAL: return qd_json_as_double(a, &number[0]) && qd_json_as_double(b, &number[1]) && number[0] == number[1];
    case QD_JSON_STRING: {
        const char *text[2] = {qd_json_as_bytes(a, &length[0]), qd_json_as_bytes(b, &length[1])};
        return length[0] == length[1] && memcmp(text[0], text[1], length[0]) == 0;
    }
    case QD_JSON_LIST:
        equal = qd_json_count(a) == qd_json_count(b);
        for (size_t i = 0; equal && i < qd_json_count(a); i++)
            equal = equal_nodes(qd_json_item(a, i), qd_json_item(b, i));
        return equal;
    case QD_JSON_OBJECT: return equal_members(a, b);
    }
    return false;
}

/* Conversations without a prompt: it is the messages that both begin with. */
static size_t common_messages(const qd_json_node *chosen, const qd_json_node *rejected)
{
    size_t n = 0;
    while (n < qd_json_count(chosen) && n < qd_json_count(rejected) && equal_nodes(qd_json_item(chosen, n), qd_json_item(rejected, n)))
        n++;
    return n;
}

static qd_status encode_talks(const qd_examples_job *job, int thread, const qd_talk *prompt, const qd_talk whole[2], qd_example pair[2])
{
    qd_strbuf text = {0};
    qd_tokens tokens = {0};
    size_t from[2] = {0, 0};
    qd_status status = qd_talk_check(job, thread, prompt);
    if (status == QD_OK)
        status = qd_talk_render(job, prompt, true, &text);
    if (status == QD_OK)
        status = qd_talk_encode(job, thread, &text, &tokens);
    for (int i = 0; i < 2 && status == QD_OK; i++) {
        text.length = 0;
        status = qd_talk_check(job, thread, &whole[i]);
        if (status == QD_OK)
            status = qd_talk_render(job, &whole[i], false, &text);
        if (status == QD_OK)
            status = qd_talk_encode(job, thread, &text, &pair[i].tokens);
        from[i] = qd_example_common(&tokens, &pair[i].tokens);
    }
    qd_strbuf_free(&text);
    qd_tokens_free(&tokens);
    return status == QD_OK ? count_completions(pair, from) : status;
}

static qd_status encode_messages(const qd_examples_job *job, int thread, const qd_json_node *prompt, const qd_json_node *const answer[2],
                                 const qd_json_node *tools, qd_example pair[2])
{
    qd_talk before = {.messages = prompt, .tools = tools}, whole[2];
    for (int i = 0; i < 2; i++)
        whole[i] = (qd_talk){.messages = prompt ? prompt : answer[i], .more = prompt ? answer[i] : NULL, .tools = tools};
    if (!prompt) {
        before = (qd_talk){.messages = answer[0], .count = common_messages(answer[0], answer[1]), .tools = tools};
        if (before.count == 0)
            return QD_FAIL(QD_USAGE, "'chosen' and 'rejected' have no message in common that could be the prompt: add 'prompt'");
        if (before.count == qd_json_count(answer[0]) || before.count == qd_json_count(answer[1]))
            return QD_FAIL(QD_USAGE, "'chosen' and 'rejected' must each have a message after those that they have in common");
    }
    return encode_talks(job, thread, &before, whole, pair);
}

/* Texts without a prompt: it is what both begin with, without a space at its end, in whole
 * characters. */
static size_t common_text(const char *const text[2], const size_t length[2])
{
    size_t n = 0;
    while (n < length[0] && n < length[1] && text[0][n] == text[1][n])
        n++;
    for (int i = 0; i < 2; i++)
        while (n > 0 && n < length[i] && ((unsigned char)text[i][n] & 0xc0) == 0x80)
            n--;
    return n > 0 && text[0][n - 1] == ' ' ? n - 1 : n;
}

static qd_status encode_texts(const qd_examples_job *job, int thread, const qd_json_node *prompt, const qd_json_node *const answer[2],
                              qd_example pair[2])
{
    const char *before = "", *text[2];
    size_t count = 0, length[2], from[2], cut = 0;
    for (int i = 0; i < 2; i++)
        text[i] = qd_json_as_bytes(answer[i], &length[i]);
    if (prompt) {
        before = qd_json_as_bytes(prompt, &count);
    } else {
        before = text[0];
        count = cut = common_text(text, length);
    }
    for (int i = 0; i < 2; i++) {
        const char *const parts[2] = {before, text[i] + cut};
        const size_t lengths[2] = {count, length[i] - cut};
        QD_TRY(qd_example_text(job, thread, parts, lengths, &pair[i], &from[i]));
    }
    return count_completions(pair, from);
}

qd_status qd_preference_encode(const qd_examples_job *job, int thread, const qd_json *document, qd_example pair[2])
{
    const qd_json_node *root = qd_json_root(document), *prompt = qd_json_member(root, "prompt"), *tools = qd_json_member(root, "tools");
    const qd_json_node *const answer[2] = {qd_json_member(root, "chosen"), qd_json_member(root, "rejected")};
    prompt = prompt && qd_json_kind_of(prompt) != QD_JSON_NULL ? prompt : NULL;
    tools = tools && qd_json_kind_of(tools) != QD_JSON_NULL ? tools : NULL;
    if (!answer[0] || !answer[1])
        return QD_FAIL(QD_USAGE, "a preference needs 'prompt', 'chosen' and 'rejected'%s",
                       qd_json_member(root, "completion") ? "; lines with 'completion' are read with data.format=examples" : "");
    const qd_json_kind kind = qd_json_kind_of(answer[0]);
    const bool alike = qd_json_kind_of(answer[1]) == kind && (!prompt || qd_json_kind_of(prompt) == kind);
    if ((kind != QD_JSON_LIST && kind != QD_JSON_STRING) || !alike)
        return QD_FAIL(QD_USAGE, "'prompt', 'chosen' and 'rejected' must all be strings, or all lists of messages");
    return kind == QD_JSON_LIST ? encode_messages(job, thread, prompt, answer, tools, pair)
                                : encode_texts(job, thread, prompt, answer, pair);
}
