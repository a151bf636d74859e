/* The program `quadrille`: command table, argument parsing, output helpers of cli.h, exit
 * status. */
#define _GNU_SOURCE /* vasprintf */
#include "cli.h"
#include "progress.h"

#include <errno.h>
#include <fcntl.h>
#include <langinfo.h>
#include <locale.h>
#include <quadrille/config.h>
#include <quadrille/log.h>
#include <quadrille/train.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sysexits.h>
#include <unistd.h>

static const cli_command *const commands[] = {
    &cli_init, &cli_train,  &cli_resize, &cli_eval, &cli_generate, &cli_tokenize, &cli_convert, &cli_check, &cli_schedule, &cli_simulate,
    &cli_plan, &cli_verify, &cli_bench, &cli_report,   &cli_runs,     &cli_serve,   &cli_doctor,     &cli_completion, &cli_help,
    &cli_version, NULL,
};

const cli_command *const *cli_commands(void)
{
    return commands;
}

const cli_command *cli_find(const char *name)
{
    for (int i = 0; commands[i]; i++)
        if (strcmp(commands[i]->name, name) == 0)
            return commands[i];
    return NULL;
}

/* Commands of other programs, and the call that does the same here. */
static const char *const other_commands[][2] = {
    {"run pretrain finetune fine-tune fit start launch", "train"},
    {"resume continue", "train --resume --dir FOLDER"},
    {"evaluate evaluation validate val test perplexity ppl score", "eval"},
    {"sample infer inference complete chat predict prompt text", "generate"},
    {"tokenise tokenizer encode prepare preprocess data", "tokenize"},
    {"export import hf huggingface to-hf from-hf", "convert"},
    {"memory estimate dry-run dryrun prove inspect", "check"},
    {"sim model", "simulate"},
    {"search autotune tune optimize optimise planner layout", "plan"},
    {"compare equivalence", "verify"},
    {"benchmark profile speed", "bench"},
    {"view plot show html visualize visualise", "report"},
    {"dashboard web ui tensorboard watch follow live monitor server", "serve"},
    {"info env diagnose diagnostics system gpus devices", "doctor"},
    {"pipeline gantt", "schedule"},
    {"models presets list", "help models"},
    {"clusters hardware", "help clusters"},
    {"options config keys usage", "help"},
};

const char *cli_similar_command(const char *name)
{
    const char *names[32];
    int count = 0;
    for (size_t i = 0; i < sizeof other_commands / sizeof *other_commands; i++)
        if (qd_text_has_word(other_commands[i][0], name))
            return other_commands[i][1];
    for (; commands[count]; count++)
        names[count] = commands[count]->name;
    return qd_text_nearest(name, names, count);
}

qd_status cli_unknown_command(const char *name)
{
    size_t length = strlen(name);
    const char *meant = cli_similar_command(name);
    if (strchr(name, '=') || (length > 5 && (strcmp(name + length - 5, ".yaml") == 0 || strcmp(name + length - 4, ".yml") == 0)))
        return QD_FAIL(QD_USAGE, "'%.60s' is not a command; did you mean 'quadrille train %.60s'?", name, name);
    return meant ? QD_FAIL(QD_USAGE, "there is no command '%.60s'; did you mean 'quadrille %s'?", name, meant)
                 : QD_FAIL(QD_USAGE, "there is no command '%.60s': quadrille help lists them", name);
}

bool cli_utf8(void)
{
    return strcmp(nl_langinfo(CODESET), "UTF-8") == 0;
}

