/* A tokenizer as the encoder of data sets: the tokens are those of the whole text, whatever the
 * pieces and threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <quadrille/data.h>

#include "base/rng.h"
#include "support/scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const words[] = {"the",
                                    "quadrille",
                                    "is",
                                    "a ",
                                    "dance",
                                    " of",
                                    "four",
                                    "couples,",
                                    "in",
                                    "\n",
                                    "\n\n",
                                    "\n ",
                                    "  ",
                                    "42",
                                    "don't",
                                    ("Stra\xc3\x9f"
                                     "e"),
                                    "\xe6\xbc\xa2\xe5\xad\x97",
                                    ";\n/",
                                    "x = y;\n",
                                    "\t",
                                    "end.\n",
                                    "<|endoftext|>"};

/* Three MiB of words, white space and line ends in any order. */
static char *mixed_text(size_t *length)
{
    enum { WORDS = 700000 };
    char *text = malloc(WORDS * 16);
    size_t at = 0;
    for (uint64_t i = 0; i < WORDS; i++) {
        const char *word = words[qd_rng_below(qd_rng_key(6, "words"), i, sizeof words / sizeof words[0])];
        memcpy(text + at, word, strlen(word));
        at += strlen(word);
        if (i % 3 == 0)
            text[at++] = ' ';
    }
    *length = at;
    return text;
}

static qd_tokenizer *trained(const char *path, const char *pattern)
{
    static const char *const special[] = {"<|endoftext|>", "<|im_end|>"};
    qd_tokenizer_training training = qd_tokenizer_training_default();
    training.paths = &path;
    training.path_count = 1;
    training.vocab = 400;
    training.pattern = pattern;
    training.special = special;
    training.special_count = 2;
    training.threads = 1;
    qd_tokenizer *tokenizer;
    if (qd_tokenizer_train(&training, &tokenizer) != QD_OK)
        fail_msg("%s", qd_error_message());
    return tokenizer;
}

static void shards_hold_the_tokens_of_the_whole(void **state)
{
    static const char *const patterns[] = {"gpt2", "cl100k", "o200k", "llama3"};
    size_t length;
    char *text = mixed_text(&length);
    const char *path = scratch_write(state, "mixed.txt", text, length);
    const char *sample = scratch_write(state, "sample.txt", text, 60000);
    for (size_t p = 0; p < sizeof patterns / sizeof patterns[0]; p++) {
        qd_tokenizer *tokenizer = trained(sample, patterns[p]);
        qd_encoder *whole;
        qd_tokens expected = {0};
        assert_int_equal(qd_encoder_create(tokenizer, &whole), QD_OK);
        assert_int_equal(qd_encoder_encode(whole, text, length, NULL, &expected), QD_OK);
        qd_text_encoder encoder = qd_text_encoder_default();
        assert_int_equal(qd_text_encoder_create(tokenizer, NULL, &encoder), QD_OK);
        assert_int_equal(encoder.document_end, qd_tokenizer_special(tokenizer, "<|endoftext|>"));
        assert_true(encoder.document_end >= 0);
        for (int threads = 1; threads <= 3; threads += 2) {
            qd_data_options o = qd_data_options_default();
            o.path = path;
            o.vocab = 400;
            o.encoder = &encoder;
            o.threads = threads;
            qd_data *data = NULL;
            if (qd_data_open(&o, &data) != QD_OK)
                fail_msg("%s", qd_error_message());
            qd_data_source_info info = qd_data_source_info_default();
            qd_data_source_describe(data, 0, &info);
            assert_int_equal(info.tokens, expected.count + 1);
            int32_t *tokens = malloc((size_t)info.tokens * sizeof *tokens);
            assert_int_equal(qd_data_read(data, 0, 0, info.tokens, tokens), QD_OK);
            assert_memory_equal(tokens, expected.ids, expected.count * sizeof *tokens);
            assert_int_equal(tokens[expected.count], encoder.document_end);
            free(tokens);
            qd_data_close(data);
        }
        qd_text_encoder_destroy(&encoder);
        qd_tokens_free(&expected);
        qd_encoder_destroy(whole);
        qd_tokenizer_destroy(tokenizer);
    }
    free(text);
}

