/* The parser of statements: text, {{ }} and the tags between {% and %}. */
#include "data/chat/chat_impl.h"

#include <string.h>

#define NEW(node, kind, at)                                        \
    do {                                                           \
        if (!((node) = qd_chat_node_new(p, (kind), (at))))         \
            return QD_NO_MEMORY;                                   \
    } while (0)

/* What a block changes for the statements inside it. */
typedef struct surroundings {
    int loops;
    bool captured, generating, in_macro;
} surroundings;

static qd_status statement(qd_chat_parser *p, qd_chat_node **node);

/* Statements up to a tag whose name is one of `ends`, which stays the current lexeme; ends[0] NULL:
 * up to the end of the template. */
static qd_status statements(qd_chat_parser *p, const char *const *ends, qd_chat_node **first)
{
    qd_chat_node **link = first, *node;
    *first = NULL;
    for (;;) {
        const qd_chat_lexed *at = p->at;
        switch ((int)at->kind) {
        case QD_CHAT_L_DATA:
            NEW(node, QD_CHAT_N_TEXT, at);
            node->text = at->text;
            node->length = at->length;
            p->at++;
            break;
        case QD_CHAT_L_PRINT_BEGIN:
            NEW(node, QD_CHAT_N_PRINT, at);
            p->at++;
            QD_TRY(qd_chat_parse_tuple(p, QD_CHAT_ANY, &node->a));
            if (p->at->kind != QD_CHAT_L_PRINT_END)
                return qd_chat_unexpected(p, "'}}'");
            p->at++;
            break;
        case QD_CHAT_L_BLOCK_BEGIN:
            p->at++;
            for (const char *const *end = ends; *end; end++)
                if (qd_chat_is_word(p, *end))
                    return QD_OK;
            QD_TRY(statement(p, &node));
            if (p->at->kind != QD_CHAT_L_BLOCK_END)
                return qd_chat_unexpected(p, "'%}'");
            p->at++;
            break;
        default:
            if (!ends[0])
                return QD_OK;
            return qd_chat_fail(p->chat, at->at, "the template ends before '%s'", ends[0]);
        }
        *link = node;
        link = &node->next;
    }
}

/* The body of a block, from the end of its first tag. */
static qd_status body(qd_chat_parser *p, const char *const *ends, const surroundings *within, qd_chat_node **first)
{
    surroundings old = {p->loops, p->captured, p->generating, p->in_macro};
    qd_chat_skip_op(p, ':');
    if (p->at->kind != QD_CHAT_L_BLOCK_END)
        return qd_chat_unexpected(p, "'%}'");
    p->at++;
    QD_TRY(qd_chat_enter(p));
    if (within) {
        p->loops = within->loops;
        p->captured = within->captured;
        p->generating = within->generating;
        p->in_macro = within->in_macro;
    }
    QD_TRY(statements(p, ends, first));
    p->nesting--;
    p->loops = old.loops;
    p->captured = old.captured;
    p->generating = old.generating;
    p->in_macro = old.in_macro;
    return QD_OK;
}

static qd_status parse_if(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endif", "elif", "else", NULL}, *const last[] = {"endif", NULL};
    qd_chat_node *each;
    NEW(*node, QD_CHAT_N_IF, p->at);
    each = *node;
    for (;;) {
        QD_TRY(qd_chat_parse_tuple(p, QD_CHAT_NO_CONDITION, &each->a));
        QD_TRY(body(p, ends, NULL, &each->body));
        if (qd_chat_skip_word(p, "endif"))
            return QD_OK;
        if (qd_chat_skip_word(p, "else")) {
            QD_TRY(body(p, last, NULL, &each->other));
            p->at++;
            return QD_OK;
        }
        p->at++; /* elif: a chain of ifs, which is executed as a loop */
        NEW(each->other, QD_CHAT_N_IF, p->at);
        each = each->other;
        each->op = 1;
    }
}

static qd_status targets(qd_chat_parser *p, bool members, qd_chat_node **node);

static qd_status target(qd_chat_parser *p, bool members, qd_chat_node **node)
{
    if (qd_chat_skip_op(p, '(')) {
        QD_TRY(qd_chat_enter(p));
        QD_TRY(targets(p, false, node));
        p->nesting--;
        return qd_chat_expect_op(p, ')');
    }
    if (p->at->kind != QD_CHAT_L_NAME)
        return qd_chat_unexpected(p, "the name of a variable");
    const qd_chat_lexed *at = p->at;
    QD_TRY(qd_chat_parse_name(p, node));
    if ((*node)->kind != QD_CHAT_N_NAME || strcmp(at->text, "loop") == 0)
        return qd_chat_fail(p->chat, at->at, "'%.80s' cannot be assigned", at->text);
    if (members && qd_chat_skip_op(p, '.')) {
        if (p->at->kind != QD_CHAT_L_NAME)
            return qd_chat_unexpected(p, "the name of an attribute");
        if (p->at->text[0] == '_')
            return qd_chat_fail(p->chat, p->at->at, "attribute '%.80s' of a namespace begins with '_', which transformers refuses",
                                p->at->text);
        (*node)->kind = QD_CHAT_N_MEMBER;
        (*node)->text = p->at->text;
        (*node)->length = (p->at++)->length;
    }
    return QD_OK;
}

