/* Chat templates against fixtures that tools/chat_golden.py made with transformers: templates of
 * published families by conversations, expressions, and refusals. Mutated templates end with text
 * or a message, within bounds.
 *
 *   test_chat --render < REQUESTS   renders one JSON request per line, for `chat_golden.py
 * oracle` */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/rng.h"
#include "data/chat/chat.h"
#include "support/scratch.h"

#include <quadrille/json_writer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ctest: timeout 120
 * ctest: not under thread: nothing here has threads */

static const qd_json_node *member(const qd_json_node *node, const char *key)
{
    return qd_json_member(node, key);
}

/* Renders a request: template, messages, and optionally tools, documents, variables, tokens, date,
 * add_generation_prompt. */
static qd_status render(const qd_json_node *request, qd_strbuf *text, qd_chat_spans *spans)
{
    qd_chat *chat;
    size_t length;
    const char *source = qd_json_as_bytes(member(request, "template"), &length), *key;
    const qd_json_node *value;
    QD_TRY(qd_chat_load_text("template", source, length, &chat));
    for (qd_json_iterator it = qd_json_begin(member(request, "tokens")); qd_json_next(&it, &key, &value);)
        if (qd_chat_set_token(chat, key, qd_json_as_string(value)) != QD_OK)
            abort();
    qd_chat_input input = {.messages = member(request, "messages"), .tools = member(request, "tools"),
                           .documents = member(request, "documents"), .variables = member(request, "variables"),
                           .date = qd_json_as_string(member(request, "date"))};
    qd_json_as_bool(member(request, "add_generation_prompt"), &input.add_generation_prompt);
    qd_status status = qd_chat_render(chat, &input, text, spans);
    qd_chat_destroy(chat);
    return status;
}

/* ---- against transformers ---- */

#define FIXTURES QD_TEST_SOURCE_DIR "/tests/unit/data/chat/"
#define DATE     "2025-03-09 14:05:07" /* of chat_golden.py */

static qd_json *load_json(const char *name)
{
    qd_json *document = NULL;
    char path[1024];
    snprintf(path, sizeof path, FIXTURES "%s", name);
    if (qd_json_load(path, &document) != QD_OK)
        fail_msg("%s", qd_error_message());
    return document;
}

static qd_chat *load_template(const char *name)
{
    qd_chat *chat = NULL;
    char path[1024], *text = NULL;
    size_t length;
    snprintf(path, sizeof path, FIXTURES "templates/%s.jinja", name);
    if (qd_file_read(path, 1 << 20, &text, &length) != QD_OK || qd_chat_load_text(name, text, length, &chat) != QD_OK)
        fail_msg("%s", qd_error_message());
    free(text);
    assert_int_equal(qd_chat_set_token(chat, "bos_token", "<s>"), QD_OK);
    assert_int_equal(qd_chat_set_token(chat, "eos_token", "</s>"), QD_OK);
    assert_int_equal(qd_chat_set_token(chat, "unk_token", "<unk>"), QD_OK);
    return chat;
}

static qd_chat *load_text(const char *text)
{
    qd_chat *chat = NULL;
    if (qd_chat_load_text("template", text, strlen(text), &chat) != QD_OK)
        fail_msg("%s", qd_error_message());
    return chat;
}

static void expect_spans(const qd_json_node *expected, const qd_chat_spans *spans)
{
    assert_int_equal(qd_json_count(expected), spans->count);
    for (size_t i = 0; i < spans->count; i++) {
        int64_t begin = -1, end = -1;
        qd_json_as_int(qd_json_item(qd_json_item(expected, i), 0), &begin);
        qd_json_as_int(qd_json_item(qd_json_item(expected, i), 1), &end);
        assert_int_equal(spans->spans[i].begin, begin);
        assert_int_equal(spans->spans[i].end, end);
    }
}

