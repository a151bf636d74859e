/* libFuzzer target of tokenizer.json: any bytes are read or refused. A tokenizer that is read can
 * encode and decode, and is saved such that it can be read again. */
#include <quadrille/tokenizer.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void use(const qd_tokenizer *tokenizer, const char *text, size_t length)
{
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    qd_strbuf back = {0}, saved = {0};
    qd_tokenizer *again;
    if (qd_encoder_create(tokenizer, &encoder) != QD_OK)
        abort();
    qd_encode_options options = qd_encode_options_default();
    options.special = QD_SPECIAL_ALLOW;
    options.frame = true;
    /* A pattern may reach its match limit, which is an error status. */
    if (qd_encoder_encode(encoder, text, length, &options, &tokens) == QD_OK &&
        qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, false, &back) != QD_OK)
        abort();
    if (qd_tokenizer_save_text(tokenizer, &saved) == QD_OK) {
        if (qd_tokenizer_load_text("again", saved.data, saved.length, NULL, &again) != QD_OK)
            abort();
        qd_tokenizer_destroy(again);
    }
    qd_strbuf_free(&saved);
    qd_strbuf_free(&back);
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    qd_tokenizer *tokenizer;
    if (qd_tokenizer_load_text("fuzz", (const char *)data, size, NULL, &tokenizer) == QD_OK) {
        use(tokenizer, (const char *)data, size < 512 ? size : 512);
        qd_tokenizer_destroy(tokenizer);
    }
    return 0;
}
