/* libFuzzer target of SentencePiece models. What is read also encodes a text and decodes it. */
#include <quadrille/tokenizer.h>

#include <stdint.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char text[] = " a text\xff, foo  bar <user>ab \xe2\x96\x81q 12 \xe6\x97\xa5\xc3\xa9 ";
    qd_tokenizer *tokenizer;
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    qd_strbuf back = {0};
    if (qd_tokenizer_load_text("fuzz", (const char *)data, size, NULL, &tokenizer) != QD_OK)
        return 0;
    if (qd_encoder_create(tokenizer, &encoder) != QD_OK)
        abort();
    if (qd_encoder_encode(encoder, text, sizeof text - 1, NULL, &tokens) == QD_OK &&
        qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, false, &back) != QD_OK)
        abort();
    qd_strbuf_free(&back);
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
    qd_tokenizer_destroy(tokenizer);
    return 0;
}
