/* Evaluates expressions, and calls macros, functions, filters and tests. */
#include "data/chat/chat_impl.h"

#include <string.h>

static qd_status evaluate(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value);

qd_status qd_chat_evaluate(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    run->at = node->at;
    QD_TRY(qd_chat_spend(run, 1));
    if (++run->depth > QD_CHAT_MOST_DEPTH)
        return QD_CHAT_FAIL(run, "blocks, expressions and macro calls are nested more than %d levels deep", QD_CHAT_MOST_DEPTH);
    QD_TRY(evaluate(run, node, value));
    run->depth--;
    return QD_OK;
}

static qd_status name(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    if (qd_chat_lookup(run, node->symbol, value))
        return QD_OK;
    const qd_chat_function *function = qd_chat_find_global(node->text);
    *value = function ? (qd_chat_value){.type = QD_CHAT_FUNCTION, .function = function}
                      : qd_chat_undefined(node->text, node->length, QD_CHAT_UNDEFINED);
    return QD_OK;
}

static qd_status sequence(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    QD_TRY(qd_chat_sequence_new(run, node->kind == QD_CHAT_N_LIST ? QD_CHAT_LIST : QD_CHAT_TUPLE, node->count, value));
    for (uint32_t i = 0; i < node->count; i++)
        QD_TRY(qd_chat_evaluate(run, node->items[i], &value->sequence->items[i]));
    return QD_OK;
}

static qd_status dict(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value key, item;
    QD_TRY(qd_chat_dict_new(run, QD_CHAT_DICT, node->count / 2, value));
    for (uint32_t i = 0; i < node->count; i += 2) {
        QD_TRY(qd_chat_evaluate(run, node->items[i], &key));
        QD_TRY(qd_chat_evaluate(run, node->items[i + 1], &item));
        run->at = node->at;
        QD_TRY(qd_chat_dict_put(run, value->dict, key, item));
    }
    return QD_OK;
}

static qd_status slice(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value object, bounds[3] = {qd_chat_none(), qd_chat_none(), qd_chat_none()};
    QD_TRY(qd_chat_evaluate(run, node->a, &object));
    for (uint32_t i = 0; i < node->count; i++)
        if (node->items[i])
            QD_TRY(qd_chat_evaluate(run, node->items[i], &bounds[i]));
    run->at = node->at;
    return qd_chat_slice(run, object, bounds, value);
}

/* Evaluates the arguments of a call; `first` (or NULL) becomes the first one. */
static qd_status arguments_of(qd_chat_run *run, const qd_chat_node *node, const qd_chat_value *first, qd_chat_arguments *arguments)
{
    size_t extra = first ? 1 : 0, count = node->count + node->named_count + extra;
    qd_chat_value *values;
    QD_TRY(qd_chat_take(run, count * sizeof *values, &values));
    if (first)
        values[0] = *first;
    for (size_t i = extra; i < count; i++)
        QD_TRY(qd_chat_evaluate(run, node->items[i - extra], &values[i]));
    *arguments = (qd_chat_arguments){.callee = node->text, .positional = values, .count = node->count + extra,
                                     .names = node->names, .named = values + node->count + extra, .named_count = node->named_count};
    run->at = node->at;
    return QD_OK;
}

qd_status qd_chat_apply(qd_chat_run *run, const qd_chat_node *node, qd_chat_value subject, qd_chat_value *value)
{
    qd_chat_arguments arguments;
    QD_TRY(arguments_of(run, node, &subject, &arguments));
    return node->function->call(run, &arguments, value);
}

qd_status qd_chat_call(qd_chat_run *run, qd_chat_value callee, const qd_chat_arguments *arguments, qd_chat_value *value)
{
    qd_chat_arguments own = *arguments;
    switch ((int)callee.type) {
    case QD_CHAT_MACRO:
        return qd_chat_call_macro(run, callee.macro, arguments, value);
    case QD_CHAT_FUNCTION:
        own.callee = callee.function->name;
        return callee.function->call(run, &own, value);
    case QD_CHAT_METHOD:
        own.callee = callee.bound->method->name;
        QD_TRY(qd_chat_take(run, (own.count + 1) * sizeof *own.positional, &own.positional));
        own.positional[0] = callee.bound->self;
        memcpy(own.positional + 1, arguments->positional, own.count * sizeof *own.positional);
        own.count++;
        return callee.bound->method->call(run, &own, value);
    default:
        QD_TRY(qd_chat_refuse_undefined(run, callee));
        return QD_CHAT_FAIL(run, "'%s' object is not callable", qd_chat_type_name(callee));
    }
}

static qd_status call(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value callee;
    qd_chat_arguments arguments;
    QD_TRY(qd_chat_evaluate(run, node->a, &callee));
    QD_TRY(arguments_of(run, node, NULL, &arguments));
    return qd_chat_call(run, callee, &arguments, value);
}

