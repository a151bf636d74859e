/* The hand-written patterns against the same regular expressions in PCRE2: the same pieces for any
 * text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/rng.h"
#include "data/tokenizer/split/split.h"
#include "data/tokenizer/split/unicode.h"

#include <stdio.h>
#include <string.h>

typedef struct piece_list {
    size_t ends[4096], count;
} piece_list;

static qd_status note(void *context, size_t offset, size_t length, bool matched)
{
    piece_list *list = context;
    assert_true(matched); /* these expressions match everything */
    list->ends[list->count++] = offset + length;
    return QD_OK;
}

/* Characters of all classes, boundaries of classes, and characters that engines treat differently.
 * PCRE2 10.42 has Unicode 14: none here is newer. */
static const uint32_t characters[] = {
    ' ', ' ', '\n', '\r', '\t', 0x0b, 0x85, 0xa0, 0x2003, 0x2028, 0x3000, 0x180e, 0x200b, 'a', 'b', 's', 'S', 't', 'T', 'l', 'L',
    'e', 'R', 'v', 'd', 'M', '\'', '\'', 0x17f, 0x2019, '0', '7', '9', 0x663, 0xbd, 0x2167, 0x3007, 'A', 'Z', 0xc9, 0xe9, 0x1c5,
    0x2b0, 0x301, 0x301, 0x20e3, 0x903, 0x4e2d, 0x6587, 0x3042, 0xac00, 0x5d0, '.', '!', '/', '/', '_', '<', 0x7f, 0, 0xfffd, 0x1f600,
    0x1f3fd, 0x200d, 0xfe0f, 0xe000, 0x10ffff, 0x10428, 0x10400, 0x1d7ce};

static size_t put(uint8_t *out, uint32_t c)
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    size_t length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = length - 1; i > 0; i--, c >>= 6)
        out[i] = (uint8_t)(0x80 | (c & 0x3f));
    out[0] = (uint8_t)((0xf00 >> length & 0xff) | c);
    return length;
}

static void compare(qd_pattern pattern, const qd_regex *regex, qd_regex_state *state, const uint8_t *text, size_t length)
{
    static piece_list expected;
    expected.count = 0;
    assert_int_equal(qd_regex_split(regex, state, text, length, note, &expected), QD_OK);
    const uint8_t *at = text, *end = text + length;
    for (size_t i = 0; i < expected.count; i++) {
        assert_true(at < end);
        at = qd_pattern_next(pattern, at, end);
        if ((size_t)(at - text) != expected.ends[i]) {
            char shown[256] = "";
            for (size_t j = 0; j < length && j < 60; j++)
                snprintf(shown + strlen(shown), sizeof shown - strlen(shown), "%02x ", text[j]);
            fail_msg("pattern %d: piece %zu ends at %zu instead of %zu in %s", (int)pattern, i, (size_t)(at - text),
                     expected.ends[i], shown);
        }
    }
    assert_true(at == end);
}

/* Every third text has few characters, so that all short combinations occur. broken: one byte is
 * changed, to one that makes no letter newer than PCRE2's Unicode. */
static void random_texts(qd_pattern pattern, const qd_regex *regex, qd_regex_state *state, int broken)
{
    qd_philox_key key = qd_rng_key(7, broken ? "broken" : "whole");
    const size_t kinds = sizeof characters / sizeof *characters;
    static const uint8_t breaking[] = {0x80, 0xbf, 0xc3, 0xe4, 0xed, 0xf0, 0xf4, 0xff, 'a', ' ', '\n'};
    uint8_t text[512];
    for (uint64_t round = 0; round < 40000; round++) {
        uint64_t draw = round * 128;
        size_t count = 1 + qd_rng_below(key, draw++, round % 50 == 0 ? 100 : 9), length = 0;
        size_t first = qd_rng_below(key, draw++, kinds), width = round % 3 ? kinds : 6;
        for (size_t i = 0; i < count; i++)
            length += put(text + length, characters[(first + qd_rng_below(key, draw++, width) * 7) % kinds]);
        if (broken) {
            size_t place = qd_rng_below(key, draw++, length);
            text[place] = breaking[qd_rng_below(key, draw, sizeof breaking)];
        }
        compare(pattern, regex, state, text, length);
    }
}

