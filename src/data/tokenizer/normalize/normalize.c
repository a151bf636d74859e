/* Runs the steps of a normalizer. A step that changes nothing costs no copy. */
#define _GNU_SOURCE /* memmem */
#include "data/tokenizer/normalize/normalize_impl.h"

#include "base/text/strbuf.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/normalize/unicode_data.h"
#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_GROWTH = 64, FREE_GROWTH = 1 << 20 };

void qd_normalizer_free(qd_normalizer *normalizer)
{
    for (int i = 0; i < normalizer->count; i++) {
        qd_normal_step *step = &normalizer->steps[i];
        free(step->content);
        free(step->pattern);
        qd_regex_destroy(step->regex);
        qd_charsmap_destroy(step->map);
    }
    *normalizer = (qd_normalizer){.count = 0};
}

void qd_normal_work_free(qd_normal_work *work)
{
    qd_strbuf_free(&work->texts[0]);
    qd_strbuf_free(&work->texts[1]);
    free(work->segment);
    qd_regex_state_destroy(work->regex);
    *work = (qd_normal_work){.count = 0};
}

bool qd_normalizer_cuts(const qd_normalizer *normalizer)
{
    for (int i = 0; i < normalizer->count; i++)
        switch (normalizer->steps[i].kind) {
        case QD_NORMAL_NFC:
        case QD_NORMAL_NFD:
        case QD_NORMAL_NFKC:
        case QD_NORMAL_NFKD:
        case QD_NORMAL_LOWERCASE:
        case QD_NORMAL_STRIP_ACCENTS: break;
        default: return false;
        }
    return true;
}

/* What a step that looks at single characters does with one. */
typedef enum char_action { KEEP, DROP, CHANGE } char_action;

/* CHANGE: *count bytes of `out` replace the character. */
static char_action change_character(qd_normal_kind kind, uint32_t c, uint8_t out[8], size_t *count)
{
    const unsigned bits = c < 0x80 && kind != QD_NORMAL_CLEAN ? 0 : qd_properties(c);
    switch (kind) {
    case QD_NORMAL_LOWERCASE: {
        if (c == 0x130) {
            memcpy(out, "i\xcc\x87", *count = 3);
            return CHANGE;
        }
        uint32_t lower = qd_to_lower(c);
        *count = lower == c ? 0 : qd_utf8_write(lower, out);
        return lower == c ? KEEP : CHANGE;
    }
    case QD_NORMAL_STRIP_ACCENTS: return bits & QD_ACCENT ? DROP : KEEP;
    case QD_NORMAL_NONSPACING: return bits & QD_NONSPACING ? DROP : KEEP;
    case QD_NORMAL_CLEAN:
        if (c == 0 || bits & QD_UNCLEAN)
            return DROP;
        if (c == ' ' || !((c < 0x80 ? qd_unicode_ascii[c] : qd_unicode_class(c)) & QD_SPACE))
            return KEEP;
        out[0] = ' ';
        *count = 1;
        return CHANGE;
    case QD_NORMAL_CHINESE:
        if (!(bits & QD_CHINESE))
            return KEEP;
        out[0] = ' ';
        *count = 1 + qd_utf8_write(c, out + 1);
        out[(*count)++] = ' ';
        return CHANGE;
    default: return KEEP;
    }
}

static void map_characters(qd_normal_kind kind, const uint8_t *text, size_t length, size_t *zero, qd_strbuf *out, bool *changed)
{
    const uint8_t *end = text + length, *done = text;
    const size_t zero_in = *zero;
    *changed = false;
    for (const uint8_t *at = text; at < end;) {
        uint32_t c = *at;
        uint8_t bytes[8];
        size_t size = c < 0x80 ? 1 : qd_utf8_read(at, end, &c), count = 0;
        char_action action = change_character(kind, c, bytes, &count);
        at += size;
        if (action == KEEP)
            continue;
        *changed = true;
        size_t before = (size_t)(at - text) - size;
        qd_strbuf_append(out, (const char *)done, (size_t)(at - done) - size);
        done = at;
        if (action == CHANGE)
            qd_strbuf_append(out, (const char *)bytes, count);
        if (before < zero_in) /* bytes made from the first `zero` bytes */
            *zero = out->length;
    }
    if (*changed)
        qd_strbuf_append(out, (const char *)done, (size_t)(end - done));
}

static size_t space_at(const uint8_t *at, const uint8_t *end)
{
    size_t size;
    return at < end && (qd_class_at(at, end, &size) & QD_SPACE) ? size : 0;
}

static void strip(const qd_normal_step *step, const uint8_t **text, size_t *length, size_t *zero)
{
    const uint8_t *at = *text, *end = at + *length;
    for (size_t size; step->left && (size = space_at(at, end));)
        at += size;
    while (step->right && end > at) {
        const uint8_t *last = end - 1;
        while (last > at && end - last < 4 && (*last & 0xc0) == 0x80)
            last--;
        if (space_at(last, end) != (size_t)(end - last))
            break;
        end = last;
    }
    size_t removed = (size_t)(at - *text);
    *zero = removed < *zero ? *zero - removed : 0;
    *text = at;
    *length = (size_t)(end - at);
}

