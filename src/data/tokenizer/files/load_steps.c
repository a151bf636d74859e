/* Reads the normalizer and the pre-tokenizer of tokenizer.json. */
#include "data/tokenizer/files/load_impl.h"

#include "base/text/base64.h"
#include "data/tokenizer/normalize/unicode_data.h"
#include "data/tokenizer/split/unicode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DEEPEST = 4 };

static qd_status add_step(qd_loader *load, qd_normal_kind kind, qd_normal_step **step)
{
    qd_normalizer *normalizer = &load->tokenizer->normalizer;
    if (normalizer->count == QD_MOST_NORMAL_STEPS)
        return QD_LOAD_FAIL("normalizer: more than %d steps are not supported", QD_MOST_NORMAL_STEPS);
    *step = &normalizer->steps[normalizer->count++];
    **step = (qd_normal_step){.kind = kind};
    return QD_OK;
}

/* BertNormalizer is several steps. strip_accents: null means as lowercase. */
static qd_status read_bert(qd_loader *load, const char *clean_at, const char *chinese_at, const char *strip_at, const char *lower_at)
{
    bool clean, chinese, strip, lower;
    qd_normal_step *step;
    QD_TRY(qd_load_boolean(load, clean_at, "normalizer: clean_text", &clean));
    QD_TRY(qd_load_boolean(load, chinese_at, "normalizer: handle_chinese_chars", &chinese));
    QD_TRY(qd_load_boolean(load, lower_at, "normalizer: lowercase", &lower));
    if (qd_load_is_null(load, strip_at))
        strip = lower;
    else
        QD_TRY(qd_load_boolean(load, strip_at, "normalizer: strip_accents", &strip));
    if (clean)
        QD_TRY(add_step(load, QD_NORMAL_CLEAN, &step));
    if (chinese)
        QD_TRY(add_step(load, QD_NORMAL_CHINESE, &step));
    if (strip) {
        QD_TRY(add_step(load, QD_NORMAL_NFD, &step));
        QD_TRY(add_step(load, QD_NORMAL_NONSPACING, &step));
    }
    return lower ? add_step(load, QD_NORMAL_LOWERCASE, &step) : QD_OK;
}

static qd_status read_precompiled(qd_loader *load, const char *at)
{
    qd_json_text text;
    qd_normal_step *step = NULL;
    if (qd_load_is_null(load, at))
        return QD_LOAD_FAIL("normalizer: Precompiled has no precompiled_charsmap");
    QD_TRY(qd_json_reader_string(&load->reader, "precompiled_charsmap", &text));
    uint8_t *bytes = malloc(text.length + 1);
    size_t length = 0;
    if (!bytes)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", load->reader.name);
    qd_status status = qd_base64_read(text.data, text.length, bytes, &length)
                           ? add_step(load, QD_NORMAL_PRECOMPILED, &step)
                           : QD_LOAD_FAIL("normalizer: precompiled_charsmap is not base64");
    if (status == QD_OK)
        status = qd_charsmap_create(load->reader.name, bytes, length, &step->map);
    free(bytes);
    return status;
}

