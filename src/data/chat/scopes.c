/* Which variables a scope hides. Jinja resolves names when it compiles: a name that a scope
 * assigns, and has not read before, is a variable of that scope from its start. Inner scopes that
 * read it earlier find it undefined, although an outer scope or the caller may have defined it. So
 * each block with a scope lists such names, and they start undefined. Assignments in branches of
 * `if` do not hide. */
#include "data/chat/chat_impl.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_NAMES = 2000 };
enum { UNKNOWN, KNOWN, HIDDEN };

typedef struct frame {
    const struct frame *parent;
    uint8_t *kinds;  /* by symbol */
    uint8_t *stored; /* by symbol: assigned in this frame */
} frame;

typedef struct analysis {
    qd_chat *chat;
    size_t names;
    int depth;
} analysis;

static bool frame_open(const analysis *a, const frame *parent, frame *f)
{
    f->parent = parent;
    f->kinds = calloc(2, a->names + 1);
    f->stored = f->kinds ? f->kinds + a->names + 1 : NULL;
    return f->kinds;
}

static bool known_outside(const frame *f, int32_t symbol)
{
    for (f = f->parent; f; f = f->parent)
        if (f->kinds[symbol])
            return true;
    return false;
}

static void load(frame *f, int32_t symbol)
{
    if (!f->kinds[symbol] && !known_outside(f, symbol))
        f->kinds[symbol] = KNOWN;
}

static void store(frame *f, int32_t symbol)
{
    f->stored[symbol] = 1;
    if (!f->kinds[symbol])
        f->kinds[symbol] = known_outside(f, symbol) ? KNOWN : HIDDEN;
}

static void parameters(frame *f, const qd_chat_node *target)
{
    for (uint32_t i = 0; target->kind == QD_CHAT_N_TUPLE && i < target->count; i++)
        parameters(f, target->items[i]);
    if (target->kind == QD_CHAT_N_NAME) {
        f->stored[target->symbol] = 1;
        f->kinds[target->symbol] = KNOWN;
    }
}

static qd_status expression(analysis *a, frame *f, const qd_chat_node *node)
{
    if (!node)
        return QD_OK;
    if (++a->depth > QD_CHAT_MOST_DEPTH)
        return qd_chat_fail(a->chat, node->at, "the expression is nested more than %d levels deep", QD_CHAT_MOST_DEPTH);
    if (node->kind == QD_CHAT_N_NAME || node->kind == QD_CHAT_N_MEMBER)
        load(f, node->symbol);
    QD_TRY(expression(a, f, node->a));
    QD_TRY(expression(a, f, node->b));
    QD_TRY(expression(a, f, node->c));
    bool named = node->kind == QD_CHAT_N_CALL || node->kind == QD_CHAT_N_FILTER || node->kind == QD_CHAT_N_TEST;
    for (uint32_t i = 0; i < node->count + (named ? node->named_count : 0); i++)
        QD_TRY(expression(a, f, node->items[i]));
    a->depth--;
    return QD_OK;
}

static void assigned(frame *f, const qd_chat_node *target)
{
    for (uint32_t i = 0; target->kind == QD_CHAT_N_TUPLE && i < target->count; i++)
        assigned(f, target->items[i]);
    if (target->kind == QD_CHAT_N_NAME)
        store(f, target->symbol);
    else if (target->kind == QD_CHAT_N_MEMBER)
        load(f, target->symbol);
}

static qd_status own_statements(analysis *a, frame *f, const qd_chat_node *body);

static qd_status branch(analysis *a, frame *f, const qd_chat_node *condition, const qd_chat_node *body, frame *into)
{
    frame copy;
    if (!frame_open(a, f->parent, &copy))
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", a->chat->name);
    memcpy(copy.kinds, f->kinds, 2 * (a->names + 1));
    qd_status status = condition ? expression(a, &copy, condition) : QD_OK;
    if (status == QD_OK)
        status = own_statements(a, &copy, body);
    for (size_t i = 0; i < a->names && status == QD_OK; i++) {
        if (copy.kinds[i])
            into->kinds[i] = copy.kinds[i];
        into->stored[i] |= copy.stored[i];
    }
    free(copy.kinds);
    return status;
}

/* The branches of an `if` see the frame as it was before all of them. */
static qd_status conditional(analysis *a, frame *f, const qd_chat_node *node)
{
    frame after;
    QD_TRY(expression(a, f, node->a));
    if (!frame_open(a, f->parent, &after))
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", a->chat->name);
    memcpy(after.kinds, f->kinds, 2 * (a->names + 1));
    qd_status status = branch(a, f, NULL, node->body, &after);
    for (; status == QD_OK && node->other && node->other->kind == QD_CHAT_N_IF && node->other->op; node = node->other)
        status = branch(a, f, node->other->a, node->other->body, &after);
    if (status == QD_OK)
        status = branch(a, f, NULL, node->other, &after);
    for (size_t i = 0; i < a->names && status == QD_OK; i++) {
        f->kinds[i] = after.stored[i] && !f->stored[i] ? KNOWN : after.kinds[i];
        f->stored[i] = after.stored[i];
    }
    free(after.kinds);
    return status;
}

