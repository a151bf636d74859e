/* The parser of expressions. Precedence, from weak to strong: conditional, or, and, not,
 * comparisons, + -, ~, * / // %, **, unary signs, then attributes, items, calls, filters and tests.
 * What exists in Jinja but not here is refused by name. */
#include "data/chat/chat_impl.h"

#include <string.h>

#define NEW(node, kind, at)                                        \
    do {                                                           \
        if (!((node) = qd_chat_node_new(p, (kind), (at))))         \
            return QD_NO_MEMORY;                                   \
    } while (0)

static qd_status unary(qd_chat_parser *p, bool with_filter, qd_chat_node **node);
static qd_status disjunction(qd_chat_parser *p, qd_chat_node **node);

static qd_status string_literal(qd_chat_parser *p, qd_chat_node *node)
{
    const qd_chat_lexed *first = p->at;
    size_t length = 0;
    for (; p->at->kind == QD_CHAT_L_STRING; p->at++)
        length += p->at->length;
    const char *text = first->text;
    if (p->at - first > 1) { /* adjacent strings are one */
        char *joined = QD_ARENA_NEW(p->chat->arena, char, length + 1);
        if (!joined)
            return QD_NO_MEMORY;
        size_t at = 0;
        for (const qd_chat_lexed *each = first; each < p->at; each++) {
            memcpy(joined + at, each->text, each->length);
            at += each->length;
        }
        text = joined;
    }
    node->constant = qd_chat_string(text, length);
    return QD_OK;
}

qd_status qd_chat_parse_name(qd_chat_parser *p, qd_chat_node **node)
{
    const qd_chat_lexed *at = p->at++;
    static const char *const truths[] = {"true", "True", "false", "False"};
    NEW(*node, QD_CHAT_N_CONST, at);
    for (int i = 0; i < 4; i++)
        if (strcmp(at->text, truths[i]) == 0) {
            (*node)->constant = qd_chat_bool(i < 2);
            return QD_OK;
        }
    if (strcmp(at->text, "none") == 0 || strcmp(at->text, "None") == 0) {
        (*node)->constant = qd_chat_none();
        return QD_OK;
    }
    if (qd_chat_known_global(at->text) && !qd_chat_find_global(at->text))
        return qd_chat_fail(p->chat, at->at, "'%.80s' is not implemented", at->text);
    if (p->in_macro && (strcmp(at->text, "varargs") == 0 || strcmp(at->text, "kwargs") == 0 || strcmp(at->text, "caller") == 0))
        return qd_chat_fail(p->chat, at->at, "'%s' in a macro is not implemented", at->text);
    (*node)->kind = QD_CHAT_N_NAME;
    (*node)->text = at->text;
    (*node)->length = at->length;
    (*node)->symbol = qd_chat_symbol(p->chat, at->text, at->length, true);
    return (*node)->symbol < 0 ? QD_NO_MEMORY : QD_OK;
}

static qd_status list_or_dict(qd_chat_parser *p, qd_chat_node **node)
{
    bool dict = qd_chat_is_op(p, '{');
    int close = dict ? '}' : ']';
    NEW(*node, dict ? QD_CHAT_N_DICT : QD_CHAT_N_LIST, p->at++);
    while (!qd_chat_is_op(p, close)) {
        qd_chat_node *item;
        if ((*node)->count) {
            QD_TRY(qd_chat_expect_op(p, ','));
            if (qd_chat_is_op(p, close))
                break;
        }
        QD_TRY(qd_chat_parse_expression(p, &item));
        QD_TRY(qd_chat_node_add(p, *node, item));
        if (dict) {
            QD_TRY(qd_chat_expect_op(p, ':'));
            QD_TRY(qd_chat_parse_expression(p, &item));
            QD_TRY(qd_chat_node_add(p, *node, item));
        }
    }
    return qd_chat_expect_op(p, close);
}

