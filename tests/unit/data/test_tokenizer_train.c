/* Tokenizer training: the rules by hand on small texts, the same result for any number of threads
 * and chunks, errors for bad input. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"

#include <quadrille/tokenizer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];

static const char *write_file(const char *name, const char *text, size_t length)
{
    static char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(text, 1, length, file), length);
    assert_int_equal(fclose(file), 0);
    return path;
}

static qd_tokenizer *train(qd_tokenizer_training training, const char *path)
{
    qd_tokenizer *tokenizer;
    training.paths = &path;
    training.path_count = 1;
    if (qd_tokenizer_train(&training, &tokenizer) != QD_OK)
        fail_msg("%s", qd_error_message());
    return tokenizer;
}

static void expect_token(const qd_tokenizer *tokenizer, int32_t id, const char *text)
{
    size_t length = 0;
    const char *bytes = qd_tokenizer_bytes(tokenizer, id, &length);
    assert_non_null(bytes);
    assert_int_equal(length, strlen(text));
    assert_memory_equal(bytes, text, length);
}

static void learns_by_count_then_id(void **state)
{
    (void)state;
    /* " bc" twice, "ab" three times, "cd" three times: ties are resolved by the lower ids. */
    const char *text = "ab ab ab cd cd cd bc bc";
    qd_tokenizer_training training = qd_tokenizer_training_default();
    training.all_bytes = false;
    training.vocab = 100;
    training.min_frequency = 3;
    training.special = (const char *const[]){"<s>", "</s>"};
    training.special_count = 2;
    qd_tokenizer *tokenizer = train(training, write_file("count", text, strlen(text)));
    const char *expected[] = {"<s>", "</s>", "a", "b", "c", "d", " ", "ab", "cd", " cd"};
    for (int32_t i = 0; i < 10; i++)
        expect_token(tokenizer, i, expected[i]);
    assert_int_equal(qd_tokenizer_size(tokenizer), 10);
    assert_int_equal(qd_tokenizer_special(tokenizer, "</s>"), 1);
    qd_tokenizer_destroy(tokenizer);
    /* Limits on the token length and on the vocabulary. */
    training.max_token = 3;
    tokenizer = train(training, write_file("count", text, strlen(text)));
    assert_int_equal(qd_tokenizer_size(tokenizer), 9);
    qd_tokenizer_destroy(tokenizer);
    training.vocab = 8;
    tokenizer = train(training, write_file("count", text, strlen(text)));
    assert_int_equal(qd_tokenizer_size(tokenizer), 8);
    qd_tokenizer_destroy(tokenizer);
}

static void bytes_first(void **state)
{
    (void)state;
    qd_tokenizer_training training = qd_tokenizer_training_default();
    qd_tokenizer *tokenizer = train(training, write_file("one", "xx\xff", 3));
    assert_int_equal(qd_tokenizer_size(tokenizer), 257);
    expect_token(tokenizer, 0, "!");
    expect_token(tokenizer, 256, "xx");
    qd_tokenizer_destroy(tokenizer);
    /* REPLACE learns from U+FFFD instead of the byte. */
    training.broken = QD_BROKEN_REPLACE;
    tokenizer = train(training, write_file("one", "\xff\xff", 2));
    assert_int_equal(qd_tokenizer_size(tokenizer), 259);
    expect_token(tokenizer, 257, "\xef\xbf\xbd");
    qd_tokenizer_destroy(tokenizer);
}

/* Text longer than a chunk, with long lines and without line ends: threads change nothing, and
 * whole files are split as in encoding. */
