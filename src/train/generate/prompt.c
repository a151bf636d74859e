/* Encodes prompts; messages are rendered by the model's chat template. */
#include "train/generate/prompt.h"

#include "base/text/json.h"
#include "base/text/strbuf.h"
#include "data/encode.h"
#include "data/examples/examples.h"

#include <quadrille/json_writer.h>

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static qd_status encode_text(qd_model_text *text, const qd_prompt *p, qd_tokens *tokens)
{
    int32_t before;
    for (int i = 0; text->tokenizer && (before = qd_tokenizer_before(text->tokenizer, i)) >= 0; i++)
        QD_TRY(qd_tokens_append(tokens, before));
    return text->encoder.encode(text->encoder.context, 0, p->text, p->length, tokens);
}

static qd_status encode_ids(const qd_model_text *text, const qd_prompt *p, qd_tokens *tokens)
{
    for (size_t at = 0; at < p->length;) {
        int64_t id = 0;
        size_t digits = 0;
        while (at < p->length && isspace((unsigned char)p->text[at]))
            at++;
        for (; at < p->length && isdigit((unsigned char)p->text[at]) && id < text->vocab; at++, digits++)
            id = 10 * id + (p->text[at] - '0');
        if (at == p->length && digits == 0)
            break;
        if (digits == 0 || id >= text->vocab || (at < p->length && !isspace((unsigned char)p->text[at])))
            return QD_FAIL(QD_USAGE, "the prompt must be token ids from 0 to %lld, separated by spaces; byte %zu is not of one",
                           (long long)text->vocab - 1, at);
        QD_TRY(qd_tokens_append(tokens, (int32_t)id));
    }
    return QD_OK;
}

/* The messages of a user, and of the system if there is one, as JSON. */
static void write_messages(const qd_prompt *p, const char *system, qd_strbuf *json)
{
    qd_json_writer w = qd_json_writer_on(json);
    qd_json_list_begin(&w, NULL);
    for (int user = system ? 0 : 1; user < 2; user++) {
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, "role", user ? "user" : "system");
        if (user)
            qd_json_put_bytes(&w, "content", p->text, p->length);
        else
            qd_json_put_string(&w, "content", system);
        qd_json_end(&w);
    }
    qd_json_end(&w);
}

static qd_status render(qd_model_text *text, const qd_json *document, qd_strbuf *rendered)
{
    const qd_json_node *root = qd_json_root(document), *tools = qd_json_member(root, "tools");
    const qd_json_node *messages = qd_json_kind_of(root) == QD_JSON_OBJECT ? qd_json_member(root, "messages") : root;
    char date[32];
    struct tm now;
    time_t seconds = time(NULL);
    if (!messages || qd_json_kind_of(messages) != QD_JSON_LIST)
        return QD_FAIL(QD_USAGE, "the messages must be a list of objects with 'role' and 'content', or an object with such 'messages'");
    if (tools && qd_json_kind_of(tools) == QD_JSON_NULL)
        tools = NULL;
    QD_TRY(qd_conversation_check(&text->encoder, 0, messages, tools));
    localtime_r(&seconds, &now);
    strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", &now);
    QD_TRY(qd_chat_render(text->chat, &(qd_chat_input){.messages = messages, .tools = tools, .add_generation_prompt = true, .date = date},
                          rendered, NULL));
    return rendered->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the prompt") : QD_OK;
}

static qd_status encode_messages(qd_model_text *text, const char *json, size_t length, qd_tokens *tokens)
{
    qd_json *document = NULL;
    qd_strbuf rendered = {0};
    const qd_text_encoder *e = &text->encoder;
    QD_TRY(qd_model_text_open_chat(text));
    if (!e->encode_chat)
        return QD_FAIL(QD_USAGE, "messages need a tokenizer: bytes have no special tokens");
    QD_TRY(qd_json_load_collected("messages", json, length, &document));
    qd_status status = render(text, document, &rendered);
    if (status == QD_OK && rendered.length > 0)
        status = e->encode_chat(e->context, 0, rendered.data, rendered.length, tokens);
    qd_strbuf_free(&rendered);
    qd_json_destroy(document);
    return status;
}

static qd_status encode_message(qd_model_text *text, const qd_prompt *p, const char *system, qd_tokens *tokens)
{
    qd_strbuf json = {0};
    write_messages(p, system, &json);
    qd_status status = json.failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the prompt") : QD_OK;
    if (status == QD_OK)
        status = encode_messages(text, json.data, json.length, tokens);
    qd_strbuf_free(&json);
    return status;
}

qd_status qd_prompt_encode(qd_model_text *text, const qd_prompt *p, const char *system, qd_tokens *tokens)
{
    switch (p->kind) {
    case QD_PROMPT_TEXT: return encode_text(text, p, tokens);
    case QD_PROMPT_MESSAGE: return encode_message(text, p, system, tokens);
    case QD_PROMPT_MESSAGES: return encode_messages(text, p->text, p->length, tokens);
    case QD_PROMPT_TOKENS: return encode_ids(text, p, tokens);
    }
    return QD_FAIL(QD_USAGE, "the kind of prompt %d is unknown", (int)p->kind);
}
