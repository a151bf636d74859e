/* The option object: values of an option table from defaults, YAML files and the command line, each
 * with its origin. */
#define _GNU_SOURCE
#include "base/options/options_impl.h"
#include "base/text/yaml.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct qd_options {
    int count;
    const qd_option **table; /* joined from the caller's tables */
    option_value *values;
};

static int find_key(const qd_options *options, const char *key)
{
    for (int i = 0; i < options->count; i++)
        if (strcmp(options->table[i]->key, key) == 0)
            return i;
    return -1;
}

static int find_flag(const qd_options *options, const char *flag)
{
    for (int i = 0; i < options->count; i++)
        if (options->table[i]->flag && strcmp(options->table[i]->flag, flag) == 0)
            return i;
    return find_key(options, flag);
}

static qd_option_names names_of(const qd_options *options)
{
    return (qd_option_names){options->table, options->count};
}

static qd_status allocate(int count, qd_options **out)
{
    qd_options *options = calloc(1, sizeof *options);
    if (options) {
        options->table = calloc((size_t)count + 1, sizeof *options->table);
        options->values = calloc((size_t)count + 1, sizeof *options->values);
    }
    if (!options || !options->table || !options->values) {
        qd_options_destroy(options);
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d options", count);
    }
    *out = options;
    return QD_OK;
}

static qd_status add_option(qd_options *options, const qd_option *option)
{
    if (!option->key || !option->help)
        return QD_FAIL(QD_USAGE, "option table: entry %d has no key or no help", options->count);
    if (find_key(options, option->key) >= 0 || (option->flag && find_flag(options, option->flag) >= 0))
        return QD_FAIL(QD_USAGE, "option table: '%s' or its short form appears twice", option->key);
    if (option->type == QD_OPTION_ENUM && !option->choices)
        return QD_FAIL(QD_USAGE, "option table: '%s' has no choices", option->key);
    options->table[options->count] = option;
    qd_status status =
        qd_option_value_parse(option, option->fallback ? option->fallback : "", &options->values[options->count]);
    if (status != QD_OK)
        return qd_error_prefix(status, "option table: default of ");
    options->count++;
    return QD_OK;
}

qd_status qd_options_create(const qd_option_table *tables, int count, qd_options **out)
{
    *out = NULL;
    int total = 0;
    for (int t = 0; t < count; t++)
        total += tables[t].count;
    qd_options *options = NULL;
    QD_TRY(allocate(total, &options));
    for (int t = 0; t < count; t++) {
        for (int i = 0; i < tables[t].count; i++) {
            qd_status status = add_option(options, &tables[t].options[i]);
            if (status != QD_OK) {
                qd_options_destroy(options);
                return status;
            }
        }
    }
    *out = options;
    return QD_OK;
}

qd_status qd_options_copy(const qd_options *from, qd_options **out)
{
    *out = NULL;
    qd_options *options = NULL;
    QD_TRY(allocate(from->count, &options));
    for (int i = 0; i < from->count; i++) {
        options->table[i] = from->table[i];
        qd_status status = qd_option_value_copy(&from->values[i], &options->values[i]);
        if (status != QD_OK) {
            qd_options_destroy(options);
            return status;
        }
        options->count++;
    }
    *out = options;
    return QD_OK;
}

void qd_options_destroy(qd_options *options)
{
    if (!options)
        return;
    for (int i = 0; i < options->count; i++)
        qd_option_value_free(&options->values[i]);
    free(options->values);
    free(options->table);
    free(options);
}

typedef struct load_state {
    const qd_options *options;
    option_value *staged;
    const char *name;
} load_state;

static qd_status stage_leaf(load_state *state, const qd_yaml_leaf *leaf)
{
    int index = find_key(state->options, leaf->key);
    if (index < 0)
        return qd_option_unknown(names_of(state->options), leaf->key, leaf->kind == QD_YAML_SCALAR ? leaf->text : NULL, QD_NAME_IN_FILE);
    const qd_option *option = state->options->table[index];
    if (!qd_option_in_configuration(option))
        return QD_FAIL(QD_USAGE, "'%s' is an option of the command, not of the configuration; write --%s", option->key,
                       option->key);
    option_value *value = &state->staged[index];
    if (value->present)
        return QD_FAIL(QD_USAGE, "%s: is set twice; keep one", option->key);
    return QD_OK;
}

