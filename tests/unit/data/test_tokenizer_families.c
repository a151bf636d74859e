/* Tokenizers of published families in small: the tokens and decoded texts of hostile strings equal
 * those of the package `tokenizers`. tools/tokenizer_families.py writes the fixtures and compares
 * many more strings. Also: mutated files are read or refused, and normalizers cannot fill the
 * memory. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "data/tokenizer/files/json_reader.h"

#include <quadrille/tokenizer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ctest: not under thread: nothing here has threads */

#define FOLDER QD_TEST_SOURCE_DIR "/tests/unit/data/tokenizers/"

static const char *const families[] = {"llama2", "llama2-new", "gemma-without-fallback", "partial-fallback", "qwen3", "deepseek-v3",
                                       "t5", "unigram-fallback", "bert-cased", "clip", "kimi", "merged-with-next", "several"};
enum { FAMILIES = sizeof families / sizeof *families };

static char *read_file(const char *name, const char *ending, size_t *length)
{
    char path[512], *text;
    snprintf(path, sizeof path, FOLDER "%s%s", name, ending);
    if (qd_file_read(path, 1 << 24, &text, length) != QD_OK)
        fail_msg("%s", qd_error_message());
    return text;
}

static uint32_t add_number(uint32_t hash, uint32_t number)
{
    for (int i = 0; i < 4; i++)
        hash = (hash ^ (number >> 8 * i & 255)) * 0x01000193u;
    return hash;
}

static uint32_t hash_tokens(const qd_tokens *tokens)
{
    uint32_t hash = 0x811c9dc5u;
    for (size_t i = 0; i < tokens->count; i++)
        hash = add_number(hash, (uint32_t)tokens->ids[i]);
    return hash;
}

/* The next line of texts.txt: bytes in hexadecimal. */
static size_t next_text(const char **at, char *text, size_t most)
{
    size_t length = 0;
    unsigned byte;
    for (; **at != '\n'; *at += 2) {
        assert_int_equal(sscanf(*at, "%2x", &byte), 1);
        assert_true(length < most);
        text[length++] = (char)byte;
    }
    ++*at;
    return length;
}

static void check_family(const char *name, const char *texts)
{
    size_t length;
    char *file = read_file(name, ".json", &length), *expected = read_file(name, ".txt", &(size_t){0}), text[8192];
    qd_tokenizer *tokenizer = NULL;
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    if (qd_tokenizer_load_text(name, file, length, NULL, &tokenizer) != QD_OK)
        fail_msg("%s", qd_error_message());
    assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
    const char *line = expected;
    int count = 0;
    for (const char *at = texts; *at; count++) {
        size_t size = next_text(&at, text, sizeof text);
        unsigned framed, plain, decoded;
        int used;
        assert_int_equal(sscanf(line, "%8x %8x %8x\n%n", &framed, &plain, &decoded, &used), 3);
        line += used;
        qd_encode_options options = qd_encode_options_default();
        tokens.count = 0;
        if (qd_encoder_encode(encoder, text, size, &options, &tokens) != QD_OK)
            fail_msg("%s: %s", name, qd_error_message());
        if (hash_tokens(&tokens) != plain)
            fail_msg("%s: text %d has other tokens", name, count);
        options.frame = true;
        options.special = QD_SPECIAL_ALLOW;
        tokens.count = 0;
        assert_int_equal(qd_encoder_encode(encoder, text, size, &options, &tokens), QD_OK);
        if (hash_tokens(&tokens) != framed)
            fail_msg("%s: text %d has other tokens with frame and special tokens", name, count);
        qd_strbuf back = {0};
        uint32_t hash = 0x811c9dc5u;
        assert_int_equal(qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, true, &back), QD_OK);
        for (size_t i = 0; i < back.length; i++)
            hash = add_number(hash, (unsigned char)back.data[i]);
        if (decoded != 0x811c9dc5u && hash != decoded)
            fail_msg("%s: text %d is decoded differently: %.*s", name, count, (int)back.length, back.data);
        qd_strbuf_free(&back);
    }
    assert_true(count > 200);
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
    qd_tokenizer_destroy(tokenizer);
    free(expected);
    free(file);
}

static void same_tokens(void **state)
{
    (void)state;
    char *texts = read_file("texts", ".txt", &(size_t){0});
    for (int i = 0; i < FAMILIES; i++)
        check_family(families[i], texts);
    free(texts);
}

