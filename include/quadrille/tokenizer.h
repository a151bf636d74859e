/* Byte-level byte-pair encoding: text to tokens and back, training of vocabularies, and the two
 * common file formats.
 *
 * A tokenizer never changes after it was made, so any number of threads may share one. Each thread
 * encodes with an encoder of its own, which keeps the words it has seen. */
#ifndef QUADRILLE_TOKENIZER_H
#define QUADRILLE_TOKENIZER_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/strbuf.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct qd_tokenizer qd_tokenizer;
typedef struct qd_encoder qd_encoder;

/* Reads a Hugging Face tokenizer.json, or a tiktoken file (lines of base64 token and rank). A
 * tiktoken file does not say how text is cut and which special tokens there are: `encoding` names
 * it, one of gpt2, r50k_base, cl100k_base, o200k_base and llama3; NULL guesses from the number of
 * ranks. For a tokenizer.json `encoding` must be NULL. What a file asks for and this library does
 * not do is refused by the name of the field. QD_USAGE for everything wrong with the file. */
QD_API qd_status qd_tokenizer_load(const char *path, const char *encoding, qd_tokenizer **tokenizer);
/* The same from memory; `name` stands in messages. */
QD_API qd_status qd_tokenizer_load_text(const char *name, const char *text, size_t length, const char *encoding,
                                        qd_tokenizer **tokenizer);
QD_API void qd_tokenizer_destroy(qd_tokenizer *tokenizer); /* NULL is legal */

/* Writes a tokenizer.json that `tokenizers` reads and that encodes the same. */
QD_API qd_status qd_tokenizer_save(const qd_tokenizer *tokenizer, const char *path);
QD_API qd_status qd_tokenizer_save_text(const qd_tokenizer *tokenizer, qd_strbuf *out);

/* One more than the highest id: the rows of an embedding. Some ids below may stand for nothing. */
QD_API int32_t qd_tokenizer_size(const qd_tokenizer *tokenizer);
/* Id of an added or special token by its text, or -1. */
QD_API int32_t qd_tokenizer_special(const qd_tokenizer *tokenizer, const char *content);
/* The bytes of a token, not ended by '\0'; NULL when the id stands for nothing. */
QD_API const char *qd_tokenizer_bytes(const qd_tokenizer *tokenizer, int32_t id, size_t *length);
QD_API bool qd_tokenizer_is_special(const qd_tokenizer *tokenizer, int32_t id);
/* The token that the file's post-processor puts before a text, number `index` of them from 0; -1:
 * no more. A text that a model is to go on with begins with these (Llama 3: <|begin_of_text|>). */
QD_API int32_t qd_tokenizer_before(const qd_tokenizer *tokenizer, int index);

/* What becomes of text that is not UTF-8. */
typedef enum qd_broken_text {
    /* The bytes stay and decoding gives them back. Text is cut as if each broken part were one
     * U+FFFD. */
    QD_BROKEN_KEEP,
    /* Each broken part becomes U+FFFD before anything else, as in Python's bytes.decode("utf-8",
     * "replace"): what tiktoken and tokenizers see when they are given such a string. */
    QD_BROKEN_REPLACE,
    /* As tiktoken's Encoding._encode_bytes: from the first broken byte on (and from the last word
     * before it) the text is not cut but merged as one piece. Special tokens are ordinary text in a
     * text that is broken. */
    QD_BROKEN_TIKTOKEN
} qd_broken_text;

/* What becomes of special tokens that stand in the text. Added tokens that are not special are
 * always found. */
typedef enum qd_special_policy {
    QD_SPECIAL_TEXT,  /* ordinary text: right for text that others wrote */
    QD_SPECIAL_ALLOW, /* become their ids */
    QD_SPECIAL_REFUSE /* QD_USAGE with the token and its place */
} qd_special_policy;