/* Statements of one frame, without the inside of blocks that have a frame of their own. */
static qd_status own_statements(analysis *a, frame *f, const qd_chat_node *body)
{
    for (const qd_chat_node *node = body; node; node = node->next)
        switch ((int)node->kind) {
        case QD_CHAT_N_PRINT:
        case QD_CHAT_N_FILTER_BLOCK:
            QD_TRY(expression(a, f, node->a));
            break;
        case QD_CHAT_N_IF:
            QD_TRY(conditional(a, f, node));
            break;
        case QD_CHAT_N_FOR:
            QD_TRY(expression(a, f, node->b));
            break;
        case QD_CHAT_N_SET:
            QD_TRY(expression(a, f, node->b));
            assigned(f, node->a);
            break;
        case QD_CHAT_N_SET_BLOCK:
            assigned(f, node->a);
            break;
        case QD_CHAT_N_MACRO:
            store(f, node->symbol);
            break;
        case QD_CHAT_N_WITH:
            for (uint32_t i = 1; i < node->count; i += 2)
                QD_TRY(expression(a, f, node->items[i]));
            break;
        default:
            break;
        }
    return QD_OK;
}

static qd_status hidden_of(const analysis *a, const frame *f, qd_chat_hidden *hidden)
{
    uint32_t count = 0;
    for (size_t i = 0; i < a->names; i++)
        count += f->kinds[i] == HIDDEN;
    hidden->symbols = count ? QD_ARENA_NEW(a->chat->arena, int32_t, count) : NULL;
    if (count && !hidden->symbols)
        return QD_NO_MEMORY;
    for (size_t i = 0; i < a->names; i++)
        if (f->kinds[i] == HIDDEN)
            hidden->symbols[hidden->count++] = (int32_t)i;
    return QD_OK;
}

static qd_status inner_frames(analysis *a, const frame *f, qd_chat_node *body);

/* A block with its own frame: its parameters, then its statements, then the blocks inside. */
static qd_status block(analysis *a, const frame *parent, const qd_chat_node *node, qd_chat_node *body, qd_chat_hidden *hidden)
{
    frame f;
    if (!frame_open(a, parent, &f))
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", a->chat->name);
    qd_status status = QD_OK;
    bool is_for = node && node->kind == QD_CHAT_N_FOR && body == node->body;
    if (is_for) {
        parameters(&f, node->a);
        f.kinds[a->chat->loop_symbol] = KNOWN;
    }
    bool is_macro = node && node->kind == QD_CHAT_N_MACRO, is_with = node && node->kind == QD_CHAT_N_WITH;
    for (uint32_t i = 0; (is_macro || is_with) && i < node->count; i += is_with ? 2 : 1)
        parameters(&f, node->items[i]);
    for (uint32_t i = 0; is_macro && i < node->named_count && status == QD_OK; i++)
        status = expression(a, &f, node->items[node->count + i]);
    if (status == QD_OK)
        status = own_statements(a, &f, body);
    if (status == QD_OK)
        status = hidden_of(a, &f, hidden);
    if (status == QD_OK)
        status = inner_frames(a, &f, body);
    free(f.kinds);
    return status;
}

static qd_status inner_frames(analysis *a, const frame *f, qd_chat_node *body)
{
    for (qd_chat_node *node = body; node; node = node->next)
        switch ((int)node->kind) {
        case QD_CHAT_N_IF:
            for (qd_chat_node *each = node;;) {
                QD_TRY(inner_frames(a, f, each->body));
                if (!each->other || each->other->kind != QD_CHAT_N_IF || !each->other->op) {
                    QD_TRY(inner_frames(a, f, each->other));
                    break;
                }
                each = each->other;
            }
            break;
        case QD_CHAT_N_FOR:
            QD_TRY(block(a, f, node, node->body, &node->hidden));
            QD_TRY(block(a, f, node, node->other, &node->hidden_other));
            break;
        case QD_CHAT_N_SET_BLOCK:
        case QD_CHAT_N_FILTER_BLOCK:
        case QD_CHAT_N_MACRO:
        case QD_CHAT_N_WITH:
        case QD_CHAT_N_GENERATION:
            QD_TRY(block(a, f, node, node->body, &node->hidden));
            break;
        default:
            break;
        }
    return QD_OK;
}

qd_status qd_chat_analyze(qd_chat *chat)
{
    analysis a = {.chat = chat, .names = chat->symbol_count};
    if (a.names > MOST_NAMES)
        return QD_FAIL(QD_USAGE, "%s: the chat template has more than %d variables", chat->name, MOST_NAMES);
    return block(&a, NULL, NULL, chat->body, &chat->hidden);
}
