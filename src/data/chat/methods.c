/* Methods of Python's str, list, tuple and dict. arguments->positional[0] is the object. */
#include "data/chat/chat_impl.h"

#include <ctype.h>
#include <string.h>

#define METHOD(name) static qd_status name(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)

/* Binds parameters after the object; Python's builtin methods take no names, with few
 * exceptions. */
static qd_status bind(qd_chat_run *run, const qd_chat_arguments *arguments, const char *parameters, qd_chat_value *v)
{
    if (arguments->named_count && !strstr(parameters, "maxsplit") && !strstr(parameters, "keepends"))
        return QD_CHAT_FAIL(run, "method '%s' takes no named arguments", arguments->callee);
    return qd_chat_bind(run, arguments, parameters, v);
}

static qd_status need_string(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value value)
{
    if (value.type == QD_CHAT_STRING)
        return QD_OK;
    return QD_CHAT_FAIL(run, "method '%s' needs a string, not a value of type '%s'", arguments->callee, qd_chat_type_name(value));
}

static qd_status need_int(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value value)
{
    if (value.type == QD_CHAT_INT || value.type == QD_CHAT_BOOL)
        return QD_OK;
    return QD_CHAT_FAIL(run, "method '%s' needs an integer, not a value of type '%s'", arguments->callee, qd_chat_type_name(value));
}

static qd_status strip(qd_chat_run *run, const qd_chat_arguments *arguments, bool left, bool right, qd_chat_value *result)
{
    qd_chat_value v[2] = {{0}, qd_chat_none()};
    QD_TRY(bind(run, arguments, "self chars?", v));
    return qd_chat_strip(run, v[0], v[1], left, right, result);
}

METHOD(str_strip)
{
    return strip(run, arguments, true, true, result);
}

METHOD(str_lstrip)
{
    return strip(run, arguments, true, false, result);
}

METHOD(str_rstrip)
{
    return strip(run, arguments, false, true, result);
}

static qd_status change_case(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_case to, qd_chat_value *result)
{
    qd_chat_value v;
    QD_TRY(bind(run, arguments, "self", &v));
    return qd_chat_change_case(run, v, to, result);
}

METHOD(str_upper)
{
    return change_case(run, arguments, QD_CHAT_UPPER, result);
}

METHOD(str_lower)
{
    return change_case(run, arguments, QD_CHAT_LOWER, result);
}

METHOD(str_title)
{
    return change_case(run, arguments, QD_CHAT_TITLE, result);
}

METHOD(str_capitalize)
{
    return change_case(run, arguments, QD_CHAT_CAPITALIZE, result);
}

METHOD(str_replace)
{
    qd_chat_value v[4] = {{0}, {0}, {0}, qd_chat_int(-1)};
    QD_TRY(bind(run, arguments, "self old new count?", v));
    QD_TRY(need_string(run, arguments, v[1]));
    QD_TRY(need_string(run, arguments, v[2]));
    QD_TRY(need_int(run, arguments, v[3]));
    return qd_chat_replace(run, v[0], v[1], v[2], qd_chat_as_int(v[3]), result);
}

METHOD(str_join)
{
    qd_chat_value v[2];
    QD_TRY(bind(run, arguments, "self iterable", v));
    return qd_chat_join(run, v[0], v[1], true, result);
}

/* ---- splitting and searching ---- */

static qd_status split(qd_chat_run *run, const qd_chat_arguments *arguments, bool from_right, qd_chat_value *result)
{
    qd_chat_value v[3] = {{0}, qd_chat_none(), qd_chat_int(-1)};
    QD_TRY(bind(run, arguments, "self sep? maxsplit?", v));
    QD_TRY(need_int(run, arguments, v[2]));
    if (v[1].type != QD_CHAT_NONE)
        QD_TRY(need_string(run, arguments, v[1]));
    if (v[1].type != QD_CHAT_NONE && !v[1].length)
        return QD_CHAT_FAIL(run, "the separator of '%s' must not be empty", arguments->callee);
    return qd_chat_split(run, v[0], v[1], qd_chat_as_int(v[2]), from_right, result);
}

METHOD(str_split)
{
    return split(run, arguments, false, result);
}