int cli_columns(FILE *file)
{
    struct winsize size;
    const char *kind = getenv("TERM");
    if (!isatty(fileno(file)) || (kind && strcmp(kind, "dumb") == 0))
        return 0;
    return ioctl(fileno(file), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

const char *cli_colour(FILE *file, cli_shade shade)
{
    static const char *const codes[] = {[CLI_PLAIN] = "\033[0m", [CLI_DIM] = "\033[2m", [CLI_GREEN] = "\033[32m"};
    const char *none = getenv("NO_COLOR");
    return cli_columns(file) == 0 || (none && none[0]) ? "" : codes[shade];
}

static void say(const char *word, int column, int width, const char *format, va_list args)
{
    char *text = NULL;
    qd_strbuf line = {0};
    int length = vasprintf(&text, format, args);
    qd_text_wrap(length >= 0 ? text : "(no memory)", column, width, &line);
    printf("%-*s", column, word);
    cli_put(stdout, line.failed ? "\n" : line.data);
    qd_strbuf_free(&line);
    if (length >= 0)
        free(text);
}

void cli_say(const char *word, int column, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    say(word, column, cli_columns(stdout), format, args);
    va_end(args);
}

void cli_explain(const char *format, ...)
{
    int columns = cli_columns(stdout);
    va_list args;
    va_start(args, format);
    say("", 0, columns > 0 ? columns : 100, format, args);
    va_end(args);
}

static void append_plain(qd_strbuf *out, const char *text)
{
    static const char *const spelt[][2] = {{"×", "x"}, {"·", "*"}, {"…", "..."}, {"Ψ", "P"}};
    while (*text && !cli_utf8()) {
        size_t i = 0, count = sizeof spelt / sizeof *spelt;
        while (i < count && strncmp(text, spelt[i][0], strlen(spelt[i][0])) != 0)
            i++;
        if (i < count)
            qd_strbuf_puts(out, spelt[i][1]);
        else
            qd_strbuf_append(out, text, 1);
        text += i < count ? strlen(spelt[i][0]) : 1;
    }
    qd_strbuf_puts(out, text);
}

void cli_put(FILE *file, const char *text)
{
    qd_strbuf plain = {0};
    append_plain(&plain, text);
    fputs(plain.failed || !plain.data ? text : plain.data, file);
    qd_strbuf_free(&plain);
}

void cli_on_failure(void *context, const char *message)
{
    qd_strbuf line = {0}; /* in one piece: several ranks may write at the same time */
    (void)context;
    fflush(stdout);
    qd_strbuf_printf(&line, "quadrille: %s\n", message);
    cli_put(stderr, line.failed ? "quadrille: no memory for a message\n" : line.data);
    qd_strbuf_free(&line);
}

qd_status cli_print_json(qd_strbuf *text)
{
    char *taken;
    QD_TRY(qd_strbuf_take(text, &taken));
    puts(taken);
    free(taken);
    return QD_OK;
}

qd_status cli_write(const char *path, const char *text, size_t length)
{
    FILE *file = path[0] ? fopen(path, "w") : stdout;
    bool good = file && fwrite(text, 1, length, file) == length;
    int error = errno;
    if (file && file != stdout && fclose(file) != 0 && good) {
        good = false;
        error = errno;
    }
    if (good || file == stdout) /* main() checks standard output */
        return QD_OK;
    return QD_FAIL(QD_IO, "%s: cannot be written: %s", path, strerror(error));
}

qd_status cli_assign_words(qd_options *options, const char *text)
{
    char *copy = strdup(text), *rest = NULL;
    qd_status status = copy ? QD_OK : QD_FAIL(QD_NO_MEMORY, "no memory for --against");
    for (char *word = copy ? strtok_r(copy, " \t", &rest) : NULL; word && status == QD_OK; word = strtok_r(NULL, " \t", &rest))
        status = qd_options_assign(options, word);
    free(copy);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "--against: ");
}

qd_status cli_apart(const cli_call *call, const char *option, const char *other)
{
    if (!qd_options_is_set(call->options, option) || !qd_options_is_set(call->options, other))
        return QD_OK;
    return QD_FAIL(QD_USAGE, "%s: --%s and --%s do not go together", call->command->name, option, other);
}

qd_status cli_needs(const cli_call *call, const char *option, const char *other)
{
    if (!qd_options_is_set(call->options, option) || qd_options_is_set(call->options, other))
        return QD_OK;
    return QD_FAIL(QD_USAGE, "%s: --%s has no effect without --%s", call->command->name, option, other);
}

qd_status cli_no_words(const cli_call *call)
{
    return call->word_count == 0 ? QD_OK
                                 : QD_FAIL(QD_USAGE, "%s: '%s' is one argument too many; the usage is: quadrille %s %s",
                                           call->command->name, call->words[0], call->command->name,
                                           call->command->arguments);
}

static bool has_word(int argc, char *const *argv, const char *word)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++)
        if (strcmp(argv[i], word) == 0)
            return true;
    return false;
}

/* Accepted by every command. run_command() and main() look for them in argv, so that they work even
 * if other arguments are wrong. */
static const qd_option common_options[] = {
    {"help", QD_OPTION_BOOL, "false", 0, 0, NULL, "shows this text", NULL},
    {"debug", QD_OPTION_BOOL, "false", 0, 0, NULL, "after an error, shows where in the program it happened", NULL},
};

/* Without CONFIG, run.yaml of the current folder, unless the arguments are complete without it:
 * they name a model, or a run to resume. */
static qd_status find_configuration(cli_call *call)
{
    static const char name[] = "run.yaml";
    qd_option_table table = qd_config_table();
    for (int i = 0; i < table.count; i++)
        if (strncmp(table.options[i].key, "model.", 6) == 0 && qd_options_is_set(call->options, table.options[i].key))
            return QD_OK;
    if (qd_options_bool(call->options, "run.resume") || access(name, R_OK) != 0)
        return QD_OK;
    call->config = true;
    if (qd_train_is_rank())
        return QD_OK;
    if (qd_train_rank() <= 0)
        cli_on_failure(NULL, "using run.yaml of this folder");
    return qd_options_load(call->options, name);
}

