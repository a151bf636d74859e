/* Reads the model of tokenizer.json: BPE, Unigram or WordPiece, with its vocabulary. */
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/files/load_impl.h"

#include <stdlib.h>
#include <string.h>

qd_token_kind qd_load_token(qd_loader *load, qd_json_text text, size_t offset, const void **bytes, size_t *length)
{
    if (load->tokenizer->model != QD_MODEL_BYTES) {
        *bytes = text.data;
        *length = text.length;
        return QD_TOKEN_BYTES;
    }
    if (qd_byte_level_read(text.data, text.length, load->bytes + offset, length)) {
        *bytes = load->bytes + offset;
        return QD_TOKEN_BYTES;
    }
    *bytes = text.data;
    *length = text.length;
    return QD_TOKEN_LITERAL;
}

uint32_t qd_load_find_token(qd_loader *load, qd_json_text text)
{
    const void *bytes;
    size_t length;
    if (text.length > load->longest)
        return QD_NO_TOKEN;
    qd_token_kind kind = qd_load_token(load, text, 0, &bytes, &length);
    return qd_vocab_find(&load->tokenizer->vocab, bytes, length, kind);
}

static qd_status measure_vocab(qd_loader *load, const char *at, uint32_t *count, uint32_t *size, size_t *bytes)
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
        if (load->tokenizer->model == QD_MODEL_BYTES && memchr(key.data, 0, key.length))
            return QD_LOAD_FAIL("model.vocab: a token contains a NUL character");
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
        return QD_LOAD_FAIL("model.vocab is empty");
    if (highest > 2 * entries + QD_MOST_HOLES)
        return QD_LOAD_FAIL("model.vocab: id %llu is too high for %llu tokens", (unsigned long long)highest,
                    (unsigned long long)entries);
    *count = (uint32_t)entries;
    *size = (uint32_t)highest + 1;
    return QD_OK;
}

static qd_status read_vocab(qd_loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_vocab *vocab = &load->tokenizer->vocab;
    uint32_t count = 0, size = 0;
    size_t total;
    QD_TRY(measure_vocab(load, at, &count, &size, &total));
    QD_TRY(qd_vocab_reserve(vocab, size, count, total));
    load->bytes = malloc(2 * load->longest + 1); /* a merge is two tokens */
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
        qd_token_kind kind = qd_load_token(load, key, 0, &bytes, &length);
        QD_TRY(qd_json_reader_integer(reader, "an id of model.vocab", 0, INT32_MAX - 1, &id));
        QD_TRY(qd_vocab_add(vocab, (uint32_t)id, bytes, length, kind, &old));
        if (old == (uint32_t)id)
            return QD_LOAD_FAIL("model.vocab: two tokens have the id %u", old);
        if (old != QD_NO_TOKEN)
            return QD_LOAD_FAIL("model.vocab: a token appears twice, with the ids %u and %lld", old, (long long)id);
    }
}

/* One merge: "left right" or ["left", "right"]. *left stays QD_NO_TOKEN for a comment line. */
static qd_status read_merge(qd_loader *load, size_t index, uint32_t *left, uint32_t *right)
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
            return QD_LOAD_FAIL("model.merges[%zu] must be two tokens separated by one space", index);
        *left = qd_load_find_token(load, (qd_json_text){text.data, length});
        *right = qd_load_find_token(load, (qd_json_text){space + 1, text.length - length - 1});
    } else {
        bool first = true, more;
        QD_TRY(qd_json_reader_enter(reader, '[', "a merge"));
        uint32_t *sides[2] = {left, right};
        for (int i = 0; i < 2; i++) {
            QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
            if (!more)
                return QD_LOAD_FAIL("model.merges[%zu] must be a list of two tokens", index);
            QD_TRY(qd_json_reader_string(reader, "a token of a merge", &text));
            *sides[i] = qd_load_find_token(load, text);
        }
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
        if (more)
            return QD_LOAD_FAIL("model.merges[%zu] must be a list of two tokens", index);
    }
    if (*left == QD_NO_TOKEN || *right == QD_NO_TOKEN)
        return QD_LOAD_FAIL("model.merges[%zu]: the %s token is not in model.vocab", index, *left == QD_NO_TOKEN ? "left" : "right");
    return QD_OK;
}

