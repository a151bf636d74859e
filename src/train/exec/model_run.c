/* Opens a run folder or a checkpoint, and runs its model on the ranks of a world. */
#include "train/exec/model_run.h"

#include "data/chat/chat.h"
#include "train/exec/state.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef char file_path[PATH_MAX];

static bool exists(const char *folder, const char *name, file_path path)
{
    struct stat info;
    return (size_t)snprintf(path, sizeof(file_path), "%s/%s", folder, name) < sizeof(file_path) && stat(path, &info) == 0;
}

static qd_status open_newest(const char *root, qd_checkpoint **checkpoint, char warning[QD_MODEL_WARNING])
{
    char *skipped = NULL;
    qd_status status = qd_store_open(root, INT64_MAX, true, checkpoint, &skipped);
    if (status == QD_OK && skipped)
        snprintf(warning, QD_MODEL_WARNING, "an older checkpoint is used, %.300s, because newer ones are damaged: %.600s",
                 qd_checkpoint_folder(*checkpoint), skipped);
    free(skipped);
    return status;
}

/* A checkpoint that was copied out of its run folder is treated as its own run folder. */
qd_status qd_model_checkpoint_open(const char *path, qd_checkpoint **checkpoint, char *folder, char warning[QD_MODEL_WARNING])
{
    file_path inner;
    struct stat info;
    warning[0] = '\0';
    if (stat(path, &info) != 0)
        return QD_FAIL(QD_USAGE, "%s: %s; give a run folder or a checkpoint", path, strerror(errno));
    bool single = exists(path, "manifest.json", inner);
    if (!single && !exists(path, "checkpoints", inner) && exists(path, "config.json", inner))
        return QD_FAIL(QD_USAGE, "%s: is a Hugging Face folder: 'quadrille convert %s RUN' converts it to a run folder", path, path);
    if (!single && !exists(path, "checkpoints", inner) && exists(path, "adapter_config.json", inner))
        return QD_FAIL(QD_USAGE, "%s: holds adapters in PEFT's format: 'quadrille convert %s RUN' converts them to a run folder", path,
                       path);
    if (!single && !exists(path, "checkpoints", inner))
        return QD_FAIL(QD_USAGE, "%s: is neither a run folder with checkpoints nor a checkpoint (train with --dir)", path);
    QD_TRY(single ? qd_checkpoint_open(path, checkpoint) : open_newest(inner, checkpoint, warning));
    snprintf(folder, PATH_MAX, "%s", path);
    file_path above;
    if (single && exists(path, "../../config.yaml", inner) && exists(path, "../..", above) && !realpath(above, folder))
        return QD_FAIL(QD_IO, "%s: %s", above, strerror(errno));
    return QD_OK;
}

/* Prefers the run folder's own tokenizer and chat template: the files that the configuration names
 * may have changed since. */
static void find_tokenizer(qd_model_run *run)
{
    qd_data_config *data = &run->config.data;
    const char *trained = data->tokenizer;
    if (run->folder[0] != '\0' && exists(run->folder, "tokenizer.json", run->tokenizer)) {
        data->tokenizer = run->tokenizer;
        if (qd_chat_find(run->tokenizer, run->chat_template)) {
            data->chat_template = run->chat_template;
        } else if (data->chat_template[0] == '\0' && trained[0] != '\0') {
            qd_chat_find(trained, run->chat_template);
            data->chat_template = run->chat_template;
        }
    }
    else if (data->tokenizer[0] == '\0' && run->config.model.vocab == 256)
        data->tokenizer = "bytes";
}

static qd_status open_checkpoint(const char *path, qd_model_run *run)
{
    qd_option_table table = qd_config_table();
    QD_TRY(qd_model_checkpoint_open(path, &run->checkpoint, run->folder, run->warning));
    QD_TRY(qd_options_create(&table, 1, &run->options));
    const qd_ckpt_meta *meta = qd_checkpoint_meta(run->checkpoint);
    QD_TRY(qd_options_load_text(run->options, path, meta->config, strlen(meta->config)));
    run->name = path;
    run->step = meta->step;
    return qd_config_resolve(run->options, 0, &run->config);
}

