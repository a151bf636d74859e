/* A generator: continues a sequence of tokens with the weights of a trainer and a KV cache, on the
 * trainer's layout. */
#ifndef QD_TRAIN_GENERATE_GENERATOR_H
#define QD_TRAIN_GENERATE_GENERATOR_H

#include "spec/config/generation.h"
#include "train/exec/trainer.h"

typedef struct qd_generator qd_generator;

/* Collective over the trainer's world, as is destroy. The trainer may train: what follows
 * uses its weights of the moment and runs between its steps. A trainer that was created with
 * qd_generation_config() for 1 row lends its program; else the programs, the cache and what
 * the trainer's memory has no space for are allocated here. context: see
 * qd_generation_context(). */
qd_status qd_generator_create(qd_trainer *trainer, int64_t context, qd_generator **generator);
void qd_generator_destroy(qd_generator *generator); /* NULL is legal */

int64_t qd_generator_vocab(const qd_generator *generator);
int64_t qd_generator_room(const qd_generator *generator); /* tokens that still fit the context */
int64_t qd_generator_context(const qd_generator *generator);
int64_t qd_generator_position(const qd_generator *generator); /* index in the sequence of the next token */

/* Collective. Rank 0 runs `work`, which may feed tokens any number of times; the other ranks feed
 * what it feeds, and return when it has finished. Returns the status of the work on rank 0, QD_OK
 * on the others; failed communication is returned on all. */
qd_status qd_generator_lead(qd_generator *generator, qd_status (*work)(void *context), void *context);

/* On rank 0, and with several ranks inside qd_generator_lead(): appends tokens to the sequence.
 * QD_NOT_FINITE if the logits after the last one are not finite: there is nothing to sample
 * from. */
qd_status qd_generator_feed(qd_generator *generator, const int32_t *tokens, int64_t count);
/* On rank 0: the sequence counts as at least this long, where results depend on its length
 * (longrope): logits of its first tokens are then those of a pass over all of it. 0: as long as it
 * is. */
void qd_generator_expect(qd_generator *generator, int64_t length);
/* Clears the context. The token that is fed next has index `position` in the sequence. */
void qd_generator_forget(qd_generator *generator, int64_t position);
/* Rank 0: logits (vocab) after the last token that was fed; valid until the next call. */
const float *qd_generator_logits(const qd_generator *generator);
#endif
