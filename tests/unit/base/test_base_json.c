/* JSON reading and writing, numbers as text, and the file helpers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/text/json.h"
#include "base/text/json_writer.h"
#include "base/rng.h"
#include "base/text/strbuf.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static void writes(void **state)
{
    (void)state;
    qd_strbuf out = {0};
    qd_json_writer writer = qd_json_writer_on(&out);
    qd_json_object_begin(&writer, NULL);
    qd_json_put_int(&writer, "step", -3);
    qd_json_put_double(&writer, "loss", 0.1);
    qd_json_put_double(&writer, "nan", NAN);
    qd_json_put_double(&writer, "inf", -INFINITY);
    qd_json_put_double(&writer, "minus_zero", -0.0);
    qd_json_put_bool(&writer, "ok", true);
    qd_json_put_null(&writer, "none");
    qd_json_put_string(&writer, "absent", NULL);
    qd_json_list_begin(&writer, "list");
    qd_json_put_int(&writer, NULL, 1);
    qd_json_object_begin(&writer, NULL);
    qd_json_end(&writer);
    qd_json_list_begin(&writer, NULL);
    qd_json_end(&writer);
    qd_json_end(&writer);
    qd_json_put_string(&writer, "text", "\"\\\b\f\n\r\t\v\x1f\x7f é");
    qd_json_end(&writer);
    qd_json_newline(&writer);
    qd_json_object_begin(&writer, NULL);
    qd_json_end(&writer);
    assert_string_equal(out.data, "{\"step\":-3,\"loss\":0.10000000000000001,\"nan\":null,\"inf\":null,\"minus_zero\":-0.0,\"ok\":true,"
                                  "\"none\":null,\"absent\":null,\"list\":[1,{},[]],"
                                  "\"text\":\"\\\"\\\\\\b\\f\\n\\r\\t\\u000b\\u001f\\u007f é\"}\n{}");
    qd_strbuf_free(&out);
}

/* Text collected by other programs: NUL, and unpaired surrogates. */
static void reads_collected(void **state)
{
    (void)state;
    static const struct {
        const char *json, *text;
        size_t length;
    } rows[] = {
        {"\\ud83d\\ude00", "\xf0\x9f\x98\x80", 4},
        {"\\uD83D\\uDE00", "\xf0\x9f\x98\x80", 4},
        {"a\\ud83d", "a\xef\xbf\xbd", 4},
        {"\\ud83dx", "\xef\xbf\xbdx", 4},
        {"\\uDE00\\ud83d", "\xef\xbf\xbd\xef\xbf\xbd", 6},
        {"\\ud83d\\ud83d\\ude00", "\xef\xbf\xbd\xf0\x9f\x98\x80", 7},
        {"\\\\ud83d", "\\ud83d", 6}, /* an escaped backslash, and what follows it */
        {"\\\\\\ud83d", "\\\xef\xbf\xbd", 4},
        {"a\\u0000b", "a\0b", 3},
        {"\\u00e4\\ud7ff\\ue000", "\xc3\xa4\xed\x9f\xbf\xee\x80\x80", 8},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char json[96];
        qd_json *document;
        const char *value;
        size_t length;
        snprintf(json, sizeof json, "{\"text\": \"%s\"}", rows[i].json);
        assert_int_equal(qd_json_load_collected("line", json, strlen(json), &document), QD_OK);
        assert_int_equal(qd_json_get_bytes(document, qd_json_root(document), "text", &value, &length), QD_OK);
        assert_int_equal(length, rows[i].length);
        assert_memory_equal(value, rows[i].text, length);
        assert_int_equal(qd_json_get_bytes(document, qd_json_root(document), "txt", &value, &length), QD_USAGE);
        qd_json_destroy(document);
    }
    static const char *const bad[] = {"{\"text\": \"\\ud83\"}", "{\"text\": \"\\ud83d", "{\"text\": \"\\ud83", "\\ud83d\\"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        qd_json *document;
        assert_int_equal(qd_json_load_collected("line", bad[i], strlen(bad[i]), &document), QD_USAGE);
    }
}

/* Any bytes and any double survive a round trip. */
static void round_trip(void **state)
{
    (void)state;
    qd_philox_key key = qd_rng_key(1, "json");
    for (uint64_t i = 0; i < 20000; i++) {
        uint32_t words[4];
        qd_philox4x32(key, i, 0, words);
        double number;
        memcpy(&number, words, sizeof number);
        char bytes[9];
        memcpy(bytes, words + 2, 8);
        bytes[8] = '\0';
        qd_strbuf out = {0};
        qd_json_writer writer = qd_json_writer_on(&out);
        qd_json_object_begin(&writer, NULL);
        qd_json_put_double(&writer, "number", number);
        qd_json_put_string(&writer, "text", bytes);
        qd_json_end(&writer);
        qd_json *document;
        assert_int_equal(qd_json_load_text("mine", out.data, out.length, &document), QD_OK);
        const qd_json_node *root = qd_json_root(document);
        double got;
        if (isfinite(number)) {
            assert_int_equal(qd_json_get_double(document, root, "number", &got), QD_OK);
            assert_true(got == number);
            char text[QD_DOUBLE_TEXT];
            qd_double_shortest(number, text);
            assert_true(qd_double_parse(text, NULL) == number);
        } else {
            assert_int_equal(qd_json_kind_of(qd_json_member(root, "number")), QD_JSON_NULL);
        }
        const char *text;
        assert_int_equal(qd_json_get_string(document, root, "text", &text), QD_OK);
        if (qd_utf8_valid(bytes, strlen(bytes)) == strlen(bytes))
            assert_string_equal(text, bytes);
        else
            assert_non_null(strstr(text, "\xef\xbf\xbd"));
        qd_json_destroy(document);
        qd_strbuf_free(&out);
    }
}