static qd_status targets(qd_chat_parser *p, bool members, qd_chat_node **node)
{
    qd_chat_node *tuple, *item;
    QD_TRY(target(p, members, node));
    if (!qd_chat_is_op(p, ','))
        return QD_OK;
    NEW(tuple, QD_CHAT_N_TUPLE, p->at);
    QD_TRY(qd_chat_node_add(p, tuple, *node));
    while (qd_chat_skip_op(p, ',') && p->at->kind == QD_CHAT_L_NAME && !qd_chat_is_word(p, "in")) {
        QD_TRY(target(p, members, &item));
        QD_TRY(qd_chat_node_add(p, tuple, item));
    }
    *node = tuple;
    return QD_OK;
}

static qd_status parse_for(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endfor", "else", NULL}, *const last[] = {"endfor", NULL};
    NEW(*node, QD_CHAT_N_FOR, p->at);
    QD_TRY(targets(p, false, &(*node)->a));
    if (!qd_chat_skip_word(p, "in"))
        return qd_chat_unexpected(p, "'in'");
    QD_TRY(qd_chat_parse_tuple(p, QD_CHAT_NO_CONDITION, &(*node)->b));
    if (qd_chat_skip_word(p, "if"))
        QD_TRY(qd_chat_parse_expression(p, &(*node)->c));
    if (qd_chat_is_word(p, "recursive"))
        return qd_chat_fail(p->chat, p->at->at, "recursive loops are not implemented");
    surroundings inside = {p->loops + 1, p->captured, p->generating, p->in_macro};
    QD_TRY(body(p, ends, &inside, &(*node)->body));
    if (qd_chat_skip_word(p, "else"))
        QD_TRY(body(p, last, NULL, &(*node)->other));
    else
        (*node)->other = NULL;
    qd_chat_skip_word(p, "endfor");
    return QD_OK;
}

static qd_status parse_set(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endset", NULL};
    NEW(*node, QD_CHAT_N_SET, p->at);
    QD_TRY(targets(p, true, &(*node)->a));
    if (qd_chat_skip_op(p, '='))
        return qd_chat_parse_tuple(p, QD_CHAT_ANY, &(*node)->b);
    (*node)->kind = QD_CHAT_N_SET_BLOCK;
    QD_TRY(qd_chat_parse_filters(p, false, &(*node)->b));
    surroundings inside = {p->loops, true, p->generating, p->in_macro};
    QD_TRY(body(p, ends, &inside, &(*node)->body));
    p->at++;
    return QD_OK;
}

static qd_status parse_macro(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endmacro", NULL};
    qd_chat_node *defaults[16], *parameter;
    NEW(*node, QD_CHAT_N_MACRO, p->at);
    if (p->at->kind != QD_CHAT_L_NAME)
        return qd_chat_unexpected(p, "the name of the macro");
    (*node)->text = p->at->text;
    (*node)->symbol = qd_chat_symbol(p->chat, p->at->text, p->at->length, true);
    if ((*node)->symbol < 0)
        return QD_NO_MEMORY;
    p->at++;
    QD_TRY(qd_chat_expect_op(p, '('));
    bool old = p->in_macro;
    p->in_macro = true;
    uint32_t optional = 0;
    while (!qd_chat_is_op(p, ')')) {
        if ((*node)->count)
            QD_TRY(qd_chat_expect_op(p, ','));
        if ((*node)->count == 16)
            return qd_chat_fail(p->chat, p->at->at, "a macro with more than 16 parameters is not implemented");
        const qd_chat_lexed *at = p->at;
        if (at->kind != QD_CHAT_L_NAME)
            return qd_chat_unexpected(p, "the name of a parameter");
        NEW(parameter, QD_CHAT_N_NAME, at);
        parameter->text = at->text;
        parameter->length = at->length;
        parameter->symbol = qd_chat_symbol(p->chat, at->text, at->length, true);
        if (parameter->symbol < 0)
            return QD_NO_MEMORY;
        for (uint32_t i = 0; i < (*node)->count; i++)
            if ((*node)->items[i]->symbol == parameter->symbol)
                return qd_chat_fail(p->chat, at->at, "parameter '%.80s' is named twice", at->text);
        if (strcmp(at->text, "caller") == 0 || strcmp(at->text, "varargs") == 0 || strcmp(at->text, "kwargs") == 0)
            return qd_chat_fail(p->chat, at->at, "'%s' in a macro is not implemented", at->text);
        QD_TRY(qd_chat_node_add(p, *node, parameter));
        p->at++;
        if (qd_chat_skip_op(p, '='))
            QD_TRY(qd_chat_parse_expression(p, &defaults[optional++]));
        else if (optional)
            return qd_chat_fail(p->chat, at->at, "parameter '%.80s' without a default follows one with a default", at->text);
    }
    p->at++;
    for (uint32_t i = 0; i < optional; i++)
        QD_TRY(qd_chat_node_add(p, *node, defaults[i]));
    (*node)->count -= optional;
    (*node)->named_count = optional;
    surroundings inside = {.captured = true, .in_macro = true};
    QD_TRY(body(p, ends, &inside, &(*node)->body));
    p->in_macro = old;
    p->at++;
    return QD_OK;
}

