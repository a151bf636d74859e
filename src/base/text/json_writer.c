/* Writes JSON into a string buffer: commas, quoting, and numbers that read back exactly. */
#include "base/text/json_writer.h"

#include "base/text/strbuf.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

qd_json_writer qd_json_writer_on(qd_strbuf *out)
{
    return (qd_json_writer){.out = out};
}

static bool needs_escape(unsigned char byte)
{
    return byte < 0x20 || byte == 0x7f || byte == '"' || byte == '\\';
}

static void put_quoted(qd_strbuf *out, const char *text, size_t length)
{
    static const char letters[] = "btn?fr"; /* for \b to \r; \v has none */
    size_t at = 0;
    qd_strbuf_puts(out, "\"");
    while (at < length) {
        size_t end = at + qd_utf8_valid(text + at, length - at);
        for (; at < end; at++) {
            size_t plain = at;
            while (plain < end && !needs_escape((unsigned char)text[plain]))
                plain++;
            qd_strbuf_append(out, text + at, plain - at);
            if ((at = plain) == end)
                break;
            unsigned char byte = (unsigned char)text[at];
            if (byte == '"' || byte == '\\')
                qd_strbuf_printf(out, "\\%c", byte);
            else if (byte >= '\b' && byte <= '\r' && byte != '\v')
                qd_strbuf_printf(out, "\\%c", letters[byte - '\b']);
            else
                qd_strbuf_printf(out, "\\u%04x", byte);
        }
        if (at < length) {
            qd_strbuf_puts(out, "\xef\xbf\xbd");
            at++;
        }
    }
    qd_strbuf_puts(out, "\"");
}

/* Writes the comma and the key before a value. */
static void before_value(qd_json_writer *writer, const char *key)
{
    bool in_object = writer->depth > 0 && writer->closing[writer->depth] == '}';
    assert(in_object == (key != NULL) && "keys belong in objects, and only there");
    (void)in_object;
    if (writer->started[writer->depth])
        qd_strbuf_puts(writer->out, ",");
    writer->started[writer->depth] = true;
    if (key) {
        put_quoted(writer->out, key, strlen(key));
        qd_strbuf_puts(writer->out, ":");
    }
}

static void begin(qd_json_writer *writer, const char *key, const char *open, char close)
{
    assert(writer->depth < QD_JSON_MOST_DEPTH);
    before_value(writer, key);
    qd_strbuf_puts(writer->out, open);
    writer->depth++;
    writer->started[writer->depth] = false;
    writer->closing[writer->depth] = close;
}

void qd_json_object_begin(qd_json_writer *writer, const char *key)
{
    begin(writer, key, "{", '}');
}

void qd_json_list_begin(qd_json_writer *writer, const char *key)
{
    begin(writer, key, "[", ']');
}

void qd_json_end(qd_json_writer *writer)
{
    assert(writer->depth > 0);
    qd_strbuf_append(writer->out, &writer->closing[writer->depth], 1);
    writer->depth--;
}

void qd_json_put_string(qd_json_writer *writer, const char *key, const char *value)
{
    if (value)
        qd_json_put_bytes(writer, key, value, strlen(value));
    else
        qd_json_put_null(writer, key);
}

void qd_json_put_bytes(qd_json_writer *writer, const char *key, const char *bytes, size_t length)
{
    before_value(writer, key);
    put_quoted(writer->out, bytes, length);
}

char *qd_json_put_plain(qd_json_writer *writer, const char *key, size_t length)
{
    before_value(writer, key);
    qd_strbuf_puts(writer->out, "\"");
    size_t at = writer->out->length;
    char *text = qd_strbuf_extend(writer->out, length);
    qd_strbuf_puts(writer->out, "\"");
    return text && !writer->out->failed ? writer->out->data + at : NULL;
}

void qd_json_put_int(qd_json_writer *writer, const char *key, int64_t value)
{
    before_value(writer, key);
    qd_strbuf_printf(writer->out, "%" PRId64, value);
}

void qd_json_put_double(qd_json_writer *writer, const char *key, double value)
{
    char text[QD_DOUBLE_TEXT] = "null";
    if (value == 0 && signbit(value))
        strcpy(text, "-0.0"); /* "-0" would be read as an integer, which has no sign */
    else if (isfinite(value))
        qd_double_17(value, text);
    before_value(writer, key);
    qd_strbuf_puts(writer->out, text);
}

void qd_json_put_real(qd_json_writer *writer, const char *key, double value)
{
    char text[QD_DOUBLE_TEXT + 2] = "null";
    if (isfinite(value)) {
        qd_double_17(value, text);
        if (!strpbrk(text, ".e"))
            strcat(text, ".0");
    }
    before_value(writer, key);
    qd_strbuf_puts(writer->out, text);
}

void qd_json_put_bool(qd_json_writer *writer, const char *key, bool value)
{
    before_value(writer, key);
    qd_strbuf_puts(writer->out, value ? "true" : "false");
}

void qd_json_put_null(qd_json_writer *writer, const char *key)
{
    before_value(writer, key);
    qd_strbuf_puts(writer->out, "null");
}

void qd_json_newline(qd_json_writer *writer)
{
    assert(writer->depth == 0);
    qd_strbuf_puts(writer->out, "\n");
    writer->started[0] = false;
}