static void the_hash_tells_tokenizers_apart(void **state)
{
    size_t length;
    char *text = mixed_text(&length);
    const char *sample = scratch_write(state, "hash.txt", text, 30000);
    uint64_t hashes[3];
    static const char *const patterns[] = {"gpt2", "gpt2", "cl100k"};
    for (int i = 0; i < 3; i++) {
        qd_tokenizer *tokenizer = trained(sample, patterns[i]);
        qd_text_encoder encoder = qd_text_encoder_default();
        assert_int_equal(qd_text_encoder_create(tokenizer, "", &encoder), QD_OK);
        assert_int_equal(encoder.document_end, -1);
        hashes[i] = encoder.hash;
        qd_text_encoder_destroy(&encoder);
        assert_int_equal(qd_text_encoder_create(tokenizer, "<|nobody|>", &encoder), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "<|nobody|>"));
        qd_text_encoder_destroy(&encoder);
        qd_tokenizer_destroy(tokenizer);
    }
    assert_true(hashes[0] == hashes[1] && hashes[0] != hashes[2]);
    free(text);
}

/* What the files next to a tokenizer state comes before the usual names: of the folder itself, then
 * of what a run keeps. */
static void the_end_of_texts_is_that_of_the_folder(void **state)
{
    static const struct {
        const char *file, *content, *end; /* end NULL: refused */
    } steps[] = {
        {"unrelated.json", "{}", "<|endoftext|>"},
        {"config.json", "[1, 2", "<|endoftext|>"}, /* that of another program */
        {"config.json", "{\"eos_token_id\": 5}", "<|endoftext|>"},
        {"config.json", "{\"eos_token_id\": [%d, 5]}", "<|im_end|>"},
        {"huggingface/tokenizer_config.json", "{\"eos_token\": \"<|endoftext|>\"}", "<|im_end|>"},
        {"config.json", "{}", "<|endoftext|>"},
        {"special_tokens_map.json", "{\"eos_token\": {\"content\": \"<|im_end|>\"}}", "<|im_end|>"},
        {"tokenizer_config.json", "{\"eos_token\": null}", "<|im_end|>"},
        {"tokenizer_config.json", "{\"eos_token\": \"a\"}", "a"},
        {"tokenizer_config.json", "{\"eos_token\": \"<|missing|>\"}", NULL},
    };
    size_t length;
    char *text = mixed_text(&length), *path = strdup(scratch_path(state, "tokenizer.json")), content[128];
    qd_tokenizer *tokenizer = trained(scratch_write(state, "end.txt", text, 30000), "gpt2");
    assert_int_equal(qd_tokenizer_save(tokenizer, path), QD_OK);
    for (size_t i = 0; i < sizeof steps / sizeof steps[0]; i++) {
        qd_tokenizer *loaded = NULL;
        qd_text_encoder encoder = qd_text_encoder_default();
        size_t size;
        const char *at = strstr(steps[i].content, "%d");
        snprintf(content, sizeof content, "%s", steps[i].content);
        if (at)
            snprintf(content, sizeof content, "%.*s%d%s", (int)(at - steps[i].content), steps[i].content,
                     qd_tokenizer_special(tokenizer, "<|im_end|>"), at + 2);
        scratch_text(state, steps[i].file, content);
        assert_int_equal(qd_tokenizer_load(path, NULL, &loaded), QD_OK);
        qd_status status = qd_text_encoder_create(loaded, NULL, &encoder);
        if (steps[i].end) {
            assert_int_equal(status, QD_OK);
            const char *end = qd_tokenizer_bytes(loaded, encoder.document_end, &size);
            assert_int_equal(size, strlen(steps[i].end));
            assert_memory_equal(end, steps[i].end, size);
        } else {
            assert_int_equal(status, QD_USAGE);
            assert_non_null(strstr(qd_error_message(), "tokenizer_config.json: 'eos_token' is <|missing|>"));
        }
        qd_text_encoder_destroy(&encoder);
        assert_int_equal(qd_text_encoder_create(loaded, "<|im_end|>", &encoder), QD_OK); /* what the caller states */
        assert_int_equal(encoder.document_end, qd_tokenizer_special(tokenizer, "<|im_end|>"));
        qd_text_encoder_destroy(&encoder);
        qd_tokenizer_destroy(loaded);
    }
    scratch_text(state, "tokenizer_config.json", "{\"eos_token\": 7}");
    qd_tokenizer *loaded = NULL;
    assert_int_equal(qd_tokenizer_load(path, NULL, &loaded), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "'eos_token' must be a string"));
    qd_tokenizer_destroy(tokenizer);
    free(text);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_hold_the_tokens_of_the_whole),
        cmocka_unit_test(the_hash_tells_tokenizers_apart),
        cmocka_unit_test(the_end_of_texts_is_that_of_the_folder),
    };
    return cmocka_run_group_tests_name("tokenizer as an encoder", tests, scratch_setup, scratch_teardown);
}
