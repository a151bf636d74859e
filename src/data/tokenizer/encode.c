/* The encoder: finds added tokens, splits the text between them into pieces, and encodes each piece
 * through the word cache or by BPE. */
#include "data/tokenizer/bpe.h"
#include "base/sized.h"
#include "data/tokenizer/split/unicode.h"
#include "data/tokenizer/word_cache.h"

#include "base/text/strbuf.h"

#include <stdlib.h>
#include <string.h>

struct qd_encoder {
    const qd_tokenizer *tokenizer;
    qd_bpe_work work;
    qd_word_cache cache;
    qd_regex_state *regex[QD_MOST_STAGES]; /* for the stages that use one */
    uint8_t *allowed;       /* (added_count): special tokens allowed in this call */
    qd_strbuf prefixed, replaced;
    qd_tokens *out;
    size_t last_piece;      /* token count of the last piece */
};

void qd_encode_options_init(qd_encode_options *options, size_t size)
{
    const qd_encode_options own = {.special = QD_SPECIAL_TEXT, .broken = QD_BROKEN_KEEP};
    qd_sized_init(options, size, &own, sizeof own);
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
    qd_word_cache_free(&encoder->cache);
    for (int i = 0; i < QD_MOST_STAGES; i++)
        qd_regex_state_destroy(encoder->regex[i]);
    free(encoder->allowed);
    qd_strbuf_free(&encoder->prefixed);
    qd_strbuf_free(&encoder->replaced);
    free(encoder);
}

static qd_status make_room(qd_tokens *out, size_t count)
{
    if (out->capacity - out->count >= count)
        return QD_OK;
    size_t capacity = out->count + count + out->capacity / 2 + 256;
    int32_t *ids = realloc(out->ids, capacity * sizeof *ids);
    if (!ids)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %zu tokens", capacity);
    out->ids = ids;
    out->capacity = capacity;
    return QD_OK;
}

static qd_status put(qd_tokens *out, const uint32_t *ids, size_t count)
{
    QD_TRY(make_room(out, count));
    if (count)
        memcpy(out->ids + out->count, ids, count * sizeof *ids);
    out->count += count;
    return QD_OK;
}

/* Encodes a piece that is not in the cache. */
static qd_status encode_new_piece(qd_encoder *encoder, const uint8_t *piece, size_t length, qd_word *slot)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    const uint32_t *ids;
    size_t count;
    uint32_t whole = tokenizer->whole_words ? qd_vocab_find(&tokenizer->vocab, piece, length, QD_TOKEN_BYTES) : QD_NO_TOKEN;
    if (whole != QD_NO_TOKEN) {
        ids = &whole;
        count = 1;
    } else {
        QD_TRY(qd_bpe(tokenizer, &encoder->work, piece, length, &ids, &count));
    }
    encoder->last_piece = count;
    if (slot)
        qd_word_cache_fill(&encoder->cache, slot, ids, count);
    return put(encoder->out, ids, count);
}

static inline qd_status encode_piece(qd_encoder *encoder, const uint8_t *piece, size_t length, const uint8_t *end)
{
    qd_word *slot = NULL;
    if (length <= QD_WORD_MOST) {
        slot = qd_word_cache_find(&encoder->cache, piece, length, end);
        if (slot->known) {
            const uint32_t *ids = qd_word_ids(&encoder->cache, slot);
            qd_tokens *out = encoder->out;
            if (out->capacity - out->count < slot->count)
                QD_TRY(make_room(out, slot->count));
            for (unsigned i = 0; i < slot->count; i++)
                out->ids[out->count + i] = (int32_t)ids[i];
            out->count += slot->count;
            encoder->last_piece = slot->count;
            return QD_OK;
        }
    }
    return encode_new_piece(encoder, piece, length, slot);
}

static qd_status run_stages(qd_encoder *encoder, int stage, const uint8_t *text, size_t length);

typedef struct stage_call {
    qd_encoder *encoder;
    int stage;
    const uint8_t *text;
} stage_call;

