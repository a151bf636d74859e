/* Loading a template from text, its special tokens, and the rendering of messages with it. */
#include "data/chat/chat_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

qd_status qd_chat_fail(const qd_chat *chat, size_t at, const char *format, ...)
{
    int line = 1;
    size_t line_start = 0;
    for (size_t i = 0; i < at && i < chat->length; i++)
        if (chat->text[i] == '\n') {
            line++;
            line_start = i + 1;
        }
    char message[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return QD_FAIL(QD_USAGE, "%s:%d:%zu: %s", chat->name, line, at - line_start + 1, message);
}

static uint32_t hash(const char *name, size_t length)
{
    uint32_t sum = 2166136261u;
    for (size_t i = 0; i < length; i++)
        sum = (sum ^ (unsigned char)name[i]) * 16777619u;
    return sum;
}

static bool table_grow(qd_chat *chat)
{
    size_t size = chat->table_size ? 2 * chat->table_size : 64;
    int32_t *table = QD_ARENA_NEW(chat->arena, int32_t, size);
    const char **symbols = QD_ARENA_NEW(chat->arena, const char *, size);
    if (!table || !symbols)
        return false;
    memset(table, 0xff, size * sizeof *table);
    for (size_t i = 0; i < chat->symbol_count; i++) {
        size_t at = hash(chat->symbols[i], strlen(chat->symbols[i])) & (size - 1);
        while (table[at] >= 0)
            at = (at + 1) & (size - 1);
        table[at] = (int32_t)i;
        symbols[i] = chat->symbols[i];
    }
    chat->table = table;
    chat->table_size = size;
    chat->symbols = symbols;
    return true;
}

int32_t qd_chat_symbol(qd_chat *chat, const char *name, size_t length, bool add)
{
    if (add && 2 * (chat->symbol_count + 1) > chat->table_size && !table_grow(chat))
        return -1;
    size_t at = hash(name, length) & (chat->table_size - 1);
    for (; chat->table[at] >= 0; at = (at + 1) & (chat->table_size - 1)) {
        const char *symbol = chat->symbols[chat->table[at]];
        if (strncmp(symbol, name, length) == 0 && !symbol[length])
            return chat->table[at];
    }
    if (!add)
        return -1;
    char *copy = QD_ARENA_NEW(chat->arena, char, length + 1);
    if (!copy)
        return -1;
    memcpy(copy, name, length);
    chat->symbols[chat->symbol_count] = copy;
    return chat->table[at] = (int32_t)chat->symbol_count++;
}

/* The text with "\n" as the only line end, without one at its end: keep_trailing_newline is off. */
static qd_status normalize(qd_chat *chat, const char *text, size_t length)
{
    char *out = QD_ARENA_NEW(chat->arena, char, length + 1);
    if (!out)
        return QD_NO_MEMORY;
    size_t to = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '\r' && i + 1 < length && text[i + 1] == '\n')
            continue;
        out[to++] = text[i] == '\r' ? '\n' : text[i];
    }
    if (to && out[to - 1] == '\n')
        to--;
    out[to] = '\0';
    chat->text = out;
    chat->length = to;
    return QD_OK;
}

static qd_status load(qd_chat *chat, const char *text, size_t length)
{
    qd_chat_lexed *lexemes = NULL;
    size_t count;
    chat->text = "";
    if (length > QD_CHAT_MOST_TEXT)
        return QD_FAIL(QD_USAGE, "%s: the chat template has %zu bytes; the limit is %d", chat->name, length, QD_CHAT_MOST_TEXT);
    if (qd_utf8_valid(text, length) < length || memchr(text, 0, length))
        return QD_FAIL(QD_USAGE, "%s: the chat template is not UTF-8 text", chat->name);
    QD_TRY(normalize(chat, text, length));
    chat->loop_symbol = qd_chat_symbol(chat, "loop", 4, true);
    if (chat->loop_symbol < 0)
        return QD_NO_MEMORY;
    QD_TRY(qd_chat_lex(chat, &lexemes, &count));
    qd_status status = qd_chat_parse(chat, lexemes);
    free(lexemes);
    return status == QD_OK ? qd_chat_analyze(chat) : status;
}