qd_status qd_load_normalizer(qd_loader *load, const char *at, int depth)
{
    static const struct {
        const char *name;
        qd_normal_kind kind;
    } kinds[] = {{"NFC", QD_NORMAL_NFC}, {"NFD", QD_NORMAL_NFD}, {"NFKC", QD_NORMAL_NFKC}, {"NFKD", QD_NORMAL_NFKD},
                 {"Lowercase", QD_NORMAL_LOWERCASE}, {"Strip", QD_NORMAL_STRIP}, {"StripAccents", QD_NORMAL_STRIP_ACCENTS},
                 {"Replace", QD_NORMAL_REPLACE}, {"Prepend", QD_NORMAL_PREPEND}, {"ByteLevel", QD_NORMAL_BYTES}};
    enum { TYPE, LIST, PATTERN, CONTENT, PREPEND, LEFT, RIGHT, CLEAN, CHINESE, ACCENTS, LOWER, MAP, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"normalizers", NULL}, {"pattern", NULL}, {"content", NULL}, {"prepend", NULL},
                                   {"strip_left", NULL}, {"strip_right", NULL}, {"clean_text", NULL},
                                   {"handle_chinese_chars", NULL}, {"strip_accents", NULL}, {"lowercase", NULL},
                                   {"precompiled_charsmap", NULL}};
    qd_json_text type;
    qd_normal_step *step = NULL;
    load->reader.at = at;
    QD_TRY(qd_json_reader_members(&load->reader, "normalizer", places, COUNT));
    QD_TRY(qd_load_string(load, places[TYPE].at, "normalizer.type", &type));
    if (qd_json_text_is(type, "Sequence") && depth < DEEPEST)
        return qd_load_list(load, places[LIST].at, "normalizer.normalizers", depth + 1, qd_load_normalizer);
    if (qd_json_text_is(type, "BertNormalizer"))
        return read_bert(load, places[CLEAN].at, places[CHINESE].at, places[ACCENTS].at, places[LOWER].at);
    if (qd_json_text_is(type, "Precompiled"))
        return read_precompiled(load, places[MAP].at);
    for (size_t i = 0; !step && i < sizeof kinds / sizeof *kinds; i++)
        if (qd_json_text_is(type, kinds[i].name))
            QD_TRY(add_step(load, kinds[i].kind, &step));
    if (!step)
        return QD_LOAD_FAIL("normalizer.type '%.*s' is not supported; NFC, NFD, NFKC, NFKD, Lowercase, Strip, StripAccents, "
                            "Replace, Prepend, BertNormalizer, ByteLevel, Precompiled and Sequence are", (int)type.length, type.data);
    switch (step->kind) {
    case QD_NORMAL_STRIP:
        QD_TRY(qd_load_boolean(load, places[LEFT].at, "normalizer: strip_left", &step->left));
        return qd_load_boolean(load, places[RIGHT].at, "normalizer: strip_right", &step->right);
    case QD_NORMAL_REPLACE:
        QD_TRY(qd_load_pattern(load, places[PATTERN].at, "normalizer: Replace", &step->pattern, &step->pattern_length, &step->regex));
        return qd_load_copy(load, places[CONTENT].at, "normalizer: the content of Replace", &step->content, &step->content_length);
    case QD_NORMAL_PREPEND:
        return qd_load_copy(load, places[PREPEND].at, "normalizer: prepend", &step->content, &step->content_length);
    default: return QD_OK;
    }
}

static qd_status read_byte_level(qd_loader *load, const char *prefix, const char *use_regex)
{
    qd_tokenizer *tokenizer = load->tokenizer;
    bool add_prefix, split = true;
    qd_stage *stage = NULL;
    if (!prefix)
        return QD_LOAD_FAIL("pre_tokenizer: ByteLevel has no add_prefix_space");
    QD_TRY(qd_load_boolean(load, prefix, "add_prefix_space", &add_prefix));
    if (use_regex)
        QD_TRY(qd_load_boolean(load, use_regex, "use_regex", &split));
    if (add_prefix)
        QD_TRY(qd_tokenizer_add_stage(tokenizer, load->reader.name, QD_STAGE_PREFIX, &stage));
    if (split) {
        const char *regex = qd_pattern_regex(QD_PATTERN_GPT2);
        QD_TRY(qd_tokenizer_add_split(tokenizer, "pre_tokenizer", regex, strlen(regex)));
        tokenizer->stages[tokenizer->stage_count - 1].byte_level = true;
    }
    return qd_tokenizer_add_stage(tokenizer, load->reader.name, QD_STAGE_BYTES, &stage);
}

/* Escapes every character that has a meaning in a regular expression. */
static char *escaped(qd_json_text text, size_t *length)
{
    char *out = malloc(2 * text.length + 1);
    *length = 0;
    for (size_t i = 0; out && i < text.length; i++) {
        if (strchr("\\.+*?()|[]{}^$#&-~ ", text.data[i]))
            out[(*length)++] = '\\';
        out[(*length)++] = text.data[i];
    }
    return out;
}

