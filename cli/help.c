/* quadrille help and version: lists of commands, models and clusters, and the reference of the
 * configuration. */
#include "cli.h"

#include <quadrille/config.h>
#include <quadrille/sim.h>
#include <quadrille/version.h>
#include <stdlib.h>
#include <string.h>

/* Width of help: that of the terminal, 100 columns in a file or a pipe. */
static int help_width(void)
{
    int columns = cli_columns(stdout);
    return columns > 0 ? columns : 100;
}

/* Prints text that starts in column `column`, wrapped, after `word`. */
static void print_wrapped(const char *word, int column, const char *text)
{
    qd_strbuf out = {0};
    qd_text_wrap(text, column, help_width(), &out);
    printf("%-*s", column, word);
    cli_put(stdout, out.failed ? "\n" : out.data);
    qd_strbuf_free(&out);
}

static void print_usage(void)
{
    print_wrapped("", 0, "Quadrille trains language models with data, tensor, context, pipeline and expert parallelism.");
    putchar('\n');
    for (int i = 0; cli_commands()[i]; i++) {
        char word[32];
        snprintf(word, sizeof word, "  quadrille %s", cli_commands()[i]->name);
        print_wrapped(word, 23, cli_commands()[i]->summary);
    }
    putchar('\n');
    print_wrapped("", 0,
                  "quadrille help COMMAND explains a command, help KEY a key of the configuration (help lr), help SECTION the keys of a "
                  "section (help parallel); help --all prints everything. help models and help clusters list the values of --model and "
                  "--cluster.");
}

/* A command line, broken as a shell would read it. */
static void print_example(const char *line, int length)
{
    int width = help_width(), used = 0;
    for (int at = (int)strspn(line, " "); at < length;) {
        int word = (int)strcspn(line + at, " ");
        word = word > length - at ? length - at : word;
        if (used > 0 && used + 1 + word + 2 > width) {
            puts(" \\");
            used = 0;
            printf("     ");
        }
        used += printf("%s%.*s", used > 0 ? " " : "  ", word, line + at);
        at += word + (int)strspn(line + at + word, " ");
    }
    putchar('\n');
}

/* Lines that begin with blanks are examples; the others are paragraphs, wrapped anew. */
static void print_details(const char *text)
{
    qd_strbuf paragraph = {0};
    for (const char *line = text; *line;) {
        int length = (int)strcspn(line, "\n");
        if (line[0] == ' ')
            print_example(line, length);
        else if (length > 0)
            qd_strbuf_printf(&paragraph, "%s%.*s", paragraph.length > 0 ? " " : "", length, line);
        line += length + (line[length] == '\n');
        if (paragraph.length > 0 && (*line == '\n' || *line == ' ' || *line == '\0')) {
            print_wrapped("", 0, paragraph.failed ? "" : paragraph.data);
            qd_strbuf_free(&paragraph);
            paragraph = (qd_strbuf){0};
        } else if (length == 0) {
            putchar('\n');
        }
    }
    qd_strbuf_free(&paragraph);
}

static qd_status print_options(qd_option_table table, const char *section, const char *title)
{
    char *text;
    QD_TRY(qd_options_help(&table, 1, section, help_width(), &text));
    if (title) {
        putchar('\n');
        print_wrapped("", 0, title);
    }
    cli_put(stdout, text);
    free(text);
    return QD_OK;
}

/* Keys that are set most often: those with a short form, and a few more. */
static bool is_common(const qd_option *option)
{
    return option->flag || qd_text_has_word("train.global_batch train.micro_batch train.precision train.warmup train.recompute "
                                            "data.validation model.layers model.hidden model.heads model.vocab",
                                            option->key);
}

static qd_status print_common_keys(void)
{
    qd_option_table all = qd_config_table(), some = {0};
    qd_option *list = calloc((size_t)all.count, sizeof *list);
    if (!list)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the help");
    for (int i = 0; i < all.count; i++)
        if (is_common(&all.options[i]))
            list[some.count++] = all.options[i];
    some.options = list;
    qd_status status = print_options(some, NULL, "Configuration, the keys that are set most often (as key=value, --flag value, or in the "
                                                 "file CONFIG):");
    free(list);
    return status;
}