qd_status qd_chat_load_text(const char *name, const char *text, size_t length, qd_chat **chat)
{
    *chat = NULL;
    qd_arena *arena;
    QD_TRY(qd_arena_create(&arena));
    qd_chat *loaded = QD_ARENA_NEW(arena, qd_chat, 1);
    const char *copy = loaded ? qd_arena_strdup(arena, name) : NULL;
    if (!copy) {
        qd_arena_destroy(arena);
        return QD_NO_MEMORY;
    }
    loaded->arena = arena;
    loaded->name = copy;
    qd_status status = load(loaded, text, length);
    if (status == QD_OK)
        *chat = loaded;
    else
        qd_arena_destroy(arena);
    return status;
}

void qd_chat_destroy(qd_chat *chat)
{
    if (chat)
        qd_arena_destroy(chat->arena);
}

bool qd_chat_has_generation(const qd_chat *chat)
{
    return chat->generation;
}

const char *qd_chat_token(const qd_chat *chat, const char *variable)
{
    for (size_t i = 0; i < chat->token_count; i++)
        if (strcmp(chat->tokens[i].variable, variable) == 0)
            return chat->tokens[i].text;
    return NULL;
}

qd_status qd_chat_set_token(qd_chat *chat, const char *variable, const char *text)
{
    char *copy = qd_arena_strdup(chat->arena, text);
    if (!copy)
        return QD_NO_MEMORY;
    for (size_t i = 0; i < chat->token_count; i++)
        if (strcmp(chat->tokens[i].variable, variable) == 0) {
            chat->tokens[i].text = copy;
            return QD_OK;
        }
    qd_chat_named *tokens = QD_ARENA_NEW(chat->arena, qd_chat_named, chat->token_count + 1);
    char *key = qd_arena_strdup(chat->arena, variable);
    if (!tokens || !key)
        return QD_NO_MEMORY;
    if (chat->token_count)
        memcpy(tokens, chat->tokens, chat->token_count * sizeof *tokens);
    tokens[chat->token_count] = (qd_chat_named){key, copy};
    chat->tokens = tokens;
    chat->token_count++;
    return QD_OK;
}

void qd_chat_spans_free(qd_chat_spans *spans)
{
    free(spans->spans);
    *spans = (qd_chat_spans){0};
}

/* Variables: only those that the template names. */

static qd_status define_value(qd_chat_run *run, const char *name, qd_chat_value value)
{
    int32_t symbol = qd_chat_symbol((qd_chat *)run->chat, name, strlen(name), false);
    return symbol < 0 ? QD_OK : qd_chat_define(run, run->scope, symbol, value);
}

static qd_status define_json(qd_chat_run *run, const char *name, const qd_json_node *node)
{
    if (qd_chat_symbol((qd_chat *)run->chat, name, strlen(name), false) < 0)
        return QD_OK;
    qd_chat_value value = qd_chat_none();
    if (node)
        QD_TRY(qd_chat_from_json(run, node, &value));
    return define_value(run, name, value);
}

/* A message, with its reasoning under all the names that templates use, as transformers passes
 * it. */
static qd_status message_value(qd_chat_run *run, const qd_json_node *node, qd_chat_value *value)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    QD_TRY(qd_chat_from_json(run, node, value));
    qd_chat_value reasoning, thinking;
    bool found = false;
    for (int i = 0; i < 3 && !found; i++)
        found = qd_chat_dict_text(value->dict, names[i], strlen(names[i]), &reasoning) && reasoning.type != QD_CHAT_NONE;
    if (!found)
        return QD_OK;
    const qd_chat_dict *old = value->dict;
    bool has_thinking = qd_chat_dict_text(old, "thinking", 8, &thinking);
    QD_TRY(qd_chat_dict_new(run, QD_CHAT_DICT, old->count + 2, value));
    QD_TRY(qd_chat_dict_put(run, value->dict, qd_chat_literal("thinking"), has_thinking ? thinking : reasoning));
    for (size_t i = 0; i < old->count; i++)
        QD_TRY(qd_chat_dict_put(run, value->dict, old->keys[i], old->values[i]));
    return qd_chat_dict_put(run, value->dict, qd_chat_literal("reasoning_content"), reasoning);
}

