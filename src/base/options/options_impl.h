/* Shared by options.c (the object), options_value.c (parsing and printing values), options_names.c
 * and options_synonyms.c (messages for unknown names) and options_print.c (help). */
#ifndef QD_BASE_OPTIONS_OPTIONS_IMPL_H
#define QD_BASE_OPTIONS_OPTIONS_IMPL_H

#include "base/text/strbuf.h"
#include "base/text/text.h"

#include <quadrille/options.h>

typedef enum value_source { SOURCE_DEFAULT, SOURCE_FILE, SOURCE_COMMAND } value_source;

typedef struct option_value {
    bool present; /* staging areas start empty */
    int64_t integer;
    double real;
    bool truth;
    int choice;
    char *text; /* string, enum */
    int64_t *items; /* list of integers */
    double *reals;  /* list of numbers */
    int item_count; /* of either */
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

/* How many bytes of what a user wrote a message shows. */
enum { QD_OPTION_SHOWN = 60 };

/* The options of an object, as joined from its tables. */
typedef struct qd_option_names {
    const qd_option *const *table;
    int count;
} qd_option_names;

bool qd_option_in_configuration(const qd_option *option);
/* Whether keys start with "name."; *example is the first of them. */
bool qd_option_is_section(qd_option_names names, const char *name, const char **example);

/* How the user wrote a name: "a: 1" in a file, "a=1" or "--a 1". */
typedef enum qd_name_form { QD_NAME_IN_FILE, QD_NAME_ASSIGNED, QD_NAME_FLAG } qd_name_form;
/* QD_USAGE with a message for a name that is not in the table, with a suggestion if there is one.
 * value: what the user assigned to it; may be NULL. */
qd_status qd_option_unknown(qd_option_names names, const char *written, const char *value, qd_name_form form);

/* Names that other trainers use. */
typedef struct qd_synonym {
    const char *names;  /* separated by blanks */
    const char *key;    /* what they are called here; NULL: see note */
    const char *values; /* "theirs=ours|theirs=ours": values that differ; NULL: none */
    const char *note;   /* without a key: how to say it here */
} qd_synonym;
const qd_synonym *qd_synonym_table(int *count);
/* Match number `which` of a name, from 0, in order of preference; NULL: there are no more. */
const qd_synonym *qd_synonym_find(const char *written, int which);
/* Converts a value that differs; false: it is the same here. */
bool qd_synonym_value(const qd_synonym *synonym, const char *value, char *out, size_t size);
/* Another trainer's word for a value of a key, for "did you mean"; false: none is known. */
bool qd_synonym_choice(const char *key, const char *value, char *out, size_t size);

#endif
