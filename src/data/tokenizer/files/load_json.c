/* Loads tokenizer.json, the format of the Hugging Face package `tokenizers`: the document and its
 * added tokens; the other sections have files of their own. */
#include "data/tokenizer/files/load_impl.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool qd_load_is_null(qd_loader *load, const char *at)
{
    if (!at)
        return true;
    load->reader.at = at;
    return qd_json_reader_kind(&load->reader) == 'n';
}

static qd_status must_be_null(qd_loader *load, const char *at, const char *what)
{
    return qd_load_is_null(load, at) ? QD_OK : QD_LOAD_FAIL("%s is not supported; it must be null", what);
}

qd_status qd_load_boolean(qd_loader *load, const char *at, const char *what, bool *value)
{
    *value = false;
    return qd_load_is_null(load, at) ? QD_OK : qd_json_reader_boolean(&load->reader, what, value);
}

qd_status qd_load_string(qd_loader *load, const char *at, const char *what, qd_json_text *text)
{
    if (!at)
        return QD_LOAD_FAIL("%s is missing", what);
    load->reader.at = at;
    return qd_json_reader_string(&load->reader, what, text);
}

qd_status qd_load_copy(qd_loader *load, const char *at, const char *what, char **text, size_t *length)
{
    qd_json_text read;
    QD_TRY(qd_load_string(load, at, what, &read));
    if (memchr(read.data, 0, read.length))
        return QD_LOAD_FAIL("%s contains a NUL character", what);
    free(*text);
    *text = strndup(read.data, read.length);
    *length = read.length;
    return *text ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", load->reader.name);
}

qd_status qd_load_pattern(qd_loader *load, const char *at, const char *what, char **text, size_t *length, qd_regex **regex)
{
    enum { REGEX, STRING, COUNT };
    qd_json_place places[COUNT] = {{"Regex", NULL}, {"String", NULL}};
    char where[512];
    if (!at)
        return QD_LOAD_FAIL("%s has no pattern", what);
    load->reader.at = at;
    QD_TRY(qd_json_reader_members(&load->reader, what, places, COUNT));
    if (!places[REGEX].at == !places[STRING].at)
        return QD_LOAD_FAIL("%s: pattern must contain either Regex or String", what);
    QD_TRY(qd_load_copy(load, places[REGEX].at ? places[REGEX].at : places[STRING].at, what, text, length));
    if (!places[REGEX].at)
        return QD_OK;
    snprintf(where, sizeof where, "%s: %s", load->reader.name, what);
    return qd_regex_create(where, *text, *length, regex);
}

qd_status qd_load_list(qd_loader *load, const char *at, const char *what, int depth, qd_load_item read)
{
    bool first = true, more;
    if (!at)
        return QD_LOAD_FAIL("%s is missing", what);
    load->reader.at = at;
    QD_TRY(qd_json_reader_enter(&load->reader, '[', what));
    for (;;) {
        QD_TRY(qd_json_reader_next(&load->reader, &first, NULL, &more));
        if (!more)
            return QD_OK;
        qd_json_reader_kind(&load->reader);
        const char *item = load->reader.at;
        QD_TRY(qd_json_reader_skip(&load->reader));
        const char *behind = load->reader.at;
        QD_TRY(read(load, item, depth));
        load->reader.at = behind;
    }
}

/* The id that `tokenizers` assigns: the one in the vocabulary, otherwise the next free id after the
 * vocabulary. */