typedef struct qd_encode_options {
    size_t size;
    qd_special_policy special;
    const char *const *allowed; /* become their ids under TEXT and REFUSE too */
    size_t allowed_count;
    qd_broken_text broken;
    bool frame; /* put the tokens before and after that the file's post-processor asks for */
} qd_encode_options;
/* TEXT, KEEP, no frame. */
QD_API void qd_encode_options_init(qd_encode_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_encode_options)

/* Growing list of tokens. Start with {0}. */
typedef struct qd_tokens {
    int32_t *ids;
    size_t count, capacity;
} qd_tokens;
QD_API void qd_tokens_free(qd_tokens *tokens);

QD_API qd_status qd_encoder_create(const qd_tokenizer *tokenizer, qd_encoder **encoder);
QD_API void qd_encoder_destroy(qd_encoder *encoder); /* NULL is legal */
/* Appends the tokens of `text` to *tokens. options NULL: the default. The work grows as n log n at
 * most. */
QD_API qd_status qd_encoder_encode(qd_encoder *encoder, const char *text, size_t length, const qd_encode_options *options,
                                   qd_tokens *tokens);

/* A place at or before `at` (below the length of the text) where the text may be cut: both parts
 * encoded one after the other give the tokens of the whole. 0: there is none. Lets long texts be
 * encoded in parts and by several threads. */
QD_API size_t qd_tokenizer_cut(const qd_tokenizer *tokenizer, const char *text, size_t at);

/* Appends the bytes of the tokens: exactly what was encoded, except for text replaced under
 * QD_BROKEN_REPLACE. QD_USAGE names the first id that stands for nothing. */
QD_API qd_status qd_tokenizer_decode(const qd_tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special,
                                     qd_strbuf *text);

typedef struct qd_tokenizer_training {
    size_t size;
    /* Text files and folders, taken as `quadrille tokenize` takes them (data.path in
     * docs/formats.md). */
    const char *const *paths;
    size_t path_count;
    int32_t vocab;           /* entries wanted, special tokens included */
    int64_t min_frequency;   /* a pair seen less often is not merged */
    int32_t max_token;       /* bytes of a token stay below this; 0: no limit */
    const char *pattern;     /* gpt2, cl100k, o200k, llama3, qwen2, or a regular expression */
    bool all_bytes;          /* every byte gets a token; else only those that the text holds */
    bool whole_files;        /* text is cut across line ends as in encoding; else line by line as `tokenizers` trains files */
    const char *field;       /* of .jsonl files only this member of each line is text; NULL: they are text like any other */
    const char *separator;   /* lines of other files that equal it are passed over; NULL or "": none */
    qd_broken_text broken;   /* KEEP or REPLACE */
    const char *const *special;
    size_t special_count;
    int threads;             /* 0: all cores */
    /* May be NULL. Called from the calling thread, now and then: bytes read, then merges found.
     * false: it ends, QD_INTERRUPTED. */
    bool (*progress)(void *context, const char *phase, int64_t done, int64_t total);
    void *progress_context;
} qd_tokenizer_training;
/* 32000 entries, every pair, gpt2, all bytes, line by line, KEEP, all cores. */
QD_API void qd_tokenizer_training_init(qd_tokenizer_training *training, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_tokenizer_training)
/* What `quadrille train` and `quadrille tokenize` use, so that the same text gives the same
 * tokenizer: pairs seen twice, whole files, the member "text" of .jsonl files, and
 * <|endoftext|>. */
QD_API void qd_tokenizer_training_init_for_run(qd_tokenizer_training *training, size_t size, int32_t vocab);
static inline qd_tokenizer_training qd_tokenizer_training_for_run(int32_t vocab)
{
    qd_tokenizer_training training;
    qd_tokenizer_training_init_for_run(&training, sizeof training, vocab);
    return training;
}

/* Learns the merges that the package `tokenizers` learns from the same text with the same settings.
 * The same result with any number of threads. */
QD_API qd_status qd_tokenizer_train(const qd_tokenizer_training *training, qd_tokenizer **tokenizer);

#ifdef __cplusplus
}
#endif
#endif