static qd_status primary(qd_chat_parser *p, qd_chat_node **node)
{
    switch ((int)p->at->kind) {
    case QD_CHAT_L_NAME:
        return qd_chat_parse_name(p, node);
    case QD_CHAT_L_STRING:
        NEW(*node, QD_CHAT_N_CONST, p->at);
        return string_literal(p, *node);
    case QD_CHAT_L_INT:
        NEW(*node, QD_CHAT_N_CONST, p->at);
        (*node)->constant = qd_chat_int((p->at++)->integer);
        return QD_OK;
    case QD_CHAT_L_FLOAT:
        NEW(*node, QD_CHAT_N_CONST, p->at);
        (*node)->constant = qd_chat_real((p->at++)->real);
        return QD_OK;
    default:
        break;
    }
    if (qd_chat_skip_op(p, '(')) {
        QD_TRY(qd_chat_parse_tuple(p, QD_CHAT_PARENTHESES, node));
        return qd_chat_expect_op(p, ')');
    }
    if (qd_chat_is_op(p, '[') || qd_chat_is_op(p, '{'))
        return list_or_dict(p, node);
    return qd_chat_unexpected(p, "an expression");
}

static qd_status arguments(qd_chat_parser *p, qd_chat_node *node)
{
    const qd_chat_lexed *open = p->at;
    QD_TRY(qd_chat_expect_op(p, '('));
    while (!qd_chat_is_op(p, ')')) {
        if (p->at - 1 != open) {
            QD_TRY(qd_chat_expect_op(p, ','));
            if (qd_chat_is_op(p, ')'))
                break;
        }
        if (qd_chat_is_op(p, '*') || qd_chat_is_op(p, QD_CHAT_OP('*', '*')))
            return qd_chat_fail(p->chat, p->at->at, "unpacked arguments ('*' and '**') are not implemented");
        qd_chat_node *value;
        bool named = p->at->kind == QD_CHAT_L_NAME && p->at[1].kind == QD_CHAT_L_OP && p->at[1].op == '=';
        if (named) {
            for (uint32_t i = 0; i < node->named_count; i++)
                if (strcmp(node->names[i], p->at->text) == 0)
                    return qd_chat_fail(p->chat, p->at->at, "argument '%.80s' is given twice", p->at->text);
            if (node->named_count == 16)
                return qd_chat_fail(p->chat, p->at->at, "more than 16 named arguments are not implemented");
            if (qd_chat_full(node->named_count) && !(node->names = qd_chat_grown(p, node->names, node->named_count, sizeof *node->names)))
                return QD_NO_MEMORY;
            node->names[node->named_count++] = p->at->text;
            p->at += 2;
        } else if (node->named_count) {
            return qd_chat_fail(p->chat, p->at->at, "an argument without a name follows one with a name");
        }
        QD_TRY(qd_chat_parse_expression(p, &value));
        QD_TRY(qd_chat_node_add(p, node, value));
    }
    node->count -= node->named_count; /* items: the positional ones, then the named ones */
    return qd_chat_expect_op(p, ')');
}

static qd_status slice_bound(qd_chat_parser *p, qd_chat_node *node)
{
    qd_chat_node *bound = NULL;
    if (!qd_chat_is_op(p, ':') && !qd_chat_is_op(p, ']') && !qd_chat_is_op(p, ','))
        QD_TRY(qd_chat_parse_expression(p, &bound));
    return qd_chat_node_add(p, node, bound);
}

static qd_status subscript(qd_chat_parser *p, qd_chat_node **node)
{
    qd_chat_node *result, *key;
    const qd_chat_lexed *at = p->at++;
    if (at->op == '.') {
        NEW(result, QD_CHAT_N_ATTR, at);
        result->a = *node;
        *node = result;
        if (p->at->kind == QD_CHAT_L_NAME) {
            if (strncmp(p->at->text, "__", 2) == 0)
                return qd_chat_fail(p->chat, p->at->at, "attribute '%.80s': templates have no access to Python's internals", p->at->text);
            result->text = p->at->text;
            result->length = p->at->length;
        } else if (p->at->kind == QD_CHAT_L_INT) {
            result->kind = QD_CHAT_N_ITEM;
            NEW(result->b, QD_CHAT_N_CONST, p->at);
            result->b->constant = qd_chat_int(p->at->integer);
        } else {
            return qd_chat_unexpected(p, "a name after '.'");
        }
        p->at++;
        return QD_OK;
    }
    NEW(result, QD_CHAT_N_SLICE, at);
    result->a = *node;
    *node = result;
    QD_TRY(slice_bound(p, result));
    if (qd_chat_skip_op(p, ':')) {
        QD_TRY(slice_bound(p, result));
        if (qd_chat_skip_op(p, ':'))
            QD_TRY(slice_bound(p, result));
    } else {
        key = result->items[0];
        if (!key)
            return qd_chat_unexpected(p, "an index");
        result->kind = QD_CHAT_N_ITEM;
        result->b = key;
    }
    if (qd_chat_is_op(p, ','))
        return qd_chat_fail(p->chat, p->at->at, "an index of several parts is not implemented");
    return qd_chat_expect_op(p, ']');
}

