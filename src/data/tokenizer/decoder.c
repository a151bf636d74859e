/* Runs the steps of a decoder on a list of texts, each into a new list. */
#define _GNU_SOURCE /* memmem */
#include "data/tokenizer/decoder.h"

#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/split/unicode.h"

#include "base/text/strbuf.h"

#include <stdlib.h>
#include <string.h>

/* A file with many replacements could make a few tokens fill the memory. */
enum { MOST_GROWTH = 64, FREE_GROWTH = 1 << 20 };

void qd_decoder_free(qd_decoder *decoder)
{
    for (int i = 0; i < decoder->count; i++) {
        free(decoder->steps[i].content);
        free(decoder->steps[i].pattern);
        qd_regex_destroy(decoder->steps[i].regex);
    }
    *decoder = (qd_decoder){.count = 0};
}

void qd_texts_free(qd_texts *texts)
{
    qd_strbuf_free(&texts->bytes);
    free(texts->ends);
    *texts = (qd_texts){.count = 0};
}

/* Ends the text that has been appended to texts->bytes. */
static qd_status end_text(qd_texts *texts)
{
    if (texts->count == texts->capacity) {
        size_t capacity = texts->capacity ? 2 * texts->capacity : 64;
        size_t *ends = realloc(texts->ends, capacity * sizeof *ends);
        if (!ends)
            return QD_FAIL(QD_NO_MEMORY, "no memory to decode %zu tokens", capacity);
        texts->ends = ends;
        texts->capacity = capacity;
    }
    texts->ends[texts->count++] = texts->bytes.length;
    return QD_OK;
}

qd_status qd_texts_add(qd_texts *texts, const void *bytes, size_t length)
{
    qd_strbuf_append(&texts->bytes, bytes, length);
    return end_text(texts);
}

static const char *text_at(const qd_texts *texts, size_t index, size_t *length)
{
    size_t start = index ? texts->ends[index - 1] : 0;
    *length = texts->ends[index] - start;
    return texts->bytes.data ? texts->bytes.data + start : "";
}

