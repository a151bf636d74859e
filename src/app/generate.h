/* Continues a sequence of tokens with a trained model. Keys and values of earlier tokens are
 * cached. */
#ifndef QD_APP_GENERATE_H
#define QD_APP_GENERATE_H

#include "spec/config/config.h"

typedef struct qd_sampling {
    double temperature; /* 0: always the likeliest token */
    int top_k;          /* 0: all */
    double top_p;       /* 1: all */
    uint64_t seed;
} qd_sampling;

typedef struct qd_generator qd_generator;

/* context: most tokens of prompt and continuation together; 0: the longest the model was trained
 * for. device: NULL for the CPU. */
qd_status qd_generator_create(const char *model, int64_t context, const char *device, int threads, qd_generator **generator);
void qd_generator_destroy(qd_generator *generator); /* NULL is legal */

int64_t qd_generator_vocab(const qd_generator *generator);
int64_t qd_generator_room(const qd_generator *generator); /* tokens that still fit the context */
int64_t qd_generator_context(const qd_generator *generator);
int64_t qd_generator_step(const qd_generator *generator);       /* of the checkpoint */
const char *qd_generator_warning(const qd_generator *generator); /* of the checkpoint, as in qd_model_run */
const qd_config *qd_generator_config(const qd_generator *generator); /* as qd_model_run_open() found it */

/* Appends tokens to the sequence. QD_NOT_FINITE when the logits after the last are not: there is
 * nothing to draw from. */
qd_status qd_generator_feed(qd_generator *generator, const int32_t *tokens, int64_t count);
/* Empties the context. The token that is fed next is number `position` of the sequence: what is
 * drawn depends on it. */
void qd_generator_forget(qd_generator *generator, int64_t position);
/* Logits (vocab) after the last token that was fed; valid until the next call. */
const float *qd_generator_logits(const qd_generator *generator);
/* Draws a token for the next position from the logits; does not feed it. */
int32_t qd_generator_sample(qd_generator *generator, const qd_sampling *sampling);
#endif