static void threads_and_chunks(void **state)
{
    (void)state;
    const size_t length = 3500000;
    char *text = malloc(length);
    qd_philox_key key = qd_rng_key(4, "text");
    static const char *const words[] = {"alpha", " beta", "\n", " gamma", "\n\n", "Delta", "  ", "12", "}\n", " \xe4\xb8\xad", "x\ny"};
    for (size_t at = 0, i = 0; at < length; i++) {
        bool no_lines = at > 1000000 && at < 2300000; /* more than a chunk without a line end */
        const char *word = words[qd_rng_below(key, i, sizeof words / sizeof *words)];
        if (no_lines && strchr(word, '\n'))
            word = " omega";
        size_t size = strlen(word) < length - at ? strlen(word) : length - at;
        memcpy(text + at, word, size);
        at += size;
    }
    for (int whole = 0; whole < 2; whole++) {
        qd_strbuf saved[3] = {{0}};
        for (int i = 0; i < 3; i++) {
            qd_tokenizer_training training = qd_tokenizer_training_default();
            training.pattern = i == 2 && whole
                                   ? "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+"
                                     "[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s++"
                                   : "llama3";
            training.vocab = 400;
            training.whole_files = whole;
            training.threads = i + 1;
            qd_tokenizer *tokenizer = train(training, write_file("long", text, length));
            assert_int_equal(qd_tokenizer_save_text(tokenizer, &saved[i]), QD_OK);
            qd_tokenizer_destroy(tokenizer);
        }
        assert_string_equal(saved[0].data, saved[1].data);
        /* The third of the whole files has another spelling, which PCRE2 matches, in one part:
         * everything else is equal. */
        const char *models[2] = {strstr(saved[0].data, "\"model\""), strstr(saved[2].data, "\"model\"")};
        assert_string_equal(models[0], models[1]);
        for (int i = 0; i < 3; i++)
            qd_strbuf_free(&saved[i]);
    }
    free(text);
}

/* Separator lines belong to no document, so nothing is learned from them. */
static void separators_are_passed_over(void **state)
{
    (void)state;
    const char *text = "%%%%\none two one\n%%%%\r\ntwo one two\n%%%%\n%%%%\nnot %%%% alone: %%%%%\n%%%%";
    const char *bare = "one two one\ntwo one two\nnot %%%% alone: %%%%%\n";
    for (int whole = 0; whole < 2; whole++) {
        qd_strbuf saved[3] = {{0}};
        for (int i = 0; i < 3; i++) {
            qd_tokenizer_training training = qd_tokenizer_training_default();
            training.vocab = 300;
            training.whole_files = whole;
            training.separator = i == 0 ? "%%%%" : "";
            const char *content = i == 1 ? bare : text;
            qd_tokenizer *tokenizer = train(training, write_file("separated", content, strlen(content)));
            assert_int_equal(qd_tokenizer_save_text(tokenizer, &saved[i]), QD_OK);
            qd_tokenizer_destroy(tokenizer);
        }
        assert_string_equal(saved[0].data, saved[1].data);
        assert_string_not_equal(saved[0].data, saved[2].data);
        for (int i = 0; i < 3; i++)
            qd_strbuf_free(&saved[i]);
    }
}

