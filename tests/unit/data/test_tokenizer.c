/* Tokenizer: encoding and decoding with small vocabularies, files both ways, damaged files.
 * tools/tokenizer_oracle.py compares with other tokenizers on much text. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "base/rng.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/tokenizer_impl.h"

#include <quadrille/tokenizer.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ctest: timeout 120
 * ctest: not under thread: nothing here has threads */

#define GPT2_PRE "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":true}"
#define HEAD     "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,\"normalizer\":null,"
#define DECODER  "\"decoder\":{\"type\":\"ByteLevel\"},"
/* a b c, then ab, abc, and the character of the space followed by a b. */
#define VOCAB    "\"vocab\":{\"a\":0,\"b\":1,\"c\":2,\"\\u0120\":3,\"ab\":4,\"abc\":5,\"\\u0120a\":6}"
#define MERGES   "\"merges\":[[\"a\",\"b\"],[\"ab\",\"c\"],[\"\\u0120\",\"a\"]]"
#define SMALL                                                                                                        \
    HEAD "\"added_tokens\":[{\"id\":7,\"content\":\"<s>\",\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"  \
         "\"normalized\":false,\"special\":true}],\"pre_tokenizer\":" GPT2_PRE "," DECODER                           \
         "\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<s>\","        \
         "\"type_id\":0}},{\"Sequence\":{\"id\":\"A\",\"type_id\":0}}],\"pair\":[],\"special_tokens\":{\"<s>\":"     \
         "{\"id\":\"<s>\",\"ids\":[7],\"tokens\":[\"<s>\"]}}},\"model\":{\"type\":\"BPE\"," VOCAB "," MERGES "}}"

static qd_tokenizer *load(const char *text)
{
    qd_tokenizer *tokenizer;
    if (qd_tokenizer_load_text("small.json", text, strlen(text), NULL, &tokenizer) != QD_OK)
        fail_msg("%s", qd_error_message());
    return tokenizer;
}

static void expect(const qd_tokenizer *tokenizer, const char *text, const qd_encode_options *options, int count,
                   const int32_t *ids)
{
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
    for (int round = 0; round < 2; round++) { /* the second time from the cache */
        tokens.count = 0;
        assert_int_equal(qd_encoder_encode(encoder, text, strlen(text), options, &tokens), QD_OK);
        assert_int_equal(tokens.count, count);
        assert_memory_equal(tokens.ids, ids, (size_t)count * sizeof *ids);
    }
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
}

static void small_vocabulary(void **state)
{
    (void)state;
    qd_tokenizer *tokenizer = load(SMALL);
    assert_int_equal(qd_tokenizer_size(tokenizer), 8);
    assert_int_equal(qd_tokenizer_special(tokenizer, "<s>"), 7);
    assert_int_equal(qd_tokenizer_special(tokenizer, "<t>"), -1);
    assert_true(qd_tokenizer_is_special(tokenizer, 7));
    assert_false(qd_tokenizer_is_special(tokenizer, 5));
    expect(tokenizer, "abc", NULL, 1, (int32_t[]){5});
    expect(tokenizer, "abcab cab", NULL, 5, (int32_t[]){5, 4, 3, 2, 4});
    /* The lower rank wins: "ab" before " a". */
    expect(tokenizer, "c ab", NULL, 3, (int32_t[]){2, 3, 4});
    expect(tokenizer, "c aab", NULL, 3, (int32_t[]){2, 6, 4});
    expect(tokenizer, "xaxbx", NULL, 1, (int32_t[]){4}); /* bytes without a token are dropped, as in `tokenizers` */
    expect(tokenizer, "", NULL, 0, NULL);
    qd_encode_options options = qd_encode_options_default();
    options.special = QD_SPECIAL_ALLOW;
    expect(tokenizer, "a<s>b<s", &options, 3, (int32_t[]){0, 7, 1});
    options.frame = true;
    expect(tokenizer, "ab", &options, 2, (int32_t[]){7, 4});
    qd_tokenizer_destroy(tokenizer);
}

