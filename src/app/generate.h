/* Generation: continues a sequence of tokens with a trained model and a KV cache. */
#ifndef QD_APP_GENERATE_H
#define QD_APP_GENERATE_H

#include "train/exec/model_run.h"

#include <quadrille/generate.h>

/* qd_generate() with any model; options->model is not read, and both structs are whole. */
qd_status qd_generate_from(const qd_model_source *model, const qd_generate_options *options, qd_generate_report *report);

typedef struct qd_sampling {
    double temperature; /* 0: always the most likely token */
    int top_k;          /* 0: all */
    double top_p;       /* 1: all */
    uint64_t seed;
} qd_sampling;

typedef struct qd_generator qd_generator;

/* context: maximum number of tokens of prompt and continuation together; 0: the longest that the
 * model was trained for. device: NULL for the CPU. */
qd_status qd_generator_create(const qd_model_source *model, int64_t context, const char *device, int threads, qd_generator **generator);
void qd_generator_destroy(qd_generator *generator); /* NULL is legal */

int64_t qd_generator_vocab(const qd_generator *generator);
int64_t qd_generator_room(const qd_generator *generator); /* tokens that still fit the context */
int64_t qd_generator_context(const qd_generator *generator);
int64_t qd_generator_step(const qd_generator *generator);        /* that the weights are of */
const char *qd_generator_warning(const qd_generator *generator); /* about the checkpoint, as in qd_model_run */
const qd_config *qd_generator_config(const qd_generator *generator); /* as set by qd_model_run_open() */

/* Appends tokens to the sequence. QD_NOT_FINITE if the logits after the last one are not finite:
 * there is nothing to sample from. */
qd_status qd_generator_feed(qd_generator *generator, const int32_t *tokens, int64_t count);
/* Clears the context. The token that is fed next has index `position` in the sequence, which
 * determines the random numbers of sampling. */
void qd_generator_forget(qd_generator *generator, int64_t position);
/* Logits (vocab) after the last token that was fed; valid until the next call. */
const float *qd_generator_logits(const qd_generator *generator);
/* Samples a token for the next position from the logits; does not feed it. */
int32_t qd_generator_sample(qd_generator *generator, const qd_sampling *sampling);
#endif
