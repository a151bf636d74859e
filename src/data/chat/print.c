/* Values as text: str() and repr() of Python, and json.dumps(). */
#include "data/chat/chat_impl.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void qd_chat_real_text(double value, char *text)
{
    if (isnan(value) || isinf(value)) {
        snprintf(text, QD_CHAT_NUMBER_TEXT, "%s", isnan(value) ? "nan" : value < 0 ? "-inf" : "inf");
        return;
    }
    char shortest[QD_DOUBLE_TEXT], digits[QD_DOUBLE_TEXT];
    int count = 0, point = 0, exponent = 0;
    bool seen = false, negative = signbit(value);
    qd_double_shortest(fabs(value), shortest);
    for (const char *c = shortest; *c; c++) { /* the digits without leading zeros, and where the point is */
        if (*c == 'e') {
            exponent = atoi(c + 1);
            break;
        }
        if (*c == '.') {
            seen = true;
        } else if (count || *c != '0') {
            digits[count++] = *c;
            point += !seen;
        } else {
            point -= seen;
        }
    }
    while (count > 1 && digits[count - 1] == '0')
        count--;
    if (!count) {
        digits[count++] = '0';
        point = 1;
        exponent = 0;
    }
    point += exponent; /* value = 0.digits · 10^point */
    char *to = text;
    if (negative)
        *to++ = '-';
    if (point > 16 || point < -3) {
        *to++ = digits[0];
        if (count > 1)
            to += sprintf(to, ".%.*s", count - 1, digits + 1);
        sprintf(to, "e%c%02d", point < 1 ? '-' : '+', abs(point - 1));
    } else if (point <= 0) {
        sprintf(to, "0.%.*s%.*s", -point, "000", count, digits);
    } else if (point >= count) {
        sprintf(to, "%.*s%.*s.0", count, digits, point - count, "0000000000000000");
    } else {
        sprintf(to, "%.*s.%.*s", point, digits, count - point, digits + point);
    }
}

static qd_status put(qd_chat_run *run, qd_strbuf *to, const char *text)
{
    return qd_chat_write(run, to, text, strlen(text));
}

/* str.isprintable(), for the characters on which Unicode versions agree. 1, 0, or -1: unknown. */
static int printable(uint32_t code)
{
    static const uint32_t yes[][2] = {
        {0x20, 0x7e}, {0xa1, 0xac}, {0xae, 0x377}, {0x384, 0x38a}, {0x3a3, 0x52f}, {0x5d0, 0x5ea}, {0x621, 0x64a}, {0x904, 0x939},
        {0xe01, 0xe3a}, {0x1e00, 0x1eff}, {0x2010, 0x2027}, {0x2030, 0x205e}, {0x20a0, 0x20bf}, {0x2190, 0x23ff}, {0x2500, 0x2b73},
        {0x3001, 0x303f}, {0x3041, 0x3096}, {0x3099, 0x30ff}, {0x4e00, 0x9ffc}, {0xac00, 0xd7a3}, {0xfe00, 0xfe0f}, {0xff01, 0xff5e},
        {0xfffd, 0xfffd}, {0x1f300, 0x1f64f}, {0x1f900, 0x1f9ff},
    };
    static const uint32_t no[][2] = {{0, 0x1f}, {0x7f, 0xa0}, {0xad, 0xad}, {0x2000, 0x200f}, {0x2028, 0x202f}, {0x205f, 0x206f},
                                     {0x3000, 0x3000}, {0xe000, 0xf8ff}, {0xfeff, 0xfeff}};
    for (size_t i = 0; i < sizeof yes / sizeof *yes; i++)
        if (code >= yes[i][0] && code <= yes[i][1])
            return 1;
    for (size_t i = 0; i < sizeof no / sizeof *no; i++)
        if (code >= no[i][0] && code <= no[i][1])
            return 0;
    return -1;
}

