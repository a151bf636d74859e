/* libFuzzer target of encoding and decoding, with the pattern selected by the first byte: decoding
 * restores the bytes; the cache changes nothing; a text cut where qd_tokenizer_cut() allows has the
 * tokens of the whole; the hand-written patterns terminate. */
#include <quadrille/tokenizer.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { PATTERNS = 4 };
static qd_tokenizer *tokenizers[PATTERNS];
static qd_encoder *kept[PATTERNS]; /* their caches are kept across inputs */

static void prepare(void)
{
    static const char *const names[PATTERNS] = {"gpt2", "cl100k_base", "o200k_base", "llama3"};
    static const char more[] = "ICA= 256\naGU= 257\ndGhl 258\nIHRoZQ== 259\nCgo= 260\nYWE= 261\nYWFhYQ== 262\n4LiA 263\n77+9 264\n";
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    qd_strbuf file = {0};
    for (int i = 0; i < 256; i++)
        qd_strbuf_printf(&file, "%c%c== %d\n", digits[i >> 2], digits[(i & 3) << 4], i);
    qd_strbuf_puts(&file, more);
    for (int i = 0; i < PATTERNS; i++)
        if (qd_tokenizer_load_text("fuzz", file.data, file.length, names[i], &tokenizers[i]) != QD_OK ||
            qd_encoder_create(tokenizers[i], &kept[i]) != QD_OK)
            abort();
    qd_strbuf_free(&file);
}

static void encode(qd_encoder *encoder, const char *text, size_t length, qd_broken_text broken, qd_tokens *tokens)
{
    qd_encode_options options = qd_encode_options_default();
    options.broken = broken;
    if (qd_encoder_encode(encoder, text, length, &options, tokens) != QD_OK)
        abort();
}

static void same(const qd_tokens *a, const qd_tokens *b)
{
    if (a->count != b->count || (a->count && memcmp(a->ids, b->ids, a->count * sizeof *a->ids) != 0))
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data;
    if (!tokenizers[0])
        prepare();
    if (size > 0) {
        const int i = data[0] % PATTERNS;
        qd_tokens first = {0}, second = {0}, raw = {0}, replaced = {0};
        qd_strbuf back = {0};
        encode(kept[i], text, size, QD_BROKEN_KEEP, &first);
        encode(kept[i], text, size, QD_BROKEN_KEEP, &second);
        same(&first, &second);
        if (qd_tokenizer_decode(tokenizers[i], first.ids, first.count, false, &back) != QD_OK || back.length != size ||
            (size && memcmp(back.data, text, size) != 0))
            abort();
        size_t cut = size > 1 ? qd_tokenizer_cut(tokenizers[i], text, size - 1) : 0;
        second.count = 0;
        encode(kept[i], text, cut, QD_BROKEN_KEEP, &second);
        encode(kept[i], text + cut, size - cut, QD_BROKEN_KEEP, &second);
        same(&first, &second);
        encode(kept[i], text, size, QD_BROKEN_TIKTOKEN, &raw);
        qd_strbuf_clear(&back);
        if (qd_tokenizer_decode(tokenizers[i], raw.ids, raw.count, false, &back) != QD_OK || back.length != size)
            abort();
        encode(kept[i], text, size, QD_BROKEN_REPLACE, &replaced);
        qd_tokens_free(&first);
        qd_tokens_free(&second);
        qd_tokens_free(&raw);
        qd_tokens_free(&replaced);
        qd_strbuf_free(&back);
    }
    return 0;
}
