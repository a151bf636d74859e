/* Shared by options.c (the object), options_value.c (parsing and printing values) and
 * options_print.c (help). */
#ifndef QD_BASE_OPTIONS_OPTIONS_IMPL_H
#define QD_BASE_OPTIONS_OPTIONS_IMPL_H

#include "base/text/strbuf.h"

#include <quadrille/options.h>

typedef enum value_source { SOURCE_DEFAULT, SOURCE_FILE, SOURCE_COMMAND } value_source;

typedef struct option_value {
    bool present; /* staging areas start empty */
    int64_t integer;
    double real;
    bool truth;
    int choice;
    char *text; /* string, enum */
    int64_t *items;
    int item_count;
    value_source source;
    bool left_out; /* omitted from saved configurations */
    char *origin; /* "file:line:column"; NULL for the other sources */
} option_value;

/* Checks `text` against the descriptor. Messages start with the key. On failure *value is
 * untouched. */
qd_status qd_option_value_parse(const qd_option *option, const char *text, option_value *value);
void qd_option_value_free(option_value *value);
qd_status qd_option_value_copy(const option_value *from, option_value *to);

/* Appends a value as YAML text. */
void qd_option_value_print(const qd_option *option, const option_value *value, qd_strbuf *out);

/* Item `index` of "a|b|c"; false when there are fewer. */
bool qd_option_choice(const char *choices, int index, const char **start, int *length);
/* "1 to 8", "at least 1", "at most 8"; "" without limits. */
void qd_option_range(const qd_option *option, char *text, size_t size);

/* Edit distance: insertions, deletions, substitutions and transpositions of neighbours. */
int qd_edit_distance(const char *a, size_t a_length, const char *b, size_t b_length);

#endif