static void expect_case(const qd_json_node *expected, const qd_json_node *conversation)
{
    const char *name = qd_json_as_string(member(expected, "template")), *label = qd_json_as_string(member(expected, "conversation"));
    const char *text = qd_json_as_string(member(expected, "text")), *raises = qd_json_as_string(member(expected, "raises"));
    qd_chat *chat = load_template(name);
    qd_chat_input input = {.messages = member(conversation, "messages"), .tools = member(conversation, "tools"),
                           .variables = member(conversation, "variables"), .date = DATE};
    assert_true(qd_json_as_bool(member(expected, "add_generation_prompt"), &input.add_generation_prompt));
    qd_strbuf out = {0};
    qd_chat_spans spans = {0};
    qd_strbuf_puts(&out, "before"); /* the text is appended */
    qd_status status = qd_chat_render(chat, &input, &out, &spans);
    if (text) {
        if (status != QD_OK)
            fail_msg("%s with %s: %s", name, label, qd_error_message());
        if (strcmp(out.data + 6, text) != 0)
            fail_msg("%s with %s: expected [%s], found [%s]", name, label, text, out.data + 6);
        expect_spans(member(expected, "spans"), &spans);
    } else {
        assert_int_equal(status, QD_USAGE);
        assert_string_equal(out.data, "before");
        if (!strstr(qd_error_message(), raises))
            fail_msg("%s with %s: expected '%s', found '%s'", name, label, raises, qd_error_message());
    }
    qd_chat_spans_free(&spans);
    qd_strbuf_free(&out);
    qd_chat_destroy(chat);
}

static void families(void **state)
{
    (void)state;
    qd_json *golden = load_json("golden.json"), *conversations = load_json("conversations.json");
    const qd_json_node *cases = member(qd_json_root(golden), "cases");
    assert_true(qd_json_count(cases) > 300);
    for (size_t i = 0; i < qd_json_count(cases); i++) {
        const qd_json_node *each = qd_json_item(cases, i);
        expect_case(each, member(qd_json_root(conversations), qd_json_as_string(member(each, "conversation"))));
    }
    qd_json_destroy(golden);
    qd_json_destroy(conversations);
}

static void expressions(void **state)
{
    (void)state;
    qd_json *golden = load_json("golden.json"), *conversations = load_json("conversations.json");
    const qd_json_node *list = member(qd_json_root(golden), "expressions"), *sample = member(qd_json_root(conversations), "sample");
    for (size_t i = 0; i < qd_json_count(list); i++) {
        const char *source = qd_json_as_string(member(qd_json_item(list, i), "template"));
        const char *text = qd_json_as_string(member(qd_json_item(list, i), "text"));
        qd_chat *chat = load_text(source);
        qd_chat_input input = {.messages = member(sample, "messages"), .variables = member(sample, "variables"), .date = DATE};
        qd_strbuf out = {0};
        qd_status status = qd_chat_render(chat, &input, &out, NULL);
        if (status != QD_OK && text)
            fail_msg("%s: %s", source, qd_error_message());
        if (status == QD_OK && (!text || strcmp(out.data ? out.data : "", text) != 0))
            fail_msg("%s: expected [%s], found [%s]", source, text ? text : "an error", out.data);
        qd_strbuf_free(&out);
        qd_chat_destroy(chat);
    }
    qd_json_destroy(golden);
    qd_json_destroy(conversations);
}

/* ---- refusals ---- */

static void refused_when_loaded(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"{% if x %}", "template:1:11: the template ends before 'endif'"},
        {"a\n {{ x", "template:2:2: the tag has no end '}}'"},
        {"{{ x | }}", "template:1:8: expected the name of a filter, found the end of the tag"},
        {"{{ x|groupby('a') }}", "filter 'groupby' is not implemented"},
        {"{{ x|nothing }}", "there is no filter 'nothing'"},
        {"{{ x is mapping.other }}", "there is no test 'mapping.…'"},
        {"{{ x is filter }}", "test 'filter' is not implemented"},
        {"{{ x.format(1) }}", "method 'format' is not implemented"},
        {"{{ lipsum() }}", "'lipsum' is not implemented"},
        {"{% include 'x' %}", "template:1:4: tag 'include' is not implemented"},
        {"{% call f() %}{% endcall %}", "tag 'call' is not implemented"},
        {"{% for a in b recursive %}{% endfor %}", "recursive loops are not implemented"},
        {"{{ f(*a) }}", "unpacked arguments ('*' and '**') are not implemented"},
        {"{{ x.__class__ }}", "no access to Python's internals"},
        {"{% break %}", "'break' outside a loop"},
        {"{% macro m() %}{% generation %}{% endgeneration %}{% endmacro %}", "'generation' inside a macro"},
        {"{{ (1] }}", "unexpected ']'"},
        {"{{ 99999999999999999999 }}", "integers of more than 64 bits"},
        {"{{ '\\N{DASH}' }}", "\\N{name} is not implemented"},
        {"{# never ends", "the comment has no end"},
        {"{% set loop = 1 %}", "'loop' cannot be assigned"},
        {"{% set ns._x = 1 %}", "begins with '_'"},
        {"{% endif %}", "there is no tag 'endif' here"},
        {"\xff", "not UTF-8"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_chat *chat;
        assert_int_equal(qd_chat_load_text("template", cases[i][0], strlen(cases[i][0]), &chat), QD_USAGE);
        assert_null(chat);
        if (!strstr(qd_error_message(), cases[i][1]))
            fail_msg("%s: expected '%s', found '%s'", cases[i][0], cases[i][1], qd_error_message());
    }
}

