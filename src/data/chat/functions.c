/* Binding of arguments, and the global functions: range, dict, namespace, raise_exception and
 * strftime_now. */
#include "data/chat/chat_impl.h"

#include <stdio.h>
#include <string.h>

/* The next parameter of a list "name name? …"; false at its end. */
static bool next_parameter(const char **list, char name[32], bool *optional)
{
    while (**list == ' ')
        ++*list;
    size_t length = strcspn(*list, " ?");
    if (!length)
        return false;
    memcpy(name, *list, length);
    name[length] = '\0';
    *list += length;
    *optional = **list == '?';
    *list += *optional;
    return true;
}

qd_status qd_chat_bind(qd_chat_run *run, const qd_chat_arguments *arguments, const char *parameters, qd_chat_value *values)
{
    char name[32];
    bool optional;
    size_t index = 0, used = 0;
    for (const char *list = parameters; next_parameter(&list, name, &optional); index++) {
        size_t given = 0;
        while (given < arguments->named_count && strcmp(arguments->names[given], name) != 0)
            given++;
        bool named = given < arguments->named_count;
        if (named && index < arguments->count)
            return QD_CHAT_FAIL(run, "'%.80s' is given the argument '%s' twice", arguments->callee, name);
        if (index < arguments->count)
            values[index] = arguments->positional[index];
        else if (named)
            values[index] = arguments->named[given];
        else if (!optional)
            return QD_CHAT_FAIL(run, "'%.80s' needs the argument '%s'", arguments->callee, name);
        used += named;
    }
    if (arguments->count > index || used < arguments->named_count)
        return QD_CHAT_FAIL(run, "'%.80s' does not take these arguments; it takes: %s", arguments->callee, parameters);
    return QD_OK;
}

static qd_status call_range(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)
{
    qd_chat_range *range;
    qd_chat_value v[3] = {{0}, qd_chat_none(), qd_chat_int(1)};
    if (arguments->named_count)
        return QD_CHAT_FAIL(run, "'range' takes no named arguments");
    QD_TRY(qd_chat_bind(run, arguments, "start stop? step?", v));
    for (int i = 0; i < 3; i++) {
        QD_TRY(qd_chat_refuse_undefined(run, v[i]));
        if (v[i].type != QD_CHAT_INT && v[i].type != QD_CHAT_BOOL && !(i == 1 && arguments->count == 1))
            return qd_chat_bad_type(run, "range()", v[i]);
    }
    if (arguments->count == 1) {
        v[1] = v[0];
        v[0] = qd_chat_int(0);
    }
    QD_TRY(qd_chat_take(run, sizeof *range, &range));
    *range = (qd_chat_range){.start = qd_chat_as_int(v[0]), .stop = qd_chat_as_int(v[1]), .step = qd_chat_as_int(v[2])};
    if (range->step == 0)
        return QD_CHAT_FAIL(run, "the step of range() must not be 0");
    uint64_t distance = range->step > 0 ? (uint64_t)range->stop - (uint64_t)range->start : (uint64_t)range->start - (uint64_t)range->stop;
    uint64_t stride = range->step > 0 ? (uint64_t)range->step : 0 - (uint64_t)range->step;
    bool empty = range->step > 0 ? range->stop <= range->start : range->stop >= range->start;
    uint64_t count = empty ? 0 : (distance - 1) / stride + 1;
    if (count > QD_CHAT_MOST_RANGE)
        return QD_CHAT_FAIL(run, "range() has more than %d items, the limit of Jinja's sandbox", QD_CHAT_MOST_RANGE);
    range->count = (int64_t)count;
    *result = (qd_chat_value){.type = QD_CHAT_RANGE, .range = range};
    return QD_OK;
}

/* dict() and namespace(): a dict or nothing, and named arguments. */
static qd_status make_dict(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_type type, qd_chat_value *result)
{
    QD_TRY(qd_chat_dict_new(run, type, 4 + arguments->named_count, result));
    if (arguments->count > 1 || (arguments->count == 1 && arguments->positional[0].type != QD_CHAT_DICT))
        return QD_CHAT_FAIL(run, "'%s' takes one dict or named arguments", arguments->callee);
    if (arguments->count == 1) {
        const qd_chat_dict *from = arguments->positional[0].dict;
        for (size_t i = 0; i < from->count; i++)
            QD_TRY(qd_chat_dict_put(run, result->dict, from->keys[i], from->values[i]));
    }
    for (size_t i = 0; i < arguments->named_count; i++)
        QD_TRY(qd_chat_dict_put(run, result->dict, qd_chat_literal(arguments->names[i]), arguments->named[i]));
    for (size_t i = 0; i < result->dict->count && type == QD_CHAT_NAMESPACE; i++)
        if (result->dict->keys[i].type == QD_CHAT_STRING && result->dict->keys[i].length && result->dict->keys[i].text[0] == '_')
            return QD_CHAT_FAIL(run, "an attribute of a namespace begins with '_', which transformers refuses");
    return QD_OK;
}

static qd_status call_dict(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)
{
    return make_dict(run, arguments, QD_CHAT_DICT, result);
}

static qd_status call_namespace(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)
{
    return make_dict(run, arguments, QD_CHAT_NAMESPACE, result);
}

