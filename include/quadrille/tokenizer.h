/* Tokenizers: encoding and decoding with the files of Hugging Face (BPE, Unigram, WordPiece) and
 * tiktoken, and training of byte-level BPE. Nothing here is collective.
 *
 * A tokenizer is immutable, so threads may share one. Each thread needs its own encoder, which
 * caches the words it has seen. */
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

/* Reads a Hugging Face tokenizer.json, a SentencePiece model (Unigram or BPE), or a tiktoken file
 * (lines of base64 token and rank); the caller owns *tokenizer. A tiktoken file does not contain
 * the split pattern and the special tokens: `encoding` selects them, one of gpt2, r50k_base,
 * cl100k_base, o200k_base, llama3 and kimi; NULL guesses from the number of ranks. For a
 * tokenizer.json, `encoding` must be NULL. QD_USAGE for an invalid file and for features that are
 * not supported; the message names the field. */
QD_API qd_status qd_tokenizer_load(const char *path, const char *encoding, qd_tokenizer **tokenizer);
/* The same from memory; messages use `name` as the file name. */
QD_API qd_status qd_tokenizer_load_text(const char *name, const char *text, size_t length, const char *encoding,
                                        qd_tokenizer **tokenizer);
QD_API void qd_tokenizer_destroy(qd_tokenizer *tokenizer); /* NULL is legal */

/* Writes a tokenizer.json that the package `tokenizers` reads and that gives the same tokens; the
 * second function appends it to `out`. A SentencePiece model is written as it was read.
 * QD_UNSUPPORTED if the format cannot express the tokenizer. */
QD_API qd_status qd_tokenizer_save(const qd_tokenizer *tokenizer, const char *path);
QD_API qd_status qd_tokenizer_save_text(const qd_tokenizer *tokenizer, qd_strbuf *out);

/* The highest id plus 1: the rows of an embedding. Some ids below it may be unused. */
QD_API int32_t qd_tokenizer_size(const qd_tokenizer *tokenizer);
/* The id of an added or special token by its text; -1: none. */
QD_API int32_t qd_tokenizer_special(const qd_tokenizer *tokenizer, const char *content);
/* The bytes that a token adds to a text, owned by the tokenizer, not NUL-terminated; NULL for an
 * unused id. */
QD_API const char *qd_tokenizer_bytes(const qd_tokenizer *tokenizer, int32_t id, size_t *length);
/* Whether the token is a special one. */
QD_API bool qd_tokenizer_is_special(const qd_tokenizer *tokenizer, int32_t id);
/* Token number `index`, from 0, of those that the file's post-processor puts before a text; -1: no
 * more. A prompt starts with them (Llama 3: <|begin_of_text|>). */
QD_API int32_t qd_tokenizer_before(const qd_tokenizer *tokenizer, int index);
/* The token that ends texts, from the files next to the tokenizer's: eos_token of
 * tokenizer_config.json or special_tokens_map.json, else eos_token_id of config.json. -1: there is
 * none, or the tokenizer was not loaded from a file. QD_USAGE if they name a token that the
 * tokenizer does not have. */
QD_API qd_status qd_tokenizer_end(const qd_tokenizer *tokenizer, int32_t *id);

/* How invalid UTF-8 is encoded. */
typedef enum qd_broken_text {
    /* The bytes are kept, and decoding restores them. Text is split as if each invalid part were
     * one U+FFFD. Tokenizers that are not byte-level cannot keep them and replace them. */
    QD_BROKEN_KEEP,
    /* Each invalid part is replaced by U+FFFD first, as by Python's bytes.decode("utf-8",
     * "replace"): this is what tiktoken and tokenizers get for such a string. */
    QD_BROKEN_REPLACE,
    /* As tiktoken's Encoding._encode_bytes: from the last word before the first invalid byte on,
     * the text is not split but merged as one piece. Special tokens are then ordinary text. */
    QD_BROKEN_TIKTOKEN
} qd_broken_text;

/* How special tokens in the text are encoded. Added tokens that are not special are always
 * recognized. */
typedef enum qd_special_policy {
    QD_SPECIAL_TEXT,  /* as ordinary text: the right choice for untrusted text */
    QD_SPECIAL_ALLOW, /* as their ids */
    QD_SPECIAL_REFUSE /* not at all: QD_USAGE with the token and its position */
} qd_special_policy;

/* Parses the values of data.special: "parse" (QD_SPECIAL_ALLOW), "plain" (QD_SPECIAL_TEXT) or
 * "refuse". QD_USAGE for another name. */
QD_API qd_status qd_special_policy_parse(const char *name, qd_special_policy *policy);

