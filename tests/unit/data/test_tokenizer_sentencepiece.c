/* SentencePiece models: tokens and decoded texts of hostile strings equal those of the library
 * `sentencepiece`. tools/sentencepiece_oracle.py writes the fixtures and compares many more models
 * and strings. Mutated files are read or refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/file.h"
#include "base/text/json.h"
#include "support/ok.h"

#include <quadrille/tokenizer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ctest: not under thread: nothing here has threads */

#define FOLDER QD_TEST_SOURCE_DIR "/tests/unit/data/sentencepiece/"

static const char *const models[] = {"bpe-bytes", "bpe-user", "unigram-identity"};
enum { MODELS = sizeof models / sizeof *models };

static char *model_of(int i, size_t *length)
{
    char path[512], *text;
    snprintf(path, sizeof path, FOLDER "%s.model", models[i]);
    ok(qd_file_read(path, 1 << 24, &text, length));
    return text;
}

/* Bytes of hexadecimal digits. */
static size_t read_hex(const char *digits, char *out)
{
    size_t count = strlen(digits) / 2;
    for (size_t i = 0; i < count; i++) {
        unsigned byte;
        assert_int_equal(sscanf(digits + 2 * i, "%2x", &byte), 1);
        out[i] = (char)byte;
    }
    return count;
}

static void check_case(const qd_tokenizer *tokenizer, qd_encoder *encoder, const char *name, size_t number, const qd_json_node *node)
{
    const char *digits = qd_json_as_string(qd_json_member(node, "text")), *decoded = qd_json_as_string(qd_json_member(node, "decoded"));
    const qd_json_node *ids = qd_json_member(node, "ids");
    char *text = malloc(strlen(digits) + strlen(decoded) + 1);
    qd_tokens tokens = {0};
    qd_strbuf back = {0};
    ok(qd_encoder_encode(encoder, text, read_hex(digits, text), NULL, &tokens));
    bool same = tokens.count == qd_json_count(ids);
    for (size_t i = 0; same && i < tokens.count; i++) {
        int64_t id = -1;
        same = qd_json_as_int(qd_json_item(ids, i), &id) && id == tokens.ids[i];
    }
    if (!same)
        fail_msg("%s: the tokens of string %zu differ: %s", name, number, digits);
    ok(qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, true, &back));
    size_t length = read_hex(decoded, text);
    if (back.length != length || (length > 0 && memcmp(back.data, text, length) != 0))
        fail_msg("%s: the decoded text of string %zu differs: %s", name, number, digits);
    qd_strbuf_free(&back);
    qd_tokens_free(&tokens);
    free(text);
}

static void equals_the_library(void **state)
{
    (void)state;
    for (int i = 0; i < MODELS; i++) {
        char path[512];
        size_t length;
        char *model = model_of(i, &length);
        qd_tokenizer *tokenizer;
        qd_encoder *encoder;
        qd_json *cases;
        qd_strbuf saved = {0};
        snprintf(path, sizeof path, FOLDER "%s.json", models[i]);
        ok(qd_tokenizer_load_text(models[i], model, length, NULL, &tokenizer));
        ok(qd_encoder_create(tokenizer, &encoder));
        ok(qd_json_load(path, &cases));
        assert_true(qd_json_count(qd_json_root(cases)) >= 100);
        for (size_t c = 0; c < qd_json_count(qd_json_root(cases)); c++)
            check_case(tokenizer, encoder, models[i], c, qd_json_item(qd_json_root(cases), c));
        assert_true(qd_tokenizer_special(tokenizer, "</s>") >= 0);
        ok(qd_tokenizer_save_text(tokenizer, &saved)); /* as it was read */
        assert_int_equal(saved.length, length);
        assert_memory_equal(saved.data, model, length);
        qd_strbuf_free(&saved);
        qd_json_destroy(cases);
        qd_encoder_destroy(encoder);
        qd_tokenizer_destroy(tokenizer);
        free(model);
    }
}

static void mutated_files_are_read_or_refused(void **state)
{
    (void)state;
    static const char text[] = " Some text\xff, foo  bar <user>abc\xe2\x96\x81q 123 \xe6\x97\xa5\xc3\xa9";
    uint32_t random = 7;
    int read = 0, refused = 0;
    for (int i = 0; i < MODELS; i += 2) /* the small ones */
        for (int round = 0; round < 400; round++) {
            size_t length;
            char *model = model_of(i, &length);
            qd_tokenizer *tokenizer;
            for (int change = 0; change < 1 + round % 3; change++) {
                random = random * 1664525u + 1013904223u;
                size_t at = round % 2 ? random % length : length - 1 - random % 700; /* settings are at the end */
                model[at] = (char)(random >> 24);
            }
            if (round % 5 == 0)
                length = random % length;
            if (qd_tokenizer_load_text("mutated", model, length, NULL, &tokenizer) != QD_OK) {
                assert_true(strlen(qd_error_message()) > 0);
                refused++;
            } else {
                qd_encoder *encoder;
                qd_tokens tokens = {0};
                qd_strbuf back = {0};
                ok(qd_encoder_create(tokenizer, &encoder));
                if (qd_encoder_encode(encoder, text, sizeof text - 1, NULL, &tokens) == QD_OK)
                    ok(qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, false, &back));
                qd_strbuf_free(&back);
                qd_tokens_free(&tokens);
                qd_encoder_destroy(encoder);
                qd_tokenizer_destroy(tokenizer);
                read++;
            }
            free(model);
        }
    assert_true(read > 20 && refused > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_the_library),
        cmocka_unit_test(mutated_files_are_read_or_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
