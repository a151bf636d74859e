/* Reads JSON. Syntax errors are reported as "file:line:column: ", errors of content with the file
 * and the path inside it. A node belongs to its document. */
#ifndef QD_BASE_TEXT_JSON_H
#define QD_BASE_TEXT_JSON_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct qd_json qd_json;           /* a document */
typedef struct qd_json_node qd_json_node; /* a value inside it */

/* Repeated keys, NUL bytes and more than 256 MiB are refused. */
qd_status qd_json_load(const char *path, qd_json **document);
qd_status qd_json_load_text(const char *name, const char *text, size_t length, qd_json **document);
/* Text collected by other programs: strings may contain NUL, and an unpaired surrogate is read as
 * U+FFFD. */
qd_status qd_json_load_collected(const char *name, const char *text, size_t length, qd_json **document);
void qd_json_destroy(qd_json *document); /* NULL is legal */

const qd_json_node *qd_json_root(const qd_json *document);
const char *qd_json_name(const qd_json *document); /* file name, for messages */

typedef enum qd_json_kind {
    QD_JSON_NULL,
    QD_JSON_BOOL,
    QD_JSON_INT,
    QD_JSON_REAL,
    QD_JSON_STRING,
    QD_JSON_LIST,
    QD_JSON_OBJECT
} qd_json_kind;
qd_json_kind qd_json_kind_of(const qd_json_node *node);

/* NULL when `node` is not an object or has no such member. */
const qd_json_node *qd_json_member(const qd_json_node *node, const char *key);
/* Items of a list or members of an object; 0 for anything else. */
size_t qd_json_count(const qd_json_node *node);
/* Item of a list; NULL outside it. */
const qd_json_node *qd_json_item(const qd_json_node *node, size_t index);

/* Members of an object in file order:
 *   for (qd_json_iterator it = qd_json_begin(node); qd_json_next(&it, &key, &value);) … */
typedef struct qd_json_iterator {
    const qd_json_node *object;
    void *at;
} qd_json_iterator;
qd_json_iterator qd_json_begin(const qd_json_node *object);
bool qd_json_next(qd_json_iterator *iterator, const char **key, const qd_json_node **value);

/* Plain values. False when the node is NULL or of another kind; an integer is also a double. */
bool qd_json_as_int(const qd_json_node *node, int64_t *value);
bool qd_json_as_double(const qd_json_node *node, double *value);
bool qd_json_as_bool(const qd_json_node *node, bool *value);
const char *qd_json_as_string(const qd_json_node *node); /* NULL when it is not a string */
/* With its length: the string may contain NUL if the document was loaded as collected. */
const char *qd_json_as_bytes(const qd_json_node *node, size_t *length);

/* Required members: QD_USAGE "file: 'key' is missing" or "file: 'key' must be an integer". */
qd_status qd_json_get_int(const qd_json *document, const qd_json_node *object, const char *key, int64_t *value);
qd_status qd_json_get_double(const qd_json *document, const qd_json_node *object, const char *key, double *value);
qd_status qd_json_get_bool(const qd_json *document, const qd_json_node *object, const char *key, bool *value);
qd_status qd_json_get_string(const qd_json *document, const qd_json_node *object, const char *key, const char **value);
/* With its length: the string may contain NUL if the document was loaded as collected. */
qd_status qd_json_get_bytes(const qd_json *document, const qd_json_node *object, const char *key, const char **value, size_t *length);
/* kind: QD_JSON_LIST or QD_JSON_OBJECT. */
qd_status qd_json_get_node(const qd_json *document, const qd_json_node *object, const char *key, qd_json_kind kind,
                           const qd_json_node **value);

#endif
