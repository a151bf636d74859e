/* Loads SentencePiece models: a ModelProto in the wire format of Protocol Buffers, of which a few
 * fields are read. Every length is checked against what is left of the file. */
#include "base/text/strbuf.h"
#include "data/tokenizer/sentencepiece.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PIECE = 512 /* bytes: all ways to cut a piece are tried */, MOST_PIECES = 1 << 24 };

/* A message, or what is left of it. */
typedef struct message {
    const char *name;
    const uint8_t *at, *end;
} message;

typedef struct field {
    uint32_t number, wire; /* wire: 0 varint, 1 eight bytes, 2 bytes, 5 four bytes */
    uint64_t value;        /* of a varint */
    const uint8_t *bytes;
    size_t length;
} field;

#define DAMAGED(m) QD_FAIL(QD_USAGE, "%s: is not a whole SentencePiece model: it is damaged or another file", (m)->name)

static bool read_varint(message *m, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; shift < 64 && m->at < m->end; shift += 7) {
        uint8_t byte = *m->at++;
        *value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return true;
    }
    return false;
}

/* *more is false at the end. */
static qd_status next_field(message *m, field *f, bool *more)
{
    uint64_t tag;
    *more = m->at < m->end;
    if (!*more)
        return QD_OK;
    if (!read_varint(m, &tag) || tag >> 3 == 0 || tag >> 3 > UINT32_MAX)
        return DAMAGED(m);
    *f = (field){.number = (uint32_t)(tag >> 3), .wire = tag & 7};
    uint64_t length = f->wire == 1 ? 8 : f->wire == 5 ? 4 : 0;
    if (f->wire == 0 ? !read_varint(m, &f->value) : f->wire == 2 ? !read_varint(m, &length) : f->wire != 1 && f->wire != 5)
        return DAMAGED(m);
    if (length > (uint64_t)(m->end - m->at))
        return DAMAGED(m);
    f->bytes = m->at;
    f->length = (size_t)length;
    m->at += length;
    return QD_OK;
}

typedef struct piece {
    const uint8_t *text;
    size_t length;
    float score;
    uint64_t kind;
} piece;

typedef struct loading {
    qd_tokenizer *tokenizer;
    piece *pieces;
    size_t count, capacity;
    uint64_t model; /* 1 Unigram, 2 BPE */
} loading;