static void patterns_equal_their_expressions(void **status)
{
    (void)status;
    qd_regex_state *state;
    assert_int_equal(qd_regex_state_create(&state), QD_OK);
    for (int i = 0; i < QD_PATTERN_COUNT; i++) {
        qd_pattern pattern = (qd_pattern)i;
        const char *source = qd_pattern_regex(pattern);
        assert_int_equal(qd_pattern_by_regex(source, strlen(source)), pattern);
        qd_regex *regex;
        assert_int_equal(qd_regex_create("test", source, strlen(source), &regex), QD_OK);
        random_texts(pattern, regex, state, 0);
        random_texts(pattern, regex, state, 1);
        /* Each character alone, and between letters. */
        uint8_t text[16];
        for (size_t j = 0; j < sizeof characters / sizeof *characters; j++) {
            compare(pattern, regex, state, text, put(text, characters[j]));
            text[0] = 'x';
            size_t length = 1 + put(text + 1, characters[j]);
            text[length] = 'Y';
            compare(pattern, regex, state, text, length + 1);
        }
        qd_regex_destroy(regex);
    }
    qd_regex_state_destroy(state);
}

/* Splits of tiktoken and `tokenizers`. */
static void known_pieces(void **status)
{
    (void)status;
    static const struct {
        qd_pattern pattern;
        const char *text; /* pieces end at '|', which is not part of the text */
    } cases[] = {
        {QD_PATTERN_GPT2, "Hello| world|'s| 123456|  | x|!!|\n|\n|a|   "},
        {QD_PATTERN_GPT2, "DON|'|T| don|'t"},
        {QD_PATTERN_CL100K, "Hello| world|'S| |123|456|  | x|!!\n\n|a|\n  \n"},
        {QD_PATTERN_LLAMA3, "Hello| world|'S| |123|456|  | x|!!\n\n|a|\n  \n|  "},
        {QD_PATTERN_CL100K, "a|\n  \n  "},
        {QD_PATTERN_QWEN2, "a|1|2|3|\tb"},
        {QD_PATTERN_O200K, "Hello| World's| FOOBar| a|//\n/|x| |123|4"},
        {QD_PATTERN_O200K, "foo|Bar| FOObar"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t text[128];
        size_t ends[64], count = 0, length = 0;
        for (const char *c = cases[i].text;; c++) {
            if (*c == '|' || !*c)
                ends[count++] = length;
            else
                text[length++] = (uint8_t)*c;
            if (!*c)
                break;
        }
        const uint8_t *at = text;
        for (size_t j = 0; j < count; j++) {
            at = qd_pattern_next(cases[i].pattern, at, text + length);
            if ((size_t)(at - text) != ends[j])
                fail_msg("%s: piece %zu ends at %zu", cases[i].text, j, (size_t)(at - text));
        }
    }
}

static void reads_utf8(void **status)
{
    (void)status;
    uint8_t text[4];
    uint32_t got;
    for (uint32_t c = 0x80; c < 0x110000; c++) {
        if (c == 0xd800)
            c = 0xe000;
        size_t length = put(text, c);
        assert_int_equal(qd_utf8_read(text, text + length, &got), length);
        assert_int_equal(got, c);
        for (size_t cut = 1; cut < length; cut++) {
            assert_int_equal(qd_utf8_read(text, text + cut, &got), cut);
            assert_int_equal(got, 0xfffd);
        }
    }
    static const struct {
        const char *text;
        size_t length;
    } broken[] = {{"\x80", 1}, {"\xc0\x80", 1}, {"\xe0\x80\x80", 1}, {"\xed\xa0\x80", 1}, {"\xf0\x80\x80\x80", 1},
                  {"\xf4\x90\x80\x80", 1}, {"\xf8\x88", 1}, {"\xe4\xb8" "a", 2}, {"\xf0\x9f\x98" "a", 3}};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        const uint8_t *bytes = (const uint8_t *)broken[i].text;
        assert_int_equal(qd_utf8_read(bytes, bytes + strlen(broken[i].text), &got), broken[i].length);
        assert_int_equal(got, 0xfffd);
    }
}

