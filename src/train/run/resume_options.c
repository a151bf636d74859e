/* Which keys of a saved configuration still hold when a run resumes. The run is the run it was:
 * what was saved stands below what is given now. Another number of ranks or another degree is
 * another layout, though, and what the saved one had of a layout counts only as far as it fits. */
#include "train/run/resume_options.h"

#include <quadrille/config.h>

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* On the command line, or with qd_options_set() and qd_options_assign(): not by a file. */
static bool given(const qd_options *options, const char *key)
{
    return strcmp(qd_options_origin(options, key), "command line") == 0;
}

/* A key that is not given reverts to its value without the saved configuration. */
static qd_status forget(qd_options *options, const char *key, const char *value)
{
    return given(options, key) ? QD_OK : qd_options_set(options, key, value);
}

static bool divides(int64_t part, int64_t whole)
{
    return part > 0 && whole > 0 && whole % part == 0;
}

static const char *const degrees[] = {"parallel.dp", "parallel.tp", "parallel.pp", "parallel.cp"};
enum { DEGREES = sizeof degrees / sizeof *degrees };

/* Of tp, pp and cp together; below 0 where one of them is the rest of the world. */
static int64_t model_degree(const qd_options *options)
{
    int64_t product = 1;
    for (int i = 1; i < DEGREES; i++)
        product *= qd_options_int(options, degrees[i]);
    return product;
}

/* The data-parallel degree in a world; 0: not known. */
static int64_t data_degree(const qd_options *options, int64_t world)
{
    int64_t dp = qd_options_int(options, "parallel.dp"), model = model_degree(options);
    return dp > 0 ? dp : model > 0 ? world / model : 0;
}

/* Whether the degrees make up the world. Where one is open, they are not to blame. */
static bool degrees_fit(const qd_options *options, int64_t world)
{
    int64_t dp = qd_options_int(options, "parallel.dp"), model = model_degree(options);
    return model < 0 || (dp > 0 ? dp * model == world : divides(model, world));
}

/* Another number of ranks, or another degree along with it, is another layout: the saved degrees
 * do not hold for it. A degree alone changes the data-parallel one first, and the others where
 * that is not enough. *other: whether anything differs. saved: the layout that the run had last. */
static qd_status forget_degrees(qd_options *options, const qd_options *saved, int64_t world, bool counted, bool *other)
{
    *other = world != qd_options_int(saved, "parallel.ranks");
    for (int i = 0; i < DEGREES; i++)
        *other = *other || (given(options, degrees[i]) &&
                            (counted || qd_options_int(options, degrees[i]) != qd_options_int(saved, degrees[i])));
    if (!*other)
        return QD_OK;
    QD_TRY(forget(options, "parallel.dp", "-1"));
    if (!counted && world == qd_options_int(saved, "parallel.ranks") && degrees_fit(options, world))
        return QD_OK;
    for (int i = 1; i < DEGREES; i++)
        QD_TRY(forget(options, degrees[i], "1"));
    return QD_OK;
}

/* Groups that keep parameters between the passes are parts of a sharded copy. */
static qd_status forget_reshard(qd_options *options, const qd_options *saved, int64_t dp)
{
    int64_t group = strtoll(qd_options_string(saved, "parallel.reshard_after_forward"), NULL, 10); /* 0: true or false */
    int64_t shard = qd_options_int(options, "parallel.dp_shard"), cp = qd_options_int(options, "parallel.cp");
    return group == 0 || divides(group, (shard > 0 ? shard : dp) * cp) ? QD_OK : forget(options, "parallel.reshard_after_forward", "true");
}

/* Drops what no longer fits of the rest of the layout. world: ranks of this start; counted: the
 * caller, mpirun or srun says how many. */
