/* Text files become tokens: read in pieces, encoded by all threads, handed on in order. */
#ifndef QD_DATA_ENCODE_H
#define QD_DATA_ENCODE_H

#include <quadrille/data.h>

#include "data/files.h"

/* Where tokens go, in the order of the text. */
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

/* What comes out does not depend on the number of threads. `total` counts what was done, also after
 * a failure. */
qd_status qd_encode_files(const qd_encode_job *job, const qd_token_sink *sink, qd_tokenize_progress *total);

/* QD_USAGE when it is missing or its figures make no sense. */
qd_status qd_text_encoder_check(const qd_text_encoder *encoder);

int qd_threads_or_all(int threads); /* 0: the cores this process may use */

/* ---- shards of one folder ---- */

/* Encodes into `folder`/shard-%05d.qds, of at most shard_tokens tokens each. The folder is made
 * beside its place and renamed when complete; it may exist if it is empty. */
qd_status qd_encode_to_folder(const qd_encode_job *job, const char *folder, int64_t shard_tokens,
                              qd_tokenize_report *report);

#endif