static qd_status emit(void *context, size_t offset, size_t length, bool matched)
{
    const stage_call *call = context;
    const qd_stage *stage = &call->encoder->tokenizer->stages[call->stage];
    if (matched ? !stage->keep_matches : !stage->keep_gaps)
        return QD_OK;
    return run_stages(call->encoder, call->stage + 1, call->text + offset, length);
}

/* Splits the text by the stages from number `stage` on and encodes the pieces. */
static qd_status run_stages(qd_encoder *encoder, int stage, const uint8_t *text, size_t length)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    const uint8_t *end = text + length;
    if (length == 0)
        return QD_OK;
    if (stage == tokenizer->stage_count)
        return encode_piece(encoder, text, length, end);
    const qd_stage *now = &tokenizer->stages[stage];
    if (now->kind == QD_STAGE_PREFIX) {
        if (*text == ' ')
            return run_stages(encoder, stage + 1, text, length);
        /* A tokenizer has one prefix stage, so its buffer is not in use below. */
        qd_strbuf_clear(&encoder->prefixed);
        qd_strbuf_puts(&encoder->prefixed, " ");
        qd_strbuf_append(&encoder->prefixed, (const char *)text, length);
        if (encoder->prefixed.failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory to encode %zu bytes", length);
        return run_stages(encoder, stage + 1, (const uint8_t *)encoder->prefixed.data, encoder->prefixed.length);
    }
    if (now->pattern == QD_PATTERN_CUSTOM) {
        stage_call call = {encoder, stage, text};
        return qd_regex_split(now->regex, encoder->regex[stage], text, length, emit, &call);
    }
    if (!now->keep_matches) /* the known patterns match everything */
        return QD_OK;
    bool last = stage + 1 == tokenizer->stage_count;
    for (const uint8_t *at = text, *next; at < end; at = next) {
        next = qd_pattern_next(now->pattern, at, end);
        if (last)
            QD_TRY(encode_piece(encoder, at, (size_t)(next - at), end));
        else
            QD_TRY(run_stages(encoder, stage + 1, at, (size_t)(next - at)));
    }
    return QD_OK;
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
 * the normalized text (pass 1), which is the same here. The text between them goes through the
 * stages. */
static qd_status take_added(qd_encoder *encoder, const qd_encode_options *options, const uint8_t *text, size_t size, int pass,
                            size_t offset)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    if (pass == 2)
        return run_stages(encoder, 0, text, size);
    const qd_trie *trie = pass == 0 ? &tokenizer->raw : &tokenizer->normalized;
    const uint8_t *done = text, *at = text, *end = text + size;
    size_t length = 0;
    int32_t index;
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
        QD_TRY(take_added(encoder, options, done, (size_t)(start - done), pass + 1, offset + (size_t)(done - text)));
        QD_TRY(put(encoder->out, &added->id, 1));
        encoder->last_piece = 0;
        done = stop;
        if (at < stop)
            at = stop;
    }
    return take_added(encoder, options, done, (size_t)(end - done), pass + 1, offset + (size_t)(done - text));
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
    QD_TRY(run_stages(encoder, 0, text, valid));
    size_t unstable = encoder->last_piece, count = out->count - first;
    if (unstable > 0 && all_space(tokenizer, out->ids[out->count - unstable]))
        while (unstable < count && all_space(tokenizer, out->ids[out->count - unstable - 1]))
            unstable++;
    size_t bytes = 0;
    for (size_t i = out->count - unstable; i < out->count; i++)
        bytes += tokenizer->vocab.tokens[out->ids[i]].length;
    out->count -= unstable;
    return encode_new_piece(encoder, text + valid - bytes, length - valid + bytes, NULL);
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
        QD_TRY(put(tokens, tokenizer->before, (size_t)tokenizer->before_count));
    size_t valid = options->broken == QD_BROKEN_KEEP ? length : qd_utf8_valid(given, length);
    if (valid < length && options->broken == QD_BROKEN_REPLACE) {
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
        QD_TRY(take_added(encoder, options, text, length, 0, 0));
    if (options->frame)
        QD_TRY(put(tokens, tokenizer->after, (size_t)tokenizer->after_count));
    return QD_OK;
}
