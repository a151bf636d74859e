/* Walks libyaml's events, keeps the dotted path of the current key and refuses unsupported YAML. */
#include "base/text/yaml.h"
#include "base/text/strbuf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

/* One open mapping or sequence. */
typedef struct level {
    bool sequence;
    bool value_next;   /* mapping: a key was read, its value follows */
    size_t key_length; /* length of the path outside this level */
    int key_line, key_column, line, column;
} level;

typedef struct reader {
    const char *name;
    qd_yaml_visit visit;
    void *context;
    level levels[QD_YAML_MOST_DEPTH];
    int depth;
    int documents;
    qd_strbuf key;   /* dotted path of the current value */
    qd_strbuf value; /* text of a scalar, or joined items of a sequence */
    int items;
} reader;

typedef struct place {
    int line, column;
} place;

#define FAIL_AT(reader, where, ...)                                                                                    \
    qd_error_prefix(QD_FAIL(QD_USAGE, __VA_ARGS__), "%s:%d:%d: ", (reader)->name, (where).line, (where).column)

static place mark_place(yaml_mark_t mark)
{
    return (place){(int)mark.line + 1, (int)mark.column + 1};
}

/* Line and column of byte `offset`, for text that is refused before it is parsed. */
static place offset_place(const char *text, size_t offset)
{
    place where = {1, 1};
    for (size_t i = 0; i < offset; i++) {
        where.column++;
        if (text[i] == '\n')
            where = (place){where.line + 1, 1};
    }
    return where;
}

static qd_status check_text(reader *self, const char *text, size_t length)
{
    if (length > QD_YAML_MOST_BYTES)
        return QD_FAIL(QD_USAGE, "%s: has %zu bytes; a configuration has at most %d", self->name, length,
                       QD_YAML_MOST_BYTES);
    for (size_t i = 0; i < length; i++) {
        unsigned char byte = (unsigned char)text[i];
        if ((byte < 0x20 && byte != '\n' && byte != '\r' && byte != '\t') || byte == 0x7f)
            return FAIL_AT(self, offset_place(text, i), "byte 0x%02x; a configuration is plain UTF-8 text", byte);
    }
    size_t valid = qd_utf8_valid(text, length);
    if (valid < length)
        return FAIL_AT(self, offset_place(text, valid), "byte 0x%02x is not UTF-8; a configuration is plain UTF-8 text",
                       (unsigned char)text[valid]);
    return QD_OK;
}

static void append_scalar(qd_strbuf *buffer, const yaml_event_t *event)
{
    qd_strbuf_append(buffer, (const char *)event->data.scalar.value, event->data.scalar.length);
}

static bool is_null(const yaml_event_t *event)
{
    const char *text = (const char *)event->data.scalar.value;
    return event->data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
           (text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0);
}

static void truncate_key(reader *self, size_t length)
{
    self->key.length = length;
    if (self->key.data)
        self->key.data[length] = '\0';
}

/* The value of the current key has ended. */
static void value_done(reader *self)
{
    if (self->depth == 0)
        return;
    level *outer = &self->levels[self->depth - 1];
    if (!outer->sequence) {
        outer->value_next = false;
        truncate_key(self, outer->key_length);
    }
}

static qd_status check_memory(const reader *self)
{
    return self->key.failed || self->value.failed ? QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", self->name) : QD_OK;
}

static qd_status deliver(reader *self, int kind, place where)
{
    QD_TRY(check_memory(self));
    const level *outer = &self->levels[self->depth - 1];
    qd_yaml_leaf leaf = {.key = self->key.data,
                         .text = self->value.data ? self->value.data : "",
                         .key_line = outer->key_line,
                         .key_column = outer->key_column,
                         .line = where.line,
                         .column = where.column};
    leaf.kind = kind;
    QD_TRY(self->visit(self->context, &leaf));
    value_done(self);
    return QD_OK;
}

static qd_status read_key(reader *self, const yaml_event_t *event, place where)
{
    level *current = &self->levels[self->depth - 1];
    if (self->key.length > 0)
        qd_strbuf_puts(&self->key, ".");
    size_t start = self->key.length;
    append_scalar(&self->key, event);
    QD_TRY(check_memory(self));
    if (self->key.length == start)
        return FAIL_AT(self, where, "a key is empty; write 'key: value'");
    if (self->key.length > QD_YAML_MOST_KEY)
        return FAIL_AT(self, where, "a key has %zu bytes; it has at most %d", self->key.length, QD_YAML_MOST_KEY);
    current->value_next = true;
    current->key_line = where.line;
    current->key_column = where.column;
    return QD_OK;
}

