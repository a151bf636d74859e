/* Shared by all commands of the program: the command table, common options and output helpers.
 * The program uses the public headers only, with one file per command. */
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
    const qd_option *options; /* of the command, in addition to the configuration */
    int option_count;
    bool configuration; /* accepts the keys of the configuration */
    qd_option_table (*more)(void); /* accepts the keys of another table; may be NULL */
    bool own_words;     /* handles its words itself; otherwise the only word is CONFIG, if it accepts a configuration */
    qd_status (*run)(cli_call *call);
} cli_command;

/* One call of a command, with its arguments parsed. */
struct cli_call {
    const cli_command *command;
    char *const *argv;    /* of the process */
    qd_options *options;  /* the options of the command and, if it accepts one, the configuration */
    bool config;          /* a CONFIG was given */
    const char **words;   /* arguments that are not options, without a CONFIG that has been read */
    int word_count;
};

extern const cli_command cli_init, cli_train, cli_eval, cli_generate, cli_tokenize, cli_convert, cli_check, cli_schedule, cli_simulate,
    cli_resize, cli_plan, cli_verify, cli_bench, cli_report, cli_runs, cli_serve, cli_doctor, cli_completion, cli_version, cli_help;
/* The command of that name; NULL: none. */
const cli_command *cli_find(const char *name);
const cli_command *const *cli_commands(void); /* NULL-terminated */
/* QD_USAGE for a command that does not exist, with the one that was probably meant. */
qd_status cli_unknown_command(const char *name);
/* What was probably meant: "train", "help models"; NULL: nothing is similar. */
const char *cli_similar_command(const char *name);

#define CLI_OPTIONS(array) .options = (array), .option_count = (int)(sizeof(array) / sizeof((array)[0]))

/* Options of several commands. */
#define CLI_OPTION_JSON \
    {"json", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints one JSON object", NULL}
#define CLI_OPTION_DEVICE \
    {"device", QD_OPTION_ENUM, "cpu", 0, 0, "cpu|cuda", "device that runs the model", NULL}
#define CLI_OPTION_SPECIAL \
    {"special", QD_OPTION_ENUM, "plain", 0, 0, "parse|plain|refuse", \
     "special tokens in the text: their ids (trusted text only), ordinary text, or an error", NULL}
#define CLI_OPTION_THREADS \
    {"threads", QD_OPTION_INT, "0", 0, 4096, NULL, "compute threads; 0: all cores", NULL}
/* Ranks that share a model, as threads of this process. */
#define CLI_OPTIONS_RANKS                                                                                                   \
    {"tp", QD_OPTION_INT, "1", 1, 1024, NULL, "ranks that share each layer (tensor parallelism)", NULL},                    \
    {"pp", QD_OPTION_INT, "1", 1, 1024, NULL, "ranks that share the layers (pipeline parallelism)", NULL},                  \
    {"ep", QD_OPTION_INT, "1", 1, 1024, NULL, "ranks that share the experts (expert parallelism)", NULL}
#define CLI_OPTION_CLUSTER                                                                                                                 \
    {                                                                                                                                      \
        "cluster", QD_OPTION_STRING, "h100", 0, 0, NULL,                                                                                   \
            "built-in cluster (quadrille help clusters) or a YAML file; its keys can be given as key=value", NULL                          \
    }

/* Prints the --help text of a command to standard output. all: with every key that it accepts. */
qd_status cli_print_help(const cli_command *command, bool all);

/* Prints the manual page of a command, of "config" (the keys), or of the program (""), in roff. */
qd_status cli_print_manual(const char *name);

/* QD_USAGE if the call has words. */
qd_status cli_no_words(const cli_call *call);

/* QD_USAGE if both options are set (apart), or if `option` is set without `other` (needs). No
 * option is silently ignored. */
qd_status cli_apart(const cli_call *call, const char *option, const char *other);
qd_status cli_needs(const cli_call *call, const char *option, const char *other);

/* Applies the assignments of --against "ranks=1 dp=1" to a copy of the configuration. */
qd_status cli_assign_words(qd_options *options, const char *text);

/* Prints "quadrille: MESSAGE" to standard error, after flushing standard output. Also an observer's
 * on_failure. */
void cli_on_failure(void *context, const char *message);

/* Prints a complete JSON text and frees it. */
qd_status cli_print_json(qd_strbuf *text);

/* Writes the output of a command to a file; an empty path means standard output. */
qd_status cli_write(const char *path, const char *text, size_t length);

bool cli_utf8(void);         /* whether the locale's encoding is UTF-8 */
int cli_columns(FILE *file); /* width of the terminal; 0: not a terminal, or one that cannot rewrite a line (TERM=dumb) */
/* An escape sequence that starts a colour, or ends it; "" where it would not be shown: not a
 * terminal, TERM=dumb, or NO_COLOR is set (https://no-color.org). */
typedef enum cli_shade { CLI_PLAIN, CLI_DIM, CLI_GREEN } cli_shade;
const char *cli_colour(FILE *file, cli_shade shade);
/* Writes UTF-8 text. In other locales "×" becomes "x", "·" "*", "…" "..." and "Ψ" "P". */
void cli_put(FILE *file, const char *text);
/* Prints a line that begins with `word`, followed by text from `column` on, which is wrapped to the
 * width of the terminal. */
void cli_say(const char *word, int column, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Prints a paragraph, wrapped to the width of the terminal, or to 100 columns in a file. */
void cli_explain(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
