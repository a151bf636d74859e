/* libFuzzer target of tiktoken files. The first byte selects the encoding; the rest is put before
 * or after the lines of all single bytes, so that many inputs are complete vocabularies. One in
 * four that is read also encodes its own text: creating an encoder costs more than reading the
 * file. */
#include <quadrille/tokenizer.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* The lines of all single bytes, formatted once: that costs more than reading them. */
static void put_bytes(qd_strbuf *file)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static qd_strbuf lines;
    for (int i = lines.length ? 256 : 0; i < 256; i++)
        qd_strbuf_printf(&lines, "%c%c== %d\n", digits[i >> 2], digits[(i & 3) << 4], i);
    qd_strbuf_append(file, lines.data, lines.length);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const encodings[] = {"gpt2", "cl100k_base", "o200k_base", "llama3", NULL};
    qd_strbuf file = {0}, back = {0};
    qd_tokenizer *tokenizer;
    if (size == 0)
        return 0;
    int choice = data[0];
    data++;
    size--;
    if (choice & 0x40)
        put_bytes(&file);
    qd_strbuf_append(&file, (const char *)data, size);
    if ((choice & 0xc0) == 0x80) {
        qd_strbuf_puts(&file, "\n");
        put_bytes(&file);
    }
    if (qd_tokenizer_load_text("fuzz", file.data ? file.data : "", file.length, encodings[(choice & 15) % 5], &tokenizer) == QD_OK) {
        qd_encoder *encoder;
        qd_tokens tokens = {0};
        if ((choice & 0x30) != 0) {
            qd_tokenizer_destroy(tokenizer);
            goto done;
        }
        if (qd_encoder_create(tokenizer, &encoder) != QD_OK ||
            qd_encoder_encode(encoder, (const char *)data, size, NULL, &tokens) != QD_OK ||
            qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, false, &back) != QD_OK || back.length != size ||
            (size && memcmp(back.data, data, size) != 0))
            abort();
        qd_tokens_free(&tokens);
        qd_encoder_destroy(encoder);
        qd_tokenizer_destroy(tokenizer);
    }
done:
    qd_strbuf_free(&file);
    qd_strbuf_free(&back);
    return 0;
}