static void special_policies(void **state)
{
    (void)state;
    qd_tokenizer *tokenizer = load(SMALL);
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    qd_encode_options options = qd_encode_options_default();
    assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
    expect(tokenizer, "a<s>b", &options, 2, (int32_t[]){0, 1});
    options.special = QD_SPECIAL_REFUSE;
    assert_int_equal(qd_encoder_encode(encoder, "aa<s>", 5, &options, &tokens), QD_USAGE);
    assert_non_null(strstr(qd_error_message(), "<s> at byte 2"));
    const char *allowed[] = {"<s>"};
    options.allowed = allowed;
    options.allowed_count = 1;
    expect(tokenizer, "a<s>b", &options, 3, (int32_t[]){0, 7, 1});
    allowed[0] = "<t>";
    assert_int_equal(qd_encoder_encode(encoder, "a", 1, &options, &tokens), QD_USAGE);
    options = qd_encode_options_default();
    options.broken = QD_BROKEN_TIKTOKEN;
    assert_int_equal(qd_encoder_encode(encoder, "a", 1, &options, &tokens), QD_USAGE);
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
    qd_tokenizer_destroy(tokenizer);
}

static void decodes(void **state)
{
    (void)state;
    qd_tokenizer *tokenizer = load(SMALL);
    qd_strbuf text = {0};
    assert_int_equal(qd_tokenizer_decode(tokenizer, (int32_t[]){7, 6, 5}, 3, false, &text), QD_OK);
    assert_string_equal(text.data, "<s> aabc");
    qd_strbuf_clear(&text);
    assert_int_equal(qd_tokenizer_decode(tokenizer, (int32_t[]){7, 6, 5}, 3, true, &text), QD_OK);
    assert_string_equal(text.data, " aabc");
    for (int32_t id = -1; id <= 8; id += 9) {
        assert_int_equal(qd_tokenizer_decode(tokenizer, (int32_t[]){0, id}, 2, false, &text), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "at position 1"));
    }
    qd_strbuf_free(&text);
    qd_tokenizer_destroy(tokenizer);
}

static void byte_characters(void **state)
{
    (void)state;
    bool taken[512] = {false};
    for (int byte = 0; byte < 256; byte++) {
        uint32_t character = qd_byte_to_character((uint8_t)byte);
        assert_in_range(character, 0x21, 511);
        assert_false(taken[character]);
        taken[character] = true;
        assert_int_equal(qd_character_to_byte(character), byte);
    }
    assert_int_equal(qd_byte_to_character(' '), 0x120);
    assert_int_equal(qd_byte_to_character(0xad), 0x143);
    assert_int_equal(qd_character_to_byte(' '), -1);
    assert_int_equal(qd_character_to_byte(0x144), -1);
}

/* Every line is a file that `tokenizers` might write but that is not supported, with the field that
 * the message names. */
