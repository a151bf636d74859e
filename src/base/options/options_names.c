/* Messages for names that are not in an option table: the key of ours for a name of another trainer
 * (options_synonyms.c), else the key that is spelt similarly, else the list of sections. */
#define _GNU_SOURCE
#include "base/options/options_impl.h"

#include <stdio.h>
#include <string.h>

bool qd_option_in_configuration(const qd_option *option)
{
    return strchr(option->key, '.') != NULL;
}

bool qd_option_is_section(qd_option_names names, const char *name, const char **example)
{
    size_t length = strlen(name);
    for (int i = 0; i < names.count; i++) {
        const char *key = names.table[i]->key;
        if (strncmp(key, name, length) == 0 && key[length] == '.') {
            *example = key;
            return true;
        }
    }
    return false;
}

/* Edit distance between the name as written and a known key. The last part of the key alone is
 * compared too, at a distance one larger, because users forget the section (train.tp for
 * parallel.tp). */
static int key_distance(const char *written, const char *known)
{
    int best = qd_edit_distance(written, strlen(written), known, strlen(known));
    const char *written_dot = strrchr(written, '.'), *known_dot = strrchr(known, '.');
    const char *written_part = written_dot ? written_dot + 1 : written;
    const char *known_part = known_dot ? known_dot + 1 : known;
    int part = 1 + qd_edit_distance(written_part, strlen(written_part), known_part, strlen(known_part));
    /* Parts of two or three letters are close to everything: they count only when equal. */
    if ((part == 1 || strlen(known_part) > 3) && part < best)
        best = part;
    return best;
}

/* The key or, for a name written with dashes, the short form that is spelt most similarly; NULL:
 * none is close. */
static const char *nearest_name(qd_option_names names, const char *written, bool flags)
{
    const char *nearest = NULL;
    int nearest_distance = qd_edit_limit(written) + 1;
    for (int i = 0; i < names.count; i++) {
        const qd_option *option = names.table[i];
        int distance = flags || qd_option_in_configuration(option) ? key_distance(written, option->key) : nearest_distance;
        if (distance < nearest_distance) {
            nearest_distance = distance;
            nearest = option->key;
        }
        if (flags && option->flag) {
            distance = qd_edit_distance(written, strlen(written), option->flag, strlen(option->flag));
            /* "--rank" is rather the short form "--ranks" than a key that ends in ".rank" */
            if (distance < nearest_distance || (distance == nearest_distance && nearest && strchr(nearest, '.'))) {
                nearest_distance = distance;
                nearest = option->flag;
            }
        }
    }
    return nearest;
}

static const qd_option *find(qd_option_names names, const char *key)
{
    for (int i = 0; i < names.count; i++)
        if (strcmp(names.table[i]->key, key) == 0)
            return names.table[i];
    return NULL;
}

static bool acceptable(const qd_option *option, const char *value)
{
    option_value parsed = {0};
    bool good = qd_option_value_parse(option, value, &parsed) == QD_OK;
    qd_option_value_free(&parsed);
    return good;
}

/* "train.lr=3e-4", "--lr 3e-4" or, in a file, "train.lr: 3e-4"; without the value if the option
 * would refuse it. */
static void print_setting(const qd_option *option, const char *value, qd_name_form form, qd_strbuf *out)
{
    static const char *const separators[] = {[QD_NAME_IN_FILE] = ": ", [QD_NAME_ASSIGNED] = "=", [QD_NAME_FLAG] = " "};
    bool flag = form == QD_NAME_FLAG || !qd_option_in_configuration(option);
    qd_strbuf_printf(out, "%s%s", flag ? "--" : "", flag && option->flag && option->flag[1] ? option->flag : option->key);
    bool alone = flag && option->type == QD_OPTION_BOOL && value && strcmp(value, "true") == 0;
    if (value && !alone && strlen(value) <= QD_OPTION_SHOWN && acceptable(option, value))
        qd_strbuf_printf(out, "%s%s", flag ? " " : separators[form], value);
}

/* A note with the value in place of {word}. */
static void print_note(const char *note, const char *value, qd_strbuf *out)
{
    for (; *note; note++) {
        size_t length = *note == '{' ? strcspn(note, "}") : 0;
        if (length > 0 && value)
            qd_strbuf_puts(out, value);
        else if (length > 0)
            qd_strbuf_append(out, note + 1, length - 1);
        else
            qd_strbuf_append(out, note, 1);
        note += length;
    }
}

/* Finds what another trainer's name is called here. False: it is not known, or the table has no
 * such key. */
static bool print_synonym(qd_option_names names, const char *written, const char *value, qd_name_form form, qd_strbuf *out)
{
    const qd_synonym *synonym;
    char converted[64];
    for (int which = 0; (synonym = qd_synonym_find(written, which)) != NULL; which++) {
        const qd_option *option = synonym->key ? find(names, synonym->key) : NULL;
        if (option) {
            bool known = value && qd_synonym_value(synonym, value, converted, sizeof converted);
            qd_strbuf_puts(out, "did you mean '");
            print_setting(option, known ? converted : value, form, out);
            qd_strbuf_puts(out, "'?");
            return true;
        }
        const char *section;
        if (!synonym->key && qd_option_is_section(names, "train", &section)) { /* notes are about the configuration */
            print_note(synonym->note, value && *value && strlen(value) <= QD_OPTION_SHOWN ? value : NULL, out);
            return true;
        }
    }
    return false;
}

static void print_sections(qd_option_names names, qd_strbuf *out)
{
    for (int i = 0; i < names.count; i++) {
        const char *key = names.table[i]->key;
        int length = (int)strcspn(key, "."), first = 0;
        while (first < i && (strncmp(names.table[first]->key, key, (size_t)length + 1) != 0))
            first++;
        if (first == i && key[length] == '.')
            qd_strbuf_printf(out, "%s%.*s", out->length > 0 ? ", " : "", length, key);
    }
}

qd_status qd_option_unknown(qd_option_names names, const char *written, const char *value, qd_name_form form)
{
    bool flags = form == QD_NAME_FLAG;
    const char *what = flags ? "option '--" : "key '", *example;
    qd_strbuf text = {0};
    if (strlen(written) > 64)
        return QD_FAIL(QD_USAGE, "unknown %s%.40s…'", what, written);
    if (!flags && qd_option_is_section(names, written, &example))
        return QD_FAIL(QD_USAGE, "'%s' is a section, not a key; set its keys, for example '%s'", written, example);
    bool known = print_synonym(names, written, value, form, &text);
    const char *nearest = known ? NULL : nearest_name(names, written, flags);
    if (!known && !nearest && !flags)
        print_sections(names, &text);
    qd_status status;
    if (text.failed)
        status = QD_FAIL(QD_NO_MEMORY, "unknown %s%s', and no memory for a suggestion", what, written);
    else if (known)
        status = QD_FAIL(QD_USAGE, "unknown %s%s'; %s", what, written, text.data);
    else if (nearest)
        status = QD_FAIL(QD_USAGE, "unknown %s%s'; did you mean '%s%s'?", what, written, flags ? "--" : "", nearest);
    else if (flags)
        status = QD_FAIL(QD_USAGE, "unknown option '--%s': --help lists the options", written);
    else if (text.length > 0)
        status = QD_FAIL(QD_USAGE, "unknown key '%s'; the sections are %s", written, text.data);
    else
        status = QD_FAIL(QD_USAGE, "unknown key '%s'", written);
    qd_strbuf_free(&text);
    return status;
}
