/* Parts of the reader of tokenizer.json, shared by the files that read its sections. */
#ifndef QD_DATA_TOKENIZER_FILES_LOAD_IMPL_H
#define QD_DATA_TOKENIZER_FILES_LOAD_IMPL_H

#include "data/tokenizer/files/json_reader.h"
#include "data/tokenizer/tokenizer_impl.h"

typedef struct qd_loader {
    qd_json_reader reader;
    qd_tokenizer *tokenizer;
    uint8_t *bytes;  /* buffer for two tokens */
    size_t longest;  /* token of the vocabulary */
} qd_loader;

#define QD_LOAD_FAIL(...) qd_json_reader_fail(&load->reader, __VA_ARGS__)

/* Moves the reader to `at`; true if it is NULL (a missing member) or the value there is null. */
bool qd_load_is_null(qd_loader *load, const char *at);
/* False if the member is missing or null. */
qd_status qd_load_boolean(qd_loader *load, const char *at, const char *what, bool *value);
/* A member that must be there. */
qd_status qd_load_string(qd_loader *load, const char *at, const char *what, qd_json_text *text);
/* A copy of a string without NUL characters, freed by the caller. */
qd_status qd_load_copy(qd_loader *load, const char *at, const char *what, char **text, size_t *length);
/* {"String": …} or {"Regex": …}: a copy of the string, or a compiled expression and its source. */
qd_status qd_load_pattern(qd_loader *load, const char *at, const char *what, char **text, size_t *length, qd_regex **regex);
/* Calls `read` for each item of a list, with the reader at the item. */
typedef qd_status (*qd_load_item)(qd_loader *load, const char *at, int depth);
qd_status qd_load_list(qd_loader *load, const char *at, const char *what, int depth, qd_load_item read);

/* The sections; `at` is the start of the value. depth: of nested sequences, from 0. */
qd_status qd_load_normalizer(qd_loader *load, const char *at, int depth);
qd_status qd_load_pre_tokenizer(qd_loader *load, const char *at, int depth);
qd_status qd_load_post_processor(qd_loader *load, const char *at, int depth);
qd_status qd_load_decoder(qd_loader *load, const char *at, int depth);
/* Reads the model; chooses QD_MODEL_BYTES if the other sections allow it, so they come first. */
qd_status qd_load_model(qd_loader *load, const char *at);
/* Converts a text of the file to the form in which the vocabulary stores it, in load->bytes from
 * `offset` on or as it is. */
qd_token_kind qd_load_token(qd_loader *load, qd_json_text text, size_t offset, const void **bytes, size_t *length);
uint32_t qd_load_find_token(qd_loader *load, qd_json_text text);

#endif
