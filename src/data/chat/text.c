/* UTF-8 and the parts of Python's str that filters and methods share. */
#define _GNU_SOURCE /* memmem() */
#include "data/chat/chat_impl.h"

#include <ctype.h>
#include <string.h>

uint32_t qd_chat_code_point(const char *text, size_t left, size_t *bytes)
{
    const unsigned char *at = (const unsigned char *)text;
    size_t length = at[0] < 0x80 ? 1 : at[0] < 0xe0 ? 2 : at[0] < 0xf0 ? 3 : 4;
    if (length > left)
        length = 1;
    *bytes = length;
    switch (length) {
    case 2:
        return (uint32_t)(at[0] & 0x1f) << 6 | (at[1] & 0x3f);
    case 3:
        return (uint32_t)(at[0] & 0x0f) << 12 | (uint32_t)(at[1] & 0x3f) << 6 | (at[2] & 0x3f);
    case 4:
        return (uint32_t)(at[0] & 0x07) << 18 | (uint32_t)(at[1] & 0x3f) << 12 | (uint32_t)(at[2] & 0x3f) << 6 | (at[3] & 0x3f);
    default:
        return at[0];
    }
}

size_t qd_chat_put_utf8(uint32_t code, char *text)
{
    unsigned char *to = (unsigned char *)text;
    if (code < 0x80) {
        to[0] = (unsigned char)code;
        return 1;
    }
    if (code < 0x800) {
        to[0] = (unsigned char)(0xc0 | code >> 6);
        to[1] = (unsigned char)(0x80 | (code & 0x3f));
        return 2;
    }
    if (code < 0x10000) {
        to[0] = (unsigned char)(0xe0 | code >> 12);
        to[1] = (unsigned char)(0x80 | (code >> 6 & 0x3f));
        to[2] = (unsigned char)(0x80 | (code & 0x3f));
        return 3;
    }
    to[0] = (unsigned char)(0xf0 | code >> 18);
    to[1] = (unsigned char)(0x80 | (code >> 12 & 0x3f));
    to[2] = (unsigned char)(0x80 | (code >> 6 & 0x3f));
    to[3] = (unsigned char)(0x80 | (code & 0x3f));
    return 4;
}