static qd_status stage_value(load_state *state, const qd_yaml_leaf *leaf)
{
    int index = find_key(state->options, leaf->key);
    const qd_option *option = state->options->table[index];
    option_value *value = &state->staged[index];
    if (leaf->kind == QD_YAML_NULL)
        return QD_FAIL(QD_USAGE, "%s: has no value; write one or remove the line", option->key);
    if (leaf->kind == QD_YAML_LIST && option->type != QD_OPTION_INT_LIST && option->type != QD_OPTION_FLOAT_LIST)
        return QD_FAIL(QD_USAGE, "%s: is a list; it must be one value", option->key);
    QD_TRY(qd_option_value_parse(option, leaf->text, value));
    value->source = SOURCE_FILE;
    if (asprintf(&value->origin, "%s:%d:%d", state->name, leaf->line, leaf->column) < 0) {
        value->origin = NULL;
        return QD_FAIL(QD_NO_MEMORY, "no memory for the options");
    }
    return QD_OK;
}

static qd_status visit_leaf(void *context, const qd_yaml_leaf *leaf)
{
    load_state *state = context;
    const char *example;
    if (leaf->kind == QD_YAML_NULL && qd_option_is_section(names_of(state->options), leaf->key, &example))
        return QD_OK; /* a section whose keys are all commented out */
    qd_status status = stage_leaf(state, leaf);
    if (status != QD_OK)
        return qd_error_prefix(status, "%s:%d:%d: ", state->name, leaf->key_line, leaf->key_column);
    status = stage_value(state, leaf);
    if (status != QD_OK)
        return qd_error_prefix(status, "%s:%d:%d: ", state->name, leaf->line, leaf->column);
    return QD_OK;
}

qd_status qd_options_load_text(qd_options *options, const char *name, const char *text, size_t length)
{
    load_state state = {.options = options, .name = name};
    state.staged = calloc((size_t)options->count + 1, sizeof *state.staged);
    if (!state.staged)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory to read it", name);
    qd_status status = qd_yaml_read(name, text, length, visit_leaf, &state);
    for (int i = 0; i < options->count; i++) {
        option_value *staged = &state.staged[i];
        if (status == QD_OK && staged->present && options->values[i].source <= SOURCE_FILE) {
            qd_option_value_free(&options->values[i]);
            options->values[i] = *staged;
            *staged = (option_value){0};
        }
        qd_option_value_free(staged);
    }
    free(state.staged);
    if (status != QD_OK)
        qd_error_frame(__FILE__, __LINE__, __func__);
    return status;
}

qd_status qd_options_load(qd_options *options, const char *path)
{
    char *text = NULL;
    size_t length = 0;
    QD_TRY(qd_file_read(path, QD_YAML_MOST_BYTES, &text, &length));
    qd_status status = qd_options_load_text(options, path, text, length);
    free(text);
    return status;
}

static qd_status set_index(qd_options *options, int index, const char *text)
{
    QD_TRY(qd_option_value_parse(options->table[index], text, &options->values[index]));
    options->values[index].source = SOURCE_COMMAND;
    return QD_OK;
}

qd_status qd_options_set(qd_options *options, const char *key, const char *value)
{
    int index = find_flag(options, key);
    if (index < 0)
        return qd_option_unknown(names_of(options), key, value, QD_NAME_ASSIGNED);
    return set_index(options, index, value);
}

/* Splits "key=value" at the first '='; the key goes to `key`. */
static qd_status split(const char *word, char *key, size_t size, const char **value)
{
    const char *equals = strchr(word, '=');
    if (!equals || equals == word)
        return QD_FAIL(QD_USAGE, "'%.60s' is not an assignment; write key=value", word);
    size_t length = (size_t)(equals - word);
    if (length >= size)
        return QD_FAIL(QD_USAGE, "unknown key '%.40s…'", word);
    memcpy(key, word, length);
    key[length] = '\0';
    *value = equals + 1;
    return QD_OK;
}

qd_status qd_options_assign(qd_options *options, const char *assignment)
{
    char key[QD_YAML_MOST_KEY];
    const char *value;
    QD_TRY(split(assignment, key, sizeof key, &value));
    int index = find_flag(options, key);
    if (index >= 0 && !qd_option_in_configuration(options->table[index]))
        return QD_FAIL(QD_USAGE, "'%s' is an option of the command; write --%s", key, key);
    return qd_options_set(options, key, value);
}

