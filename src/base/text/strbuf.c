/* The growing string buffer, locale-independent numbers and UTF-8 validation. */
#define _GNU_SOURCE
#include "base/text/strbuf.h"

#include <locale.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Reserves space for `more` bytes and the terminating NUL. */
static bool reserve(qd_strbuf *buffer, size_t more)
{
    if (buffer->failed || more > SIZE_MAX / 4 - buffer->length) {
        buffer->failed = true;
        return false;
    }
    size_t needed = buffer->length + more + 1;
    if (needed <= buffer->capacity)
        return true;
    size_t capacity = buffer->capacity < 256 ? 256 : buffer->capacity;
    while (capacity < needed)
        capacity *= 2;
    char *data = realloc(buffer->data, capacity);
    if (!data) {
        buffer->failed = true;
        return false;
    }
    buffer->data = data;
    buffer->capacity = capacity;
    return true;
}

void qd_strbuf_append(qd_strbuf *buffer, const char *text, size_t length)
{
    if (!reserve(buffer, length))
        return;
    memcpy(buffer->data + buffer->length, text, length);
    buffer->length += length;
    buffer->data[buffer->length] = '\0';
}

char *qd_strbuf_extend(qd_strbuf *buffer, size_t length)
{
    if (!reserve(buffer, length))
        return NULL;
    char *text = buffer->data + buffer->length;
    buffer->length += length;
    buffer->data[buffer->length] = '\0';
    return text;
}

void qd_strbuf_append_utf8(qd_strbuf *buffer, const char *bytes, size_t length)
{
    for (size_t at = 0; at < length;) {
        size_t valid = qd_utf8_valid(bytes + at, length - at);
        qd_strbuf_append(buffer, bytes + at, valid);
        at += valid;
        if (at < length)
            qd_strbuf_append(buffer, "\xef\xbf\xbd", 3);
        at += at < length;
    }
}

void qd_strbuf_puts(qd_strbuf *buffer, const char *text)
{
    qd_strbuf_append(buffer, text, strlen(text));
}

void qd_strbuf_printf(qd_strbuf *buffer, const char *format, ...)
{
    va_list arguments, again;
    va_start(arguments, format);
    va_copy(again, arguments);
    int length = vsnprintf(NULL, 0, format, arguments);
    if (length < 0)
        buffer->failed = true;
    else if (reserve(buffer, (size_t)length)) {
        vsnprintf(buffer->data + buffer->length, (size_t)length + 1, format, again);
        buffer->length += (size_t)length;
    }
    va_end(again);
    va_end(arguments);
}

void qd_strbuf_pad(qd_strbuf *buffer, char character, int count)
{
    if (count <= 0 || !reserve(buffer, (size_t)count))
        return;
    memset(buffer->data + buffer->length, character, (size_t)count);
    buffer->length += (size_t)count;
    buffer->data[buffer->length] = '\0';
}

void qd_strbuf_clear(qd_strbuf *buffer)
{
    buffer->length = 0;
    if (buffer->data)
        buffer->data[0] = '\0';
}

void qd_strbuf_free(qd_strbuf *buffer)
{
    free(buffer->data);
    *buffer = (qd_strbuf){0};
}

qd_status qd_strbuf_take(qd_strbuf *buffer, char **text)
{
    *text = NULL;
    if (!reserve(buffer, 0)) {
        size_t length = buffer->length;
        qd_strbuf_free(buffer);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a text of more than %zu bytes", length);
    }
    buffer->data[buffer->length] = '\0';
    *text = buffer->data;
    *buffer = (qd_strbuf){0};
    return QD_OK;
}

/* The host program may have set a locale with a decimal comma. */
static void use_point(char *text)
{
    char *comma = strchr(text, ',');
    if (comma)
        *comma = '.';
}

void qd_double_17(double value, char *text)
{
    snprintf(text, QD_DOUBLE_TEXT, "%.17g", value);
    use_point(text);
}

void qd_double_shortest(double value, char *text)
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(text, QD_DOUBLE_TEXT, "%.*g", digits, value);
        use_point(text);
        if (qd_double_parse(text, NULL) == value)
            return;
    }
}

double qd_double_parse(const char *text, char **end)
{
    locale_t c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
    if (c_locale == (locale_t)0)
        return strtod(text, end);
    double value = strtod_l(text, end, c_locale);
    freelocale(c_locale);
    return value;
}

size_t qd_utf8_valid(const char *text, size_t length)
{
    const unsigned char *bytes = (const unsigned char *)text;
    size_t at = 0;
    while (at < length) {
        unsigned char first = bytes[at];
        size_t more = first < 0x80 ? 0 : first >= 0xc2 && first < 0xe0 ? 1 : (first & 0xf0) == 0xe0 ? 2 : 3;
        if (first >= 0xf5 || (first >= 0x80 && first < 0xc2) || length - at <= more)
            return at;
        for (size_t i = 1; i <= more; i++)
            if ((bytes[at + i] & 0xc0) != 0x80)
                return at;
        /* Overlong forms, surrogates, and code points above U+10FFFF. */
        unsigned char second = more > 0 ? bytes[at + 1] : 0;
        if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) || (first == 0xf0 && second < 0x90) ||
            (first == 0xf4 && second >= 0x90))
            return at;
        at += more + 1;
    }
    return at;
}