static qd_status repr_string(qd_chat_run *run, qd_chat_value value, qd_strbuf *to)
{
    bool single = memchr(value.text, '\'', value.length), both = single && memchr(value.text, '"', value.length);
    char quote = single && !both ? '"' : '\'', escaped[16];
    if (value.detail)
        return QD_CHAT_FAIL(run, "the result of 'safe' inside a printed list is not implemented");
    QD_TRY(qd_chat_write(run, to, &quote, 1));
    QD_TRY(qd_chat_spend(run, value.length));
    for (size_t at = 0, bytes; at < value.length; at += bytes) {
        uint32_t code = qd_chat_code_point(value.text + at, value.length - at, &bytes);
        int shown = printable(code);
        if (shown < 0)
            return QD_CHAT_FAIL(run, "printing a list or dict that contains the character U+%04X is not implemented", (unsigned)code);
        const char *named = code == '\n' ? "\\n" : code == '\r' ? "\\r" : code == '\t' ? "\\t" : code == '\\' ? "\\\\" : NULL;
        if (named)
            QD_TRY(put(run, to, named));
        else if (code == (uint32_t)quote)
            QD_TRY(put(run, to, "\\'"));
        else if (shown)
            QD_TRY(qd_chat_write(run, to, value.text + at, bytes));
        else {
            snprintf(escaped, sizeof escaped, code < 256 ? "\\x%02x" : "\\u%04x", (unsigned)code);
            QD_TRY(put(run, to, escaped));
        }
    }
    return qd_chat_write(run, to, &quote, 1);
}

static qd_status repr_items(qd_chat_run *run, qd_chat_value value, qd_strbuf *to, int depth)
{
    bool tuple = value.type == QD_CHAT_TUPLE;
    QD_TRY(put(run, to, tuple ? "(" : "["));
    for (size_t i = 0; i < value.sequence->count; i++) {
        QD_TRY(put(run, to, i ? ", " : ""));
        QD_TRY(qd_chat_repr(run, value.sequence->items[i], to, depth + 1));
    }
    return put(run, to, !tuple ? "]" : value.sequence->count == 1 ? ",)" : ")");
}

static qd_status repr_dict(qd_chat_run *run, qd_chat_value value, qd_strbuf *to, int depth)
{
    QD_TRY(put(run, to, "{"));
    for (size_t i = 0; i < value.dict->count; i++) {
        QD_TRY(put(run, to, i ? ", " : ""));
        QD_TRY(qd_chat_repr(run, value.dict->keys[i], to, depth + 1));
        QD_TRY(put(run, to, ": "));
        QD_TRY(qd_chat_repr(run, value.dict->values[i], to, depth + 1));
    }
    return put(run, to, "}");
}

static qd_status repr_view(qd_chat_run *run, qd_chat_value value, qd_strbuf *to, int depth)
{
    qd_chat_value list;
    QD_TRY(qd_chat_items(run, value, &list));
    QD_TRY(put(run, to, value.detail == 'k' ? "dict_keys(" : value.detail == 'v' ? "dict_values(" : "dict_items("));
    QD_TRY(qd_chat_repr(run, list, to, depth + 1));
    return put(run, to, ")");
}

qd_status qd_chat_repr(qd_chat_run *run, qd_chat_value value, qd_strbuf *to, int depth)
{
    char text[100];
    QD_TRY(qd_chat_spend(run, 1));
    if (depth > QD_CHAT_MOST_NESTING)
        return QD_CHAT_FAIL(run, "a printed value is nested more than %d levels deep", QD_CHAT_MOST_NESTING);
    switch ((int)value.type) {
    case QD_CHAT_NONE:
        return put(run, to, "None");
    case QD_CHAT_BOOL:
        return put(run, to, value.truth ? "True" : "False");
    case QD_CHAT_INT:
        snprintf(text, sizeof text, "%lld", (long long)value.integer);
        return put(run, to, text);
    case QD_CHAT_FLOAT:
        qd_chat_real_text(value.real, text);
        return put(run, to, text);
    case QD_CHAT_STRING:
        return repr_string(run, value, to);
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
        return repr_items(run, value, to, depth);
    case QD_CHAT_DICT:
        return repr_dict(run, value, to, depth);
    case QD_CHAT_VIEW:
        return repr_view(run, value, to, depth);
    case QD_CHAT_RANGE:
        snprintf(text, sizeof text, value.range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
                 (long long)value.range->start, (long long)value.range->stop, (long long)value.range->step);
        return put(run, to, text);
    case QD_CHAT_UNDEFINED:
        return put(run, to, "Undefined");
    default:
        return QD_CHAT_FAIL(run, "printing a value of type '%s' is not implemented", qd_chat_type_name(value));
    }
}

qd_status qd_chat_print(qd_chat_run *run, qd_chat_value value, qd_strbuf *to)
{
    if (value.type == QD_CHAT_STRING)
        return qd_chat_write(run, to, value.text, value.length);
    return value.type == QD_CHAT_UNDEFINED ? QD_OK : qd_chat_repr(run, value, to, 0);
}

