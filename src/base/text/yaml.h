/* Reads a YAML mapping of mappings as a list of dotted keys with values. Refuses what configuration
 * files do not need and what could exhaust memory: anchors, aliases, tags, several documents, deep
 * nesting. */
#ifndef QD_BASE_TEXT_YAML_H
#define QD_BASE_TEXT_YAML_H

#include <quadrille/status.h>
#include <stddef.h>

enum { QD_YAML_MOST_BYTES = 1024 * 1024, QD_YAML_MOST_DEPTH = 16, QD_YAML_MOST_KEY = 256 };

typedef struct qd_yaml_leaf {
    const char *key;  /* "parallel.tp" */
    const char *text; /* a scalar, or the items of a list joined by ','; valid during the call only */
    enum { QD_YAML_SCALAR, QD_YAML_NULL, QD_YAML_LIST } kind;
    int key_line, key_column, line, column; /* 1-based */
} qd_yaml_leaf;

typedef qd_status (*qd_yaml_visit)(void *context, const qd_yaml_leaf *leaf);

/* Calls visit for each leaf in file order and stops at the first error. Messages of this function
 * start with "name:line:column: "; those of visit are left unchanged. QD_USAGE for anything that is
 * wrong with the text. */
qd_status qd_yaml_read(const char *name, const char *text, size_t length, qd_yaml_visit visit, void *context);

#endif
