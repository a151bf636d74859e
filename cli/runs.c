/* quadrille runs: the runs below some folders as a table, and how their configurations differ.
 * quadrille resize: tells one that is in progress how many ranks it may have. */
#include "cli.h"

#include <dirent.h>
#include <math.h>
#include <quadrille/report.h>
#include <quadrille/train.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct run_list {
    char **folders;
    int count, capacity;
} run_list;

static qd_status add_run(run_list *list, const char *folder)
{
    if (list->count == list->capacity) {
        int capacity = list->capacity ? 2 * list->capacity : 32;
        char **larger = realloc(list->folders, (size_t)capacity * sizeof *larger);
        if (!larger)
            return QD_FAIL(QD_NO_MEMORY, "no memory for %d runs", capacity);
        list->folders = larger;
        list->capacity = capacity;
    }
    if (!(list->folders[list->count] = strdup(folder)))
        return QD_FAIL(QD_NO_MEMORY, "no memory for the name of a run");
    list->count++;
    return QD_OK;
}

/* A run folder has a configuration and the metrics of its steps. */
static bool is_run(const char *folder)
{
    char path[4096];
    struct stat info;
    static const char *const files[] = {"config.yaml", "metrics.jsonl"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++)
        if ((size_t)snprintf(path, sizeof path, "%s/%s", folder, files[i]) >= sizeof path || stat(path, &info) != 0)
            return false;
    return true;
}