qd_status cli_print_help(const cli_command *c, bool all)
{
    char usage[64];
    snprintf(usage, sizeof usage, "quadrille %s", c->name);
    int column = (int)strlen(usage) + 1;
    print_wrapped(usage, column, c->arguments);
    putchar('\n');
    qd_strbuf summary = {0};
    qd_strbuf_printf(&summary, "%s.", c->summary);
    print_wrapped("", 0, summary.failed ? c->summary : summary.data);
    qd_strbuf_free(&summary);
    if (c->details) {
        putchar('\n');
        print_details(c->details);
    }
    if (c->option_count > 0) {
        putchar('\n');
        QD_TRY(print_options((qd_option_table){c->options, c->option_count}, NULL, NULL));
    }
    if (c->configuration && all)
        QD_TRY(print_options(qd_config_table(), NULL, "Configuration: keys of the file CONFIG, or key=value, or the short form --flag "
                                                      "value"));
    else if (c->configuration)
        QD_TRY(print_common_keys());
    if (c->more && all)
        QD_TRY(print_options(c->more(), NULL, "Cluster: keys of its file, or key=value"));
    if (!all && (c->configuration || c->more)) {
        putchar('\n');
        print_wrapped("", 0, c->more ? "All keys: --help --all. One key: quadrille help KEY. One section: quadrille help SECTION (model., "
                                       "data., train., parallel., run.; of a cluster accelerator., node., network., software., cost.)."
                                     : "All keys: --help --all. One key: quadrille help KEY. One section: quadrille help SECTION (model., "
                                       "data., train., parallel., run.).");
    }
    return QD_OK;
}

/* Models that can be trained, then those that can only be planned and simulated. */
static qd_status print_models(void)
{
    const char *const *all, *const *trainable;
    QD_TRY(qd_config_presets(false, &all));
    QD_TRY(qd_config_presets(true, &trainable));
    cli_say("", 0, "Models for model.preset (--model), with their parameters:");
    putchar('\n');
    for (int i = 0; trainable[i]; i++) {
        char text[160], count[32], word[64];
        int64_t parameters;
        QD_TRY(qd_config_preset_text(trainable[i], &parameters, text, sizeof text));
        qd_text_count((double)parameters, count, sizeof count);
        snprintf(word, sizeof word, "  %-20s %6s", trainable[i], count);
        cli_say(word, 31, "%s", text);
    }
    putchar('\n');
    cli_say("", 0, "For plan and simulate only, approximated by the most similar model that can be trained:");
    putchar('\n');
    for (int i = 0; all[i]; i++) {
        bool known = false;
        for (int k = 0; trainable[k] && !known; k++)
            known = strcmp(all[i], trainable[k]) == 0;
        if (!known)
            printf("  %s\n", all[i]);
    }
    return QD_OK;
}

/* A figure that is not published is shown as a dash. */
static const char *figure(const qd_options *o, const char *key, char *text, size_t size)
{
    double value = qd_options_float(o, key);
    snprintf(text, size, value > 0.0 ? "%.4g" : "-", value);
    return text;
}

static qd_status print_cluster(const char *name)
{
    const qd_option_table table = qd_cluster_table();
    qd_options *o = NULL;
    char peak[32], memory[32], fast[32], network[32], node[48] = "-";
    QD_TRY(qd_options_create(&table, 1, &o));
    qd_status status = qd_cluster_load(o, name);
    if (status == QD_OK) {
        figure(o, "node.bandwidth_gbs", fast, sizeof fast);
        if (qd_options_int(o, "node.size") > 1)
            snprintf(node, sizeof node, "%lld x %s", (long long)qd_options_int(o, "node.size"), fast);
        printf("%-13s %-31s %7s %5s %9s %9s\n", name, qd_options_string(o, "accelerator.name"),
               figure(o, "accelerator.peak_tflops", peak, sizeof peak), figure(o, "accelerator.memory_gib", memory, sizeof memory), node,
               figure(o, "network.bandwidth_gbs", network, sizeof network));
    }
    qd_options_destroy(o);
    return status;
}

static qd_status print_clusters(void)
{
    cli_explain(
        "Clusters for plan and simulate (--cluster): bf16 TFLOP/s and GiB of an accelerator; accelerators per node and the GB/s of each "
        "within it; the GB/s of each in the network (TPUs: of one link of the torus). A file with the same keys describes any other "
        "cluster; quadrille bench machine writes one for this machine.");
    printf("\n%-13s %-31s %7s %5s %9s %9s\n", "cluster", "accelerator", "TFLOP/s", "GiB", "node", "network");
    for (const char *const *name = qd_cluster_names(); *name; name++)
        QD_TRY(print_cluster(*name));
    return QD_OK;
}

/* Every command, then every key. */
static qd_status print_everything(void)
{
    print_usage();
    for (int i = 0; cli_commands()[i]; i++) {
        cli_command alone = *cli_commands()[i];
        alone.configuration = false; /* printed once, below */
        alone.more = NULL;
        printf("\n\n");
        QD_TRY(cli_print_help(&alone, true));
    }
    putchar('\n');
    QD_TRY(print_options(qd_config_table(), NULL, "Configuration: keys of the file CONFIG, or key=value, or the short form --flag value"));
    return print_options(qd_cluster_table(), NULL, "Cluster: keys of its file, or key=value");
}

