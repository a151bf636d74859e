/* Hostile configurations: deep, huge, self-referencing, binary, mutated. None may crash, hang or
 * exhaust memory.
 * ctest: not under thread: nothing here has threads */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/rng.h"
#include "base/text/strbuf.h"
#include "base/text/yaml.h"

#include <quadrille/options.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static qd_status count_leaf(void *context, const qd_yaml_leaf *leaf)
{
    int *count = context;
    if (!leaf->key || !leaf->text || leaf->line < 1 || leaf->column < 1 || leaf->key_line < 1)
        return QD_FAIL(QD_CORRUPT, "a leaf without key or place");
    ++*count;
    return QD_OK;
}

/* Parses the text and expects a result within a second and 64 MiB. */
static qd_status read_text(const char *text, size_t length, int *leaves)
{
    struct rusage before, after;
    int count = 0;
    getrusage(RUSAGE_SELF, &before);
    double start = qd_clock_now();
    qd_error_clear();
    qd_status status = qd_yaml_read("hostile", text, length, count_leaf, &count);
    assert_true(qd_clock_now() - start < 5.0);
    getrusage(RUSAGE_SELF, &after);
    assert_true(after.ru_maxrss - before.ru_maxrss < 256 * 1024); /* KiB; sanitizers need more */
    assert_true(status == QD_OK || (status == QD_USAGE && qd_error_message()[0] != '\0'));
    if (leaves)
        *leaves = count;
    return status;
}

static void refuse(const char *text)
{
    assert_int_equal(read_text(text, strlen(text), NULL), QD_USAGE);
    assert_memory_equal(qd_error_message(), "hostile:", 8);
}

static void deep(void **state)
{
    (void)state;
    static const char *const pieces[] = {"{a: ", "[", "- ", "? ", "{? ", "a: [", "\"a\": {", "&a ", "!!map {a: "};
    for (size_t p = 0; p < sizeof pieces / sizeof pieces[0]; p++) {
        qd_strbuf text = {0};
        for (int i = 0; i < 20000; i++)
            qd_strbuf_puts(&text, pieces[p]);
        refuse(text.data);
        qd_strbuf_free(&text);
    }
    qd_strbuf text = {0}; /* block mappings, one level per line */
    for (int i = 0; i < 200; i++) {
        qd_strbuf_pad(&text, ' ', i);
        qd_strbuf_puts(&text, "a:\n");
    }
    refuse(text.data);
    assert_non_null(strstr(qd_error_message(), "hostile:17:17: nested deeper than 16 levels"));
    qd_strbuf_free(&text);
}

static void aliases(void **state)
{
    (void)state;
    refuse("a: &a [x,x,x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nd: [*c,*c,*c,*c]\n");
    refuse("a: &a {b: *a}");
    refuse("<<: *base\n");
    refuse("a: !<tag:example.com,2000:x> 1");
    refuse("&k key: 1");
}

static void huge(void **state)
{
    (void)state;
    qd_strbuf text = {0};
    int leaves;
    while (text.length < 1000000)
        qd_strbuf_printf(&text, "k%zu: value\n", text.length);
    assert_int_equal(read_text(text.data, text.length, &leaves), QD_OK);
    assert_true(leaves > 50000);
    while (text.length <= QD_YAML_MOST_BYTES)
        qd_strbuf_puts(&text, "# more\n");
    refuse(text.data);
    qd_strbuf_clear(&text);
    qd_strbuf_pad(&text, 'k', 100000); /* one long key, one long value, one long line of commas */
    qd_strbuf_puts(&text, ": 1\n");
    refuse(text.data);
    qd_strbuf_clear(&text);
    qd_strbuf_puts(&text, "a: ");
    qd_strbuf_pad(&text, 'v', 1000000);
    assert_int_equal(read_text(text.data, text.length, &leaves), QD_OK);
    qd_strbuf_clear(&text);
    qd_strbuf_puts(&text, "a: [");
    for (int i = 0; i < 200000; i++)
        qd_strbuf_puts(&text, "1, ");
    qd_strbuf_puts(&text, "1]");
    assert_int_equal(read_text(text.data, text.length, &leaves), QD_OK);
    assert_int_equal(leaves, 1);
    qd_strbuf_free(&text);
}