static qd_status read_merges(qd_loader *load, const char *at)
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
                return QD_LOAD_FAIL("model.merges[%zu]: a token is not in the ByteLevel alphabet", index);
            size_t left_length, right_length;
            const uint8_t *left_bytes = qd_vocab_bytes(vocab, left, &left_length);
            const uint8_t *right_bytes = qd_vocab_bytes(vocab, right, &right_length);
            /* The right token loses the prefix of continued words. */
            const size_t prefix = strlen(load->tokenizer->prefix);
            if (right_length < prefix)
                return QD_LOAD_FAIL("model.merges[%zu]: the right token is shorter than continuing_subword_prefix", index);
            memcpy(load->bytes, left_bytes, left_length);
            memcpy(load->bytes + left_length, right_bytes + prefix, right_length - prefix);
            uint32_t id = qd_vocab_find(vocab, load->bytes, left_length + right_length - prefix, QD_TOKEN_BYTES);
            if (id == QD_NO_TOKEN)
                return QD_LOAD_FAIL("model.merges[%zu]: the merged token is not in model.vocab", index);
            qd_vocab_add_merge(vocab, left, right, rank++, id);
        }
        count = index;
        if (pass == 0) {
            if (count >= INT32_MAX)
                return QD_LOAD_FAIL("model.merges has too many entries");
            QD_TRY(qd_vocab_reserve_merges(vocab, (uint32_t)count));
        }
    }
    return QD_OK;
}

/* A string of at most QD_MOST_AFFIX - 1 bytes; "" if it is missing or null. */
static qd_status read_affix(qd_loader *load, const qd_json_place *place, char affix[QD_MOST_AFFIX])
{
    qd_json_text text;
    if (qd_load_is_null(load, place->at))
        return QD_OK;
    QD_TRY(qd_json_reader_string(&load->reader, place->key, &text));
    if (text.length >= QD_MOST_AFFIX || memchr(text.data, 0, text.length))
        return QD_LOAD_FAIL("model.%s must have less than %d bytes and no NUL character", place->key, QD_MOST_AFFIX);
    memcpy(affix, text.data, text.length);
    affix[text.length] = '\0';
    return QD_OK;
}

/* Whether all tokens are sequences of bytes: ByteLevel comes last, and decodes. Then the stage that
 * writes bytes as characters is dropped and the vocabulary stores bytes. */
static bool takes_bytes(qd_tokenizer *tokenizer)
{
    int bytes = 0;
    for (int i = 0; i < tokenizer->stage_count; i++)
        bytes += tokenizer->stages[i].kind == QD_STAGE_BYTES;
    for (int i = 0; i < tokenizer->normalizer.count; i++)
        bytes += tokenizer->normalizer.steps[i].kind == QD_NORMAL_BYTES;
    if (bytes != 1 || tokenizer->stage_count == 0 || tokenizer->stages[tokenizer->stage_count - 1].kind != QD_STAGE_BYTES ||
        tokenizer->decoder.count != 1 || tokenizer->decoder.steps[0].kind != QD_DECODE_BYTES || tokenizer->byte_fallback ||
        tokenizer->prefix[0] || tokenizer->suffix[0])
        return false;
    tokenizer->stage_count--;
    return true;
}