/* A key, or else the options of commands with that name. */
static qd_status print_key(const char *word, bool *found)
{
    word += strncmp(word, "--", 2) == 0 ? 2 : 0; /* after a -- that ends options */
    qd_option_table tables[2] = {qd_config_table(), qd_cluster_table()};
    char *text;
    QD_TRY(qd_options_describe(tables, 2, word, help_width(), &text));
    *found = text != NULL;
    if (text)
        cli_put(stdout, text);
    bool key = *found;
    free(text);
    for (int i = 0; !key && cli_commands()[i]; i++) {
        qd_option_table own = {cli_commands()[i]->options, cli_commands()[i]->option_count};
        QD_TRY(qd_options_describe(&own, 1, word, help_width(), &text));
        if (text) {
            printf("%squadrille %s ", *found ? "\n" : "", cli_commands()[i]->name);
            cli_put(stdout, text);
            *found = true;
        }
        free(text);
    }
    return QD_OK;
}

/* "parallel" or "parallel."; the latter also where a command has the name of a section. */
static qd_status print_section(const char *word, bool *found)
{
    qd_option_table tables[2] = {qd_config_table(), qd_cluster_table()};
    char name[32];
    size_t length = strlen(word);
    *found = false;
    if (length == 0 || length >= sizeof name)
        return QD_OK;
    memcpy(name, word, length + 1);
    if (name[length - 1] == '.')
        name[--length] = '\0';
    for (int t = 0; t < 2 && !*found; t++)
        for (int i = 0; i < tables[t].count && !*found; i++)
            if (strncmp(tables[t].options[i].key, name, length) == 0 && tables[t].options[i].key[length] == '.') {
                *found = true;
                QD_TRY(print_options(tables[t], name, NULL));
            }
    return QD_OK;
}

static qd_status explain(const char *word, bool all)
{
    bool found = false;
    const cli_command *command = cli_find(word);
    if (strcmp(word, "models") == 0)
        return print_models();
    if (strcmp(word, "clusters") == 0)
        return print_clusters();
    if (command)
        return cli_print_help(command, all);
    QD_TRY(print_section(word, &found));
    if (!found)
        QD_TRY(print_key(word, &found));
    if (found)
        return QD_OK;
    const char *meant = cli_similar_command(word);
    if (meant)
        return QD_FAIL(QD_USAGE, "there is no command '%.60s'; did you mean 'quadrille %s'?", word, meant);
    qd_option_table tables[2] = {qd_config_table(), qd_cluster_table()};
    qd_options *options = NULL;
    QD_TRY(qd_options_create(tables, 2, &options));
    qd_status status = qd_options_set(options, word, ""); /* fails with the key that was probably meant */
    qd_options_destroy(options);
    return status;
}

static qd_status run(cli_call *call)
{
    bool all = qd_options_bool(call->options, "all");
    if (qd_options_bool(call->options, "markdown")) {
        char *text;
        qd_option_table table = qd_config_table();
        QD_TRY(cli_no_words(call));
        QD_TRY(qd_options_to_markdown(&table, 1, &text));
        fputs(text, stdout);
        free(text);
        return QD_OK;
    }
    if (call->word_count > 1)
        return QD_FAIL(QD_USAGE, "help: '%s' is one argument too many", call->words[1]);
    if (qd_options_bool(call->options, "man"))
        return cli_print_manual(call->word_count == 1 ? call->words[0] : "");
    if (call->word_count == 1)
        return explain(call->words[0], all);
    if (all)
        return print_everything();
    print_usage();
    return QD_OK;
}

static const qd_option own[] = {
    {"all", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints every option and key; with a command, those that it accepts", NULL},
    {"markdown", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints the reference of all configuration keys as Markdown", NULL},
    {"man", QD_OPTION_BOOL, "false", 0, 0, NULL,
     "prints the manual page of the command, of all keys (help --man config) or of the program, in roff", NULL},
};

const cli_command cli_help = {
    .name = "help",
    .arguments = "[COMMAND | SECTION | KEY | models | clusters] [--all]",
    .summary = "Lists the commands, or explains a command or a key",
    .details = "  quadrille help train\n"
               "  quadrille help train.lr\n"
               "  quadrille help parallel\n\n"
               "A section can be written with a dot: help train. prints the keys of the section, help train explains the command.",
    CLI_OPTIONS(own),
    .run = run,
};

static qd_status run_version(cli_call *call)
{
    QD_TRY(cli_no_words(call));
    printf("quadrille %s\n", qd_version());
    return QD_OK;
}

const cli_command cli_version = {
    .name = "version",
    .arguments = "",
    .summary = "Prints the version",
    .run = run_version,
};