typedef struct shown_pieces {
    const char *text;
    char shown[128];
} shown_pieces;

static qd_status show(void *context, size_t offset, size_t length, bool matched)
{
    shown_pieces *p = context;
    size_t used = strlen(p->shown);
    snprintf(p->shown + used, sizeof p->shown - used, "%s%s%.*s", used ? "|" : "", matched ? "" : "~", (int)length, p->text + offset);
    return QD_OK;
}

/* Expressions that PCRE2 would interpret differently if they were not translated, and others that
 * must stay unchanged. Pieces as the package `tokenizers` 0.23 (Oniguruma) splits them; "~" marks
 * gaps between matches. */
static void reads_expressions_as_oniguruma(void **status)
{
    (void)status;
    static const struct {
        const char *regex, *text, *pieces;
    } cases[] = {
        {"\\p{Han}+", "\u4e2d\u3001\u6587a", "\u4e2d|~\u3001|\u6587|~a"}, /* by script, not by script extensions */
        {"\\P{Han}+", "\u4e2d\u3001a", "~\u4e2d|\u3001a"},
        {"[\\s\\S]", "\u180ea", "\u180e|a"},
        {"[^\\S\\n]+", "a \u3000\n\tb", "~a| \u3000|~\n|\t|~b"},
        {"\\S+", "a\u180eb\u3000", "a\u180eb|~\u3000"},
        {"[]a]+", "]a[", "]a|~["},
        {"[\\]\\[ ]+", "a][ b", "~a|][ |~b"},
        {"\\u0041|\\x{42}|\\x43", "ABCD", "A|B|C|~D"},
        {"(?i)'s|'LL", "'S'll'\u017f", "'S|'ll|'\u017f"},
        {"x(?:(?i)a|b)", "xaxBXa", "xa|xB|~Xa"},
        {"\\p{N}{1,3}", "12345", "123|45"},
        {"a{1,2}?", "aaa", "a|a|a"},
        {"[^\\r\\n\\p{L}]?+\\p{L}++|\\s++$", " ab \n", " ab| \n"},
        {"b$|^a", "ab\nab\n", "a|b|~\n|a|b|~\n"},
        {"[\u4e00-\u9fa5\u3040-\u309f]+", "\u4e2d\u3042a", "\u4e2d\u3042|~a"},
        {"\\'s|\\ \\-", "'s -", "'s| -"},
        {"[a-z&&[^aeiou]]+", "abcde", "~a|bcd|~e"},
        {"[^a-z&&[b]]", "ab", "a|~b"},
        {"[[a-c][x-z]0]+", "ax0-", "ax0|~-"},
        {"[^[a-c]\\s]+", "ad e", "~a|d|~ |e"},
        {"[\\P{L}]+", "a1\u1c89", "~a|1|~\u1c89"}, /* a letter of Unicode 16 */
        {"\\h+|[^\\h]", "0fg", "0f|g"},
        {"\\p{N}{1,3}+", "12345", "12345"},
        {"\u4e2d{2}+", "\u4e2d\u4e2d\u4e2d\u4e2d\u4e2d", "\u4e2d\u4e2d\u4e2d\u4e2d|~\u4e2d"},
        {"a{2}?b", "baab", "b|aab"},
        {"a{,1}b", "aab", "~a|ab"},
        {"\\p{Cn}", "\U00013440\U0001fffe", "~\U00013440|\U0001fffe"},
    };
    qd_regex_state *state;
    assert_int_equal(qd_regex_state_create(&state), QD_OK);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_regex *regex;
        shown_pieces pieces = {.text = cases[i].text};
        if (qd_regex_create("here", cases[i].regex, strlen(cases[i].regex), &regex) != QD_OK)
            fail_msg("%s: %s", cases[i].regex, qd_error_message());
        assert_int_equal(qd_regex_split(regex, state, (const uint8_t *)cases[i].text, strlen(cases[i].text), show, &pieces), QD_OK);
        if (strcmp(pieces.shown, cases[i].pieces) != 0)
            fail_msg("%s: %s instead of %s", cases[i].regex, pieces.shown, cases[i].pieces);
        qd_regex_destroy(regex);
    }
    qd_regex_state_destroy(state);
}