static qd_status call(qd_chat_parser *p, qd_chat_node **node)
{
    qd_chat_node *result;
    NEW(result, QD_CHAT_N_CALL, p->at);
    result->a = *node;
    *node = result;
    if (result->a->kind == QD_CHAT_N_ATTR) { /* a method of Python that this interpreter has for no type */
        static const qd_chat_type owners[] = {QD_CHAT_STRING, QD_CHAT_DICT, QD_CHAT_LIST};
        bool found = false, not_implemented = false;
        for (int i = 0; i < 3; i++) {
            qd_chat_missing missing;
            found = qd_chat_find_method(owners[i], result->a->text, result->a->length, &missing) || found;
            found = missing == QD_CHAT_MODIFIES || found;
            not_implemented = missing == QD_CHAT_NOT_IMPLEMENTED || not_implemented;
        }
        if (not_implemented && !found)
            return qd_chat_fail(p->chat, result->a->at, "method '%.80s' is not implemented", result->a->text);
    }
    return arguments(p, result);
}

static qd_status filter(qd_chat_parser *p, qd_chat_node **node)
{
    qd_chat_node *result;
    NEW(result, QD_CHAT_N_FILTER, p->at);
    if (p->at->kind != QD_CHAT_L_NAME)
        return qd_chat_unexpected(p, "the name of a filter");
    result->text = p->at->text;
    result->function = qd_chat_find_filter(result->text);
    if (!result->function)
        return qd_chat_fail(p->chat, p->at->at, qd_chat_known_filter(result->text) ? "filter '%.80s' is not implemented"
                                                                                   : "there is no filter '%.80s'",
                            result->text);
    p->at++;
    result->a = *node;
    *node = result;
    if (qd_chat_is_op(p, '.')) /* names with dots belong to extensions */
        return qd_chat_fail(p->chat, p->at->at, "there is no filter '%.80s.…'", result->text);
    return qd_chat_is_op(p, '(') ? arguments(p, result) : QD_OK;
}

qd_status qd_chat_parse_filters(qd_chat_parser *p, bool first, qd_chat_node **node)
{
    while (first || qd_chat_skip_op(p, '|')) {
        QD_TRY(filter(p, node));
        first = false;
    }
    return QD_OK;
}

static qd_status postfix(qd_chat_parser *p, qd_chat_node **node)
{
    for (;;) {
        if (qd_chat_is_op(p, '.') || qd_chat_is_op(p, '['))
            QD_TRY(subscript(p, node));
        else if (qd_chat_is_op(p, '('))
            QD_TRY(call(p, node));
        else
            return QD_OK;
    }
}

