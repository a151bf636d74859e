/* Text of a trained model: its tokenizer, and output in whole UTF-8 characters. */
#ifndef QD_TRAIN_GENERATE_MODEL_TEXT_H
#define QD_TRAIN_GENERATE_MODEL_TEXT_H

#include "spec/config/config.h"

#include <quadrille/data.h>

typedef struct qd_model_text {
    qd_tokenizer *tokenizer; /* NULL: bytes */
    qd_text_encoder encoder;
} qd_model_text;

/* config: as set by qd_model_run_open(). QD_USAGE when the tokenizer is unknown or does not match
 * the vocabulary. */
qd_status qd_model_text_open(const qd_config *config, qd_model_text *text);
void qd_model_text_close(qd_model_text *text); /* also after a failed open */

qd_status qd_model_text_encode(qd_model_text *text, const char *prompt, size_t length, qd_tokens *tokens);
/* Appends the text of a token; U+FFFD for an id without a meaning. */
void qd_model_text_decode(const qd_model_text *text, int32_t token, qd_strbuf *out);

/* How many of the bytes can be shown now: all except an incomplete UTF-8 character at the end.
 * Bytes that can never become a character are shown as they are. */
size_t qd_utf8_whole(const char *text, size_t length);
#endif
