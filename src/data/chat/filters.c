/* Filters, as Jinja defines them without autoescape. */
#include "data/chat/chat_impl.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define FILTER(name) static qd_status name(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)

/* The only argument as a string. */
static qd_status only_string(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *string)
{
    qd_chat_value value;
    QD_TRY(qd_chat_bind(run, arguments, "value", &value));
    return qd_chat_to_string(run, value, string);
}

FILTER(filter_upper)
{
    qd_chat_value s;
    QD_TRY(only_string(run, arguments, &s));
    return qd_chat_change_case(run, s, QD_CHAT_UPPER, result);
}

FILTER(filter_lower)
{
    qd_chat_value s;
    QD_TRY(only_string(run, arguments, &s));
    return qd_chat_change_case(run, s, QD_CHAT_LOWER, result);
}

FILTER(filter_title)
{
    qd_chat_value s;
    QD_TRY(only_string(run, arguments, &s));
    return qd_chat_change_case(run, s, QD_CHAT_TITLE_FILTER, result);
}

FILTER(filter_capitalize)
{
    qd_chat_value s;
    QD_TRY(only_string(run, arguments, &s));
    return qd_chat_change_case(run, s, QD_CHAT_CAPITALIZE, result);
}

FILTER(filter_string)
{
    return only_string(run, arguments, result);
}

FILTER(filter_safe)
{
    QD_TRY(only_string(run, arguments, result));
    result->detail = 1;
    return QD_OK;
}

FILTER(filter_trim)
{
    qd_chat_value v[2] = {{0}, qd_chat_none()}, s;
    QD_TRY(qd_chat_bind(run, arguments, "value chars?", v));
    QD_TRY(qd_chat_to_string(run, v[0], &s));
    return qd_chat_strip(run, s, v[1], true, true, result);
}

FILTER(filter_length)
{
    qd_chat_value v;
    size_t size;
    QD_TRY(qd_chat_bind(run, arguments, "value", &v));
    QD_TRY(qd_chat_size(run, v, &size));
    *result = qd_chat_int((int64_t)size);
    return QD_OK;
}

FILTER(filter_default)
{
    qd_chat_value v[3] = {{0}, qd_chat_literal(""), qd_chat_bool(false)};
    QD_TRY(qd_chat_bind(run, arguments, "value default_value? boolean?", v));
    *result = qd_chat_is_undefined(v[0]) || (qd_chat_truth(v[2]) && !qd_chat_truth(v[0])) ? v[1] : v[0];
    return QD_OK;
}

FILTER(filter_replace)
{
    qd_chat_value v[4] = {{0}, {0}, {0}, qd_chat_none()};
    QD_TRY(qd_chat_bind(run, arguments, "s old new count?", v));
    for (int i = 0; i < 3; i++) {
        QD_TRY(qd_chat_to_string(run, v[i], &v[i]));
        v[i].detail = 0;
    }
    if (v[3].type != QD_CHAT_NONE && v[3].type != QD_CHAT_INT && v[3].type != QD_CHAT_BOOL)
        return qd_chat_bad_type(run, "count of 'replace'", v[3]);
    return qd_chat_replace(run, v[0], v[1], v[2], v[3].type == QD_CHAT_NONE ? -1 : qd_chat_as_int(v[3]), result);
}

/* ---- sequences ---- */

FILTER(filter_list)
{
    qd_chat_value v;
    QD_TRY(qd_chat_bind(run, arguments, "value", &v));
    return qd_chat_items(run, v, result);
}

FILTER(filter_first)
{
    qd_chat_value v;
    qd_chat_iterator iterator;
    bool more;
    QD_TRY(qd_chat_bind(run, arguments, "seq", &v));
    QD_TRY(qd_chat_iterate(run, v, &iterator));
    QD_TRY(qd_chat_next(run, &iterator, &more, result));
    if (!more)
        *result = qd_chat_undefined("the first item of an empty sequence", 35, QD_CHAT_UNDEFINED);
    return QD_OK;
}

