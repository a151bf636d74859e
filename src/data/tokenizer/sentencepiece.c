/* Normalizes, merges and decodes as the library `sentencepiece` does. */
#include "data/tokenizer/sentencepiece.h"

#include "base/text/strbuf.h"
#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

#define SPACE "\xe2\x96\x81" /* ▁ */
#define REPLACEMENT "\xef\xbf\xbd"

/* Symbols that are not tokens: user-defined ones (FROZEN | id), characters (size of the vocabulary
 * + number), and characters that no token contains. */
#define FROZEN 0x80000000u
#define STRANGE 0x7fffffffu

void qd_sentencepiece_destroy(qd_sentencepiece *m)
{
    if (!m)
        return;
    qd_charsmap_destroy(m->map);
    qd_trie_free(&m->user);
    qd_vocab_free(&m->characters);
    free(m->kinds);
    free(m);
}

/* The longest user-defined symbol at the start of the text; 0: none. */
static size_t user_symbol(const qd_sentencepiece *m, const uint8_t *text, size_t length, int32_t *id)
{
    return m->has_user ? qd_trie_longest(&m->user, text, text + length, id) : 0;
}

/* Bytes of the valid character at the start of the text; 0: it is invalid. */
static size_t valid_character(const uint8_t *text, size_t length)
{
    size_t size = text[0] < 0x80 ? 1 : text[0] < 0xc2 ? 0 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : text[0] < 0xf5 ? 4 : 0;
    return size > 0 && size <= length && qd_utf8_valid((const char *)text, size) == size ? size : 0;
}

/* One step of normalization: what the start of the text becomes, and how much of it. */
static size_t normalize_prefix(const qd_sentencepiece *m, const uint8_t *text, size_t length, const char **out, size_t *out_length)
{
    int32_t id;
    size_t size = user_symbol(m, text, length, &id);
    *out = (const char *)text;
    *out_length = size;
    if (size > 0)
        return size;
    const char *mapped = m->map ? qd_charsmap_longest(m->map, text, length, &size) : NULL;
    if (mapped) {
        *out = mapped;
        *out_length = strlen(mapped);
        return size;
    }
    size = valid_character(text, length);
    *out_length = size;
    if (size > 0)
        return size;
    *out = REPLACEMENT;
    *out_length = strlen(REPLACEMENT);
    return 1;
}

static void add_space(const qd_sentencepiece *m, qd_strbuf *out)
{
    qd_strbuf_puts(out, m->escape_spaces ? SPACE : " ");
}

static bool ends_with(const qd_strbuf *text, size_t from, const char *end)
{
    size_t length = strlen(end);
    return text->length - from >= length && memcmp(text->data + text->length - length, end, length) == 0;
}

void qd_sentencepiece_normalize(const qd_sentencepiece *m, const uint8_t *text, size_t length, qd_strbuf *out)
{
    const char *part;
    size_t size, at = 0, from = out->length;
    while (m->remove_spaces && at < length) {
        size_t taken = normalize_prefix(m, text + at, length - at, &part, &size);
        if (size != 1 || part[0] != ' ')
            break;
        at += taken;
    }
    if (at == length)
        return;
    if (m->dummy_prefix && !m->suffix)
        add_space(m, out);
    bool after_space = m->remove_spaces;
    while (at < length && !out->failed) {
        at += normalize_prefix(m, text + at, length - at, &part, &size);
        for (; after_space && size > 0 && part[0] == ' '; part++)
            size--;
        for (size_t i = 0; i < size; i++) {
            if (part[i] == ' ')
                add_space(m, out);
            else
                qd_strbuf_append(out, part + i, 1);
        }
        if (size > 0)
            after_space = part[size - 1] == ' ';
        after_space = after_space && m->remove_spaces;
    }
    const char *space = m->escape_spaces ? SPACE : " ";
    while (m->remove_spaces && !out->failed && ends_with(out, from, space))
        out->length -= strlen(space);
    if (m->dummy_prefix && m->suffix)
        add_space(m, out);
}