/* Constructs that Oniguruma and PCRE2 interpret differently, or may. */
static void refuses_what_engines_read_differently(void **status)
{
    (void)status;
    static const char *const cases[][2] = {
        {"[a-z&&]+", "empty class"}, {"(?i)[a-z&&[^b]]", "a set of classes"}, {"[[:alpha:]]+", "POSIX"}, {"[[a]-z]", "range"},
        {"a{,}b", "'{'"}, {"a{x}", "'{'"}, {"+a", "quantifier of nothing"}, {"(?i)\\H", "\\H"},
        {"a**", "quantifier"}, {"a{2}{3}", "quantifier"}, {"\\R", "\\R"}, {"\\X", "\\X"}, {"a\\Kb", "\\K"}, {"a\\Z", "\\Z"},
        {"\\w+", "\\w"}, {"\\bx", "\\b"}, {"\\v", "\\v"}, {"\\N", "\\N"}, {"\\O", "\\O"}, {"\\Ga", "\\G"}, {"\\Qa\\E", "\\Q"},
        {"(a)\\1", "\\1"}, {"\\012", "\\0"}, {"\\xe9", "\\x"}, {"\\cA", "\\c"}, {"\\pL", "\\p"}, {"\\p{Alpha}", "Alpha"},
        {"\\p{L&}", "\\p{L&"}, {"a(?i)b|c", "(?i)"}, {"(?m)a", "(?m"}, {"(?x)a b", "(?x"}, {"(?~ab)", "(?~"}, {"(?<n>a)", "(?<"},
        {"(*FAIL)a", "(*"}, {"(?i)ss", "ss"}, {"(?i:fi)", "fi"}, {"(?i:\u00e9)", "\u00e9"}, {"(?i)\\p{Lu}", "\\p"}, {"[a-\\d]", "range"},
        {"[\\s-z]", "range"}, {"(a|)b", "empty"}, {"(?R)a", "(?R"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_regex *regex;
        if (qd_regex_create("here", cases[i][0], strlen(cases[i][0]), &regex) != QD_USAGE)
            fail_msg("%s is accepted", cases[i][0]);
        if (!strstr(qd_error_message(), "here: ") || !strstr(qd_error_message(), cases[i][1]))
            fail_msg("%s: '%s' is not in: %s", cases[i][0], cases[i][1], qd_error_message());
    }
}

static void refuses_expressions(void **status)
{
    (void)status;
    qd_regex *regex;
    static const char *const bad[] = {"(", "a*", "", "[z-a]", "(?<x>a)(?<x>b)"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(qd_regex_create("here", bad[i], strlen(bad[i]), &regex), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "here"));
    }
}

/* Each match backtracks a few million times, which the limit of a single one allows: 4 kB of text
 * would take minutes. */
static void gives_up_slow_expressions(void **status)
{
    (void)status;
    static const char source[] = "(?:a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?a?)b|a";
    uint8_t text[4096];
    memset(text, 'a', sizeof text);
    qd_regex *regex;
    qd_regex_state *state;
    piece_list list = {.count = 0};
    assert_int_equal(qd_regex_create("here", source, strlen(source), &regex), QD_OK);
    assert_int_equal(qd_regex_state_create(&state), QD_OK);
    const double begin = qd_clock_thread_cpu();
    assert_int_equal(qd_regex_split(regex, state, text, sizeof text, note, &list), QD_USAGE);
    print_message("given up after %.1f s: %s\n", qd_clock_thread_cpu() - begin, qd_error_message());
    assert_true(qd_clock_thread_cpu() - begin < 20);
    assert_non_null(strstr(qd_error_message(), "here: the regular expression backtracks too much"));
    qd_regex_state_destroy(state);
    qd_regex_destroy(regex);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(patterns_equal_their_expressions),
        cmocka_unit_test(known_pieces),
        cmocka_unit_test(reads_utf8),
        cmocka_unit_test(reads_expressions_as_oniguruma),
        cmocka_unit_test(refuses_what_engines_read_differently),
        cmocka_unit_test(refuses_expressions),
        cmocka_unit_test(gives_up_slow_expressions),
    };
    return cmocka_run_group_tests_name("tokenizer split", tests, NULL, NULL);
}
