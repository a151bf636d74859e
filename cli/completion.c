/* quadrille completion: the completion scripts of shells, and the words that they offer. The
 * scripts ask the program for every word, so that completion always knows its commands, options,
 * keys and values. */
#include "cli.h"

#include <quadrille/config.h>
#include <quadrille/sim.h>
#include <stdlib.h>
#include <string.h>

/* Both print one candidate per line, with a description after a tab. The line ":files" asks the
 * shell for file names. */

static const char bash_script[] =
    "# Completion of quadrille for bash, written by quadrille completion bash.\n"
    "_quadrille() {\n"
    "    local line=${COMP_LINE:0:COMP_POINT} current candidate files= prefix= reply=()\n"
    "    local -a words\n"
    "    read -ra words <<<\"$line\"\n"
    "    [[ $line == *[[:space:]] ]] && words+=(\"\")\n"
    "    current=${words[${#words[@]} - 1]}\n"
    "    COMPREPLY=()\n"
    "    # bash has split the word at '=' if that is in COMP_WORDBREAKS, and replaces the last part only.\n"
    "    [[ $current == *=* && $COMP_WORDBREAKS == *=* ]] && prefix=${current%\"${current##*=}\"}\n"
    "    while IFS= read -r candidate; do\n"
    "        candidate=${candidate%%$'\\t'*}\n"
    "        if [[ $candidate == :files ]]; then files=yes; else reply+=(\"${candidate#\"$prefix\"}\"); fi\n"
    "        [[ $candidate == *[=.] ]] && compopt -o nospace 2>/dev/null\n"
    "    done < <(\"$1\" completion words -- \"${words[@]:1}\" 2>/dev/null)\n"
    "    if [[ $files ]]; then\n"
    "        # Quotes names and marks folders; it would quote the '=' of a key too.\n"
    "        ((${#reply[@]})) || compopt -o filenames 2>/dev/null\n"
    "        while IFS= read -r candidate; do reply+=(\"$candidate\"); done < <(compgen -f -- \"${current##*=}\")\n"
    "    fi\n"
    "    COMPREPLY=(\"${reply[@]}\")\n"
    "}\n"
    "complete -F _quadrille quadrille\n";

static const char zsh_script[] =
    "#compdef quadrille\n"
    "# Completion of quadrille for zsh, written by quadrille completion zsh.\n"
    "_quadrille() {\n"
    "    local line files=\n"
    "    local -a open closed\n"
    "    for line in \"${(@f)$(\"${words[1]}\" completion words -- \"${(@)words[2,CURRENT]}\" 2>/dev/null)}\"; do\n"
    "        if [[ $line == :files ]]; then\n"
    "            files=yes\n"
    "        elif [[ ${line%%$'\\t'*} == *[=.] ]]; then\n"
    "            open+=(\"${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}\")\n"
    "        elif [[ -n $line ]]; then\n"
    "            closed+=(\"${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}\")\n"
    "        fi\n"
    "    done\n"
    "    (( $#open )) && _describe -t keys key open -S ''\n"
    "    (( $#closed )) && _describe -t words word closed\n"
    "    if [[ -n $files ]]; then\n"
    "        compset -P '*='\n"
    "        _files\n"
    "    fi\n"
    "}\n"
    "if [[ $funcstack[1] == _quadrille ]]; then _quadrille \"$@\"; else compdef _quadrille quadrille; fi\n";

/* Prints `prefix` and `word` if they begin with what has been typed. */
static void offer(const char *typed, const char *prefix, const char *word, int length, const char *end, const char *help)
{
    char whole[320];
    snprintf(whole, sizeof whole, "%s%.*s%s", prefix, length, word, end);
    if (strncmp(whole, typed, strlen(typed)) == 0)
        printf("%s\t%s\n", whole, help);
}

static void offer_names(const char *typed, const char *prefix, const char *const *names, const char *help)
{
    for (; *names; names++)
        offer(typed, prefix, *names, (int)strlen(*names), "", help);
}

/* The words of "a|b|c". */
static void offer_choices(const char *typed, const char *prefix, const char *choices, const char *help)
{
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        offer(typed, prefix, at, (int)strcspn(at, "|"), "", help);
}

static qd_status offer_presets(const char *typed, const char *prefix)
{
    const char *const *names;
    QD_TRY(qd_config_presets(false, &names));
    offer_names(typed, prefix, names, "model");
    return QD_OK;
}

/* Values of an option; `typed` includes `prefix`, which is "--key=", "key=" or "". */
static qd_status offer_values(const qd_option *option, const char *typed, const char *prefix)
{
    if (strcmp(option->key, "model.preset") == 0)
        return offer_presets(typed, prefix);
    if (strcmp(option->key, "cluster") == 0)
        offer_names(typed, prefix, qd_cluster_names(), "cluster");
    if (option->type == QD_OPTION_ENUM)
        offer_choices(typed, prefix, option->choices, option->key);
    else if (option->type == QD_OPTION_BOOL)
        offer_choices(typed, prefix, "true|false", option->key);
    else if (option->type == QD_OPTION_STRING)
        puts(":files");
    return QD_OK;
}

/* The tables of a command: its own options, the configuration, the keys of a cluster. */
static int tables_of(const cli_command *c, qd_option_table tables[3])
{
    int count = 0;
    tables[count++] = (qd_option_table){c->options, c->option_count};
    if (c->configuration)
        tables[count++] = qd_config_table();
    if (c->more)
        tables[count++] = c->more();
    return count;
}