static qd_status define_messages(qd_chat_run *run)
{
    const qd_json_node *messages = run->input->messages, *more = run->input->more;
    if (!messages || qd_json_kind_of(messages) != QD_JSON_LIST || (more && qd_json_kind_of(more) != QD_JSON_LIST))
        return QD_FAIL(QD_USAGE, "%s: messages must be a list of objects", run->chat->name);
    qd_chat_value list;
    size_t first = qd_json_count(messages), wanted = run->input->message_count;
    first = wanted > 0 && wanted < first ? wanted : first;
    const size_t count = first + (more ? qd_json_count(more) : 0);
    QD_TRY(qd_chat_sequence_new(run, QD_CHAT_LIST, count, &list));
    for (size_t i = 0; i < count; i++) {
        const qd_json_node *message = i < first ? qd_json_item(messages, i) : qd_json_item(more, i - first);
        if (qd_json_kind_of(message) != QD_JSON_OBJECT)
            return QD_FAIL(QD_USAGE, "%s: message %zu must be an object with \"role\" and \"content\"", run->chat->name, i + 1);
        QD_TRY(message_value(run, message, &list.sequence->items[i]));
    }
    return define_value(run, "messages", list);
}

static qd_status define_all(qd_chat_run *run)
{
    const qd_chat *chat = run->chat;
    const qd_chat_input *input = run->input;
    const char *key;
    const qd_json_node *value;
    for (size_t i = 0; i < chat->token_count; i++)
        QD_TRY(define_value(run, chat->tokens[i].variable, qd_chat_literal(chat->tokens[i].text)));
    QD_TRY(define_messages(run));
    QD_TRY(define_json(run, "tools", input->tools));
    QD_TRY(define_json(run, "documents", input->documents));
    QD_TRY(define_value(run, "add_generation_prompt", qd_chat_bool(input->add_generation_prompt)));
    if (!input->variables)
        return QD_OK;
    if (qd_json_kind_of(input->variables) != QD_JSON_OBJECT)
        return QD_FAIL(QD_USAGE, "%s: the variables of a chat template must be an object", chat->name);
    for (qd_json_iterator it = qd_json_begin(input->variables); qd_json_next(&it, &key, &value);)
        QD_TRY(define_json(run, key, value));
    return QD_OK;
}

static qd_status render(qd_chat_run *run)
{
    qd_chat_scope *old;
    qd_chat_flow flow = QD_CHAT_GO_ON;
    QD_TRY(qd_chat_scope_enter(run, NULL, NULL, &old));
    QD_TRY(define_all(run));
    QD_TRY(qd_chat_scope_enter(run, run->scope, &run->chat->hidden, &old));
    return qd_chat_execute(run, run->chat->body, &flow);
}

qd_status qd_chat_render(const qd_chat *chat, const qd_chat_input *input, qd_strbuf *text, qd_chat_spans *spans)
{
    size_t length = text->length;
    qd_chat_run run = {.chat = chat, .input = input, .out = text, .out_start = length, .spans = spans};
    if (spans)
        spans->count = 0;
    QD_TRY(qd_arena_create(&run.arena));
    qd_status status = render(&run);
    if (status == QD_OK && text->failed)
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory for the rendered text", chat->name);
    qd_arena_destroy(run.arena);
    if (status != QD_OK && text->data) {
        text->length = length;
        text->data[length] = '\0';
    }
    return status;
}
