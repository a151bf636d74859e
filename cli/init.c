/* quadrille init: writes a commented run.yaml for a model and this machine, or for a cluster. The
 * layout is the planner's first choice, so it fits. */
#include "cli.h"

#include <quadrille/check.h>
#include <quadrille/config.h>
#include <quadrille/machine.h>
#include <quadrille/plan.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const double GIB = 1024.0 * 1024.0 * 1024.0;

/* The machine or cluster that the file is for. */
typedef struct target {
    char text[160]; /* "2 cores, 23.0 GiB free" */
    bool cuda;
    int ranks, threads; /* threads: per rank; 0: not chosen here */
} target;

/* Sets a key unless the user has set it. */
static qd_status suggest(qd_options *o, const char *key, const char *value)
{
    return qd_options_is_set(o, key) ? QD_OK : qd_options_set(o, key, value);
}

static qd_status suggest_number(qd_options *o, const char *key, double value)
{
    char text[32];
    snprintf(text, sizeof text, "%.15g", value);
    return suggest(o, key, text);
}

/* The built-in cluster with this GPU; h100 for GPUs that are not known. */
static const char *cluster_of(const char *gpu)
{
    char name[96];
    snprintf(name, sizeof name, "%s", gpu);
    for (char *c = name; *c; c++)
        *c = *c >= 'A' && *c <= 'Z' ? (char)(*c + 32) : *c;
    for (const char *const *known = qd_cluster_names(); *known; known++)
        if (strstr(name, *known))
            return *known;
    return "h100";
}

/* The GPUs of this machine as a node of a built-in cluster, with the memory that is free now. */
static qd_status describe_gpus(qd_options *o, const qd_machine *m, target *t)
{
    int64_t least = m->gpus[0].free_bytes;
    char memory[32];
    for (int i = 1; i < m->gpu_count && i < QD_MACHINE_GPUS; i++)
        least = m->gpus[i].free_bytes < least ? m->gpus[i].free_bytes : least;
    qd_text_bytes(least, memory, sizeof memory);
    snprintf(t->text, sizeof t->text, "%d x %s with %s free", m->gpu_count, m->gpus[0].name, memory);
    t->cuda = true;
    t->ranks = m->gpu_count;
    QD_TRY(qd_cluster_load(o, cluster_of(m->gpus[0].name)));
    return suggest_number(o, "accelerator.memory_gib", (double)least / GIB);
}

/* The cores as one accelerator, because one rank with all threads needs the least memory and
 * communicates nothing. With more ranks they divide cores and memory. */
static qd_status describe_cores(qd_options *o, const qd_machine *m, target *t)
{
    int64_t free_bytes = qd_machine_free_memory(NULL);
    char memory[32];
    if (free_bytes <= 0)
        free_bytes = m->memory_available_bytes;
    qd_text_bytes(free_bytes, memory, sizeof memory);
    snprintf(t->text, sizeof t->text, "%d core%s, %s of memory free", m->cores_allowed, m->cores_allowed == 1 ? "" : "s", memory);
    t->ranks = qd_options_is_set(o, "parallel.ranks") ? (int)qd_options_int(o, "parallel.ranks") : 1;
    t->threads = m->cores_allowed / t->ranks > 0 ? m->cores_allowed / t->ranks : 1;
    QD_TRY(suggest(o, "accelerator.name", "cores of this machine"));
    QD_TRY(suggest_number(o, "accelerator.peak_tflops", m->fma_flops * t->threads * 1e-12));
    QD_TRY(suggest_number(o, "accelerator.product_tflops", m->product_flops * t->threads * 1e-12));
    QD_TRY(suggest_number(o, "accelerator.bandwidth_gbs", 10.0 * t->threads)); /* about 10 GB/s of memory bandwidth per core */
    QD_TRY(suggest_number(o, "accelerator.memory_gib", (double)free_bytes / GIB / t->ranks));
    QD_TRY(suggest_number(o, "node.size", t->ranks));
    return suggest(o, "node.bandwidth_gbs", "5");
}

