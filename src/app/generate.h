/* Generation with a trained model that is opened for it. */
#ifndef QD_APP_GENERATE_H
#define QD_APP_GENERATE_H

#include "train/exec/model_run.h"
#include "train/generate/generator.h"

#include <quadrille/generate.h>

/* qd_generate() with any model; options->model is not read, and both structs are whole. */
qd_status qd_generate_from(const qd_model_source *model, const qd_generate_options *options, qd_generate_report *report);

/* A model in this process, and its generator. */
typedef struct qd_model_generator {
    qd_model_run run;
    qd_generator *generator;
} qd_model_generator;

/* context: maximum number of tokens of prompt and continuation together; 0: the longest that the
 * model was trained for. device: NULL for the CPU. */
qd_status qd_model_generator_open(const qd_model_source *model, int64_t context, const char *device, int threads,
                                  qd_model_generator *generator);
void qd_model_generator_close(qd_model_generator *generator); /* also after a failed open */
#endif
