/* Reads JSON with jansson. jansson does not distinguish a failed allocation from bad input, and may
 * even continue without the bytes it could not allocate. So its allocations are counted here, and a
 * document during which one failed is QD_NO_MEMORY, whatever jansson returned. */
#include "base/text/json.h"
#include "base/text/strbuf.h"

#include <ctype.h>
#include <jansson.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 256 * 1024 * 1024 };

struct qd_json {
    json_t *root;
    char *name;
};

static const char *const kind_words[] = {
    [QD_JSON_NULL] = "null",        [QD_JSON_BOOL] = "true or false", [QD_JSON_INT] = "an integer",
    [QD_JSON_REAL] = "a number",    [QD_JSON_STRING] = "a string",    [QD_JSON_LIST] = "a list",
    [QD_JSON_OBJECT] = "an object",
};

/* qd_json_node is jansson's json_t under another name, so that its header stays in this file. */
static const json_t *inner(const qd_json_node *node)
{
    return (const json_t *)node;
}

static const qd_json_node *outer(const json_t *value)
{
    return (const qd_json_node *)value;
}

static pthread_once_t counting = PTHREAD_ONCE_INIT;
static json_malloc_t inner_malloc; /* NULL: malloc(); otherwise the allocator that the host program has given jansson */
static _Thread_local unsigned failed_allocations;

static void *counted_malloc(size_t bytes)
{
    void *memory = inner_malloc ? inner_malloc(bytes) : malloc(bytes);
    failed_allocations += memory == NULL;
    return memory;
}

/* Keeps the free function: memory allocated earlier is freed as before. */
static void count_allocations(void)
{
    json_free_t inner_free;
    json_get_alloc_funcs(&inner_malloc, &inner_free);
    if (inner_malloc == malloc)
        inner_malloc = NULL;
    json_set_alloc_funcs(counted_malloc, inner_free);
}

static qd_status load(const char *name, const char *text, size_t length, size_t flags, qd_json **out)
{
    *out = NULL;
    json_error_t error;
    pthread_once(&counting, count_allocations);
    const unsigned before = failed_allocations;
    json_t *root = json_loadb(text, length, flags, &error);
    if (failed_allocations != before) {
        json_decref(root);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
    }
    if (!root)
        return QD_FAIL(QD_USAGE, "%s:%d:%d: not valid JSON: %s", name, error.line > 0 ? error.line : 1,
                       error.column > 0 ? error.column : 1, error.text);
    qd_json *document = calloc(1, sizeof *document);
    if (document)
        document->name = strdup(name);
    if (!document || !document->name) {
        free(document);
        json_decref(root);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
    }
    document->root = root;
    *out = document;
    return QD_OK;
}

qd_status qd_json_load_text(const char *name, const char *text, size_t length, qd_json **out)
{
    return load(name, text, length, JSON_REJECT_DUPLICATES, out);
}

/* The code unit of an escape \uXXXX at `text`; -1 if there is none. */
static int escaped_code(const char *text, size_t length)
{
    int code = 0;
    if (length < 6 || text[0] != '\\' || text[1] != 'u')
        return -1;
    for (int i = 2; i < 6; i++) {
        const char *digits = "0123456789abcdef", *digit = text[i] ? strchr(digits, tolower((unsigned char)text[i])) : NULL;
        if (!digit)
            return -1;
        code = code * 16 + (int)(digit - digits);
    }
    return code;
}

/* Replaces unpaired surrogate escapes by U+FFFD, in place. */
static void replace_half_pairs(char *text, size_t length)
{
    for (size_t at = 0; at < length;) {
        const int code = escaped_code(text + at, length - at);
        const bool first = code >= 0xd800 && code < 0xdc00, second = code >= 0xdc00 && code < 0xe000;
        const int next = first ? escaped_code(text + at + 6, length - at - 6) : -1;
        if (first && next >= 0xdc00 && next < 0xe000) {
            at += 12;
            continue;
        }
        if (first || second)
            memcpy(text + at + 2, "fffd", 4);
        at += code >= 0 ? 6 : text[at] == '\\' ? 2 : 1;
    }
}

/* Whether the text may contain surrogate escapes. */
static bool has_pairs(const char *text, size_t length)
{
    const char *end = text + length;
    for (const char *at = text; (at = memchr(at, '\\', (size_t)(end - at))); at++)
        if (end - at > 2 && at[1] == 'u' && (at[2] == 'd' || at[2] == 'D'))
            return true;
    return false;
}

qd_status qd_json_load_collected(const char *name, const char *text, size_t length, qd_json **document)
{
    const size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL;
    if (!has_pairs(text, length))
        return load(name, text, length, flags, document);
    char *copy = malloc(length);
    *document = NULL;
    if (!copy)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
    memcpy(copy, text, length);
    replace_half_pairs(copy, length);
    qd_status status = load(name, copy, length, flags, document);
    free(copy);
    return status;
}

qd_status qd_json_load(const char *path, qd_json **document)
{
    char *text = NULL;
    size_t length = 0;
    *document = NULL;
    QD_TRY(qd_file_read(path, MOST_BYTES, &text, &length));
    qd_status status = qd_json_load_text(path, text, length, document);
    free(text);
    return status;
}