static qd_status describe_cluster(qd_options *o, const char *name, target *t)
{
    QD_TRY(qd_cluster_load(o, name));
    int64_t gpus = qd_options_int(o, "gpus");
    t->cuda = true;
    t->ranks = (int)(gpus > 0 ? gpus : qd_options_int(o, "node.size"));
    snprintf(t->text, sizeof t->text, "%d x %s", t->ranks, qd_options_string(o, "accelerator.name"));
    return QD_OK;
}

static qd_status describe_target(cli_call *call, target *t)
{
    qd_options *o = call->options;
    const char *cluster = qd_options_string(o, "cluster");
    qd_machine machine = qd_machine_default();
    QD_TRY(cli_needs(call, "gpus", "cluster"));
    if (cluster[0] != '\0')
        return describe_cluster(o, cluster, t);
    QD_TRY(qd_machine_look(&machine));
    bool cpu = qd_options_is_set(o, "run.device") && strcmp(qd_options_string(o, "run.device"), "cpu") == 0;
    if (!cpu && qd_options_is_set(o, "run.device") && machine.gpu_count == 0)
        return QD_FAIL(QD_USAGE, "init: run.device is cuda, but there is no GPU: %s", machine.gpu_reason);
    return machine.gpu_count > 0 && !cpu ? describe_gpus(o, &machine, t) : describe_cores(o, &machine, t);
}

/* A first setting for everything that depends on the model's size; usual values, not tuned. */
static qd_status suggest_training(qd_options *o, const target *t, int64_t parameters, const char *name)
{
    double lr = parameters < 50e6 ? 1e-3 : parameters < 500e6 ? 6e-4 : parameters < 3e9 ? 3e-4 : 1.5e-4;
    int64_t batch = t->cuda ? 8 : 32;
    char text[96];
    if (t->cuda)
        batch = batch * t->ranks < 64 ? (64 + t->ranks - 1) / t->ranks * t->ranks : batch * t->ranks;
    else
        batch = (batch + t->ranks - 1) / t->ranks * t->ranks;
    QD_TRY(suggest(o, "data.path", "text.txt"));
    QD_TRY(suggest(o, "data.validation", "0.01"));
    QD_TRY(suggest_number(o, "data.seq", t->cuda ? 1024 : 256));
    QD_TRY(suggest(o, "train.steps", "1000"));
    QD_TRY(suggest_number(o, "train.global_batch", (double)batch));
    QD_TRY(suggest_number(o, "train.lr", lr));
    QD_TRY(suggest_number(o, "train.min_lr", qd_options_float(o, "train.lr") / 10.0));
    QD_TRY(suggest_number(o, "train.warmup", (double)(qd_options_int(o, "train.steps") / 20)));
    QD_TRY(suggest(o, "train.precision", t->cuda ? "bf16" : "fp32"));
    QD_TRY(suggest(o, "run.device", t->cuda ? "cuda" : "cpu"));
    QD_TRY(suggest_number(o, "parallel.ranks", t->ranks));
    if (t->threads > 0)
        QD_TRY(suggest_number(o, "run.threads", t->threads));
    snprintf(text, sizeof text, "runs/%.80s", name);
    return suggest(o, "run.dir", text);
}

/* Whether the file has the key: what is not the default, and what users change first. */
static bool worth_writing(const qd_options *o, const qd_option *option)
{
    char *value = NULL;
    static const char always[] = "model.preset data.path data.seq data.validation train.steps train.global_batch train.micro_batch "
                                 "train.lr train.min_lr train.warmup train.precision parallel.ranks run.device run.dir run.save_minutes";
    if (qd_text_has_word(always, option->key))
        return true;
    bool changed = qd_options_is_set(o, option->key) && qd_options_value_text(o, option->key, &value) == QD_OK &&
                   strcmp(value, option->fallback ? option->fallback : "") != 0;
    free(value);
    return changed;
}