static void refuses_by_name(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to, *named;
    } cases[] = {
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Nmt\"}", "normalizer.type 'Nmt'"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Replace\",\"content\":\"\"}", "pattern"},
        {"\"normalizer\":null", "\"normalizer\":{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"AAAA\"}", "precompiled_charsmap"},
        {"\"truncation\":null", "\"truncation\":{\"max_length\":3}", "truncation"},
        {"\"padding\":null", "\"padding\":{}", "padding"},
        {"\"version\":\"1.0\"", "\"version\":\"2.0\"", "version"},
        {"\"type\":\"BPE\"", "\"type\":\"WordLevel\"", "model.type 'WordLevel'"},
        {"\"type\":\"BPE\"", "\"byte_fallback\":true,\"end_of_word_suffix\":\"</w>\"", "model.byte_fallback"},
        {"\"type\":\"BPE\"", "\"dropout\":0.1", "model.dropout"},
        {"\"type\":\"BPE\"", "\"dropout\":0.05", "model.dropout"},
        {"\"type\":\"BPE\"", "\"dropout\":5e-2", "model.dropout"},
        {"\"type\":\"BPE\"", "\"dropout\":\"0\"", "model.dropout"},
        {"\"type\":\"BPE\"", "\"unk_token\":\"?\"", "model.unk_token"},
        {"\"decoder\":{\"type\":\"ByteLevel\"}", "\"decoder\":{\"type\":\"CTC\"}", "decoder.type 'CTC'"},
        {GPT2_PRE, "{\"type\":\"UnicodeScripts\"}", "pre_tokenizer.type 'UnicodeScripts'"},
        {GPT2_PRE, "{\"type\":\"Metaspace\",\"replacement\":\"ab\"}", "replacement"},
        {GPT2_PRE, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\",\"invert\":false}", "pre_tokenizer"},
        {GPT2_PRE, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a*\"},\"behavior\":\"Isolated\",\"invert\":false}",
         "match the empty string"},
        {GPT2_PRE, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[[:alpha:]]\"},\"behavior\":\"Isolated\",\"invert\":false}", "POSIX"},
        {GPT2_PRE, "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Merged\",\"invert\":false}", "behavior 'Merged'"},
        {"\"ids\":[7]", "\"ids\":[9]", "ids"},
        {"\"TemplateProcessing\"", "\"RobertaProcessing\"", "post_processor.cls"},
        {"\"id\":7,\"content\"", "\"id\":9,\"content\"", "added_tokens[0].id"},
        {"\"content\":\"<s>\"", "\"content\":\"\"", "added_tokens[0].content"},
        {"[\"a\",\"b\"]", "[\"a\",\"x\"]", "model.merges[0]"},
        {"[\"a\",\"b\"]", "[\"a\",\"c\"]", "model.merges[0]"},
        {"[\"a\",\"b\"]", "\"ab\"", "model.merges[0]"},
        {"[\"a\",\"b\"]", "[\"a\"]", "model.merges[0]"},
        {"\"ab\":4", "\"ab\":3", "the id 3"},
        {"\"ab\":4", "\"a\":4", "twice"},
        {"\"ab\":4", "\"ab\":100000000", "too high"},
        {"\"ab\":4", "\"ab\":-4", "model.vocab"},
        {"\"ab\":4", "\"ab\":\"4\"", "model.vocab"},
        {"\"ab\":4", "\"a\\ud800\":4", "surrogate"},
        {"\"ab\":4", "\"ab\":4,,", "small.json:1:"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *place = strstr(SMALL, cases[i].from);
        assert_non_null(place);
        char text[4096];
        snprintf(text, sizeof text, "%.*s%s%s", (int)(place - SMALL), SMALL, cases[i].to, place + strlen(cases[i].from));
        qd_tokenizer *tokenizer = NULL;
        if (qd_tokenizer_load_text("small.json", text, strlen(text), NULL, &tokenizer) != QD_USAGE)
            fail_msg("taken: %s", cases[i].to);
        assert_null(tokenizer);
        assert_non_null(strstr(qd_error_message(), "small.json"));
        if (!strstr(qd_error_message(), cases[i].named))
            fail_msg("%s is not named in: %s", cases[i].named, qd_error_message());
    }
}

