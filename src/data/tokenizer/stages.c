/* Pre-tokenization: runs a text through the stages of a tokenizer and encodes each piece, through
 * the word cache or by the model. Pieces are handled depth first, so a stage needs one buffer. */
#define _GNU_SOURCE /* memmem */
#include "data/tokenizer/encode_impl.h"
#include "data/tokenizer/sentencepiece.h"

#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/normalize/unicode_data.h"
#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

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

qd_status qd_encoder_put(qd_encoder *encoder, const uint32_t *ids, size_t count)
{
    qd_tokens *out = encoder->out;
    QD_TRY(make_room(out, count));
    if (count)
        memcpy(out->ids + out->count, ids, count * sizeof *ids);
    out->count += count;
    return QD_OK;
}

qd_status qd_encoder_piece(qd_encoder *encoder, const uint8_t *piece, size_t length, qd_word *slot)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    const uint32_t *ids;
    size_t count;
    uint32_t whole = tokenizer->whole_words ? qd_vocab_find(&tokenizer->vocab, piece, length, QD_TOKEN_BYTES) : QD_NO_TOKEN;
    if (whole != QD_NO_TOKEN) {
        ids = &whole;
        count = 1;
    } else if (tokenizer->model == QD_MODEL_UNIGRAM) {
        QD_TRY(qd_unigram_encode(tokenizer, &encoder->unigram, piece, length, &ids, &count));
    } else if (tokenizer->model == QD_MODEL_WORDPIECE) {
        QD_TRY(qd_word_piece(tokenizer, &encoder->work, piece, length, &ids, &count));
    } else if (tokenizer->sentencepiece) {
        QD_TRY(qd_sentencepiece_bpe(tokenizer, &encoder->work, piece, length, &ids, &count));
    } else {
        QD_TRY(qd_bpe(tokenizer, &encoder->work, piece, length, &ids, &count));
    }
    encoder->last_piece = count;
    if (slot)
        qd_word_cache_fill(&encoder->cache, slot, ids, count);
    return qd_encoder_put(encoder, ids, count);
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
    return qd_encoder_piece(encoder, piece, length, slot);
}

/* Encodes a piece of the last stage. If no token contains the tokenizer's mark (▁) behind another
 * character, merges never cross the place before it, and the parts are encoded separately. */
static qd_status encode_cut(qd_encoder *encoder, const uint8_t *text, size_t length)
{
    const char *mark = encoder->tokenizer->cut_mark;
    const size_t size = strlen(mark);
    const uint8_t *end = text + length, *at = text;
    if (size == 0)
        return encode_piece(encoder, text, length, end);
    while (at < end) {
        const uint8_t *stop = at;
        while ((size_t)(end - stop) >= size && memcmp(stop, mark, size) == 0)
            stop += size;
        for (;; stop++) {
            stop = memchr(stop, mark[0], (size_t)(end - stop));
            if (!stop || (size_t)(end - stop) < size) {
                stop = end;
                break;
            }
            if (memcmp(stop, mark, size) == 0)
                break;
        }
        QD_TRY(encode_piece(encoder, at, (size_t)(stop - at), end));
        at = stop;
    }
    return QD_OK;
}

/* Turns matches and gaps into pieces, by the behavior of a stage. */
typedef struct folding {
    qd_encoder *encoder;
    int stage;
    const uint8_t *text;
    size_t zero;
    size_t start, length; /* the piece that is held back */
    bool held, previous;  /* whether there is one; whether the last part was a match */
} folding;

static qd_status pass_on(const folding *f, size_t offset, size_t length)
{
    return qd_encoder_stages(f->encoder, f->stage + 1, f->text + offset, length, offset < f->zero ? f->zero - offset : 0);
}

static qd_status fold(void *context, size_t offset, size_t length, bool matched)
{
    folding *f = context;
    const qd_stage *stage = &f->encoder->tokenizer->stages[f->stage];
    matched = matched != stage->invert;
    if (stage->behavior == QD_ISOLATED || stage->behavior == QD_REMOVED)
        return matched && stage->behavior == QD_REMOVED ? QD_OK : pass_on(f, offset, length);
    bool join = stage->behavior == QD_CONTIGUOUS      ? matched == f->previous
                : stage->behavior == QD_WITH_PREVIOUS ? matched && !f->previous
                                                      : f->previous && !matched;
    f->previous = matched;
    if (join && f->held) {
        f->length += length;
        return QD_OK;
    }
    if (f->held)
        QD_TRY(pass_on(f, f->start, f->length));
    f->start = offset;
    f->length = length;
    f->held = true;
    return QD_OK;
}

static qd_status finish(const folding *f)
{
    return f->held ? pass_on(f, f->start, f->length) : QD_OK;
}

static bool matches(const qd_stage *stage, const uint8_t *at, const uint8_t *end, size_t *size)
{
    uint32_t c = *at;
    *size = c < 0x80 ? 1 : qd_utf8_read(at, end, &c);
    if (stage->classes && ((c < 0x80 ? qd_unicode_ascii[c] : qd_unicode_class(c)) & stage->classes))
        return true;
    if (stage->properties && (qd_properties(c) & stage->properties))
        return true;
    return stage->mark[0] && strlen(stage->mark) == *size && memcmp(at, stage->mark, *size) == 0;
}

/* Each matching character is a match of its own; the text between two is one gap. */
static qd_status split_characters(const qd_stage *stage, folding *f, size_t length)
{
    const uint8_t *text = f->text, *end = text + length, *gap = text;
    for (const uint8_t *at = text; at < end;) {
        size_t size;
        if (matches(stage, at, end, &size)) {
            if (at > gap)
                QD_TRY(fold(f, (size_t)(gap - text), (size_t)(at - gap), false));
            QD_TRY(fold(f, (size_t)(at - text), size, true));
            gap = at + size;
        }
        at += size;
    }
    return gap < end ? fold(f, (size_t)(gap - text), (size_t)(end - gap), false) : QD_OK;
}

