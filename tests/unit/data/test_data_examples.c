/* Examples for fine-tuning: packing, what counts in the loss, held-out examples, lines that are
 * cut, skipped or refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/preference.h"
#include "base/rng.h"
#include "data/data.h"
#include "data/examples/packing.h"
#include "support/ok.h"
#include "support/scratch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SEQ = 32, EXAMPLES = 200, END = 256, BEGIN = 257 };

/* Every example is in one window, and no window overflows. */
static void check_packing(const int64_t *lengths, int64_t count, int64_t room, const qd_packing *p)
{
    int *seen = calloc((size_t)count, sizeof *seen);
    assert_non_null(seen);
    assert_int_equal(p->first[0], 0);
    assert_int_equal(p->first[p->windows], count);
    for (int64_t w = 0; w < p->windows; w++) {
        int64_t used = 0;
        assert_true(p->first[w + 1] > p->first[w]);
        for (int64_t i = p->first[w]; i < p->first[w + 1]; i++) {
            seen[p->order[i]]++;
            used += lengths[p->order[i]];
        }
        assert_true(used <= room);
    }
    for (int64_t i = 0; i < count; i++)
        assert_int_equal(seen[i], 1);
    free(seen);
}

static void packs(void **state)
{
    (void)state;
    enum { MOST = 500 };
    int64_t lengths[MOST];
    uint64_t random = 1;
    for (int64_t count = 1; count <= MOST; count += count < 20 ? 1 : 97)
        for (int64_t room = 1; room <= 300; room += room < 4 ? 1 : 63) {
            qd_packing p;
            int64_t sum = 0;
            for (int64_t i = 0; i < count; i++) {
                random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
                lengths[i] = 1 + (int64_t)((random >> 33) % (uint64_t)room);
                sum += lengths[i];
            }
            ok(qd_packing_make(lengths, count, room, &p));
            check_packing(lengths, count, room, &p);
            /* At most one window is less than half full, or its content would be in another. */
            assert_true(p.windows <= 2 * sum / room + 1);
            qd_packing_free(&p);
        }
    /* Two of 60 and two of 40 fill two windows of 100. */
    qd_packing p;
    ok(qd_packing_make((const int64_t[]){40, 60, 60, 40}, 4, 100, &p));
    assert_int_equal(p.windows, 2);
    qd_packing_free(&p);
}

static qd_status encode(void *context, int thread, const char *text, size_t length, qd_tokens *out)
{
    return qd_text_encoder_bytes().encode(context, thread, text, length, out);
}

static qd_status begin(void *context, qd_tokens *out)
{
    (void)context;
    QD_TRY(encode(NULL, 0, "x", 1, out));
    out->ids[out->count - 1] = BEGIN;
    return QD_OK;
}

/* Bytes, with a token before each prompt and one after each completion. */
static const qd_text_encoder encoder = {
    .size = sizeof encoder, .encode = encode, .vocab = 258, .hash = 7, .document_end = END, .begin = begin};

static qd_data_options options_for(const char *path)
{
    qd_data_options o = qd_data_options_default();
    o.path = path;
    o.seq = SEQ;
    o.vocab = 258;
    o.encoder = &encoder;
    o.examples = true;
    o.threads = 2;
    return o;
}

/* Example i: the prompt is "<i>", the completion i % 20 letters. */
static void write_examples(const char *path)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    for (int i = 0; i < EXAMPLES; i++)
        fprintf(file, "{\"prompt\": \"<%d>\", \"completion\": \"%.*s\"}\n", i, i % 20, "abcdefghijklmnopqrst");
    fclose(file);
}

/* Reads one epoch; counts[i]: how often example i occurs. Checks each of them. */
static void read_epoch(const qd_batch_source *source, int64_t first, int64_t windows, int counts[EXAMPLES])
{
    int32_t tokens[SEQ], targets[SEQ], start[SEQ];
    for (int64_t w = 0; w < windows; w++) {
        ok(source->fill(source->context, first + w, 1, SEQ, tokens, targets, start));
        for (int t = 0; t < SEQ;) {
            if (tokens[t] != BEGIN) { /* the rest is empty */
                assert_int_equal(start[t], t);
                for (int rest = t; rest < SEQ; rest++)
                    assert_true(targets[rest] == -1 && start[rest] == t);
                break;
            }
            int begin_at = t, number = 0;
            for (; tokens[t] != '>'; t++) {
                assert_int_equal(start[t], begin_at);
                assert_int_equal(targets[t], -1); /* the prompt does not count */
                if (tokens[t] >= '0' && tokens[t] <= '9')
                    number = 10 * number + tokens[t] - '0';
            }
            for (int k = 0; k <= number % 20; k++, t++) {
                assert_int_equal(start[t], begin_at);
                assert_int_equal(targets[t], k == number % 20 ? END : 'a' + k);
            }
            counts[number]++;
        }
    }
}

