/* Parses the text of an option into a typed value and prints it back as YAML. */
#include "base/options/options_impl.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { NUMBER_BYTES = 64, MOST_TEXT = 64 * 1024, MOST_ITEMS = 65536 };

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* How many bytes of a wrong value a message shows. */
static int shown(const char *text)
{
    size_t length = strcspn(text, "\n");
    if (length <= QD_OPTION_SHOWN)
        return (int)length;
    return (int)qd_utf8_valid(text, QD_OPTION_SHOWN);
}

/* Copies a number without surrounding blanks and without underscores between digits; false if the
 * text cannot be a number. */
static bool copy_number(const char *text, size_t length, char out[NUMBER_BYTES])
{
    while (length > 0 && (*text == ' ' || *text == '\t')) {
        text++;
        length--;
    }
    while (length > 0 && (text[length - 1] == ' ' || text[length - 1] == '\t'))
        length--;
    size_t used = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '_' && i > 0 && i + 1 < length && is_digit(text[i - 1]) && is_digit(text[i + 1]))
            continue;
        if (used + 1 >= NUMBER_BYTES)
            return false;
        out[used++] = text[i];
    }
    out[used] = '\0';
    return used > 0;
}

/* Decimal numbers only: rejects hexadecimal, inf and nan, which strtod accepts. */
static bool parse_real(const char *text, double *value)
{
    if (text[strspn(text, "0123456789.eE+-")] != '\0' || !strpbrk(text, "0123456789"))
        return false;
    char *end;
    *value = qd_double_parse(text, &end);
    return end != text && *end == '\0' && isfinite(*value);
}

/* The exact value of "[sign]digits[.digits][e exponent]" times 10^exponent; false if it is not a
 * 64-bit integer. Not computed in double: 4.1 * 1e6 is not 4100000 there. */
static bool parse_decimal(const char *text, long exponent, int64_t *value)
{
    int sign = *text == '-' ? -1 : 1;
    int64_t total = 0;
    bool fraction = false, digits = false, fits = true;
    long zeros = 0; /* pending zeros: trailing ones may belong to the fraction */
    const char *at = text + (*text == '-' || *text == '+');
    for (; is_digit(*at) || (*at == '.' && !fraction); at++) {
        if (*at == '.') {
            fraction = true;
            continue;
        }
        digits = true;
        exponent -= fraction;
        zeros++;
        if (*at == '0')
            continue;
        for (; zeros > 0; zeros--)
            fits = fits && !__builtin_mul_overflow(total, 10, &total);
        fits = fits && !__builtin_add_overflow(total, sign * (*at - '0'), &total);
    }
    if (digits && (*at == 'e' || *at == 'E')) {
        const char *power = at + 1;
        if (!is_digit(power[*power == '+' || *power == '-']))
            return false;
        char *end;
        long written = strtol(power, &end, 10);
        at = end;
        exponent += written > 1000 ? 1000 : written < -1000 ? -1000 : written;
    }
    if (!digits || *at != '\0')
        return false;
    *value = total;
    if (total == 0)
        return fits;
    for (exponent += zeros; exponent > 0 && fits; exponent--)
        fits = !__builtin_mul_overflow(*value, 10, value);
    return fits && exponent == 0;
}

static bool parse_integer(const char *text, size_t length, int64_t *value)
{
    static const char suffixes[] = "kMG";
    char number[NUMBER_BYTES];
    if (!copy_number(text, length, number))
        return false;
    char *last = &number[strlen(number) - 1];
    const char *suffix = strchr(suffixes, *last == 'K' ? 'k' : *last);
    if (suffix)
        *last = '\0';
    return parse_decimal(number, suffix ? 3 * (suffix - suffixes + 1) : 0, value);
}

static bool parse_number(const char *text, size_t length, double *value)
{
    char number[NUMBER_BYTES];
    return copy_number(text, length, number) && parse_real(number, value);
}

static bool in_range(const qd_option *option, double value)
{
    return option->least == option->most || (value >= option->least && value <= option->most);
}

void qd_option_range(const qd_option *option, char *text, size_t size)
{
    char least[QD_DOUBLE_TEXT], most[QD_DOUBLE_TEXT];
    qd_double_shortest(option->least, least);
    qd_double_shortest(option->most, most);
    if (option->least == option->most)
        snprintf(text, size, "%s", "");
    else if (isinf(option->most))
        snprintf(text, size, "at least %s", least);
    else if (isinf(option->least))
        snprintf(text, size, "at most %s", most);
    else
        snprintf(text, size, "%s to %s", least, most);
}

static qd_status out_of_range(const qd_option *option, const char *text)
{
    char range[2 * QD_DOUBLE_TEXT + 16];
    qd_option_range(option, range, sizeof range);
    return QD_FAIL(QD_USAGE, "%s: %.*s is out of range; it must be %s%s", option->key, shown(text), text,
                   isinf(option->least) || isinf(option->most) ? "" : "from ", range);
}