/* \w+|[^\w\s]+ */
static qd_status split_words(const folding *f, size_t length)
{
    const uint8_t *text = f->text, *end = text + length;
    for (const uint8_t *at = text; at < end;) {
        size_t size;
        const unsigned kind = qd_class_at(at, end, &size) & (QD_WORD | QD_SPACE);
        const uint8_t *start = at;
        while (at < end && (qd_class_at(at, end, &size) & (QD_WORD | QD_SPACE)) == kind)
            at += size;
        if (!(kind & QD_SPACE))
            QD_TRY(pass_on(f, (size_t)(start - text), (size_t)(at - start)));
    }
    return QD_OK;
}

static qd_status metaspace(qd_encoder *encoder, int number, const uint8_t *text, size_t length, size_t zero)
{
    const qd_stage *stage = &encoder->tokenizer->stages[number];
    const size_t size = strlen(stage->mark);
    qd_strbuf *out = &encoder->texts[number];
    const bool marked = text[0] == ' ' || (length >= size && memcmp(text, stage->mark, size) == 0);
    size_t zero_out = 0;
    qd_strbuf_clear(out);
    if (!marked && (stage->prepend == QD_PREPEND_ALWAYS || (stage->prepend == QD_PREPEND_FIRST && zero > 0)))
        qd_strbuf_append(out, stage->mark, size);
    for (size_t at = 0; at < length;) {
        const uint8_t *space = memchr(text + at, ' ', length - at);
        size_t stop = space ? (size_t)(space - text) : length;
        if (at < zero)
            zero_out = out->length + (zero < stop ? zero - at : stop - at);
        qd_strbuf_append(out, (const char *)text + at, stop - at);
        if (space)
            qd_strbuf_append(out, stage->mark, size);
        if (space && stop < zero)
            zero_out = out->length;
        at = stop + 1;
    }
    if (out->failed)
        return QD_FAIL(QD_NO_MEMORY, "no memory to encode %zu bytes", length);
    text = (const uint8_t *)out->data;
    length = out->length;
    if (!stage->split)
        return qd_encoder_stages(encoder, number + 1, text, length, zero_out);
    for (size_t at = 0; at < length;) { /* a piece starts at each mark */
        const uint8_t *next = length - at > 1 ? memmem(text + at + 1, length - at - 1, stage->mark, size) : NULL;
        size_t stop = next ? (size_t)(next - text) : length;
        QD_TRY(qd_encoder_stages(encoder, number + 1, text + at, stop - at, at < zero_out ? zero_out - at : 0));
        at = stop;
    }
    return QD_OK;
}

/* Stages that rewrite the text: a space in front, or bytes as characters. */
static qd_status rewrite(qd_encoder *encoder, int number, const uint8_t *text, size_t length, size_t zero)
{
    qd_strbuf *out = &encoder->texts[number];
    qd_strbuf_clear(out);
    if (encoder->tokenizer->stages[number].kind == QD_STAGE_PREFIX) {
        qd_strbuf_puts(out, " ");
        qd_strbuf_append(out, (const char *)text, length);
        zero += zero > 0;
    } else {
        size_t first = zero < length ? zero : length;
        qd_byte_level_write(text, first, out);
        zero = out->length;
        qd_byte_level_write(text + first, length - first, out);
    }
    if (out->failed)
        return QD_FAIL(QD_NO_MEMORY, "no memory to encode %zu bytes", length);
    return qd_encoder_stages(encoder, number + 1, (const uint8_t *)out->data, out->length, zero);
}

qd_status qd_encoder_stages(qd_encoder *encoder, int stage, const uint8_t *text, size_t length, size_t zero)
{
    const qd_tokenizer *tokenizer = encoder->tokenizer;
    const uint8_t *end = text + length;
    if (length == 0)
        return QD_OK;
    if (stage == tokenizer->stage_count)
        return encode_cut(encoder, text, length);
    const qd_stage *now = &tokenizer->stages[stage];
    folding f = {.encoder = encoder, .stage = stage, .text = text, .zero = zero};
    switch (now->kind) {
    case QD_STAGE_PREFIX:
        if (*text == ' ')
            return qd_encoder_stages(encoder, stage + 1, text, length, zero);
        return rewrite(encoder, stage, text, length, zero);
    case QD_STAGE_BYTES: return rewrite(encoder, stage, text, length, zero);
    case QD_STAGE_METASPACE: return metaspace(encoder, stage, text, length, zero);
    case QD_STAGE_WORDS: return split_words(&f, length);
    case QD_STAGE_CHARACTERS:
        QD_TRY(split_characters(now, &f, length));
        return finish(&f);
    case QD_STAGE_SPLIT: break;
    }
    if (now->pattern == QD_PATTERN_CUSTOM) {
        QD_TRY(qd_regex_split(now->regex, encoder->regex[stage], text, length, fold, &f));
        return finish(&f);
    }
    const bool direct = now->behavior == QD_ISOLATED && stage + 1 == tokenizer->stage_count && !tokenizer->cut_mark[0];
    for (const uint8_t *at = text, *next; at < end; at = next) { /* the known patterns match everything */
        next = qd_pattern_next(now->pattern, at, end);
        if (direct)
            QD_TRY(encode_piece(encoder, at, (size_t)(next - at), end));
        else
            QD_TRY(fold(&f, (size_t)(at - text), (size_t)(next - at), true));
    }
    return finish(&f);
}