static void each_example_once(void **state)
{
    const char *path = scratch_path(state, "x.jsonl");
    write_examples(path);
    for (int held = 0; held < 2; held++)
        for (int unpacked = 0; unpacked < 2; unpacked++) {
            qd_data_options o = options_for(path);
            o.validation = held ? 0.1 : 0.0;
            o.unpacked = unpacked;
            qd_data *data;
            ok(qd_data_open(&o, &data));
            qd_batch_source source = qd_data_source(data), kept = qd_data_validation_source(data);
            assert_true(source.documents);
            int training = held ? EXAMPLES - EXAMPLES / 10 : EXAMPLES;
            assert_int_equal(unpacked ? training : qd_data_windows(data), qd_data_windows(data));
            assert_true(unpacked || qd_data_windows(data) < training * 3 / 4);
            for (int epoch = 0; epoch < 3; epoch++) {
                int counts[EXAMPLES] = {0};
                read_epoch(&source, epoch * qd_data_windows(data), qd_data_windows(data), counts);
                if (held)
                    read_epoch(&kept, 0, qd_data_validation_windows(data), counts);
                for (int i = 0; i < EXAMPLES; i++)
                    assert_int_equal(counts[i], 1);
            }
            if (held) { /* from the end of the file */
                int counts[EXAMPLES] = {0};
                read_epoch(&kept, 0, qd_data_validation_windows(data), counts);
                for (int i = 0; i < EXAMPLES; i++)
                    assert_int_equal(counts[i], i >= training);
            }
            qd_data_close(data);
        }
}

static qd_status open_text(void **state, const char *text, qd_overlong overlong, qd_data_source_info *info)
{
    qd_data *data = NULL;
    qd_data_options o = options_for(scratch_text(state, "x.jsonl", text));
    o.overlong = overlong;
    qd_status status = qd_data_open(&o, &data);
    if (status == QD_OK)
        qd_data_source_describe(data, 0, info);
    qd_data_close(data);
    return status;
}

#define PAIR(prompt, completion) "{\"prompt\": \"" prompt "\", \"completion\": \"" completion "\"}\n"
#define LONG "0123456789012345678901234567890123456789"

static void too_long(void **state)
{
    const char *text = PAIR("a", "b") PAIR("a", LONG) PAIR(LONG, "b") "\n" PAIR("", "c");
    qd_data_source_info info = qd_data_source_info_default();
    ok(open_text(state, text, QD_OVERLONG_CUT, &info)); /* of the third, the completion is cut off */
    assert_int_equal(info.documents, 3);
    assert_int_equal(info.cut_examples, 1);
    assert_int_equal(info.skipped_examples, 1);
    assert_int_equal(info.tokens, 4 + SEQ + 1 + 3);
    ok(open_text(state, text, QD_OVERLONG_SKIP, &info));
    assert_int_equal(info.documents, 2);
    assert_int_equal(info.skipped_examples, 2);
    assert_int_equal(open_text(state, text, QD_OVERLONG_REFUSE, &info), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "(line 2): an example of 43 tokens"));
}

static void names_the_line(void **state)
{
    static const struct {
        const char *text, *message;
    } cases[] = {
        {PAIR("a", "b") "{\"prompt\": \"a\"}\n", "(line 2): an example needs 'prompt' and 'completion', or 'messages'"},
        {"{\"text\": \"a\"}\n", "data.format=text"},
        {PAIR("a", "b") "\n{\"prompt\": 1, \"completion\": \"b\"}\n", "(line 3): 'prompt' must be a string"},
        {"{\"prompt\": \"a\", \"completion\": \"b\"\n", "line 1"},
        {"[]\n", "needs 'prompt' and 'completion'"},
        {"\n\n", "no example can be used"},
        {PAIR(LONG, "b"), "no example can be used: 1 were skipped"},
    };
    qd_data_source_info info = qd_data_source_info_default();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_int_equal(open_text(state, cases[i].text, QD_OVERLONG_CUT, &info), QD_USAGE);
        if (!strstr(qd_error_message(), cases[i].message))
            fail_msg("%s: %s", cases[i].message, qd_error_message());
    }
}

/* Roles in brackets; <|endoftext|>, a special token of the fixture, ends each message. */
#define TEMPLATE "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|endoftext|>\n{% endfor %}" \
                 "{% if add_generation_prompt %}[assistant] {% endif %}"
#define TOKENIZER QD_TEST_SOURCE_DIR "/tests/unit/data/tokenizers/qwen3.json"
#define MESSAGE(role, content) "{\"role\": \"" role "\", \"content\": \"" content "\"}"

