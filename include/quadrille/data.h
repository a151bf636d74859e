/* Training data: text, tokens and data sets. Nothing here is collective.
 *
 * One string names a data set, `data.path`: a text file, a folder of text files, a file of tokens
 * (a shard), a folder of shards, or a weighted mixture of these, "books:0.7,code:0.3". An encoder
 * converts text to tokens; without one, bytes are the tokens. docs/formats.md describes the
 * files. */
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

/* The interface to a tokenizer: how text becomes tokens. */
typedef struct qd_text_encoder {
    size_t size;
    void *context;
    /* Appends the tokens of `text` and nothing else. Called concurrently; `thread` is
     * 0 .. threads-1 of the last prepare(). */
    qd_status (*encode)(void *context, int thread, const char *text, size_t length, qd_tokens *out);
    /* Optional. Called before encode() with the number of threads that will call it. */
    qd_status (*prepare)(void *context, int threads);
    /* Optional. The last position inside `text`, before its end, where a split does not change the
     * tokens; 0: none. Without this function every position qualifies. Long documents are encoded
     * in such parts. */
    size_t (*cut)(void *context, const char *text, size_t length);
    int64_t vocab;        /* tokens are below it */
    uint64_t hash;        /* of everything that determines the tokens; stored in the shards, never 0 */
    int32_t document_end; /* token appended to each document; -1: none */
    /* Optional. Appends the tokens that every prompt starts with, such as BOS. */
    qd_status (*begin)(void *context, qd_tokens *out);
    /* Optional, for chat templates. Appends the tokens of text that a template has rendered;
     * special tokens in it are encoded as their ids. */
    qd_status (*encode_chat)(void *context, int thread, const char *text, size_t length, qd_tokens *out);
    /* Optional, for messages of a chat. QD_USAGE if the text contains a special token, unless the
     * policy is QD_SPECIAL_ALLOW (qd_text_encoder_set_special()). */
    qd_status (*check_plain)(void *context, int thread, const char *text, size_t length);
    uint64_t rules;       /* identifies settings that change how text is encoded, not what a token means; 0: the defaults */
} qd_text_encoder;
QD_SIZED_DEFAULT(qd_text_encoder)

/* Sets up the byte encoder: 256 tokens, no end of document. Nothing to destroy. */
QD_API void qd_text_encoder_init_bytes(qd_text_encoder *encoder, size_t size);
static inline qd_text_encoder qd_text_encoder_bytes(void)
{
    qd_text_encoder encoder;
    qd_text_encoder_init_bytes(&encoder, sizeof encoder);
    return encoder;
}

/* Makes an encoder of a tokenizer, which must outlive it. Special tokens in text are encoded as
 * ordinary text (see qd_text_encoder_set_special()). document_end: the text of a special token;
 * NULL: that of qd_tokenizer_end(), else the first that the tokenizer has of <|endoftext|>,
 * <|end_of_text|>, </s> and <eos>, if any; "": none. QD_USAGE for a document_end that is not a
 * special token. */
QD_API qd_status qd_text_encoder_create(const qd_tokenizer *tokenizer, const char *document_end, qd_text_encoder *encoder);
QD_API void qd_text_encoder_destroy(qd_text_encoder *encoder); /* legal for one that was never created */

/* Sets how special tokens in the text are encoded. The default is QD_SPECIAL_TEXT, which is right
 * for untrusted text. Only for encoders of qd_text_encoder_create(); bytes have no special
 * tokens. */
QD_API void qd_text_encoder_set_special(qd_text_encoder *encoder, qd_special_policy policy);

/* How text is split into documents. A file is one document, except: a line that equals `separator`
 * ends a document and belongs to none; each line of a .jsonl file is an object whose member `field`
 * is a document. */
typedef struct qd_document_rule {
    const char *separator; /* NULL or "": none */
    const char *field;     /* NULL: "text" */
} qd_document_rule;

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
    const char *output; /* folder to create; it may exist if it is empty */
    const qd_text_encoder *encoder;
    qd_document_rule documents;
    int64_t shard_tokens; /* most tokens of one shard */
    int threads;          /* 0: all cores */
    /* May be NULL. Called a few times per second on the calling thread; returning false ends the
     * call with QD_INTERRUPTED. */
    bool (*progress)(void *context, const qd_tokenize_progress *progress);
    void *progress_context;
} qd_tokenize_options;

/* Sets the defaults: shards of 2^28 tokens, the field "text", all cores. */
QD_API void qd_tokenize_options_init(qd_tokenize_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_tokenize_options)

typedef struct qd_tokenize_report {
    size_t size;
    int64_t bytes, tokens, documents, files; /* totals; bytes of text */
    double seconds;
    int64_t skipped; /* files in the folders that are empty or not text */
    int64_t shards, shard_bytes;
    int token_bytes; /* 2 or 4 */
} qd_tokenize_report;
QD_SIZED_DEFAULT(qd_tokenize_report)