static qd_status place_added(qd_loader *load, size_t index, qd_json_text content, int64_t id, uint32_t *next)
{
    qd_vocab *vocab = &load->tokenizer->vocab;
    uint32_t old = QD_NO_TOKEN;
    const void *bytes = NULL;
    size_t length = 0;
    if (content.length <= load->longest &&
        qd_load_token(load, content, 0, &bytes, &length) == QD_TOKEN_BYTES) {
        old = qd_vocab_find(vocab, bytes, length, QD_TOKEN_BYTES);
        if (old != QD_NO_TOKEN && (length != content.length || memcmp(bytes, content.data, length) != 0))
            return QD_LOAD_FAIL("added_tokens[%zu].content is in model.vocab for other bytes; rename it", index);
    }
    if (old == QD_NO_TOKEN)
        old = qd_vocab_find(vocab, content.data, content.length, QD_TOKEN_LITERAL);
    uint32_t expected = old == QD_NO_TOKEN ? *next : old;
    if (id != expected)
        return QD_LOAD_FAIL("added_tokens[%zu].id is %lld, but by its position in %s it must be %u", index, (long long)id,
                    old == QD_NO_TOKEN ? "the list" : "model.vocab", expected);
    if (old != QD_NO_TOKEN)
        return QD_OK;
    QD_TRY(qd_vocab_add(vocab, expected, content.data, content.length, QD_TOKEN_LITERAL, &old));
    (*next)++;
    return old == QD_NO_TOKEN ? QD_OK : QD_LOAD_FAIL("added_tokens[%zu].id %u is taken by another token", index, expected);
}

static qd_status read_added_token(qd_loader *load, size_t index, uint32_t *next, qd_added *added)
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
            return QD_LOAD_FAIL("added_tokens[%zu].%s is missing", index, places[i].key);
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
        return QD_LOAD_FAIL("added_tokens[%zu].content is empty or contains a NUL character", index);
    QD_TRY(place_added(load, index, content, id, next));
    added->id = (uint32_t)id;
    reader->at = behind;
    return QD_OK;
}

static qd_status read_added(qd_loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    if (qd_load_is_null(load, at))
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

static qd_status read_document(qd_loader *load)
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
        QD_TRY(qd_load_string(load, places[VERSION].at, "version", &version));
        if (!qd_json_text_is(version, "1.0"))
            return QD_LOAD_FAIL("version '%.*s' is not known; it must be 1.0", (int)version.length, version.data);
    }
    QD_TRY(must_be_null(load, places[TRUNCATION].at, "truncation"));
    QD_TRY(must_be_null(load, places[PADDING].at, "padding"));
    if (!qd_load_is_null(load, places[NORMALIZER].at))
        QD_TRY(qd_load_normalizer(load, places[NORMALIZER].at, 0));
    if (!qd_load_is_null(load, places[PRE].at))
        QD_TRY(qd_load_pre_tokenizer(load, places[PRE].at, 0));
    if (qd_load_is_null(load, places[DECODER].at))
        load->tokenizer->decoder.joined = true;
    else
        QD_TRY(qd_load_decoder(load, places[DECODER].at, 0));
    QD_TRY(qd_load_model(load, places[MODEL].at));
    QD_TRY(read_added(load, places[ADDED].at));
    return qd_load_is_null(load, places[POST].at) ? QD_OK : qd_load_post_processor(load, places[POST].at, 0);
}

/* What the writer of tokenizer.json does not express is saved as it was read. */
static qd_status keep_source(qd_tokenizer *tokenizer, const char *text, size_t length)
{
    bool plain = tokenizer->model == QD_MODEL_BYTES && tokenizer->normalizer.count == 0;
    for (int i = 0; i < tokenizer->stage_count; i++)
        plain = plain && tokenizer->stages[i].kind <= QD_STAGE_PREFIX && tokenizer->stages[i].behavior <= QD_REMOVED;
    if (plain)
        return QD_OK;
    tokenizer->source = malloc(length + 1);
    if (!tokenizer->source)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", tokenizer->name);
    memcpy(tokenizer->source, text, length);
    tokenizer->source_length = length;
    return QD_OK;
}

qd_status qd_tokenizer_read_json(qd_tokenizer *tokenizer, const char *text, size_t length)
{
    qd_loader load = {.tokenizer = tokenizer};
    qd_status status = qd_json_reader_open(tokenizer->name, text, length, &load.reader);
    if (status == QD_OK)
        status = read_document(&load);
    if (status == QD_OK)
        status = keep_source(tokenizer, text, length);
    qd_json_reader_close(&load.reader);
    free(load.bytes);
    return status;
}