static qd_status parse_with(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endwith", NULL};
    NEW(*node, QD_CHAT_N_WITH, p->at);
    while (p->at->kind != QD_CHAT_L_BLOCK_END && !qd_chat_is_op(p, ':')) {
        qd_chat_node *target, *value;
        if ((*node)->count)
            QD_TRY(qd_chat_expect_op(p, ','));
        QD_TRY(targets(p, false, &target));
        QD_TRY(qd_chat_expect_op(p, '='));
        QD_TRY(qd_chat_parse_expression(p, &value));
        QD_TRY(qd_chat_node_add(p, *node, target));
        QD_TRY(qd_chat_node_add(p, *node, value));
    }
    QD_TRY(body(p, ends, NULL, &(*node)->body));
    p->at++;
    return QD_OK;
}

static qd_status parse_filter_block(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endfilter", NULL};
    NEW(*node, QD_CHAT_N_FILTER_BLOCK, p->at);
    QD_TRY(qd_chat_parse_filters(p, true, &(*node)->a));
    surroundings inside = {p->loops, true, p->generating, p->in_macro};
    QD_TRY(body(p, ends, &inside, &(*node)->body));
    p->at++;
    return QD_OK;
}

static qd_status parse_generation(qd_chat_parser *p, qd_chat_node **node)
{
    static const char *const ends[] = {"endgeneration", NULL};
    NEW(*node, QD_CHAT_N_GENERATION, p->at);
    if (p->captured || p->generating)
        return qd_chat_fail(p->chat, p->at->at, "'generation' inside a macro, a set block, a filter block or another 'generation' is "
                                                "not implemented");
    p->chat->generation = true;
    surroundings inside = {.generating = true};
    QD_TRY(body(p, ends, &inside, &(*node)->body));
    p->at++;
    return QD_OK;
}

static qd_status parse_jump(qd_chat_parser *p, qd_chat_kind kind, qd_chat_node **node)
{
    if (!p->loops)
        return qd_chat_fail(p->chat, p->at->at, "'%s' outside a loop", kind == QD_CHAT_N_BREAK ? "break" : "continue");
    NEW(*node, kind, p->at);
    return QD_OK;
}

static qd_status parse_break(qd_chat_parser *p, qd_chat_node **node)
{
    return parse_jump(p, QD_CHAT_N_BREAK, node);
}

static qd_status parse_continue(qd_chat_parser *p, qd_chat_node **node)
{
    return parse_jump(p, QD_CHAT_N_CONTINUE, node);
}

static qd_status statement(qd_chat_parser *p, qd_chat_node **node)
{
    static const struct {
        const char *tag;
        qd_status (*parse)(qd_chat_parser *p, qd_chat_node **node); /* NULL: not implemented */
    } tags[] = {
        {"if", parse_if}, {"for", parse_for}, {"set", parse_set}, {"macro", parse_macro}, {"with", parse_with},
        {"filter", parse_filter_block}, {"generation", parse_generation}, {"break", parse_break}, {"continue", parse_continue},
        {"call", NULL}, {"block", NULL}, {"extends", NULL}, {"include", NULL}, {"import", NULL}, {"from", NULL},
        {"print", NULL}, {"autoescape", NULL},
    };
    if (p->at->kind != QD_CHAT_L_NAME)
        return qd_chat_unexpected(p, "the name of a tag");
    for (size_t i = 0; i < sizeof tags / sizeof *tags; i++)
        if (qd_chat_is_word(p, tags[i].tag)) {
            if (!tags[i].parse)
                return qd_chat_fail(p->chat, p->at->at, "tag '%s' is not implemented", tags[i].tag);
            p->at++;
            return tags[i].parse(p, node);
        }
    return qd_chat_fail(p->chat, p->at->at, "there is no tag '%.80s' here", p->at->text);
}

qd_status qd_chat_parse(qd_chat *chat, const qd_chat_lexed *lexemes)
{
    static const char *const none[] = {NULL};
    qd_chat_parser p = {.chat = chat, .at = lexemes};
    return statements(&p, none, &chat->body);
}