void qd_json_destroy(qd_json *document)
{
    if (!document)
        return;
    json_decref(document->root);
    free(document->name);
    free(document);
}

const qd_json_node *qd_json_root(const qd_json *document)
{
    return outer(document->root);
}

const char *qd_json_name(const qd_json *document)
{
    return document->name;
}

qd_json_kind qd_json_kind_of(const qd_json_node *node)
{
    switch (json_typeof(inner(node))) {
    case JSON_OBJECT:
        return QD_JSON_OBJECT;
    case JSON_ARRAY:
        return QD_JSON_LIST;
    case JSON_STRING:
        return QD_JSON_STRING;
    case JSON_INTEGER:
        return QD_JSON_INT;
    case JSON_REAL:
        return QD_JSON_REAL;
    case JSON_TRUE:
    case JSON_FALSE:
        return QD_JSON_BOOL;
    case JSON_NULL:
        break;
    }
    return QD_JSON_NULL;
}

const qd_json_node *qd_json_member(const qd_json_node *node, const char *key)
{
    return outer(json_object_get(inner(node), key));
}

size_t qd_json_count(const qd_json_node *node)
{
    return json_is_array(inner(node)) ? json_array_size(inner(node)) : json_object_size(inner(node));
}

const qd_json_node *qd_json_item(const qd_json_node *node, size_t index)
{
    return outer(json_array_get(inner(node), index));
}

qd_json_iterator qd_json_begin(const qd_json_node *object)
{
    return (qd_json_iterator){object, json_object_iter((json_t *)inner(object))};
}

bool qd_json_next(qd_json_iterator *iterator, const char **key, const qd_json_node **value)
{
    if (!iterator->at)
        return false;
    *key = json_object_iter_key(iterator->at);
    *value = outer(json_object_iter_value(iterator->at));
    iterator->at = json_object_iter_next((json_t *)inner(iterator->object), iterator->at);
    return true;
}

bool qd_json_as_int(const qd_json_node *node, int64_t *value)
{
    if (!json_is_integer(inner(node)))
        return false;
    *value = json_integer_value(inner(node));
    return true;
}

bool qd_json_as_double(const qd_json_node *node, double *value)
{
    if (!json_is_number(inner(node)))
        return false;
    *value = json_number_value(inner(node));
    return true;
}

bool qd_json_as_bool(const qd_json_node *node, bool *value)
{
    if (!json_is_boolean(inner(node)))
        return false;
    *value = json_is_true(inner(node));
    return true;
}

const char *qd_json_as_string(const qd_json_node *node)
{
    return json_string_value(inner(node));
}

const char *qd_json_as_bytes(const qd_json_node *node, size_t *length)
{
    *length = json_string_length(inner(node));
    return json_string_value(inner(node));
}

/* The message for a member that is missing or of the wrong type. */
static qd_status wrong_member(const qd_json *document, const qd_json_node *object, const char *key, qd_json_kind kind)
{
    if (!qd_json_member(object, key))
        return QD_FAIL(QD_USAGE, "%s: '%s' is missing; it must be %s", document->name, key, kind_words[kind]);
    return QD_FAIL(QD_USAGE, "%s: '%s' must be %s", document->name, key, kind_words[kind]);
}

qd_status qd_json_get_int(const qd_json *document, const qd_json_node *object, const char *key, int64_t *value)
{
    return qd_json_as_int(qd_json_member(object, key), value) ? QD_OK
                                                              : wrong_member(document, object, key, QD_JSON_INT);
}

qd_status qd_json_get_double(const qd_json *document, const qd_json_node *object, const char *key, double *value)
{
    return qd_json_as_double(qd_json_member(object, key), value) ? QD_OK
                                                                 : wrong_member(document, object, key, QD_JSON_REAL);
}

qd_status qd_json_get_bool(const qd_json *document, const qd_json_node *object, const char *key, bool *value)
{
    return qd_json_as_bool(qd_json_member(object, key), value) ? QD_OK
                                                               : wrong_member(document, object, key, QD_JSON_BOOL);
}

qd_status qd_json_get_string(const qd_json *document, const qd_json_node *object, const char *key, const char **value)
{
    *value = qd_json_as_string(qd_json_member(object, key));
    return *value ? QD_OK : wrong_member(document, object, key, QD_JSON_STRING);
}

qd_status qd_json_get_bytes(const qd_json *document, const qd_json_node *object, const char *key, const char **value, size_t *length)
{
    *value = qd_json_as_bytes(qd_json_member(object, key), length);
    return *value ? QD_OK : wrong_member(document, object, key, QD_JSON_STRING);
}

qd_status qd_json_get_node(const qd_json *document, const qd_json_node *object, const char *key, qd_json_kind kind,
                           const qd_json_node **value)
{
    const qd_json_node *member = qd_json_member(object, key);
    if (!member || qd_json_kind_of(member) != kind)
        return wrong_member(document, object, key, kind);
    *value = member;
    return QD_OK;
}