static qd_status read_arguments(cli_call *call, int argc, char *const *argv)
{
    const cli_command *command = call->command;
    qd_option_table tables[4] = {QD_OPTION_TABLE(common_options)};
    int count = 1;
    if (command->option_count > 0)
        tables[count++] = (qd_option_table){command->options, command->option_count};
    if (command->configuration)
        tables[count++] = qd_config_table();
    if (command->more)
        tables[count++] = command->more();
    call->words = calloc((size_t)argc + 1, sizeof *call->words);
    if (!call->words)
        return QD_FAIL(QD_NO_MEMORY, "no memory for the arguments");
    QD_TRY(qd_options_create(tables, count, &call->options));
    QD_TRY(qd_options_parse(call->options, argc, argv, call->words, &call->word_count));
    if (!command->configuration || command->own_words)
        return QD_OK;
    if (call->word_count == 0)
        return find_configuration(call);
    if (qd_options_find(call->options, call->words[0]) && access(call->words[0], F_OK) != 0)
        return QD_FAIL(QD_USAGE, "'%s' is a key, and there is no file with that name: write %s=VALUE", call->words[0], call->words[0]);
    if (call->words[0][0] == '\0')
        return QD_FAIL(QD_USAGE, "an argument is empty: CONFIG is the name of a file");
    if (!qd_train_is_rank())
        QD_TRY(qd_options_load(call->options, call->words[0]));
    call->config = true;
    memmove(call->words, call->words + 1, (size_t)--call->word_count * sizeof *call->words);
    return cli_no_words(call);
}

static qd_status run_command(const cli_command *command, int argc, char *const *argv, char *const *process_argv)
{
    cli_call call = {.command = command, .argv = process_argv};
    qd_status status = has_word(argc, argv, "--help") || has_word(argc, argv, "-h") ? cli_print_help(command, has_word(argc, argv, "--all"))
                                                                                    : read_arguments(&call, argc, argv);
    if (status == QD_OK && call.options && command->configuration && !command->own_words && command != &cli_train) /* it may resume */
        status = qd_train_from_options(call.options);
    if (status == QD_OK && call.options)
        status = command->run(&call);
    progress_watch_end(); /* a command that failed may not have ended it */
    if (status != QD_OK && command == &cli_train)
        status = qd_train_not_started(status, &(qd_train_observer){.size = sizeof(qd_train_observer), .on_failure = cli_on_failure});
    qd_options_destroy(call.options);
    free(call.words);
    return status;
}

static qd_status dispatch(int argc, char *const *argv)
{
    if (argc < 2)
        return QD_FAIL(QD_USAGE, "give a command, for example: quadrille train run.yaml (all commands: quadrille help)");
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        name = "help";
    else if (strcmp(name, "--version") == 0)
        name = "version";
    const cli_command *command = cli_find(name);
    if (!command)
        return cli_unknown_command(name);
    return run_command(command, argc - 2, argv + 2, argv);
}

/* 2: the user must change something (the call, the configuration, a damaged file); 1: failed at run
 * time; 75 (EX_TEMPFAIL): run the same command again, because it was asked to stop or another run
 * is using the folder. */
static int exit_status(qd_status status)
{
    if (status == QD_STOPPED || status == QD_BUSY)
        return EX_TEMPFAIL;
    return status == QD_OK ? 0 : status == QD_USAGE || status == QD_UNSUPPORTED || status == QD_CORRUPT ? 2 : 1;
}

/* Opens descriptors 0 to 2 if they are closed: otherwise a file opened later would get one of them,
 * and output meant for a standard stream would be written to it. */
static void fill_standard_files(void)
{
    int fd;
    do
        fd = open("/dev/null", O_RDWR);
    while (fd >= 0 && fd <= STDERR_FILENO);
    if (fd > STDERR_FILENO)
        close(fd);
}

/* Prints warnings of the library, such as a slow kernel, once each and on one rank only. */
static void on_log(void *context, qd_log_level level, const char *subsystem, const char *text)
{
    enum { MOST = 32 };
    static char *told[MOST];
    static int count;
    char message[2200];
    (void)context;
    if (level > QD_LOG_WARN && strcmp(subsystem, "tuning") != 0) /* tuning takes long enough that users should see it */
        return;
    for (int i = 0; i < count; i++)
        if (strcmp(told[i], text) == 0)
            return;
    if (count == MOST || !(told[count] = strdup(text)))
        return;
    count++;
    snprintf(message, sizeof message, "%s: %s", subsystem, text);
    cli_on_failure(NULL, message);
}

int main(int argc, char **argv)
{
    fill_standard_files();
    setlocale(LC_CTYPE, "");
    if (qd_train_rank() <= 0)
        qd_log_set_sink(on_log, NULL, QD_LOG_INFO);
    qd_status status = dispatch(argc, argv);
    /* The stream records that an earlier write failed, but not why. */
    bool lost = ferror(stdout), full = fflush(stdout) != 0;
    if (lost && !full && status == QD_OK)
        status = QD_FAIL(QD_IO, "standard output cannot be written: some output is lost");
    if (full && status == QD_OK)
        status = QD_FAIL(QD_IO, "standard output cannot be written: %s", strerror(errno));
    if (status == QD_OK)
        return 0;
    if (qd_train_report(status))
        cli_on_failure(NULL, qd_error_message());
    if (has_word(argc, argv, "--debug"))
        fprintf(stderr, "%s\n", qd_error_trace());
    return exit_status(status);
}