static void writes_bytes(void **state)
{
    (void)state;
    static const char bytes[] = "a\0\"\xff\xc3\xa4\n"; /* the NUL at its end counts too */
    qd_strbuf out = {0};
    qd_json_writer writer = qd_json_writer_on(&out);
    qd_json_list_begin(&writer, NULL);
    qd_json_put_bytes(&writer, NULL, bytes, sizeof bytes);
    qd_json_put_bytes(&writer, NULL, NULL, 0);
    qd_json_put_string(&writer, NULL, NULL);
    qd_json_end(&writer);
    assert_string_equal(out.data, "[\"a\\u0000\\\"\xef\xbf\xbd\xc3\xa4\\n\\u0000\",\"\",null]");
    qd_strbuf_free(&out);
}

static void reads(void **state)
{
    (void)state;
    static const char text[] = "{\"z\": 1, \"a\": [true, 2.5, \"x\", null], \"m\": {\"k\": -7}}";
    qd_json *document;
    assert_int_equal(qd_json_load_text("models.json", text, strlen(text), &document), QD_OK);
    assert_string_equal(qd_json_name(document), "models.json");
    const qd_json_node *root = qd_json_root(document), *list, *object, *value;
    const char *keys[3], *key;
    int members = 0;
    for (qd_json_iterator it = qd_json_begin(root); qd_json_next(&it, &key, &value);)
        keys[members++] = key;
    assert_int_equal(members, 3);
    assert_string_equal(keys[0], "z"); /* in file order */
    assert_string_equal(keys[2], "m");
    assert_int_equal(qd_json_count(root), 3);
    assert_int_equal(qd_json_get_node(document, root, "a", QD_JSON_LIST, &list), QD_OK);
    assert_int_equal(qd_json_count(list), 4);
    bool truth = false;
    double real = 0;
    int64_t integer = 0;
    assert_true(qd_json_as_bool(qd_json_item(list, 0), &truth) && truth);
    assert_true(qd_json_as_double(qd_json_item(list, 1), &real) && real == 2.5);
    assert_string_equal(qd_json_as_string(qd_json_item(list, 2)), "x");
    assert_int_equal(qd_json_kind_of(qd_json_item(list, 3)), QD_JSON_NULL);
    assert_null(qd_json_item(list, 4));
    assert_false(qd_json_as_int(qd_json_item(list, 1), &integer));
    assert_false(qd_json_as_int(NULL, &integer));
    assert_null(qd_json_as_string(NULL));
    assert_int_equal(qd_json_get_node(document, root, "m", QD_JSON_OBJECT, &object), QD_OK);
    assert_int_equal(qd_json_get_int(document, object, "k", &integer), QD_OK);
    assert_int_equal(integer, -7);
    assert_int_equal(qd_json_get_double(document, object, "k", &real), QD_OK);
    assert_true(real == -7.0);
    assert_int_equal(qd_json_get_int(document, object, "q", &integer), QD_USAGE);
    assert_string_equal(qd_error_message(), "models.json: 'q' is missing; it must be an integer");
    assert_int_equal(qd_json_get_bool(document, root, "z", &truth), QD_USAGE);
    assert_string_equal(qd_error_message(), "models.json: 'z' must be true or false");
    assert_int_equal(qd_json_get_node(document, root, "z", QD_JSON_LIST, &list), QD_USAGE);
    assert_string_equal(qd_error_message(), "models.json: 'z' must be a list");
    qd_json_destroy(document);
    qd_json_destroy(NULL);
}

static void refuses(void **state)
{
    (void)state;
    static const char *const bad[] = {"",         "{",     "[1,]", "{\"a\":1,\"a\":2}", "nul", "{\"a\" 1}", "[1] x",
                                      "\"\xff\"", "[NaN]", "1"};
    qd_json *document;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(qd_json_load_text("bad.json", bad[i], strlen(bad[i]), &document), QD_USAGE);
        assert_null(document);
        assert_memory_equal(qd_error_message(), "bad.json:1:", 11);
    }
    assert_int_equal(qd_json_load_text("bad.json", "{\"a\": 1,\n  \"b\": x}", 18, &document), QD_USAGE);
    assert_memory_equal(qd_error_message(), "bad.json:2:", 11);
    assert_int_equal(qd_json_load_text("bad.json", "[\"a\0b\"]", 7, &document), QD_USAGE);
    qd_strbuf deep = {0};
    qd_strbuf_pad(&deep, '[', 1000000);
    assert_int_equal(qd_json_load_text("bad.json", deep.data, deep.length, &document), QD_USAGE);
    qd_strbuf_free(&deep);
    assert_int_equal(qd_json_load("/nonexistent/x.json", &document), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "/nonexistent/x.json: cannot be read"));
}