static qd_status sign(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value operand;
    QD_TRY(qd_chat_evaluate(run, node->a, &operand));
    run->at = node->at;
    QD_TRY(qd_chat_refuse_undefined(run, operand));
    if (!qd_chat_is_number(operand))
        return qd_chat_bad_type(run, node->kind == QD_CHAT_N_NEG ? "unary -" : "unary +", operand);
    if (operand.type == QD_CHAT_FLOAT) {
        *value = qd_chat_real(node->kind == QD_CHAT_N_NEG ? -operand.real : operand.real);
        return QD_OK;
    }
    *value = qd_chat_int(qd_chat_as_int(operand));
    return node->kind == QD_CHAT_N_NEG ? qd_chat_binary(run, '-', qd_chat_int(0), *value, value) : QD_OK;
}

static qd_status concat(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value items, item;
    QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, node->count, &items));
    for (uint32_t i = 0; i < node->count; i++)
        QD_TRY(qd_chat_evaluate(run, node->items[i], &items.sequence->items[i]));
    run->at = node->at;
    *value = qd_chat_literal("");
    for (uint32_t i = 0; i < node->count; i++) {
        QD_TRY(qd_chat_to_string(run, items.sequence->items[i], &item));
        QD_TRY(qd_chat_concat(run, *value, item, value));
    }
    return QD_OK;
}

static qd_status compare(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value left, right;
    QD_TRY(qd_chat_evaluate(run, node->a, &left));
    for (uint32_t i = 0; i < node->count; i++) {
        bool holds;
        QD_TRY(qd_chat_evaluate(run, node->items[i], &right));
        run->at = node->at;
        QD_TRY(qd_chat_compare(run, node->ops[i], left, right, &holds));
        *value = qd_chat_bool(holds);
        if (!holds)
            return QD_OK;
        left = right;
    }
    return QD_OK;
}

static qd_status evaluate(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value)
{
    qd_chat_value left, right;
    switch ((int)node->kind) {
    case QD_CHAT_N_CONST:
        *value = node->constant;
        return QD_OK;
    case QD_CHAT_N_NAME:
        return name(run, node, value);
    case QD_CHAT_N_LIST:
    case QD_CHAT_N_TUPLE:
        return sequence(run, node, value);
    case QD_CHAT_N_DICT:
        return dict(run, node, value);
    case QD_CHAT_N_ATTR:
        QD_TRY(qd_chat_evaluate(run, node->a, &left));
        run->at = node->at;
        return qd_chat_attribute(run, left, node->text, node->length, value);
    case QD_CHAT_N_ITEM:
        QD_TRY(qd_chat_evaluate(run, node->a, &left));
        QD_TRY(qd_chat_evaluate(run, node->b, &right));
        run->at = node->at;
        return qd_chat_item(run, left, right, value);
    case QD_CHAT_N_SLICE:
        return slice(run, node, value);
    case QD_CHAT_N_CALL:
        return call(run, node, value);
    case QD_CHAT_N_FILTER:
    case QD_CHAT_N_TEST:
        QD_TRY(qd_chat_evaluate(run, node->a, &left));
        return qd_chat_apply(run, node, left, value);
    case QD_CHAT_N_NOT:
        QD_TRY(qd_chat_evaluate(run, node->a, &left));
        *value = qd_chat_bool(!qd_chat_truth(left));
        return QD_OK;
    case QD_CHAT_N_NEG:
    case QD_CHAT_N_POS:
        return sign(run, node, value);
    case QD_CHAT_N_BINARY:
        QD_TRY(qd_chat_evaluate(run, node->a, &left));
        QD_TRY(qd_chat_evaluate(run, node->b, &right));
        run->at = node->at;
        return qd_chat_binary(run, node->op, left, right, value);
    case QD_CHAT_N_CONCAT:
        return concat(run, node, value);
    case QD_CHAT_N_COMPARE:
        return compare(run, node, value);
    case QD_CHAT_N_AND:
    case QD_CHAT_N_OR:
        QD_TRY(qd_chat_evaluate(run, node->a, value));
        if (qd_chat_truth(*value) == (node->kind == QD_CHAT_N_OR))
            return QD_OK;
        return qd_chat_evaluate(run, node->b, value);
    case QD_CHAT_N_COND:
        QD_TRY(qd_chat_evaluate(run, node->b, &left));
        if (qd_chat_truth(left))
            return qd_chat_evaluate(run, node->a, value);
        if (node->c)
            return qd_chat_evaluate(run, node->c, value);
        *value = qd_chat_undefined("the conditional expression without 'else'", 41, QD_CHAT_UNDEFINED);
        return QD_OK;
    default:
        return QD_CHAT_FAIL(run, "not an expression");
    }
}