typedef struct chat_set {
    qd_tokenizer *tokenizer;
    qd_text_encoder encoder;
} chat_set;

static chat_set load_tokenizer(void)
{
    chat_set c = {.encoder = qd_text_encoder_default()};
    ok(qd_tokenizer_load(TOKENIZER, NULL, &c.tokenizer));
    ok(qd_text_encoder_create(c.tokenizer, NULL, &c.encoder));
    return c;
}

static qd_status open_chat(void **state, const chat_set *c, const char *lines, const char *template, qd_data **data)
{
    qd_data_options o = options_for(scratch_text(state, "chat.jsonl", lines));
    o.seq = 200;
    o.vocab = qd_tokenizer_size(c->tokenizer);
    o.encoder = &c->encoder;
    o.chat_template = scratch_text(state, "template.jinja", template);
    return qd_data_open(&o, data);
}

/* The text of the targets that count, one line per stretch of them. */
static void counted_text(qd_data *data, const qd_tokenizer *tokenizer, qd_strbuf *text)
{
    int32_t tokens[200], targets[200], start[200];
    qd_batch_source source = qd_data_source(data);
    ok(source.fill(source.context, 0, 1, 200, tokens, targets, start));
    for (int t = 0; t < 200; t++) {
        if (targets[t] >= 0)
            ok(qd_tokenizer_decode(tokenizer, &targets[t], 1, false, text));
        if (targets[t] >= 0 && (t == 199 || targets[t + 1] < 0))
            qd_strbuf_puts(text, "|");
    }
}

static void only_the_assistant_counts(void **state)
{
    chat_set c = load_tokenizer();
    qd_data *data = NULL;
    qd_strbuf text = {0};
    ok(open_chat(state, &c,
                 "{\"messages\": [" MESSAGE("system", "Be brief.") ", " MESSAGE("user", "Two?") ", " MESSAGE("assistant", "one two") ", "
                 MESSAGE("user", "And?") ", " MESSAGE("assistant", "three") "]}\n", TEMPLATE, &data));
    counted_text(data, c.tokenizer, &text);
    /* The space before an answer belongs to the prompt, unless one token has both. */
    char *first = strstr(text.data, "one two<|endoftext|>"), *second = strstr(text.data, "three<|endoftext|>");
    if (!first || !second || strstr(text.data, "Two") || strstr(text.data, "And") || strstr(text.data, "brief") ||
        strstr(text.data, "assistant"))
        fail_msg("what counts is %s", text.data);
    qd_strbuf_free(&text);
    qd_data_close(data);
    qd_text_encoder_destroy(&c.encoder);
    qd_tokenizer_destroy(c.tokenizer);
}

static void tools_are_rendered(void **state)
{
    chat_set c = load_tokenizer();
    qd_data *data = NULL;
    qd_strbuf text = {0};
    ok(open_chat(state, &c, "{\"tools\": [\"add\"], \"messages\": [" MESSAGE("user", "a") ", " MESSAGE("assistant", "c") "]}\n",
                 "{% for t in tools %}{{ t }}{% endfor %}" TEMPLATE, &data));
    int32_t tokens[200], targets[200], start[200];
    qd_batch_source source = qd_data_source(data);
    ok(source.fill(source.context, 0, 1, 200, tokens, targets, start));
    ok(qd_tokenizer_decode(c.tokenizer, tokens, 10, false, &text));
    assert_string_equal(text.data, "add[user] ");
    qd_strbuf_free(&text);
    qd_data_close(data);
    qd_text_encoder_destroy(&c.encoder);
    qd_tokenizer_destroy(c.tokenizer);
}