/* Bytes of a character by its first byte. */
static size_t character_size(const uint8_t *text, size_t length)
{
    size_t size = text[0] < 0xc0 ? 1 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : 4;
    return size < length ? size : length;
}

static uint32_t symbol_of(const qd_tokenizer *t, const uint8_t *text, size_t length)
{
    uint32_t id = qd_vocab_find(&t->vocab, text, length, QD_TOKEN_BYTES);
    if (id != QD_NO_TOKEN)
        return id;
    id = qd_vocab_find(&t->sentencepiece->characters, text, length, QD_TOKEN_BYTES);
    return id != QD_NO_TOKEN ? t->vocab.size + id : STRANGE;
}

qd_status qd_sentencepiece_bpe(const qd_tokenizer *t, qd_bpe_work *work, const uint8_t *text, size_t length, const uint32_t **ids,
                               size_t *count)
{
    size_t symbols = 0, made = 0;
    bool unknown = false; /* the last token is the unknown one */
    QD_TRY(qd_bpe_reserve(work, length));
    for (size_t at = 0, size; at < length; at += size) {
        int32_t id;
        size = user_symbol(t->sentencepiece, text + at, length - at, &id);
        if (size > 0) {
            work->ids[symbols++] = FROZEN | (uint32_t)id;
            continue;
        }
        size = character_size(text + at, length - at);
        work->ids[symbols++] = symbol_of(t, text + at, size);
    }
    QD_TRY(qd_bpe_merge(&t->vocab, work, &symbols));
    uint32_t *out = work->next; /* free after merging; no token is shorter than a byte */
    for (size_t i = 0, at = 0, size; i < symbols; i++, at += size) {
        uint32_t symbol = work->ids[i], id = symbol & FROZEN ? symbol & ~FROZEN : symbol;
        if (id < t->vocab.size) {
            qd_vocab_bytes(&t->vocab, id, &size);
            out[made++] = id;
            unknown = false;
            continue;
        }
        size = character_size(text + at, length - at);
        for (size_t b = 0; b < size && t->byte_fallback; b++)
            out[made++] = t->byte_id[text[at + b]];
        if (!t->byte_fallback && !unknown)
            out[made++] = t->unknown;
        unknown = true;
    }
    *ids = out;
    *count = made;
    return QD_OK;
}

typedef struct scored {
    float score;
    uint32_t id;
} scored;

static int by_score(const void *a, const void *b)
{
    const scored *x = a, *y = b;
    return x->score != y->score ? (x->score > y->score ? -1 : 1) : x->id < y->id ? -1 : x->id > y->id;
}

/* Calls for each way to cut a token in two. Symbols of characters that are not tokens are created
 * in the first pass; the merges are counted there and added in the second. */
static qd_status cut_token(qd_tokenizer *t, uint32_t id, uint32_t rank, bool add, uint32_t *count)
{
    size_t length;
    const uint8_t *bytes = qd_vocab_bytes(&t->vocab, id, &length);
    size_t first = character_size(bytes, length), last = length;
    while (last > 0 && (bytes[--last] & 0xc0) == 0x80)
        ;
    for (size_t at = first; at < length; at += character_size(bytes + at, length - at)) {
        uint32_t left = symbol_of(t, bytes, at), right = symbol_of(t, bytes + at, length - at), old;
        qd_vocab *characters = &t->sentencepiece->characters;
        if (left == STRANGE && at == first && !add)
            QD_TRY(qd_vocab_add(characters, characters->size, bytes, at, QD_TOKEN_BYTES, &old));
        if (right == STRANGE && at == last && !add)
            QD_TRY(qd_vocab_add(characters, characters->size, bytes + at, length - at, QD_TOKEN_BYTES, &old));
        if ((left == STRANGE && at != first) || (right == STRANGE && at != last))
            continue;
        ++*count;
        if (add)
            qd_vocab_add_merge(&t->vocab, left, right, rank, id);
    }
    return QD_OK;
}

