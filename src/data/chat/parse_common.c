/* What the parsers of statements and expressions share: lexemes, nodes and messages. */
#include "data/chat/chat_impl.h"

#include <string.h>

qd_chat_node *qd_chat_node_new(qd_chat_parser *p, qd_chat_kind kind, const qd_chat_lexed *at)
{
    qd_chat_node *node = QD_ARENA_NEW(p->chat->arena, qd_chat_node, 1);
    if (node) {
        node->kind = (uint8_t)kind;
        node->at = at->at;
        node->symbol = -1;
    }
    return node;
}

bool qd_chat_full(size_t count)
{
    return (count & (count - 1)) == 0; /* arrays have a power of two as capacity */
}

void *qd_chat_grown(qd_chat_parser *p, const void *old, size_t count, size_t size)
{
    void *memory = qd_arena_array(p->chat->arena, count ? 2 * count : 1, size);
    if (memory && count)
        memcpy(memory, old, count * size);
    return memory;
}

qd_status qd_chat_node_add(qd_chat_parser *p, qd_chat_node *node, qd_chat_node *item)
{
    if (qd_chat_full(node->count) && !(node->items = qd_chat_grown(p, node->items, node->count, sizeof *node->items)))
        return QD_NO_MEMORY;
    node->items[node->count++] = item;
    return QD_OK;
}

bool qd_chat_is_op(const qd_chat_parser *p, int op)
{
    return p->at->kind == QD_CHAT_L_OP && p->at->op == op;
}

bool qd_chat_is_word(const qd_chat_parser *p, const char *word)
{
    return p->at->kind == QD_CHAT_L_NAME && strcmp(p->at->text, word) == 0;
}

bool qd_chat_skip_op(qd_chat_parser *p, int op)
{
    bool found = qd_chat_is_op(p, op);
    p->at += found;
    return found;
}

bool qd_chat_skip_word(qd_chat_parser *p, const char *word)
{
    bool found = qd_chat_is_word(p, word);
    p->at += found;
    return found;
}

qd_status qd_chat_unexpected(const qd_chat_parser *p, const char *expected)
{
    const qd_chat_lexed *at = p->at;
    switch ((qd_chat_lexeme)at->kind) {
    case QD_CHAT_L_END:
        return qd_chat_fail(p->chat, at->at, "expected %s, found the end of the template", expected);
    case QD_CHAT_L_PRINT_END:
    case QD_CHAT_L_BLOCK_END:
        return qd_chat_fail(p->chat, at->at, "expected %s, found the end of the tag", expected);
    case QD_CHAT_L_NAME:
        return qd_chat_fail(p->chat, at->at, "expected %s, found '%.80s'", expected, at->text);
    case QD_CHAT_L_OP:
        return qd_chat_fail(p->chat, at->at, "expected %s, found '%.*s'", expected, at->op > 255 ? 2 : 1, p->chat->text + at->at);
    case QD_CHAT_L_STRING:
        return qd_chat_fail(p->chat, at->at, "expected %s, found a string", expected);
    case QD_CHAT_L_INT:
    case QD_CHAT_L_FLOAT:
        return qd_chat_fail(p->chat, at->at, "expected %s, found a number", expected);
    case QD_CHAT_L_DATA:
    case QD_CHAT_L_PRINT_BEGIN:
    case QD_CHAT_L_BLOCK_BEGIN:
        break;
    }
    return qd_chat_fail(p->chat, at->at, "expected %s", expected);
}

qd_status qd_chat_expect_op(qd_chat_parser *p, int op)
{
    const char text[] = {'\'', (char)(op & 255), '\'', '\0'};
    return qd_chat_skip_op(p, op) ? QD_OK : qd_chat_unexpected(p, text);
}

qd_status qd_chat_enter(qd_chat_parser *p)
{
    if (++p->nesting > QD_CHAT_MOST_NESTING)
        return qd_chat_fail(p->chat, p->at->at, "the template is nested more than %d levels deep", QD_CHAT_MOST_NESTING);
    return QD_OK;
}