/* Words such as parallel.tp=2, but not ./a=b.yaml. */
static bool is_assignment(const char *word)
{
    size_t length = strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-");
    return length > 0 && word[length] == '=' && word[0] != '.' && word[0] != '-';
}

static bool is_truth_word(const char *word)
{
    static const char *const words[] = {"true", "false", "yes", "no", "on", "off"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(word, words[i]) == 0)
            return true;
    return false;
}

/* Words such as --overwrite or --steps=5. After an option that lacks its value they are rarely
 * meant as that value. */
static bool is_known_option(const qd_options *options, const char *word)
{
    char name[QD_YAML_MOST_KEY];
    if (strncmp(word, "--", 2) != 0)
        return false;
    int length = snprintf(name, sizeof name, "%.*s", (int)strcspn(word + 2, "="), word + 2);
    return length < (int)sizeof name && find_flag(options, name) >= 0;
}

/* What an unknown option was probably given, for the message. */
static const char *guessed_value(int argc, char *const *argv, int at)
{
    return at + 1 < argc && strncmp(argv[at + 1], "--", 2) != 0 && !is_assignment(argv[at + 1]) ? argv[at + 1] : NULL;
}

/* Parses one word after its dashes; advances *at when the next word is its value. */
static qd_status parse_flag(qd_options *options, int argc, char *const *argv, int *at, int dashes)
{
    char name[QD_YAML_MOST_KEY];
    const char *word = argv[*at] + dashes, *value = NULL;
    if (strchr(word, '='))
        QD_TRY(split(word, name, sizeof name, &value));
    else
        snprintf(name, sizeof name, "%s", word);
    int index = find_flag(options, name);
    if (index < 0)
        return qd_option_unknown(names_of(options), name, value ? value : guessed_value(argc, argv, *at), QD_NAME_FLAG);
    if (!value) {
        bool more = *at + 1 < argc;
        if (options->table[index]->type == QD_OPTION_BOOL)
            value = more && is_truth_word(argv[*at + 1]) ? argv[++*at] : "true";
        else if (more && is_known_option(options, argv[*at + 1]))
            return QD_FAIL(QD_USAGE, "option '--%s' needs a value; if '%.60s' is it, write '--%s=%.60s'", name, argv[*at + 1], name,
                           argv[*at + 1]);
        else if (more)
            value = argv[++*at];
        else
            return QD_FAIL(QD_USAGE, "option '--%s' needs a value", name);
    }
    return set_index(options, index, value);
}

qd_status qd_options_parse(qd_options *options, int argc, char *const *argv, const char **words, int *word_count)
{
    *word_count = 0;
    bool only_words = false;
    for (int at = 0; at < argc; at++) {
        const char *word = argv[at];
        if (only_words || (word[0] != '-' && !is_assignment(word)) || strcmp(word, "-") == 0)
            words[(*word_count)++] = word;
        else if (strcmp(word, "--") == 0)
            only_words = true;
        else if (strncmp(word, "--", 2) == 0)
            QD_TRY(parse_flag(options, argc, argv, &at, 2));
        else if (word[0] == '-' && strlen(word) == 2 && find_flag(options, word + 1) >= 0)
            QD_TRY(parse_flag(options, argc, argv, &at, 1));
        else if (word[0] == '-')
            return QD_FAIL(QD_USAGE, "unknown option '%.60s'; options start with two dashes", word);
        else
            QD_TRY(qd_options_assign(options, word));
    }
    return QD_OK;
}

qd_status qd_options_resolve(qd_options *options, const char *key, const char *value)
{
    int index = find_key(options, key);
    assert(index >= 0);
    option_value *old = &options->values[index], parsed = {0};
    QD_TRY(qd_option_value_parse(options->table[index], value, &parsed));
    parsed.source = old->source;
    parsed.origin = old->origin;
    old->origin = NULL;
    qd_option_value_free(old);
    *old = parsed;
    return QD_OK;
}

qd_status qd_options_forget(qd_options *options, const char *key)
{
    int index = find_key(options, key);
    assert(index >= 0);
    option_value *value = &options->values[index], fallback = {0};
    if (value->source != SOURCE_FILE)
        return QD_OK;
    QD_TRY(qd_option_value_parse(options->table[index], options->table[index]->fallback ? options->table[index]->fallback : "", &fallback));
    qd_option_value_free(value);
    *value = fallback;
    return QD_OK;
}

