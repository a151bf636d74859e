/* Python's operators on values: arithmetic, concatenation, membership and comparison. */
#include "data/chat/chat_impl.h"

#include <math.h>
#include <string.h>

static const char *op_text(int op, char text[3])
{
    text[0] = (char)(op & 255);
    text[1] = (char)(op >> 8);
    text[2] = '\0';
    return text;
}

static qd_status bad_operands(qd_chat_run *run, int op, qd_chat_value a, qd_chat_value b)
{
    char text[3];
    return QD_CHAT_FAIL(run, "'%s' does not apply to values of type '%s' and '%s'", op_text(op, text), qd_chat_type_name(a),
                        qd_chat_type_name(b));
}

qd_status qd_chat_concat(qd_chat_run *run, qd_chat_value a, qd_chat_value b, qd_chat_value *value)
{
    if (a.detail || b.detail)
        return QD_CHAT_FAIL(run, "the result of 'safe' in an operation is not implemented; print it");
    if (!a.length || !b.length) {
        *value = a.length ? a : b;
        return QD_OK;
    }
    size_t length = (size_t)a.length + b.length;
    QD_TRY(qd_chat_spend(run, b.length / 16));
    bool in_place = run->growing && a.text >= run->growing && a.text + a.length == run->growing + run->growing_length &&
                    run->growing_capacity - run->growing_length >= b.length;
    if (in_place) { /* appends behind `a`, whose own bytes stay as they are */
        memcpy(run->growing + run->growing_length, b.text, b.length);
        run->growing_length += b.length;
        *value = qd_chat_string(a.text, length);
        return QD_OK;
    }
    QD_TRY(qd_chat_spend(run, a.length / 16));
    size_t capacity = length < 64 ? 128 : 2 * length;
    if (capacity > QD_CHAT_MOST_MEMORY - run->used)
        capacity = length;
    QD_TRY(qd_chat_take(run, capacity, &run->growing));
    memcpy(run->growing, a.text, a.length);
    memcpy(run->growing + a.length, b.text, b.length);
    run->growing_length = length;
    run->growing_capacity = capacity;
    *value = qd_chat_string(run->growing, length);
    return QD_OK;
}

static qd_status join_sequences(qd_chat_run *run, qd_chat_value a, qd_chat_value b, qd_chat_value *value)
{
    size_t first = a.sequence->count, second = b.sequence->count;
    QD_TRY(qd_chat_sequence_new(run, a.type, first + second, value));
    if (first)
        memcpy(value->sequence->items, a.sequence->items, first * sizeof *value);
    if (second)
        memcpy(value->sequence->items + first, b.sequence->items, second * sizeof *value);
    return QD_OK;
}

static qd_status repeat(qd_chat_run *run, qd_chat_value object, int64_t times, qd_chat_value *value)
{
    bool string = object.type == QD_CHAT_STRING;
    size_t unit = string ? object.length : object.sequence->count;
    size_t count = times > 0 && unit ? (size_t)times : 0;
    if (count > QD_CHAT_MOST_OUTPUT / (unit ? unit : 1))
        return QD_CHAT_FAIL(run, "a repeated value is longer than %d MiB", QD_CHAT_MOST_OUTPUT >> 20);
    if (!string) {
        QD_TRY(qd_chat_sequence_new(run, object.type, count * unit, value));
        for (size_t i = 0; i < count; i++)
            memcpy(value->sequence->items + i * unit, object.sequence->items, unit * sizeof *value);
        return QD_OK;
    }
    char *text;
    QD_TRY(qd_chat_spend(run, count * unit / 16));
    QD_TRY(qd_chat_take(run, count * unit + 1, &text));
    for (size_t i = 0; i < count; i++)
        memcpy(text + i * unit, object.text, unit);
    *value = qd_chat_string(text, count * unit);
    return QD_OK;
}

static qd_status too_large(qd_chat_run *run)
{
    return QD_CHAT_FAIL(run, "integers of more than 64 bits are not implemented");
}

static qd_status zero_division(qd_chat_run *run)
{
    return QD_CHAT_FAIL(run, "division by zero");
}

static qd_status int_power(qd_chat_run *run, int64_t base, int64_t exponent, qd_chat_value *value)
{
    int64_t result = 1;
    if (base == 1 || base == -1 || base == 0)
        exponent = exponent > 2 ? 2 + (exponent & 1) : exponent;
    for (; exponent > 0; exponent--)
        if (__builtin_mul_overflow(result, base, &result))
            return too_large(run);
    *value = qd_chat_int(result);
    return QD_OK;
}

static qd_status real_binary(qd_chat_run *run, int op, double a, double b, qd_chat_value *value)
{
    double result, rest;
    switch (op) {
    case '+':
        result = a + b;
        break;
    case '-':
        result = a - b;
        break;
    case '*':
        result = a * b;
        break;
    case '/':
        if (b == 0)
            return zero_division(run);
        result = a / b;
        break;
    case '%':
    case QD_CHAT_OP('/', '/'):
        if (b == 0)
            return zero_division(run);
        rest = fmod(a, b);
        result = (a - rest) / b;
        if (rest != 0 && (b < 0) != (rest < 0)) {
            rest += b;
            result -= 1;
        } else if (rest == 0) {
            rest = copysign(0, b);
        }
        if (op == '%')
            result = rest;
        else if (result != 0)
            result = result - floor(result) > 0.5 ? floor(result) + 1 : floor(result);
        else
            result = copysign(0, a / b);
        break;
    default:
        if (a == 0 && b < 0)
            return zero_division(run);
        result = pow(a, b);
        if (!isfinite(result) && isfinite(a) && isfinite(b))
            return QD_CHAT_FAIL(run, "the result of '**' is not a finite real number");
        break;
    }
    *value = qd_chat_real(result);
    return QD_OK;
}

