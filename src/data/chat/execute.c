/* Executes statements. Loops, macros and captured blocks have scopes of their own; `if` has
 * none. */
#include "data/chat/chat_impl.h"

#include <stdlib.h>
#include <string.h>

qd_status qd_chat_take(qd_chat_run *run, size_t bytes, void *memory)
{
    void *taken = NULL;
    memcpy(memory, &taken, sizeof taken);
    if (bytes > QD_CHAT_MOST_MEMORY - run->used)
        return QD_CHAT_FAIL(run, "the values of the template need more than %d MiB", QD_CHAT_MOST_MEMORY >> 20);
    run->used += bytes + 16;
    if (run->used > QD_CHAT_MOST_MEMORY)
        run->used = QD_CHAT_MOST_MEMORY;
    taken = qd_arena_alloc(run->arena, bytes ? bytes : 1);
    memcpy(memory, &taken, sizeof taken);
    return taken ? QD_OK : QD_NO_MEMORY;
}

qd_status qd_chat_spend(qd_chat_run *run, size_t steps)
{
    run->steps += steps;
    return run->steps <= QD_CHAT_MOST_STEPS ? QD_OK : QD_CHAT_FAIL(run, "the template takes more than %d steps", QD_CHAT_MOST_STEPS);
}

qd_status qd_chat_write(qd_chat_run *run, qd_strbuf *to, const char *text, size_t length)
{
    if (length > QD_CHAT_MOST_OUTPUT - run->written)
        return QD_CHAT_FAIL(run, "the template writes more than %d MiB", QD_CHAT_MOST_OUTPUT >> 20);
    run->written += length;
    if (length)
        qd_strbuf_append(to, text, length);
    return QD_OK;
}

qd_status qd_chat_captured(qd_chat_run *run, qd_strbuf *from, qd_chat_value *value)
{
    qd_status status = from->failed ? QD_FAIL(QD_NO_MEMORY, "%s: no memory for text", run->chat->name)
                                    : qd_chat_copy(run, from->data ? from->data : "", from->length, value);
    qd_strbuf_free(from);
    return status;
}

/* ---- variables ---- */

static qd_status hide(qd_chat_run *run, qd_chat_scope *scope, const qd_chat_hidden *hidden)
{
    for (uint32_t i = 0; hidden && i < hidden->count; i++) {
        const char *name = run->chat->symbols[hidden->symbols[i]];
        QD_TRY(qd_chat_define(run, scope, hidden->symbols[i], qd_chat_undefined(name, strlen(name), QD_CHAT_UNDEFINED)));
    }
    return QD_OK;
}

qd_status qd_chat_scope_enter(qd_chat_run *run, qd_chat_scope *parent, const qd_chat_hidden *hidden, qd_chat_scope **old)
{
    qd_chat_scope *scope;
    QD_TRY(qd_chat_take(run, sizeof *scope, &scope));
    scope->parent = parent;
    *old = run->scope;
    run->scope = scope;
    return hide(run, scope, hidden);
}

qd_status qd_chat_define(qd_chat_run *run, qd_chat_scope *scope, int32_t symbol, qd_chat_value value)
{
    QD_TRY(qd_chat_spend(run, scope->count / 16));
    for (uint32_t i = 0; i < scope->count; i++)
        if (scope->variables[i].symbol == symbol) {
            scope->variables[i].value = value;
            return QD_OK;
        }
    if (scope->count == scope->capacity) {
        uint32_t capacity = scope->capacity ? 2 * scope->capacity : 4;
        struct qd_chat_variable *grown;
        QD_TRY(qd_chat_take(run, capacity * sizeof *grown, &grown));
        if (scope->count)
            memcpy(grown, scope->variables, scope->count * sizeof *grown);
        scope->variables = grown;
        scope->capacity = capacity;
    }
    scope->variables[scope->count].symbol = symbol;
    scope->variables[scope->count++].value = value;
    return QD_OK;
}

