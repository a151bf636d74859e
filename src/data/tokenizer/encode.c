/* The encoder: finds added tokens, normalizes the text between them and passes it to the stages. */
#include "data/tokenizer/encode_impl.h"

#include "base/sized.h"
#include "base/text/strbuf.h"
#include "data/tokenizer/sentencepiece.h"
#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

void qd_encode_options_init(qd_encode_options *options, size_t size)
{
    const qd_encode_options own = {.special = QD_SPECIAL_TEXT, .broken = QD_BROKEN_KEEP};
    qd_sized_init(options, size, &own, sizeof own);
}

qd_status qd_special_policy_parse(const char *name, qd_special_policy *policy)
{
    static const char *const names[] = {[QD_SPECIAL_TEXT] = "plain", [QD_SPECIAL_ALLOW] = "parse", [QD_SPECIAL_REFUSE] = "refuse"};
    for (int i = 0; i < 3; i++)
        if (strcmp(name, names[i]) == 0) {
            *policy = (qd_special_policy)i;
            return QD_OK;
        }
    return QD_FAIL(QD_USAGE, "special tokens cannot be treated as '%s': parse, plain or refuse", name);
}

void qd_tokens_free(qd_tokens *tokens)
{
    free(tokens->ids);
    *tokens = (qd_tokens){0};
}

qd_status qd_encoder_create(const qd_tokenizer *tokenizer, qd_encoder **encoder)
{
    qd_encoder *made = calloc(1, sizeof *made);
    if (!made)
        return QD_FAIL(QD_NO_MEMORY, "no memory for an encoder");
    made->tokenizer = tokenizer;
    qd_status status = qd_word_cache_create(&made->cache);
    for (int i = 0; status == QD_OK && i < tokenizer->stage_count; i++)
        if (tokenizer->stages[i].regex)
            status = qd_regex_state_create(&made->regex[i]);
    if (status == QD_OK && !(made->allowed = calloc(tokenizer->added_count + 1, 1)))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for an encoder");
    if (status != QD_OK) {
        qd_encoder_destroy(made);
        return status;
    }
    *encoder = made;
    return QD_OK;
}

void qd_encoder_destroy(qd_encoder *encoder)
{
    if (!encoder)
        return;
    qd_bpe_work_free(&encoder->work);
    qd_unigram_work_free(&encoder->unigram);
    qd_normal_work_free(&encoder->normal);
    qd_word_cache_free(&encoder->cache);
    for (int i = 0; i < QD_MOST_STAGES; i++) {
        qd_regex_state_destroy(encoder->regex[i]);
        qd_strbuf_free(&encoder->texts[i]);
    }
    free(encoder->allowed);
    qd_strbuf_free(&encoder->replaced);
    free(encoder);
}

/* Whether an added token at [at, at + length) of [text, end) is accepted, and its extent. */
static bool accept_added(const qd_added *added, const uint8_t *text, const uint8_t *free_from, const uint8_t *end,
                         const uint8_t **start, const uint8_t **stop)
{
    size_t length;
    if (added->single_word) {
        const uint8_t *before = *start;
        while (before > text && *start - before < 4 && (before == *start || (*before & 0xc0) == 0x80))
            before--;
        if (before < *start && (qd_class_at(before, end, &length) & QD_WORD))
            return false;
        if (*stop < end && (qd_class_at(*stop, end, &length) & QD_WORD))
            return false;
    }
    while (added->left_strip && *start > free_from) {
        const uint8_t *before = *start - 1;
        while (before > free_from && *start - before < 4 && (*before & 0xc0) == 0x80)
            before--;
        if (!(qd_class_at(before, end, &length) & QD_SPACE) || before + length != *start)
            break;
        *start = before;
    }
    while (added->right_strip && *stop < end && (qd_class_at(*stop, end, &length) & QD_SPACE))
        *stop += length;
    return true;
}

/* Extracts added tokens: first those that match the original text (pass 0), then those that match
 * the normalized text (pass 1). The text between them goes through the stages. zero: as for
 * qd_encoder_stages(). */
