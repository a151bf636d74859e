/* Prompts: text, messages of a chat or token ids, as tokens. */
#ifndef QD_TRAIN_GENERATE_PROMPT_H
#define QD_TRAIN_GENERATE_PROMPT_H

#include "train/generate/model_text.h"

#include <quadrille/generate.h>

/* Appends the tokens of a prompt. system: see qd_generate_options. QD_USAGE for messages that
 * cannot be rendered, or ids that the model does not have. */
qd_status qd_prompt_encode(qd_model_text *text, const qd_prompt *prompt, const char *system, qd_tokens *tokens);
#endif
