/* Derives the configuration of generation from that of a model's training. */
#include "spec/config/generation.h"

#include <string.h>

qd_status qd_generation_config(const qd_config *config, int64_t context, int64_t rows, qd_config *generation)
{
    qd_config c = *config;
    qd_mesh mesh;
    QD_TRY(qd_mesh_create(c.world, c.degrees, &mesh)); /* one of the degrees may be open */
    int cp = mesh.degree[QD_AXIS_CP];
    memcpy(c.degrees, mesh.degree, sizeof c.degrees);
    c.evaluation = (qd_evaluation_config){.path = ""};
    c.model.dropout = 0.0;
    c.strategy.training = false;
    c.strategy.micro_batch = 1;
    c.strategy.seq = rows;
    c.strategy.context = context;
    c.strategy.preference = (qd_preference){0};
    c.sp = false; /* one token has no rows for several ranks */
    c.pipeline.seq = config->pipeline.seq > 0 ? config->pipeline.seq : config->strategy.seq;
    c.degrees[QD_AXIS_CP] = 1; /* ranks of dp and cp share parameters alike */
    c.degrees[QD_AXIS_DP] *= cp;
    c.strategy.shard *= cp;
    c.global_batch = c.degrees[QD_AXIS_DP];
    *generation = c;
    return QD_OK;
}

qd_status qd_generation_context(const qd_config *c, int64_t *context)
{
    bool learned = c->model.position == QD_POSITION_LEARNED;
    int64_t longest = learned ? c->model.max_seq : qd_positions(c->strategy.seq, c->strategy.context);
    if (learned && *context > longest)
        return QD_FAIL(QD_USAGE, "a context of %lld tokens is longer than the model's %lld positions", (long long)*context,
                       (long long)longest);
    if (*context == 0)
        *context = longest;
    return QD_OK;
}

qd_status qd_generation_attach(const qd_config *config, int rank, qd_arena *arena, qd_program *program)
{
    int64_t context = config->strategy.seq;
    qd_config c;
    qd_program *single, *pieces;
    QD_TRY(qd_generation_context(config, &context));
    QD_TRY(qd_generation_config(config, context, 1, &c));
    QD_TRY(qd_config_build(&c, rank, arena, &single));
    program->sample_bytes = qd_memory_beside(single, program);
    if (context < QD_GENERATION_PIECE)
        return QD_OK;
    QD_TRY(qd_generation_config(config, context, QD_GENERATION_PIECE, &c));
    QD_TRY(qd_config_build(&c, rank, arena, &pieces));
    program->sample_bytes += qd_memory_beside(pieces, single);
    return QD_OK;
}
