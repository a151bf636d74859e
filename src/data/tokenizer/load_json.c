/* Loads tokenizer.json, the format of the Hugging Face package `tokenizers`. */
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/json_reader.h"
#include "data/tokenizer/tokenizer_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct loader {
    qd_json_reader reader;
    qd_tokenizer *tokenizer;
    uint8_t *bytes;   /* buffer for two tokens */
    size_t longest;
    bool byte_level;  /* the ByteLevel step has been read */
} loader;

#define FAIL(...) qd_json_reader_fail(&load->reader, __VA_ARGS__)

static bool is_null(loader *load, const char *at)
{
    if (!at)
        return true;
    load->reader.at = at;
    return qd_json_reader_kind(&load->reader) == 'n';
}

static qd_status must_be_null(loader *load, const char *at, const char *what)
{
    return is_null(load, at) ? QD_OK : FAIL("%s is not supported; it must be null", what);
}

/* False if the member is missing or null. */
static qd_status optional_boolean(loader *load, const char *at, const char *what, bool *value)
{
    *value = false;
    return is_null(load, at) ? QD_OK : qd_json_reader_boolean(&load->reader, what, value);
}

static qd_status read_type(loader *load, const char *at, const char *what, qd_json_text *type)
{
    if (!at)
        return FAIL("%s is missing", what);
    load->reader.at = at;
    return qd_json_reader_string(&load->reader, what, type);
}

/* Converts a text of the file to the form the vocabulary stores. The result is written to
 * load->bytes from `offset` on. */
static qd_token_kind token_of(loader *load, qd_json_text text, size_t offset, const void **bytes, size_t *length)
{
    if (qd_byte_level_read(text.data, text.length, load->bytes + offset, length)) {
        *bytes = load->bytes + offset;
        return QD_TOKEN_BYTES;
    }
    *bytes = text.data;
    *length = text.length;
    return QD_TOKEN_LITERAL;
}

static uint32_t find_token(loader *load, qd_json_text text)
{
    const void *bytes;
    size_t length;
    if (text.length > load->longest)
        return QD_NO_TOKEN;
    qd_token_kind kind = token_of(load, text, 0, &bytes, &length);
    return qd_vocab_find(&load->tokenizer->vocab, bytes, length, kind);
}

static qd_status measure_vocab(loader *load, const char *at, uint32_t *count, uint32_t *size, size_t *bytes)
{
    qd_json_reader *reader = &load->reader;
    bool first = true, more;
    uint64_t entries = 0, highest = 0;
    const char *highest_at = at;
    reader->at = at;
    *bytes = 0;
    QD_TRY(qd_json_reader_enter(reader, '{', "model.vocab"));
    for (;;) {
        qd_json_text key;
        int64_t id;
        QD_TRY(qd_json_reader_next(reader, &first, &key, &more));
        if (!more)
            break;
        if (memchr(key.data, 0, key.length))
            return FAIL("model.vocab: a token contains a NUL character");
        *bytes += key.length;
        if (key.length > load->longest)
            load->longest = key.length;
        QD_TRY(qd_json_reader_integer(reader, "an id of model.vocab", 0, INT32_MAX - 1, &id));
        if ((uint64_t)id > highest) {
            highest = (uint64_t)id;
            highest_at = reader->at;
        }
        entries++;
    }
    reader->at = highest_at;
    if (entries == 0)
        return FAIL("model.vocab is empty");
    if (highest > 2 * entries + QD_MOST_HOLES)
        return FAIL("model.vocab: id %llu is too high for %llu tokens", (unsigned long long)highest,
                    (unsigned long long)entries);
    *count = (uint32_t)entries;
    *size = (uint32_t)highest + 1;
    return QD_OK;
}