bool qd_chat_lookup(qd_chat_run *run, int32_t symbol, qd_chat_value *value)
{
    size_t looked_at = 0;
    bool found = false;
    for (const qd_chat_scope *scope = run->scope; scope && !found; scope = scope->parent, looked_at++)
        for (uint32_t i = 0; i < scope->count && !found; i++, looked_at++)
            if (scope->variables[i].symbol == symbol) {
                *value = scope->variables[i].value;
                found = true;
            }
    run->steps += looked_at / 16; /* counts when the next step is spent */
    return found;
}

static qd_status unpack(qd_chat_run *run, const qd_chat_node *target, qd_chat_value value)
{
    qd_chat_value list;
    QD_TRY(qd_chat_items(run, value, &list));
    run->at = target->at;
    if (list.sequence->count != target->count)
        return QD_CHAT_FAIL(run, "%zu values cannot be assigned to %u variables", list.sequence->count, target->count);
    for (uint32_t i = 0; i < target->count; i++)
        QD_TRY(qd_chat_assign(run, target->items[i], list.sequence->items[i]));
    return QD_OK;
}

qd_status qd_chat_assign(qd_chat_run *run, const qd_chat_node *target, qd_chat_value value)
{
    if (target->kind == QD_CHAT_N_NAME)
        return qd_chat_define(run, run->scope, target->symbol, value);
    run->at = target->at;
    if (target->kind == QD_CHAT_N_TUPLE)
        return unpack(run, target, value);
    qd_chat_value owner;
    if (!qd_chat_lookup(run, target->symbol, &owner) || owner.type != QD_CHAT_NAMESPACE)
        return QD_CHAT_FAIL(run, "'%s' is not a namespace, so its attributes cannot be assigned", run->chat->symbols[target->symbol]);
    return qd_chat_dict_put(run, owner.dict, qd_chat_string(target->text, target->length), value);
}

/* ---- blocks ---- */

/* Executes the body of `node` in a new scope and returns what it writes. */
static qd_status capture(qd_chat_run *run, const qd_chat_node *node, qd_chat_value *value, qd_chat_flow *flow)
{
    qd_strbuf text = {0}, *out = run->out;
    qd_chat_scope *old;
    QD_TRY(qd_chat_scope_enter(run, run->scope, &node->hidden, &old));
    run->out = &text;
    qd_status status = qd_chat_execute(run, node->body, flow);
    run->out = out;
    run->scope = old;
    if (status == QD_OK)
        return qd_chat_captured(run, &text, value);
    qd_strbuf_free(&text);
    return status;
}

static qd_status bind_parameters(qd_chat_run *run, const qd_chat_node *node, const qd_chat_arguments *arguments)
{
    size_t at = run->at;
    bool given[16] = {false};
    if (arguments->count > node->count)
        return QD_CHAT_FAIL(run, "macro '%.80s' takes %u arguments, not %zu", node->text, node->count, arguments->count);
    for (size_t i = 0; i < arguments->count; i++) {
        given[i] = true;
        QD_TRY(qd_chat_assign(run, node->items[i], arguments->positional[i]));
    }
    for (size_t n = 0; n < arguments->named_count; n++) {
        uint32_t i = 0;
        while (i < node->count && strcmp(node->items[i]->text, arguments->names[n]) != 0)
            i++;
        if (i == node->count || given[i])
            return QD_CHAT_FAIL(run, i == node->count ? "macro '%.80s' has no parameter '%.80s'"
                                                      : "macro '%.80s' is given the argument '%.80s' twice",
                                node->text, arguments->names[n]);
        given[i] = true;
        QD_TRY(qd_chat_assign(run, node->items[i], arguments->named[n]));
    }
    for (uint32_t i = 0; i < node->count; i++) {
        const qd_chat_node *parameter = node->items[i];
        if (given[i])
            continue;
        qd_chat_value value = qd_chat_undefined(parameter->text, parameter->length, QD_CHAT_UNDEFINED);
        if (i + node->named_count >= node->count)
            QD_TRY(qd_chat_evaluate(run, node->items[i + node->named_count], &value));
        QD_TRY(qd_chat_assign(run, parameter, value));
    }
    run->at = at;
    return QD_OK;
}