static void old_and_other_forms(void **state)
{
    (void)state;
    /* Merges as strings, as older versions wrote them; members in another order; a Sequence with a
     * Split. */
    qd_tokenizer *tokenizer = load(
        "{\"model\":{\"merges\":[\"#version: 0.2\",\"a b\",\"ab c\"]," VOCAB ",\"ignore_merges\":true,\"dropout\":0.000e0}," DECODER
        "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[ab]+|c\"},"
        "\"behavior\":\"Removed\",\"invert\":true},{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}}");
    expect(tokenizer, "abc ab", NULL, 3, (int32_t[]){4, 2, 4}); /* the space falls between the matches */
    expect(tokenizer, "\xff" "ab\xf0\x9f", NULL, 1, (int32_t[]){4});
    qd_tokenizer_destroy(tokenizer);
    /* Unknown bytes, fused and not. */
    for (int fuse = 0; fuse < 2; fuse++) {
        char text[1024];
        snprintf(text, sizeof text, "{\"model\":{\"unk_token\":\"c\",\"fuse_unk\":%s," VOCAB "," MERGES "}," DECODER
                 "\"pre_tokenizer\":" GPT2_PRE "}", fuse ? "true" : "false");
        tokenizer = load(text);
        expect(tokenizer, "xxab", NULL, fuse ? 2 : 3, fuse ? (int32_t[]){2, 4} : (int32_t[]){2, 2, 4});
        qd_tokenizer_destroy(tokenizer);
    }
    tokenizer = load("{\"model\":{" VOCAB "," MERGES "}," DECODER "\"pre_tokenizer\":{\"type\":\"ByteLevel\","
                     "\"add_prefix_space\":true}}");
    expect(tokenizer, "aa", NULL, 2, (int32_t[]){6, 0});
    expect(tokenizer, " a", NULL, 1, (int32_t[]){6});
    assert_int_equal(qd_tokenizer_cut(tokenizer, "a\nb", 2), 0);
    qd_tokenizer_destroy(tokenizer);
}

/* However a file is damaged, it is read or refused. */
static void damaged_files(void **state)
{
    (void)state;
    const size_t length = strlen(SMALL);
    char text[sizeof SMALL];
    int taken = 0;
    for (size_t i = 0; i < length; i++) {
        qd_tokenizer *tokenizer = NULL;
        assert_int_equal(qd_tokenizer_load_text("cut", SMALL, i, NULL, &tokenizer), QD_USAGE);
        assert_non_null(strstr(qd_error_message(), "cut"));
        for (int bit = 0; bit < 8; bit++) {
            memcpy(text, SMALL, length + 1);
            text[i] = (char)(text[i] ^ 1 << bit);
            qd_status status = qd_tokenizer_load_text("flipped", text, length, NULL, &tokenizer);
            assert_true(status == QD_OK || status == QD_USAGE);
            if (status == QD_OK) {
                taken++;
                qd_tokenizer_destroy(tokenizer);
            }
        }
    }
    assert_true(taken < (int)length * 4); /* most of the file matters */
}

/* A tiktoken file with all bytes and some merges. */
static void write_ranks(qd_strbuf *out, int extra_count, const char *const *extra)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (int i = 0; i < 256 + extra_count; i++) {
        char byte[2] = {(char)i, 0};
        const char *token = i < 256 ? byte : extra[i - 256];
        size_t length = i < 256 ? 1 : strlen(token);
        for (size_t at = 0; at < length; at += 3) {
            uint32_t bits = 0;
            for (size_t j = 0; j < 3; j++)
                bits = bits << 8 | (at + j < length ? (uint8_t)token[at + j] : 0);
            for (size_t j = 0; j < 4; j++)
                qd_strbuf_printf(out, "%c", at + j <= length ? digits[bits >> (18 - 6 * j) & 63] : '=');
        }
        qd_strbuf_printf(out, " %d\n", i);
    }
}

static qd_tokenizer *load_ranks(int count, const char *const *extra, const char *encoding)
{
    qd_strbuf file = {0};
    qd_tokenizer *tokenizer;
    write_ranks(&file, count, extra);
    if (qd_tokenizer_load_text("ranks", file.data, file.length, encoding, &tokenizer) != QD_OK)
        fail_msg("%s", qd_error_message());
    qd_strbuf_free(&file);
    return tokenizer;
}