static qd_status read_vocab(loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_vocab *vocab = &load->tokenizer->vocab;
    uint32_t count = 0, size = 0;
    size_t total;
    QD_TRY(measure_vocab(load, at, &count, &size, &total));
    QD_TRY(qd_vocab_reserve(vocab, size, count, total));
    load->bytes = malloc(2 * load->longest + 1);
    if (!load->bytes)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", reader->name);
    bool first = true, more;
    reader->at = at;
    QD_TRY(qd_json_reader_enter(reader, '{', "model.vocab"));
    for (;;) {
        qd_json_text key;
        const void *bytes;
        size_t length;
        int64_t id;
        uint32_t old;
        QD_TRY(qd_json_reader_next(reader, &first, &key, &more));
        if (!more)
            return QD_OK;
        qd_token_kind kind = token_of(load, key, 0, &bytes, &length);
        QD_TRY(qd_json_reader_integer(reader, "an id of model.vocab", 0, INT32_MAX - 1, &id));
        QD_TRY(qd_vocab_add(vocab, (uint32_t)id, bytes, length, kind, &old));
        if (old == (uint32_t)id)
            return FAIL("model.vocab: two tokens have the id %u", old);
        if (old != QD_NO_TOKEN)
            return FAIL("model.vocab: a token appears twice, with the ids %u and %lld", old, (long long)id);
    }
}

/* One merge: "left right" or ["left", "right"]. *left stays QD_NO_TOKEN for a comment line. */
static qd_status read_merge(loader *load, size_t index, uint32_t *left, uint32_t *right)
{
    qd_json_reader *reader = &load->reader;
    qd_json_text text;
    *left = QD_NO_TOKEN;
    if (qd_json_reader_kind(reader) == '"') {
        QD_TRY(qd_json_reader_string(reader, "a merge", &text));
        if (text.length >= 8 && memcmp(text.data, "#version", 8) == 0)
            return QD_OK;
        const char *space = memchr(text.data, ' ', text.length);
        size_t length = space ? (size_t)(space - text.data) : 0;
        if (!space || memchr(space + 1, ' ', text.length - length - 1))
            return FAIL("model.merges[%zu] must be two tokens separated by one space", index);
        *left = find_token(load, (qd_json_text){text.data, length});
        *right = find_token(load, (qd_json_text){space + 1, text.length - length - 1});
    } else {
        bool first = true, more;
        QD_TRY(qd_json_reader_enter(reader, '[', "a merge"));
        uint32_t *sides[2] = {left, right};
        for (int i = 0; i < 2; i++) {
            QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
            if (!more)
                return FAIL("model.merges[%zu] must be a list of two tokens", index);
            QD_TRY(qd_json_reader_string(reader, "a token of a merge", &text));
            *sides[i] = find_token(load, text);
        }
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (more)
            return FAIL("model.merges[%zu] must be a list of two tokens", index);
    }
    if (*left == QD_NO_TOKEN || *right == QD_NO_TOKEN)
        return FAIL("model.merges[%zu]: the %s token is not in model.vocab", index, *left == QD_NO_TOKEN ? "left" : "right");
    return QD_OK;
}

static qd_status read_merges(loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_vocab *vocab = &load->tokenizer->vocab;
    bool more;
    uint32_t rank = 0;
    size_t count = 0;
    for (int pass = 0; pass < 2; pass++) { /* first count, then read */
        bool first = true;
        size_t index = 0;
        reader->at = at;
        QD_TRY(qd_json_reader_enter(reader, '[', "model.merges"));
        for (;; index++) {
            QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
            if (!more)
                break;
            if (pass == 0) {
                QD_TRY(qd_json_reader_skip(reader));
                continue;
            }
            uint32_t left, right;
            QD_TRY(read_merge(load, index, &left, &right));
            if (left == QD_NO_TOKEN)
                continue;
            if (qd_vocab_kind(vocab, left) != QD_TOKEN_BYTES || qd_vocab_kind(vocab, right) != QD_TOKEN_BYTES)
                return FAIL("model.merges[%zu]: a token is not in the ByteLevel alphabet", index);
            size_t left_length, right_length;
            const uint8_t *left_bytes = qd_vocab_bytes(vocab, left, &left_length);
            const uint8_t *right_bytes = qd_vocab_bytes(vocab, right, &right_length);
            memcpy(load->bytes, left_bytes, left_length);
            memcpy(load->bytes + left_length, right_bytes, right_length);
            uint32_t id = qd_vocab_find(vocab, load->bytes, left_length + right_length, QD_TOKEN_BYTES);
            if (id == QD_NO_TOKEN)
                return FAIL("model.merges[%zu]: the merged token is not in model.vocab", index);
            qd_vocab_add_merge(vocab, left, right, rank++, id);
        }
        count = index;
        if (pass == 0) {
            if (count >= INT32_MAX)
                return FAIL("model.merges has too many entries");
            QD_TRY(qd_vocab_reserve_merges(vocab, (uint32_t)count));
        }
    }
    return QD_OK;
}