/* Where the help of a key says more than a file needs. */
static const char *comment_of(const qd_option *option)
{
    static const char *const comments[][2] = {
        {"train.precision", "fp32 or bf16"},
        {"parallel.ranks", "processes that train together"},
        {"parallel.zero", "ranks of dp shard 1: optimizer state, 2: gradients too, 3: parameters too"},
        {"run.dir", "checkpoints, metrics and this configuration are saved here"},
        {"run.save_minutes", "minutes between checkpoints"},
        {"run.device", "cpu or cuda"},
    };
    for (size_t i = 0; i < sizeof comments / sizeof *comments; i++)
        if (strcmp(comments[i][0], option->key) == 0)
            return comments[i][1];
    return option->help;
}

/* "  lr: 1e-3              # peak learning rate"; a long comment is above the key. */
static qd_status write_key(const qd_options *o, const qd_option *option, const char *comment, qd_strbuf *out)
{
    enum { COLUMN = 26, WIDTH = 100 };
    char *value, line[512];
    QD_TRY(qd_options_value_text(o, option->key, &value));
    int length = (int)strcspn(comment, ";");
    snprintf(line, sizeof line, "  %s: %s", strchr(option->key, '.') + 1, value);
    free(value);
    if (strlen(line) < COLUMN && COLUMN + 2 + length <= WIDTH) {
        qd_strbuf_printf(out, "%-*s# %.*s\n", COLUMN, line, length, comment);
        return QD_OK;
    }
    while (length > 0) {
        int part = length;
        while (part > WIDTH - 4)
            do
                part--;
            while (part > 1 && comment[part] != ' ');
        qd_strbuf_printf(out, "  # %.*s\n", part, comment);
        part += comment[part] == ' ';
        comment += part;
        length -= part;
    }
    qd_strbuf_printf(out, "%s\n", line);
    return QD_OK;
}

static qd_status write_file(const qd_options *o, const target *t, const char *model, qd_strbuf *out)
{
    qd_option_table table = qd_config_table();
    const char *section = "";
    size_t section_length = 0;
    qd_strbuf_printf(out, "# Written by quadrille init for: %s.\n", t->text);
    qd_strbuf_puts(out, "# quadrille check shows its memory, quadrille train starts it, quadrille help KEY explains a key.\n");
    for (int i = 0; i < table.count; i++) {
        const qd_option *option = &table.options[i];
        size_t length = strcspn(option->key, ".");
        bool vocabulary = strcmp(option->key, "data.tokenizer") == 0 && !qd_options_is_set(o, option->key);
        if (!vocabulary && !worth_writing(o, option))
            continue;
        if (length != section_length || strncmp(section, option->key, length) != 0)
            qd_strbuf_printf(out, "%.*s:\n", (int)length, option->key);
        section = option->key;
        section_length = length;
        if (vocabulary)
            qd_strbuf_puts(out, "  # tokenizer: tokenizer.json   "
                                "# without: trained on the text, or bytes if the vocabulary is 256\n");
        else
            QD_TRY(write_key(o, option, strcmp(option->key, "model.preset") == 0 ? model : comment_of(option), out));
    }
    return out->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the configuration") : QD_OK;
}

/* The file is read back: what it says is what was planned. */
static qd_status check_file(const char *path, qd_strbuf *text, qd_check_report *report)
{
    qd_option_table table = qd_config_table();
    qd_options *again = NULL;
    QD_TRY(qd_options_create(&table, 1, &again));
    qd_status status = qd_options_load_text(again, path, text->data, text->length);
    if (status == QD_OK)
        status = qd_check(again, 0, report);
    qd_options_destroy(again);
    return status;
}

static qd_status choose_layout(qd_options *o)
{
    qd_plan_report *plan = NULL;
    QD_TRY(qd_plan(o, &plan));
    qd_status status = qd_plan_apply(plan->choices[0], o);
    qd_plan_report_destroy(plan);
    return status;
}