FILTER(filter_last)
{
    qd_chat_value v, list;
    QD_TRY(qd_chat_bind(run, arguments, "seq", &v));
    if (v.type == QD_CHAT_ITERATOR)
        return qd_chat_bad_type(run, "'last'", v);
    QD_TRY(qd_chat_items(run, v, &list));
    *result = list.sequence->count ? list.sequence->items[list.sequence->count - 1]
                                   : qd_chat_undefined("the last item of an empty sequence", 34, QD_CHAT_UNDEFINED);
    return QD_OK;
}

FILTER(filter_reverse)
{
    qd_chat_value v, list, bounds[3] = {qd_chat_none(), qd_chat_none(), qd_chat_int(-1)};
    QD_TRY(qd_chat_bind(run, arguments, "value", &v));
    if (v.type == QD_CHAT_STRING)
        return qd_chat_slice(run, v, bounds, result);
    QD_TRY(qd_chat_items(run, v, &list));
    QD_TRY(qd_chat_slice(run, list, bounds, result));
    if (v.type != QD_CHAT_ITERATOR) /* reversed() refuses generators, and Jinja makes a list instead */
        result->type = QD_CHAT_ITERATOR;
    return QD_OK;
}

/* The value at the path "a.b.0" of an item. */
static qd_status at_path(qd_chat_run *run, qd_chat_value item, qd_chat_value path, const qd_chat_value *missing, qd_chat_value *value)
{
    *value = item;
    if (path.type == QD_CHAT_NONE)
        return QD_OK;
    if (path.type != QD_CHAT_STRING) {
        QD_TRY(qd_chat_item(run, item, path, value));
        if (missing && qd_chat_is_undefined(*value))
            *value = *missing;
        return QD_OK;
    }
    for (size_t at = 0; at <= path.length;) {
        const char *dot = memchr(path.text + at, '.', path.length - at);
        size_t end = dot ? (size_t)(dot - path.text) : path.length, digits = 0;
        while (at + digits < end && path.text[at + digits] >= '0' && path.text[at + digits] <= '9')
            digits++;
        qd_chat_value key = qd_chat_string(path.text + at, end - at);
        if (digits && at + digits == end && digits < 10) {
            int64_t number = 0;
            for (size_t i = at; i < end; i++)
                number = 10 * number + (path.text[i] - '0');
            key = qd_chat_int(number);
        }
        QD_TRY(qd_chat_spend(run, 1));
        QD_TRY(qd_chat_item(run, *value, key, value));
        if (missing && qd_chat_is_undefined(*value))
            *value = *missing;
        at = end + 1;
    }
    return QD_OK;
}

FILTER(filter_join)
{
    qd_chat_value v[3] = {{0}, qd_chat_literal(""), qd_chat_none()}, list;
    QD_TRY(qd_chat_bind(run, arguments, "value d? attribute?", v));
    QD_TRY(qd_chat_to_string(run, v[1], &v[1]));
    QD_TRY(qd_chat_items(run, v[0], &list));
    for (size_t i = 0; i < list.sequence->count && v[2].type != QD_CHAT_NONE; i++)
        QD_TRY(at_path(run, list.sequence->items[i], v[2], NULL, &list.sequence->items[i]));
    return qd_chat_join(run, v[1], list, false, result);
}

FILTER(filter_items)
{
    qd_chat_value v;
    QD_TRY(qd_chat_bind(run, arguments, "value", &v));
    if (v.type == QD_CHAT_DICT) {
        v.type = QD_CHAT_VIEW;
        v.detail = 'i';
    } else if (v.type != QD_CHAT_UNDEFINED) {
        return qd_chat_bad_type(run, "'items'", v);
    }
    QD_TRY(qd_chat_items(run, v, result));
    result->type = QD_CHAT_ITERATOR;
    return QD_OK;
}

/* `arguments` with another subject, and without the arguments before `skip`. */
static qd_status inner_arguments(qd_chat_run *run, const qd_chat_arguments *arguments, size_t skip, qd_chat_arguments *inner)
{
    *inner = *arguments;
    inner->count = arguments->count - skip;
    QD_TRY(qd_chat_take(run, inner->count * sizeof *inner->positional, &inner->positional));
    memcpy(inner->positional + 1, arguments->positional + skip + 1, (inner->count - 1) * sizeof *inner->positional);
    return QD_OK;
}