typedef struct qd_encode_options {
    size_t size;
    qd_special_policy special;
    const char *const *allowed; /* special tokens that are encoded as their ids under TEXT and REFUSE too */
    size_t allowed_count;
    qd_broken_text broken;
    bool frame; /* add the tokens of the file's post-processor before and after the text */
} qd_encode_options;
/* Sets the defaults: TEXT, KEEP, no frame. */
QD_API void qd_encode_options_init(qd_encode_options *options, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_encode_options)

/* A growing list of tokens, initialized with {0}. */
typedef struct qd_tokens {
    int32_t *ids;
    size_t count, capacity;
} qd_tokens;
/* Frees the ids. */
QD_API void qd_tokens_free(qd_tokens *tokens);

/* Makes an encoder for one thread, owned by the caller; the tokenizer must outlive it. */
QD_API qd_status qd_encoder_create(const qd_tokenizer *tokenizer, qd_encoder **encoder);
QD_API void qd_encoder_destroy(qd_encoder *encoder); /* NULL is legal */
/* Appends the tokens of `text` to *tokens, in O(n log n). options NULL: the defaults. QD_USAGE for
 * a special token under QD_SPECIAL_REFUSE, an unknown one in `allowed`, or QD_BROKEN_TIKTOKEN with
 * a tokenizer that is not from a tiktoken file. */
QD_API qd_status qd_encoder_encode(qd_encoder *encoder, const char *text, size_t length, const qd_encode_options *options,
                                   qd_tokens *tokens);

/* A position at or before `at` (below the length of the text) where the text may be
 * split: the tokens of both parts are the tokens of the whole. 0: none. For encoding long texts in
 * parts and in several threads. */
QD_API size_t qd_tokenizer_cut(const qd_tokenizer *tokenizer, const char *text, size_t at);

/* Appends the text of the tokens. For byte-level tokenizers without a normalizer this is exactly
 * what was encoded, except for text replaced under QD_BROKEN_REPLACE; others apply the decoder of
 * the file. skip_special: without special tokens. QD_USAGE names the first unused id. */
QD_API qd_status qd_tokenizer_decode(const qd_tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special,
                                     qd_strbuf *text);

typedef struct qd_tokenizer_training {
    size_t size;
    /* Text files and folders, read as by `quadrille tokenize` (data.path in docs/formats.md). */
    const char *const *paths;
    size_t path_count;
    int32_t vocab;           /* requested entries, including special tokens */
    int64_t min_frequency;   /* pairs that occur less often are not merged */
    int32_t max_token;       /* tokens are shorter than this many bytes; 0: no limit */
    const char *pattern;     /* gpt2, cl100k, o200k, llama3, qwen2, or a regular expression */
    bool all_bytes;          /* every byte gets a token; otherwise only those in the text */
    bool whole_files;        /* split text across line ends, as in encoding; otherwise line by line, as `tokenizers` trains */
    const char *field;       /* .jsonl files: only this member of each line is text; NULL: the whole file is text */
    const char *separator;   /* other files: lines that equal it are skipped; NULL or "": none */
    qd_broken_text broken;   /* KEEP or REPLACE */
    const char *const *special; /* special tokens to add */
    size_t special_count;
    int threads;             /* 0: all cores */
    /* May be NULL. Called now and then on the calling thread, with bytes read, then merges found;
     * returning false ends the call with QD_INTERRUPTED. */
    bool (*progress)(void *context, const char *phase, int64_t done, int64_t total);
    void *progress_context;
} qd_tokenizer_training;
/* Sets the defaults: 32000 entries, every pair, gpt2, all bytes, line by line, KEEP, all cores. */
QD_API void qd_tokenizer_training_init(qd_tokenizer_training *training, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_tokenizer_training)
/* Sets the values of `quadrille train` and `quadrille tokenize`, so that the same text gives the
 * same tokenizer: pairs that occur twice, whole files, the member "text" of .jsonl files, and
 * <|endoftext|>. */
QD_API void qd_tokenizer_training_init_for_run(qd_tokenizer_training *training, size_t size, int32_t vocab);
static inline qd_tokenizer_training qd_tokenizer_training_for_run(int32_t vocab)
{
    qd_tokenizer_training training;
    qd_tokenizer_training_init_for_run(&training, sizeof training, vocab);
    return training;
}

/* Trains a tokenizer, owned by the caller. It learns the merges that the package `tokenizers`
 * learns from the same text and settings, with any number of threads. QD_USAGE for bad settings or
 * text that cannot be read. */
QD_API qd_status qd_tokenizer_train(const qd_tokenizer_training *training, qd_tokenizer **tokenizer);

#ifdef __cplusplus
}
#endif
#endif
