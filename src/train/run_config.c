/* The configuration of a run as it was asked for and as it was understood: config.yaml and effective.yaml of a run folder. */
#include "train/run.h"

#include "base/strbuf.h"

#include <stdio.h>

/* Collects the first failure, so that the list of keys below reads as a list. */
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

static void put_float(resolver *r, const char *key, double value)
{
    char text[QD_DOUBLE_TEXT];
    qd_double_shortest(value, text);
    put_text(r, key, text);
}

static void put_bool(resolver *r, const char *key, bool value)
{
    put_text(r, key, value ? "true" : "false");
}

static void put_moe(resolver *r, const qd_moe *e)
{
    put_int(r, "model.experts_per_token", e->per_token);
    put_int(r, "model.expert_ffn", e->ffn);
    put_int(r, "model.shared_experts", e->shared);
    put_int(r, "model.first_dense", e->first_dense);
    put_text(r, "model.router", e->router == QD_ROUTER_SIGMOID ? "sigmoid" : "softmax");
    put_bool(r, "model.router_normalised", e->normalised);
    put_float(r, "model.router_scale", e->scale);
    put_int(r, "model.router_groups", e->groups);
    put_int(r, "model.router_top_groups", e->top_groups);
    put_bool(r, "model.router_bias", e->bias);
    put_float(r, "model.router_bias_rate", e->bias_rate);
    put_float(r, "model.aux_loss", e->aux_loss);
    put_text(r, "model.balance", e->balance == QD_BALANCE_BATCH ? "batch" : "sequence");
    put_float(r, "model.z_loss", e->z_loss);
    put_float(r, "model.expert_capacity", e->capacity);
    put_text(r, "model.drop", e->drop == QD_DROP_LEAST ? "least" : "last");
}

/* A preset becomes its dimensions: the file must mean the same when presets change. */
static void put_model(resolver *r, const qd_model *m)
{
    static const char *const activations[] = {
        [QD_ACT_GELU_TANH] = "gelu_tanh", [QD_ACT_GELU] = "gelu", [QD_ACT_SWIGLU] = "swiglu"};
    put_text(r, "model.preset", "");
    put_text(r, "model.arch", qd_arch_name(m->arch));
    put_int(r, "model.layers", m->layers);
    put_int(r, "model.hidden", m->hidden);
    put_int(r, "model.heads", m->heads);
    put_int(r, "model.kv_heads", m->kv_heads);
    put_int(r, "model.head_dim", m->head_dim);
    put_int(r, "model.ffn", m->ffn);
    put_int(r, "model.vocab", m->vocab);
    put_int(r, "model.max_seq", m->max_seq);
    put_float(r, "model.norm_eps", m->norm_eps);
    put_float(r, "model.rope_base", m->rope.base);
    put_text(r, "model.rope_scaling", m->rope.scaled ? "llama3" : "none");
    if (m->rope.scaled) {
        put_float(r, "model.rope_factor", m->rope.factor);
        put_float(r, "model.rope_low_factor", m->rope.low_factor);
        put_float(r, "model.rope_high_factor", m->rope.high_factor);
        put_int(r, "model.rope_original_seq", m->rope.original_seq);
    }
    put_text(r, "model.activation", activations[m->activation]);
    put_bool(r, "model.qk_norm", m->qk_norm);
    put_bool(r, "model.qkv_bias", m->qkv_bias);
    put_bool(r, "model.linear_bias", m->linear_bias);
    put_bool(r, "model.tied", m->tied);
    put_float(r, "model.dropout", m->dropout);
    put_float(r, "model.init_std", m->init_std);
    put_int(r, "model.experts", m->moe.experts);
    if (m->moe.experts > 0)
        put_moe(r, &m->moe);
}

/* What the layout of this start has decided. */
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
    put_model(&r, &config->model);
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
        put_model(&r, &config->model);
    if (!program && !qd_options_is_set(options, "parallel.ranks"))
        qd_options_leave_out(r.options, "parallel.ranks"); /* mpirun or srun may decide it */
    if (config->pipeline.file && config->pipeline.file[0] != '\0')
        put_text(&r, "parallel.schedule", "file");
    /* A copy of the file must not replace a run by itself. */
    put_bool(&r, "run.overwrite", false);
    put_bool(&r, "run.resume", false);
    if (r.status == QD_OK)
        r.status = qd_options_to_yaml(r.options, text);
    qd_options_destroy(r.options);
    return r.status;
}
