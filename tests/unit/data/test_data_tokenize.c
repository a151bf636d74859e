/* Text to shards: the same for any number of threads, complete or not at all, documents in the
 * right places. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <quadrille/data.h>

#include "base/rng.h"
#include "data/encode.h"
#include "data/shard.h"
#include "support/scratch.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A token per line: a hash of the line. Text may be cut after each line end, and nowhere else: a
 * wrong cut changes a token. 70000 ends a document. */
enum { VOCAB = 70001, END = 70000 };

static qd_status encode_lines(void *context, int thread, const char *text, size_t length, qd_tokens *out)
{
    (void)context;
    (void)thread;
    for (size_t at = 0; at < length;) {
        uint32_t hash = 17;
        while (at < length) {
            char c = text[at++];
            hash = hash * 31 + (unsigned char)c;
            if (c == '\n')
                break;
        }
        if (out->count == out->capacity) {
            out->capacity = out->capacity ? out->capacity * 2 : 64;
            out->ids = realloc(out->ids, out->capacity * sizeof *out->ids);
            assert_non_null(out->ids);
        }
        out->ids[out->count++] = (int32_t)(hash % END);
    }
    return QD_OK;
}

static size_t cut_lines(void *context, const char *text, size_t length)
{
    (void)context;
    for (size_t at = length - 1; at > 0; at--)
        if (text[at - 1] == '\n')
            return at;
    return 0;
}

static const qd_text_encoder line_encoder = {
    .size = sizeof(qd_text_encoder), .encode = encode_lines, .cut = cut_lines, .vocab = VOCAB, .hash = 9, .document_end = END};

static int32_t line_token(const char *text)
{
    qd_tokens tokens = {0};
    encode_lines(NULL, 0, text, strlen(text), &tokens);
    assert_int_equal(tokens.count, 1);
    int32_t token = tokens.ids[0];
    free(tokens.ids);
    return token;
}

static qd_tokenize_options options_for(const char *const *inputs, int count, const char *output)
{
    qd_tokenize_options o = qd_tokenize_options_default();
    o.inputs = inputs;
    o.input_count = count;
    o.output = output;
    o.encoder = &line_encoder;
    o.threads = 2;
    return o;
}

/* The tokens of a folder of shards, with document starts marked by adding VOCAB. */
static int32_t *read_folder(const char *folder, int64_t shards, int64_t *count)
{
    int32_t *tokens = NULL;
    *count = 0;
    for (int64_t s = 0; s < shards; s++) {
        char path[512];
        snprintf(path, sizeof path, "%s/shard-%05lld.qds", folder, (long long)s);
        qd_shard shard;
        assert_int_equal(qd_shard_open(path, true, 1, &shard), QD_OK);
        tokens = realloc(tokens, (size_t)(*count + shard.token_count) * sizeof *tokens);
        for (int64_t i = 0; i < shard.token_count; i++) {
            uint16_t narrow = 0;
            uint32_t wide = 0;
            assert_int_equal(qd_shard_tokens(&shard, i, 1, shard.token_bytes == 2 ? (void *)&narrow : &wide), QD_OK);
            tokens[*count + i] = shard.token_bytes == 2 ? narrow : (int32_t)wide;
        }
        for (int64_t d = 0; d < shard.document_count; d++) {
            uint64_t document;
            assert_int_equal(qd_shard_documents(&shard, d, 1, &document), QD_OK);
            tokens[*count + (int64_t)document] += VOCAB;
        }
        *count += shard.token_count;
        qd_shard_close(&shard);
    }
    return tokens;
}

static void expect(const char *folder, int64_t shards, const int32_t *expected, int64_t expected_count)
{
    int64_t count;
    int32_t *tokens = read_folder(folder, shards, &count);
    assert_int_equal(count, expected_count);
    assert_memory_equal(tokens, expected, (size_t)count * sizeof *tokens);
    free(tokens);
}

static bool count_calls(void *context, const qd_tokenize_progress *progress)
{
    int64_t *last = context;
    assert_true(progress->bytes >= *last && progress->bytes <= progress->bytes_total);
    *last = progress->bytes;
    return true;
}