qd_status qd_sentencepiece_merges(qd_tokenizer *t, const float *scores)
{
    scored *list = malloc(((size_t)t->vocab.size + 1) * sizeof *list);
    uint32_t tokens = 0, count = 0;
    qd_status status = list ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory for its merges", t->name);
    for (uint32_t id = 0; list && id < t->vocab.size; id++)
        if (qd_vocab_kind(&t->vocab, id) == QD_TOKEN_BYTES)
            list[tokens++] = (scored){scores[id], id};
    if (list && tokens)
        qsort(list, tokens, sizeof *list, by_score);
    for (int add = 0; add < 2 && status == QD_OK; add++) {
        uint32_t rank = 0;
        if (add)
            status = qd_vocab_reserve_merges(&t->vocab, count);
        count = 0;
        for (uint32_t i = 0; i < tokens && status == QD_OK; i++) { /* equal scores share a rank: the leftmost pair is merged first */
            rank += i > 0 && list[i].score != list[i - 1].score;
            status = cut_token(t, list[i].id, rank, add, &count);
        }
    }
    free(list);
    return status;
}

/* Bytes that are not characters become U+FFFD, one by one. */
static void put_bytes(qd_strbuf *bytes, qd_strbuf *text)
{
    for (size_t at = 0; at < bytes->length;) {
        size_t size = valid_character((const uint8_t *)bytes->data + at, bytes->length - at);
        qd_strbuf_append(text, size > 0 ? bytes->data + at : REPLACEMENT, size > 0 ? size : strlen(REPLACEMENT));
        at += size > 0 ? size : 1;
    }
    bytes->length = 0;
}

static void put_piece(const uint8_t *piece, size_t length, qd_strbuf *text)
{
    const size_t mark = strlen(SPACE);
    for (size_t at = 0; at < length;) {
        bool space = length - at >= mark && memcmp(piece + at, SPACE, mark) == 0;
        qd_strbuf_append(text, space ? " " : (const char *)piece + at, 1);
        at += space ? mark : 1;
    }
}

qd_status qd_sentencepiece_decode(const qd_tokenizer *t, const int32_t *ids, size_t count, bool skip_special, qd_strbuf *text)
{
    const qd_sentencepiece *m = t->sentencepiece;
    const size_t mark = strlen(SPACE), from = text->length;
    bool first = true, seen = false; /* whether a space that was put before the text may still come, or has been dropped */
    qd_strbuf bytes = {0};
    for (size_t i = 0; i < count; i++) {
        size_t length;
        uint32_t id = (uint32_t)ids[i];
        const uint8_t *piece = qd_vocab_bytes(&t->vocab, id, &length);
        uint8_t kind = m->kinds[id];
        if (kind == QD_PIECE_BYTE) {
            for (int b = 0; b < 256; b++)
                if (t->byte_id[b] == id)
                    qd_strbuf_append(&bytes, &(char){(char)b}, 1);
            continue;
        }
        put_bytes(&bytes, text);
        if (seen || text->length > from)
            first = false;
        seen = false;
        if (kind == QD_PIECE_CONTROL) {
            if (!skip_special)
                put_piece(piece, length, text);
        } else if (kind == QD_PIECE_UNKNOWN) {
            qd_strbuf_puts(text, m->unknown_text);
        } else {
            bool cut = first && (m->dummy_prefix || m->remove_spaces) && length >= mark && memcmp(piece, SPACE, mark) == 0;
            seen = cut && !m->remove_spaces;
            put_piece(piece + (cut ? mark : 0), length - (cut ? mark : 0), text);
        }
    }
    put_bytes(&bytes, text);
    bool failed = bytes.failed || text->failed;
    qd_strbuf_free(&bytes);
    return failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the text of %zu tokens", count) : QD_OK;
}
