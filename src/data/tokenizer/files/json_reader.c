/* The pull parser for JSON in memory. */
#include "data/tokenizer/files/json_reader.h"

#include "base/text/strbuf.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEPTH = 64 };

qd_status qd_json_reader_fail(const qd_json_reader *reader, const char *format, ...)
{
    int line = 1;
    const char *line_start = reader->start;
    for (const char *c = reader->start; c < reader->at; c++)
        if (*c == '\n') {
            line++;
            line_start = c + 1;
        }
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return QD_FAIL(QD_USAGE, "%s:%d:%zu: %s", reader->name, line, (size_t)(reader->at - line_start) + 1, message);
}

qd_status qd_json_reader_open(const char *name, const char *text, size_t length, qd_json_reader *reader)
{
    *reader = (qd_json_reader){.name = name, .start = text, .at = text, .end = text + length};
    size_t valid = qd_utf8_valid(text, length);
    if (valid < length) {
        reader->at = text + valid;
        return qd_json_reader_fail(reader, "the file is not UTF-8");
    }
    reader->scratch = malloc(length + 1);
    return reader->scratch ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
}

void qd_json_reader_close(qd_json_reader *reader)
{
    free(reader->scratch);
    reader->scratch = NULL;
}

char qd_json_reader_kind(qd_json_reader *reader)
{
    while (reader->at < reader->end &&
           (*reader->at == ' ' || *reader->at == '\t' || *reader->at == '\n' || *reader->at == '\r'))
        reader->at++;
    if (reader->at == reader->end)
        return 0;
    return *reader->at == '-' || (*reader->at >= '0' && *reader->at <= '9') ? '0' : *reader->at;
}

qd_status qd_json_reader_enter(qd_json_reader *reader, char open, const char *what)
{
    if (qd_json_reader_kind(reader) != open)
        return qd_json_reader_fail(reader, "%s must be %s", what, open == '{' ? "an object" : "a list");
    reader->at++;
    return QD_OK;
}

qd_status qd_json_reader_next(qd_json_reader *reader, bool *first, qd_json_text *key, bool *more)
{
    char close = key ? '}' : ']';
    char kind = qd_json_reader_kind(reader);
    *more = kind != close;
    if (kind == close) {
        reader->at++;
        return QD_OK;
    }
    if (!*first) {
        if (kind != ',')
            return qd_json_reader_fail(reader, "expected ',' or '%c'", close);
        reader->at++;
        if (qd_json_reader_kind(reader) == close)
            return qd_json_reader_fail(reader, "expected a value after ','");
    }
    *first = false;
    if (!key)
        return QD_OK;
    QD_TRY(qd_json_reader_string(reader, "a key", key));
    if (qd_json_reader_kind(reader) != ':')
        return qd_json_reader_fail(reader, "expected ':' after a key");
    reader->at++;
    return QD_OK;
}

/* Four hexadecimal digits after "\u". */
static bool read_unit(const char *at, const char *end, uint32_t *unit)
{
    *unit = 0;
    if (end - at < 4)
        return false;
    for (int i = 0; i < 4; i++) {
        char c = at[i];
        int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
        if (digit < 0)
            return false;
        *unit = *unit << 4 | (uint32_t)digit;
    }
    return true;
}

static char *write_utf8(char *out, uint32_t character)
{
    if (character < 0x80) {
        *out++ = (char)character;
    } else if (character < 0x800) {
        *out++ = (char)(0xc0 | character >> 6);
        *out++ = (char)(0x80 | (character & 0x3f));
    } else {
        if (character < 0x10000) {
            *out++ = (char)(0xe0 | character >> 12);
        } else {
            *out++ = (char)(0xf0 | character >> 18);
            *out++ = (char)(0x80 | (character >> 12 & 0x3f));
        }
        *out++ = (char)(0x80 | (character >> 6 & 0x3f));
        *out++ = (char)(0x80 | (character & 0x3f));
    }
    return out;
}

/* Decodes the escape whose '\\' is at reader->at and advances *out. The result is never longer than
 * the escape. */
