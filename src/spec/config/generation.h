/* Programs that continue a text: their configuration, and the memory that they need next to a
 * training step. */
#ifndef QD_SPEC_CONFIG_GENERATION_H
#define QD_SPEC_CONFIG_GENERATION_H

#include "spec/config/config.h"

/* The configuration of a program that adds `rows` tokens to a sequence of at most `context`: the
 * mesh and the storage of parameters are those of `config`. Ranks of cp compute like ranks of dp,
 * all of them the same sequence. */
qd_status qd_generation_config(const qd_config *config, int64_t context, int64_t rows, qd_config *generation);
/* QD_USAGE if the model has fewer positions; context 0 becomes the longest that the model was
 * trained for. */
qd_status qd_generation_context(const qd_config *config, int64_t *context);

/* Adds to a step program the memory of sample texts (run.sample_every): of the programs that
 * generate them, what the buffers of the step program do not serve. */
qd_status qd_generation_attach(const qd_config *config, int rank, qd_arena *arena, qd_program *program);
#endif
