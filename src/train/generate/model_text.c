/* Encodes and decodes text with a model's tokenizer, or as bytes. */
#include "train/generate/model_text.h"

#include "ckpt/hf_companions.h"

#include <string.h>

bool qd_model_text_ends(const qd_model_text *text, int32_t token)
{
    for (int i = 0; i < text->end_count; i++)
        if (text->ends[i] == token)
            return true;
    return false;
}

static void add_end(qd_model_text *text, int64_t token)
{
    if (token >= 0 && token < text->vocab && !qd_model_text_ends(text, (int32_t)token) && text->end_count < QD_MOST_ENDS)
        text->ends[text->end_count++] = (int32_t)token;
}

/* The end of documents in training, and what the model's Hugging Face folder names. */
static qd_status find_ends(const qd_config *c, qd_model_text *text)
{
    int64_t ids[QD_MOST_ENDS];
    int count = 0;
    add_end(text, text->ids ? -1 : text->encoder.document_end);
    if (c->run_dir[0] != '\0')
        QD_TRY(qd_hf_end_tokens(c->run_dir, ids, QD_MOST_ENDS, &count));
    for (int i = 0; i < count; i++)
        add_end(text, ids[i]);
    return QD_OK;
}

static qd_status open_tokenizer(const qd_config *c, qd_model_text *text)
{
    if (c->data.tokenizer[0] == '\0' && c->run_dir[0] == '\0')
        return QD_FAIL(QD_USAGE, "the session has no tokenizer to decode its %lld tokens: data.tokenizer can name it",
                       (long long)c->model.vocab);
    if (c->data.tokenizer[0] == '\0')
        return QD_FAIL(QD_USAGE, "%s: has no tokenizer.json to decode its %lld tokens", c->run_dir,
                       (long long)c->model.vocab);
    if (strcmp(c->data.tokenizer, "bytes") == 0) {
        text->encoder = qd_text_encoder_bytes();
    } else {
        text->encoder = qd_text_encoder_default();
        QD_TRY(qd_tokenizer_load(c->data.tokenizer, NULL, &text->tokenizer));
        QD_TRY(qd_text_encoder_create(text->tokenizer, NULL, &text->encoder));
        qd_special_policy special; /* text is read as in training */
        QD_TRY(qd_special_policy_parse(c->data.special, &special));
        qd_text_encoder_set_special(&text->encoder, special);
        QD_TRY(text->encoder.prepare(text->encoder.context, 1));
    }
    if (text->encoder.vocab > c->model.vocab)
        return QD_FAIL(QD_USAGE, "%s: has %lld entries, but the model's vocabulary has %lld: another tokenizer?",
                       c->data.tokenizer, (long long)text->encoder.vocab, (long long)c->model.vocab);
    return QD_OK;
}

qd_status qd_model_text_open(const qd_config *c, bool ids, qd_model_text *text)
{
    memset(text, 0, sizeof *text);
    text->ids = ids;
    text->vocab = c->model.vocab;
    text->template = c->data.chat_template;
    if (!ids)
        QD_TRY(open_tokenizer(c, text));
    return find_ends(c, text);
}

qd_status qd_model_text_open_chat(qd_model_text *text)
{
    if (text->chat)
        return QD_OK;
    qd_status status = text->template[0] != '\0' ? qd_chat_load(text->template, &text->chat)
                                                 : QD_FAIL(QD_USAGE, "the folder of its tokenizer is unknown");
    if (status != QD_OK)
        return qd_error_prefix(status, "the model has no chat template: ");
    const char *end = qd_chat_token(text->chat, "eos_token");
    add_end(text, end && text->tokenizer ? qd_tokenizer_special(text->tokenizer, end) : -1);
    return QD_OK;
}

void qd_model_text_close(qd_model_text *text)
{
    qd_chat_destroy(text->chat);
    if (text->tokenizer)
        qd_text_encoder_destroy(&text->encoder);
    qd_tokenizer_destroy(text->tokenizer);
    memset(text, 0, sizeof *text);
}

qd_status qd_model_text_encode(qd_model_text *text, const char *prompt, size_t length, qd_tokens *tokens)
{
    return text->encoder.encode(text->encoder.context, 0, prompt, length, tokens);
}

void qd_model_text_decode(const qd_model_text *text, int32_t token, qd_strbuf *out)
{
    const char byte = (char)token, *bytes = token < 256 ? &byte : NULL;
    size_t length = 1;
    if (text->ids) {
        qd_strbuf_printf(out, "%d ", token);
        return;
    }
    if (text->tokenizer)
        bytes = qd_tokenizer_bytes(text->tokenizer, token, &length);
    if (bytes)
        qd_strbuf_append(out, bytes, length);
    else
        qd_strbuf_puts(out, "\xEF\xBF\xBD");
}

/* Bytes of the UTF-8 character that begins with this byte; 0: no character does. */
static size_t utf8_length(unsigned char lead)
{
    return lead < 0x80 ? 1 : lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
}

size_t qd_utf8_whole(const char *text, size_t length)
{
    for (size_t back = 1; back <= 3 && back <= length; back++) {
        unsigned char byte = (unsigned char)text[length - back];
        if (byte >= 0x80 && byte < 0xC0)
            continue;
        return utf8_length(byte) > back ? length - back : length;
    }
    return length;
}