/* A file with many replacements could make a short text fill the memory. */
static qd_status check_growth(size_t length, size_t most)
{
    return length <= most ? QD_OK
                          : QD_FAIL(QD_USAGE, "the normalizer makes a text more than %d times as long; that is not supported",
                                    MOST_GROWTH);
}

typedef struct replacing {
    const qd_normal_step *step;
    const uint8_t *text;
    qd_strbuf *out;
    size_t zero_in, *zero, most;
    bool changed;
} replacing;

static qd_status put_replaced(void *context, size_t offset, size_t length, bool matched)
{
    replacing *r = context;
    if (matched) {
        r->changed = true;
        qd_strbuf_append(r->out, r->step->content, r->step->content_length);
        if (length > 0 && offset + length - 1 < r->zero_in)
            *r->zero = r->out->length;
        return check_growth(r->out->length, r->most);
    } else {
        size_t left = offset < r->zero_in ? r->zero_in - offset : 0;
        if (left)
            *r->zero = r->out->length + (left < length ? left : length);
        qd_strbuf_append(r->out, (const char *)r->text + offset, length);
    }
    return QD_OK;
}

static qd_status replace(const qd_normal_step *step, qd_normal_work *work, const uint8_t *text, size_t length, size_t *zero,
                         qd_strbuf *out, bool *changed, size_t most)
{
    replacing r = {.step = step, .text = text, .out = out, .zero_in = *zero, .zero = zero, .most = most};
    *zero = 0;
    if (step->regex) {
        if (!work->regex)
            QD_TRY(qd_regex_state_create(&work->regex));
        QD_TRY(qd_regex_split(step->regex, work->regex, text, length, put_replaced, &r));
    } else {
        size_t done = 0;
        for (const uint8_t *found; done < length && step->pattern_length > 0 &&
                                   (found = memmem(text + done, length - done, step->pattern, step->pattern_length));) {
            size_t at = (size_t)(found - text);
            if (at > done)
                QD_TRY(put_replaced(&r, done, at - done, false));
            QD_TRY(put_replaced(&r, at, step->pattern_length, true));
            done = at + step->pattern_length;
        }
        if (done < length)
            QD_TRY(put_replaced(&r, done, length - done, false));
    }
    *changed = r.changed;
    return QD_OK;
}

static qd_status run_step(const qd_normal_step *step, qd_normal_work *work, const uint8_t *text, size_t length, size_t *zero,
                          qd_strbuf *out, bool *changed, size_t most)
{
    *changed = true;
    switch (step->kind) {
    case QD_NORMAL_NFC:
    case QD_NORMAL_NFD:
    case QD_NORMAL_NFKC:
    case QD_NORMAL_NFKD: return qd_normal_form(step->kind, work, text, length, zero, out, changed);
    case QD_NORMAL_REPLACE: return replace(step, work, text, length, zero, out, changed, most);
    case QD_NORMAL_PREPEND:
        *changed = length > 0;
        qd_strbuf_append(out, step->content, step->content_length);
        qd_strbuf_append(out, (const char *)text, length);
        *zero = *zero > 0 ? *zero + step->content_length : 0;
        return QD_OK;
    case QD_NORMAL_BYTES: {
        size_t first = *zero < length ? *zero : length;
        qd_byte_level_write(text, first, out);
        *zero = out->length;
        qd_byte_level_write(text + first, length - first, out);
        return QD_OK;
    }
    case QD_NORMAL_PRECOMPILED: qd_charsmap_apply(step->map, text, length, zero, most, out); return QD_OK;
    default: map_characters(step->kind, text, length, zero, out, changed); return QD_OK;
    }
}

qd_status qd_normalize(const qd_normalizer *normalizer, qd_normal_work *work, const uint8_t *text, size_t length, size_t *zero,
                       const uint8_t **result, size_t *result_length)
{
    const size_t most = length * MOST_GROWTH + FREE_GROWTH;
    int next = 0; /* the buffer that does not hold the text */
    for (int i = 0; i < normalizer->count; i++) {
        const qd_normal_step *step = &normalizer->steps[i];
        if (step->kind == QD_NORMAL_STRIP) {
            strip(step, &text, &length, zero);
            continue;
        }
        qd_strbuf *out = &work->texts[next];
        bool changed;
        qd_strbuf_clear(out);
        QD_TRY(run_step(step, work, text, length, zero, out, &changed, most));
        QD_TRY(check_growth(out->length, most));
        if (out->failed)
            return QD_FAIL(QD_NO_MEMORY, "no memory to normalize %zu bytes", length);
        if (!changed)
            continue;
        text = (const uint8_t *)(out->data ? out->data : "");
        length = out->length;
        next = 1 - next;
    }
    *result = text;
    *result_length = length;
    return QD_OK;
}