/* Nine MB of lines of very different lengths: pieces end anywhere. */
static void threads_change_nothing(void **state)
{
    enum { BYTES = 9 << 20 };
    char *text = malloc(BYTES);
    qd_philox_key key = qd_rng_key(8, "lines");
    for (int64_t i = 0; i < BYTES; i++)
        text[i] = (char)(' ' + i * i % 90);
    for (int64_t at = 0, n = 0; at < BYTES; n++) {
        text[at] = '\n';
        /* Every hundredth line is longer than a piece. */
        at += 1 + (int64_t)qd_rng_below(key, (uint64_t)n, n % 100 == 99 ? 3000000 : 3000);
    }
    const char *inputs[] = {scratch_write(state, "big/a.txt", text, BYTES),
                            scratch_write(state, "big/b.txt", text + 5, 100000),
                            scratch_write(state, "big/c.txt", text + 9, 5)};
    qd_tokens whole = {0};
    encode_lines(NULL, 0, text, BYTES, &whole);
    int64_t first_count = (int64_t)whole.count;
    int32_t *first = NULL;
    int64_t count = 0;
    for (int threads = 1; threads <= 5; threads += 2) {
        char name[32];
        snprintf(name, sizeof name, "out%d", threads);
        qd_tokenize_options o = options_for(inputs, 3, scratch_path(state, name));
        int64_t last = 0;
        o.threads = threads;
        o.shard_tokens = 1000;
        o.progress = count_calls;
        o.progress_context = &last;
        qd_tokenize_report report = qd_tokenize_report_default();
        assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
        assert_int_equal(last, BYTES + 100005);
        assert_int_equal(report.files, 3);
        assert_int_equal(report.documents, 3);
        assert_int_equal(report.token_bytes, 4);
        int64_t now;
        int32_t *tokens = read_folder(o.output, report.shards, &now);
        assert_int_equal(now, report.tokens);
        assert_int_equal(report.shards, (now + 999) / 1000);
        if (!first) {
            /* The result equals encoding the whole text at once. */
            first = tokens;
            count = now;
            assert_int_equal(tokens[0], whole.ids[0] + VOCAB);
            assert_memory_equal(tokens + 1, whole.ids + 1, (size_t)(first_count - 1) * sizeof *tokens);
            assert_int_equal(tokens[first_count], END);
            assert_true(tokens[first_count + 1] >= VOCAB);
        } else {
            assert_int_equal(now, count);
            assert_memory_equal(tokens, first, (size_t)count * sizeof *tokens);
            free(tokens);
        }
    }
    free(first);
    free(whole.ids);
    free(text);
}

static void separators(void **state)
{
    const char *inputs[] = {
        scratch_text(state, "s/a.txt", "===\none\ntwo\n===\n===\r\nthree\n ===\n=== \n===\n"),
        scratch_text(state, "s/b.txt", "four\n===\nfive"),
    };
    qd_tokenize_options o = options_for(inputs, 2, scratch_path(state, "s-out"));
    o.documents.separator = "===";
    qd_tokenize_report report = qd_tokenize_report_default();
    assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
    assert_int_equal(report.documents, 4);
    const int32_t expected[] = {
        line_token("one\n") + VOCAB,
        line_token("two\n"),
        END,
        line_token("three\n") + VOCAB,
        line_token(" ===\n"),
        line_token("=== \n"),
        END,
        line_token("four\n") + VOCAB,
        END,
        line_token("five") + VOCAB,
        END,
    };
    expect(o.output, report.shards, expected, sizeof expected / sizeof expected[0]);
}

/* Bytes may be cut anywhere, but not inside a separator: here it is on the boundary of the
 * pieces. */
static void separators_on_the_border(void **state)
{
    enum { PIECE = 1 << 20 };
    for (int shift = -6; shift <= 3; shift++) {
        char *text = malloc(PIECE * 2), name[32];
        memset(text, 'x', PIECE * 2);
        memcpy(text + PIECE + shift, "\n---\n", 5);
        snprintf(name, sizeof name, "border%d.txt", shift);
        const char *inputs[] = {scratch_write(state, name, text, PIECE * 2)};
        snprintf(name, sizeof name, "border%d", shift);
        qd_tokenize_options o = options_for(inputs, 1, scratch_path(state, name));
        const qd_text_encoder bytes = qd_text_encoder_bytes();
        o.encoder = &bytes;
        o.documents.separator = "---";
        qd_tokenize_report report = qd_tokenize_report_default();
        assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
        assert_int_equal(report.documents, 2);
        assert_int_equal(report.tokens, PIECE * 2 - 4);
        free(text);
    }
}

