/* Text of a trained model: its tokenizer, chat template and the tokens that end a text, and output
 * in whole UTF-8 characters. */
#ifndef QD_TRAIN_GENERATE_MODEL_TEXT_H
#define QD_TRAIN_GENERATE_MODEL_TEXT_H

#include "data/chat/chat.h"
#include "spec/config/config.h"

#include <quadrille/data.h>

enum { QD_MOST_ENDS = 64 };

typedef struct qd_model_text {
    qd_tokenizer *tokenizer; /* NULL: bytes, or token ids */
    qd_text_encoder encoder;
    bool ids;       /* there is no text: tokens are written as numbers */
    int64_t vocab;  /* of the model */
    const char *template; /* path of the chat template; borrowed from the configuration */
    qd_chat *chat;  /* NULL: not opened yet */
    int32_t ends[QD_MOST_ENDS]; /* tokens that end a text */
    int end_count;
} qd_model_text;

/* config: as set by qd_model_run_open(), or that of a training run; it must outlive the text. ids:
 * token ids are read and written, and no tokenizer is needed. QD_USAGE when the tokenizer is
 * unknown or does not match the vocabulary. */
qd_status qd_model_text_open(const qd_config *config, bool ids, qd_model_text *text);
void qd_model_text_close(qd_model_text *text); /* also after a failed open */

/* Opens the chat template, once. Its eos_token ends texts from then on. */
qd_status qd_model_text_open_chat(qd_model_text *text);
/* Whether a token ends a text. */
bool qd_model_text_ends(const qd_model_text *text, int32_t token);

qd_status qd_model_text_encode(qd_model_text *text, const char *prompt, size_t length, qd_tokens *tokens);
/* Appends the text of a token; U+FFFD for an id without a meaning. */
void qd_model_text_decode(const qd_model_text *text, int32_t token, qd_strbuf *out);

/* How many of the bytes can be shown now: all except an incomplete UTF-8 character at the end.
 * Bytes that can never become a character are shown as they are. */
size_t qd_utf8_whole(const char *text, size_t length);
#endif