static qd_status forget_layout(qd_options *options, const qd_options *saved, int64_t world, bool counted)
{
    bool other;
    QD_TRY(forget_degrees(options, saved, world, counted, &other));
    if (!other)
        return QD_OK;
    int64_t batch = qd_options_int(options, "train.global_batch"), micro = qd_options_int(options, "train.micro_batch");
    int64_t dp = data_degree(options, world), pp = qd_options_int(options, "parallel.pp");
    if (micro > 0 && (!divides(dp, batch) || !divides(micro, batch / dp)))
        QD_TRY(forget(options, "train.micro_batch", "0"));
    if (!divides(qd_options_int(saved, "parallel.dp_shard"), dp))
        QD_TRY(forget(options, "parallel.dp_shard", "-1"));
    QD_TRY(forget_reshard(options, saved, dp));
    int64_t experts = qd_options_int(saved, "parallel.ep") * qd_options_int(saved, "parallel.etp");
    int64_t tp = qd_options_int(options, "parallel.tp");
    if (!divides(experts, pp > 0 ? world / pp : 0) || (tp > 0 && !divides(experts, tp) && !divides(tp, experts))) {
        QD_TRY(forget(options, "parallel.ep", "1"));
        QD_TRY(forget(options, "parallel.etp", "1"));
    }
    if (!divides(qd_options_int(saved, "parallel.nodes"), world))
        QD_TRY(forget(options, "parallel.nodes", "1"));
    if (pp == qd_options_int(saved, "parallel.pp"))
        return QD_OK;
    QD_TRY(forget(options, "parallel.virtual_stages", "0"));
    QD_TRY(forget(options, "parallel.layers", ""));
    if (qd_options_string(saved, "parallel.schedule_file")[0] == '\0' || given(options, "parallel.schedule_file"))
        return QD_OK;
    QD_TRY(forget(options, "parallel.schedule", "1f1b"));
    return forget(options, "parallel.schedule_file", "");
}

/* Where the batch alone differs: a micro-batch that does not divide it was most likely chosen
 * for the one before, and is chosen anew. */
static qd_status forget_micro_batch(qd_options *options, int64_t world)
{
    int64_t dp = data_degree(options, world), batch = qd_options_int(options, "train.global_batch");
    int64_t micro = qd_options_int(options, "train.micro_batch");
    bool fits = micro == 0 || !divides(dp, batch) || divides(micro, batch / dp);
    return given(options, "train.global_batch") && !fits ? forget(options, "train.micro_batch", "0") : QD_OK;
}

/* A preset that is given, as when the first call is repeated, is that model and not the saved one;
 * whether they are the same is seen when the checkpoint is read. */
static qd_status forget_model(qd_options *options)
{
    qd_option_table table = qd_config_table();
    for (int i = 0; given(options, "model.preset") && i < table.count; i++)
        if (strncmp(table.options[i].key, "model.", 6) == 0)
            QD_TRY(qd_options_forget(options, table.options[i].key));
    return QD_OK;
}

/* Of a schedule and a file with one, the one that is given counts. */
static qd_status forget_schedule(qd_options *options)
{
    if (given(options, "parallel.schedule_file") && qd_options_string(options, "parallel.schedule_file")[0] != '\0')
        return forget(options, "parallel.schedule", "file");
    return given(options, "parallel.schedule") ? forget(options, "parallel.schedule_file", "") : QD_OK;
}

/* The layout that the run had last, with everything filled in. */
static qd_status load_effective(const char *dir, qd_options **saved)
{
    char path[PATH_MAX];
    qd_option_table table = qd_config_table();
    QD_TRY(qd_options_create(&table, 1, saved));
    snprintf(path, sizeof path, "%s/effective.yaml", dir);
    if (access(path, R_OK) != 0) /* earlier versions had one file */
        snprintf(path, sizeof path, "%s/config.yaml", dir);
    return qd_options_load(*saved, path);
}

qd_status qd_resume_options(qd_options *options, int launched)
{
    char path[PATH_MAX];
    const char *dir = qd_options_string(options, "run.dir");
    if (!qd_options_bool(options, "run.resume") || dir[0] == '\0')
        return QD_OK;
    snprintf(path, sizeof path, "%s/config.yaml", dir);
    if (access(path, R_OK) != 0)
        return QD_OK; /* what starts the run says what is missing */
    QD_TRY(qd_options_load(options, path));
    QD_TRY(forget_model(options));
    bool joins = launched > 0 && strcmp(qd_options_string(options, "run.backend"), "local") != 0;
    if (joins) /* as many as there are now; how many the run had before does not matter */
        QD_TRY(qd_options_forget(options, "parallel.ranks"));
    bool given_ranks = given(options, "parallel.ranks");
    int64_t world = joins && !given_ranks ? launched : qd_options_int(options, "parallel.ranks");
    qd_options *saved = NULL;
    qd_status status = load_effective(qd_options_string(options, "run.dir"), &saved);
    if (status == QD_OK)
        status = forget_layout(options, saved, world, joins || given_ranks);
    if (status == QD_OK)
        status = forget_micro_batch(options, world);
    if (status == QD_OK)
        status = forget_schedule(options);
    qd_options_destroy(saved);
    return status;
}
