#include "base/yaml.h"
#include "base/strbuf.h"

#include <libfyaml.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One open mapping or sequence. */
typedef struct level {
    bool sequence;
    bool value_next;   /* mapping: a key was read */
    size_t key_length; /* of the path outside this level */
    int key_line, key_column, line, column;
} level;

typedef struct reader {
    const char *name;
    qd_yaml_visit visit;
    void *context;
    struct fy_parser *parser;
    struct fy_diag *diag;
    level levels[QD_YAML_MOST_DEPTH];
    int depth;
    int documents;
    qd_strbuf key;   /* dotted path of the value being read */
    qd_strbuf value; /* text of a scalar, or the joined items of a sequence */
    int items;
} reader;

typedef struct place {
    int line, column;
} place;

#define FAIL_AT(reader, where, ...)                                                                                    \
    qd_error_prefix(QD_FAIL(QD_USAGE, __VA_ARGS__), "%s:%d:%d: ", (reader)->name, (where).line, (where).column)

static place event_place(struct fy_event *event)
{
    const struct fy_mark *mark = fy_event_start_mark(event);
    if (!mark)
        return (place){1, 1};
    /* The mark of a quoted scalar stands behind its quote. */
    bool quoted = false;
    if (event->type == FYET_SCALAR && event->scalar.value) {
        enum fy_scalar_style style = fy_token_scalar_style(event->scalar.value);
        quoted = style == FYSS_SINGLE_QUOTED || style == FYSS_DOUBLE_QUOTED;
    }
    return (place){mark->line + 1, mark->column + (quoted && mark->column > 0 ? 0 : 1)};
}

/* Where byte `offset` is, for what is refused before it is parsed. */
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

/* Appends the text of a scalar token. */
static void append_token(qd_strbuf *buffer, struct fy_token *token)
{
    size_t length = 0;
    const char *text = token ? fy_token_get_text(token, &length) : NULL;
    if (text)
        qd_strbuf_append(buffer, text, length);
}

static bool is_null(struct fy_token *token, const char *text)
{
    if (token && fy_token_scalar_style(token) != FYSS_PLAIN)
        return false;
    return text[0] == '\0' || strcmp(text, "~") == 0 || strcmp(text, "null") == 0;
}

static void truncate_key(reader *self, size_t length)
{
    self->key.length = length;
    if (self->key.data)
        self->key.data[length] = '\0';
}

/* The value under the present key has ended. */
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