/* The option of that key or short form; NULL: none. */
static const qd_option *find(const cli_command *c, const char *name, size_t length)
{
    qd_option_table tables[3];
    int count = tables_of(c, tables);
    for (int t = 0; t < count; t++)
        for (int i = 0; i < tables[t].count; i++) {
            const qd_option *o = &tables[t].options[i];
            if ((strlen(o->key) == length && strncmp(o->key, name, length) == 0) ||
                (o->flag && strlen(o->flag) == length && strncmp(o->flag, name, length) == 0))
                return o;
        }
    return NULL;
}

/* "--json", "--lr" and, once their section has been typed, "--train.clip". */
static void offer_flags(const cli_command *c, const char *typed)
{
    qd_option_table tables[3];
    int count = tables_of(c, tables);
    for (int t = 0; t < count; t++)
        for (int i = 0; i < tables[t].count; i++) {
            const qd_option *o = &tables[t].options[i];
            bool key = strchr(o->key, '.') != NULL;
            if (o->flag && o->flag[1])
                offer(typed, "--", o->flag, (int)strlen(o->flag), "", o->help);
            if (!key || strchr(typed, '.'))
                offer(typed, "--", o->key, (int)strlen(o->key), "", o->help);
        }
    offer_choices(typed, "--", "help", "explains the command");
}

/* "train." and, once that has been typed, "train.lr=". */
static void offer_keys(const cli_command *c, const char *typed, const char *end)
{
    qd_option_table tables[3];
    int count = tables_of(c, tables), length = 0;
    const char *section = "";
    for (int t = 0; t < count; t++)
        for (int i = 0; i < tables[t].count; i++) {
            const qd_option *o = &tables[t].options[i];
            if (!strchr(o->key, '.'))
                continue;
            if (strchr(typed, '.')) {
                offer(typed, "", o->key, (int)strlen(o->key), end, o->help);
            } else if (strncmp(section, o->key, (size_t)length + 1) != 0) {
                section = o->key;
                length = (int)strcspn(o->key, ".");
                offer(typed, "", o->key, length, ".", "section of the configuration");
            }
        }
}

/* What `help` explains. */
static void offer_topics(const char *typed)
{
    static const cli_command everything = {.configuration = true, .more = qd_cluster_table};
    for (int i = 0; cli_commands()[i]; i++)
        offer_choices(typed, "", cli_commands()[i]->name, cli_commands()[i]->summary);
    offer_choices(typed, "", "models|clusters", "list of names");
    offer_keys(&everything, typed, "");
}

/* The arguments that are not options: a fixed set ("a|b" at the beginning of the usage), presets,
 * topics, keys and files. */
static qd_status offer_words(const cli_command *c, const char *typed, bool first)
{
    size_t length = strcspn(c->arguments, " ");
    char set[160];
    bool fixed = c->arguments[0] != '[' && memchr(c->arguments, '|', length) && length < sizeof set;
    if (c == &cli_help) {
        offer_topics(typed);
        return QD_OK;
    }
    if (first && fixed) {
        snprintf(set, sizeof set, "%.*s", (int)length, c->arguments);
        offer_choices(typed, "", set, c->name);
        return QD_OK;
    }
    if (first && c == &cli_init)
        QD_TRY(offer_presets(typed, ""));
    if (c->configuration)
        offer_keys(c, typed, "=");
    if (c->arguments[0] != '\0' && c != &cli_init && c != &cli_doctor)
        puts(":files");
    return QD_OK;
}

/* Candidates for the last of the words after the name of the program. */
static qd_status offer_for(const char *const *words, int count)
{
    const char *typed = words[count - 1], *before = count > 2 ? words[count - 2] : "", *equals = strchr(typed, '=');
    if (count == 1) {
        for (int i = 0; cli_commands()[i]; i++)
            offer_choices(typed, "", cli_commands()[i]->name, cli_commands()[i]->summary);
        return QD_OK;
    }
    const cli_command *c = cli_find(words[0]);
    if (!c)
        return QD_OK;
    int dashes = (int)strspn(before, "-");
    const qd_option *waiting = dashes > 0 && !strchr(before, '=') ? find(c, before + dashes, strlen(before + dashes)) : NULL;
    if (waiting && waiting->type != QD_OPTION_BOOL)
        return offer_values(waiting, typed, "");
    if (equals) {
        char prefix[256];
        int skip = strncmp(typed, "--", 2) == 0 ? 2 : 0;
        const qd_option *option = find(c, typed + skip, (size_t)(equals - typed - skip));
        snprintf(prefix, sizeof prefix, "%.*s", (int)(equals - typed + 1), typed);
        return option ? offer_values(option, typed, prefix) : QD_OK;
    }
    if (typed[0] == '-') {
        offer_flags(c, typed);
        return QD_OK;
    }
    return offer_words(c, typed, count == 2);
}

static qd_status run(cli_call *call)
{
    const char *what = call->word_count > 0 ? call->words[0] : "";
    bool words = strcmp(what, "words") == 0;
    if (words && call->word_count > 1)
        return offer_for(call->words + 1, call->word_count - 1);
    if (strcmp(what, "bash") != 0 && strcmp(what, "zsh") != 0)
        return QD_FAIL(QD_USAGE, words ? "completion: words needs the words that were typed, after --"
                                       : "completion: give a shell, bash or zsh");
    if (call->word_count > 1)
        return QD_FAIL(QD_USAGE, "completion: '%s' is one argument too many", call->words[1]);
    fputs(what[0] == 'b' ? bash_script : zsh_script, stdout);
    return QD_OK;
}

const cli_command cli_completion = {
    .name = "completion",
    .arguments = "bash|zsh",
    .summary = "Prints a script that completes commands, options, keys and values in a shell",
    .details = "  source <(quadrille completion bash)\n"
               "  source <(quadrille completion zsh)\n\n"
               "make install installs both scripts. They call quadrille completion words -- WORD …, which prints the words that can "
               "take the place of the last WORD.",
    .own_words = true,
    .run = run,
};