static qd_status read_model(loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { TYPE, DROPOUT, UNKNOWN, PREFIX, SUFFIX, FUSE, FALLBACK, IGNORE, VOCAB, MERGES, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"dropout", NULL}, {"unk_token", NULL}, {"continuing_subword_prefix", NULL},
                                   {"end_of_word_suffix", NULL}, {"fuse_unk", NULL}, {"byte_fallback", NULL},
                                   {"ignore_merges", NULL}, {"vocab", NULL}, {"merges", NULL}};
    qd_json_text text;
    bool fallback;
    if (!at)
        return FAIL("model is missing");
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "model", places, COUNT));
    if (places[TYPE].at) {
        QD_TRY(read_type(load, places[TYPE].at, "model.type", &text));
        if (!qd_json_text_is(text, "BPE"))
            return FAIL("model.type '%.*s' is not supported; it must be BPE", (int)text.length, text.data);
    }
    if (!is_null(load, places[DROPOUT].at)) {
        /* In a number that is 0, all digits before the exponent are 0. */
        const char *number = reader->at, *digits = number + strspn(number, "-0.");
        if (qd_json_reader_kind(reader) != '0' || strchr("123456789", *digits))
            return FAIL("model.dropout is not supported; it must be null or 0");
    }
    for (int i = PREFIX; i <= SUFFIX; i++)
        if (!is_null(load, places[i].at)) {
            QD_TRY(qd_json_reader_string(reader, places[i].key, &text));
            if (text.length)
                return FAIL("model.%s is not supported; it must be null or empty", places[i].key);
        }
    QD_TRY(optional_boolean(load, places[FALLBACK].at, "model.byte_fallback", &fallback));
    if (fallback)
        return FAIL("model.byte_fallback is not supported; it must be false");
    QD_TRY(optional_boolean(load, places[FUSE].at, "model.fuse_unk", &tokenizer->fuse_unknown));
    QD_TRY(optional_boolean(load, places[IGNORE].at, "model.ignore_merges", &tokenizer->whole_words));
    if (!places[VOCAB].at || !places[MERGES].at)
        return FAIL("model.%s is missing", places[VOCAB].at ? "merges" : "vocab");
    QD_TRY(read_vocab(load, places[VOCAB].at));
    QD_TRY(read_merges(load, places[MERGES].at));
    if (!is_null(load, places[UNKNOWN].at)) {
        QD_TRY(qd_json_reader_string(reader, "model.unk_token", &text));
        tokenizer->unknown = find_token(load, text);
        if (tokenizer->unknown == QD_NO_TOKEN)
            return FAIL("model.unk_token is not in model.vocab");
    }
    return QD_OK;
}

/* The id that `tokenizers` assigns: the one in the vocabulary, otherwise the next free id after the
 * vocabulary. */
