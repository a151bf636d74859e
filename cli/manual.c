/* Manual pages in roff, from the tables of commands and options: quadrille(1), one page per command
 * in section 1, and quadrille-config(5) with the keys of a configuration. */
#include "cli.h"

#include <quadrille/config.h>
#include <quadrille/sim.h>
#include <quadrille/version.h>
#include <stdlib.h>
#include <string.h>

static void put_roff(const char *text, int length)
{
    qd_strbuf out = {0};
    qd_text_roff(text, (size_t)length, &out);
    fputs(out.failed || !out.data ? "" : out.data, stdout);
    qd_strbuf_free(&out);
}

static void put_text(const char *text)
{
    put_roff(text, (int)strlen(text));
}

static void print_title(const char *name, int section, const char *summary)
{
    printf(".TH \"%s\" \"%d\" \"\" \"quadrille %s\"\n.SH NAME\n%s \\- ", name, section, qd_version(), name);
    put_text(summary);
    printf("\n");
}

/* Examples begin with blanks; the rest are paragraphs, which roff fills. */
static void print_details(const char *text)
{
    bool example = false;
    for (const char *line = text; *line;) {
        int length = (int)strcspn(line, "\n"), blanks = (int)strspn(line, " ");
        if (length > 0 && (blanks > 0) != example) {
            puts(example ? ".EE\n.PP" : ".EX");
            example = !example;
        }
        if (length == 0 && !example)
            puts(".PP");
        else if (length > 0) {
            put_roff(line + blanks, length - blanks);
            putchar('\n');
        }
        line += length + (line[length] == '\n');
    }
    if (example)
        puts(".EE");
}

static qd_status print_options(qd_option_table table)
{
    char *text;
    QD_TRY(qd_options_to_man(&table, 1, &text));
    fputs(text, stdout);
    free(text);
    return QD_OK;
}

static void print_see_also(const cli_command *except)
{
    printf(".SH SEE ALSO\n");
    if (except)
        printf(".BR quadrille (1),\n");
    for (int i = 0; cli_commands()[i]; i++)
        if (cli_commands()[i] != except)
            printf(".BR quadrille\\-%s (1),\n", cli_commands()[i]->name);
    printf(".BR quadrille\\-config (5)\n");
}

static void print_overview(void)
{
    print_title("quadrille", 1, "trains language models with 4D parallelism");
    printf(".SH SYNOPSIS\n.B quadrille\n.I COMMAND\n[argument ...]\n.SH DESCRIPTION\n");
    printf("Trains language models with data, tensor, context, pipeline and expert parallelism, and plans and simulates such runs.\n");
    printf(".SH COMMANDS\n");
    for (int i = 0; cli_commands()[i]; i++) {
        printf(".TP\n.BR quadrille\\-%s (1)\n", cli_commands()[i]->name);
        put_text(cli_commands()[i]->summary);
        putchar('\n');
    }
    printf(".SH FILES\n.TP\n.I run.yaml\nthe configuration that commands use when none is given and the arguments name no model\n");
    printf(".SH EXIT STATUS\n.TP\n0\nsuccess\n.TP\n1\nfailed at run time\n.TP\n2\nthe call, the configuration or a file must be changed\n"
           ".TP\n75\nstopped by a signal, or the run folder is in use: run the same command again\n");
    print_see_also(NULL);
}

static qd_status print_command(const cli_command *c)
{
    char name[64];
    snprintf(name, sizeof name, "quadrille-%s", c->name);
    print_title(name, 1, c->summary);
    printf(".SH SYNOPSIS\n.B quadrille %s\n", c->name);
    put_text(c->arguments);
    printf("\n.SH DESCRIPTION\n");
    put_text(c->summary);
    puts(".");
    if (c->details) {
        puts(".PP");
        print_details(c->details);
    }
    if (c->option_count > 0) {
        printf(".SH OPTIONS\n");
        QD_TRY(print_options((qd_option_table){c->options, c->option_count}));
    }
    if (c->configuration)
        printf(".SH CONFIGURATION\nKeys of\n.BR quadrille\\-config (5)\ncan be given as key=value or, if they have one, by their short "
               "form.\n");
    print_see_also(c);
    return QD_OK;
}

static qd_status print_keys(void)
{
    print_title("quadrille-config", 5, "configuration of quadrille");
    printf(".SH DESCRIPTION\nA configuration is a YAML file of sections. Each key can also be given on the command line, as "
           "section.key=value or by its short form; the command line overrides the file, and the file the default. Integers can be "
           "written as 4k, 1.5M, 2G or 1e6.\n.PP\n.EX\n");
    printf("model:    {preset: llama\\-tiny}\ndata:     {path: text.txt, seq: 128}\ntrain:    {steps: 30, global_batch: 8, lr: 3e\\-3}\n"
           "parallel: {ranks: 2}\n.EE\n");
    QD_TRY(print_options(qd_config_table()));
    printf(".SH CLUSTERS\nThe keys of a cluster, for plan and simulate:\n");
    QD_TRY(print_options(qd_cluster_table()));
    print_see_also(NULL);
    return QD_OK;
}

qd_status cli_print_manual(const char *name)
{
    const cli_command *command = cli_find(name);
    if (command)
        return print_command(command);
    if (strcmp(name, "config") == 0)
        return print_keys();
    if (name[0] != '\0')
        return cli_unknown_command(name);
    print_overview();
    return QD_OK;
}