static qd_status int_binary(qd_chat_run *run, int op, int64_t a, int64_t b, qd_chat_value *value)
{
    int64_t result = 0;
    bool overflow = false;
    switch (op) {
    case '+':
        overflow = __builtin_add_overflow(a, b, &result);
        break;
    case '-':
        overflow = __builtin_sub_overflow(a, b, &result);
        break;
    case '*':
        overflow = __builtin_mul_overflow(a, b, &result);
        break;
    case '/': {
        const int64_t exact = (int64_t)1 << 53; /* beyond, conversion to double rounds first */
        if (a > exact || a < -exact || b > exact || b < -exact)
            return QD_CHAT_FAIL(run, "division of integers of more than 53 bits is not implemented");
        return real_binary(run, op, (double)a, (double)b, value);
    }
    case '%':
    case QD_CHAT_OP('/', '/'):
        if (b == 0)
            return zero_division(run);
        if (b == -1) {
            overflow = __builtin_sub_overflow(0, op == '%' ? 0 : a, &result);
            break;
        }
        result = a / b;
        int64_t rest = a % b;
        if (rest != 0 && (rest < 0) != (b < 0)) {
            rest += b;
            result--;
        }
        result = op == '%' ? rest : result;
        break;
    default:
        return b < 0 ? real_binary(run, op, (double)a, (double)b, value) : int_power(run, a, b, value);
    }
    if (overflow)
        return too_large(run);
    *value = qd_chat_int(result);
    return QD_OK;
}

qd_status qd_chat_binary(qd_chat_run *run, int op, qd_chat_value a, qd_chat_value b, qd_chat_value *value)
{
    bool a_integral = a.type == QD_CHAT_INT || a.type == QD_CHAT_BOOL, b_integral = b.type == QD_CHAT_INT || b.type == QD_CHAT_BOOL;
    bool a_sequence = a.type == QD_CHAT_LIST || a.type == QD_CHAT_TUPLE, b_sequence = b.type == QD_CHAT_LIST || b.type == QD_CHAT_TUPLE;
    if (a.type == QD_CHAT_STRING && op == '%')
        return QD_CHAT_FAIL(run, "formatting strings with '%%' is not implemented");
    QD_TRY(qd_chat_refuse_undefined(run, a));
    QD_TRY(qd_chat_refuse_undefined(run, b));
    if (a_integral && b_integral)
        return int_binary(run, op, qd_chat_as_int(a), qd_chat_as_int(b), value);
    if (qd_chat_is_number(a) && qd_chat_is_number(b))
        return real_binary(run, op, qd_chat_as_real(a), qd_chat_as_real(b), value);
    if (op == '+' && a.type == QD_CHAT_STRING && b.type == QD_CHAT_STRING)
        return qd_chat_concat(run, a, b, value);
    if (op == '+' && a_sequence && a.type == b.type)
        return join_sequences(run, a, b, value);
    if (op == '*' && (a.type == QD_CHAT_STRING || a_sequence) && b_integral && !a.detail)
        return repeat(run, a, qd_chat_as_int(b), value);
    if (op == '*' && (b.type == QD_CHAT_STRING || b_sequence) && a_integral && !b.detail)
        return repeat(run, b, qd_chat_as_int(a), value);
    return bad_operands(run, op, a, b);
}

qd_status qd_chat_contains(qd_chat_run *run, qd_chat_value container, qd_chat_value item, bool *found)
{
    qd_chat_iterator iterator;
    qd_chat_value each;
    bool more;
    *found = false;
    if (container.type == QD_CHAT_STRING) {
        if (item.type != QD_CHAT_STRING)
            return QD_CHAT_FAIL(run, "'in' with a string needs a string on its left, not a value of type '%s'", qd_chat_type_name(item));
        QD_TRY(qd_chat_spend(run, container.length / 16));
        *found = qd_chat_search(container.text, container.length, item.text, item.length) != NULL;
        return QD_OK;
    }
    if (container.type == QD_CHAT_DICT || (container.type == QD_CHAT_VIEW && container.detail == 'k'))
        return qd_chat_dict_find(run, container.dict, item, found, &each);
    QD_TRY(qd_chat_iterate(run, container, &iterator));
    while (!*found) {
        QD_TRY(qd_chat_next(run, &iterator, &more, &each));
        if (!more)
            break;
        QD_TRY(qd_chat_equal(run, each, item, found));
    }
    return QD_OK;
}

qd_status qd_chat_compare(qd_chat_run *run, int op, qd_chat_value a, qd_chat_value b, bool *result)
{
    int order;
    char text[3];
    switch (op) {
    case QD_CHAT_OP('=', '='):
        return qd_chat_equal(run, a, b, result);
    case QD_CHAT_OP('!', '='):
        QD_TRY(qd_chat_equal(run, a, b, result));
        *result = !*result;
        return QD_OK;
    case QD_CHAT_OP_IN:
        return qd_chat_contains(run, b, a, result);
    case QD_CHAT_OP_NOT_IN:
        QD_TRY(qd_chat_contains(run, b, a, result));
        *result = !*result;
        return QD_OK;
    default:
        QD_TRY(qd_chat_less(run, a, b, op_text(op, text), &order));
        *result = op == '<' ? order == -1 : op == '>' ? order == 1 : order != 2 && order != (op == QD_CHAT_OP('<', '=') ? 1 : -1);
        return QD_OK;
    }
}
