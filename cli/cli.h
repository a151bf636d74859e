/* The program: one file per sub-command, over the public headers alone. */
#ifndef CLI_H
#define CLI_H

#include <quadrille/json_writer.h>
#include <quadrille/options.h>
#include <quadrille/text.h>
#include <stdio.h>

typedef struct cli_call cli_call;

typedef struct cli_command {
    const char *name;
    const char *arguments; /* what follows the name in the usage line */
    const char *summary;   /* one line */
    const char *details;   /* more, for `help NAME`; may be NULL */
    const qd_option *options; /* its own, besides the configuration */
    int option_count;
    bool configuration; /* takes the keys of the configuration */
    qd_option_table (*more)(void); /* and those of another table; may be NULL */
    bool own_words;     /* reads its words itself; otherwise the only one is CONFIG, where it takes a configuration */
    qd_status (*run)(cli_call *call);
} cli_command;

/* One call of a command, arguments read. */
struct cli_call {
    const cli_command *command;
    char *const *argv;    /* of the process */
    qd_options *options;  /* the command's own keys, and the configuration where it takes one */
    bool config;          /* a CONFIG was given */
    const char **words;   /* arguments that are not options; a CONFIG that has been read is taken out */
    int word_count;
};

extern const cli_command cli_train, cli_eval, cli_generate, cli_tokenize, cli_convert, cli_check, cli_schedule, cli_simulate, cli_plan,
    cli_verify, cli_bench, cli_report, cli_doctor, cli_version, cli_help;
/* NULL when there is none. */
const cli_command *cli_find(const char *name);
const cli_command *const *cli_commands(void); /* ended by NULL */

#define CLI_OPTIONS(array) .options = (array), .option_count = (int)(sizeof(array) / sizeof((array)[0]))

/* Options that several commands take. */
#define CLI_OPTION_JSON \
    {"json", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints one JSON object", NULL}
#define CLI_OPTION_DEVICE \
    {"device", QD_OPTION_ENUM, "cpu", 0, 0, "cpu|cuda", "where the model is computed", NULL}
#define CLI_OPTION_THREADS \
    {"threads", QD_OPTION_INT, "0", 0, 4096, NULL, "compute threads; 0: all cores", NULL}
#define CLI_OPTION_CLUSTER                                                                                                                 \
    {                                                                                                                                      \
        "cluster", QD_OPTION_STRING, "h100", 0, 0, NULL,                                                                                   \
            "built-in cluster (quadrille help clusters) or a YAML file; its keys can be given as key=value", NULL                          \
    }

/* "--help" of a command, on standard output. */
qd_status cli_print_help(const cli_command *command);

/* No arguments are left over. */
qd_status cli_no_words(const cli_call *call);

/* Options that contradict each other, and one that says nothing without another: refused, rather
 * than passed over. */
qd_status cli_apart(const cli_call *call, const char *option, const char *other);
qd_status cli_needs(const cli_call *call, const char *option, const char *other);

/* --against "ranks=1 dp=1": the assignments, on a copy of the configuration. */
qd_status cli_assign_words(qd_options *options, const char *text);

/* "quadrille: MESSAGE" on standard error, behind what is on standard output. For observers too. */
void cli_on_failure(void *context, const char *message);

/* Prints a finished JSON text and frees it. */
qd_status cli_print_json(qd_strbuf *text);

/* What a command has made, into the file that the user named; an empty path: standard output. */
qd_status cli_write(const char *path, const char *text, size_t length);

/* ---- what terminals can show ---- */

bool cli_utf8(void);         /* the locale's characters are UTF-8 */
int cli_columns(FILE *file); /* width of the terminal; 0: not a terminal, or one that cannot rewrite a line (TERM=dumb) */
/* UTF-8 text with what the locale lacks spelt out: "×" as "x", "·" as "*", "…" as "...", "Ψ" as
 * "P". */
void cli_put(FILE *file, const char *text);
/* A line of standard output that begins with a word of its own column: broken at blanks on
 * terminals that are narrower. */
void cli_say(const char *word, int column, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* a paragraph; in a file too its lines are no longer than a page is wide */
void cli_explain(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