/* The byte of "<0x0A>"; -1: another token. */
static int fallback_byte(const char *text, size_t length)
{
    if (length != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>')
        return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        char c = text[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static qd_status end_bytes(qd_texts *to, qd_strbuf *bytes)
{
    if (bytes->length == 0)
        return QD_OK;
    if (qd_utf8_valid(bytes->data, bytes->length) == bytes->length) {
        QD_TRY(qd_texts_add(to, bytes->data, bytes->length));
    } else {
        for (size_t i = 0; i < bytes->length; i++)
            QD_TRY(qd_texts_add(to, "\xef\xbf\xbd", 3));
    }
    qd_strbuf_clear(bytes);
    return QD_OK;
}

static qd_status byte_fallback(const qd_texts *from, qd_texts *to)
{
    qd_strbuf bytes = {0};
    qd_status status = QD_OK;
    for (size_t i = 0; i < from->count && status == QD_OK; i++) {
        size_t length;
        const char *text = text_at(from, i, &length);
        int byte = fallback_byte(text, length);
        if (byte >= 0) {
            qd_strbuf_append(&bytes, &(char){(char)byte}, 1);
            continue;
        }
        status = end_bytes(to, &bytes);
        if (status == QD_OK)
            status = qd_texts_add(to, text, length);
    }
    if (status == QD_OK)
        status = end_bytes(to, &bytes);
    if (status == QD_OK && bytes.failed)
        status = QD_FAIL(QD_NO_MEMORY, "no memory to decode");
    qd_strbuf_free(&bytes);
    return status;
}

/* The bytes of one token; a token with other characters than the table's stays as it is. */
static void put_bytes(const char *text, size_t length, qd_strbuf *out)
{
    const uint8_t *at = (const uint8_t *)text, *end = at + length;
    for (const uint8_t *place = at; place < end;) {
        uint32_t character = *place;
        place += character < 0x80 ? 1 : qd_utf8_read(place, end, &character);
        if (qd_character_to_byte(character) < 0) {
            qd_strbuf_append(out, text, length);
            return;
        }
    }
    while (at < end) {
        uint32_t character = *at;
        at += character < 0x80 ? 1 : qd_utf8_read(at, end, &character);
        qd_strbuf_append(out, &(char){(char)qd_character_to_byte(character)}, 1);
    }
}

typedef struct replacing {
    const qd_decode_step *step;
    const char *text;
    qd_strbuf *out;
    size_t most;
} replacing;

static qd_status check_growth(size_t length, size_t most)
{
    return length <= most ? QD_OK
                          : QD_FAIL(QD_USAGE, "the decoder makes tokens more than %d times as long; that is not supported", MOST_GROWTH);
}

static qd_status put_replaced(void *context, size_t offset, size_t length, bool matched)
{
    const replacing *r = context;
    if (matched)
        qd_strbuf_puts(r->out, r->step->content);
    else
        qd_strbuf_append(r->out, r->text + offset, length);
    return check_growth(r->out->length, r->most);
}

/* Replaces all `pattern` of the text. */
static void replace_all(const char *text, size_t length, const char *pattern, const char *by, size_t most, qd_strbuf *out)
{
    const char *end = text + length;
    size_t size = strlen(pattern);
    for (const char *found; size > 0 && out->length <= most && (found = memmem(text, (size_t)(end - text), pattern, size));
         text = found + size) {
        qd_strbuf_append(out, text, (size_t)(found - text));
        qd_strbuf_puts(out, by);
    }
    qd_strbuf_append(out, text, (size_t)(end - text));
}

static qd_status replace(const qd_decode_step *step, const char *text, size_t length, size_t most, qd_strbuf *out)
{
    if (!step->regex) {
        replace_all(text, length, step->pattern, step->content, most, out);
        return QD_OK;
    }
    qd_regex_state *state;
    replacing r = {step, text, out, most};
    QD_TRY(qd_regex_state_create(&state));
    qd_status status = qd_regex_split(step->regex, state, (const uint8_t *)text, length, put_replaced, &r);
    qd_regex_state_destroy(state);
    return status;
}

static void strip(const qd_decode_step *step, const char *text, size_t length, qd_strbuf *out)
{
    size_t size = strlen(step->content);
    for (int64_t i = 0; i < step->start && length >= size && memcmp(text, step->content, size) == 0; i++) {
        text += size;
        length -= size;
    }
    for (int64_t i = 0; i < step->stop && length >= size && memcmp(text + length - size, step->content, size) == 0; i++)
        length -= size;
    qd_strbuf_append(out, text, length);
}

/* The spaces that WordPiece's cleanup removes, one after the other. */
static void clean_up(const char *text, size_t length, qd_strbuf *out)
{
    static const char *const pairs[][2] = {{" .", "."}, {" ?", "?"}, {" !", "!"}, {" ,", ","}, {" ' ", "'"}, {" n't", "n't"},
                                           {" 'm", "'m"}, {" do not", " don't"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
    qd_strbuf both[2] = {0};
    int now = 0;
    qd_strbuf_append(&both[0], text, length);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++) {
        qd_strbuf_clear(&both[1 - now]);
        replace_all(both[now].data ? both[now].data : "", both[now].length, pairs[i][0], pairs[i][1], SIZE_MAX, &both[1 - now]);
        now = 1 - now;
    }
    qd_strbuf_append(out, both[now].data ? both[now].data : "", both[now].length);
    out->failed = out->failed || both[0].failed || both[1].failed;
    qd_strbuf_free(&both[0]);
    qd_strbuf_free(&both[1]);
}

static void word_piece(const qd_decode_step *step, const char *text, size_t length, bool first, qd_strbuf *out)
{
    size_t prefix = strlen(step->content);
    qd_strbuf joined = {0};
    if (!first && length >= prefix && memcmp(text, step->content, prefix) == 0) {
        text += prefix;
        length -= prefix;
    } else if (!first) {
        qd_strbuf_puts(&joined, " ");
    }
    qd_strbuf_append(&joined, text, length);
    if (step->flag)
        clean_up(joined.data ? joined.data : "", joined.length, out);
    else
        qd_strbuf_append(out, joined.data ? joined.data : "", joined.length);
    out->failed = out->failed || joined.failed;
    qd_strbuf_free(&joined);
}

/* One token through a step that treats tokens separately. */
static qd_status one_text(const qd_decode_step *step, const char *text, size_t length, bool first, bool last, size_t most,
                          qd_strbuf *out)
{
    switch (step->kind) {
    case QD_DECODE_METASPACE:
        replace_all(text, length, step->content, first && !step->flag ? "" : " ", most, out);
        return QD_OK;
    case QD_DECODE_REPLACE: return replace(step, text, length, most, out);
    case QD_DECODE_STRIP: strip(step, text, length, out); return QD_OK;
    case QD_DECODE_WORDPIECE: word_piece(step, text, length, first, out); return QD_OK;
    case QD_DECODE_BPE: replace_all(text, length, step->content, last ? "" : " ", most, out); return QD_OK;
    case QD_DECODE_BYTES: put_bytes(text, length, out); return QD_OK;
    default: qd_strbuf_append(out, text, length); return QD_OK;
    }
}

static qd_status run_step(const qd_decode_step *step, const qd_texts *from, size_t most, qd_texts *to)
{
    if (step->kind == QD_DECODE_BYTE_FALLBACK)
        return byte_fallback(from, to);
    const bool join = step->kind == QD_DECODE_FUSE || step->kind == QD_DECODE_BYTES;
    for (size_t i = 0; i < from->count; i++) {
        size_t length;
        const char *text = text_at(from, i, &length);
        QD_TRY(one_text(step, text, length, i == 0, i + 1 == from->count, most, &to->bytes));
        QD_TRY(check_growth(to->bytes.length, most));
        if (!join)
            QD_TRY(end_text(to));
    }
    return join ? end_text(to) : QD_OK;
}

qd_status qd_decoder_run(const qd_decoder *decoder, qd_texts *texts, qd_strbuf *out)
{
    const size_t most = texts->bytes.length * MOST_GROWTH + FREE_GROWTH;
    qd_texts other = {0};
    qd_status status = QD_OK;
    for (int i = 0; i < decoder->count && status == QD_OK; i++) {
        qd_texts swap;
        qd_strbuf_clear(&other.bytes);
        other.count = 0;
        status = run_step(&decoder->steps[i], texts, most, &other);
        swap = *texts;
        *texts = other;
        other = swap;
    }
    for (size_t i = 0; i < texts->count && status == QD_OK; i++) {
        size_t length;
        const char *text = text_at(texts, i, &length);
        if (decoder->joined && i > 0)
            qd_strbuf_puts(out, " ");
        qd_strbuf_append(out, text, length);
    }
    if (status == QD_OK && (out->failed || texts->bytes.failed || other.bytes.failed))
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the text of %zu tokens", texts->count);
    qd_texts_free(&other);
    return status;
}

qd_status qd_decoder_surface(const qd_decoder *decoder, const void *token, size_t length, qd_strbuf *out)
{
    const size_t most = length * MOST_GROWTH + 4096;
    qd_strbuf both[2] = {0};
    qd_status status = QD_OK;
    int now = 0;
    if (decoder->joined)
        qd_strbuf_puts(&both[0], " ");
    qd_strbuf_append(&both[0], token, length);
    for (int i = 0; i < decoder->count && status == QD_OK && decoder->steps[i].kind != QD_DECODE_FUSE; i++) {
        const char *text = both[now].data ? both[now].data : "";
        int byte = decoder->steps[i].kind == QD_DECODE_BYTE_FALLBACK ? fallback_byte(text, both[now].length) : -1;
        qd_strbuf_clear(&both[1 - now]);
        if (byte >= 0)
            qd_strbuf_append(&both[1 - now], &(char){(char)byte}, 1);
        else
            status = one_text(&decoder->steps[i], text, both[now].length, false, false, most, &both[1 - now]);
        if (status == QD_OK)
            status = check_growth(both[1 - now].length, most);
        now = 1 - now;
        if (decoder->steps[i].kind == QD_DECODE_BYTES || byte >= 0)
            break; /* what follows sees the joined text */
    }
    qd_strbuf_append(out, both[now].data ? both[now].data : "", both[now].length);
    if (status == QD_OK && (out->failed || both[0].failed || both[1].failed))
        status = QD_FAIL(QD_NO_MEMORY, "no memory to decode the tokens");
    qd_strbuf_free(&both[0]);
    qd_strbuf_free(&both[1]);
    return status;
}
