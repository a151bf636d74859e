/* Text and tokens: what a run trains on.
 *
 * A data set is named by one text, `data.path`: a text file, a folder of text files, a file of
 * tokens (a shard), a folder of shards, or a mixture of these with weights, "books:0.7,code:0.3".
 * Text becomes tokens through an encoder; without one its bytes are the tokens. docs/formats.md
 * describes the files. */
#ifndef QUADRILLE_DATA_H
#define QUADRILLE_DATA_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/tokenizer.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- from text to tokens ---- */

/* How text becomes tokens: a tokenizer behind a few functions. */
typedef struct qd_text_encoder {
    size_t size;
    void *context;
    /* Appends the tokens of `text`, nothing before or after them. Called by several threads at
     * once; `thread` is 0 .. threads-1 of the last prepare(). */
    qd_status (*encode)(void *context, int thread, const char *text, size_t length, qd_tokens *out);
    /* Optional: told before encode() is called how many threads will call it. */
    qd_status (*prepare)(void *context, int threads);
    /* Optional: the last place inside `text`, before its end, where it can be cut without a change
     * of its tokens; 0: none. Without this function any place will do. Long documents are encoded
     * in such parts. */
    size_t (*cut)(void *context, const char *text, size_t length);
    int64_t vocab;        /* tokens are below it */
    uint64_t hash;        /* of all that decides the tokens; kept in the shards, never 0 */
    int32_t document_end; /* token that is put after each document; -1: none */
} qd_text_encoder;
QD_SIZED_DEFAULT(qd_text_encoder)

/* The bytes themselves: 256 tokens, no end of document. Nothing to destroy. */
QD_API void qd_text_encoder_init_bytes(qd_text_encoder *encoder, size_t size);
static inline qd_text_encoder qd_text_encoder_bytes(void)
{
    qd_text_encoder encoder;
    qd_text_encoder_init_bytes(&encoder, sizeof encoder);
    return encoder;
}

/* A tokenizer, which must outlive the encoder; special tokens in text are ordinary text.
 * document_end: the text of a special token; NULL: the first that the tokenizer knows of
 * <|endoftext|>, <|end_of_text|>, </s> and <eos>, if any; "": none. */
QD_API qd_status qd_text_encoder_create(const qd_tokenizer *tokenizer, const char *document_end, qd_text_encoder *encoder);
QD_API void qd_text_encoder_destroy(qd_text_encoder *encoder); /* one that was never made is legal */

/* How text is cut into documents. One per file, except: a line that equals `separator` ends a
 * document and belongs to none; each line of a file whose name ends in .jsonl is an object whose
 * member `field` is a document. */
typedef struct qd_document_rule {
    const char *separator; /* NULL or "": none */
    const char *field;     /* NULL: "text" */
} qd_document_rule;

/* ---- quadrille tokenize ---- */

typedef struct qd_tokenize_progress {
    int64_t bytes, bytes_total; /* of text */
    int64_t tokens, documents;
    int64_t files, files_total;
    double seconds;
} qd_tokenize_progress;

typedef struct qd_tokenize_options {
    size_t size;
    const char *const *inputs; /* files and folders */
    int input_count;
    const char *output; /* folder to make; it may exist if it is empty */
    const qd_text_encoder *encoder;
    qd_document_rule documents;
    int64_t shard_tokens; /* most tokens of one shard */
    int threads;          /* 0: all cores */
    /* Called a few times per second, from the calling thread; false ends with QD_INTERRUPTED. May
     * be NULL. */
    bool (*progress)(void *context, const qd_tokenize_progress *progress);
    void *progress_context;
} qd_tokenize_options;

QD_API void qd_tokenize_options_init(qd_tokenize_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_tokenize_options)

typedef struct qd_tokenize_report {
    size_t size;
    int64_t bytes, tokens, documents, files; /* in all: of text; the rest as in qd_tokenize_progress */
    double seconds;
    int64_t skipped; /* files of the folders that are not text or empty */
    int64_t shards, shard_bytes;
    int token_bytes; /* 2 or 4 */
} qd_tokenize_report;
QD_SIZED_DEFAULT(qd_tokenize_report)

/* Writes shard-00000.qds, … into the folder. Memory stays at some MiB per thread, whatever the size
 * of the text. The shards are the same for any number of threads. The folder appears when all of it
 * is complete. */
QD_API qd_status qd_tokenize_files(const qd_tokenize_options *options, qd_tokenize_report *report);

/* ---- data sets ---- */

typedef struct qd_data qd_data;

typedef struct qd_data_options {
    size_t size;
    const char *path;
    int64_t seq;                    /* tokens of a sample; it needs one more, the last target */
    int64_t vocab;                  /* of the model */
    uint64_t seed;                  /* of the order */
    const qd_text_encoder *encoder; /* NULL: text is bytes, and vocab must be 256 */
    const char *encoder_name;       /* in messages; NULL: data.tokenizer */
    bool any_bytes;                 /* files need not be text: their bytes were asked for */
    qd_document_rule documents;
    const char *cache;  /* folder that keeps the tokens of text, so that they are made once; NULL or "": in memory */
    double validation;  /* part of each source that is never trained on: its last windows; 0: none */
    bool document_mask; /* tokens see only their own document, and no target crosses its end */
    bool verify;        /* all checksums and tokens of the shards, before anything is used */
    int threads;        /* 0: all cores */
    bool (*progress)(void *context, const qd_tokenize_progress *progress); /* of text that becomes tokens */
    void *progress_context;
} qd_data_options;

/* verify, all cores, the rest 0. */
QD_API void qd_data_options_init(qd_data_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_data_options)

/* Not collective; ranks that open the same text with the same cache wait for the first of them. */
QD_API qd_status qd_data_open(const qd_data_options *options, qd_data **data);
QD_API void qd_data_close(qd_data *data); /* NULL is legal */

/* Samples of one epoch: the windows of all sources that are trained on, and those held out. */
QD_API int64_t qd_data_windows(const qd_data *data);
QD_API int64_t qd_data_validation_windows(const qd_data *data);

typedef struct qd_data_source_info {
    size_t size;
    const char *path;
    double weight; /* share of the samples */
    int64_t files, skipped, tokens, documents;
    int64_t windows, validation_windows;
} qd_data_source_info;
QD_SIZED_DEFAULT(qd_data_source_info)

QD_API int qd_data_source_count(const qd_data *data);
QD_API void qd_data_source_describe(const qd_data *data, int source, qd_data_source_info *info);

/* Tokens [first, first + count) of a source. */
QD_API qd_status qd_data_read(const qd_data *data, int source, int64_t first, int64_t count, int32_t *tokens);

/* ---- a baseline to beat ---- */

typedef struct qd_trigram_report {
    size_t size;
    double loss;             /* nats per token of the held-out windows */
    int64_t trained, scored; /* tokens */
    int64_t trigrams;        /* different ones */
    double seconds;
} qd_trigram_report;
QD_SIZED_DEFAULT(qd_trigram_report)

/* An interpolated Kneser-Ney trigram model (modified discounts) of the training tokens of all
 * sources, scored on the targets of the held-out windows. Targets that the document mask leaves out
 * are not scored. */
QD_API qd_status qd_data_trigram(const qd_data *data, qd_trigram_report *report);

#ifdef __cplusplus
}
#endif
#endif