static qd_status place_added(loader *load, size_t index, qd_json_text content, int64_t id, uint32_t *next)
{
    qd_vocab *vocab = &load->tokenizer->vocab;
    uint32_t old = QD_NO_TOKEN;
    const void *bytes = NULL;
    size_t length = 0;
    if (content.length <= load->longest &&
        token_of(load, content, 0, &bytes, &length) == QD_TOKEN_BYTES) {
        old = qd_vocab_find(vocab, bytes, length, QD_TOKEN_BYTES);
        if (old != QD_NO_TOKEN && (length != content.length || memcmp(bytes, content.data, length) != 0))
            return FAIL("added_tokens[%zu].content is in model.vocab for other bytes; rename it", index);
    }
    if (old == QD_NO_TOKEN)
        old = qd_vocab_find(vocab, content.data, content.length, QD_TOKEN_LITERAL);
    uint32_t expected = old == QD_NO_TOKEN ? *next : old;
    if (id != expected)
        return FAIL("added_tokens[%zu].id is %lld, but by its position in %s it must be %u", index, (long long)id,
                    old == QD_NO_TOKEN ? "the list" : "model.vocab", expected);
    if (old != QD_NO_TOKEN)
        return QD_OK;
    QD_TRY(qd_vocab_add(vocab, expected, content.data, content.length, QD_TOKEN_LITERAL, &old));
    (*next)++;
    return old == QD_NO_TOKEN ? QD_OK : FAIL("added_tokens[%zu].id %u is taken by another token", index, expected);
}

static qd_status read_added_token(loader *load, size_t index, uint32_t *next, qd_added *added)
{
    qd_json_reader *reader = &load->reader;
    enum { ID, CONTENT, SINGLE, LEFT, RIGHT, NORMALIZED, SPECIAL, COUNT };
    qd_json_place places[COUNT] = {{"id", NULL}, {"content", NULL}, {"single_word", NULL}, {"lstrip", NULL},
                                   {"rstrip", NULL}, {"normalized", NULL}, {"special", NULL}};
    int64_t id;
    qd_json_text content;
    QD_TRY(qd_json_reader_members(reader, "an entry of added_tokens", places, COUNT));
    const char *behind = reader->at;
    for (int i = 0; i < COUNT; i++)
        if (!places[i].at)
            return FAIL("added_tokens[%zu].%s is missing", index, places[i].key);
    bool *flags[COUNT] = {[SINGLE] = &added->single_word, [LEFT] = &added->left_strip, [RIGHT] = &added->right_strip,
                          [NORMALIZED] = &added->normalized, [SPECIAL] = &added->special};
    for (int i = SINGLE; i < COUNT; i++) {
        reader->at = places[i].at;
        QD_TRY(qd_json_reader_boolean(reader, places[i].key, flags[i]));
    }
    reader->at = places[ID].at;
    QD_TRY(qd_json_reader_integer(reader, "the id of an added token", 0, INT32_MAX - 1, &id));
    reader->at = places[CONTENT].at;
    QD_TRY(qd_json_reader_string(reader, "the content of an added token", &content));
    if (content.length == 0 || memchr(content.data, 0, content.length))
        return FAIL("added_tokens[%zu].content is empty or contains a NUL character", index);
    QD_TRY(place_added(load, index, content, id, next));
    added->id = (uint32_t)id;
    reader->at = behind;
    return QD_OK;
}

static qd_status read_added(loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    if (is_null(load, at))
        return QD_OK;
    size_t capacity = 0;
    uint32_t next = tokenizer->vocab.entries;
    bool first = true, more;
    QD_TRY(qd_json_reader_enter(reader, '[', "added_tokens"));
    for (size_t index = 0;; index++) {
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (!more)
            return QD_OK;
        if (index == capacity) {
            capacity = capacity ? capacity * 2 : 16;
            qd_added *larger = realloc(tokenizer->added, capacity * sizeof *larger);
            if (!larger)
                return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", reader->name);
            tokenizer->added = larger;
        }
        tokenizer->added[index] = (qd_added){0};
        QD_TRY(read_added_token(load, index, &next, &tokenizer->added[index]));
        tokenizer->added_count++;
    }
}