static qd_status render_text(const char *source, const char *messages, const char *date, qd_strbuf *out)
{
    qd_json *document;
    qd_chat *chat = load_text(source);
    assert_int_equal(qd_json_load_text("messages", messages, strlen(messages), &document), QD_OK);
    qd_chat_input input = {.messages = qd_json_root(document), .date = date};
    qd_status status = qd_chat_render(chat, &input, out, NULL);
    qd_json_destroy(document);
    qd_chat_destroy(chat);
    return status;
}

static void expect_refusal(const char *source, const char *messages, const char *date, const char *message)
{
    qd_strbuf out = {0};
    assert_int_equal(render_text(source, messages, date, &out), QD_USAGE);
    if (!strstr(qd_error_message(), message))
        fail_msg("%s: expected '%s', found '%s'", source, message, qd_error_message());
    assert_int_equal(out.length, 0);
    qd_strbuf_free(&out);
}

static void refused_when_rendered(void **state)
{
    (void)state;
    expect_refusal("{{ raise_exception('Only users.') }}", "[]", NULL, "template:1:19: the template refuses these messages: Only users.");
    expect_refusal("{{ strftime_now('%Y') }}", "[]", NULL, "strftime_now()");
    expect_refusal("{{ strftime_now('%Y') }}", "[]", "2025-02-29", "the date '2025-02-29' must be like");
    expect_refusal("{{ strftime_now('%U') }}", "[]", "2025-01-31", "this conversion of strftime_now() is not implemented");
    expect_refusal("x\n{{ messages[0].content.text.more }}", "[{\"content\": \"a\"}]", NULL,
                   "template:2:28: a 'str' object has no attribute 'text'");
    expect_refusal("x", "{}", NULL, "messages must be a list of objects");
    expect_refusal("x", "[1]", NULL, "message 1 must be an object");
    expect_refusal("{{ messages.pop() }}", "[]", NULL, "'pop' modifies its object");
    expect_refusal("{{ 'é'.upper() }}", "[]", NULL, "characters outside ASCII are not implemented");
}

static void bounds(void **state)
{
    (void)state;
    char deep[2001], *large = malloc(300000);
    assert_non_null(large);
    qd_chat *chat;
    memset(large, 'x', 300000);
    assert_int_equal(qd_chat_load_text("template", large, 300000, &chat), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "the limit is 262144"));
    free(large);
    memset(deep, '(', 2000);
    memcpy(deep, "{{", 2);
    deep[2000] = '\0';
    assert_int_equal(qd_chat_load_text("template", deep, 2000, &chat), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "nested more than 100 levels"));
    expect_refusal("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "[]", NULL, "nested more than 400 levels");
    expect_refusal("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", "[]", NULL, "more than 5000000 steps");
    expect_refusal("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set t = s.isalpha() %}{% endfor %}", "[]", NULL,
                   "more than 5000000 steps");
    expect_refusal("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set t = s.isspace() %}{% endfor %}", "[]", NULL,
                   "more than 5000000 steps");
    expect_refusal("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set t = s.startswith(s) %}{% endfor %}", "[]", NULL,
                   "more than 5000000 steps");
    expect_refusal("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set t = s.endswith(('b', s)) %}{% endfor %}", "[]", NULL,
                   "more than 5000000 steps");
    expect_refusal("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set t = s.removeprefix(s) %}{% endfor %}", "[]", NULL,
                   "more than 5000000 steps");
    expect_refusal("{% set s = 'a' * 4000000 %}{% for i in range(99999) %}{% set t = s|int %}{% endfor %}", "[]", NULL,
                   "more than 5000000 steps");
    expect_refusal("{{ range(1000000) }}", "[]", NULL, "range() has more than 100000 items");
    expect_refusal("{{ 'x' * 100000000 }}", "[]", NULL, "longer than 32 MiB");
    expect_refusal("{% for a in range(99) %}{{ 'x' * 1000000 }}{% endfor %}", "[]", NULL, "writes more than 32 MiB");
    expect_refusal("{% for a in range(99) %}{% set s = [0] * 400000 %}{% endfor %}", "[]", NULL, "more than 128 MiB");
    expect_refusal("{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}", "[]", NULL,
                   "more than");
    expect_refusal("{{ 9223372036854775807 + 1 }}", "[]", NULL, "integers of more than 64 bits");
    /* Appending in a loop takes linear time and memory. */
    qd_strbuf out = {0};
    assert_int_equal(render_text("{% set n = namespace(s='') %}{% for a in range(50000) %}{% set n.s = n.s + '0123456789' %}{% endfor %}"
                                 "{{ n.s|length }}", "[]", NULL, &out), QD_OK);
    assert_string_equal(out.data, "500000");
    qd_strbuf_free(&out);
}