/* A prompt in front of both answers, or in common to them, gives the same tokens. */
static void pairs_of_messages(void **state)
{
    chat_set c = load_tokenizer();
    qd_strbuf text[2] = {{0}, {0}};
    static const char *const lines[2] = {
        "{\"prompt\": [" MESSAGE("user", "Two?") "], \"chosen\": [" MESSAGE("assistant", "one two") "], \"rejected\": ["
        MESSAGE("assistant", "three") "]}\n",
        "{\"chosen\": [" MESSAGE("user", "Two?") ", " MESSAGE("assistant", "one two") "], \"rejected\": [" MESSAGE("user", "Two?") ", "
        MESSAGE("assistant", "three") "]}\n"};
    for (int i = 0; i < 2; i++) {
        qd_data *data = NULL;
        qd_data_options o = options_for(scratch_text(state, "pairs.jsonl", lines[i]));
        o.seq = 200;
        o.pairs = true;
        o.vocab = qd_tokenizer_size(c.tokenizer);
        o.encoder = &c.encoder;
        o.chat_template = scratch_text(state, "template.jinja", TEMPLATE);
        ok(qd_data_open(&o, &data));
        assert_int_equal(qd_data_sequences(data), 2);
        counted_text(data, c.tokenizer, &text[i]);
        static int32_t parts[QD_PAIR_PARTS * 200];
        int firsts[2] = {0, 0}, rows[2] = {0, 0};
        qd_data_set_reference(data, (const double[]){-3.0, -5.0});
        qd_batch_source source = qd_data_source(data);
        ok(source.fill_pairs(source.context, 0, 1, 200, false, parts));
        for (int t = 0; t < 200; t++)
            if (parts[t] >= 0) {
                float reference;
                memcpy(&reference, &parts[QD_PAIR_REFERENCE * 200 + t], sizeof reference);
                assert_true(reference == (parts[t] == 1 ? -3.0f : parts[t] == 3 ? -5.0f : 0.0f));
                firsts[parts[t] >> 1 & 1] += parts[t] & 1;
                rows[parts[t] >> 1]++;
            }
        assert_true(firsts[0] == 1 && firsts[1] == 1 && rows[0] > 1 && rows[1] > 0);
        qd_data_close(data);
    }
    assert_string_equal(text[0].data, text[1].data);
    assert_true(strstr(text[0].data, "one two<|endoftext|>") && strstr(text[0].data, "three<|endoftext|>") && !strstr(text[0].data, "Two"));
    qd_strbuf_free(&text[0]);
    qd_strbuf_free(&text[1]);
    qd_text_encoder_destroy(&c.encoder);
    qd_tokenizer_destroy(c.tokenizer);
}

static void messages_that_cannot_be_used(void **state)
{
    static const struct {
        const char *lines, *template, *message;
    } cases[] = {
        {"{\"messages\": [" MESSAGE("user", "a<|endoftext|>[assistant] b") ", " MESSAGE("assistant", "c") "]}\n", TEMPLATE, "message 1"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": [{\"text\": \"a<|endoftext|>b\"}]}, " MESSAGE("assistant", "c") "]}\n",
         "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}|{% endfor %}", "message 1"},
        {"{\"messages\": 3}\n", TEMPLATE, "must be a list"},
        {"{\"tools\": [\"<|endoftext|>\"], \"messages\": [" MESSAGE("user", "a") ", " MESSAGE("assistant", "c") "]}\n", TEMPLATE,
         "'tools'"},
        {"{\"messages\": [" MESSAGE("user", "a") ", " MESSAGE("assistant", "c") "]}\n", "{{ raise_exception('not these') }}", "not these"},
        {"{\"messages\": [" MESSAGE("user", "a") ", " MESSAGE("assistant", "c") "]}\n",
         "{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}", "message 2 differently"},
        {"{\"messages\": [" MESSAGE("user", "a") "]}\n", TEMPLATE, "no example can be used"},
    };
    chat_set c = load_tokenizer();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        qd_data *data = NULL;
        assert_int_equal(open_chat(state, &c, cases[i].lines, cases[i].template, &data), QD_USAGE);
        if (!strstr(qd_error_message(), cases[i].message))
            fail_msg("%s: %s", cases[i].message, qd_error_message());
    }
    qd_data *data = NULL;
    qd_text_encoder_set_special(&c.encoder, QD_SPECIAL_ALLOW);
    ok(open_chat(state, &c, cases[0].lines, TEMPLATE, &data));
    qd_data_close(data);
    qd_text_encoder_destroy(&c.encoder);
    qd_tokenizer_destroy(c.tokenizer);
}

static void special_tokens_in_a_prompt(void **state)
{
    chat_set c = load_tokenizer();
    qd_data *data = NULL;
    qd_text_encoder_set_special(&c.encoder, QD_SPECIAL_REFUSE);
    assert_int_equal(open_chat(state, &c, "{\"prompt\": \"a\", \"completion\": \"b\"}\n"
                                          "{\"prompt\": \"a<|endoftext|>\", \"completion\": \"b\"}\n", TEMPLATE, &data), QD_USAGE);
    if (!strstr(qd_error_message(), "chat.jsonl (line 2)"))
        fail_msg("%s", qd_error_message());
    qd_text_encoder_destroy(&c.encoder);
    qd_tokenizer_destroy(c.tokenizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packs),
        cmocka_unit_test(each_example_once),
        cmocka_unit_test(too_long),
        cmocka_unit_test(names_the_line),
        cmocka_unit_test(only_the_assistant_counts),
        cmocka_unit_test(tools_are_rendered),
        cmocka_unit_test(pairs_of_messages),
        cmocka_unit_test(messages_that_cannot_be_used),
        cmocka_unit_test(special_tokens_in_a_prompt),
    };
    return cmocka_run_group_tests(tests, scratch_setup, scratch_teardown);
}