static qd_status read_byte_level(loader *load, const qd_json_place *prefix, const qd_json_place *use_regex)
{
    qd_tokenizer *tokenizer = load->tokenizer;
    bool add_prefix, split = true;
    if (!prefix->at)
        return FAIL("pre_tokenizer: ByteLevel has no add_prefix_space");
    QD_TRY(optional_boolean(load, prefix->at, "add_prefix_space", &add_prefix));
    if (use_regex->at)
        QD_TRY(optional_boolean(load, use_regex->at, "use_regex", &split));
    if (add_prefix && tokenizer->stage_count < QD_MOST_STAGES)
        tokenizer->stages[tokenizer->stage_count++] = (qd_stage){.kind = QD_STAGE_PREFIX};
    if (split) {
        const char *regex = qd_pattern_regex(QD_PATTERN_GPT2);
        QD_TRY(qd_tokenizer_add_split(tokenizer, "pre_tokenizer", regex, strlen(regex)));
        tokenizer->stages[tokenizer->stage_count - 1].byte_level = true;
    }
    load->byte_level = true;
    return QD_OK;
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

static qd_status read_split(loader *load, const char *pattern, const char *behavior, const char *invert_at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { REGEX, STRING, COUNT };
    qd_json_place places[COUNT] = {{"Regex", NULL}, {"String", NULL}};
    qd_json_text text;
    bool invert;
    if (!pattern || !behavior)
        return FAIL("pre_tokenizer: Split has no %s", pattern ? "behavior" : "pattern");
    QD_TRY(optional_boolean(load, invert_at, "invert", &invert));
    reader->at = behavior;
    QD_TRY(qd_json_reader_string(reader, "behavior", &text));
    bool removed = qd_json_text_is(text, "Removed");
    if (!removed && !qd_json_text_is(text, "Isolated"))
        return FAIL("pre_tokenizer: behavior '%.*s' is not supported; it must be Isolated or Removed", (int)text.length,
                    text.data);
    reader->at = pattern;
    QD_TRY(qd_json_reader_members(reader, "pattern", places, COUNT));
    if (!places[REGEX].at == !places[STRING].at)
        return FAIL("pre_tokenizer: pattern must contain either Regex or String");
    reader->at = places[REGEX].at ? places[REGEX].at : places[STRING].at;
    QD_TRY(qd_json_reader_string(reader, "pattern", &text));
    if (memchr(text.data, 0, text.length))
        return FAIL("pre_tokenizer: pattern contains a NUL character");
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
    stage->keep_matches = !removed || invert;
    stage->keep_gaps = !removed || !invert;
    return QD_OK;
}

static qd_status read_pre_tokenizer(loader *load, const char *at, int depth)
{
    qd_json_reader *reader = &load->reader;
    enum { TYPE, LIST, PREFIX, USE_REGEX, PATTERN, BEHAVIOR, INVERT, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"pretokenizers", NULL}, {"add_prefix_space", NULL}, {"use_regex", NULL},
                                   {"pattern", NULL}, {"behavior", NULL}, {"invert", NULL}};
    qd_json_text type;
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "pre_tokenizer", places, COUNT));
    const char *behind = reader->at;
    QD_TRY(read_type(load, places[TYPE].at, "pre_tokenizer.type", &type));
    if (load->byte_level)
        return FAIL("pre_tokenizer: nothing may follow ByteLevel");
    if (qd_json_text_is(type, "ByteLevel")) {
        QD_TRY(read_byte_level(load, &places[PREFIX], &places[USE_REGEX]));
    } else if (qd_json_text_is(type, "Split")) {
        QD_TRY(read_split(load, places[PATTERN].at, places[BEHAVIOR].at, places[INVERT].at));
    } else if (qd_json_text_is(type, "Sequence") && depth == 0 && places[LIST].at) {
        bool first = true, more;
        reader->at = places[LIST].at;
        QD_TRY(qd_json_reader_enter(reader, '[', "pre_tokenizer.pretokenizers"));
        for (;;) {
            QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
            if (!more)
                break;
            QD_TRY(read_pre_tokenizer(load, reader->at, depth + 1));
        }
    } else {
        return FAIL("pre_tokenizer.type '%.*s' is not supported%s; Split and ByteLevel are", (int)type.length, type.data,
                    depth ? " inside a Sequence" : "");
    }
    reader->at = behind;
    return QD_OK;
}