METHOD(str_rsplit)
{
    return split(run, arguments, true, result);
}

METHOD(str_splitlines)
{
    qd_chat_value v[2] = {{0}, qd_chat_bool(false)};
    QD_TRY(bind(run, arguments, "self keepends?", v));
    return qd_chat_split_lines(run, v[0], qd_chat_truth(v[1]), result);
}

static qd_status partition(qd_chat_run *run, const qd_chat_arguments *arguments, bool last, qd_chat_value *result)
{
    qd_chat_value v[2];
    QD_TRY(bind(run, arguments, "self sep", v));
    QD_TRY(need_string(run, arguments, v[1]));
    if (!v[1].length)
        return QD_CHAT_FAIL(run, "the separator of '%s' must not be empty", arguments->callee);
    QD_TRY(qd_chat_spend(run, qd_chat_search_steps(v[0], v[1], last)));
    const char *found = last ? qd_chat_search_last(v[0].text, v[0].length, v[1])
                             : qd_chat_search(v[0].text, v[0].length, v[1].text, v[1].length);
    QD_TRY(qd_chat_sequence_new(run, QD_CHAT_TUPLE, 3, result));
    qd_chat_value *items = result->sequence->items, empty = qd_chat_literal("");
    size_t at = found ? (size_t)(found - v[0].text) : 0;
    items[0] = found ? qd_chat_string(v[0].text, at) : last ? empty : v[0];
    items[1] = found ? v[1] : empty;
    items[2] = found ? qd_chat_string(found + v[1].length, v[0].length - at - v[1].length) : last ? v[0] : empty;
    return QD_OK;
}

METHOD(str_partition)
{
    return partition(run, arguments, false, result);
}

METHOD(str_rpartition)
{
    return partition(run, arguments, true, result);
}

static bool begins(qd_chat_value s, qd_chat_value part, bool at_end)
{
    return part.length <= s.length && memcmp(s.text + (at_end ? s.length - part.length : 0), part.text, part.length) == 0;
}

static qd_status affix(qd_chat_run *run, const qd_chat_arguments *arguments, bool at_end, qd_chat_value *result)
{
    qd_chat_value v[2];
    QD_TRY(bind(run, arguments, "self prefix", v));
    bool found = false;
    QD_TRY(qd_chat_spend(run, v[0].length / 64)); /* a part that is longer is not compared */
    if (v[1].type == QD_CHAT_TUPLE) {
        for (size_t i = 0; i < v[1].sequence->count && !found; i++) {
            QD_TRY(need_string(run, arguments, v[1].sequence->items[i]));
            QD_TRY(qd_chat_spend(run, 1 + v[0].length / 64));
            found = begins(v[0], v[1].sequence->items[i], at_end);
        }
    } else {
        QD_TRY(need_string(run, arguments, v[1]));
        found = begins(v[0], v[1], at_end);
    }
    *result = qd_chat_bool(found);
    return QD_OK;
}

METHOD(str_startswith)
{
    return affix(run, arguments, false, result);
}

METHOD(str_endswith)
{
    return affix(run, arguments, true, result);
}

static qd_status remove_affix(qd_chat_run *run, const qd_chat_arguments *arguments, bool at_end, qd_chat_value *result)
{
    qd_chat_value v[2];
    QD_TRY(bind(run, arguments, "self affix", v));
    QD_TRY(need_string(run, arguments, v[1]));
    QD_TRY(qd_chat_spend(run, v[0].length / 64));
    *result = v[0];
    if (begins(v[0], v[1], at_end)) {
        result->text += at_end ? 0 : v[1].length;
        result->length -= v[1].length;
    }
    return QD_OK;
}

METHOD(str_removeprefix)
{
    return remove_affix(run, arguments, false, result);
}

METHOD(str_removesuffix)
{
    return remove_affix(run, arguments, true, result);
}