static void tiktoken_files(void **state)
{
    (void)state;
    const char *const extra[] = {"ab", "cd", "abcd", "aa", "aaaa"};
    qd_tokenizer *tokenizer = load_ranks(5, extra, "gpt2");
    expect(tokenizer, "abcdab", NULL, 2, (int32_t[]){258, 256});
    expect(tokenizer, "aaaaaaa", NULL, 3, (int32_t[]){260, 259, 'a'});
    assert_int_equal(qd_tokenizer_size(tokenizer), 50257);
    assert_int_equal(qd_tokenizer_special(tokenizer, "<|endoftext|>"), 50256);
    assert_null(qd_tokenizer_bytes(tokenizer, 300, &(size_t){0}));
    /* The same after it was saved as tokenizer.json. */
    qd_strbuf saved = {0};
    qd_tokenizer *again;
    assert_int_equal(qd_tokenizer_save_text(tokenizer, &saved), QD_OK);
    assert_int_equal(qd_tokenizer_load_text("again", saved.data, saved.length, NULL, &again), QD_OK);
    expect(again, "abcdab", NULL, 2, (int32_t[]){258, 256});
    assert_int_equal(qd_tokenizer_special(again, "<|endoftext|>"), 50256);
    /* A run compares the hash of what it saved with that of the given file: saving it again must
     * give the same hash. */
    qd_strbuf resaved = {0};
    assert_int_equal(qd_tokenizer_save_text(again, &resaved), QD_OK);
    assert_string_equal(resaved.data, saved.data);
    qd_strbuf_free(&resaved);
    qd_tokenizer_destroy(again);
    qd_strbuf_free(&saved);
    qd_tokenizer_destroy(tokenizer);
    /* "abc" is not a merge of two tokens of lower rank: it is still found as in tiktoken, but
     * tokenizer.json cannot express it. */
    const char *const odd[] = {"abc", "bc"};
    tokenizer = load_ranks(2, odd, "cl100k_base");
    expect(tokenizer, "abc", NULL, 1, (int32_t[]){256});
    expect(tokenizer, "abcabc", NULL, 2, (int32_t[]){256, 256});
    assert_int_equal(qd_tokenizer_save_text(tokenizer, &saved), QD_UNSUPPORTED);
    qd_tokenizer_destroy(tokenizer);
    static const struct {
        const char *text, *encoding, *named;
    } broken[] = {
        {"IQ== 0\nIQ== 1\n", "gpt2", "bad:2: the token appears twice"}, {"IQ== 0\nIg== 0\n", "gpt2", "bad:2: the rank appears twice"},
        {"IQ==0\n", "gpt2", "bad:1:"}, {"IQ== x\n", "gpt2", "bad:1: the rank"}, {"I=== 0\n", "gpt2", "bad:1: the token is not base64"},
        {"IQ= 0\n", "gpt2", "bad:1:"}, {"IQ== 4000000000\n", "gpt2", "bad:1:"}, {"IQ== 99999999\n", "gpt2", "too high"},
        {"IQ== 0\n", "gpt2", "byte 0x00"}, {"IQ== 0\n", NULL, "set the encoding"}, {"IQ== 0\n", "gpt9", "gpt9"}, {" \n", NULL, "empty"},
        {"\xff\xfe 0\n", "gpt2", "bad:1:"}, {SMALL, "gpt2", "a tokenizer.json defines its own"}};
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++) {
        assert_int_equal(qd_tokenizer_load_text("bad", broken[i].text, strlen(broken[i].text), broken[i].encoding, &tokenizer),
                         QD_USAGE);
        if (!strstr(qd_error_message(), broken[i].named))
            fail_msg("%s is not named in: %s", broken[i].named, qd_error_message());
    }
}

static void damaged_ranks(void **state)
{
    (void)state;
    const char *const extra[] = {"ab", "abc"};
    qd_strbuf file = {0};
    write_ranks(&file, 2, extra);
    qd_tokenizer *tokenizer;
    for (size_t i = 0; i < file.length; i++) {
        qd_status status = qd_tokenizer_load_text("cut", file.data, i, "gpt2", &tokenizer);
        assert_true(status == QD_OK || status == QD_USAGE);
        assert_true(status == QD_USAGE || i + 24 > file.length);
        if (status == QD_OK)
            qd_tokenizer_destroy(tokenizer);
        file.data[i] = (char)(file.data[i] ^ 1 << i % 8);
        status = qd_tokenizer_load_text("flipped", file.data, file.length, "gpt2", &tokenizer);
        assert_true(status == QD_OK || status == QD_USAGE);
        if (status == QD_OK)
            qd_tokenizer_destroy(tokenizer);
        file.data[i] = (char)(file.data[i] ^ 1 << i % 8);
    }
    qd_strbuf_free(&file);
}