qd_status qd_chat_call_macro(qd_chat_run *run, const qd_chat_macro *macro, const qd_chat_arguments *arguments, qd_chat_value *value)
{
    qd_chat_scope *caller = run->scope, *ignored;
    qd_strbuf text = {0}, *out = run->out;
    qd_chat_flow flow = QD_CHAT_GO_ON;
    QD_TRY(qd_chat_scope_enter(run, macro->scope, &macro->node->hidden, &ignored));
    qd_status status = bind_parameters(run, macro->node, arguments);
    if (status == QD_OK) {
        run->out = &text;
        status = qd_chat_execute(run, macro->node->body, &flow);
        run->out = out;
    }
    run->scope = caller;
    if (status == QD_OK)
        return qd_chat_captured(run, &text, value);
    qd_strbuf_free(&text);
    return status;
}

static qd_status add_span(qd_chat_run *run, size_t begin)
{
    qd_chat_spans *spans = run->spans;
    if (!spans)
        return QD_OK;
    if (spans->count == spans->capacity) {
        size_t capacity = spans->capacity ? 2 * spans->capacity : 8;
        qd_chat_span *grown = realloc(spans->spans, capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for spans", run->chat->name);
        spans->spans = grown;
        spans->capacity = capacity;
    }
    spans->spans[spans->count++] = (qd_chat_span){begin - run->out_start, run->out->length - run->out_start};
    return QD_OK;
}

static qd_status execute_for(qd_chat_run *run, const qd_chat_node *node)
{
    qd_chat_value source;
    qd_chat_loop *loop;
    qd_chat_scope *outer = run->scope, *inner = NULL, *ignored;
    size_t macros = 0;
    bool more, whole = false; /* whole: an iteration reached its end; `continue` leaves it before, as in Jinja */
    QD_TRY(qd_chat_evaluate(run, node->b, &source));
    QD_TRY(qd_chat_take(run, sizeof *loop, &loop));
    *loop = (qd_chat_loop){.node = node, .outer = outer, .index0 = -1, .length = -1};
    run->at = node->b->at;
    QD_TRY(qd_chat_iterate(run, source, &loop->iterator));
    for (;;) {
        QD_TRY(qd_chat_loop_next(run, loop, &more));
        if (!more)
            break;
        if (inner && run->macros == macros) { /* nothing refers to the scope of the last iteration */
            inner->count = 0;
            run->scope = inner;
            QD_TRY(hide(run, inner, &node->hidden));
        } else {
            QD_TRY(qd_chat_scope_enter(run, outer, &node->hidden, &ignored));
            inner = run->scope;
            macros = run->macros;
        }
        QD_TRY(qd_chat_define(run, run->scope, run->chat->loop_symbol, (qd_chat_value){.type = QD_CHAT_LOOP, .loop = loop}));
        QD_TRY(qd_chat_assign(run, node->a, loop->current));
        qd_chat_flow flow = QD_CHAT_GO_ON;
        QD_TRY(qd_chat_execute(run, node->body, &flow));
        run->scope = outer;
        whole = whole || flow == QD_CHAT_GO_ON;
        if (flow == QD_CHAT_BREAKS)
            break;
    }
    if (!whole && node->other) {
        qd_chat_flow flow = QD_CHAT_GO_ON;
        QD_TRY(qd_chat_scope_enter(run, outer, &node->hidden_other, &ignored));
        QD_TRY(qd_chat_execute(run, node->other, &flow));
    }
    run->scope = outer;
    return QD_OK;
}

static qd_status execute_if(qd_chat_run *run, const qd_chat_node *node, qd_chat_flow *flow)
{
    for (;;) {
        qd_chat_value condition;
        QD_TRY(qd_chat_evaluate(run, node->a, &condition));
        if (qd_chat_truth(condition))
            return qd_chat_execute(run, node->body, flow);
        if (!node->other || node->other->kind != QD_CHAT_N_IF || !node->other->op)
            return qd_chat_execute(run, node->other, flow);
        node = node->other; /* elif */
    }
}

static qd_status execute_with(qd_chat_run *run, const qd_chat_node *node, qd_chat_flow *flow)
{
    qd_chat_scope *outer = run->scope, *inner, *ignored;
    QD_TRY(qd_chat_scope_enter(run, outer, &node->hidden, &ignored));
    inner = run->scope;
    for (uint32_t i = 0; i < node->count; i += 2) {
        qd_chat_value value;
        run->scope = outer;
        QD_TRY(qd_chat_evaluate(run, node->items[i + 1], &value));
        run->scope = inner;
        QD_TRY(qd_chat_assign(run, node->items[i], value));
    }
    run->scope = inner;
    QD_TRY(qd_chat_execute(run, node->body, flow));
    run->scope = outer;
    return QD_OK;
}

/* Filters of a block: a chain whose innermost subject is the captured text. */
static qd_status filter_text(qd_chat_run *run, const qd_chat_node *filter, qd_chat_value *value)
{
    if (!filter)
        return QD_OK;
    QD_TRY(filter_text(run, filter->a, value));
    return qd_chat_apply(run, filter, *value, value);
}

static qd_status execute_one(qd_chat_run *run, const qd_chat_node *node, qd_chat_flow *flow)
{
    qd_chat_value value;
    qd_chat_scope *old;
    run->at = node->at;
    QD_TRY(qd_chat_spend(run, 1));
    switch ((int)node->kind) {
    case QD_CHAT_N_TEXT:
        return qd_chat_write(run, run->out, node->text, node->length);
    case QD_CHAT_N_PRINT:
        QD_TRY(qd_chat_evaluate(run, node->a, &value));
        run->at = node->at;
        return qd_chat_print(run, value, run->out);
    case QD_CHAT_N_IF:
        return execute_if(run, node, flow);
    case QD_CHAT_N_FOR:
        return execute_for(run, node);
    case QD_CHAT_N_SET:
        QD_TRY(qd_chat_evaluate(run, node->b, &value));
        return qd_chat_assign(run, node->a, value);
    case QD_CHAT_N_SET_BLOCK:
        QD_TRY(capture(run, node, &value, flow));
        QD_TRY(filter_text(run, node->b, &value));
        return qd_chat_assign(run, node->a, value);
    case QD_CHAT_N_FILTER_BLOCK:
        QD_TRY(capture(run, node, &value, flow));
        QD_TRY(filter_text(run, node->a, &value));
        if (value.type != QD_CHAT_STRING)
            return qd_chat_bad_type(run, "a filter block", value);
        return qd_chat_print(run, value, run->out);
    case QD_CHAT_N_MACRO: {
        qd_chat_macro *macro;
        QD_TRY(qd_chat_take(run, sizeof *macro, &macro));
        *macro = (qd_chat_macro){node, run->scope};
        run->macros++;
        return qd_chat_define(run, run->scope, node->symbol, (qd_chat_value){.type = QD_CHAT_MACRO, .macro = macro});
    }
    case QD_CHAT_N_WITH:
        return execute_with(run, node, flow);
    case QD_CHAT_N_GENERATION: {
        size_t begin = run->out->length;
        QD_TRY(qd_chat_scope_enter(run, run->scope, &node->hidden, &old));
        QD_TRY(qd_chat_execute(run, node->body, flow));
        run->scope = old;
        return add_span(run, begin);
    }
    case QD_CHAT_N_BREAK:
        *flow = QD_CHAT_BREAKS;
        return QD_OK;
    default:
        *flow = QD_CHAT_CONTINUES;
        return QD_OK;
    }
}

qd_status qd_chat_execute(qd_chat_run *run, const qd_chat_node *body, qd_chat_flow *flow)
{
    if (++run->depth > QD_CHAT_MOST_DEPTH)
        return QD_CHAT_FAIL(run, "blocks, expressions and macro calls are nested more than %d levels deep", QD_CHAT_MOST_DEPTH);
    for (; body && *flow == QD_CHAT_GO_ON; body = body->next)
        QD_TRY(execute_one(run, body, flow));
    run->depth--;
    return QD_OK;
}
