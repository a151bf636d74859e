/* Continues a prompt with a generator, from text to text: what `quadrille generate` and sample
 * texts of a training run print. */
#ifndef QD_TRAIN_GENERATE_CONTINUE_TEXT_H
#define QD_TRAIN_GENERATE_CONTINUE_TEXT_H

#include "train/generate/generator.h"
#include "train/generate/model_text.h"

#include <quadrille/generate.h>

/* QD_USAGE for options out of range. */
qd_status qd_generate_options_check(const qd_generate_options *options);

/* Whether all prompts are token ids: the text has to be opened for ids then. */
bool qd_generates_ids(const qd_generate_options *options);

/* On rank 0, and with several ranks inside qd_generator_lead(). Continues the prompts one after
 * another. options->model, context, device, threads and ranks are not read. Sets what the report
 * says about prompt and text, not about the model. */
qd_status qd_continue_text(qd_generator *generator, qd_model_text *text, const qd_generate_options *options, qd_generate_report *report);
#endif