static qd_status find(qd_chat_run *run, const qd_chat_arguments *arguments, bool last, bool must, qd_chat_value *result)
{
    qd_chat_value v[2];
    QD_TRY(bind(run, arguments, "self sub", v));
    QD_TRY(need_string(run, arguments, v[1]));
    QD_TRY(qd_chat_spend(run, qd_chat_search_steps(v[0], v[1], last)));
    const char *found = last ? qd_chat_search_last(v[0].text, v[0].length, v[1])
                             : qd_chat_search(v[0].text, v[0].length, v[1].text, v[1].length);
    if (!found && must)
        return QD_CHAT_FAIL(run, "'%s': the text was not found", arguments->callee);
    *result = qd_chat_int(found ? (int64_t)qd_chat_text_length(v[0].text, (size_t)(found - v[0].text)) : -1);
    return QD_OK;
}

METHOD(str_find)
{
    return find(run, arguments, false, false, result);
}

METHOD(str_rfind)
{
    return find(run, arguments, true, false, result);
}

METHOD(str_index)
{
    return find(run, arguments, false, true, result);
}

METHOD(str_rindex)
{
    return find(run, arguments, true, true, result);
}

METHOD(str_count)
{
    qd_chat_value v[2];
    int64_t count = 0;
    QD_TRY(bind(run, arguments, "self sub", v));
    QD_TRY(need_string(run, arguments, v[1]));
    QD_TRY(qd_chat_spend(run, v[0].length / 16));
    const char *at = v[0].text, *end = at + v[0].length;
    if (!v[1].length)
        count = (int64_t)qd_chat_text_length(v[0].text, v[0].length) + 1;
    while (v[1].length && (at = qd_chat_search(at, (size_t)(end - at), v[1].text, v[1].length)) != NULL) {
        at += v[1].length;
        count++;
        QD_TRY(qd_chat_spend(run, 1));
    }
    *result = qd_chat_int(count);
    return QD_OK;
}

static qd_status every(qd_chat_run *run, const qd_chat_arguments *arguments, int (*belongs)(int), qd_chat_value *result)
{
    qd_chat_value v;
    QD_TRY(bind(run, arguments, "self", &v));
    QD_TRY(qd_chat_spend(run, v.length / 4));
    if (!qd_chat_is_ascii(v.text, v.length))
        return QD_CHAT_FAIL(run, "method '%s' of characters outside ASCII is not implemented", arguments->callee);
    bool all = v.length > 0;
    for (size_t i = 0; i < v.length && all; i++)
        all = belongs((unsigned char)v.text[i]) != 0;
    *result = qd_chat_bool(all);
    return QD_OK;
}

METHOD(str_isdigit)
{
    return every(run, arguments, isdigit, result);
}

METHOD(str_isalpha)
{
    return every(run, arguments, isalpha, result);
}

METHOD(str_isalnum)
{
    return every(run, arguments, isalnum, result);
}

METHOD(str_isspace)
{
    qd_chat_value v;
    QD_TRY(bind(run, arguments, "self", &v));
    QD_TRY(qd_chat_spend(run, v.length / 4));
    *result = qd_chat_bool(v.length && qd_chat_space_length(v.text, v.length) == v.length);
    return QD_OK;
}

/* ---- lists and dicts ---- */

METHOD(list_index)
{
    qd_chat_value v[2];
    bool equal = false;
    QD_TRY(bind(run, arguments, "self value", v));
    for (size_t i = 0; i < v[0].sequence->count; i++) {
        QD_TRY(qd_chat_equal(run, v[0].sequence->items[i], v[1], &equal));
        if (equal) {
            *result = qd_chat_int((int64_t)i);
            return QD_OK;
        }
    }
    return QD_CHAT_FAIL(run, "'index': the value is not in the list");
}

METHOD(list_count)
{
    qd_chat_value v[2];
    int64_t count = 0;
    bool equal;
    QD_TRY(bind(run, arguments, "self value", v));
    for (size_t i = 0; i < v[0].sequence->count; i++) {
        QD_TRY(qd_chat_equal(run, v[0].sequence->items[i], v[1], &equal));
        count += equal;
    }
    *result = qd_chat_int(count);
    return QD_OK;
}

METHOD(same) /* copy(): nothing can be modified */
{
    return bind(run, arguments, "self", result);
}

