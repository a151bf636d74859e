#include "train/model_run.h"

#include "train/state.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static bool exists(const char *folder, const char *name, char *path, size_t size)
{
    struct stat info;
    return (size_t)snprintf(path, size, "%s/%s", folder, name) < size && stat(path, &info) == 0;
}

static qd_status open_checkpoint(const char *path, qd_checkpoint **checkpoint)
{
    char inner[4096];
    if (exists(path, "manifest.json", inner, sizeof inner))
        return qd_checkpoint_open(path, checkpoint);
    if (exists(path, "checkpoints", inner, sizeof inner))
        return qd_store_open(inner, checkpoint, NULL);
    return QD_FAIL(QD_USAGE, "%s: is neither a run folder with checkpoints nor a checkpoint", path);
}

qd_status qd_model_run_open(const char *path, qd_model_run *run)
{
    memset(run, 0, sizeof *run);
    qd_option_table table = qd_config_table();
    QD_TRY(open_checkpoint(path, &run->checkpoint));
    QD_TRY(qd_options_create(&table, 1, &run->options));
    const char *config = qd_checkpoint_meta(run->checkpoint)->config;
    QD_TRY(qd_options_load_text(run->options, path, config, strlen(config)));
    QD_TRY(qd_config_resolve(run->options, 0, &run->config));
    run->config.world = 1;
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        run->config.degrees[axis] = 1;
    run->config.model.dropout = 0.0;
    run->config.strategy.training = false;
    run->config.global_batch = run->config.strategy.micro_batch = 1;
    return QD_OK;
}

qd_status qd_model_run_start(qd_model_run *run, const qd_batch_source *source)
{
    qd_comm_config comm = qd_comm_config_default();
    QD_TRY(qd_local_world_create(1, &comm, &run->local));
    QD_TRY(qd_local_comm_attach(run->local, 0, &run->world));
    QD_TRY(qd_trainer_create(&run->config, run->world, 1, source, &run->trainer));
    return qd_state_load(run->trainer, run->checkpoint, true);
}

void qd_model_run_close(qd_model_run *run)
{
    qd_trainer_destroy(run->trainer);
    qd_comm_destroy(run->world);
    if (run->local)
        qd_local_world_destroy(run->local);
    qd_options_destroy(run->options);
    qd_checkpoint_close(run->checkpoint);
    memset(run, 0, sizeof *run);
}
