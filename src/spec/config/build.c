/* From a resolved configuration to placed parameters and the programs of a rank. What depends on
 * the mesh is checked here: the length of programs, and how the global batch is shared. */
#include "spec/config/config.h"

#include "spec/config/generation.h"

/* A program takes 2 to 6 KB for each module of each micro-batch (measured: plain 2.3, ZeRO 3 with
 * recompute 4.7, with ZB-V 6.2 for all stages). The limit keeps it within about 2 GB. Must be
 * checked before the schedule is created, because that has turns for all of them. */
static qd_status check_length(const qd_config *c, const qd_strategy *s, int64_t share)
{
    enum { MOST_PASSES = 400000 }; /* model.layers is at most a quarter of it */
    int64_t modules = c->model.layers + 2, most = MOST_PASSES / modules, count = share / s->micro_batch, fewer = most;
    if (count <= most)
        return QD_OK;
    while (fewer > 1 && share % fewer != 0)
        fewer--;
    return QD_FAIL(QD_USAGE,
                   "train.global_batch=%lld with train.micro_batch=%lld makes %lld micro-batches per rank, and a step of %lld layers has "
                   "at most %lld: set train.micro_batch to %lld, or lower train.global_batch, which counts sequences, not tokens",
                   (long long)c->global_batch, (long long)s->micro_batch, (long long)count, (long long)c->model.layers, (long long)most,
                   (long long)(share / fewer));
}

/* Divides the global batch evenly: sequences per rank, then micro-batches. */
static qd_status share_batch(const qd_config *c, const qd_mesh *mesh, qd_strategy *s)
{
    int dp = mesh->degree[QD_AXIS_DP];
    if (c->global_batch < dp)
        return QD_FAIL(QD_USAGE,
                       "train.global_batch (%lld) is less than the data-parallel degree (%d), and each of its ranks computes a sequence: "
                       "use a multiple of %d",
                       (long long)c->global_batch, dp, dp);
    if (c->global_batch % dp != 0)
        return QD_FAIL(QD_USAGE, "train.global_batch (%lld) is not a multiple of the data-parallel degree (%d): use %lld or %lld",
                       (long long)c->global_batch, dp, (long long)(c->global_batch / dp * dp),
                       (long long)((c->global_batch / dp + 1) * dp));
    int64_t share = c->global_batch / dp;
    if (s->micro_batch == 0)
        s->micro_batch = share;
    if (s->micro_batch > share || share % s->micro_batch != 0)
        return QD_FAIL(QD_USAGE, "train.micro_batch (%lld) does not divide the %lld sequences of a rank (global batch %lld on dp %d)",
                       (long long)s->micro_batch, (long long)share, (long long)c->global_batch, dp);
    if (s->micro_batch * s->seq > INT32_MAX)
        return QD_FAIL(QD_USAGE, "a micro-batch of %lld x %lld tokens is too large: set a smaller train.micro_batch, or lower "
                                 "train.global_batch, which counts sequences, not tokens", (long long)s->micro_batch,
                       (long long)s->seq);
    const qd_model *m = &c->model;
    double row = 8.0 * (double)m->hidden + 4.0 * (double)m->heads * m->head_dim + 6.0 * (double)m->ffn;
    if ((double)s->micro_batch * (double)s->seq * row * (m->layers + 2.0) * 4.0 > 1e18)
        return QD_FAIL(QD_USAGE, "the activations of a micro-batch of %lld x %lld tokens exceed any machine: lower train.micro_batch or "
                                 "data.seq", (long long)s->micro_batch, (long long)s->seq);
    QD_TRY(check_length(c, s, share));
    s->micro_batches = (int)(share / s->micro_batch);
    return QD_OK;
}

qd_status qd_config_place(const qd_config *config, qd_arena *arena, qd_ledger **ledger, qd_strategy *strategy)
{
    qd_mesh mesh;
    *strategy = config->strategy;
    QD_TRY(qd_mesh_create(config->world, config->degrees, &mesh));
    mesh.sp = config->sp && mesh.degree[QD_AXIS_TP] > 1;
    mesh.forward = !config->strategy.training;
    mesh.ep = config->ep;
    mesh.etp = config->etp;
    mesh.nodes = config->nodes;
    mesh.by_node = config->by_node;
    enum { GPU_BLOCKS = 1024 }; /* row ranges per grouped GEMM, one per expert and source rank */
    if (config->model.moe.experts * config->etp > GPU_BLOCKS && strcmp(config->device, "cpu") != 0)
        return QD_FAIL(QD_UNSUPPORTED, "on a GPU model.experts times parallel.etp may be at most %d; they are %d and %d", GPU_BLOCKS,
                       config->model.moe.experts, config->etp);
    QD_TRY(share_batch(config, &mesh, strategy));
    QD_TRY(qd_ledger_create(&config->model, config->family, &mesh, arena, ledger));
    QD_TRY(qd_fp8_check_layers(config, *ledger));
    return qd_pipeline_place(*ledger, &config->pipeline, strategy->seq, strategy->micro_batches, strategy->training, arena,
                             &strategy->schedule);
}

/* Forward passes over the windows of a global batch, on the same mesh. */
static qd_status build_evaluation(const qd_config *config, int rank, qd_arena *arena, qd_program *program)
{
    qd_config c = *config;
    qd_program *evaluation;
    c.evaluation = (qd_evaluation_config){.path = ""};
    c.model.dropout = 0.0;
    c.strategy.training = false;
    QD_TRY(qd_config_build(&c, rank, arena, &evaluation));
    return qd_memory_attach(program, evaluation);
}

qd_status qd_config_build(const qd_config *config, int rank, qd_arena *arena, qd_program **program)
{
    qd_ledger *ledger;
    qd_strategy strategy;
    QD_TRY(qd_config_place(config, arena, &ledger, &strategy));
    QD_TRY(qd_program_create(ledger, &strategy, rank, arena, program));
    const bool evaluates = qd_config_validates(config) || strategy.preference.kind; /* of pairs: also the reference model */
    if (strategy.training && evaluates)
        QD_TRY(build_evaluation(config, rank, arena, *program));
    if (!strategy.training || config->samples.every <= 0)
        return QD_OK;
    qd_status status = qd_generation_attach(config, rank, arena, *program);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "run.sample_every: ");
}
