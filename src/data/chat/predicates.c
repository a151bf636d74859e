/* The tests after `is`, as Jinja defines them. */
#include "data/chat/chat_impl.h"

#include <ctype.h>
#include <string.h>

#define PREDICATE(name) static qd_status name(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *result)

static qd_status only(qd_chat_run *run, const qd_chat_arguments *arguments, qd_chat_value *value)
{
    return qd_chat_bind(run, arguments, "value", value);
}

/* Tests of the type. */
#define TYPE_PREDICATE(name, condition)                 \
    PREDICATE(name)                                     \
    {                                                   \
        qd_chat_value v;                                \
        QD_TRY(only(run, arguments, &v));               \
        *result = qd_chat_bool(condition);              \
        return QD_OK;                                   \
    }

TYPE_PREDICATE(is_defined, v.type != QD_CHAT_UNDEFINED)
TYPE_PREDICATE(is_undefined, v.type == QD_CHAT_UNDEFINED)
TYPE_PREDICATE(is_none, v.type == QD_CHAT_NONE)
TYPE_PREDICATE(is_boolean, v.type == QD_CHAT_BOOL)
TYPE_PREDICATE(is_true, v.type == QD_CHAT_BOOL && v.truth)
TYPE_PREDICATE(is_false, v.type == QD_CHAT_BOOL && !v.truth)
TYPE_PREDICATE(is_integer, v.type == QD_CHAT_INT)
TYPE_PREDICATE(is_float, v.type == QD_CHAT_FLOAT)
TYPE_PREDICATE(is_number, qd_chat_is_number(v))
TYPE_PREDICATE(is_string, v.type == QD_CHAT_STRING)
TYPE_PREDICATE(is_mapping, v.type == QD_CHAT_DICT)
TYPE_PREDICATE(is_iterable, v.type == QD_CHAT_UNDEFINED || v.type == QD_CHAT_LOOP ||
                                (v.type >= QD_CHAT_STRING && v.type <= QD_CHAT_ITERATOR))
TYPE_PREDICATE(is_sequence, v.type == QD_CHAT_UNDEFINED || v.type == QD_CHAT_STRING || v.type == QD_CHAT_LIST ||
                                v.type == QD_CHAT_TUPLE || v.type == QD_CHAT_DICT || v.type == QD_CHAT_RANGE)
TYPE_PREDICATE(is_callable, v.type >= QD_CHAT_LOOP || v.type == QD_CHAT_UNDEFINED)
TYPE_PREDICATE(is_escaped, v.type == QD_CHAT_STRING && v.detail)

static qd_status remainder_is(qd_chat_run *run, qd_chat_value value, qd_chat_value divisor, int expected, qd_chat_value *result)
{
    bool equal;
    QD_TRY(qd_chat_binary(run, '%', value, divisor, result));
    QD_TRY(qd_chat_equal(run, *result, qd_chat_int(expected), &equal));
    *result = qd_chat_bool(equal);
    return QD_OK;
}

PREDICATE(is_odd)
{
    qd_chat_value v;
    QD_TRY(only(run, arguments, &v));
    return remainder_is(run, v, qd_chat_int(2), 1, result);
}

PREDICATE(is_even)
{
    qd_chat_value v;
    QD_TRY(only(run, arguments, &v));
    return remainder_is(run, v, qd_chat_int(2), 0, result);
}

PREDICATE(is_divisible)
{
    qd_chat_value v[2];
    QD_TRY(qd_chat_bind(run, arguments, "value num", v));
    return remainder_is(run, v[0], v[1], 0, result);
}

static qd_status compared(qd_chat_run *run, const qd_chat_arguments *arguments, int op, qd_chat_value *result)
{
    qd_chat_value v[2];
    bool holds;
    QD_TRY(qd_chat_bind(run, arguments, "a b", v));
    QD_TRY(qd_chat_compare(run, op, v[0], v[1], &holds));
    *result = qd_chat_bool(holds);
    return QD_OK;
}

