#include <quadrille/check.h>

#include "spec/config.h"

#include <stdlib.h>
#include <string.h>

/* Ranks with the same local shapes do the same and share a program. */
static bool same_shapes(const qd_ledger *ledger, int a, int b)
{
    for (int i = 0; i < ledger->param_count; i++) {
        qd_atom x = qd_ledger_atom(ledger, i, a), y = qd_ledger_atom(ledger, i, b);
        if (memcmp(x.length, y.length, sizeof x.length) != 0)
            return false;
    }
    return true;
}

/* The program of each rank, one per class of ranks. */
static qd_status build_all(const qd_config *config, qd_arena *arena, const qd_program ***programs)
{
    const qd_program **list = QD_ARENA_NEW(arena, const qd_program *, config->world);
    if (!list)
        return QD_NO_MEMORY;
    for (int rank = 0; rank < config->world; rank++) {
        const qd_program *last = rank > 0 ? list[rank - 1] : NULL;
        if (last && same_shapes(last->ledger, last->rank, rank)) {
            list[rank] = last;
            continue;
        }
        qd_program *program;
        QD_TRY(qd_config_build(config, rank, arena, &program));
        list[rank] = program;
    }
    *programs = list;
    return QD_OK;
}

static void fill_layout(const qd_mesh *mesh, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (int axis = QD_AXIS_COUNT - 1; axis >= 0; axis--) {
        if (mesh->degree[axis] == 1 && !(axis == QD_AXIS_DP && mesh->world == 1))
            continue;
        int n = snprintf(text + used, used < size ? size - used : 0, "%s%s %d", used ? " × " : "", qd_axis_name((qd_axis)axis),
                         mesh->degree[axis]);
        used += n > 0 ? (size_t)n : 0;
    }
}

static qd_status fill_report(const qd_config *config, const qd_program *p, qd_check_report *r)
{
    qd_memory_report memory;
    QD_TRY(qd_memory_account(p, &memory));
    snprintf(r->model, sizeof r->model, "%s", config->model.name);
    fill_layout(&p->ledger->mesh, r->layout, sizeof r->layout);
    r->world = config->world;
    r->parameters = qd_model_parameters(&config->model);
    r->micro_batch = p->strategy.micro_batch;
    r->micro_batches = p->strategy.micro_batches;
    r->seq = p->strategy.seq;
    r->global_batch = config->global_batch;
    r->tokens_per_step = config->global_batch * p->strategy.seq;
    r->flops_per_step = qd_program_flops(p) * config->world;
    r->recompute_flops_per_step = qd_program_recompute_flops(p) * config->world;
    r->comm_bytes = qd_program_comm_bytes(p);
    r->memory_bytes = memory.total;
    r->action_count = p->action_count;
    for (int kind = 0; kind < QD_BUFFER_KIND_COUNT; kind++)
        if (memory.at_peak[kind] > 0)
            r->lines[r->line_count++] = (qd_check_line){qd_buffer_kind_name((qd_buffer_kind)kind), memory.at_peak[kind]};
    if (memory.total > memory.live_peak)
        r->lines[r->line_count++] = (qd_check_line){"lost to packing", memory.total - memory.live_peak};
    return QD_OK;
}

qd_status qd_check(const qd_options *options, int world, qd_check_report *report)
{
    memset(report, 0, sizeof *report);
    qd_config config;
    qd_arena *arena = NULL;
    const qd_program **programs = NULL;
    QD_TRY(qd_config_resolve(options, world, &config));
    QD_TRY(qd_arena_create(&arena));
    qd_status status = build_all(&config, arena, &programs);
    if (status == QD_OK)
        status = qd_check_programs(&programs[0]->ledger->mesh, programs);
    if (status == QD_OK)
        status = fill_report(&config, programs[0], report);
    qd_arena_destroy(arena);
    return status;
}

qd_status qd_check_print(const qd_options *options, int world, int rank, FILE *out)
{
    qd_config config;
    qd_arena *arena = NULL;
    qd_program *program = NULL;
    QD_TRY(qd_config_resolve(options, world, &config));
    if (rank < 0 || rank >= config.world)
        return QD_FAIL(QD_USAGE, "there is no rank %d: the layout has ranks 0 to %d", rank, config.world - 1);
    QD_TRY(qd_arena_create(&arena));
    qd_status status = qd_config_build(&config, rank, arena, &program);
    if (status == QD_OK)
        qd_program_print(program, out);
    qd_arena_destroy(arena);
    return status;
}
