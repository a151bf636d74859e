/* Builds and binds a second program on the weights of a trainer. */
#include "train/generate/side_program.h"

#include <string.h>

/* Where the programs have another number of positions, the rotary table is not shared. */
qd_status qd_side_program_turn(const qd_bound *bound, int64_t length)
{
    int table = bound->program->persistent[QD_BUFFER_TABLE];
    return table >= 0 && !bound->borrowed[table] ? qd_rope_fill(bound, length) : QD_OK;
}

qd_status qd_side_program_open(qd_trainer *trainer, const qd_bound *share, const qd_config *config, qd_side_program *side)
{
    qd_comm *world = qd_trainer_world(trainer);
    memset(side, 0, sizeof *side);
    QD_TRY(qd_arena_create(&side->arena));
    QD_TRY(qd_config_build(config, qd_comm_rank(world), side->arena, &side->program));
    QD_TRY(qd_bind(side->program, qd_trainer_device(trainer), world, qd_trainer_data(trainer), share, &side->bound));
    QD_TRY(qd_side_program_turn(side->bound, 0));
    return qd_interpreter_create(side->bound, &side->interpreter);
}

void qd_side_program_close(qd_side_program *side)
{
    qd_interpreter_destroy(side->interpreter);
    qd_bound_destroy(side->bound);
    qd_arena_destroy(side->arena);
    memset(side, 0, sizeof *side);
}
