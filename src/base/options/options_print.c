/* Prints help for the terminal and the reference pages from the option table alone. */
#include "base/options/options_impl.h"

#include "base/text/text.h"

#include <stdio.h>
#include <string.h>

enum { DEFAULT_WIDTH = 100, LEAST_WIDTH = 50, HELP_COLUMN = 36 };

static const char *const type_words[] = {
    [QD_OPTION_INT] = "integer", [QD_OPTION_FLOAT] = "number",  [QD_OPTION_BOOL] = "true or false",
    [QD_OPTION_STRING] = "text", [QD_OPTION_ENUM] = "one of: ", [QD_OPTION_INT_LIST] = "list of integers",
    [QD_OPTION_FLOAT_LIST] = "list of numbers",
};

static const char *const placeholders[] = {
    [QD_OPTION_INT] = "N",       [QD_OPTION_FLOAT] = "X",   [QD_OPTION_BOOL] = "",
    [QD_OPTION_STRING] = "TEXT", [QD_OPTION_ENUM] = "WORD", [QD_OPTION_INT_LIST] = "N,N,…",
    [QD_OPTION_FLOAT_LIST] = "X,X,…",
};

typedef struct option_list {
    const qd_option_table *tables;
    int count;
} option_list;

static const qd_option *option_at(option_list list, int index)
{
    for (int t = 0; t < list.count; t++) {
        if (index < list.tables[t].count)
            return &list.tables[t].options[index];
        index -= list.tables[t].count;
    }
    return NULL;
}

/* Length of the section's name: "parallel" of "parallel.tp", 0 of "json". */
static int section_length(const qd_option *option)
{
    return strchr(option->key, '.') ? (int)strcspn(option->key, ".") : 0;
}

static bool same_section(const qd_option *a, const qd_option *b)
{
    int length = section_length(a);
    return length == section_length(b) && strncmp(a->key, b->key, (size_t)length) == 0;
}

static bool first_of_section(option_list list, int index)
{
    const qd_option *option = option_at(list, index);
    for (int i = 0; i < index; i++)
        if (same_section(option_at(list, i), option))
            return false;
    return true;
}

static void print_choices(const qd_option *option, qd_strbuf *out)
{
    const char *start;
    int length;
    for (int i = 0; qd_option_choice(option->choices, i, &start, &length); i++)
        qd_strbuf_printf(out, "%s%.*s", i > 0 ? ", " : "", length, start);
}

/* "integer, 1 to 8" */
static void print_type(const qd_option *option, qd_strbuf *out)
{
    char range[96];
    qd_option_range(option, range, sizeof range);
    qd_strbuf_puts(out, type_words[option->type]);
    if (option->type == QD_OPTION_ENUM)
        print_choices(option, out);
    else if (range[0] != '\0')
        qd_strbuf_printf(out, ", %s", range);
}

/* "--lr X, train.lr" */
static void print_name(const qd_option *option, qd_strbuf *out)
{
    const char *placeholder = placeholders[option->type];
    const char *shown = option->flag ? option->flag : section_length(option) == 0 ? option->key : NULL;
    if (shown) /* one letter has one dash */
        qd_strbuf_printf(out, "%s%s%s%s", shown[1] ? "--" : "-", shown, *placeholder ? " " : "", placeholder);
    if (section_length(option) > 0)
        qd_strbuf_printf(out, "%s%s", shown ? ", " : "", option->key);
    else if (option->flag)
        qd_strbuf_printf(out, ", --%s", option->key);
}

/* "peak learning rate (number, 0 to 1000; default 1e-3)" */
static void print_meaning(const qd_option *option, qd_strbuf *out)
{
    qd_strbuf_printf(out, "%s (", option->help);
    if (option->type != QD_OPTION_STRING && option->type != QD_OPTION_BOOL) {
        print_type(option, out);
        qd_strbuf_puts(out, "; ");
    }
    qd_strbuf_printf(out, "default %s)", option->fallback && *option->fallback ? option->fallback : "none");
}

static void print_help_entry(const qd_option *option, int width, qd_strbuf *out)
{
    qd_strbuf name = {0}, text = {0};
    qd_strbuf_puts(&name, "  ");
    print_name(option, &name);
    print_meaning(option, &text);
    if (name.failed || text.failed) {
        out->failed = true;
    } else {
        int used = qd_text_columns(name.data);
        qd_strbuf_puts(out, name.data);
        if (used + 2 > HELP_COLUMN) {
            qd_strbuf_puts(out, "\n");
            used = 0;
        }
        qd_strbuf_pad(out, ' ', HELP_COLUMN - used);
        qd_text_wrap(text.data, HELP_COLUMN, width, out);
    }
    qd_strbuf_free(&name);
    qd_strbuf_free(&text);
}

static bool wanted(const qd_option *option, const char *section)
{
    int length = section_length(option);
    return !section || (strlen(section) == (size_t)length && strncmp(option->key, section, (size_t)length) == 0);
}

qd_status qd_options_help(const qd_option_table *tables, int count, const char *section, int width, char **text)
{
    option_list list = {tables, count};
    qd_strbuf out = {0};
    const qd_option *head, *option;
    width = width == 0 ? DEFAULT_WIDTH : width < LEAST_WIDTH ? LEAST_WIDTH : width;
    for (int i = 0; (head = option_at(list, i)) != NULL; i++) {
        if (!first_of_section(list, i) || !wanted(head, section))
            continue;
        int length = section_length(head);
        qd_strbuf_printf(&out, "%s%.*s:\n", out.length > 0 ? "\n" : "", length > 0 ? length : 7,
                         length > 0 ? head->key : "options");
        for (int j = i; (option = option_at(list, j)) != NULL; j++)
            if (same_section(option, head))
                print_help_entry(option, width, &out);
    }
    return qd_strbuf_take(&out, text);
}