static qd_status test(qd_chat_parser *p, qd_chat_node **node)
{
    bool negated = qd_chat_skip_word(p, "not");
    qd_chat_node *result, *argument;
    NEW(result, QD_CHAT_N_TEST, p->at);
    if (p->at->kind != QD_CHAT_L_NAME)
        return qd_chat_unexpected(p, "the name of a test");
    result->text = p->at->text;
    result->function = qd_chat_find_test(result->text);
    if (!result->function)
        return qd_chat_fail(p->chat, p->at->at, qd_chat_known_test(result->text) ? "test '%.80s' is not implemented"
                                                                                 : "there is no test '%.80s'",
                            result->text);
    p->at++;
    if (qd_chat_is_op(p, '.'))
        return qd_chat_fail(p->chat, p->at->at, "there is no test '%.80s.…'", result->text);
    result->a = *node;
    bool word = p->at->kind == QD_CHAT_L_NAME && !qd_chat_is_word(p, "else") && !qd_chat_is_word(p, "or") && !qd_chat_is_word(p, "and");
    if (qd_chat_is_op(p, '(')) {
        QD_TRY(arguments(p, result));
    } else if (word || p->at->kind == QD_CHAT_L_STRING || p->at->kind == QD_CHAT_L_INT || p->at->kind == QD_CHAT_L_FLOAT ||
               qd_chat_is_op(p, '[') || qd_chat_is_op(p, '{')) {
        if (qd_chat_is_word(p, "is"))
            return qd_chat_fail(p->chat, p->at->at, "tests cannot be chained with 'is'");
        QD_TRY(primary(p, &argument));
        QD_TRY(postfix(p, &argument));
        QD_TRY(qd_chat_node_add(p, result, argument));
    }
    *node = result;
    if (negated) {
        NEW(*node, QD_CHAT_N_NOT, p->at);
        (*node)->at = result->at;
        (*node)->a = result;
    }
    return QD_OK;
}

static qd_status unary(qd_chat_parser *p, bool with_filter, qd_chat_node **node)
{
    if (qd_chat_is_op(p, '-') || qd_chat_is_op(p, '+')) {
        const qd_chat_lexed *at = p->at++;
        qd_chat_node *inner;
        QD_TRY(qd_chat_enter(p));
        QD_TRY(unary(p, false, &inner));
        p->nesting--;
        NEW(*node, at->op == '-' ? QD_CHAT_N_NEG : QD_CHAT_N_POS, at);
        (*node)->a = inner;
    } else {
        QD_TRY(primary(p, node));
    }
    QD_TRY(postfix(p, node));
    while (with_filter) {
        if (qd_chat_skip_op(p, '|'))
            QD_TRY(filter(p, node));
        else if (qd_chat_skip_word(p, "is"))
            QD_TRY(test(p, node));
        else if (qd_chat_is_op(p, '('))
            QD_TRY(call(p, node));
        else
            break;
    }
    return QD_OK;
}

/* Left-associative operators of one level. */
static qd_status binary(qd_chat_parser *p, int level, qd_chat_node **node)
{
    static const int ops[][4] = {{'+', '-'}, {'~'}, {'*', '/', QD_CHAT_OP('/', '/'), '%'}, {QD_CHAT_OP('*', '*')}};
    if (level == 4)
        return unary(p, true, node);
    QD_TRY(binary(p, level + 1, node));
    for (;;) {
        int op = 0;
        for (int i = 0; i < 4 && ops[level][i]; i++)
            if (qd_chat_is_op(p, ops[level][i]))
                op = ops[level][i];
        if (!op)
            return QD_OK;
        qd_chat_node *result, *right;
        const qd_chat_lexed *at = p->at++;
        QD_TRY(binary(p, level + 1, &right));
        if (op == '~' && (*node)->kind == QD_CHAT_N_CONCAT && (*node)->op == 1) { /* of this chain */
            QD_TRY(qd_chat_node_add(p, *node, right));
            continue;
        }
        NEW(result, op == '~' ? QD_CHAT_N_CONCAT : QD_CHAT_N_BINARY, at);
        result->op = (uint16_t)(op == '~' ? 1 : op);
        if (op == '~') {
            QD_TRY(qd_chat_node_add(p, result, *node));
            QD_TRY(qd_chat_node_add(p, result, right));
        } else {
            result->a = *node;
            result->b = right;
        }
        *node = result;
    }
}