/* ---- loops ---- */

/* The next item that passes the loop's filter, which sees variables as they are now. */
static qd_status fetch(qd_chat_run *run, qd_chat_loop *loop, bool *more, qd_chat_value *value)
{
    qd_chat_scope *old = run->scope, *ignored;
    for (;;) {
        QD_TRY(qd_chat_next(run, &loop->iterator, more, value));
        if (!*more || !loop->node->c || loop->length >= 0)
            return QD_OK;
        qd_chat_value passes;
        QD_TRY(qd_chat_scope_enter(run, loop->outer, NULL, &ignored));
        QD_TRY(qd_chat_assign(run, loop->node->a, *value));
        QD_TRY(qd_chat_evaluate(run, loop->node->c, &passes));
        run->scope = old;
        if (qd_chat_truth(passes))
            return QD_OK;
    }
}

/* Fetches the item after the current one before its iteration. */
static qd_status peek(qd_chat_run *run, qd_chat_loop *loop, bool *more)
{
    if (!loop->has_after && !loop->ended) {
        QD_TRY(fetch(run, loop, more, &loop->after));
        loop->has_after = *more;
        loop->ended = !*more;
    }
    *more = loop->has_after;
    return QD_OK;
}

qd_status qd_chat_loop_next(qd_chat_run *run, qd_chat_loop *loop, bool *more)
{
    QD_TRY(peek(run, loop, more));
    loop->has_after = false;
    if (!*more)
        return QD_OK;
    loop->index0++;
    loop->before = loop->current;
    loop->current = loop->after;
    return QD_OK;
}

static qd_status loop_length(qd_chat_run *run, qd_chat_loop *loop, int64_t *length)
{
    if (loop->length < 0) {
        size_t size;
        bool sized = loop->iterator.source.type != QD_CHAT_ITERATOR && !loop->node->c;
        if (sized) {
            QD_TRY(qd_chat_size(run, loop->iterator.source, &size));
            loop->length = (int64_t)size;
        } else { /* reads what is left, through the filter */
            qd_chat_value rest, item;
            size_t count = 0, capacity = 16;
            bool more;
            QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, capacity, &rest));
            for (;;) {
                QD_TRY(fetch(run, loop, &more, &item));
                if (!more)
                    break;
                if (count == capacity) {
                    qd_chat_value larger;
                    QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, capacity *= 2, &larger));
                    memcpy(larger.sequence->items, rest.sequence->items, count * sizeof item);
                    rest = larger;
                }
                rest.sequence->items[count++] = item;
            }
            rest.sequence->count = count;
            loop->iterator = (qd_chat_iterator){.source = rest};
            loop->length = (int64_t)count + loop->index0 + 1 + loop->has_after;
        }
    }
    *length = loop->length;
    return QD_OK;
}

static bool is(const char *name, size_t length, const char *expected)
{
    return strlen(expected) == length && memcmp(name, expected, length) == 0;
}

qd_status qd_chat_loop_attribute(qd_chat_run *run, qd_chat_loop *loop, const char *name, size_t length, qd_chat_value *value)
{
    bool more;
    int64_t size;
    if (is(name, length, "index0")) {
        *value = qd_chat_int(loop->index0);
    } else if (is(name, length, "index")) {
        *value = qd_chat_int(loop->index0 + 1);
    } else if (is(name, length, "first")) {
        *value = qd_chat_bool(loop->index0 == 0);
    } else if (is(name, length, "last")) {
        QD_TRY(peek(run, loop, &more));
        *value = qd_chat_bool(!more);
    } else if (is(name, length, "previtem")) {
        *value = loop->index0 > 0 ? loop->before : qd_chat_undefined("loop.previtem", 13, QD_CHAT_UNDEFINED);
    } else if (is(name, length, "nextitem")) {
        QD_TRY(peek(run, loop, &more));
        *value = more ? loop->after : qd_chat_undefined("loop.nextitem", 13, QD_CHAT_UNDEFINED);
    } else if (is(name, length, "length")) {
        QD_TRY(loop_length(run, loop, &size));
        *value = qd_chat_int(size);
    } else if (is(name, length, "revindex") || is(name, length, "revindex0")) {
        QD_TRY(loop_length(run, loop, &size));
        *value = qd_chat_int(size - loop->index0 - (length == 9));
    } else if (is(name, length, "depth") || is(name, length, "depth0")) {
        *value = qd_chat_int(length == 5);
    } else if (is(name, length, "cycle") || is(name, length, "changed")) {
        return QD_CHAT_FAIL(run, "loop.%.*s is not implemented", (int)length, name);
    } else {
        *value = qd_chat_undefined(name, length, QD_CHAT_LOOP);
    }
    return QD_OK;
}
