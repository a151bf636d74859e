/* The normal forms NFC, NFD, NFKC and NFKD, and lower case. Text that a form leaves alone is found
 * by one table lookup per character and copied in runs; the rest is handled in segments that start
 * at a character which cannot combine with what precedes it. */
#include "data/tokenizer/normalize/normalize_impl.h"

#include "data/tokenizer/normalize/unicode_data.h"
#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { S_BASE = 0xac00, L_BASE = 0x1100, V_BASE = 0x1161, T_BASE = 0x11a7, L_COUNT = 19, V_COUNT = 21, T_COUNT = 28 };
enum { S_COUNT = L_COUNT * V_COUNT * T_COUNT, FEW = 24 };

size_t qd_utf8_write(uint32_t c, uint8_t out[4])
{
    if (c < 0x80) {
        out[0] = (uint8_t)c;
        return 1;
    }
    if (c < 0x800) {
        out[0] = (uint8_t)(0xc0 | c >> 6);
        out[1] = (uint8_t)(0x80 | (c & 0x3f));
        return 2;
    }
    if (c < 0x10000) {
        out[0] = (uint8_t)(0xe0 | c >> 12);
        out[1] = (uint8_t)(0x80 | (c >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (c & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | c >> 18);
    out[1] = (uint8_t)(0x80 | (c >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (c >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (c & 0x3f));
    return 4;
}

uint32_t qd_to_lower(uint32_t c)
{
    if (c < 0x80)
        return c >= 'A' && c <= 'Z' ? c + 32 : c;
    uint32_t low = 0, high = qd_lower_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        const qd_lower_run *run = &qd_lower_runs[middle];
        if (c > run->last)
            low = middle + 1;
        else if (c < run->first)
            high = middle;
        else
            return (c - run->first) % run->step ? c : (uint32_t)((int32_t)c + run->delta);
    }
    return c;
}

static unsigned combining_class(uint32_t c)
{
    uint32_t low = 0, high = qd_combining_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2, first = (uint32_t)(qd_combining_runs[middle] >> 32);
        if (c < first)
            high = middle;
        else if (c - first > (qd_combining_runs[middle] >> 8 & 0xffffff))
            low = middle + 1;
        else
            return qd_combining_runs[middle] & 0xff;
    }
    return 0;
}

/* NULL: the character has no entry. */
static const uint32_t *look_up(const uint64_t *keys, uint32_t count, const uint32_t *pool, uint32_t c, size_t *length)
{
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = (low + high) / 2, key = (uint32_t)(keys[middle] >> 20);
        if (key == c) {
            *length = keys[middle] & 31;
            return pool + (keys[middle] >> 5 & 0x7fff);
        }
        if (key < c)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* 0: the two do not compose. */
static uint32_t compose(uint32_t a, uint32_t b)
{
    if (a - L_BASE < L_COUNT && b - V_BASE < V_COUNT)
        return S_BASE + ((a - L_BASE) * V_COUNT + (b - V_BASE)) * T_COUNT;
    if (a - S_BASE < S_COUNT && (a - S_BASE) % T_COUNT == 0 && b - (T_BASE + 1) < T_COUNT - 1)
        return a + (b - T_BASE);
    const uint64_t wanted = (uint64_t)a << 21 | b;
    uint32_t low = 0, high = qd_compose_count;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        uint64_t key = qd_compose_pairs[middle] >> 21;
        if (key == wanted)
            return qd_compose_pairs[middle] & 0x1fffff;
        if (key < wanted)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

/* A character of a segment, with its combining class in the upper bits. */
#define CLASS_OF(item) ((item) >> 24)
#define CHARACTER(item) ((item) & 0xffffff)

static qd_status push(qd_normal_work *work, uint32_t c)
{
    if (work->count == work->capacity) {
        size_t capacity = work->capacity ? 2 * work->capacity : 64;
        uint32_t *larger = realloc(work->segment, capacity * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory to normalize a text");
        work->segment = larger;
        work->capacity = capacity;
    }
    work->segment[work->count++] = c | combining_class(c) << 24;
    return QD_OK;
}

static qd_status push_decomposed(qd_normal_work *work, uint32_t c, bool compatible)
{
    if (c - S_BASE < S_COUNT) {
        uint32_t s = c - S_BASE;
        QD_TRY(push(work, L_BASE + s / (V_COUNT * T_COUNT)));
        QD_TRY(push(work, V_BASE + s / T_COUNT % V_COUNT));
        return s % T_COUNT ? push(work, T_BASE + s % T_COUNT) : QD_OK;
    }
    size_t length = 0;
    const uint32_t *parts =
        compatible ? look_up(qd_compatible_keys, qd_compatible_count, qd_compatible_pool, c, &length) : NULL;
    if (!parts)
        parts = look_up(qd_canonical_keys, qd_canonical_count, qd_canonical_pool, c, &length);
    if (!parts)
        return push(work, c);
    for (size_t i = 0; i < length; i++)
        QD_TRY(push(work, parts[i]));
    return QD_OK;
}

/* Sorts by class, stably: by insertion for few marks, by counting for many. */
static qd_status order_marks(uint32_t *marks, size_t count)
{
    if (count <= FEW) {
        for (size_t i = 1; i < count; i++) {
            uint32_t item = marks[i];
            size_t at = i;
            for (; at > 0 && CLASS_OF(marks[at - 1]) > CLASS_OF(item); at--)
                marks[at] = marks[at - 1];
            marks[at] = item;
        }
        return QD_OK;
    }
    size_t place[257] = {0};
    uint32_t *sorted = malloc(count * sizeof *sorted);
    if (!sorted)
        return QD_FAIL(QD_NO_MEMORY, "no memory to normalize a text");
    for (size_t i = 0; i < count; i++)
        place[CLASS_OF(marks[i]) + 1]++;
    for (int i = 1; i < 257; i++)
        place[i] += place[i - 1];
    for (size_t i = 0; i < count; i++)
        sorted[place[CLASS_OF(marks[i])]++] = marks[i];
    memcpy(marks, sorted, count * sizeof *marks);
    free(sorted);
    return QD_OK;
}

static void compose_segment(qd_normal_work *work)
{
    uint32_t *items = work->segment;
    size_t kept = 0, starter = SIZE_MAX;
    unsigned last = 0; /* class of the last item kept behind the starter */
    for (size_t i = 0; i < work->count; i++) {
        uint32_t item = items[i], made;
        unsigned class = CLASS_OF(item);
        bool adjacent = starter != SIZE_MAX && kept == starter + 1;
        if (starter != SIZE_MAX && (adjacent || (last < class && last != 0)) &&
            (made = compose(CHARACTER(items[starter]), CHARACTER(item)))) {
            items[starter] = made; /* a starter */
            continue;
        }
        if (class == 0)
            starter = kept;
        last = class;
        items[kept++] = item;
    }
    work->count = kept;
}

static qd_status flush(qd_normal_work *work, bool composed, qd_strbuf *out)
{
    for (size_t i = 0; i < work->count;) {
        size_t end = i;
        while (end < work->count && CLASS_OF(work->segment[end]) != 0)
            end++;
        if (end > i + 1)
            QD_TRY(order_marks(work->segment + i, end - i));
        i = end > i ? end : i + 1;
    }
    if (composed)
        compose_segment(work);
    for (size_t i = 0; i < work->count; i++) {
        uint8_t bytes[4];
        qd_strbuf_append(out, (const char *)bytes, qd_utf8_write(CHARACTER(work->segment[i]), bytes));
    }
    work->count = 0;
    return QD_OK;
}

static unsigned form_bit(qd_normal_kind kind)
{
    return kind == QD_NORMAL_NFC ? QD_NFC_CHANGES : kind == QD_NORMAL_NFD ? QD_NFD_CHANGES
         : kind == QD_NORMAL_NFKC ? QD_NFKC_CHANGES : QD_NFKD_CHANGES;
}

/* The first character that the form may change, or the end. *starter: the start of the character
 * before it, which may combine with it. */
static const uint8_t *next_change(const uint8_t *at, const uint8_t *end, unsigned bit, const uint8_t **starter)
{
    *starter = at;
    while (at < end) {
        if (*at < 0x80) { /* ASCII never changes */
            *starter = at++;
            continue;
        }
        uint32_t c;
        size_t size = qd_utf8_read(at, end, &c);
        if (qd_properties(c) & bit)
            return at;
        *starter = at;
        at += size;
    }
    return end;
}

qd_status qd_normal_form(qd_normal_kind kind, qd_normal_work *work, const uint8_t *text, size_t length, size_t *zero,
                         qd_strbuf *out, bool *changed)
{
    const bool composed = kind == QD_NORMAL_NFC || kind == QD_NORMAL_NFKC;
    const bool compatible = kind == QD_NORMAL_NFKC || kind == QD_NORMAL_NFKD;
    const unsigned bit = form_bit(kind);
    const uint8_t *at = text, *end = text + length, *starter, *change = next_change(text, end, bit, &starter);
    const size_t zero_in = *zero;
    *changed = change < end;
    if (!*changed)
        return QD_OK;
    size_t zero_out = zero_in;
    while (change < end) {
        qd_strbuf_append(out, (const char *)at, (size_t)(starter - at));
        /* The segment: the character that may combine, and all that follow up to the next one that
         * cannot change. An invalid part of the text is such a character, copied as it is. */
        size_t segment_from = out->length;
        at = starter;
        if (starter < change) {
            uint32_t c = *starter;
            if (c >= 0x80 && qd_utf8_read(starter, end, &c) && c == 0xfffd) {
                qd_strbuf_append(out, (const char *)starter, (size_t)(change - starter));
            } else {
                QD_TRY(push_decomposed(work, c, compatible)); /* é before a dot below: the dot comes first */
            }
            at = change;
        }
        const uint8_t *segment_start = starter;
        while (at < end) {
            uint32_t c = *at;
            size_t size = c < 0x80 ? 1 : qd_utf8_read(at, end, &c);
            if (!(qd_properties(c) & bit))
                break;
            QD_TRY(push_decomposed(work, c, compatible));
            at += size;
        }
        QD_TRY(flush(work, composed, out));
        if (segment_start == text && zero_in > 0)
            zero_out = out->length - segment_from; /* all of it comes from the first characters */
        change = next_change(at, end, bit, &starter);
        if (change == end)
            starter = end;
    }
    qd_strbuf_append(out, (const char *)at, (size_t)(end - at));
    *zero = zero_in > 0 ? zero_out : 0;
    return QD_OK;
}