static void trained_round_trip(void **state)
{
    (void)state;
    const char *text = "It was the best of times, it was the worst of times.\nIt was the age of wisdom\n";
    qd_tokenizer_training training = qd_tokenizer_training_default();
    training.vocab = 300;
    training.special = (const char *const[]){"<|endoftext|>"};
    training.special_count = 1;
    const char *path = write_file("text", text, strlen(text));
    qd_tokenizer *tokenizer = train(training, path), *loaded;
    char saved[160];
    snprintf(saved, sizeof saved, "%s/tokenizer.json", folder);
    assert_int_equal(qd_tokenizer_save(tokenizer, saved), QD_OK);
    assert_int_equal(qd_tokenizer_load(saved, NULL, &loaded), QD_OK);
    qd_encoder *encoders[2];
    qd_tokens tokens[2] = {{0}};
    assert_int_equal(qd_encoder_create(tokenizer, &encoders[0]), QD_OK);
    assert_int_equal(qd_encoder_create(loaded, &encoders[1]), QD_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(qd_encoder_encode(encoders[i], text, strlen(text), NULL, &tokens[i]), QD_OK);
    assert_true(tokens[0].count < strlen(text) / 2);
    assert_int_equal(tokens[0].count, tokens[1].count);
    assert_memory_equal(tokens[0].ids, tokens[1].ids, tokens[0].count * sizeof(int32_t));
    qd_strbuf back = {0};
    assert_int_equal(qd_tokenizer_decode(loaded, tokens[0].ids, tokens[0].count, true, &back), QD_OK);
    assert_string_equal(back.data, text);
    assert_int_equal(qd_tokenizer_special(loaded, "<|endoftext|>"), 0);
    qd_strbuf_free(&back);
    for (int i = 0; i < 2; i++) {
        qd_tokens_free(&tokens[i]);
        qd_encoder_destroy(encoders[i]);
    }
    qd_tokenizer_destroy(tokenizer);
    qd_tokenizer_destroy(loaded);
}

static void refuse(qd_tokenizer_training training, const char *path, const char *named)
{
    qd_tokenizer *tokenizer = NULL;
    training.paths = &path;
    training.path_count = path ? 1 : 0;
    assert_int_equal(qd_tokenizer_train(&training, &tokenizer), QD_USAGE);
    assert_null(tokenizer);
    if (!strstr(qd_error_message(), named))
        fail_msg("%s is not named in: %s", named, qd_error_message());
}

static void bad_input_is_named(void **state)
{
    (void)state;
    qd_tokenizer_training training = qd_tokenizer_training_default();
    char path[160];
    snprintf(path, sizeof path, "%s/nothing", folder);
    refuse(training, path, "nothing");
    refuse(training, NULL, "no text");
    refuse(training, write_file("empty", "", 0), "empty: the file is empty");
    snprintf(path, sizeof path, "%s/folder", folder);
    assert_int_equal(mkdir(path, 0700), 0);
    refuse(training, path, "the folder contains no text");
    write_file("folder/binary", "\0\1", 2);
    write_file("folder/.hidden", "text", 4);
    refuse(training, path, "the folder contains no text");
    write_file("folder/b", "bb bb", 5);
    write_file("folder/a", "aa", 2);
    qd_tokenizer_training bytes = training;
    bytes.all_bytes = false;
    qd_tokenizer *both = train(bytes, path); /* a, b, the space, aa, bb, and a space before bb */
    assert_int_equal(qd_tokenizer_size(both), 6);
    qd_tokenizer_destroy(both);
    refuse(training, write_file("tokens.qds", "text", 4), "contains tokens");
    qd_tokenizer_training other = training;
    other.pattern = "(";
    refuse(other, path, "regular expression");
    other = training;
    other.vocab = 0;
    refuse(other, path, "vocabulary");
    other = training;
    other.special = (const char *const[]){"<s>", "<s>"};
    other.special_count = 2;
    refuse(other, path, "'<s>' is listed twice");
    other.special = (const char *const[]){"\xc3\xa9"};
    other.special_count = 1;
    refuse(other, path, "other bytes");
}

/* From a .jsonl file only the texts are learned, with lines of any length and across chunk
 * boundaries. */
static void lines_of_objects(void **state)
{
    (void)state;
    qd_tokenizer_training training = qd_tokenizer_training_for_run(600);
    training.special_count = 0;
    qd_strbuf objects = {0}, plain = {0};
    qd_strbuf_puts(&objects, "\xef\xbb\xbf"); /* byte order mark, as some editors write it */
    for (int i = 0; i < 40000; i++) {
        const char *word = i % 3 ? "tea" : "caf\xc3\xa9";
        qd_strbuf_printf(&objects, "%s{\"id\": %d, \"text\": \"the \\\"%s\\\"\\n\", \"other\": [\"zzzz\"]}\n%s", i % 5 ? "" : " ", i,
                         word, i % 7 ? "" : "\r\n");
        qd_strbuf_printf(&plain, "the \"%s\"\n", word);
    }
    assert_true(objects.length > 2u << 20);
    for (int threads = 1; threads <= 3; threads++) {
        training.threads = threads;
        qd_tokenizer *a = train(training, write_file("lines.jsonl", objects.data, objects.length));
        qd_tokenizer *b = train(training, write_file("plain.txt", plain.data, plain.length));
        qd_strbuf first = {0}, second = {0};
        assert_int_equal(qd_tokenizer_save_text(a, &first), QD_OK);
        assert_int_equal(qd_tokenizer_save_text(b, &second), QD_OK);
        assert_true(qd_tokenizer_size(a) > 260);
        assert_int_equal(first.length, second.length);
        assert_memory_equal(first.data, second.data, first.length);
        qd_strbuf_free(&first);
        qd_strbuf_free(&second);
        qd_tokenizer_destroy(a);
        qd_tokenizer_destroy(b);
    }
    qd_strbuf_free(&objects);
    qd_strbuf_free(&plain);
    refuse(training, write_file("bad.jsonl", "{\"text\": \"a\"}\n{\"text\": 3}\n", 26), "bad.jsonl (the line at byte 14): 'text'");
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/qd-tokenizer-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(learns_by_count_then_id), cmocka_unit_test(bytes_first), cmocka_unit_test(threads_and_chunks),
        cmocka_unit_test(trained_round_trip), cmocka_unit_test(bad_input_is_named),
        cmocka_unit_test(lines_of_objects),        cmocka_unit_test(separators_are_passed_over),
    };
    return cmocka_run_group_tests_name("tokenizer training", tests, make_folder, remove_folder);
}