bool qd_option_choice(const char *choices, int index, const char **start, int *length)
{
    const char *at = choices ? choices : "";
    for (; index > 0; index--) {
        at = strchr(at, '|');
        if (!at)
            return false;
        at++;
    }
    *start = at;
    *length = (int)strcspn(at, "|");
    return *length > 0;
}

/* The choice that is spelt similarly, whatever the case of its letters; NULL: none. */
static const char *nearest_choice(const char *choices, const char *text, int *nearest_length)
{
    const char *start, *nearest = NULL;
    char lower[64];
    int length, nearest_distance = 3;
    if (strlen(text) >= sizeof lower)
        return NULL;
    for (size_t i = 0; i <= strlen(text); i++)
        lower[i] = text[i] >= 'A' && text[i] <= 'Z' ? (char)(text[i] + 32) : text[i];
    for (int i = 0; qd_option_choice(choices, i, &start, &length); i++) {
        int distance = qd_edit_distance(lower, strlen(lower), start, (size_t)length);
        if (distance < nearest_distance) {
            nearest = start;
            *nearest_length = length;
            nearest_distance = distance;
        }
    }
    return nearest;
}

static qd_status parse_choice(const qd_option *option, const char *text, int *choice)
{
    const char *start, *nearest;
    char known[64];
    int length, nearest_length = 0;
    qd_strbuf list = {0};
    for (int i = 0; qd_option_choice(option->choices, i, &start, &length); i++) {
        if (strlen(text) == (size_t)length && strncmp(text, start, (size_t)length) == 0) {
            *choice = i;
            qd_strbuf_free(&list);
            return QD_OK;
        }
        qd_strbuf_printf(&list, "%s%.*s", i > 0 ? ", " : "", length, start);
    }
    if (qd_synonym_choice(option->key, text, known, sizeof known)) {
        nearest = known;
        nearest_length = (int)strlen(known);
    } else {
        nearest = nearest_choice(option->choices, text, &nearest_length);
    }
    qd_status status = nearest ? QD_FAIL(QD_USAGE, "%s: '%.*s' is not one of %s; did you mean '%.*s'?", option->key,
                                         shown(text), text, list.data ? list.data : "", nearest_length, nearest)
                               : QD_FAIL(QD_USAGE, "%s: '%.*s' is not one of %s", option->key, shown(text), text,
                                         list.data ? list.data : "");
    qd_strbuf_free(&list);
    return status;
}

static qd_status parse_text(const qd_option *option, const char *text, char **copy)
{
    size_t length = strlen(text);
    if (length > MOST_TEXT)
        return QD_FAIL(QD_USAGE, "%s: has %zu bytes; at most %d are allowed", option->key, length, MOST_TEXT);
    if (qd_utf8_valid(text, length) < length)
        return QD_FAIL(QD_USAGE, "%s: is not UTF-8 text", option->key);
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        if ((byte < 0x20 && byte != '\t' && byte != '\n') || byte == 0x7f)
            return QD_FAIL(QD_USAGE, "%s: contains the control character 0x%02x", option->key, byte);
    }
    *copy = strdup(text);
    return *copy ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory for its value", option->key);
}

static qd_status parse_list(const qd_option *option, const char *text, option_value *value)
{
    const bool whole = option->type == QD_OPTION_INT_LIST;
    int room = 1;
    for (const char *at = text; *at; at++)
        room += *at == ',';
    if (room > MOST_ITEMS)
        return QD_FAIL(QD_USAGE, "%s: has %d items; at most %d are allowed", option->key, room, MOST_ITEMS);
    int64_t *list = whole ? calloc((size_t)room, sizeof *list) : NULL;
    double *reals = whole ? NULL : calloc((size_t)room, sizeof *reals);
    if (!list && !reals)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %d items", option->key, room);
    int used = 0;
    qd_status status = QD_OK;
    if (text[strspn(text, " \t")] != '\0') {
        for (const char *at = text;; at++) {
            size_t length = strcspn(at, ",");
            if (!(whole ? parse_integer(at, length, &list[used]) : parse_number(at, length, &reals[used]))) {
                status = QD_FAIL(QD_USAGE, "%s: '%.*s' is not a list of %s", option->key, shown(text), text,
                                 whole ? "integers (for example 1,2,4)" : "numbers (for example 1,1.5,4)");
                break;
            }
            if (!in_range(option, whole ? (double)list[used] : reals[used])) {
                status = out_of_range(option, text);
                break;
            }
            used++;
            at += length;
            if (*at == '\0')
                break;
        }
    }
    if (status != QD_OK) {
        free(list);
        free(reals);
        return status;
    }
    value->items = list;
    value->reals = reals;
    value->item_count = used;
    return QD_OK;
}

static bool parse_truth(const char *text, bool *value)
{
    static const struct {
        const char *word;
        bool value;
    } words[] = {{"true", true}, {"false", false}, {"yes", true}, {"no", false},
                 {"on", true},   {"off", false},   {"1", true},   {"0", false}};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        if (strcasecmp(text, words[i].word) == 0) {
            *value = words[i].value;
            return true;
        }
    }
    return false;
}