/* ---- folders ---- */

static void expect_folder(const char *folder, const char *which, const char *expected)
{
    qd_chat *chat;
    qd_json *messages;
    qd_strbuf out = {0};
    if (qd_chat_load_folder(folder, which, &chat) != QD_OK)
        fail_msg("%s", qd_error_message());
    assert_int_equal(qd_json_load_text("messages", "[]", 2, &messages), QD_OK);
    qd_chat_input input = {.messages = qd_json_root(messages)};
    assert_int_equal(qd_chat_render(chat, &input, &out, NULL), QD_OK);
    assert_string_equal(out.data, expected);
    qd_strbuf_free(&out);
    qd_json_destroy(messages);
    qd_chat_destroy(chat);
}

static void expect_no_folder(const char *folder, const char *which, const char *message)
{
    qd_chat *chat;
    assert_int_equal(qd_chat_load_folder(folder, which, &chat), QD_USAGE);
    assert_null(chat);
    if (!strstr(qd_error_message(), message))
        fail_msg("expected '%s', found '%s'", message, qd_error_message());
}

static void folders(void **state)
{
    const char *folder = scratch_folder();
    expect_no_folder(folder, NULL, "no tokenizer_config.json");
    scratch_text(state, "tokenizer_config.json", "{\"bos_token\": \"<s>\"}");
    expect_no_folder(folder, NULL, "has no 'chat_template'");
    scratch_text(state, "tokenizer_config.json", "{\"chat_template\": \"{{ bos_token }}|{{ eos_token }}|{{ pad_token }}\","
                 " \"bos_token\": \"<s>\","
               " \"eos_token\": {\"content\": \"</s>\", \"lstrip\": false}, \"pad_token\": null}");
    expect_folder(folder, NULL, "<s>|</s>|");
    expect_no_folder(folder, "tool_use", "'tool_use' cannot be selected");
    scratch_text(state, "special_tokens_map.json", "{\"eos_token\": \"<e>\", \"pad_token\": {\"content\": \"<p>\"}}");
    expect_folder(folder, NULL, "<s>|<e>|<p>");
    scratch_text(state, "tokenizer_config.json", "{\"chat_template\": [{\"name\": \"default\", \"template\": \"one\"}, {\"name\": \"rag\","
               " \"template\": \"two{{ bos_token }}\"}], \"bos_token\": \"<s>\", \"added_tokens_decoder\": {}}");
    expect_folder(folder, NULL, "one");
    expect_folder(folder, "rag", "two<s>");
    expect_no_folder(folder, "other", "no template named 'other'");
    expect_no_folder(folder, "../x", "is not the name of a chat template");
    scratch_text(state, "chat_template.jinja", "file {{ bos_token }}\n");
    expect_folder(folder, NULL, "file <s>");
    scratch_text(state, "chat_template.jinja", "{% nothing %}");
    expect_no_folder(folder, NULL, "chat_template.jinja:1:4: there is no tag 'nothing' here");
    scratch_text(state, "tokenizer_config.json", "{\"chat_template\": 1, \"bos_token\": [1]}");
    expect_no_folder(folder, "x", "must be a string or a list of named templates");
}