static qd_status take_added(qd_encoder *encoder, const qd_encode_options *options, const uint8_t *text, size_t size, int pass,
                            size_t offset, size_t zero)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    if (pass == 2)
        return qd_encoder_stages(encoder, 0, text, size, zero);
    if (pass == 1 && tokenizer->normalizer.count > 0)
        QD_TRY(qd_normalize(&tokenizer->normalizer, &encoder->normal, text, size, &zero, &text, &size));
    if (pass == 1 && tokenizer->sentencepiece) {
        qd_strbuf *normal = &encoder->texts[0]; /* there are no stages */
        normal->length = 0;
        qd_sentencepiece_normalize(tokenizer->sentencepiece, text, size, normal);
        if (normal->failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory to encode %zu bytes", size);
        return normal->length > 0 ? qd_encoder_stages(encoder, 0, (const uint8_t *)normal->data, normal->length, 0) : QD_OK;
    }
    const qd_trie *trie = pass == 0 ? &tokenizer->raw : &tokenizer->normalized;
    const uint8_t *done = text, *at = text, *end = text + size;
    size_t length = 0;
    int32_t index;
#define REST(from, to)                                                                                                 \
    take_added(encoder, options, from, (size_t)((to) - (from)), pass + 1, offset + (size_t)((from) - text),           \
               (size_t)((from) - text) < zero ? zero - (size_t)((from) - text) : 0)
    while ((at = qd_trie_find(trie, at, end, &length, &index))) {
        const qd_added *added = &tokenizer->added[index];
        const uint8_t *start = at, *stop = at + length;
        if (added->special && options->special != QD_SPECIAL_ALLOW && !encoder->allowed[index]) {
            if (options->special == QD_SPECIAL_REFUSE)
                return QD_FAIL(QD_USAGE, "the text contains the special token %.*s at byte %zu; allow it or encode it as text",
                               (int)length, (const char *)at, offset + (size_t)(at - text));
            at += tokenizer->tiktoken ? 1 : length;
            continue;
        }
        at = stop;
        if (!accept_added(added, text, done, end, &start, &stop))
            continue;
        if (start > done)
            QD_TRY(REST(done, start));
        QD_TRY(qd_encoder_put(encoder, &added->id, 1));
        encoder->last_piece = 0;
        done = stop; /* spaces that it took may be an added token themselves, which is taken too */
    }
    return REST(done, end);
#undef REST
}

static bool all_space(const qd_tokenizer *tokenizer, int32_t id)
{
    size_t length;
    const uint8_t *bytes = qd_vocab_bytes(&tokenizer->vocab, (uint32_t)id, &length);
    for (size_t i = 0; i < length; i++)
        if (bytes[i] != ' ' && bytes[i] != '\n' && bytes[i] != '\t')
            return false;
    return true;
}

/* tiktoken's treatment of invalid UTF-8: the first `valid` bytes are split as usual, then the last
 * piece (with a preceding space piece) and all that follows are merged as one. */
static qd_status encode_as_tiktoken(qd_encoder *encoder, const uint8_t *text, size_t length, size_t valid)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    qd_tokens *out = encoder->out;
    size_t first = out->count;
    encoder->last_piece = 0;
    QD_TRY(qd_encoder_stages(encoder, 0, text, valid, 0));
    size_t unstable = encoder->last_piece, count = out->count - first;
    if (unstable > 0 && all_space(tokenizer, out->ids[out->count - unstable]))
        while (unstable < count && all_space(tokenizer, out->ids[out->count - unstable - 1]))
            unstable++;
    size_t bytes = 0;
    for (size_t i = out->count - unstable; i < out->count; i++)
        bytes += tokenizer->vocab.tokens[out->ids[i]].length;
    out->count -= unstable;
    return qd_encoder_piece(encoder, text + valid - bytes, length - valid + bytes, NULL);
}

static size_t first_character(const uint8_t *text, size_t length)
{
    uint32_t character;
    return length == 0 ? 0 : *text < 0x80 ? 1 : qd_utf8_read(text, text + length, &character);
}

qd_status qd_encoder_encode(qd_encoder *encoder, const char *given, size_t length, const qd_encode_options *given_options,
                            qd_tokens *tokens)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    qd_encode_options own = qd_encode_options_default();
    const qd_encode_options *options = &own;
    const uint8_t *text = (const uint8_t *)given;
    if (given_options)
        QD_TRY(QD_SIZED_READ(given_options, qd_encode_options, &own));
    memset(encoder->allowed, 0, tokenizer->added_count + 1);
    for (size_t i = 0; i < options->allowed_count; i++) {
        int64_t index = qd_tokenizer_find_added(tokenizer, options->allowed[i], strlen(options->allowed[i]));
        if (index < 0)
            return QD_FAIL(QD_USAGE, "%s has no special token %s", tokenizer->name, options->allowed[i]);
        encoder->allowed[index] = 1;
    }
    encoder->out = tokens;
    if (options->frame)
        QD_TRY(qd_encoder_put(encoder, tokenizer->before, (size_t)tokenizer->before_count));
    const bool bytes = tokenizer->model == QD_MODEL_BYTES; /* the other models know characters only */
    size_t valid = options->broken == QD_BROKEN_KEEP && bytes ? length : qd_utf8_valid(given, length);
    if (valid < length && (options->broken == QD_BROKEN_REPLACE || (!bytes && !tokenizer->sentencepiece))) {
        qd_utf8_replace(text, length, &encoder->replaced);
        if (encoder->replaced.failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory to encode %zu bytes", length);
        text = (const uint8_t *)encoder->replaced.data;
        length = encoder->replaced.length;
    }
    if (options->broken == QD_BROKEN_TIKTOKEN && !tokenizer->tiktoken)
        return QD_FAIL(QD_USAGE, "%s is not a tiktoken file: keep or replace invalid UTF-8 instead", tokenizer->name);
    if (options->broken == QD_BROKEN_TIKTOKEN && valid < length)
        QD_TRY(encode_as_tiktoken(encoder, text, length, valid));
    else
        QD_TRY(take_added(encoder, options, text, length, 0, 0, first_character(text, length)));
    if (options->frame)
        QD_TRY(qd_encoder_put(encoder, tokenizer->after, (size_t)tokenizer->after_count));
    return QD_OK;
}