qd_status qd_chat_to_string(qd_chat_run *run, qd_chat_value value, qd_chat_value *string)
{
    *string = value;
    if (value.type == QD_CHAT_STRING)
        return QD_OK;
    qd_strbuf text = {0};
    size_t written = run->written;
    qd_status status = qd_chat_print(run, value, &text);
    run->written = written;
    if (status == QD_OK)
        return qd_chat_captured(run, &text, string);
    qd_strbuf_free(&text);
    return status;
}

/* ---- tojson ---- */

typedef struct dumper {
    qd_chat_run *run;
    qd_strbuf *to;
    bool ensure_ascii, sort_keys, indented;
    qd_chat_value indent, item_separator, key_separator;
} dumper;

static qd_status dump_string(const dumper *d, qd_chat_value value)
{
    static const char plain[] = "\"\"\\\\n\nr\rt\tf\fb\b";
    char text[16];
    QD_TRY(qd_chat_spend(d->run, value.length / 4));
    QD_TRY(put(d->run, d->to, "\""));
    for (size_t at = 0, bytes, from; at < value.length; at += bytes) {
        for (from = at; at < value.length && (unsigned char)value.text[at] >= 0x20 && value.text[at] != '"' && value.text[at] != '\\' &&
                        !(d->ensure_ascii && (unsigned char)value.text[at] >= 0x7f);)
            at++;
        QD_TRY(qd_chat_write(d->run, d->to, value.text + from, at - from));
        if (at == value.length)
            break;
        uint32_t code = qd_chat_code_point(value.text + at, value.length - at, &bytes);
        text[0] = '\0';
        for (size_t i = 0; i + 1 < sizeof plain - 1; i += 2)
            if ((uint32_t)plain[i + 1] == code)
                snprintf(text, sizeof text, "\\%c", plain[i]);
        if (!text[0] && code >= 0x10000)
            snprintf(text, sizeof text, "\\u%04x\\u%04x", (unsigned)(0xd800 + ((code - 0x10000) >> 10)),
                     (unsigned)(0xdc00 + ((code - 0x10000) & 0x3ff)));
        else if (!text[0])
            snprintf(text, sizeof text, "\\u%04x", (unsigned)code);
        QD_TRY(put(d->run, d->to, text));
    }
    return put(d->run, d->to, "\"");
}

static qd_status dump_line(const dumper *d, int depth)
{
    if (!d->indented)
        return QD_OK;
    QD_TRY(put(d->run, d->to, "\n"));
    for (int i = 0; i < depth; i++)
        QD_TRY(qd_chat_write(d->run, d->to, d->indent.text, d->indent.length));
    return QD_OK;
}

static qd_status dump(const dumper *d, qd_chat_value value, int depth);

static qd_status dump_list(const dumper *d, qd_chat_value value, int depth)
{
    QD_TRY(put(d->run, d->to, "["));
    for (size_t i = 0; i < value.sequence->count; i++) {
        if (i)
            QD_TRY(qd_chat_write(d->run, d->to, d->item_separator.text, d->item_separator.length));
        QD_TRY(dump_line(d, depth + 1));
        QD_TRY(dump(d, value.sequence->items[i], depth + 1));
    }
    if (value.sequence->count)
        QD_TRY(dump_line(d, depth));
    return put(d->run, d->to, "]");
}

static qd_status dump_key(const dumper *d, qd_chat_value key)
{
    if (key.type == QD_CHAT_STRING)
        return dump_string(d, key);
    if (key.type == QD_CHAT_TUPLE || key.type == QD_CHAT_UNDEFINED)
        return qd_chat_bad_type(d->run, "tojson (as a key)", key);
    QD_TRY(put(d->run, d->to, "\""));
    QD_TRY(dump(d, key, 0));
    return put(d->run, d->to, "\"");
}

static qd_status sorted_keys(const dumper *d, const qd_chat_dict *dict, size_t **order)
{
    QD_TRY(qd_chat_take(d->run, dict->count * sizeof **order, order));
    for (size_t i = 0; i < dict->count; i++) {
        size_t at = i;
        for (; at > 0; at--) {
            int less;
            QD_TRY(qd_chat_spend(d->run, 1));
            QD_TRY(qd_chat_less(d->run, dict->keys[i], dict->keys[(*order)[at - 1]], "<", &less));
            if (less >= 0)
                break;
            (*order)[at] = (*order)[at - 1];
        }
        (*order)[at] = i;
    }
    return QD_OK;
}