static qd_status read_behavior(qd_loader *load, const char *at, qd_behavior *behavior)
{
    static const char *const names[] = {[QD_ISOLATED] = "Isolated", [QD_REMOVED] = "Removed", [QD_CONTIGUOUS] = "Contiguous",
                                        [QD_WITH_PREVIOUS] = "MergedWithPrevious", [QD_WITH_NEXT] = "MergedWithNext"};
    qd_json_text text;
    QD_TRY(qd_load_string(load, at, "pre_tokenizer: behavior", &text));
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (qd_json_text_is(text, names[i])) {
            *behavior = (qd_behavior)i;
            return QD_OK;
        }
    return QD_LOAD_FAIL("pre_tokenizer: behavior '%.*s' is not known; it must be Isolated, Removed, Contiguous, "
                        "MergedWithPrevious or MergedWithNext", (int)text.length, text.data);
}

static qd_status read_split(qd_loader *load, const char *pattern, const char *behavior_at, const char *invert_at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { REGEX, STRING, COUNT };
    qd_json_place places[COUNT] = {{"Regex", NULL}, {"String", NULL}};
    qd_json_text text;
    qd_behavior behavior = QD_ISOLATED;
    bool invert;
    if (!pattern || !behavior_at)
        return QD_LOAD_FAIL("pre_tokenizer: Split has no %s", pattern ? "behavior" : "pattern");
    QD_TRY(qd_load_boolean(load, invert_at, "invert", &invert));
    QD_TRY(read_behavior(load, behavior_at, &behavior));
    reader->at = pattern;
    QD_TRY(qd_json_reader_members(reader, "pattern", places, COUNT));
    if (!places[REGEX].at == !places[STRING].at)
        return QD_LOAD_FAIL("pre_tokenizer: pattern must contain either Regex or String");
    reader->at = places[REGEX].at ? places[REGEX].at : places[STRING].at;
    QD_TRY(qd_json_reader_string(reader, "pattern", &text));
    if (memchr(text.data, 0, text.length))
        return QD_LOAD_FAIL("pre_tokenizer: pattern contains a NUL character");
    char where[512];
    snprintf(where, sizeof where, "%s: pre_tokenizer", reader->name);
    if (places[REGEX].at) {
        QD_TRY(qd_tokenizer_add_split(tokenizer, where, text.data, text.length));
    } else {
        size_t length;
        char *regex = escaped(text, &length);
        qd_status status = regex ? qd_tokenizer_add_split(tokenizer, where, regex, length)
                                 : QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", reader->name);
        free(regex);
        QD_TRY(status);
    }
    qd_stage *stage = &tokenizer->stages[tokenizer->stage_count - 1];
    stage->behavior = behavior;
    stage->invert = invert;
    return QD_OK;
}

/* One character, for Metaspace and CharDelimiterSplit. */
static qd_status read_mark(qd_loader *load, const char *at, const char *what, char mark[5])
{
    qd_json_text text;
    uint32_t character;
    QD_TRY(qd_load_string(load, at, what, &text));
    const uint8_t *bytes = (const uint8_t *)text.data;
    size_t size = text.length == 0 ? 0 : bytes[0] < 0x80 ? 1 : qd_utf8_read(bytes, bytes + text.length, &character);
    if (size == 0 || size != text.length || bytes[0] == 0)
        return QD_LOAD_FAIL("%s must be one character", what);
    memcpy(mark, text.data, size);
    mark[size] = '\0';
    return QD_OK;
}

static qd_status read_metaspace(qd_loader *load, const char *replacement, const char *scheme, const char *old, const char *split)
{
    qd_json_text text;
    qd_stage *stage = NULL;
    QD_TRY(qd_tokenizer_add_stage(load->tokenizer, load->reader.name, QD_STAGE_METASPACE, &stage));
    QD_TRY(read_mark(load, replacement, "pre_tokenizer: replacement", stage->mark));
    stage->split = true;
    stage->prepend = QD_PREPEND_ALWAYS;
    if (split)
        QD_TRY(qd_load_boolean(load, split, "pre_tokenizer: split", &stage->split));
    if (scheme) {
        QD_TRY(qd_load_string(load, scheme, "pre_tokenizer: prepend_scheme", &text));
        if (qd_json_text_is(text, "first"))
            stage->prepend = QD_PREPEND_FIRST;
        else if (qd_json_text_is(text, "never"))
            stage->prepend = QD_PREPEND_NEVER;
        else if (!qd_json_text_is(text, "always"))
            return QD_LOAD_FAIL("pre_tokenizer: prepend_scheme '%.*s' is not known; it must be always, first or never",
                                (int)text.length, text.data);
    } else if (old) { /* before prepend_scheme there was a boolean */
        bool prefix;
        QD_TRY(qd_load_boolean(load, old, "pre_tokenizer: add_prefix_space", &prefix));
        stage->prepend = prefix ? QD_PREPEND_ALWAYS : QD_PREPEND_NEVER;
    }
    return QD_OK;
}