/* ---- mutations ---- */

static size_t draw(size_t bound)
{
    static uint64_t index;
    return (size_t)qd_rng_below(qd_rng_key(7, "chat"), index++, bound);
}

/* Changed templates are rendered or refused with a message that names them, in bounded time. */
static void mutations(void **state)
{
    (void)state;
    static const char *const names[] = {"chatml_generation", "qwen3", "llama31", "mistral_v3", "gemma3", "deepseek_v3", "harmony"};
    static const char *const pieces[] = {"{{", "}}", "{%", "%}", "{#", "#}", "-", "(", ")", "[", "]", "|", ".", "'", "\"", "\\",
                                         "for x in ",
                                         "endfor", "set ", "if ", "else", " in ", "not ", "is ", "0", "9999999", "*", "**", "//", "~", ":",
                                         ",", "{", "}", "namespace(", "range(99999)", "m", "\n", "\xc3\xa9", "tojson", "loop"};
    qd_json *conversations = load_json("conversations.json");
    const qd_json_node *tools = member(qd_json_root(conversations), "tools");
    int rendered = 0, refused = 0;
    double start = qd_clock_now();
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        char path[1024], *text, *changed;
        size_t length;
        snprintf(path, sizeof path, FIXTURES "templates/%s.jinja", names[n]);
        assert_int_equal(qd_file_read(path, 1 << 20, &text, &length), QD_OK);
        changed = malloc(length + 200);
        assert_non_null(changed);
        for (int round = 0; round < 400 && qd_clock_now() - start < 15; round++) {
            size_t size = length;
            memcpy(changed, text, length);
            for (int edits = 1 + (int)(draw(4)); edits > 0; edits--) {
                const char *piece = pieces[draw(sizeof pieces / sizeof *pieces)];
                size_t at = draw(size + 1), cut = draw(6), put = strlen(piece);
                cut = cut > size - at ? size - at : cut;
                memmove(changed + at + put, changed + at + cut, size - at - cut);
                memcpy(changed + at, piece, put);
                size += put - cut;
            }
            qd_chat *chat;
            qd_strbuf out = {0};
            qd_chat_spans spans = {0};
            qd_status status = qd_chat_load_text("template", changed, size, &chat);
            if (status == QD_OK) {
                qd_chat_input input = {.messages = member(tools, "messages"), .tools = member(tools, "tools"), .date = DATE};
                status = qd_chat_render(chat, &input, &out, &spans);
            }
            assert_true(status == QD_OK || (status == QD_USAGE && strstr(qd_error_message(), "template")));
            rendered += status == QD_OK;
            refused += status != QD_OK;
            qd_chat_spans_free(&spans);
            qd_strbuf_free(&out);
            qd_chat_destroy(chat);
        }
        free(changed);
        free(text);
    }
    assert_true(rendered > 100 && refused > 100);
    qd_json_destroy(conversations);
}

/* ---- for the oracle ---- */

static int render_lines(void)
{
    char *line = NULL;
    size_t capacity = 0;
    ssize_t length;
    while ((length = getline(&line, &capacity, stdin)) > 0) {
        qd_json *document;
        qd_strbuf text = {0}, out = {0};
        if (qd_json_load_text("request", line, (size_t)length, &document) != QD_OK) {
            fprintf(stderr, "%s\n", qd_error_message());
            return 1;
        }
        qd_status status = render(qd_json_root(document), &text, NULL);
        qd_json_writer w = qd_json_writer_on(&out);
        qd_json_object_begin(&w, NULL);
        qd_json_put_string(&w, status == QD_OK ? "text" : "error", status == QD_OK ? (text.data ? text.data : "") : qd_error_message());
        qd_json_end(&w);
        for (size_t i = 0; i < out.length; i++) /* one line each */
            if (out.data[i] == '\n')
                out.data[i] = ' ';
        puts(out.data);
        qd_strbuf_free(&out);
        qd_strbuf_free(&text);
        qd_json_destroy(document);
    }
    free(line);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--render") == 0)
        return render_lines();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(families), cmocka_unit_test(expressions), cmocka_unit_test(refused_when_loaded),
        cmocka_unit_test(refused_when_rendered), cmocka_unit_test(bounds),
        cmocka_unit_test_setup_teardown(folders, scratch_setup, scratch_teardown), cmocka_unit_test(mutations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