static qd_status call_raise(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)
{
    qd_chat_value text;
    QD_TRY(qd_chat_bind(run, arguments, "message", result));
    QD_TRY(qd_chat_to_string(run, *result, &text));
    return QD_CHAT_FAIL(run, "the template refuses these messages: %.*s", text.length > 900 ? 900 : (int)text.length, text.text);
}

/* ---- strftime_now ---- */

typedef struct moment {
    int year, month, day, hour, minute, second;
} moment;

static int days_in(int year, int month)
{
    static const int days[] = {31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    bool leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    return days[month - 1] + (month == 2 && leap);
}

static bool read_moment(const char *text, moment *m)
{
    int end = 0;
    *m = (moment){0};
    bool whole = sscanf(text, "%4d-%2d-%2d%n", &m->year, &m->month, &m->day, &end) == 3;
    if (whole && text[end]) {
        int rest = 0;
        whole = sscanf(text + end, " %2d:%2d:%2d%n", &m->hour, &m->minute, &m->second, &rest) == 3 && !text[end + rest];
    }
    return whole && m->year > 0 && m->month >= 1 && m->month <= 12 && m->day >= 1 && m->day <= days_in(m->year, m->month) &&
           m->hour >= 0 && m->hour < 24 && m->minute >= 0 && m->minute < 60 && m->second >= 0 && m->second < 60;
}

static int day_of_year(const moment *m)
{
    int day = m->day;
    for (int month = 1; month < m->month; month++)
        day += days_in(m->year, month);
    return day;
}

/* 0: Sunday. */
static int weekday(const moment *m)
{
    int years = m->year - 1;
    return (years + years / 4 - years / 100 + years / 400 + day_of_year(m)) % 7;
}

/* One conversion of strftime() in the C locale; false: not implemented. */
static bool convert(const moment *m, char kind, char *text, size_t size)
{
    static const char *const months[] = {"January", "February", "March", "April", "May", "June", "July", "August", "September",
                                         "October", "November", "December"};
    static const char *const days[] = {"Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"};
    int number = kind == 'd' ? m->day : kind == 'm' ? m->month : kind == 'H' ? m->hour : kind == 'M' ? m->minute : kind == 'S' ? m->second
               : kind == 'y' ? m->year % 100 : kind == 'I' ? (m->hour + 11) % 12 + 1 : -1;
    if (number >= 0)
        snprintf(text, size, "%02d", number);
    else if (kind == 'Y')
        snprintf(text, size, "%d", m->year);
    else if (kind == 'j')
        snprintf(text, size, "%03d", day_of_year(m));
    else if (kind == 'B' || kind == 'b')
        snprintf(text, size, kind == 'b' ? "%.3s" : "%s", months[m->month - 1]);
    else if (kind == 'A' || kind == 'a')
        snprintf(text, size, kind == 'a' ? "%.3s" : "%s", days[weekday(m)]);
    else if (kind == 'p')
        snprintf(text, size, "%s", m->hour < 12 ? "AM" : "PM");
    else if (kind == '%')
        snprintf(text, size, "%%");
    else
        return false;
    return true;
}

qd_status qd_chat_strftime(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)
{
    qd_chat_value format;
    moment now;
    char text[32];
    QD_TRY(qd_chat_bind(run, arguments, "format", &format));
    if (!run->input->date)
        return QD_CHAT_FAIL(run, "the template calls strftime_now() for today's date, which would change from run to run; give a date");
    if (!read_moment(run->input->date, &now))
        return QD_FAIL(QD_USAGE, "%s: the date '%.40s' must be like 2025-01-31 or 2025-01-31 12:30:00", run->chat->name, run->input->date);
    if (format.type != QD_CHAT_STRING)
        return qd_chat_bad_type(run, "strftime_now()", format);
    *result = qd_chat_literal("");
    for (size_t at = 0; at < format.length; at++) {
        qd_chat_value piece = qd_chat_string(format.text + at, 1);
        if (format.text[at] == '%') {
            if (++at == format.length || !convert(&now, format.text[at], text, sizeof text))
                return QD_CHAT_FAIL(run, "this conversion of strftime_now() is not implemented; implemented are %%Y %%m %%d %%H %%M %%S "
                                         "%%y %%b %%B %%a %%A %%j %%I %%p %%%%");
            QD_TRY(qd_chat_copy(run, text, strlen(text), &piece));
        }
        QD_TRY(qd_chat_concat(run, *result, piece, result));
    }
    return QD_OK;
}

const qd_chat_function *qd_chat_find_global(const char *name)
{
    static const qd_chat_function functions[] = {
        {"range", call_range}, {"dict", call_dict}, {"namespace", call_namespace}, {"raise_exception", call_raise},
        {"strftime_now", qd_chat_strftime},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (strcmp(functions[i].name, name) == 0)
            return &functions[i];
    return NULL;
}

bool qd_chat_known_global(const char *name)
{
    static const char *const known[] = {"range", "dict", "namespace", "raise_exception", "strftime_now", "lipsum", "cycler", "joiner",
                                        "self", "super"};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (strcmp(known[i], name) == 0)
            return true;
    return false;
}