qd_status qd_option_value_parse(const qd_option *option, const char *text, option_value *value)
{
    option_value parsed = {.present = true};
    switch (option->type) {
    case QD_OPTION_INT:
        if (!parse_integer(text, strlen(text), &parsed.integer))
            return QD_FAIL(QD_USAGE, "%s: '%.*s' is not an integer (for example 2, 1_000 or 4k)", option->key,
                           shown(text), text);
        if (!in_range(option, (double)parsed.integer))
            return out_of_range(option, text);
        break;
    case QD_OPTION_FLOAT:
        if (!parse_number(text, strlen(text), &parsed.real))
            return QD_FAIL(QD_USAGE, "%s: '%.*s' is not a number (for example 0.1 or 3e-3)", option->key, shown(text),
                           text);
        if (!in_range(option, parsed.real))
            return out_of_range(option, text);
        break;
    case QD_OPTION_BOOL:
        if (!parse_truth(text, &parsed.truth))
            return QD_FAIL(QD_USAGE, "%s: '%.*s' is not a truth value; write true or false", option->key, shown(text),
                           text);
        break;
    case QD_OPTION_STRING:
        QD_TRY(parse_text(option, text, &parsed.text));
        break;
    case QD_OPTION_ENUM:
        QD_TRY(parse_choice(option, text, &parsed.choice));
        QD_TRY(parse_text(option, text, &parsed.text));
        break;
    case QD_OPTION_INT_LIST:
    case QD_OPTION_FLOAT_LIST:
        QD_TRY(parse_list(option, text, &parsed));
        break;
    }
    qd_option_value_free(value);
    *value = parsed;
    return QD_OK;
}

void qd_option_value_free(option_value *value)
{
    free(value->text);
    free(value->items);
    free(value->reals);
    free(value->origin);
    *value = (option_value){0};
}

qd_status qd_option_value_copy(const option_value *from, option_value *to)
{
    option_value copy = *from;
    _Static_assert(sizeof *from->items == sizeof *from->reals, "one size for items of both kinds");
    size_t bytes = (size_t)(from->item_count > 0 ? from->item_count : 1) * sizeof *from->items;
    copy.text = from->text ? strdup(from->text) : NULL;
    copy.origin = from->origin ? strdup(from->origin) : NULL;
    copy.items = from->items ? malloc(bytes) : NULL;
    copy.reals = from->reals ? malloc(bytes) : NULL;
    if ((from->text && !copy.text) || (from->origin && !copy.origin) || (from->items && !copy.items) || (from->reals && !copy.reals)) {
        qd_option_value_free(&copy);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a copy of the options");
    }
    if (copy.items)
        memcpy(copy.items, from->items, bytes);
    if (copy.reals)
        memcpy(copy.reals, from->reals, bytes);
    *to = copy;
    return QD_OK;
}

/* Plain YAML where every parser reads it as a string, otherwise in double quotes. */
static void print_text(const char *text, qd_strbuf *out)
{
    static const char safe[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-";
    bool truth;
    bool letter = (text[0] >= 'a' && text[0] <= 'z') || (text[0] >= 'A' && text[0] <= 'Z') || text[0] == '/';
    bool word = letter && text[strspn(text, safe)] == '\0' && !parse_truth(text, &truth) &&
                strcasecmp(text, "null") != 0 && strcasecmp(text, "y") != 0 && strcasecmp(text, "n") != 0;
    if (word) {
        qd_strbuf_puts(out, text);
        return;
    }
    qd_strbuf_puts(out, "\"");
    for (const char *at = text; *at; at++) {
        if (*at == '"' || *at == '\\')
            qd_strbuf_puts(out, "\\");
        if (*at == '\n')
            qd_strbuf_puts(out, "\\n");
        else if (*at == '\t')
            qd_strbuf_puts(out, "\\t");
        else
            qd_strbuf_append(out, at, 1);
    }
    qd_strbuf_puts(out, "\"");
}

void qd_option_value_print(const qd_option *option, const option_value *value, qd_strbuf *out)
{
    char number[QD_DOUBLE_TEXT];
    switch (option->type) {
    case QD_OPTION_INT:
        qd_strbuf_printf(out, "%" PRId64, value->integer);
        break;
    case QD_OPTION_FLOAT:
        qd_double_shortest(value->real, number);
        qd_strbuf_puts(out, number);
        break;
    case QD_OPTION_BOOL:
        qd_strbuf_puts(out, value->truth ? "true" : "false");
        break;
    case QD_OPTION_STRING:
    case QD_OPTION_ENUM:
        print_text(value->text, out);
        break;
    case QD_OPTION_INT_LIST:
    case QD_OPTION_FLOAT_LIST:
        qd_strbuf_puts(out, "[");
        for (int i = 0; i < value->item_count; i++) {
            qd_strbuf_puts(out, i > 0 ? ", " : "");
            if (value->items) {
                qd_strbuf_printf(out, "%" PRId64, value->items[i]);
            } else {
                qd_double_shortest(value->reals[i], number);
                qd_strbuf_puts(out, number);
            }
        }
        qd_strbuf_puts(out, "]");
        break;
    }
}