/* tiktoken's treatment of invalid UTF-8: from the last piece before it on nothing is split. */
static void broken_text(void **state)
{
    (void)state;
    const char *const extra[] = {"b ", "\377a", "\xef\xbf", "\xef\xbf\xbd"};
    qd_tokenizer *tokenizer = load_ranks(4, extra, "gpt2");
    qd_encode_options options = qd_encode_options_default();
    expect(tokenizer, "b \xff" "a", &options, 4, (int32_t[]){'b', ' ', 255, 'a'});
    options.broken = QD_BROKEN_REPLACE;
    expect(tokenizer, "b \xff" "a", &options, 4, (int32_t[]){'b', ' ', 259, 'a'});
    expect(tokenizer, "\xed\xa0\x80", &options, 3, (int32_t[]){259, 259, 259});
    expect(tokenizer, "\xf0\x9f\x98", &options, 1, (int32_t[]){259});
    options.broken = QD_BROKEN_TIKTOKEN;
    expect(tokenizer, "b \xff" "a", &options, 3, (int32_t[]){'b', ' ', 257});
    expect(tokenizer, "xb\xff", &options, 3, (int32_t[]){'x', 'b', 255});
    qd_tokenizer_destroy(tokenizer);
}

/* A heap for long pieces, a scan for short ones: the same merges. Pieces of a million bytes are
 * fast. */
static void long_pieces(void **state)
{
    (void)state;
    const char *const extra[] = {"aa", "aab", "aaaa", "ba", "bab", "aaaaaaaa"};
    qd_tokenizer *tokenizer = load_ranks(6, extra, "gpt2");
    qd_philox_key key = qd_rng_key(1, "pieces");
    qd_bpe_work work = {0};
    uint8_t piece[600];
    for (uint64_t round = 0; round < 300; round++) {
        size_t length = 1 + qd_rng_below(key, round * 1000, sizeof piece);
        for (size_t i = 0; i < length; i++)
            piece[i] = qd_rng_below(key, round * 1000 + i + 1, 3) ? 'a' : 'b';
        /* The definition, written plainly. */
        uint32_t plain[600], count = (uint32_t)length;
        for (size_t i = 0; i < length; i++)
            plain[i] = piece[i];
        for (;;) {
            const qd_merge *best = NULL;
            uint32_t place = 0;
            for (uint32_t i = 0; i + 1 < count; i++) {
                const qd_merge *merge = qd_vocab_merge(&tokenizer->vocab, plain[i], plain[i + 1]);
                if (merge && (!best || merge->rank < best->rank)) {
                    best = merge;
                    place = i;
                }
            }
            if (!best)
                break;
            plain[place] = best->id;
            memmove(plain + place + 1, plain + place + 2, (count - place - 2) * sizeof *plain);
            count--;
        }
        const uint32_t *ids;
        size_t got;
        assert_int_equal(qd_bpe(tokenizer, &work, piece, length, &ids, &got), QD_OK);
        assert_int_equal(got, count);
        assert_memory_equal(ids, plain, count * sizeof *plain);
    }
    qd_bpe_work_free(&work);
    size_t size = 1 << 20;
    char *text = malloc(size);
    assert_non_null(text);
    memset(text, 'a', size);
    qd_encoder *encoder;
    qd_tokens tokens = {0};
    assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
    assert_int_equal(qd_encoder_encode(encoder, text, size, NULL, &tokens), QD_OK);
    assert_int_equal(tokens.count, size / 8);
    assert_int_equal(tokens.ids[size / 8 - 1], 261);
    qd_tokens_free(&tokens);
    qd_encoder_destroy(encoder);
    free(text);
    qd_tokenizer_destroy(tokenizer);
}