static void other_locales(void **state)
{
    (void)state;
    /* Independent of the host program's locale: fails with a comma locale installed if the locale
     * leaks in. */
    if (!setlocale(LC_ALL, "de_DE.UTF-8"))
        setlocale(LC_ALL, "C.UTF-8");
    char text[QD_DOUBLE_TEXT], *end;
    qd_double_17(0.5, text);
    assert_string_equal(text, "0.5");
    assert_true(qd_double_parse("2.25x", &end) == 2.25);
    assert_string_equal(end, "x");
    setlocale(LC_ALL, "C");
}

static void files(void **state)
{
    (void)state;
    char folder[] = "/tmp/quadrille-files-XXXXXX", path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a.txt", folder);
    char *text;
    size_t length;
    assert_int_equal(qd_file_replace(path, "one", 3), QD_OK);
    assert_int_equal(qd_file_replace(path, "second", 6), QD_OK);
    assert_int_equal(qd_file_read(path, 100, &text, &length), QD_OK);
    assert_int_equal(length, 6);
    assert_string_equal(text, "second");
    free(text);
    assert_int_equal(qd_file_read(path, 5, &text, &length), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "too large"));
    assert_null(text);
    assert_int_equal(qd_file_read(path, 6, &text, &length), QD_OK);
    free(text);
    assert_int_equal(qd_file_read("/dev/zero", 100000, &text, &length), QD_USAGE); /* endless */
    assert_int_equal(qd_file_read("/dev/null", 100, &text, &length), QD_OK);
    assert_int_equal(length, 0);
    free(text);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkdir(path, 0700), 0); /* a folder cannot be replaced by a file */
    assert_int_equal(qd_file_replace(path, "x", 1), QD_IO);
    assert_int_equal(rmdir(path), 0);
    assert_int_equal(rmdir(folder), 0); /* nothing else was left behind */
}

/* A named pipe is refused immediately, where opening it would wait for a writer; an anonymous one
 * is what "<(command)" gives. */
static void pipes(void **state)
{
    (void)state;
    char folder[] = "/tmp/quadrille-files-XXXXXX", path[64], *text;
    size_t length;
    int64_t bytes;
    int fd, ends[2];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/pipe", folder);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(20);
    assert_int_equal(qd_file_read(path, 100, &text, &length), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "is a named pipe; a file is needed"));
    assert_int_equal(qd_file_open(path, &fd, &bytes), QD_USAGE);
    alarm(0);
    assert_int_equal(qd_file_open(folder, &fd, &bytes), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "is a folder; a file is needed"));
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], "text", 4), 4);
    assert_int_equal(close(ends[1]), 0);
    char name[32];
    snprintf(name, sizeof name, "/dev/fd/%d", ends[0]);
    assert_int_equal(qd_file_read(name, 100, &text, &length), QD_OK);
    assert_string_equal(text, "text");
    free(text);
    close(ends[0]);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

static void touch(const char *folder, const char *format, long number, char path[128])
{
    char name[64];
    snprintf(name, sizeof name, format, number);
    snprintf(path, 128, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fclose(file);
}

/* Files of a killed writer are removed by the next write; those of a running one, and files with
 * similar names, stay. */
static void leftovers(void **state)
{
    (void)state;
    char folder[] = "/tmp/quadrille-files-XXXXXX", path[64], dead[128], kept[4][128];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a.txt", folder);
    pid_t gone = fork();
    if (gone == 0)
        _exit(0);
    assert_int_equal(waitpid(gone, NULL, 0), gone);
    touch(folder, "a.txt.%ld.tmp", (long)gone, dead);
    touch(folder, "a.txt.%ld.tmp", (long)getppid(), kept[0]);
    touch(folder, "b.txt.%ld.tmp", (long)gone, kept[1]);
    touch(folder, "a.txt.%ld.tmp.txt", (long)gone, kept[2]);
    touch(folder, "a.txt.x%ld.tmp", (long)gone, kept[3]);
    assert_int_equal(qd_file_replace(path, "one", 3), QD_OK);
    assert_int_not_equal(access(dead, F_OK), 0);
    for (int i = 0; i < 4; i++)
        assert_int_equal(unlink(kept[i]), 0);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(rmdir(folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(writes),  cmocka_unit_test(round_trip),    cmocka_unit_test(writes_bytes), cmocka_unit_test(reads),
        cmocka_unit_test(refuses), cmocka_unit_test(other_locales), cmocka_unit_test(files),        cmocka_unit_test(pipes),
        cmocka_unit_test(leftovers), cmocka_unit_test(reads_collected),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