static qd_status dump_dict(const dumper *d, qd_chat_value value, int depth)
{
    size_t *order = NULL;
    if (d->sort_keys)
        QD_TRY(sorted_keys(d, value.dict, &order));
    QD_TRY(put(d->run, d->to, "{"));
    for (size_t i = 0; i < value.dict->count; i++) {
        size_t at = order ? order[i] : i;
        if (i)
            QD_TRY(qd_chat_write(d->run, d->to, d->item_separator.text, d->item_separator.length));
        QD_TRY(dump_line(d, depth + 1));
        QD_TRY(dump_key(d, value.dict->keys[at]));
        QD_TRY(qd_chat_write(d->run, d->to, d->key_separator.text, d->key_separator.length));
        QD_TRY(dump(d, value.dict->values[at], depth + 1));
    }
    if (value.dict->count)
        QD_TRY(dump_line(d, depth));
    return put(d->run, d->to, "}");
}

static qd_status dump(const dumper *d, qd_chat_value value, int depth)
{
    char text[QD_CHAT_NUMBER_TEXT];
    QD_TRY(qd_chat_spend(d->run, 1));
    if (depth > QD_CHAT_MOST_NESTING)
        return QD_CHAT_FAIL(d->run, "a value for tojson is nested more than %d levels deep", QD_CHAT_MOST_NESTING);
    switch ((int)value.type) {
    case QD_CHAT_NONE:
        return put(d->run, d->to, "null");
    case QD_CHAT_BOOL:
        return put(d->run, d->to, value.truth ? "true" : "false");
    case QD_CHAT_FLOAT:
        qd_chat_real_text(value.real, text);
        return put(d->run, d->to, isnan(value.real) ? "NaN" : isinf(value.real) ? (value.real < 0 ? "-Infinity" : "Infinity") : text);
    case QD_CHAT_INT:
        return qd_chat_repr(d->run, value, d->to, 0);
    case QD_CHAT_STRING:
        return dump_string(d, value);
    case QD_CHAT_LIST:
    case QD_CHAT_TUPLE:
        return dump_list(d, value, depth);
    case QD_CHAT_DICT:
        return dump_dict(d, value, depth);
    default:
        QD_TRY(qd_chat_refuse_undefined(d->run, value));
        return qd_chat_bad_type(d->run, "tojson", value);
    }
}

qd_status qd_chat_tojson(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)
{
    enum { VALUE, ENSURE_ASCII, INDENT, SEPARATORS, SORT_KEYS };
    qd_chat_value v[5] = {[ENSURE_ASCII] = qd_chat_bool(false), [INDENT] = qd_chat_none(), [SEPARATORS] = qd_chat_none(),
                          [SORT_KEYS] = qd_chat_bool(false)};
    QD_TRY(qd_chat_bind(run, arguments, "value ensure_ascii? indent? separators? sort_keys?", v));
    qd_strbuf text = {0};
    size_t written = run->written;
    dumper d = {.run = run, .to = &text, .ensure_ascii = qd_chat_truth(v[ENSURE_ASCII]), .sort_keys = qd_chat_truth(v[SORT_KEYS]),
                .indented = v[INDENT].type != QD_CHAT_NONE};
    d.item_separator = qd_chat_literal(d.indented ? "," : ", ");
    d.key_separator = qd_chat_literal(": ");
    d.indent = v[INDENT];
    if (d.indented && (v[INDENT].type == QD_CHAT_INT || v[INDENT].type == QD_CHAT_BOOL))
        QD_TRY(qd_chat_binary(run, '*', qd_chat_literal(" "), v[INDENT], &d.indent));
    if (d.indented && d.indent.type != QD_CHAT_STRING)
        return qd_chat_bad_type(run, "indent of tojson", v[INDENT]);
    if (v[SEPARATORS].type != QD_CHAT_NONE) {
        const qd_chat_sequence *pair = v[SEPARATORS].sequence;
        if ((v[SEPARATORS].type != QD_CHAT_LIST && v[SEPARATORS].type != QD_CHAT_TUPLE) || pair->count != 2 ||
            pair->items[0].type != QD_CHAT_STRING || pair->items[1].type != QD_CHAT_STRING)
            return QD_CHAT_FAIL(run, "separators of tojson must be two strings");
        d.item_separator = pair->items[0];
        d.key_separator = pair->items[1];
    }
    qd_status status = dump(&d, v[VALUE], 0);
    run->written = written;
    if (status == QD_OK)
        return qd_chat_captured(run, &text, result);
    qd_strbuf_free(&text);
    return status;
}
