/* A second program that shares the weights of a trainer, for passes of another shape. */
#ifndef QD_TRAIN_GENERATE_SIDE_PROGRAM_H
#define QD_TRAIN_GENERATE_SIDE_PROGRAM_H

#include "train/exec/trainer.h"

typedef struct qd_side_program {
    qd_arena *arena;
    qd_program *program;
    qd_bound *bound;
    qd_interpreter *interpreter;
} qd_side_program;

/* Collective over the trainer's world. Builds the program of `config` and binds it to the memory of
 * `share`, which is the trainer's bound or that of another side program: persistent buffers of the
 * same kind and size are shared, the others are allocated. Close it before `share` and the trainer,
 * also if opening it failed. */
qd_status qd_side_program_open(qd_trainer *trainer, const qd_bound *share, const qd_config *config, qd_side_program *side);
void qd_side_program_close(qd_side_program *side);
/* Fills the rotary table for sequences of this length (qd_rope_fill), unless it is shared: then the
 * other program's is the one to fill. */
qd_status qd_side_program_turn(const qd_bound *bound, int64_t length);
#endif
