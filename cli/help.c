/* quadrille help and version: lists of commands, models and clusters, and the reference of the
 * configuration. */
#include "cli.h"

#include <quadrille/config.h>
#include <quadrille/sim.h>
#include <quadrille/version.h>
#include <stdlib.h>
#include <string.h>

static void print_usage(void)
{
    cli_say("", 0, "Quadrille trains language models with data, tensor, context, pipeline and expert parallelism.");
    putchar('\n');
    for (int i = 0; cli_commands()[i]; i++) {
        const cli_command *c = cli_commands()[i];
        char word[32];
        snprintf(word, sizeof word, "  quadrille %s", c->name);
        cli_say(word, 21, "%s", c->summary);
    }
    puts("\nquadrille help COMMAND explains one of them; quadrille help models and\nquadrille help clusters list the values of --model and "
         "--cluster.");
}

static qd_status print_options(const qd_option_table *table, const char *title)
{
    char *text;
    int columns = cli_columns(stdout);
    QD_TRY(qd_options_help(table, 1, NULL, columns, &text));
    printf("\n%s\n", title);
    cli_put(stdout, text);
    free(text);
    return QD_OK;
}

qd_status cli_print_help(const cli_command *c)
{
    printf("quadrille %s ", c->name);
    cli_put(stdout, c->arguments);
    puts("\n");
    cli_say("", 0, "%s.", c->summary);
    if (c->details)
        printf("\n%s\n", c->details);
    if (c->option_count > 0)
        QD_TRY(print_options(&(qd_option_table){c->options, c->option_count}, "Options of this command"));
    if (c->configuration) {
        qd_option_table table = qd_config_table();
        QD_TRY(print_options(&table, "Configuration: keys of the file CONFIG, or key=value, or the short form --flag value"));
    }
    if (c->more) {
        qd_option_table table = c->more();
        QD_TRY(print_options(&table, "Cluster: keys of its file, or key=value"));
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

static qd_status run(cli_call *call)
{
    if (qd_options_bool(call->options, "markdown")) {
        char *text;
        qd_option_table table = qd_config_table();
        QD_TRY(cli_no_words(call));
        QD_TRY(qd_options_to_markdown(&table, 1, &text));
        fputs(text, stdout);
        free(text);
        return QD_OK;
    }
    if (call->word_count == 0) {
        print_usage();
        return QD_OK;
    }
    if (call->word_count > 1)
        return QD_FAIL(QD_USAGE, "help: '%s' is one argument too many", call->words[1]);
    if (strcmp(call->words[0], "models") == 0)
        return print_models();
    if (strcmp(call->words[0], "clusters") == 0)
        return print_clusters();
    const cli_command *command = cli_find(call->words[0]);
    if (!command)
        return cli_unknown_command(call->words[0]);
    return cli_print_help(command);
}

static const qd_option own[] = {
    {"markdown", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints the reference of all configuration keys as Markdown", NULL},
};

const cli_command cli_help = {
    .name = "help",
    .arguments = "[COMMAND | models | clusters]",
    .summary = "Lists the commands, or explains one",
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