static qd_status run(cli_call *call)
{
    qd_options *o = call->options;
    const char *path = qd_options_string(o, "output");
    target t = {0};
    qd_check_report report = qd_check_report_default();
    char shape[160], model[256], count[32], memory[32];
    int64_t parameters;
    if (call->word_count > 1)
        return QD_FAIL(QD_USAGE, "init: '%s' is one argument too many; the usage is: quadrille init %s", call->words[1],
                       call->command->arguments);
    if (call->word_count == 1 && qd_options_is_set(o, "model.preset"))
        return QD_FAIL(QD_USAGE, "init: the model is given twice, as %s and as model.preset", call->words[0]);
    if (qd_options_is_set(o, "run.from"))
        return QD_FAIL(QD_USAGE, "init: starts from a preset; 'quadrille train --from' needs no file");
    QD_TRY(suggest(o, "model.preset", call->word_count == 1 ? call->words[0] : "llama-small"));
    if (access(path, F_OK) == 0 && !qd_options_bool(o, "force"))
        return QD_FAIL(QD_USAGE, "%s exists: --force replaces it, -o FILE writes another", path);
    const char *name = qd_options_string(o, "model.preset");
    QD_TRY(qd_config_preset_text(name, &parameters, shape, sizeof shape));
    QD_TRY(describe_target(call, &t));
    QD_TRY(suggest_training(o, &t, parameters, strrchr(name, '/') ? strrchr(name, '/') + 1 : name));
    qd_status status = choose_layout(o);
    if (status != QD_OK)
        return qd_error_prefix(status, "init: %s on %s: ", name, t.text);
    qd_text_count((double)parameters, count, sizeof count);
    snprintf(model, sizeof model, "%s parameters: %s", count, shape);
    qd_strbuf text = {0};
    status = write_file(o, &t, model, &text);
    if (status == QD_OK)
        status = check_file(path, &text, &report);
    if (status == QD_OK)
        status = cli_write(path, text.data, text.length);
    qd_strbuf_free(&text);
    QD_TRY(status);
    qd_text_bytes(report.memory_bytes, memory, sizeof memory);
    printf("wrote    %s\n", path);
    cli_say("model", 9, "%s, %s", name, model);
    cli_say("machine", 9, "%s", t.text);
    cli_say("layout", 9, report.world == 1 ? "1 rank, %s%s" : "%s, %s per rank", report.world == 1 ? memory : report.layout,
            report.world == 1 ? "" : memory);
    bool found = strcmp(path, "run.yaml") == 0;
    if (strcmp(qd_options_string(o, "data.path"), "text.txt") == 0 && access("text.txt", F_OK) != 0)
        cli_say("next", 9, "set data.path to your text, then: quadrille train%s%s", found ? "" : " ", found ? "" : path);
    else
        cli_say("next", 9, "quadrille train%s%s", found ? "" : " ", found ? "" : path);
    return QD_OK;
}

static const qd_option own[] = {
    {"output", QD_OPTION_STRING, "run.yaml", 0, 0, NULL, "file to write", "o"},
    {"force", QD_OPTION_BOOL, "false", 0, 0, NULL, "replaces an existing file", NULL},
    {"cluster", QD_OPTION_STRING, "", 0, 0, NULL,
     "plans for a built-in cluster (quadrille help clusters) or a YAML file instead of this machine", NULL},
    {"gpus", QD_OPTION_INT, "0", 0, 65536, NULL, "--cluster: number of accelerators; 0: one node", NULL},
};

const cli_command cli_init = {
    .name = "init",
    .arguments = "[PRESET] [key=value …] [-o FILE] [--cluster NAME --gpus N]",
    .summary = "Writes a commented run.yaml for a model and this machine",
    .details = "  quadrille init llama-small data.path=books/\n"
               "  quadrille init llama3.1-8b --cluster h100 --gpus 64 -o big.yaml\n\n"
               "Device, ranks and threads are those of this machine; micro-batch, ZeRO stage, axes and recompute are the first choice "
               "of the planner among the layouts that fit. Learning rate and batch are usual values for the size of the model. "
               "Keys that are given stay as they are. PRESET is a name of quadrille help models; the default is llama-small.",
    CLI_OPTIONS(own),
    .configuration = true,
    .more = qd_cluster_table,
    .own_words = true,
    .run = run,
};