/* The ids of a special token in a template. */
static qd_status read_template_ids(loader *load, const char *specials, const char *name_at, uint32_t *ids, int *count)
{
    qd_json_reader *reader = &load->reader;
    bool first = true, more;
    char name[256];
    qd_json_text text;
    reader->at = name_at;
    QD_TRY(qd_json_reader_string(reader, "the id of a SpecialToken", &text));
    if (text.length >= sizeof name)
        return FAIL("post_processor: the name of a special token is longer than %zu bytes", sizeof name - 1);
    memcpy(name, text.data, text.length);
    name[text.length] = '\0';
    enum { IDS, COUNT };
    qd_json_place token = {name, NULL}, places[COUNT] = {{"ids", NULL}};
    if (!specials)
        return FAIL("post_processor.special_tokens is missing");
    reader->at = specials;
    QD_TRY(qd_json_reader_members(reader, "post_processor.special_tokens", &token, 1));
    if (!token.at)
        return FAIL("post_processor.special_tokens has no '%s'", name);
    reader->at = token.at;
    QD_TRY(qd_json_reader_members(reader, "an entry of special_tokens", places, COUNT));
    if (!places[IDS].at)
        return FAIL("post_processor.special_tokens: '%s' has no ids", name);
    reader->at = places[IDS].at;
    QD_TRY(qd_json_reader_enter(reader, '[', "ids"));
    for (;;) {
        int64_t id;
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (!more)
            return QD_OK;
        if (*count == QD_MOST_FRAME)
            return FAIL("post_processor: more than %d tokens on one side are not supported", QD_MOST_FRAME);
        QD_TRY(qd_json_reader_integer(reader, "ids", 0, (int64_t)load->tokenizer->vocab.size - 1, &id));
        if (qd_vocab_kind(&load->tokenizer->vocab, (uint32_t)id) == QD_TOKEN_NONE)
            return FAIL("post_processor: id %lld is not a token", (long long)id);
        ids[(*count)++] = (uint32_t)id;
    }
}

static qd_status read_template(loader *load, const char *single, const char *specials)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    bool first = true, more, text_seen = false;
    if (!single)
        return FAIL("post_processor.single is missing");
    if (tokenizer->before_count || tokenizer->after_count)
        return FAIL("post_processor: two templates are not supported");
    reader->at = single;
    QD_TRY(qd_json_reader_enter(reader, '[', "post_processor.single"));
    for (;;) {
        enum { TOKEN, SEQUENCE, COUNT };
        qd_json_place places[COUNT] = {{"SpecialToken", NULL}, {"Sequence", NULL}}, id = {"id", NULL};
        qd_json_text text;
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (!more)
            break;
        QD_TRY(qd_json_reader_members(reader, "an entry of post_processor.single", places, COUNT));
        const char *behind = reader->at;
        reader->at = places[TOKEN].at ? places[TOKEN].at : places[SEQUENCE].at ? places[SEQUENCE].at : behind;
        if (reader->at == behind)
            return FAIL("post_processor.single: an entry must be a SpecialToken or a Sequence");
        QD_TRY(qd_json_reader_members(reader, "an entry of post_processor.single", &id, 1));
        if (!id.at)
            return FAIL("post_processor.single: an entry has no id");
        if (places[TOKEN].at) {
            QD_TRY(read_template_ids(load, specials, id.at, text_seen ? tokenizer->after : tokenizer->before,
                                     text_seen ? &tokenizer->after_count : &tokenizer->before_count));
        } else {
            reader->at = id.at;
            QD_TRY(qd_json_reader_string(reader, "the id of a Sequence", &text));
            if (text_seen || !qd_json_text_is(text, "A"))
                return FAIL("post_processor.single must contain the sequence A once");
            text_seen = true;
        }
        reader->at = behind;
    }
    return text_seen ? QD_OK : FAIL("post_processor.single must contain the sequence A once");
}