/* Adds the runs at `folder` and below it, but none inside a run. */
static qd_status find_runs(run_list *list, const char *folder, int depth)
{
    enum { MOST_DEPTH = 4 };
    if (is_run(folder))
        return add_run(list, folder);
    DIR *dir = depth < MOST_DEPTH ? opendir(folder) : NULL;
    qd_status status = QD_OK;
    for (struct dirent *entry; dir && status == QD_OK && (entry = readdir(dir)) != NULL;) {
        char path[4096];
        struct stat info;
        bool fits = entry->d_name[0] != '.' && (size_t)snprintf(path, sizeof path, "%s/%s", folder, entry->d_name) < sizeof path;
        if (fits && lstat(path, &info) == 0 && S_ISDIR(info.st_mode))
            status = find_runs(list, path, depth + 1);
    }
    if (dir)
        closedir(dir);
    return status;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static qd_status list_runs(const cli_call *call, run_list *list)
{
    static const char *const usual[] = {"runs"};
    const char *const *folders = call->word_count > 0 ? call->words : usual;
    int count = call->word_count > 0 ? call->word_count : 1;
    struct stat info;
    for (int i = 0; i < count; i++) {
        int before = list->count;
        if (stat(folders[i], &info) != 0)
            return QD_FAIL(QD_USAGE, "runs: there is no folder %s: name the folder of the runs", folders[i]);
        QD_TRY(find_runs(list, folders[i], 0));
        qsort(list->folders + before, (size_t)(list->count - before), sizeof *list->folders, by_name);
    }
    return list->count > 0 ? QD_OK : QD_FAIL(QD_USAGE, "runs: %s holds no run folder (train with --dir)", folders[0]);
}

/* "done", "running", "stopped": as far as the files tell. */
static const char *state_of(const qd_run_figures *f)
{
    return f->running ? "running" : f->steps >= f->steps_planned ? "done" : "stopped";
}

static void put_number(qd_json_writer *w, const char *key, double value)
{
    if (isfinite(value))
        qd_json_put_double(w, key, value);
    else
        qd_json_put_null(w, key);
}

static void put_run(qd_json_writer *w, const char *folder, const qd_run_figures *f)
{
    qd_json_object_begin(w, NULL);
    qd_json_put_string(w, "folder", folder);
    qd_json_put_string(w, "model", f->model);
    qd_json_put_string(w, "layout", f->layout);
    qd_json_put_int(w, "ranks", f->ranks);
    qd_json_put_int(w, "parameters", f->parameters);
    qd_json_put_string(w, "state", state_of(f));
    qd_json_put_int(w, "steps", f->steps);
    qd_json_put_int(w, "steps_planned", f->steps_planned);
    put_number(w, "loss", f->loss);
    qd_json_put_int(w, "loss_steps", f->loss_steps);
    put_number(w, "best_loss", f->best_loss);
    if (f->best >= 0)
        qd_json_put_int(w, "best", f->best);
    else
        qd_json_put_null(w, "best");
    put_number(w, "tokens_per_second", f->tokens_per_second);
    qd_json_put_double(w, "seconds", f->seconds);
    qd_json_put_int(w, "tokens", (int64_t)f->tokens);
    qd_json_end(w);
}

/* Of a UTF-8 text. */
static int characters(const char *text)
{
    int count = 0;
    for (; *text; text++)
        count += ((unsigned char)*text & 0xc0) != 0x80;
    return count;
}

static void print_run(const char *folder, int width, const qd_run_figures *f)
{
    char loss[32] = "-", best[48] = "-", rate[32] = "-", steps[48], seconds[32];
    if (isfinite(f->loss))
        snprintf(loss, sizeof loss, "%.4f", f->loss);
    if (f->best >= 0)
        snprintf(best, sizeof best, "%.4f", f->best_loss);
    if (isfinite(f->tokens_per_second))
        qd_text_count(f->tokens_per_second, rate, sizeof rate);
    snprintf(steps, sizeof steps, "%lld/%lld", (long long)f->steps, (long long)f->steps_planned);
    qd_text_seconds(f->seconds, seconds, sizeof seconds);
    printf("%s%*s  %-7s  %13s  %8s  %8s  %8s  %12s  ", folder, width - characters(folder), "", state_of(f), steps, loss, best, rate,
           seconds);
    cli_put(stdout, f->layout);
    putchar('\n');
}

static qd_status print_runs(const run_list *list, bool json)
{
    qd_strbuf text = {0};
    qd_json_writer w = qd_json_writer_on(&text);
    int width = 3;
    for (int i = 0; i < list->count; i++)
        width = characters(list->folders[i]) > width ? characters(list->folders[i]) : width;
    if (json)
        qd_json_list_begin(&w, NULL);
    else
        printf("%-*s  %-7s  %13s  %8s  %8s  %8s  %12s  layout\n", width, "run", "state", "steps", "loss", "best val", "tokens/s", "time");
    for (int i = 0; i < list->count; i++) {
        qd_run_figures f = qd_run_figures_default();
        if (qd_report_figures(list->folders[i], &f) != QD_OK) { /* the others can still be listed */
            fprintf(stderr, "quadrille: warning: %s\n", qd_error_message());
            continue;
        }
        if (json)
            put_run(&w, list->folders[i], &f);
        else
            print_run(list->folders[i], width, &f);
    }
    if (!json)
        return QD_OK;
    qd_json_end(&w);
    return cli_print_json(&text);
}

static qd_status print_difference(void *context, const char *key, const char *const *values)
{
    const run_list *list = context;
    printf("\n%s\n", key);
    for (int i = 0; i < list->count; i++)
        printf("  %-20s  %s\n", values[i][0] ? values[i] : "(empty)", list->folders[i]);
    return QD_OK;
}

static qd_status run(cli_call *call)
{
    run_list list = {0};
    bool json = qd_options_bool(call->options, "json"), differences = qd_options_bool(call->options, "differences");
    qd_status status = cli_apart(call, "json", "differences");
    if (status == QD_OK)
        status = list_runs(call, &list);
    if (status == QD_OK)
        status = print_runs(&list, json);
    if (status == QD_OK && differences)
        status = qd_report_differences((const char *const *)list.folders, list.count, print_difference, &list);
    for (int i = 0; i < list.count; i++)
        free(list.folders[i]);
    free(list.folders);
    return status;
}

static const qd_option own[] = {
    {"differences", QD_OPTION_BOOL, "false", 0, 0, NULL, "also prints the keys in which the configurations of the runs differ", NULL},
    {"json", QD_OPTION_BOOL, "false", 0, 0, NULL, "prints a list of JSON objects", NULL},
};

const cli_command cli_runs = {
    .name = "runs",
    .arguments = "[FOLDER …] [--differences | --json]",
    .summary = "Lists runs with their losses, and compares their configurations",
    .details = "  quadrille runs runs --differences\n\n"
               "Lists the runs at and below each FOLDER; without one, below runs. The loss is a mean over the last steps, best val\n"
               "is the lowest validation loss (train.eval_every), the speed is the median over the steps. To see curves laid over\n"
               "each other: quadrille report RUN RUN …",
    CLI_OPTIONS(own),
    .own_words = true,
    .run = run,
};

static qd_status resize(cli_call *call)
{
    char *end = NULL;
    long ranks = call->word_count == 2 ? strtol(call->words[1], &end, 10) : -1;
    if (call->word_count != 2 || end == call->words[1] || *end != '\0' || ranks < 0 || ranks > 65536)
        return QD_FAIL(QD_USAGE, "resize: give a run folder and a number of ranks: quadrille resize %s", call->command->arguments);
    return qd_train_resize(call->words[0], (int)ranks);
}

const cli_command cli_resize = {
    .name = "resize",
    .arguments = "RUN RANKS",
    .summary = "Tells a running elastic run how many ranks may run from now on",
    .details = "  quadrille resize runs/wide 5\n\n"
               "The run in the folder must have been started with run.elastic=FEWEST..MOST. Within a step it continues with as many\n"
               "of these ranks as its layout can use, and with more when the number grows again: samples and global batch stay the\n"
               "same. With less than the fewest it writes a checkpoint and ends with exit status 75.",
    .own_words = true,
    .run = resize,
};
