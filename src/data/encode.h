/* Encodes text files into tokens: read in pieces, encoded by all threads, delivered in order. */
#ifndef QD_DATA_ENCODE_H
#define QD_DATA_ENCODE_H

#include <quadrille/data.h>

#include "data/files.h"

/* Receives tokens in the order of the text. */
typedef struct qd_token_sink {
    void *context;
    qd_status (*document)(void *context); /* the next token begins a document; at least one follows */
    qd_status (*append)(void *context, const int32_t *tokens, int64_t count);
} qd_token_sink;

typedef struct qd_encode_job {
    const qd_file_list *files; /* no shards */
    const qd_text_encoder *encoder;
    qd_document_rule documents;
    int threads;                                                           /* 0: all cores */
    bool (*progress)(void *context, const qd_tokenize_progress *progress); /* NULL is legal */
    void *progress_context;
} qd_encode_job;

/* The result does not depend on the number of threads. `total` counts what was processed, also
 * after an error. */
qd_status qd_encode_files(const qd_encode_job *job, const qd_token_sink *sink, qd_tokenize_progress *total);

/* QD_USAGE if the encoder is missing or its figures are out of range. */
qd_status qd_text_encoder_check(const qd_text_encoder *encoder);

qd_status qd_tokens_append(qd_tokens *tokens, int32_t id);

int qd_threads_or_all(int threads); /* 0: all cores available to this process */

/* Encodes into `folder`/shard-%05d.qds, of at most shard_tokens tokens each. The shards are written
 * to a temporary folder next to it, which is renamed when complete; `folder` may exist if it is
 * empty. */
qd_status qd_encode_to_folder(const qd_encode_job *job, const char *folder, int64_t shard_tokens,
                              qd_tokenize_report *report);

#endif