static qd_status read_escape(qd_json_reader *reader, char **out)
{
    static const char letters[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    const char *at = reader->at + 1;
    const char *letter = at < reader->end && *at ? strchr(letters, *at) : NULL;
    if (letter) {
        *(*out)++ = values[letter - letters];
        reader->at = at + 1;
        return QD_OK;
    }
    uint32_t unit, low;
    if (at >= reader->end || *at != 'u' || !read_unit(at + 1, reader->end, &unit))
        return qd_json_reader_fail(reader, "unknown escape sequence");
    at += 5;
    if (unit >= 0xd800 && unit < 0xe000) {
        if (unit >= 0xdc00 || reader->end - at < 6 || at[0] != '\\' || at[1] != 'u' ||
            !read_unit(at + 2, reader->end, &low) || low < 0xdc00 || low >= 0xe000)
            return qd_json_reader_fail(reader, "unpaired surrogate");
        unit = 0x10000 + ((unit & 0x3ff) << 10) + (low & 0x3ff);
        at += 6;
    }
    *out = write_utf8(*out, unit);
    reader->at = at;
    return QD_OK;
}

qd_status qd_json_reader_string(qd_json_reader *reader, const char *what, qd_json_text *text)
{
    if (qd_json_reader_kind(reader) != '"')
        return qd_json_reader_fail(reader, "%s must be a string", what);
    const char *start = ++reader->at;
    char *out = NULL; /* set once there are escapes */
    for (;; reader->at++) {
        if (reader->at == reader->end)
            return qd_json_reader_fail(reader, "the file ends inside a string");
        unsigned char c = (unsigned char)*reader->at;
        if (c == '"')
            break;
        if (c < 0x20)
            return qd_json_reader_fail(reader, "a control character inside a string");
        if (c == '\\') {
            if (!out) {
                out = reader->scratch + (reader->at - start);
                memcpy(reader->scratch, start, (size_t)(reader->at - start));
            }
            QD_TRY(read_escape(reader, &out));
            reader->at--;
        } else if (out) {
            *out++ = (char)c;
        }
    }
    *text = out ? (qd_json_text){reader->scratch, (size_t)(out - reader->scratch)}
                : (qd_json_text){start, (size_t)(reader->at - start)};
    reader->at++;
    return QD_OK;
}

/* The end of the number at reader->at, and whether it is an integer; NULL if it is not a number. */
static const char *number_end(const qd_json_reader *reader, bool *integer)
{
    const char *at = reader->at, *end = reader->end;
    *integer = true;
#define DIGITS                                                                                                         \
    do {                                                                                                               \
        if (at == end || *at < '0' || *at > '9')                                                                       \
            return NULL;                                                                                               \
        while (at < end && *at >= '0' && *at <= '9')                                                                   \
            at++;                                                                                                      \
    } while (0)
    if (at < end && *at == '-')
        at++;
    if (at < end && *at == '0' && at + 1 < end && at[1] >= '0' && at[1] <= '9')
        return NULL;
    DIGITS;
    if (at < end && *at == '.') {
        *integer = false;
        at++;
        DIGITS;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        *integer = false;
        at++;
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        DIGITS;
    }
#undef DIGITS
    return at;
}

qd_status qd_json_reader_integer(qd_json_reader *reader, const char *what, int64_t least, int64_t most, int64_t *value)
{
    bool integer;
    const char *end = qd_json_reader_kind(reader) == '0' ? number_end(reader, &integer) : NULL;
    if (!end || !integer)
        return qd_json_reader_fail(reader, "%s must be an integer", what);
    bool negative = *reader->at == '-';
    int64_t number = 0;
    for (const char *at = reader->at + negative; at < end; at++) {
        number = number * 10 + (*at - '0');
        if (number > INT64_C(1) << 53)
            break;
    }
    number = negative ? -number : number;
    if (number < least || number > most)
        return qd_json_reader_fail(reader, "%s must be from %lld to %lld", what, (long long)least, (long long)most);
    *value = number;
    reader->at = end;
    return QD_OK;
}

/* `tokenizers` parses numbers with serde_json, which rounds twice: the digits as an integer, then
 * the quotient by a power of ten. Scores decide between equal sums of Unigram, so this does the
 * same. Digits beyond 64 bits are dropped. */
static double read_number(const char *at, const char *end)
{
    uint64_t digits = 0;
    int64_t exponent = 0;
    const bool negative = *at == '-';
    bool full = false, fraction = false;
    for (at += negative; at < end && *at != 'e' && *at != 'E'; at++) {
        if (*at == '.') {
            fraction = true;
            continue;
        }
        const uint64_t digit = (uint64_t)(*at - '0');
        full = full || digits > (UINT64_MAX - digit) / 10;
        if (!full)
            digits = digits * 10 + digit;
        exponent += full && !fraction ? 1 : !full && fraction ? -1 : 0;
    }
    if (at < end) {
        long long written = strtoll(at + 1, NULL, 10);
        exponent += written < -9999 ? -9999 : written > 9999 ? 9999 : written; /* 0 or infinity */
    }
    double value = (double)digits;
    for (; exponent < -308 && value != 0.0; exponent += 308)
        value /= 1e308;
    char power[32];
    snprintf(power, sizeof power, "1e%lld", (long long)(exponent < 0 ? -exponent : exponent));
    if (value != 0.0)
        value = exponent < 0 ? value / qd_double_parse(power, NULL) : value * qd_double_parse(power, NULL);
    return negative ? -value : value;
}

qd_status qd_json_reader_number(qd_json_reader *reader, const char *what, double *value)
{
    bool integer;
    const char *end = qd_json_reader_kind(reader) == '0' ? number_end(reader, &integer) : NULL;
    if (!end || end - reader->at > 64)
        return qd_json_reader_fail(reader, "%s must be a number of at most 64 characters", what);
    *value = read_number(reader->at, end);
    if (!isfinite(*value))
        return qd_json_reader_fail(reader, "%s is out of range", what);
    reader->at = end;
    return QD_OK;
}

static bool take_word(qd_json_reader *reader, const char *word)
{
    size_t length = strlen(word);
    if ((size_t)(reader->end - reader->at) < length || memcmp(reader->at, word, length) != 0)
        return false;
    reader->at += length;
    return true;
}

qd_status qd_json_reader_boolean(qd_json_reader *reader, const char *what, bool *value)
{
    char kind = qd_json_reader_kind(reader);
    *value = kind == 't';
    if ((kind == 't' && take_word(reader, "true")) || (kind == 'f' && take_word(reader, "false")))
        return QD_OK;
    return qd_json_reader_fail(reader, "%s must be true or false", what);
}

static qd_status skip_plain(qd_json_reader *reader, char kind)
{
    qd_json_text text;
    bool integer;
    switch (kind) {
    case '"':
        return qd_json_reader_string(reader, "a value", &text);
    case '0': {
        const char *end = number_end(reader, &integer);
        if (!end)
            break;
        reader->at = end;
        return QD_OK;
    }
    case 't':
    case 'f':
        return qd_json_reader_boolean(reader, "a value", &integer);
    case 'n':
        if (take_word(reader, "null"))
            return QD_OK;
        break;
    case 0:
        return qd_json_reader_fail(reader, "the file ends where a value is expected");
    default:
        break;
    }
    return qd_json_reader_fail(reader, "not a JSON value");
}

qd_status qd_json_reader_skip(qd_json_reader *reader)
{
    char open[MOST_DEPTH];
    int depth = 0;
    bool first = false, more;
    qd_json_text key;
    for (;;) {
        char kind = qd_json_reader_kind(reader);
        if (kind == '{' || kind == '[') {
            if (depth == MOST_DEPTH)
                return qd_json_reader_fail(reader, "nested deeper than %d", MOST_DEPTH);
            open[depth++] = kind;
            reader->at++;
            first = true;
        } else {
            QD_TRY(skip_plain(reader, kind));
        }
        do {
            if (depth == 0)
                return QD_OK;
            QD_TRY(qd_json_reader_next(reader, &first, open[depth - 1] == '{' ? &key : NULL, &more));
            if (!more)
                depth--;
            first = false;
        } while (!more);
    }
}

qd_status qd_json_reader_finish(qd_json_reader *reader)
{
    if (qd_json_reader_kind(reader) != 0)
        return qd_json_reader_fail(reader, "extra text after the end of the document");
    return QD_OK;
}

bool qd_json_text_is(qd_json_text text, const char *expected)
{
    return strlen(expected) == text.length && memcmp(text.data, expected, text.length) == 0;
}

qd_status qd_json_reader_members(qd_json_reader *reader, const char *what, qd_json_place *places, size_t count)
{
    QD_TRY(qd_json_reader_enter(reader, '{', what));
    for (size_t i = 0; i < count; i++)
        places[i].at = NULL;
    bool first = true, more;
    for (;;) {
        qd_json_text key;
        QD_TRY(qd_json_reader_next(reader, &first, &key, &more));
        if (!more)
            return QD_OK;
        for (size_t i = 0; i < count; i++) {
            if (!qd_json_text_is(key, places[i].key))
                continue;
            if (places[i].at)
                return qd_json_reader_fail(reader, "'%s' appears twice in %s", places[i].key, what);
            qd_json_reader_kind(reader);
            places[i].at = reader->at;
        }
        QD_TRY(qd_json_reader_skip(reader));
    }
}