bool qd_chat_is_space(uint32_t code)
{
    return code == ' ' || (code >= 9 && code <= 13) || (code >= 0x1c && code <= 0x1f) || code == 0x85 || code == 0xa0 || code == 0x1680 ||
           (code >= 0x2000 && code <= 0x200a) || code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

size_t qd_chat_space_length(const char *text, size_t length)
{
    size_t at = 0, bytes;
    while (at < length && qd_chat_is_space(qd_chat_code_point(text + at, length - at, &bytes)))
        at += bytes;
    return at;
}

/* Start of the character before `at`. */
static size_t before(const char *text, size_t at)
{
    do
        at--;
    while (at > 0 && ((unsigned char)text[at] & 0xc0) == 0x80);
    return at;
}

size_t qd_chat_without_space(const char *text, size_t length)
{
    while (length > 0) {
        size_t at = before(text, length), bytes;
        if (!qd_chat_is_space(qd_chat_code_point(text + at, length - at, &bytes)))
            break;
        length = at;
    }
    return length;
}

size_t qd_chat_text_length(const char *text, size_t length)
{
    size_t count = 0;
    for (size_t i = 0; i < length; i++)
        count += ((unsigned char)text[i] & 0xc0) != 0x80;
    return count;
}

size_t qd_chat_text_offset(const char *text, size_t length, size_t index)
{
    for (size_t i = 0; i < length; i++)
        if (((unsigned char)text[i] & 0xc0) != 0x80 && index-- == 0)
            return i;
    return length;
}

bool qd_chat_is_ascii(const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if ((unsigned char)text[i] >= 128)
            return false;
    return true;
}

const char *qd_chat_search(const char *text, size_t length, const char *part, size_t part_length)
{
    return memmem(text, length, part, part_length);
}

size_t qd_chat_line(const char *text, size_t length, size_t *all)
{
    size_t at = 0, bytes;
    for (; at < length; at += bytes) {
        uint32_t code = qd_chat_code_point(text + at, length - at, &bytes);
        if (code == '\r' && at + 1 < length && text[at + 1] == '\n')
            bytes = 2;
        if ((code >= 10 && code <= 13) || (code >= 0x1c && code <= 0x1e) || code == 0x85 || code == 0x2028 || code == 0x2029) {
            *all = at + bytes;
            return at;
        }
    }
    *all = at;
    return at;
}

static bool stripped(const char *text, size_t left, qd_chat_value characters, size_t *bytes)
{
    uint32_t code = qd_chat_code_point(text, left, bytes);
    if (characters.type == QD_CHAT_NONE)
        return qd_chat_is_space(code);
    return *bytes && memmem(characters.text, characters.length, text, *bytes);
}

qd_status qd_chat_strip(qd_chat_run *run, qd_chat_value string, qd_chat_value characters, bool left, bool right, qd_chat_value *value)
{
    size_t begin = 0, end = string.length, bytes;
    if (characters.type != QD_CHAT_NONE && characters.type != QD_CHAT_STRING)
        return qd_chat_bad_type(run, "strip()", characters);
    while (left && begin < end && stripped(string.text + begin, end - begin, characters, &bytes)) {
        begin += bytes;
        QD_TRY(qd_chat_spend(run, 1 + (characters.type == QD_CHAT_STRING ? characters.length / 16 : 0)));
    }
    while (right && begin < end) {
        size_t at = before(string.text, end);
        if (at < begin || !stripped(string.text + at, end - at, characters, &bytes))
            break;
        end = at;
        QD_TRY(qd_chat_spend(run, 1 + (characters.type == QD_CHAT_STRING ? characters.length / 16 : 0)));
    }
    *value = string;
    value->text += begin;
    value->length = (uint32_t)(end - begin);
    return QD_OK;
}

qd_status qd_chat_replace(qd_chat_run *run, qd_chat_value s, qd_chat_value from, qd_chat_value to, int64_t count, qd_chat_value *value)
{
    qd_strbuf out = {0};
    qd_status status = QD_OK;
    size_t at = 0, written = run->written;
    QD_TRY(qd_chat_spend(run, s.length / 16));
    for (; count != 0; count--) {
        QD_TRY_DONE(qd_chat_spend(run, 1));
        size_t next = at;
        if (from.length) {
            const char *found = memmem(s.text + at, s.length - at, from.text, from.length);
            if (!found)
                break;
            next = (size_t)(found - s.text);
            QD_TRY_DONE(qd_chat_write(run, &out, s.text + at, next - at));
            QD_TRY_DONE(qd_chat_write(run, &out, to.text, to.length));
            at = next + from.length;
        } else { /* before every character, and at the end */
            QD_TRY_DONE(qd_chat_write(run, &out, to.text, to.length));
            if (at == s.length)
                break;
            qd_chat_code_point(s.text + at, s.length - at, &next);
            QD_TRY_DONE(qd_chat_write(run, &out, s.text + at, next));
            at += next;
        }
    }
    QD_TRY_DONE(qd_chat_write(run, &out, s.text + at, s.length - at));
    run->written = written; /* it is a value, not output: its memory counts */
    return qd_chat_captured(run, &out, value);
done:
    qd_strbuf_free(&out);
    return status;
}

qd_status qd_chat_join(qd_chat_run *run, qd_chat_value between, qd_chat_value items, bool strict, qd_chat_value *value)
{
    qd_chat_value list, text;
    qd_strbuf out = {0};
    qd_status status = QD_OK;
    size_t written = run->written;
    QD_TRY(qd_chat_items(run, items, &list));
    for (size_t i = 0; i < list.sequence->count; i++) {
        qd_chat_value item = list.sequence->items[i];
        if (strict && item.type != QD_CHAT_STRING)
            QD_TRY_DONE(qd_chat_bad_type(run, "join()", item));
        if (i)
            QD_TRY_DONE(qd_chat_write(run, &out, between.text, between.length));
        QD_TRY_DONE(qd_chat_to_string(run, item, &text));
        QD_TRY_DONE(qd_chat_write(run, &out, text.text, text.length));
    }
    run->written = written;
    return qd_chat_captured(run, &out, value);
done:
    qd_strbuf_free(&out);
    return status;
}

qd_status qd_chat_change_case(qd_chat_run *run, qd_chat_value string, qd_chat_case to, qd_chat_value *value)
{
    if (!qd_chat_is_ascii(string.text, string.length))
        return QD_CHAT_FAIL(run, "upper and lower case of characters outside ASCII are not implemented");
    QD_TRY(qd_chat_copy(run, string.text, string.length, value));
    value->detail = string.detail;
    char *text = (char *)value->text;
    bool first = true; /* of a word */
    for (size_t i = 0; i < value->length; i++) {
        int c = (unsigned char)text[i];
        switch (to) {
        case QD_CHAT_UPPER:
            c = toupper(c);
            break;
        case QD_CHAT_LOWER:
            c = tolower(c);
            break;
        case QD_CHAT_CAPITALIZE:
            c = i ? tolower(c) : toupper(c);
            break;
        case QD_CHAT_TITLE: /* a word is a run of letters */
            text[i] = (char)(first ? toupper(c) : tolower(c));
            first = !isalpha(c);
            continue;
        case QD_CHAT_TITLE_FILTER: { /* a word starts after white space or an opening bracket */
            bool between = qd_chat_is_space((uint32_t)c) || (c && strchr("-({[<", c));
            text[i] = (char)(first ? toupper(c) : tolower(c));
            first = between;
            continue;
        }
        }
        text[i] = (char)c;
    }
    return QD_OK;
}