/* A file that was loaded is saved such that it gives the same tokenizer. */
static void saved_again(void **state)
{
    (void)state;
    for (int i = 0; i < FAMILIES; i++) {
        size_t length;
        char *file = read_file(families[i], ".json", &length);
        qd_tokenizer *first = NULL, *second = NULL;
        qd_strbuf saved = {0}, again = {0};
        assert_int_equal(qd_tokenizer_load_text("first", file, length, NULL, &first), QD_OK);
        assert_int_equal(qd_tokenizer_save_text(first, &saved), QD_OK);
        assert_int_equal(qd_tokenizer_load_text("second", saved.data, saved.length, NULL, &second), QD_OK);
        assert_int_equal(qd_tokenizer_save_text(second, &again), QD_OK);
        assert_string_equal(saved.data, again.data);
        qd_strbuf_free(&saved);
        qd_strbuf_free(&again);
        qd_tokenizer_destroy(first);
        qd_tokenizer_destroy(second);
        free(file);
    }
}

/* Bytes of the files outside the vocabulary are changed, and parts dropped: read or refused, and a
 * tokenizer that is read encodes. */
static void mutated(void **state)
{
    (void)state;
    static const char sample[] = " The \xc3\xa9nd\xcc\x81 12 <s>\xe4\xb8\xad\xe6\x96\x87\n[MASK] \xff";
    uint64_t seed = 1;
    for (int i = 0; i < FAMILIES; i++) {
        size_t length;
        char *file = read_file(families[i], ".json", &length), *copy = malloc(length + 1);
        int loaded = 0;
        for (int round = 0; round < 300; round++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            size_t at = (size_t)(seed >> 33) % length, size = length;
            memcpy(copy, file, length);
            if (round % 3 == 0) {
                copy[at] = (char)(seed >> 20);
            } else if (round % 3 == 1) {
                size_t cut = (size_t)(seed >> 13) % 40;
                cut = cut < length - at ? cut : length - at;
                memmove(copy + at, copy + at + cut, length - at - cut);
                size = length - cut;
            } else {
                size_t from = (size_t)(seed >> 7) % length, count = 30;
                count = from + count < length && at + count < length ? count : 0;
                memmove(copy + at, copy + from, count);
            }
            qd_tokenizer *tokenizer = NULL;
            if (qd_tokenizer_load_text("mutated", copy, size, NULL, &tokenizer) != QD_OK)
                continue;
            qd_encoder *encoder;
            qd_tokens tokens = {0};
            qd_strbuf text = {0};
            loaded++;
            assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
            if (qd_encoder_encode(encoder, sample, sizeof sample - 1, NULL, &tokens) == QD_OK)
                qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, false, &text);
            qd_strbuf_free(&text);
            qd_tokens_free(&tokens);
            qd_encoder_destroy(encoder);
            qd_tokenizer_destroy(tokenizer);
        }
        assert_true(loaded > 0);
        free(copy);
        free(file);
    }
}

/* Thirty steps that each double the text: refused instead of taking all memory. */
static void bounded_growth(void **state)
{
    (void)state;
    qd_strbuf file = {0};
    qd_tokenizer *tokenizer = NULL;
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    qd_strbuf_puts(&file, "{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[");
    for (int i = 0; i < 30; i++)
        qd_strbuf_printf(&file, "%s{\"type\":\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\"aa\"}", i ? "," : "");
    qd_strbuf_puts(&file, "]},\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0},\"merges\":[]}}");
    assert_int_equal(qd_tokenizer_load_text("doubling", file.data, file.length, NULL, &tokenizer), QD_OK);
    assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
    assert_int_equal(qd_encoder_encode(encoder, "a", 1, NULL, &tokens), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "64 times"));
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
    qd_tokenizer_destroy(tokenizer);
    qd_strbuf_free(&file);
}

/* Numbers are rounded as by the reader that `tokenizers` uses: first the digits, then the quotient.
 * The value next to it is the nearest one. */
static void rounds_scores(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        double value;
    } cases[] = {{"-0.9385958677423489", -0x1.e08fa3383a6f3p-1}, {"-3.5", -3.5}, {"12", 12.0}, {"1e-400", 0.0},
                 {"-2.5E2", -250.0}, {"0.000", 0.0}, {"123456789012345678901234567890", 123456789012345678901234567890.0}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_json_reader reader;
        double value;
        assert_int_equal(qd_json_reader_open("numbers", cases[i].text, strlen(cases[i].text), &reader), QD_OK);
        assert_int_equal(qd_json_reader_number(&reader, "a score", &value), QD_OK);
        assert_memory_equal(&value, &cases[i].value, sizeof value);
        qd_json_reader_close(&reader);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_tokens),
        cmocka_unit_test(saved_again),
        cmocka_unit_test(mutated),
        cmocka_unit_test(bounded_growth),
        cmocka_unit_test(rounds_scores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