static void lines_of_json(void **state)
{
    /* Some editors write a byte order mark before the text. */
    const char *inputs[] = {scratch_text(state, "j/a.jsonl",
                                         "\xef\xbb\xbf{\"id\": 1, \"text\": \"one\\ntwo\"}\n\n"
                                         "{\"text\": \"\"}\r\n  \n{\"text\": \"\\u00e4\", \"more\": []}\n"
                                         "{\"text\": \"\\ud83d\"}")};
    qd_tokenize_options o = options_for(inputs, 1, scratch_path(state, "j-out"));
    qd_tokenize_report report = qd_tokenize_report_default();
    assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
    const int32_t expected[] = {line_token("one\n") + VOCAB, line_token("two"), END, line_token("\xc3\xa4") + VOCAB,
                                END, line_token("\xef\xbf\xbd") + VOCAB, END};
    expect(o.output, report.shards, expected, 7);

    static const struct {
        const char *text, *why;
    } rows[] = {
        {"{\"text\": \"a\"}\n{\"text\": \"b\"\n", "bad.jsonl (line 2)"},
        {"{\"text\": \"a\"}\n\n{\"txt\": \"b\"}\n", "bad.jsonl (line 3): 'text' is missing"},
        {"{\"text\": 5}\n", "bad.jsonl (line 1): 'text' must be a string"},
        {"[1]\n", "bad.jsonl (line 1)"},
        {"{\"text\": \"a\"}\n\xef\xbb\xbf{\"text\": \"b\"}\n", "bad.jsonl (line 2)"}, /* in the middle of a file it is not a mark */
    };
    for (size_t r = 0; r < sizeof rows / sizeof rows[0]; r++) {
        const char *bad[] = {scratch_text(state, "j/bad.jsonl", rows[r].text)};
        o = options_for(bad, 1, scratch_path(state, "bad-out"));
        assert_int_equal(qd_tokenize_files(&o, &report), QD_USAGE);
        if (!strstr(qd_error_message(), rows[r].why))
            fail_msg("'%s' does not say '%s'", qd_error_message(), rows[r].why);
        assert_int_equal(access(o.output, F_OK), -1);
        assert_int_equal(access(scratch_path(state, "bad-out.partial"), F_OK), -1);
    }
    const char *other[] = {scratch_text(state, "j/other.jsonl", "{\"content\": \"one\\n\"}\n")};
    o = options_for(other, 1, scratch_path(state, "other-out"));
    o.documents.field = "content";
    assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
    assert_int_equal(report.tokens, 2);
}

static bool stop_at_once(void *context, const qd_tokenize_progress *progress)
{
    (void)context;
    (void)progress;
    return false;
}

static void whole_or_not_at_all(void **state)
{
    const char *inputs[] = {scratch_text(state, "w.txt", "one\ntwo\n")};
    qd_tokenize_report report = qd_tokenize_report_default();
    qd_tokenize_options o = options_for(inputs, 1, scratch_path(state, "w-out"));
    o.progress = stop_at_once;
    assert_int_equal(qd_tokenize_files(&o, &report), QD_INTERRUPTED);
    assert_int_equal(access(o.output, F_OK), -1);
    /* Files of a killed process are no obstacle and are not included. */
    scratch_text(state, "w-out.partial/shard-00007.qds", "rest");
    o.progress = NULL;
    o.output = scratch_path(state, "w-out/"); /* with a trailing slash, as users type it */
    assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
    assert_int_equal(report.shards, 1);
    assert_int_equal(access(scratch_path(state, "w-out/shard-00000.qds"), F_OK), 0);
    assert_int_equal(access(scratch_path(state, "w-out/shard-00007.qds"), F_OK), -1);
    /* Never into a non-empty folder. */
    assert_int_equal(qd_tokenize_files(&o, &report), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "not empty"));

    const char *shard[] = {scratch_path(state, "w-out")};
    o = options_for(shard, 1, scratch_path(state, "again"));
    assert_int_equal(qd_tokenize_files(&o, &report), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "already a token shard"));
    const char *missing[] = {scratch_path(state, "nobody")};
    o = options_for(missing, 1, scratch_path(state, "again"));
    assert_int_equal(qd_tokenize_files(&o, &report), QD_USAGE);
    o = options_for(inputs, 1, scratch_path(state, "again"));
    qd_text_encoder nothing = qd_text_encoder_default();
    o.encoder = &nothing;
    assert_int_equal(qd_tokenize_files(&o, &report), QD_USAGE);
    o = options_for(inputs, 1, scratch_path(state, "w.txt"));
    assert_int_equal(qd_tokenize_files(&o, &report), QD_USAGE);
}

/* Text without a place to cut is eventually cut between characters. */
static void text_without_line_ends(void **state)
{
    enum { BYTES = 40 << 20 };
    char *text = malloc(BYTES);
    for (int i = 0; i + 2 < BYTES; i += 3)
        memcpy(text + i, "\xe2\x82\xac", 3);
    const char *inputs[] = {scratch_write(state, "euro.txt", text, BYTES / 3 * 3)};
    qd_tokenize_options o = options_for(inputs, 1, scratch_path(state, "euro-out"));
    qd_tokenize_report report = qd_tokenize_report_default();
    assert_int_equal(qd_tokenize_files(&o, &report), QD_OK);
    assert_int_equal(report.documents, 1);
    assert_int_equal(report.bytes, BYTES / 3 * 3);
    assert_true(report.tokens >= 3 && report.tokens <= 6); /* a token per piece, and the end */
    /* All complete pieces are equal if each contains whole characters. */
    int64_t count;
    int32_t *tokens = read_folder(o.output, report.shards, &count);
    assert_int_equal(tokens[0] - VOCAB, tokens[1]);
    free(tokens);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(threads_change_nothing),   cmocka_unit_test(separators),
        cmocka_unit_test(separators_on_the_border), cmocka_unit_test(lines_of_json),
        cmocka_unit_test(whole_or_not_at_all),      cmocka_unit_test(text_without_line_ends),
    };
    return cmocka_run_group_tests_name("tokenize", tests, scratch_setup, scratch_teardown);
}