static const option_value *get(const qd_options *options, const char *key, unsigned types)
{
    int index = find_key(options, key);
    assert(index >= 0 && "the key is not in the option table");
    assert((types >> options->table[index]->type & 1u) && "the option has another type");
    (void)types;
    return &options->values[index];
}

int64_t qd_options_int(const qd_options *options, const char *key)
{
    return get(options, key, 1u << QD_OPTION_INT)->integer;
}

double qd_options_float(const qd_options *options, const char *key)
{
    return get(options, key, 1u << QD_OPTION_FLOAT)->real;
}

bool qd_options_bool(const qd_options *options, const char *key)
{
    return get(options, key, 1u << QD_OPTION_BOOL)->truth;
}

const char *qd_options_string(const qd_options *options, const char *key)
{
    return get(options, key, 1u << QD_OPTION_STRING | 1u << QD_OPTION_ENUM)->text;
}

int qd_options_enum(const qd_options *options, const char *key)
{
    return get(options, key, 1u << QD_OPTION_ENUM)->choice;
}

int qd_options_int_list(const qd_options *options, const char *key, const int64_t **values)
{
    const option_value *value = get(options, key, 1u << QD_OPTION_INT_LIST);
    *values = value->items;
    return value->item_count;
}

int qd_options_float_list(const qd_options *options, const char *key, const double **values)
{
    const option_value *value = get(options, key, 1u << QD_OPTION_FLOAT_LIST);
    *values = value->reals;
    return value->item_count;
}

bool qd_options_is_set(const qd_options *options, const char *key)
{
    return get(options, key, ~0u)->source != SOURCE_DEFAULT;
}

const char *qd_options_origin(const qd_options *options, const char *key)
{
    const option_value *value = get(options, key, ~0u);
    return value->origin ? value->origin : value->source == SOURCE_COMMAND ? "command line" : "default";
}

const qd_option *qd_options_find(const qd_options *options, const char *key)
{
    int index = find_key(options, key);
    return index >= 0 ? options->table[index] : NULL;
}

/* Writes the keys that start with prefix[0 .. length), a whole part of the path, one level
 * deeper. */
static void print_level(const qd_options *options, const char *prefix, size_t length, int depth, qd_strbuf *out)
{
    for (int i = 0; i < options->count; i++) {
        const qd_option *option = options->table[i];
        if (!qd_option_in_configuration(option) || strncmp(option->key, prefix, length) != 0)
            continue;
        size_t part = strcspn(option->key + length, ".");
        bool leaf = option->key[length + part] == '\0';
        if (leaf && options->values[i].left_out)
            continue;
        if (!leaf) { /* a section: written at its first key */
            int first = 0;
            while (strncmp(options->table[first]->key, option->key, length + part + 1) != 0)
                first++;
            if (first < i)
                continue;
        }
        qd_strbuf_pad(out, ' ', 2 * depth);
        qd_strbuf_printf(out, "%.*s:", (int)part, option->key + length);
        if (leaf) {
            qd_strbuf_puts(out, " ");
            qd_option_value_print(option, &options->values[i], out);
        }
        qd_strbuf_puts(out, "\n");
        if (!leaf)
            print_level(options, option->key, length + part + 1, depth + 1, out);
    }
}

qd_status qd_options_to_yaml(const qd_options *options, char **text)
{
    qd_strbuf out = {0};
    print_level(options, "", 0, 0, &out);
    return qd_strbuf_take(&out, text);
}

qd_status qd_options_value_text(const qd_options *options, const char *key, char **text)
{
    qd_strbuf out = {0};
    int index = find_key(options, key);
    assert(index >= 0 && "the key is not in the option table");
    qd_option_value_print(options->table[index], &options->values[index], &out);
    return qd_strbuf_take(&out, text);
}

void qd_options_leave_out(qd_options *options, const char *key)
{
    int index = find_key(options, key);
    assert(index >= 0 && "the key is not in the option table");
    options->values[index].left_out = true;
}

qd_status qd_options_save(const qd_options *options, const char *path)
{
    char *text = NULL;
    QD_TRY(qd_options_to_yaml(options, &text));
    qd_status status = qd_file_replace(path, text, strlen(text));
    free(text);
    return status;
}