static void binary(void **state)
{
    (void)state;
    assert_int_equal(read_text("a: 1\0b", 6, NULL), QD_USAGE);
    assert_string_equal(qd_error_message(), "hostile:1:5: byte 0x00; a configuration is plain UTF-8 text");
    refuse("a: \"x\\0y\"");
    refuse("a: \xff");
    refuse("a: \xc0\xaf");
    refuse("a: \xed\xa0\x80");
    refuse("\x7f"
           "ELF\x02\x01\x01");
    refuse("PK\x03\x04");
    qd_philox_key key = qd_rng_key(1, "garbage");
    for (uint64_t i = 0; i < 2000; i++) {
        uint32_t words[4 * 16];
        for (uint64_t j = 0; j < 16; j++)
            qd_philox4x32(key, i, j, words + 4 * j);
        assert_int_equal(read_text((const char *)words, 1 + i % sizeof words, NULL), QD_USAGE);
    }
}

/* Random changes of a valid file, and random tokens of YAML's grammar. */
static void mutated(void **state)
{
    (void)state;
    static const char good[] =
        "model: {preset: llama-tiny, rope: {base: 5e5}}\ntrain:\n  steps: 1_000\n  lr: 1e-3  # c\n"
        "  text: |\n    two\n    lines\n  list:\n  - 1\n  - 2\n'quoted': \"a\\n\\x41\"\n";
    static const char *const tokens[] = {"a",   ":",  " ",    "\n", "-",  "- ", "{",  "}",  "[", "]",   ",",
                                         "&a ", "*a", "!t ",  "|",  ">-", "'",  "\"", "#",  "%", "---", "...",
                                         "? ",  ": ", "\n  ", "\t", "1",  "\\", "é",  "<<", "@", "`"};
    enum { TOKENS = sizeof tokens / sizeof tokens[0] };
    qd_philox_key key = qd_rng_key(2, "mutations");
    char text[sizeof good + 64];
    for (uint64_t i = 0; i < 20000; i++) {
        size_t length = sizeof good - 1;
        memcpy(text, good, length);
        uint64_t changes = 1 + qd_rng_below(key, i * 64, 4);
        for (uint64_t c = 0; c < changes && length > 0; c++) {
            size_t at = (size_t)qd_rng_below(key, i * 64 + 4 * c + 1, length);
            const char *token = tokens[qd_rng_below(key, i * 64 + 4 * c + 2, TOKENS)];
            switch (qd_rng_below(key, i * 64 + 4 * c + 3, 3)) {
            case 0:
                text[at] = token[0];
                break;
            case 1:
                memmove(text + at, text + at + 1, --length - at);
                break;
            default:
                length = at + 1;
                break;
            }
        }
        read_text(text, length, NULL);
    }
    for (uint64_t i = 0; i < 20000; i++) {
        qd_strbuf words = {0};
        uint64_t count = 1 + qd_rng_below(key, (UINT64_C(1) << 40) + i, 40);
        for (uint64_t c = 0; c < count; c++)
            qd_strbuf_puts(&words, tokens[qd_rng_below(key, (UINT64_C(1) << 41) + i * 64 + c, TOKENS)]);
        read_text(words.data, words.length, NULL);
        qd_strbuf_free(&words);
    }
}

static void truncated(void **state)
{
    (void)state;
    static const char good[] = "model: {preset: \"llama\", n: [1, 2]}\ntrain:\n  steps: 1000\n";
    for (size_t length = 0; length < sizeof good; length++)
        read_text(good, length, NULL);
    int leaves;
    assert_int_equal(read_text(good, sizeof good - 1, &leaves), QD_OK);
    assert_int_equal(leaves, 3);
    /* A byte order mark is fine. */
    assert_int_equal(read_text("\xef\xbb\xbf"
                               "a: 1\r\nb: 2\r\n",
                               15, &leaves),
                     QD_OK);
    assert_int_equal(leaves, 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(deep),   cmocka_unit_test(aliases), cmocka_unit_test(huge),
        cmocka_unit_test(binary), cmocka_unit_test(mutated), cmocka_unit_test(truncated),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
