/* A tokenizer as a text encoder, with one encoder state per thread. */
#include "data/encode.h"
#include "base/sized.h"

#include <stdlib.h>
#include <xxhash.h>

typedef struct encoder_state {
    const qd_tokenizer *tokenizer;
    qd_encode_options options;
    qd_encoder **encoders; /* (threads): each caches the words it has seen */
    int threads;
} encoder_state;

static qd_status encode(void *context, int thread, const char *text, size_t length, qd_tokens *out)
{
    encoder_state *state = context;
    return qd_encoder_encode(state->encoders[thread], text, length, &state->options, out);
}

static qd_status prepare(void *context, int threads)
{
    encoder_state *state = context;
    if (threads <= state->threads)
        return QD_OK;
    qd_encoder **encoders = realloc(state->encoders, (size_t)threads * sizeof(qd_encoder *));
    if (!encoders)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the tokenizer in %d threads", threads);
    state->encoders = encoders;
    for (; state->threads < threads; state->threads++)
        QD_TRY(qd_encoder_create(state->tokenizer, &encoders[state->threads]));
    return QD_OK;
}

static qd_status begin(void *context, qd_tokens *out)
{
    const encoder_state *state = context;
    for (int i = 0; qd_tokenizer_before(state->tokenizer, i) >= 0; i++)
        QD_TRY(qd_tokens_append(out, qd_tokenizer_before(state->tokenizer, i)));
    return QD_OK;
}

static qd_status encode_chat(void *context, int thread, const char *text, size_t length, qd_tokens *out)
{
    const encoder_state *state = context;
    qd_encode_options options = state->options;
    options.special = QD_SPECIAL_ALLOW;
    return qd_encoder_encode(state->encoders[thread], text, length, &options, out);
}

static qd_status check_plain(void *context, int thread, const char *text, size_t length)
{
    const encoder_state *state = context;
    qd_encode_options options = state->options;
    qd_tokens tokens = {0};
    if (options.special == QD_SPECIAL_ALLOW)
        return QD_OK;
    options.special = QD_SPECIAL_REFUSE;
    qd_status status = qd_encoder_encode(state->encoders[thread], text, length, &options, &tokens);
    qd_tokens_free(&tokens);
    return status;
}

static size_t cut(void *context, const char *text, size_t length)
{
    const encoder_state *state = context;
    /* The tokenizer looks at the character after the cut. */
    return length > 1 ? qd_tokenizer_cut(state->tokenizer, text, length - 1) : 0;
}

static qd_status find_document_end(const qd_tokenizer *tokenizer, const char *wanted, int32_t *token)
{
    static const char *const usual[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"};
    *token = -1;
    if (wanted && wanted[0] != '\0') {
        *token = qd_tokenizer_special(tokenizer, wanted);
        return *token >= 0 ? QD_OK
                           : QD_FAIL(QD_USAGE, "the tokenizer has no special token %s to end documents", wanted);
    }
    if (!wanted)
        QD_TRY(qd_tokenizer_end(tokenizer, token));
    for (size_t i = 0; !wanted && *token < 0 && i < sizeof usual / sizeof usual[0]; i++)
        *token = qd_tokenizer_special(tokenizer, usual[i]);
    return QD_OK;
}

qd_status qd_text_encoder_create(const qd_tokenizer *tokenizer, const char *document_end, qd_text_encoder *encoder)
{
    QD_TRY(QD_SIZED_CHECK(encoder, qd_text_encoder));
    qd_text_encoder own = qd_text_encoder_default();
    int32_t end;
    QD_SIZED_WRITE(encoder, &own);
    QD_TRY(find_document_end(tokenizer, document_end, &end));
    qd_strbuf text = {0};
    qd_status status = qd_tokenizer_save_text(tokenizer, &text);
    uint64_t hash = status == QD_OK ? XXH3_64bits(text.data, text.length) : 0;
    qd_strbuf_free(&text);
    if (status != QD_OK)
        return status;
    encoder_state *state = calloc(1, sizeof *state);
    if (!state)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the tokenizer");
    *state = (encoder_state){.tokenizer = tokenizer, .options = qd_encode_options_default()};
    own = (qd_text_encoder){
        .context = state,
        .encode = encode,
        .prepare = prepare,
        .cut = cut,
        .begin = begin,
        .encode_chat = encode_chat,
        .check_plain = check_plain,
        .vocab = qd_tokenizer_size(tokenizer),
        .hash = hash ? hash : 1,
        .document_end = end,
    };
    QD_SIZED_WRITE(encoder, &own);
    return QD_OK;
}

void qd_text_encoder_set_special(qd_text_encoder *encoder, qd_special_policy policy)
{
    if (encoder->encode != encode)
        return;
    encoder_state *state = encoder->context;
    state->options.special = policy;
    encoder->rules = policy == QD_SPECIAL_ALLOW; /* refusing gives the usual tokens or none */
}

void qd_text_encoder_destroy(qd_text_encoder *encoder)
{
    encoder_state *state = encoder->context;
    for (int i = 0; state && i < state->threads; i++)
        qd_encoder_destroy(state->encoders[i]);
    if (state)
        free(state->encoders);
    free(state);
    QD_SIZED_WRITE(encoder, &(qd_text_encoder){0});
}