/* Any bytes survive a round trip, in all patterns, also if the word cache is cleared many times. */
static void round_trips(void **state)
{
    (void)state;
    static const char *const names[] = {"gpt2", "cl100k_base", "o200k_base", "llama3"};
    const char *const extra[] = {"th", "the", " t", " th", " the"};
    qd_philox_key key = qd_rng_key(2, "bytes");
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        qd_tokenizer *tokenizer = load_ranks(5, extra, names[n]);
        qd_encoder *encoder;
        assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
        size_t length = 3 << 20;
        char *text = malloc(length);
        for (size_t i = 0; i < length; i += 4) {
            uint32_t words[4];
            qd_philox4x32(key, i, n, words);
            memcpy(text + i, words[0] & 1 ? " the" : (const char *)&words[1], 4);
        }
        qd_tokens tokens = {0};
        qd_strbuf back = {0};
        assert_int_equal(qd_encoder_encode(encoder, text, length, NULL, &tokens), QD_OK);
        assert_int_equal(qd_tokenizer_decode(tokenizer, tokens.ids, tokens.count, false, &back), QD_OK);
        assert_int_equal(back.length, length);
        assert_memory_equal(back.data, text, length);
        qd_tokens_free(&tokens);
        qd_strbuf_free(&back);
        qd_encoder_destroy(encoder);
        qd_tokenizer_destroy(tokenizer);
        free(text);
    }
}

/* A text encoded in parts gives the tokens of the whole. */
static void cuts(void **state)
{
    (void)state;
    static const char *const pieces[] = {"\n", "\r\n", " ",        "the",          "X",    "7",   "}", "//", "\n\n",
                                         "\t", "'s",   "\xc2\xa0", "\xe4\xb8\xad", "\xff", "a\nb"};
    static const char *const names[] = {"gpt2", "cl100k_base", "o200k_base", "llama3"};
    qd_philox_key key = qd_rng_key(3, "cuts");
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        qd_tokenizer *tokenizer = load_ranks(2, (const char *const[]){"\nb", "a\n"}, names[n]);
        qd_encoder *encoder;
        assert_int_equal(qd_encoder_create(tokenizer, &encoder), QD_OK);
        int cut_count = 0;
        for (uint64_t round = 0; round < 3000; round++) {
            qd_strbuf text = {0};
            for (uint64_t i = 0; i < 14; i++)
                qd_strbuf_puts(&text, pieces[qd_rng_below(key, round * 16 + i, sizeof pieces / sizeof *pieces)]);
            size_t place = qd_tokenizer_cut(tokenizer, text.data, text.length - 1);
            qd_tokens whole = {0}, parts = {0};
            assert_int_equal(qd_encoder_encode(encoder, text.data, text.length, NULL, &whole), QD_OK);
            assert_int_equal(qd_encoder_encode(encoder, text.data, place, NULL, &parts), QD_OK);
            assert_int_equal(qd_encoder_encode(encoder, text.data + place, text.length - place, NULL, &parts), QD_OK);
            assert_int_equal(whole.count, parts.count);
            assert_memory_equal(whole.ids, parts.ids, whole.count * sizeof *whole.ids);
            cut_count += place > 0;
            qd_tokens_free(&whole);
            qd_tokens_free(&parts);
            qd_strbuf_free(&text);
        }
        assert_true(cut_count > 300);
        qd_encoder_destroy(encoder);
        qd_tokenizer_destroy(tokenizer);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_vocabulary), cmocka_unit_test(special_policies), cmocka_unit_test(decodes),
        cmocka_unit_test(byte_characters), cmocka_unit_test(refuses_by_name), cmocka_unit_test(old_and_other_forms),
        cmocka_unit_test(damaged_files), cmocka_unit_test(tiktoken_files), cmocka_unit_test(damaged_ranks),
        cmocka_unit_test(broken_text), cmocka_unit_test(long_pieces), cmocka_unit_test(round_trips), cmocka_unit_test(cuts),
    };
    return cmocka_run_group_tests_name("tokenizer", tests, NULL, NULL);
}
