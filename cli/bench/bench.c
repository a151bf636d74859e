/* quadrille bench: selects one of the benchmarks and checks its options. */
#include "bench/bench.h"

#include <errno.h>
#include <limits.h>
#include <quadrille/config.h>
#include <quadrille/train.h>
#include <string.h>
#include <unistd.h>

/* The benchmarks; `bench NAME` runs one. */
static const bench_part *const parts[] = {&bench_collectives, &bench_kernels, &bench_step,     &bench_simulator,
                                          &bench_plans,       &bench_machine, &bench_pipeline, NULL};

/* Benchmarks start this program again as their ranks, by its real path, which works under any
 * launcher. */
static char program_path[PATH_MAX];

qd_status bench_program(const char **path)
{
    ssize_t length = readlink("/proc/self/exe", program_path, sizeof program_path - 1);
    if (length < 0)
        return QD_FAIL(QD_SYSTEM, "cannot find the program's own file: %s", strerror(errno));
    program_path[length] = '\0';
    *path = program_path;
    return QD_OK;
}

/* Whether a word is one of a list in which each has a blank on both sides. */
static bool is_listed(const char *list, const char *word)
{
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += length)
        if (at[-1] == ' ' && at[length] == ' ')
            return true;
    return false;
}

/* Rejects options and keys that the benchmark would ignore. */
static qd_status check_arguments(const cli_call *call, const bench_part *part)
{
    const qd_option_table table = qd_config_table();
    for (int i = 0; i < cli_bench.option_count; i++) {
        const char *option = cli_bench.options[i].key;
        char takers[128] = "";
        if (!qd_options_is_set(call->options, option) || is_listed(part->options, option))
            continue;
        for (int k = 0; parts[k]; k++)
            if (is_listed(parts[k]->options, option))
                snprintf(takers + strlen(takers), sizeof takers - strlen(takers), "%s%s", takers[0] ? ", " : "", parts[k]->name);
        return QD_FAIL(QD_USAGE, "bench %s: --%s is for %s", part->name, option, takers);
    }
    for (int i = 0; part->keys && i < table.count; i++)
        if (qd_options_is_set(call->options, table.options[i].key) && !is_listed(part->keys, table.options[i].key))
            return QD_FAIL(QD_USAGE, "bench %s: %s has no effect here", part->name, table.options[i].key);
    int most = part->keys ? 1 : 2;
    return call->word_count <= most ? QD_OK : QD_FAIL(QD_USAGE, "bench %s: '%s' is one argument too many", part->name, call->words[most]);
}

static qd_status run_part(cli_call *call, const bench_part *part)
{
    QD_TRY(check_arguments(call, part));
    if (!part->keys && call->word_count == 2)
        QD_TRY(qd_options_load(call->options, call->words[1]));
    QD_TRY(qd_train_from_options(call->options));
    return part->run(call);
}

static qd_status run(cli_call *call)
{
    const char *name = call->word_count > 0 ? call->words[0] : "";
    char list[128] = "";
    if (strcmp(name, bench_collectives_rank.name) == 0) /* internal: how collectives starts its ranks */
        return bench_collectives_rank.run(call);
    for (int i = 0; parts[i]; i++) {
        if (strcmp(parts[i]->name, name) == 0)
            return run_part(call, parts[i]);
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", list[0] ? ", " : "", parts[i]->name);
    }
    return QD_FAIL(QD_USAGE, name[0] ? "bench: there is no benchmark '%s'; there are: %s"
                                     : "bench: %sgive a benchmark: %s", name, list);
}

static const qd_option own[] = {
    {"against", QD_OPTION_STRING, "none", 0, 0, NULL,
     "collectives: mpi also times the MPI library's own calls, in the same run; simulator: a file of published runs; plans: a file of "
     "published layouts",
     NULL},
    {"write", QD_OPTION_STRING, "", 0, 0, NULL, "machine: file to write; empty: standard output", NULL},
    {"core", QD_OPTION_BOOL, "false", 0, 0, NULL, "simulator: only the rows marked core", NULL},
    {"smallest", QD_OPTION_INT, "4", 4, 1e12, NULL, "collectives: bytes of the smallest message", NULL},
    {"largest", QD_OPTION_INT, "67108864", 4, 1e12, NULL, "collectives: bytes of the largest message", NULL},
    {"operation", QD_OPTION_ENUM, "all", 0, 0,
     "all|all-reduce|reduce-scatter|all-gather|all-to-all|broadcast|reduce|gather|scatter|send|barrier",
     "collectives: measures this one only", NULL},
    {"seconds", QD_OPTION_FLOAT, "0.5", 0.001, 1000, NULL, "approximate time for each measurement", NULL},
    {"warm-up", QD_OPTION_INT, "2", 0, 1000, NULL, "step, pipeline, machine: steps before the clock starts", NULL},
    {"repeat", QD_OPTION_INT, "5", 1, 100000, NULL, "step, pipeline, machine: timed steps", NULL},
    {"in-turn", QD_OPTION_STRING, "", 0, 0, NULL,
     "step: a second CONFIG, whose steps alternate with these, to compare both on a machine whose speed varies", NULL},
    CLI_OPTION_JSON,
};

const cli_command cli_bench = {
    .name = "bench",
    .arguments = "collectives|kernels|step|pipeline|machine|simulator|plans [CONFIG] [key=value …] [--json]",
    .summary =
        "Measures collectives, kernels or the training step on this machine, or the simulator and the planner against published runs",
    .details = "  quadrille bench collectives --against mpi\n"
               "  quadrille bench kernels\n"
               "  quadrille bench step run.yaml\n"
               "  quadrille bench pipeline --pp 4\n"
               "  quadrille bench machine run.yaml --write this-machine.yaml\n"
               "  quadrille bench simulator --against data/published/runs.json\n"
               "  quadrille bench plans --against data/published/layouts.json",
    CLI_OPTIONS(own),
    .configuration = true,
    .own_words = true,
    .run = run,
};