static qd_status read_scalar(reader *self, const yaml_event_t *event, place where)
{
    if (event->data.scalar.anchor || event->data.scalar.tag)
        return FAIL_AT(self, where,
                       "anchors (&name) and tags (!name) are not used in a configuration; write the value");
    if (memchr(event->data.scalar.value, '\0', event->data.scalar.length))
        return FAIL_AT(self, where, "a zero byte (\"\\0\"); a configuration is plain text");
    if (self->depth == 0) {
        if (is_null(event))
            return QD_OK; /* an empty document sets nothing */
        return FAIL_AT(self, where, "a configuration is a mapping; write 'key: value'");
    }
    level *current = &self->levels[self->depth - 1];
    if (current->sequence) {
        size_t start = self->value.length;
        if (self->items++ > 0) {
            qd_strbuf_puts(&self->value, ",");
            start++;
        }
        append_scalar(&self->value, event);
        if (!self->value.failed && (self->value.length <= start || strchr(self->value.data + start, ',')))
            return FAIL_AT(self, where, "%s: an item of a list must be one value without commas", self->key.data);
        return QD_OK;
    }
    if (!current->value_next)
        return read_key(self, event, where);
    qd_strbuf_clear(&self->value);
    append_scalar(&self->value, event);
    if (is_null(event)) /* no value was written: report the position of the key */
        return deliver(self, QD_YAML_NULL, (place){current->key_line, current->key_column});
    return deliver(self, QD_YAML_SCALAR, where);
}

static qd_status open_level(reader *self, bool sequence, bool decorated, place where)
{
    if (decorated)
        return FAIL_AT(self, where,
                       "anchors (&name) and tags (!name) are not used in a configuration; write the value");
    if (self->depth == QD_YAML_MOST_DEPTH)
        return FAIL_AT(self, where, "nested deeper than %d levels", QD_YAML_MOST_DEPTH);
    if (self->depth == 0 && sequence)
        return FAIL_AT(self, where, "a configuration is a mapping, not a list; write 'key: value'");
    if (self->depth > 0) {
        level *outer = &self->levels[self->depth - 1];
        if (outer->sequence)
            return FAIL_AT(self, where, "%s: a list holds plain values only", self->key.data);
        if (!outer->value_next)
            return FAIL_AT(self, where, "a key must be plain text, not a mapping or list");
    }
    if (sequence) {
        qd_strbuf_clear(&self->value);
        self->items = 0;
    }
    self->levels[self->depth++] =
        (level){.sequence = sequence, .key_length = self->key.length, .line = where.line, .column = where.column};
    return QD_OK;
}

static qd_status close_level(reader *self)
{
    level closed = self->levels[--self->depth];
    if (closed.sequence)
        return deliver(self, QD_YAML_LIST, (place){closed.line, closed.column});
    value_done(self);
    return QD_OK;
}

static qd_status read_event(reader *self, const yaml_event_t *event)
{
    place where = mark_place(event->start_mark);
    switch (event->type) {
    case YAML_DOCUMENT_START_EVENT:
        if (self->documents++ > 0)
            return FAIL_AT(self, where, "a second document starts here; a configuration is one document");
        return QD_OK;
    case YAML_SCALAR_EVENT:
        return read_scalar(self, event, where);
    case YAML_MAPPING_START_EVENT:
        return open_level(self, false, event->data.mapping_start.anchor || event->data.mapping_start.tag, where);
    case YAML_SEQUENCE_START_EVENT:
        return open_level(self, true, event->data.sequence_start.anchor || event->data.sequence_start.tag, where);
    case YAML_MAPPING_END_EVENT:
    case YAML_SEQUENCE_END_EVENT:
        return close_level(self);
    case YAML_ALIAS_EVENT:
        return FAIL_AT(self, where, "aliases (*name) are not used in a configuration; write the value");
    case YAML_NO_EVENT:
    case YAML_STREAM_START_EVENT:
    case YAML_STREAM_END_EVENT:
    case YAML_DOCUMENT_END_EVENT:
        break;
    }
    return QD_OK;
}

/* Reports the parser's own message with its position. */
static qd_status parser_failed(const reader *self, const yaml_parser_t *parser, const char *text, size_t length)
{
    if (parser->error == YAML_MEMORY_ERROR)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", self->name);
    const char *problem = parser->problem ? parser->problem : "it cannot be read";
    if (parser->problem_mark.index < length && text[parser->problem_mark.index] == '\t')
        return FAIL_AT(self, mark_place(parser->problem_mark), "not valid YAML: indent lines with spaces, not tabs");
    return FAIL_AT(self, mark_place(parser->problem_mark), "not valid YAML: %s%s%s",
                   parser->context ? parser->context : "", parser->context ? ", " : "", problem);
}

qd_status qd_yaml_read(const char *name, const char *text, size_t length, qd_yaml_visit visit, void *context)
{
    reader self = {.name = name, .visit = visit, .context = context};
    yaml_parser_t parser;
    qd_status status = QD_OK;
    QD_TRY(check_text(&self, text, length));
    if (!yaml_parser_initialize(&parser))
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, length);
    for (bool ended = false; status == QD_OK && !ended;) {
        yaml_event_t event;
        if (!yaml_parser_parse(&parser, &event)) {
            status = parser_failed(&self, &parser, text, length);
            break;
        }
        ended = event.type == YAML_STREAM_END_EVENT;
        status = read_event(&self, &event);
        yaml_event_delete(&event);
    }
    yaml_parser_delete(&parser);
    qd_strbuf_free(&self.key);
    qd_strbuf_free(&self.value);
    return status;
}