METHOD(dict_get)
{
    qd_chat_value v[3] = {{0}, {0}, qd_chat_none()};
    bool found;
    QD_TRY(bind(run, arguments, "self key default?", v));
    QD_TRY(qd_chat_dict_find(run, v[0].dict, v[1], &found, result));
    if (!found)
        *result = v[2];
    return QD_OK;
}

static qd_status view(qd_chat_run *run, const qd_chat_arguments *arguments, char kind, qd_chat_value *result)
{
    QD_TRY(bind(run, arguments, "self", result));
    result->type = QD_CHAT_VIEW;
    result->detail = (uint8_t)kind;
    return QD_OK;
}

METHOD(dict_items)
{
    return view(run, arguments, 'i', result);
}

METHOD(dict_keys)
{
    return view(run, arguments, 'k', result);
}

METHOD(dict_values)
{
    return view(run, arguments, 'v', result);
}

static const qd_chat_function string_methods[] = {
    {"capitalize", str_capitalize}, {"count", str_count}, {"endswith", str_endswith}, {"find", str_find}, {"index", str_index},
    {"isalnum", str_isalnum}, {"isalpha", str_isalpha}, {"isdigit", str_isdigit}, {"isspace", str_isspace}, {"join", str_join},
    {"lower", str_lower}, {"lstrip", str_lstrip}, {"partition", str_partition}, {"removeprefix", str_removeprefix},
    {"removesuffix", str_removesuffix}, {"replace", str_replace}, {"rfind", str_rfind}, {"rindex", str_rindex},
    {"rpartition", str_rpartition}, {"rsplit", str_rsplit}, {"rstrip", str_rstrip}, {"split", str_split},
    {"splitlines", str_splitlines}, {"startswith", str_startswith}, {"strip", str_strip}, {"title", str_title},
    {"upper", str_upper}, {0},
};
static const qd_chat_function list_methods[] = {{"count", list_count}, {"index", list_index}, {"copy", same}, {0}};
static const qd_chat_function tuple_methods[] = {{"count", list_count}, {"index", list_index}, {0}};
static const qd_chat_function dict_methods[] = {
    {"copy", same}, {"get", dict_get}, {"items", dict_items}, {"keys", dict_keys}, {"values", dict_values}, {0},
};
static const qd_chat_function no_methods[] = {{0}};

static bool among(const char *names, const char *name, size_t length)
{
    for (const char *at = names; *at; at += strcspn(at, " ") + (at[strcspn(at, " ")] == ' '))
        if (strcspn(at, " ") == length && memcmp(at, name, length) == 0)
            return true;
    return false;
}

const qd_chat_function *qd_chat_find_method(qd_chat_type type, const char *name, size_t length, qd_chat_missing *missing)
{
    static const char string_rest[] = "casefold center encode expandtabs format format_map isascii isdecimal isidentifier islower "
                                      "isnumeric isprintable istitle isupper ljust maketrans rjust swapcase translate zfill";
    static const char list_changes[] = "append clear extend insert pop remove reverse sort";
    static const char dict_changes[] = "clear pop popitem setdefault update";
    static const char number_rest[] = "as_integer_ratio bit_count bit_length conjugate denominator from_bytes fromhex hex imag is_integer "
                                      "numerator real to_bytes";
    const qd_chat_function *table = type == QD_CHAT_STRING ? string_methods : type == QD_CHAT_LIST ? list_methods
                                  : type == QD_CHAT_TUPLE ? tuple_methods : type == QD_CHAT_DICT ? dict_methods : no_methods;
    const char *changes = type == QD_CHAT_LIST ? list_changes : type == QD_CHAT_DICT ? dict_changes : "";
    const char *rest = type == QD_CHAT_STRING ? string_rest : type == QD_CHAT_DICT ? "fromkeys" : type == QD_CHAT_RANGE
                     ? "start stop step count index" : qd_chat_is_number((qd_chat_value){.type = (uint8_t)type}) ? number_rest : "";
    *missing = among(changes, name, length) ? QD_CHAT_MODIFIES : among(rest, name, length) ? QD_CHAT_NOT_IMPLEMENTED : QD_CHAT_ABSENT;
    for (; table->name; table++)
        if (strlen(table->name) == length && memcmp(table->name, name, length) == 0)
            return table;
    return NULL;
}