#define COMPARISON(name, op)                              \
    PREDICATE(name)                                       \
    {                                                     \
        return compared(run, arguments, (op), result);    \
    }

COMPARISON(is_equal, QD_CHAT_OP('=', '='))
COMPARISON(is_unequal, QD_CHAT_OP('!', '='))
COMPARISON(is_less, '<')
COMPARISON(is_at_most, QD_CHAT_OP('<', '='))
COMPARISON(is_greater, '>')
COMPARISON(is_at_least, QD_CHAT_OP('>', '='))
COMPARISON(is_in, QD_CHAT_OP_IN)

PREDICATE(is_same)
{
    qd_chat_value v[2];
    bool equal;
    QD_TRY(qd_chat_bind(run, arguments, "value other", v));
    bool single = v[0].type == QD_CHAT_NONE || v[0].type == QD_CHAT_BOOL || v[1].type == QD_CHAT_NONE || v[1].type == QD_CHAT_BOOL;
    if (!single)
        return QD_CHAT_FAIL(run, "'sameas' is implemented for true, false and none only");
    QD_TRY(qd_chat_equal(run, v[0], v[1], &equal));
    *result = qd_chat_bool(equal && v[0].type == v[1].type);
    return QD_OK;
}

/* str.islower() and str.isupper(): at least one letter, and none of the other case. */
static qd_status one_case(qd_chat_run *run, const qd_chat_arguments *arguments, bool upper, qd_chat_value *result)
{
    qd_chat_value v, s;
    bool any = false, other = false;
    QD_TRY(only(run, arguments, &v));
    QD_TRY(qd_chat_to_string(run, v, &s));
    if (!qd_chat_is_ascii(s.text, s.length))
        return QD_CHAT_FAIL(run, "upper and lower case of characters outside ASCII are not implemented");
    for (size_t i = 0; i < s.length; i++) {
        any = any || (upper ? isupper((unsigned char)s.text[i]) : islower((unsigned char)s.text[i]));
        other = other || (upper ? islower((unsigned char)s.text[i]) : isupper((unsigned char)s.text[i]));
    }
    *result = qd_chat_bool(any && !other);
    return QD_OK;
}

PREDICATE(is_lower)
{
    return one_case(run, arguments, false, result);
}

PREDICATE(is_upper)
{
    return one_case(run, arguments, true, result);
}

static const qd_chat_function predicates[] = {
    {"boolean", is_boolean}, {"callable", is_callable}, {"defined", is_defined}, {"divisibleby", is_divisible}, {"eq", is_equal},
    {"==", is_equal}, {"equalto", is_equal}, {"escaped", is_escaped}, {"even", is_even}, {"false", is_false}, {"float", is_float},
    {"ge", is_at_least}, {">=", is_at_least}, {"gt", is_greater}, {">", is_greater}, {"greaterthan", is_greater}, {"in", is_in},
    {"integer", is_integer}, {"iterable", is_iterable}, {"le", is_at_most}, {"<=", is_at_most}, {"lower", is_lower}, {"lt", is_less},
    {"<", is_less}, {"lessthan", is_less}, {"mapping", is_mapping}, {"ne", is_unequal}, {"!=", is_unequal}, {"none", is_none},
    {"number", is_number}, {"odd", is_odd}, {"sameas", is_same}, {"sequence", is_sequence}, {"string", is_string}, {"true", is_true},
    {"undefined", is_undefined}, {"upper", is_upper},
};

const qd_chat_function *qd_chat_find_test(const char *name)
{
    for (size_t i = 0; i < sizeof predicates / sizeof *predicates; i++)
        if (strcmp(predicates[i].name, name) == 0)
            return &predicates[i];
    return NULL;
}

bool qd_chat_known_test(const char *name)
{
    return strcmp(name, "filter") == 0 || strcmp(name, "test") == 0 || qd_chat_find_test(name);
}