static qd_status open_weights(const qd_model_source *source, qd_model_run *run)
{
    run->name = "the session";
    run->weights = source->weights;
    run->step = source->step;
    run->config = *source->config;
    snprintf(run->folder, sizeof run->folder, "%s", source->config->run_dir);
    return qd_options_copy(source->options, &run->options);
}

static qd_status set_precision(const qd_model_source *source, qd_strategy *s)
{
    const char *name = source->precision ? source->precision : "";
    bool bf16 = strcmp(name, "bf16") == 0;
    if (name[0] == '\0')
        return QD_OK;
    if (!bf16 && strcmp(name, "fp32") != 0)
        return QD_FAIL(QD_USAGE, "the precision '%s' is unknown: fp32 or bf16", name);
    s->param = s->activation = s->grad = bf16 ? QD_BF16 : QD_F32;
    return QD_OK;
}

static qd_status set_layout(const qd_model_source *source, const char *name, qd_config *c)
{
    int world = qd_comm_size(source->world);
    c->world = world;
    c->degrees[QD_AXIS_TP] = source->tp;
    c->degrees[QD_AXIS_PP] = source->pp;
    c->degrees[QD_AXIS_DP] = world / (source->tp * source->pp);
    c->ep = source->ep;
    if (c->ep > 1 && c->model.moe.experts == 0)
        return QD_FAIL(QD_USAGE, "%s: the model has no experts to place on %d ranks: omit ep", name, c->ep);
    return QD_OK;
}

qd_status qd_model_run_open(const qd_model_source *source, const char *device, qd_model_run *run)
{
    memset(run, 0, sizeof *run);
    QD_TRY(source->path ? open_checkpoint(source->path, run) : open_weights(source, run));
    run->trained = run->config;
    /* The layout of the source, wherever and however it was trained. */
    run->config.evaluation.every = 0;
    run->config.evaluation.seconds = 0.0;
    run->config.strategy.preference = (qd_preference){0}; /* losses are those of tokens */
    run->config.device = device && device[0] ? device : "cpu";
    run->config.strategy.traits = qd_device_traits_find(run->config.device);
    QD_TRY(set_precision(source, &run->config.strategy));
    run->config.gpu = -1;
    run->config.world = run->config.ep = run->config.etp = run->config.nodes = 1;
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        run->config.degrees[axis] = 1;
    run->config.pipeline = (qd_pipeline){0};
    run->config.sp = run->config.by_node = false;
    run->world = source->world;
    if (source->world)
        QD_TRY(set_layout(source, run->name, &run->config));
    run->config.model.dropout = 0.0;
    run->config.strategy.training = false;
    run->config.global_batch = run->config.strategy.micro_batch = 1;
    run->config.run_dir = run->folder;
    find_tokenizer(run);
    return QD_OK;
}

qd_status qd_model_run_start(qd_model_run *run, const qd_batch_source *source)
{
    qd_comm_config comm = qd_comm_config_default();
    if (!run->world) {
        QD_TRY(qd_local_world_create(1, &comm, &run->local));
        QD_TRY(qd_local_comm_attach(run->local, 0, &run->world));
    }
    QD_TRY(qd_trainer_create_blank(&run->config, run->world, source, &run->trainer));
    return run->checkpoint ? qd_state_load(run->trainer, run->checkpoint, true) : qd_weights_copy_load(run->weights, run->trainer);
}

void qd_model_run_close(qd_model_run *run)
{
    qd_trainer_destroy(run->trainer);
    if (run->local) {
        qd_comm_destroy(run->world);
        qd_local_world_destroy(run->local);
    }
    qd_options_destroy(run->options);
    qd_checkpoint_close(run->checkpoint);
    memset(run, 0, sizeof *run);
}
