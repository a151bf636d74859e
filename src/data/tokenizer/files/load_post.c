/* Reads the post-processor of tokenizer.json: the tokens before and after a text. */
#include "data/tokenizer/files/load_impl.h"

#include <string.h>

/* The ids of a special token in a template. */
static qd_status read_template_ids(qd_loader *load, const char *specials, const char *name_at, uint32_t *ids, int *count)
{
    qd_json_reader *reader = &load->reader;
    bool first = true, more;
    char name[256];
    qd_json_text text;
    reader->at = name_at;
    QD_TRY(qd_json_reader_string(reader, "the id of a SpecialToken", &text));
    if (text.length >= sizeof name)
        return QD_LOAD_FAIL("post_processor: the name of a special token is longer than %zu bytes", sizeof name - 1);
    memcpy(name, text.data, text.length);
    name[text.length] = '\0';
    enum { IDS, COUNT };
    qd_json_place token = {name, NULL}, places[COUNT] = {{"ids", NULL}};
    if (!specials)
        return QD_LOAD_FAIL("post_processor.special_tokens is missing");
    reader->at = specials;
    QD_TRY(qd_json_reader_members(reader, "post_processor.special_tokens", &token, 1));
    if (!token.at)
        return QD_LOAD_FAIL("post_processor.special_tokens has no '%s'", name);
    reader->at = token.at;
    QD_TRY(qd_json_reader_members(reader, "an entry of special_tokens", places, COUNT));
    if (!places[IDS].at)
        return QD_LOAD_FAIL("post_processor.special_tokens: '%s' has no ids", name);
    reader->at = places[IDS].at;
    QD_TRY(qd_json_reader_enter(reader, '[', "ids"));
    for (;;) {
        int64_t id;
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (!more)
            return QD_OK;
        if (*count == QD_MOST_FRAME)
            return QD_LOAD_FAIL("post_processor: more than %d tokens on one side are not supported", QD_MOST_FRAME);
        QD_TRY(qd_json_reader_integer(reader, "ids", 0, (int64_t)load->tokenizer->vocab.size - 1, &id));
        if (qd_vocab_kind(&load->tokenizer->vocab, (uint32_t)id) == QD_TOKEN_NONE)
            return QD_LOAD_FAIL("post_processor: id %lld is not a token", (long long)id);
        ids[(*count)++] = (uint32_t)id;
    }
}

static qd_status read_template(qd_loader *load, const char *single, const char *specials)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    bool first = true, more, text_seen = false;
    if (!single)
        return QD_LOAD_FAIL("post_processor.single is missing");
    if (tokenizer->before_count || tokenizer->after_count)
        return QD_LOAD_FAIL("post_processor: two templates are not supported");
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
            return QD_LOAD_FAIL("post_processor.single: an entry must be a SpecialToken or a Sequence");
        QD_TRY(qd_json_reader_members(reader, "an entry of post_processor.single", &id, 1));
        if (!id.at)
            return QD_LOAD_FAIL("post_processor.single: an entry has no id");
        if (places[TOKEN].at) {
            QD_TRY(read_template_ids(load, specials, id.at, text_seen ? tokenizer->after : tokenizer->before,
                                     text_seen ? &tokenizer->after_count : &tokenizer->before_count));
        } else {
            reader->at = id.at;
            QD_TRY(qd_json_reader_string(reader, "the id of a Sequence", &text));
            if (text_seen || !qd_json_text_is(text, "A"))
                return QD_LOAD_FAIL("post_processor.single must contain the sequence A once");
            text_seen = true;
        }
        reader->at = behind;
    }
    return text_seen ? QD_OK : QD_LOAD_FAIL("post_processor.single must contain the sequence A once");
}

/* BertProcessing and RobertaProcessing: ["[SEP]", 102] behind the text, or in front of it. */
static qd_status read_pair(qd_loader *load, const char *at, const char *what, uint32_t *ids, int *count)
{
    qd_json_reader *reader = &load->reader;
    bool first = true, more;
    qd_json_text text;
    int64_t id = 0;
    if (!at)
        return QD_LOAD_FAIL("post_processor.%s is missing", what);
    reader->at = at;
    QD_TRY(qd_json_reader_enter(reader, '[', what));
    for (int i = 0; i < 3; i++) {
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (more != (i < 2))
            return QD_LOAD_FAIL("post_processor.%s must be a token and its id", what);
        if (i == 0)
            QD_TRY(qd_json_reader_string(reader, what, &text));
        if (i == 1)
            QD_TRY(qd_json_reader_integer(reader, what, 0, (int64_t)load->tokenizer->vocab.size - 1, &id));
    }
    if (qd_vocab_kind(&load->tokenizer->vocab, (uint32_t)id) == QD_TOKEN_NONE)
        return QD_LOAD_FAIL("post_processor: id %lld is not a token", (long long)id);
    ids[(*count)++] = (uint32_t)id;
    return QD_OK;
}

qd_status qd_load_post_processor(qd_loader *load, const char *at, int depth)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { TYPE, LIST, SINGLE, SPECIALS, SEP, CLS, COUNT };
    qd_json_place places[COUNT] = {{"type", NULL}, {"processors", NULL}, {"single", NULL}, {"special_tokens", NULL},
                                   {"sep", NULL}, {"cls", NULL}};
    qd_json_text type;
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "post_processor", places, COUNT));
    QD_TRY(qd_load_string(load, places[TYPE].at, "post_processor.type", &type));
    if (qd_json_text_is(type, "TemplateProcessing"))
        return read_template(load, places[SINGLE].at, places[SPECIALS].at);
    if (qd_json_text_is(type, "BertProcessing") || qd_json_text_is(type, "RobertaProcessing")) {
        if (tokenizer->before_count || tokenizer->after_count)
            return QD_LOAD_FAIL("post_processor: two templates are not supported");
        QD_TRY(read_pair(load, places[CLS].at, "cls", tokenizer->before, &tokenizer->before_count));
        return read_pair(load, places[SEP].at, "sep", tokenizer->after, &tokenizer->after_count);
    }
    if (qd_json_text_is(type, "Sequence") && depth < 4)
        return qd_load_list(load, places[LIST].at, "post_processor.processors", depth + 1, qd_load_post_processor);
    if (qd_json_text_is(type, "ByteLevel")) /* changes offsets only */
        return QD_OK;
    return QD_LOAD_FAIL("post_processor.type '%.*s' is not supported; TemplateProcessing, BertProcessing, RobertaProcessing, "
                        "ByteLevel and Sequence are", (int)type.length, type.data);
}
