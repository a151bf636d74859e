/* The configuration of a run as it was given and as it was resolved: config.yaml and effective.yaml
 * of a run folder. */
#include "train/run/run.h"

#include "model/field_table.h"

#include <stdio.h>

/* Keeps the first failure, so that the keys below read as a list. */
typedef struct resolver {
    qd_options *options;
    qd_status status;
} resolver;

static void put_text(resolver *r, const char *key, const char *value)
{
    if (r->status == QD_OK)
        r->status = qd_options_resolve(r->options, key, value);
}

static void put_int(resolver *r, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld", (long long)value);
    put_text(r, key, text);
}

static void put_bool(resolver *r, const char *key, bool value)
{
    put_text(r, key, value ? "true" : "false");
}

/* Values that the layout of this start has decided. */
static void put_layout(resolver *r, const qd_config *config, const qd_program *program)
{
    static const char *const degrees[QD_AXIS_COUNT] = {"parallel.tp", "parallel.cp", "parallel.dp", "parallel.pp"};
    put_int(r, "train.micro_batch", program->strategy.micro_batch);
    put_int(r, "parallel.ranks", config->world);
    for (int axis = 0; axis < QD_AXIS_COUNT; axis++)
        put_int(r, degrees[axis], program->ledger->mesh.degree[axis]);
}

qd_status qd_run_config_values(const qd_options *options, const qd_config *config, qd_options **values)
{
    resolver r = {0};
    QD_TRY(qd_options_copy(options, &r.options));
    r.status = qd_model_put(&config->model, r.options);
    put_text(&r, "train.grad_dtype", qd_dtype_name(config->strategy.grad));
    if (r.status != QD_OK) {
        qd_options_destroy(r.options);
        return r.status;
    }
    *values = r.options;
    return QD_OK;
}

qd_status qd_run_config_text(const qd_options *options, const qd_config *config, const qd_program *program, char **text)
{
    resolver r = {0};
    QD_TRY(program ? qd_run_config_values(options, config, &r.options) : qd_options_copy(options, &r.options));
    if (program)
        put_layout(&r, config, program);
    else
        r.status = qd_model_put(&config->model, r.options);
    if (!program && !qd_options_is_set(options, "parallel.ranks"))
        qd_options_leave_out(r.options, "parallel.ranks"); /* mpirun or srun may set it */
    if (program) {
        put_int(&r, "train.steps", config->steps);
        put_text(&r, "train.epochs", "0");
    } else if (config->epochs > 0.0) {
        qd_options_leave_out(r.options, "train.steps");
    } else {
        put_text(&r, "train.epochs", "0"); /* train.steps of the command line overrides it */
    }
    if (config->pipeline.file && config->pipeline.file[0] != '\0')
        put_text(&r, "parallel.schedule", "file");
    /* Training with a copy of the file must not replace or resume a run by accident. */
    put_bool(&r, "run.overwrite", false);
    put_bool(&r, "run.resume", false);
    if (r.status == QD_OK)
        r.status = qd_options_to_yaml(r.options, text);
    qd_options_destroy(r.options);
    return r.status;
}