static const char *named_function(qd_chat_value name, char *text, size_t size)
{
    if (name.type != QD_CHAT_STRING || name.length >= size)
        return NULL;
    memcpy(text, name.text, name.length);
    text[name.length] = '\0';
    return text;
}

FILTER(filter_map)
{
    qd_chat_value list, missing = {0};
    qd_chat_arguments inner = {0};
    const qd_chat_function *function = NULL;
    char name[40];
    if (!qd_chat_truth(arguments->positional[0])) /* None too: Jinja does not look at it */
        return qd_chat_sequence_new(run, QD_CHAT_ITERATOR, 0, result);
    QD_TRY(qd_chat_items(run, arguments->positional[0], &list));
    bool by_attribute = arguments->count == 1, has_attribute = false, has_missing = false;
    qd_chat_value attribute = qd_chat_none();
    for (size_t i = 0; i < arguments->named_count && by_attribute; i++) {
        if (strcmp(arguments->names[i], "attribute") == 0) {
            attribute = arguments->named[i];
            has_attribute = true;
        } else if (strcmp(arguments->names[i], "default") == 0) {
            missing = arguments->named[i];
            has_missing = missing.type != QD_CHAT_NONE;
        } else {
            return QD_CHAT_FAIL(run, "'map' has no argument '%.80s'", arguments->names[i]);
        }
    }
    if (by_attribute && !has_attribute)
        return QD_CHAT_FAIL(run, "'map' needs the name of a filter or attribute=");
    if (!by_attribute) {
        const char *found = named_function(arguments->positional[1], name, sizeof name);
        function = found ? qd_chat_find_filter(found) : NULL;
        if (!function)
            return QD_CHAT_FAIL(run, "the filter given to 'map' does not exist or is not implemented");
        QD_TRY(inner_arguments(run, arguments, 1, &inner));
        inner.callee = function->name;
    }
    for (size_t i = 0; i < list.sequence->count; i++) {
        qd_chat_value *item = &list.sequence->items[i];
        if (by_attribute) {
            QD_TRY(at_path(run, *item, attribute, has_missing ? &missing : NULL, item));
        } else {
            inner.positional[0] = *item;
            QD_TRY(function->call(run, &inner, item));
        }
    }
    *result = list;
    result->type = QD_CHAT_ITERATOR;
    return QD_OK;
}

static qd_status choose(qd_chat_run *run, const qd_chat_arguments *arguments, bool by_attribute, bool wanted, qd_chat_value *result)
{
    qd_chat_value list;
    qd_chat_arguments inner;
    const qd_chat_function *test = NULL;
    char name[40];
    size_t skip = by_attribute ? 1 : 0, kept = 0;
    if (!qd_chat_truth(arguments->positional[0]))
        return qd_chat_sequence_new(run, QD_CHAT_ITERATOR, 0, result);
    if (arguments->count < 1 + skip)
        return QD_CHAT_FAIL(run, "'%s' needs the name of an attribute", arguments->callee);
    QD_TRY(qd_chat_items(run, arguments->positional[0], &list));
    if (arguments->count > 1 + skip) {
        const char *found = named_function(arguments->positional[1 + skip], name, sizeof name);
        test = found ? qd_chat_find_test(found) : NULL;
        if (!test)
            return QD_CHAT_FAIL(run, "the test given to '%s' does not exist or is not implemented", arguments->callee);
        QD_TRY(inner_arguments(run, arguments, 1 + skip, &inner));
        inner.callee = test->name;
    }
    for (size_t i = 0; i < list.sequence->count; i++) {
        qd_chat_value item = list.sequence->items[i], subject = item, passes;
        if (by_attribute)
            QD_TRY(at_path(run, item, arguments->positional[1], NULL, &subject));
        passes = subject;
        if (test) {
            inner.positional[0] = subject;
            QD_TRY(test->call(run, &inner, &passes));
        }
        if (qd_chat_truth(passes) == wanted)
            list.sequence->items[kept++] = item;
    }
    list.sequence->count = kept;
    *result = list;
    result->type = QD_CHAT_ITERATOR;
    return QD_OK;
}