static qd_status read_piece(loading *l, message m)
{
    piece p = {.text = (const uint8_t *)"", .kind = QD_PIECE_NORMAL};
    field f;
    bool more;
    for (;;) {
        QD_TRY(next_field(&m, &f, &more));
        if (!more)
            break;
        if (f.number == 1 && f.wire == 2) {
            p.text = f.bytes;
            p.length = f.length;
        } else if (f.number == 2 && f.wire == 5) {
            memcpy(&p.score, f.bytes, sizeof p.score);
        } else if (f.number == 3 && f.wire == 0) {
            p.kind = f.value;
        }
    }
    if (p.length == 0 || p.length > MOST_PIECE || qd_utf8_valid((const char *)p.text, p.length) != p.length || !isfinite(p.score) ||
        p.kind < QD_PIECE_NORMAL || p.kind > QD_PIECE_BYTE || l->count >= MOST_PIECES)
        return QD_FAIL(QD_USAGE, "%s: piece %zu cannot be used: it must have 1 to %d bytes of UTF-8, a finite score and a known type",
                       m.name, l->count, (int)MOST_PIECE);
    if (l->count == l->capacity) {
        size_t capacity = l->capacity ? 2 * l->capacity : 1024;
        piece *grown = realloc(l->pieces, capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its pieces", m.name);
        l->pieces = grown;
        l->capacity = capacity;
    }
    l->pieces[l->count++] = p;
    return QD_OK;
}

static qd_status read_trainer(loading *l, message m)
{
    qd_tokenizer *t = l->tokenizer;
    qd_sentencepiece *s = t->sentencepiece;
    field f;
    bool more;
    for (;;) {
        QD_TRY(next_field(&m, &f, &more));
        if (!more)
            return QD_OK;
        if (f.number == 3 && f.wire == 0)
            l->model = f.value;
        else if (f.number == 24 && f.wire == 0)
            s->suffix = f.value != 0;
        else if (f.number == 35 && f.wire == 0)
            t->byte_fallback = f.value != 0;
        else if (f.number == 44 && f.wire == 2 && f.length < sizeof s->unknown_text)
            snprintf(s->unknown_text, sizeof s->unknown_text, "%.*s", (int)f.length, (const char *)f.bytes);
        else if (f.number == 44)
            return QD_FAIL(QD_USAGE, "%s: trainer_spec.unk_surface has more than %zu bytes", m.name, sizeof s->unknown_text - 1);
    }
}

static qd_status read_normalizer(loading *l, message m)
{
    qd_sentencepiece *s = l->tokenizer->sentencepiece;
    field f;
    bool more;
    for (;;) {
        QD_TRY(next_field(&m, &f, &more));
        if (!more)
            return QD_OK;
        if (f.number == 2 && f.wire == 2) {
            qd_charsmap_destroy(s->map);
            s->map = NULL;
            if (f.length > 0)
                QD_TRY(qd_charsmap_create(m.name, f.bytes, f.length, &s->map));
        } else if (f.number == 3 && f.wire == 0) {
            s->dummy_prefix = f.value != 0;
        } else if (f.number == 4 && f.wire == 0) {
            s->remove_spaces = f.value != 0;
        } else if (f.number == 5 && f.wire == 0) {
            s->escape_spaces = f.value != 0;
        }
    }
}

/* A denormalizer changes decoded text; models that have one are rare. */
static qd_status refuse_denormalizer(message m)
{
    field f;
    bool more;
    for (;;) {
        QD_TRY(next_field(&m, &f, &more));
        if (!more)
            return QD_OK;
        if (f.number == 2 && f.wire == 2 && f.length > 0)
            return QD_FAIL(QD_UNSUPPORTED, "%s: has a denormalizer_spec, which is not supported", m.name);
    }
}

static qd_status read_model(loading *l, message m)
{
    field f;
    bool more;
    for (;;) {
        QD_TRY(next_field(&m, &f, &more));
        if (!more)
            break;
        const message inner = {m.name, f.bytes, f.bytes + f.length};
        if (f.wire == 2)
            QD_TRY(f.number == 1   ? read_piece(l, inner)
                   : f.number == 2 ? read_trainer(l, inner)
                   : f.number == 3 ? read_normalizer(l, inner)
                   : f.number == 5 ? refuse_denormalizer(inner)
                                   : QD_OK);
    }
    if (l->count == 0)
        return QD_FAIL(QD_USAGE, "%s: has no pieces: it is not a SentencePiece model", m.name);
    if (l->model != 1 && l->model != 2)
        return QD_FAIL(QD_UNSUPPORTED, "%s: its model_type is %s: only UNIGRAM and BPE are supported", m.name,
                       l->model == 3 ? "WORD" : l->model == 4 ? "CHAR" : "unknown");
    return QD_OK;
}

/* Byte pieces are named <0x00> to <0xFF>. */
static qd_status set_byte(qd_tokenizer *t, uint32_t id, const piece *p)
{
    char name[8];
    unsigned byte;
    snprintf(name, sizeof name, "%.*s", (int)(p->length < 7 ? p->length : 7), (const char *)p->text);
    if (p->length != 6 || sscanf(name, "<0x%02X>", &byte) != 1 || byte > 255)
        return QD_FAIL(QD_USAGE, "%s: byte piece %u is '%.*s': expected <0x00> to <0xFF>", t->name, id, (int)p->length,
                       (const char *)p->text);
    t->byte_id[byte] = id;
    return QD_OK;
}

static qd_status add_pieces(loading *l)
{
    qd_tokenizer *t = l->tokenizer;
    qd_sentencepiece *s = t->sentencepiece;
    size_t bytes = 0;
    for (size_t i = 0; i < l->count; i++)
        bytes += l->pieces[i].length;
    s->kinds = calloc(l->count + 1, 1);
    t->added = calloc(l->count + 1, sizeof *t->added);
    if (!s->kinds || !t->added)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %zu pieces", t->name, l->count);
    memset(t->byte_id, 0xff, sizeof t->byte_id);
    QD_TRY(qd_vocab_reserve(&t->vocab, (uint32_t)l->count, (uint32_t)l->count, bytes));
    for (uint32_t id = 0; id < l->count; id++) {
        const piece *p = &l->pieces[id];
        uint32_t old;
        bool token = p->kind == QD_PIECE_NORMAL || p->kind == QD_PIECE_USER;
        bool special = p->kind == QD_PIECE_CONTROL || p->kind == QD_PIECE_UNKNOWN;
        QD_TRY(qd_vocab_add(&t->vocab, id, p->text, p->length, token ? QD_TOKEN_BYTES : QD_TOKEN_LITERAL, &old));
        if (old != QD_NO_TOKEN)
            return QD_FAIL(QD_USAGE, "%s: pieces %u and %u are both '%.*s'", t->name, old, id, (int)p->length, (const char *)p->text);
        s->kinds[id] = (uint8_t)p->kind;
        if (special)
            t->added[t->added_count++] = (qd_added){.id = id, .special = true};
        if (p->kind == QD_PIECE_UNKNOWN && t->unknown != QD_NO_TOKEN)
            return QD_FAIL(QD_USAGE, "%s: pieces %u and %u are both the unknown one", t->name, t->unknown, id);
        if (p->kind == QD_PIECE_UNKNOWN)
            t->unknown = id;
        if (p->kind == QD_PIECE_BYTE)
            QD_TRY(set_byte(t, id, p));
        if (p->kind == QD_PIECE_UNUSED && l->model == 2)
            return QD_FAIL(QD_UNSUPPORTED, "%s: piece %u is of the type UNUSED, which is not supported in BPE models", t->name, id);
        if (p->kind == QD_PIECE_USER)
            QD_TRY(qd_trie_add(&s->user, p->text, p->length, (int32_t)id));
        s->has_user = s->has_user || p->kind == QD_PIECE_USER;
    }
    if (t->unknown == QD_NO_TOKEN)
        return QD_FAIL(QD_USAGE, "%s: has no unknown piece", t->name);
    for (int byte = 0; byte < 256 && t->byte_fallback; byte++)
        if (t->byte_id[byte] == QD_NO_TOKEN)
            return QD_FAIL(QD_USAGE, "%s: byte_fallback is set, but there is no piece <0x%02X>", t->name, (unsigned)byte);
    return QD_OK;
}

/* Scores as the library computes with them: user-defined symbols get one that no other path
 * reaches. */
static qd_status build_unigram(loading *l)
{
    qd_tokenizer *t = l->tokenizer;
    float lowest = FLT_MAX, highest = FLT_MIN;
    for (size_t i = 0; i < l->count; i++)
        if (l->pieces[i].kind == QD_PIECE_NORMAL) {
            lowest = l->pieces[i].score < lowest ? l->pieces[i].score : lowest;
            highest = l->pieces[i].score > highest ? l->pieces[i].score : highest;
        }
    t->unigram.scores = calloc(l->count + 1, sizeof *t->unigram.scores);
    t->unigram.count = (uint32_t)l->count;
    if (!t->unigram.scores)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %zu scores", t->name, l->count);
    for (size_t i = 0; i < l->count; i++)
        t->unigram.scores[i] =
            l->pieces[i].kind == QD_PIECE_USER ? (double)(float)((float)l->pieces[i].length * highest - 0.1) : (double)l->pieces[i].score;
    QD_TRY(qd_unigram_build(&t->unigram, &t->vocab));
    t->unigram.lowest = lowest;
    t->unigram.floats = true;
    return QD_OK;
}

static qd_status build_merges(loading *l)
{
    float *scores = malloc((l->count + 1) * sizeof *scores);
    if (!scores)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %zu scores", l->tokenizer->name, l->count);
    for (size_t i = 0; i < l->count; i++)
        scores[i] = l->pieces[i].score;
    qd_status status = qd_sentencepiece_merges(l->tokenizer, scores);
    free(scores);
    return status;
}

/* For the text of single tokens; whole texts are decoded by qd_sentencepiece_decode(). */
static qd_status make_decoder(qd_tokenizer *t)
{
    qd_decoder *d = &t->decoder;
    d->steps[0] = (qd_decode_step){.kind = QD_DECODE_REPLACE, .pattern = strdup("\xe2\x96\x81"), .content = strdup(" ")};
    d->steps[1] = (qd_decode_step){.kind = QD_DECODE_BYTE_FALLBACK};
    d->steps[2] = (qd_decode_step){.kind = QD_DECODE_FUSE};
    d->count = 3;
    return d->steps[0].pattern && d->steps[0].content ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory for a decoder", t->name);
}

static qd_status build(loading *l, const char *text, size_t length)
{
    qd_tokenizer *t = l->tokenizer;
    QD_TRY(read_model(l, (message){t->name, (const uint8_t *)text, (const uint8_t *)text + length}));
    t->model = l->model == 1 ? QD_MODEL_UNIGRAM : QD_MODEL_BPE;
    t->fuse_unknown = true;
    QD_TRY(add_pieces(l));
    QD_TRY(l->model == 1 ? build_unigram(l) : build_merges(l));
    QD_TRY(make_decoder(t));
    t->source = malloc(length + 1); /* saved as it was read */
    if (!t->source)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a copy", t->name);
    memcpy(t->source, text, length);
    t->source_length = length;
    return QD_OK;
}

bool qd_sentencepiece_is(const char *text, size_t length)
{
    for (size_t i = 0; i < length && i < 256; i++)
        if ((uint8_t)text[i] < 9 || ((uint8_t)text[i] > 13 && (uint8_t)text[i] < 32))
            return true;
    return false;
}

qd_status qd_tokenizer_read_sentencepiece(qd_tokenizer *tokenizer, const char *text, size_t length)
{
    loading l = {.tokenizer = tokenizer, .model = 1};
    qd_sentencepiece *s = tokenizer->sentencepiece = calloc(1, sizeof *s);
    if (!s)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a tokenizer", tokenizer->name);
    s->dummy_prefix = s->remove_spaces = s->escape_spaces = true;
    snprintf(s->unknown_text, sizeof s->unknown_text, " \xe2\x81\x87 ");
    qd_status status = build(&l, text, length);
    free(l.pieces);
    return status;
}