static qd_status comparison(qd_chat_parser *p, qd_chat_node **node)
{
    static const int ops[] = {QD_CHAT_OP('=', '='), QD_CHAT_OP('!', '='), '<', QD_CHAT_OP('<', '='), '>', QD_CHAT_OP('>', '=')};
    qd_chat_node *result = NULL, *right;
    QD_TRY(binary(p, 0, node));
    for (;;) {
        const qd_chat_lexed *at = p->at;
        int op = 0;
        for (int i = 0; i < 6; i++)
            if (qd_chat_is_op(p, ops[i]))
                op = ops[i];
        if (op) {
            p->at++;
        } else if (qd_chat_skip_word(p, "in")) {
            op = QD_CHAT_OP_IN;
        } else if (qd_chat_is_word(p, "not") && p->at[1].kind == QD_CHAT_L_NAME && strcmp(p->at[1].text, "in") == 0) {
            p->at += 2;
            op = QD_CHAT_OP_NOT_IN;
        } else {
            break;
        }
        if (!result) {
            NEW(result, QD_CHAT_N_COMPARE, at);
            result->a = *node;
        }
        QD_TRY(binary(p, 0, &right));
        if (qd_chat_full(result->count) && !(result->ops = qd_chat_grown(p, result->ops, result->count, sizeof *result->ops)))
            return QD_NO_MEMORY;
        result->ops[result->count] = (uint16_t)op;
        QD_TRY(qd_chat_node_add(p, result, right));
    }
    *node = result ? result : *node;
    return QD_OK;
}

static qd_status negation(qd_chat_parser *p, qd_chat_node **node)
{
    const qd_chat_lexed *at = p->at;
    if (!qd_chat_skip_word(p, "not"))
        return comparison(p, node);
    qd_chat_node *inner;
    QD_TRY(qd_chat_enter(p));
    QD_TRY(negation(p, &inner));
    p->nesting--;
    NEW(*node, QD_CHAT_N_NOT, at);
    (*node)->a = inner;
    return QD_OK;
}

static qd_status conjunction(qd_chat_parser *p, qd_chat_node **node)
{
    QD_TRY(negation(p, node));
    while (qd_chat_is_word(p, "and")) {
        qd_chat_node *result;
        NEW(result, QD_CHAT_N_AND, p->at++);
        result->a = *node;
        QD_TRY(negation(p, &result->b));
        *node = result;
    }
    return QD_OK;
}

static qd_status disjunction(qd_chat_parser *p, qd_chat_node **node)
{
    QD_TRY(conjunction(p, node));
    while (qd_chat_is_word(p, "or")) {
        qd_chat_node *result;
        NEW(result, QD_CHAT_N_OR, p->at++);
        result->a = *node;
        QD_TRY(conjunction(p, &result->b));
        *node = result;
    }
    return QD_OK;
}

qd_status qd_chat_parse_expression(qd_chat_parser *p, qd_chat_node **node)
{
    QD_TRY(qd_chat_enter(p));
    QD_TRY(disjunction(p, node));
    while (qd_chat_is_word(p, "if")) {
        qd_chat_node *result;
        NEW(result, QD_CHAT_N_COND, p->at++);
        result->a = *node;
        QD_TRY(disjunction(p, &result->b));
        if (qd_chat_skip_word(p, "else"))
            QD_TRY(qd_chat_parse_expression(p, &result->c));
        *node = result;
    }
    p->nesting--;
    return QD_OK;
}

qd_status qd_chat_parse_tuple(qd_chat_parser *p, qd_chat_tuple_mode mode, qd_chat_node **node)
{
    const qd_chat_lexed *at = p->at;
    qd_chat_node *tuple = NULL, *item;
    NEW(tuple, QD_CHAT_N_TUPLE, at);
    bool comma = false;
    for (;;) {
        if (tuple->count)
            QD_TRY(qd_chat_expect_op(p, ','));
        if (p->at->kind == QD_CHAT_L_PRINT_END || p->at->kind == QD_CHAT_L_BLOCK_END || qd_chat_is_op(p, ')') ||
            (mode == QD_CHAT_NO_CONDITION && qd_chat_is_word(p, "recursive")))
            break;
        if (mode == QD_CHAT_NO_CONDITION) {
            QD_TRY(qd_chat_enter(p));
            QD_TRY(disjunction(p, &item));
            p->nesting--;
        } else {
            QD_TRY(qd_chat_parse_expression(p, &item));
        }
        QD_TRY(qd_chat_node_add(p, tuple, item));
        if (!qd_chat_is_op(p, ','))
            break;
        comma = true;
    }
    if (!comma && !tuple->count && mode != QD_CHAT_PARENTHESES)
        return qd_chat_unexpected(p, "an expression");
    *node = comma || !tuple->count ? tuple : tuple->items[0];
    return QD_OK;
}