FILTER(filter_select)
{
    return choose(run, arguments, false, true, result);
}

FILTER(filter_reject)
{
    return choose(run, arguments, false, false, result);
}

FILTER(filter_selectattr)
{
    return choose(run, arguments, true, true, result);
}

FILTER(filter_rejectattr)
{
    return choose(run, arguments, true, false, result);
}

/* ---- text and numbers ---- */

FILTER(filter_indent)
{
    qd_chat_value v[4] = {{0}, qd_chat_int(4), qd_chat_bool(false), qd_chat_bool(false)};
    QD_TRY(qd_chat_bind(run, arguments, "s width? first? blank?", v));
    QD_TRY(qd_chat_refuse_undefined(run, v[0]));
    if (v[0].type != QD_CHAT_STRING)
        return qd_chat_bad_type(run, "'indent'", v[0]);
    bool first = qd_chat_truth(v[2]), blank = qd_chat_truth(v[3]);
    if (v[1].type != QD_CHAT_STRING)
        QD_TRY(qd_chat_binary(run, '*', qd_chat_literal(" "), v[1], &v[1]));
    qd_strbuf out = {0};
    qd_status status = QD_OK;
    size_t written = run->written, at = 0, all, lines = 0;
    do { /* the text is read as if a line end followed it */
        QD_TRY_DONE(qd_chat_spend(run, 1));
        size_t length = qd_chat_line(v[0].text + at, v[0].length - at, &all);
        QD_TRY_DONE(qd_chat_write(run, &out, "\n", lines ? 1 : 0));
        if (lines ? blank || length : first)
            QD_TRY_DONE(qd_chat_write(run, &out, v[1].text, v[1].length));
        QD_TRY_DONE(qd_chat_write(run, &out, v[0].text + at, length));
        bool ended = all > length;
        at += all;
        lines++;
        if (!ended || (at == v[0].length && all == length + 1 && v[0].text[at - 1] == '\r'))
            break;
    } while (at <= v[0].length);
    run->written = written;
    return qd_chat_captured(run, &out, result);
done:
    qd_strbuf_free(&out);
    return status;
}

/* Python's int() and float() of a string. base 0: float. */
static bool read_number(qd_chat_value s, int base, int64_t *integer, double *real)
{
    char text[80], *end;
    size_t length = 0, begin = qd_chat_space_length(s.text, s.length), stop = qd_chat_without_space(s.text, s.length);
    if (stop <= begin || stop - begin >= sizeof text)
        return false;
    for (size_t i = begin; i < stop; i++) {
        char c = s.text[i];
        bool digit = c >= '0' && c <= '9';
        if (c == '_') { /* between digits only */
            if (i == begin || i + 1 == stop || s.text[i - 1] < '0' || s.text[i - 1] > '9' || s.text[i + 1] < '0' || s.text[i + 1] > '9')
                return false;
            continue;
        }
        if (!digit && !((c == '+' || c == '-') && (i == begin || base == 0)) && !(base == 0 && (c == '.' || c == 'e' || c == 'E')))
            return false;
        text[length++] = c;
    }
    text[length] = '\0';
    errno = 0;
    if (base)
        *integer = strtoll(text, &end, 10);
    else
        *real = qd_double_parse(text, &end);
    return *end == '\0' && end != text && (!base || errno == 0);
}