static qd_status read_bpe(qd_loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { DROPOUT, UNKNOWN, PREFIX, SUFFIX, FUSE, FALLBACK, IGNORE, VOCAB, MERGES, COUNT };
    qd_json_place places[COUNT] = {{"dropout", NULL}, {"unk_token", NULL}, {"continuing_subword_prefix", NULL},
                                   {"end_of_word_suffix", NULL}, {"fuse_unk", NULL}, {"byte_fallback", NULL},
                                   {"ignore_merges", NULL}, {"vocab", NULL}, {"merges", NULL}};
    qd_json_text text;
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "model", places, COUNT));
    if (!qd_load_is_null(load, places[DROPOUT].at)) {
        /* In a number that is 0, all digits before the exponent are 0. */
        const char *number = reader->at, *digits = number + strspn(number, "-0.");
        if (qd_json_reader_kind(reader) != '0' || strchr("123456789", *digits))
            return QD_LOAD_FAIL("model.dropout is not supported; it must be null or 0");
    }
    QD_TRY(read_affix(load, &places[PREFIX], tokenizer->prefix));
    QD_TRY(read_affix(load, &places[SUFFIX], tokenizer->suffix));
    QD_TRY(qd_load_boolean(load, places[FALLBACK].at, "model.byte_fallback", &tokenizer->byte_fallback));
    if (tokenizer->byte_fallback && (tokenizer->prefix[0] || tokenizer->suffix[0]))
        return QD_LOAD_FAIL("model.byte_fallback is not supported together with continuing_subword_prefix or end_of_word_suffix");
    QD_TRY(qd_load_boolean(load, places[FUSE].at, "model.fuse_unk", &tokenizer->fuse_unknown));
    QD_TRY(qd_load_boolean(load, places[IGNORE].at, "model.ignore_merges", &tokenizer->whole_words));
    tokenizer->model = takes_bytes(tokenizer) ? QD_MODEL_BYTES : QD_MODEL_BPE;
    if (!places[VOCAB].at || !places[MERGES].at)
        return QD_LOAD_FAIL("model.%s is missing", places[VOCAB].at ? "merges" : "vocab");
    QD_TRY(read_vocab(load, places[VOCAB].at));
    QD_TRY(read_merges(load, places[MERGES].at));
    if (!qd_load_is_null(load, places[UNKNOWN].at)) {
        QD_TRY(qd_json_reader_string(reader, "model.unk_token", &text));
        tokenizer->unknown = qd_load_find_token(load, text);
        if (tokenizer->unknown == QD_NO_TOKEN)
            return QD_LOAD_FAIL("model.unk_token is not in model.vocab");
    }
    return QD_OK;
}

static qd_status read_word_piece(qd_loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { UNKNOWN, PREFIX, MOST, VOCAB, COUNT };
    qd_json_place places[COUNT] = {{"unk_token", NULL}, {"continuing_subword_prefix", NULL}, {"max_input_chars_per_word", NULL},
                                   {"vocab", NULL}};
    qd_json_text text;
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "model", places, COUNT));
    for (int i = 0; i < COUNT; i++)
        if (!places[i].at)
            return QD_LOAD_FAIL("model.%s is missing", places[i].key);
    tokenizer->model = QD_MODEL_WORDPIECE;
    QD_TRY(read_affix(load, &places[PREFIX], tokenizer->prefix));
    reader->at = places[MOST].at;
    QD_TRY(qd_json_reader_integer(reader, "model.max_input_chars_per_word", 0, QD_MOST_WORD_PIECE, &tokenizer->most_characters));
    QD_TRY(read_vocab(load, places[VOCAB].at));
    QD_TRY(qd_load_string(load, places[UNKNOWN].at, "model.unk_token", &text));
    tokenizer->unknown = qd_load_find_token(load, text);
    return tokenizer->unknown == QD_NO_TOKEN ? QD_LOAD_FAIL("model.unk_token is not in model.vocab") : QD_OK;
}

/* One entry of Unigram's vocabulary: ["token", score]. */
static qd_status read_scored(qd_loader *load, qd_json_text *token, double *score)
{
    qd_json_reader *reader = &load->reader;
    bool first = true, more;
    QD_TRY(qd_json_reader_enter(reader, '[', "an entry of model.vocab"));
    QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
    if (more)
        QD_TRY(qd_json_reader_string(reader, "a token of model.vocab", token));
    if (more)
        QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
    if (!more)
        return QD_LOAD_FAIL("an entry of model.vocab must be a token and its score");
    QD_TRY(qd_json_reader_number(reader, "a score of model.vocab", score));
    QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
    return more ? QD_LOAD_FAIL("an entry of model.vocab must be a token and its score") : QD_OK;
}