static qd_status add_characters(qd_loader *load, unsigned classes, unsigned properties, qd_behavior behavior, qd_stage **stage)
{
    QD_TRY(qd_tokenizer_add_stage(load->tokenizer, load->reader.name, QD_STAGE_CHARACTERS, stage));
    (*stage)->classes = classes;
    (*stage)->properties = properties;
    (*stage)->behavior = behavior;
    return QD_OK;
}

qd_status qd_load_pre_tokenizer(qd_loader *load, const char *at, int depth)
{
    enum { TYPE, LIST, PREFIX, USE_REGEX, PATTERN, BEHAVIOR, INVERT, REPLACEMENT, SCHEME, SPLIT, DIGITS, DELIMITER, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"pretokenizers", NULL}, {"add_prefix_space", NULL}, {"use_regex", NULL},
                                   {"pattern", NULL}, {"behavior", NULL}, {"invert", NULL}, {"replacement", NULL},
                                   {"prepend_scheme", NULL}, {"split", NULL}, {"individual_digits", NULL}, {"delimiter", NULL}};
    qd_json_text type;
    qd_stage *stage = NULL;
    qd_behavior behavior = QD_ISOLATED;
    bool single;
    load->reader.at = at;
    QD_TRY(qd_json_reader_members(&load->reader, "pre_tokenizer", places, COUNT));
    QD_TRY(qd_load_string(load, places[TYPE].at, "pre_tokenizer.type", &type));
    if (qd_json_text_is(type, "Sequence") && depth < DEEPEST)
        return qd_load_list(load, places[LIST].at, "pre_tokenizer.pretokenizers", depth + 1, qd_load_pre_tokenizer);
    if (qd_json_text_is(type, "ByteLevel"))
        return read_byte_level(load, places[PREFIX].at, places[USE_REGEX].at);
    if (qd_json_text_is(type, "Split"))
        return read_split(load, places[PATTERN].at, places[BEHAVIOR].at, places[INVERT].at);
    if (qd_json_text_is(type, "Metaspace"))
        return read_metaspace(load, places[REPLACEMENT].at, places[SCHEME].at, places[PREFIX].at, places[SPLIT].at);
    if (qd_json_text_is(type, "Whitespace"))
        return qd_tokenizer_add_stage(load->tokenizer, load->reader.name, QD_STAGE_WORDS, &stage);
    if (qd_json_text_is(type, "WhitespaceSplit"))
        return add_characters(load, QD_SPACE, 0, QD_REMOVED, &stage);
    if (qd_json_text_is(type, "BertPreTokenizer")) {
        QD_TRY(add_characters(load, QD_SPACE, 0, QD_REMOVED, &stage));
        return add_characters(load, 0, QD_PUNCTUATION, QD_ISOLATED, &stage);
    }
    if (qd_json_text_is(type, "Digits")) {
        QD_TRY(qd_load_boolean(load, places[DIGITS].at, "pre_tokenizer: individual_digits", &single));
        return add_characters(load, 0, QD_NUMERIC, single ? QD_ISOLATED : QD_CONTIGUOUS, &stage);
    }
    if (qd_json_text_is(type, "Punctuation")) {
        if (places[BEHAVIOR].at)
            QD_TRY(read_behavior(load, places[BEHAVIOR].at, &behavior));
        return add_characters(load, 0, QD_PUNCTUATION, behavior, &stage);
    }
    if (qd_json_text_is(type, "CharDelimiterSplit")) {
        QD_TRY(add_characters(load, 0, 0, QD_REMOVED, &stage));
        return read_mark(load, places[DELIMITER].at, "pre_tokenizer: delimiter", stage->mark);
    }
    return QD_LOAD_FAIL("pre_tokenizer.type '%.*s' is not supported; ByteLevel, Split, Metaspace, Whitespace, WhitespaceSplit, "
                        "BertPreTokenizer, Digits, Punctuation, CharDelimiterSplit and Sequence are", (int)type.length, type.data);
}
