/* Files of a Hugging Face folder that our checkpoints do not express: generation settings, chat
 * templates, special tokens, and config.json with all its keys. A run folder keeps them unchanged
 * in a folder of its own, so that an export restores them. */
#ifndef QD_CKPT_HF_COMPANIONS_H
#define QD_CKPT_HF_COMPANIONS_H

#include "model/model.h"
#include "spec/config/config.h"

#include <quadrille/strbuf.h>
#include <quadrille/types.h>

/* Copies what describes the model (config.json, generation_config.json) from a Hugging Face folder
 * or from what a run folder keeps, to a run folder. What is missing there is left out. */
qd_status qd_hf_keep_model(const char *from, const char *run);
/* The same for what describes text: the settings of the tokenizer, other files with its vocabulary,
 * chat templates. */
qd_status qd_hf_keep_text(const char *from, const char *run);
/* A chat template that a run was given, a file or a folder, instead of the tokenizer's. */
qd_status qd_hf_keep_template(const char *from, const char *run);
/* Removes what a run folder keeps. */
qd_status qd_hf_forget(const char *run);

/* Copies what a run folder keeps, except config.json, to a Hugging Face folder. *settings: it has
 * the settings of the tokenizer (tokenizer_config.json). */
qd_status qd_hf_restore(const char *run, const char *to, bool *settings);
/* Appends the config.json that a run folder keeps, with the data type that is written now, if it
 * still describes the model and its weights; otherwise *restored is false. */
qd_status qd_hf_restore_config(const char *run, const qd_model *model, qd_dtype dtype, qd_strbuf *out, bool *restored);

/* The tokens that end a text, from the kept files of a run folder: eos_token_id of
 * generation_config.json, otherwise of config.json, a number or a list of at most `most`. None if
 * there are no such files. */
qd_status qd_hf_end_tokens(const char *run, int64_t *ids, int most, int *count);
#endif