/* Tokenizes files into shard-00000.qds, … in the output folder. Memory stays at some MiB per
 * thread for any size of the text. The shards do not depend on the number of threads. The folder
 * appears when it is complete. QD_USAGE for inputs or an output folder that cannot be used. */
QD_API qd_status qd_tokenize_files(const qd_tokenize_options *options, qd_tokenize_report *report);

/* What happens to examples (qd_data_options.examples) that are longer than a sample. */
typedef enum qd_overlong {
    QD_OVERLONG_CUT,   /* their end is cut off */
    QD_OVERLONG_SKIP,  /* they are left out */
    QD_OVERLONG_REFUSE /* QD_USAGE, with file and line of the first */
} qd_overlong;

/* A data set that was opened for reading samples. */
typedef struct qd_data qd_data;

typedef struct qd_data_options {
    size_t size;
    const char *path;
    int64_t seq;                    /* tokens of a sample, which reads one more: the last target */
    int64_t vocab;                  /* of the model */
    uint64_t seed;                  /* of the sample order */
    const qd_text_encoder *encoder; /* NULL: bytes are the tokens, and vocab must be 256 */
    const char *encoder_name;       /* for messages; NULL: data.tokenizer */
    bool any_bytes;                 /* accept files that are not text */
    qd_document_rule documents;
    const char *cache;  /* folder that caches the tokens of text; NULL or "": tokens are kept in memory */
    double validation;  /* fraction of each source held out from training: its last windows; 0: none */
    bool document_mask; /* tokens attend only to their own document, and no target crosses its end */
    bool verify;        /* check all checksums and tokens of the shards before the first use */
    int threads;        /* 0: all cores */
    bool (*progress)(void *context, const qd_tokenize_progress *progress); /* while text is tokenized; may be NULL */
    void *progress_context;
    /* The files are .jsonl with an example per line, members `prompt` and `completion` or a list
     * `messages`. Only completions and messages of the assistant count in the loss. Whole examples
     * are packed into samples, each a document of its own; `validation` is a fraction of the
     * examples. */
    bool examples;
    bool unpacked; /* one example per sample: for models with learned positions, which count from the start of a sample */
    qd_overlong overlong;
    /* Renders `messages`: a tokenizer folder with a chat template, or a file with one (.jinja);
     * NULL or "": none. Errors of a folder are reported when an example needs it. */
    const char *chat_template;
    /* With `examples`: lines have a `prompt` with a `chosen` and a `rejected` completion. Both
     * become examples, which are packed into the same sample. */
    bool pairs;
} qd_data_options;

/* Sets the defaults: verify, all cores, the rest 0. */
QD_API void qd_data_options_init(qd_data_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_data_options)

/* Opens a data set, owned by the caller. Not collective; if several ranks open the same text with
 * the same cache, one tokenizes it and the others wait. QD_USAGE for a path, vocabulary or sizes
 * that do not fit, QD_CORRUPT for damaged shards. */
QD_API qd_status qd_data_open(const qd_data_options *options, qd_data **data);
QD_API void qd_data_close(qd_data *data); /* NULL is legal */

/* Number of samples in one epoch: the training windows of all sources, and the held-out ones. */
QD_API int64_t qd_data_windows(const qd_data *data);
QD_API int64_t qd_data_validation_windows(const qd_data *data);

typedef struct qd_data_source_info {
    size_t size;
    const char *path;
    double weight; /* fraction of the samples */
    int64_t files, skipped, tokens, documents;
    int64_t windows, validation_windows;
    int64_t cut_examples, skipped_examples; /* of examples: cut because they are too long; left out: too long, or no token counts */
} qd_data_source_info;
QD_SIZED_DEFAULT(qd_data_source_info)

/* The number of sources, and figures of source 0 .. count-1; info->path belongs to `data`. */
QD_API int qd_data_source_count(const qd_data *data);
QD_API void qd_data_source_describe(const qd_data *data, int source, qd_data_source_info *info);

/* Reads tokens [first, first + count) of a source. QD_USAGE for a range outside of it, QD_CORRUPT
 * for tokens outside the vocabulary. */
QD_API qd_status qd_data_read(const qd_data *data, int source, int64_t first, int64_t count, int32_t *tokens);

typedef struct qd_trigram_report {
    size_t size;
    double loss;             /* nats per token of the held-out windows */
    int64_t trained, scored; /* tokens */
    int64_t trigrams;        /* distinct */
    double seconds;
} qd_trigram_report;
QD_SIZED_DEFAULT(qd_trigram_report)

/* A baseline for models: fits an interpolated Kneser-Ney trigram model (modified discounts) to the
 * training tokens of all sources and scores it on the targets of the held-out windows, except those
 * that the document mask excludes. QD_USAGE if nothing is held out. */
QD_API qd_status qd_data_trigram(const qd_data *data, qd_trigram_report *report);

#ifdef __cplusplus
}
#endif
#endif