static qd_status read_scores(qd_loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    qd_unigram *unigram = &tokenizer->unigram;
    for (int pass = 0; pass < 2; pass++) { /* first count, then read */
        bool first = true, more;
        uint32_t count = 0, old;
        size_t bytes = 0;
        reader->at = at;
        QD_TRY(qd_json_reader_enter(reader, '[', "model.vocab"));
        for (;; count++) {
            qd_json_text token = {0};
            double score = 0.0;
            QD_TRY(qd_json_reader_next(reader, &first, NULL, &more));
            if (!more)
                break;
            QD_TRY(read_scored(load, &token, &score));
            bytes += token.length;
            load->longest = token.length > load->longest ? token.length : load->longest;
            if (pass == 0)
                continue;
            unigram->scores[count] = score;
            QD_TRY(qd_vocab_add(&tokenizer->vocab, count, token.data, token.length, QD_TOKEN_BYTES, &old));
            if (old != QD_NO_TOKEN)
                return QD_LOAD_FAIL("model.vocab: a token appears twice, with the ids %u and %u", old, count);
        }
        if (count == 0 || count >= INT32_MAX)
            return QD_LOAD_FAIL("model.vocab has %u entries", count);
        if (pass == 1)
            break;
        unigram->count = count;
        unigram->scores = malloc(count * sizeof *unigram->scores);
        load->bytes = malloc(2 * load->longest + 1);
        if (!unigram->scores || !load->bytes)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", reader->name);
        QD_TRY(qd_vocab_reserve(&tokenizer->vocab, count, count, bytes));
    }
    return qd_unigram_build(unigram, &tokenizer->vocab);
}

static qd_status read_unigram(qd_loader *load, const char *at)
{
    qd_json_reader *reader = &load->reader;
    qd_tokenizer *tokenizer = load->tokenizer;
    enum { UNKNOWN, FALLBACK, VOCAB, COUNT };
    qd_json_place places[COUNT] = {{"unk_id", NULL}, {"byte_fallback", NULL}, {"vocab", NULL}};
    reader->at = at;
    QD_TRY(qd_json_reader_members(reader, "model", places, COUNT));
    if (!places[VOCAB].at)
        return QD_LOAD_FAIL("model.vocab is missing");
    tokenizer->model = QD_MODEL_UNIGRAM;
    tokenizer->fuse_unknown = true;
    QD_TRY(qd_load_boolean(load, places[FALLBACK].at, "model.byte_fallback", &tokenizer->byte_fallback));
    QD_TRY(read_scores(load, places[VOCAB].at));
    if (!qd_load_is_null(load, places[UNKNOWN].at)) {
        int64_t id;
        QD_TRY(qd_json_reader_integer(reader, "model.unk_id", 0, (int64_t)tokenizer->unigram.count - 1, &id));
        tokenizer->unknown = (uint32_t)id;
    }
    return QD_OK;
}

qd_status qd_load_model(qd_loader *load, const char *at)
{
    qd_json_place place = {"type", NULL};
    qd_json_text type;
    if (!at)
        return QD_LOAD_FAIL("model is missing");
    load->reader.at = at;
    QD_TRY(qd_json_reader_members(&load->reader, "model", &place, 1));
    if (!place.at)
        return read_bpe(load, at);
    QD_TRY(qd_load_string(load, place.at, "model.type", &type));
    if (qd_json_text_is(type, "BPE"))
        return read_bpe(load, at);
    if (qd_json_text_is(type, "Unigram"))
        return read_unigram(load, at);
    if (qd_json_text_is(type, "WordPiece"))
        return read_word_piece(load, at);
    return QD_LOAD_FAIL("model.type '%.*s' is not supported; BPE, Unigram and WordPiece are", (int)type.length, type.data);
}