static void print_line(const char *word, const char *text, int width, qd_strbuf *out)
{
    enum { COLUMN = 13 };
    qd_strbuf_printf(out, "  %-*s", COLUMN - 2, word);
    qd_text_wrap(text, COLUMN, width, out);
}

static void describe(const qd_option *option, int width, qd_strbuf *out)
{
    qd_strbuf text = {0};
    const char *value = option->fallback && *option->fallback ? option->fallback : "VALUE";
    const char *dashes = option->flag && !option->flag[1] ? "-" : "--";
    bool configuration = section_length(option) > 0, flag = option->type == QD_OPTION_BOOL;
    qd_strbuf_printf(out, "%s%s\n", configuration ? "" : "--", option->key);
    print_line("meaning", option->help, width, out);
    print_type(option, &text);
    print_line("type", text.failed ? "" : text.data, width, out);
    print_line("default", option->fallback && *option->fallback ? option->fallback : "none", width, out);
    qd_strbuf_free(&text);
    text = (qd_strbuf){0};
    if (configuration)
        qd_strbuf_printf(&text, "%s=%s", option->key, value);
    if (option->flag)
        qd_strbuf_printf(&text, "%s%s%s%s%s", configuration ? " or " : "", dashes, option->flag, flag ? "" : " ", flag ? "" : value);
    if (!configuration)
        qd_strbuf_printf(&text, "%s--%s%s%s", option->flag ? " or " : "", option->key, flag ? "" : " ", flag ? "" : value);
    print_line("write", text.failed ? "" : text.data, width, out);
    if (configuration)
        qd_strbuf_printf(out, "  in a file  %.*s: {%s: %s}\n", section_length(option), option->key,
                         option->key + section_length(option) + 1, value);
    out->failed = out->failed || text.failed;
    qd_strbuf_free(&text);
}

qd_status qd_options_describe(const qd_option_table *tables, int count, const char *key, int width, char **text)
{
    option_list list = {tables, count};
    const qd_option *option = NULL;
    qd_strbuf out = {0};
    int i = 0;
    *text = NULL;
    while ((option = option_at(list, i)) != NULL && strcmp(option->key, key) != 0 && (!option->flag || strcmp(option->flag, key) != 0))
        i++;
    if (!option)
        return QD_OK;
    describe(option, width == 0 ? DEFAULT_WIDTH : width < LEAST_WIDTH ? LEAST_WIDTH : width, &out);
    return qd_strbuf_take(&out, text);
}

static void print_man_entry(const qd_option *option, qd_strbuf *out)
{
    qd_strbuf name = {0}, text = {0};
    print_name(option, &name);
    print_meaning(option, &text);
    if (name.failed || text.failed) {
        out->failed = true;
    } else {
        qd_strbuf_puts(out, ".TP\n.B ");
        qd_text_roff(name.data, name.length, out);
        qd_strbuf_puts(out, "\n");
        qd_text_roff(text.data, text.length, out);
        qd_strbuf_puts(out, "\n");
    }
    qd_strbuf_free(&name);
    qd_strbuf_free(&text);
}

qd_status qd_options_to_man(const qd_option_table *tables, int count, char **text)
{
    option_list list = {tables, count};
    qd_strbuf out = {0};
    const qd_option *head, *option;
    for (int i = 0; (head = option_at(list, i)) != NULL; i++) {
        if (!first_of_section(list, i))
            continue;
        if (section_length(head) > 0)
            qd_strbuf_printf(&out, ".SS %.*s\n", section_length(head), head->key);
        for (int j = i; (option = option_at(list, j)) != NULL; j++)
            if (same_section(option, head))
                print_man_entry(option, &out);
    }
    return qd_strbuf_take(&out, text);
}

static void print_markdown_row(const qd_option *option, qd_strbuf *out)
{
    qd_strbuf_printf(out, "| `%s` | ", option->key);
    if (option->flag)
        qd_strbuf_printf(out, "`--%s`", option->flag);
    qd_strbuf_puts(out, " | ");
    print_type(option, out);
    if (option->fallback && *option->fallback)
        qd_strbuf_printf(out, " | `%s` | ", option->fallback);
    else
        qd_strbuf_puts(out, " | | ");
    /* A bar would end the cell. */
    for (const char *at = option->help; *at; at++)
        qd_strbuf_puts(out, *at == '|' ? "\\|" : (char[]){*at, '\0'});
    qd_strbuf_puts(out, " |\n");
}

qd_status qd_options_to_markdown(const qd_option_table *tables, int count, char **text)
{
    option_list list = {tables, count};
    qd_strbuf out = {0};
    const qd_option *head, *option;
    for (int i = 0; (head = option_at(list, i)) != NULL; i++) {
        if (!first_of_section(list, i))
            continue;
        if (section_length(head) > 0)
            qd_strbuf_printf(&out, "%s## `%.*s`\n\n", out.length > 0 ? "\n" : "", section_length(head), head->key);
        else
            qd_strbuf_printf(&out, "%s## Options of the command\n\n", out.length > 0 ? "\n" : "");
        qd_strbuf_puts(&out, "| key | short form | type | default | meaning |\n|---|---|---|---|---|\n");
        for (int j = i; (option = option_at(list, j)) != NULL; j++)
            if (same_section(option, head))
                print_markdown_row(option, &out);
    }
    return qd_strbuf_take(&out, text);
}