static qd_status deliver(reader *self, int kind, place where)
{
    if (self->key.failed || self->value.failed)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", self->name);
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

static qd_status read_key(reader *self, struct fy_event *event, place where)
{
    level *current = &self->levels[self->depth - 1];
    if (self->key.length > 0)
        qd_strbuf_puts(&self->key, ".");
    size_t start = self->key.length;
    append_token(&self->key, event->scalar.value);
    if (self->key.length == start)
        return FAIL_AT(self, where, "a key is empty; write 'key: value'");
    if (self->key.length > QD_YAML_MOST_KEY)
        return FAIL_AT(self, where, "a key has %zu bytes; it has at most %d", self->key.length, QD_YAML_MOST_KEY);
    current->value_next = true;
    current->key_line = where.line;
    current->key_column = where.column;
    return QD_OK;
}

static qd_status read_scalar(reader *self, struct fy_event *event, place where)
{
    if (event->scalar.anchor || event->scalar.tag)
        return FAIL_AT(self, where, "anchors (&name) and tags (!name) are not used in a configuration; write the value");
    if (self->depth == 0) {
        qd_strbuf_clear(&self->value);
        append_token(&self->value, event->scalar.value);
        if (is_null(event->scalar.value, self->value.data ? self->value.data : ""))
            return QD_OK; /* an empty file sets nothing */
        return FAIL_AT(self, where, "a configuration is a mapping; write 'key: value'");
    }
    level *current = &self->levels[self->depth - 1];
    if (current->sequence) {
        size_t start = self->value.length;
        if (self->items++ > 0) {
            qd_strbuf_puts(&self->value, ",");
            start++;
        }
        append_token(&self->value, event->scalar.value);
        if (!self->value.failed && (self->value.length <= start || strchr(self->value.data + start, ',')))
            return FAIL_AT(self, where, "%s: an item of a list must be one value without commas", self->key.data);
        return QD_OK;
    }
    if (!current->value_next)
        return read_key(self, event, where);
    qd_strbuf_clear(&self->value);
    append_token(&self->value, event->scalar.value);
    bool null = is_null(event->scalar.value, self->value.data ? self->value.data : "");
    if (null) /* nothing was written there: the key is the place */
        return deliver(self, QD_YAML_NULL, (place){current->key_line, current->key_column});
    return deliver(self, QD_YAML_SCALAR, where);
}

static qd_status open_level(reader *self, bool sequence, bool decorated, place where)
{
    if (decorated)
        return FAIL_AT(self, where, "anchors (&name) and tags (!name) are not used in a configuration; write the value");
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
    self->levels[self->depth++] = (level){
        .sequence = sequence, .key_length = self->key.length, .line = where.line, .column = where.column};
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

static qd_status read_event(reader *self, struct fy_event *event)
{
    place where = event_place(event);
    switch (event->type) {
    case FYET_DOCUMENT_START:
        if (self->documents++ > 0)
            return FAIL_AT(self, where, "a second document starts here; a configuration is one document");
        return QD_OK;
    case FYET_SCALAR:
        return read_scalar(self, event, where);
    case FYET_MAPPING_START:
        return open_level(self, false, event->mapping_start.anchor || event->mapping_start.tag, where);
    case FYET_SEQUENCE_START:
        return open_level(self, true, event->sequence_start.anchor || event->sequence_start.tag, where);
    case FYET_MAPPING_END:
    case FYET_SEQUENCE_END:
        return close_level(self);
    case FYET_ALIAS:
        return FAIL_AT(self, where, "aliases (*name) are not used in a configuration; write the value");
    case FYET_NONE:
    case FYET_STREAM_START:
    case FYET_STREAM_END:
    case FYET_DOCUMENT_END:
        break;
    }
    return QD_OK;
}

/* The parser stopped: its own first message, with its place. */
static qd_status parser_failed(reader *self)
{
    void *iterator = NULL;
    struct fy_diag_error *error = fy_diag_errors_iterate(self->diag, &iterator);
    if (!error || !error->msg)
        return QD_FAIL(QD_USAGE, "%s: is not valid YAML", self->name);
    return QD_FAIL(QD_USAGE, "%s:%d:%d: not valid YAML: %.*s", self->name, error->line > 0 ? error->line : 1,
                   error->column > 0 ? error->column : 1, (int)strcspn(error->msg, "\n"), error->msg);
}

qd_status qd_yaml_read(const char *name, const char *text, size_t length, qd_yaml_visit visit, void *context)
{
    reader self = {.name = name, .visit = visit, .context = context};
    qd_status status = QD_OK;
    QD_TRY(check_text(&self, text, length));

    struct fy_diag_cfg diag_config;
    fy_diag_cfg_default(&diag_config);
    diag_config.fp = NULL;
    diag_config.colorize = false;
    self.diag = fy_diag_create(&diag_config);
    if (!self.diag) {
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
        goto done;
    }
    fy_diag_set_collect_errors(self.diag, true);
    struct fy_parse_cfg config = {.flags = FYPCF_QUIET | FYPCF_COLLECT_DIAG | FYPCF_DISABLE_MMAP_OPT, .diag = self.diag};
    self.parser = fy_parser_create(&config);
    if (!self.parser || fy_parser_set_string(self.parser, text, length) != 0) {
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
        goto done;
    }
    bool ended = false;
    struct fy_event *event;
    while ((event = fy_parser_parse(self.parser)) != NULL) {
        ended = event->type == FYET_STREAM_END;
        status = read_event(&self, event);
        fy_parser_event_free(self.parser, event);
        if (status != QD_OK || ended)
            break;
    }
    if (status == QD_OK && (!ended || fy_parser_get_stream_error(self.parser)))
        status = parser_failed(&self);
done:
    if (self.parser)
        fy_parser_destroy(self.parser);
    if (self.diag)
        fy_diag_destroy(self.diag);
    qd_strbuf_free(&self.key);
    qd_strbuf_free(&self.value);
    return status;
}