FILTER(filter_int)
{
    qd_chat_value v[3] = {{0}, qd_chat_int(0), qd_chat_int(10)};
    int64_t integer = 0;
    double real = NAN;
    QD_TRY(qd_chat_bind(run, arguments, "value default? base?", v));
    QD_TRY(qd_chat_refuse_undefined(run, v[0]));
    if (v[2].type != QD_CHAT_INT || v[2].integer != 10)
        return QD_CHAT_FAIL(run, "'int' with a base other than 10 is not implemented");
    if (v[0].type == QD_CHAT_BOOL || v[0].type == QD_CHAT_INT) {
        *result = qd_chat_int(qd_chat_as_int(v[0]));
        return QD_OK;
    }
    if (v[0].type == QD_CHAT_STRING)
        QD_TRY(qd_chat_spend(run, v[0].length / 4));
    if (v[0].type == QD_CHAT_STRING && !qd_chat_is_ascii(v[0].text, v[0].length))
        return QD_CHAT_FAIL(run, "'int' of characters outside ASCII is not implemented");
    *result = v[1];
    if (v[0].type == QD_CHAT_STRING && read_number(v[0], 10, &integer, &real)) {
        *result = qd_chat_int(integer);
        return QD_OK;
    }
    if (v[0].type == QD_CHAT_FLOAT)
        real = v[0].real;
    else if (v[0].type != QD_CHAT_STRING || !read_number(v[0], 0, &integer, &real))
        return QD_OK;
    if (isinf(real) || isnan(real))
        return v[0].type == QD_CHAT_FLOAT && isinf(real) ? QD_CHAT_FAIL(run, "infinity has no integer value") : QD_OK;
    if (fabs(real) >= 9223372036854775807.0)
        return QD_CHAT_FAIL(run, "integers of more than 64 bits are not implemented");
    *result = qd_chat_int((int64_t)real);
    return QD_OK;
}

FILTER(filter_float)
{
    qd_chat_value v[2] = {{0}, qd_chat_real(0)};
    int64_t integer;
    double real;
    QD_TRY(qd_chat_bind(run, arguments, "value default?", v));
    QD_TRY(qd_chat_refuse_undefined(run, v[0]));
    *result = v[1];
    if (v[0].type == QD_CHAT_STRING)
        QD_TRY(qd_chat_spend(run, v[0].length / 4));
    if (qd_chat_is_number(v[0]))
        *result = qd_chat_real(qd_chat_as_real(v[0]));
    else if (v[0].type == QD_CHAT_STRING && read_number(v[0], 0, &integer, &real))
        *result = qd_chat_real(real);
    return QD_OK;
}

FILTER(filter_abs)
{
    qd_chat_value v;
    QD_TRY(qd_chat_bind(run, arguments, "value", &v));
    QD_TRY(qd_chat_refuse_undefined(run, v));
    if (!qd_chat_is_number(v))
        return qd_chat_bad_type(run, "'abs'", v);
    *result = v.type == QD_CHAT_FLOAT ? qd_chat_real(fabs(v.real)) : qd_chat_int(qd_chat_as_int(v));
    return result->type == QD_CHAT_INT && result->integer < 0 ? qd_chat_binary(run, '-', qd_chat_int(0), *result, result) : QD_OK;
}

static const qd_chat_function filters[] = {
    {"abs", filter_abs}, {"capitalize", filter_capitalize}, {"count", filter_length}, {"d", filter_default},
    {"default", filter_default}, {"first", filter_first}, {"float", filter_float}, {"indent", filter_indent}, {"int", filter_int},
    {"items", filter_items}, {"join", filter_join}, {"last", filter_last}, {"length", filter_length}, {"list", filter_list},
    {"lower", filter_lower}, {"map", filter_map}, {"reject", filter_reject}, {"rejectattr", filter_rejectattr},
    {"replace", filter_replace}, {"reverse", filter_reverse}, {"safe", filter_safe}, {"select", filter_select},
    {"selectattr", filter_selectattr}, {"string", filter_string}, {"title", filter_title}, {"tojson", qd_chat_tojson},
    {"trim", filter_trim}, {"upper", filter_upper},
};

const qd_chat_function *qd_chat_find_filter(const char *name)
{
    for (size_t i = 0; i < sizeof filters / sizeof *filters; i++)
        if (strcmp(filters[i].name, name) == 0)
            return &filters[i];
    return NULL;
}

bool qd_chat_known_filter(const char *name)
{
    static const char *const known[] = {
        "attr", "batch", "center", "dictsort", "e", "escape", "filesizeformat", "forceescape", "format", "groupby", "max", "min",
        "pprint", "random", "round", "slice", "sort", "striptags", "sum", "truncate", "unique", "urlencode", "urlize", "wordcount",
        "wordwrap", "xmlattr",
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i], name) == 0)
            return true;
    return qd_chat_find_filter(name) != NULL;
}