static qd_status read_post_processor(loader *load, const char *at, int depth)
{
    qd_json_reader *reader = &load->reader;
    enum { TYPE, LIST, SINGLE, SPECIALS, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"processors", NULL}, {"single", NULL}, {"special_tokens", NULL}};
    qd_json_text type;
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "post_processor", places, COUNT));
    const char *behind = reader->at;
    QD_TRY(read_type(load, places[TYPE].at, "post_processor.type", &type));
    if (qd_json_text_is(type, "TemplateProcessing")) {
        QD_TRY(read_template(load, places[SINGLE].at, places[SPECIALS].at));
    } else if (qd_json_text_is(type, "Sequence") && depth == 0 && places[LIST].at) {
        bool first = true, more;
        reader->at = places[LIST].at;
        QD_TRY(qd_json_reader_enter(reader, '[', "post_processor.processors"));
        for (;;) {
            QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
            if (!more)
                break;
            QD_TRY(read_post_processor(load, reader->at, depth + 1));
        }
    } else if (!qd_json_text_is(type, "ByteLevel")) { /* ByteLevel changes offsets only */
        return FAIL("post_processor.type '%.*s' is not supported; TemplateProcessing and ByteLevel are", (int)type.length,
                    type.data);
    }
    reader->at = behind;
    return QD_OK;
}

static qd_status read_decoder(loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_json_place type = {"type", NULL};
    qd_json_text text;
    if (is_null(load, at))
        return FAIL("decoder must be ByteLevel");
    QD_TRY(qd_json_reader_members(reader, "decoder", &type, 1));
    QD_TRY(read_type(load, type.at, "decoder.type", &text));
    if (!qd_json_text_is(text, "ByteLevel"))
        return FAIL("decoder.type '%.*s' is not supported; it must be ByteLevel", (int)text.length, text.data);
    return QD_OK;
}

static qd_status read_document(loader *load)
{
    qd_json_reader *reader = &load->reader;
    enum { VERSION, TRUNCATION, PADDING, ADDED, NORMALIZER, PRE, POST, DECODER, MODEL, COUNT };
    qd_json_place places[COUNT] = {{"version", NULL}, {"truncation", NULL}, {"padding", NULL}, {"added_tokens", NULL},
                                   {"normalizer", NULL}, {"pre_tokenizer", NULL}, {"post_processor", NULL},
                                   {"decoder", NULL}, {"model", NULL}};
    qd_json_text version;
    QD_TRY(qd_json_reader_members(reader, "a tokenizer.json", places, COUNT));
    QD_TRY(qd_json_reader_finish(reader));
    if (places[VERSION].at) {
        QD_TRY(read_type(load, places[VERSION].at, "version", &version));
        if (!qd_json_text_is(version, "1.0"))
            return FAIL("version '%.*s' is not known; it must be 1.0", (int)version.length, version.data);
    }
    QD_TRY(must_be_null(load, places[TRUNCATION].at, "truncation"));
    QD_TRY(must_be_null(load, places[PADDING].at, "padding"));
    QD_TRY(must_be_null(load, places[NORMALIZER].at, "normalizer"));
    if (is_null(load, places[PRE].at))
        return FAIL("pre_tokenizer must be ByteLevel, or a Sequence that ends with it");
    QD_TRY(read_pre_tokenizer(load, places[PRE].at, 0));
    if (!load->byte_level)
        return FAIL("pre_tokenizer must be ByteLevel, or a Sequence that ends with it");
    QD_TRY(read_decoder(load, places[DECODER].at));
    QD_TRY(read_model(load, places[MODEL].at));
    QD_TRY(read_added(load, places[ADDED].at));
    return is_null(load, places[POST].at) ? QD_OK : read_post_processor(load, places[POST].at, 0);
}

qd_status qd_tokenizer_read_json(qd_tokenizer *tokenizer, const char *text, size_t length)
{
    loader load = {.tokenizer = tokenizer};
    qd_status status = qd_json_reader_open(tokenizer->name, text, length, &load.reader);
    if (status == QD_OK)
        status = read_document(&load);
    qd_json_reader_close(&load.reader);
    free(load.bytes);
    return status;
}
