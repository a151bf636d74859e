/* The tokenizer structure, shared by the files of this folder. */
#ifndef QD_DATA_TOKENIZER_TOKENIZER_IMPL_H
#define QD_DATA_TOKENIZER_TOKENIZER_IMPL_H

#include "data/tokenizer/split/split.h"
#include "data/tokenizer/trie.h"
#include "data/tokenizer/vocab.h"

#include <quadrille/tokenizer.h>

/* One step of splitting: at the matches of an expression, or a space added before the text. */
typedef struct qd_stage {
    enum { QD_STAGE_SPLIT, QD_STAGE_PREFIX } kind;
    qd_pattern pattern;
    qd_regex *regex;    /* for QD_PATTERN_CUSTOM */
    char *source;       /* its text, NUL-terminated */
    bool keep_matches, keep_gaps;
    bool byte_level;    /* stored in the file as the expression of ByteLevel */
} qd_stage;

enum { QD_MOST_STAGES = 8, QD_MOST_FRAME = 8 };

/* Properties of an added token, in addition to its entry in the vocabulary. */
typedef struct qd_added {
    uint32_t id;
    bool special, single_word, left_strip, right_strip, normalized;
} qd_added;

struct qd_tokenizer {
    char *name; /* for messages */
    qd_vocab vocab;
    bool whole_words;    /* a piece that is a token is encoded as that token, without merging */
    bool tiktoken;       /* loaded from a tiktoken file: ranks are ids */
    bool shared_ranks;   /* several pairs produce the same token with the same rank */
    uint32_t byte_id[256]; /* token of a byte, or QD_NO_TOKEN */
    uint32_t unknown;    /* token for bytes that have none; QD_NO_TOKEN: they are dropped */
    bool fuse_unknown;
    qd_stage stages[QD_MOST_STAGES];
    int stage_count;
    qd_added *added;
    size_t added_count;
    qd_trie raw, normalized; /* added tokens by text; values index `added` */
    uint32_t before[QD_MOST_FRAME], after[QD_MOST_FRAME];
    int before_count, after_count;
};

qd_status qd_tokenizer_new(const char *name, qd_tokenizer **tokenizer);
/* Index of the added token with this content, or -1. */
int64_t qd_tokenizer_find_added(const qd_tokenizer *tokenizer, const char *content, size_t length);
/* Builds byte tokens and tries once the vocabulary and the added tokens are complete. */
qd_status qd_tokenizer_finish(qd_tokenizer *tokenizer);
/* Appends a stage that splits at a known pattern or (QD_PATTERN_CUSTOM) at the expression
 * `source`. */
qd_status qd_tokenizer_add_split(qd_tokenizer *tokenizer, const char *where, const char *source, size_t length);

qd_status qd_tokenizer_read_json(qd_tokenizer *tokenizer, const char *text, size_t length);
qd_status qd_tokenizer_read_tiktoken(qd_tokenizer *tokenizer, const char *text, size_t length, const char *encoding);

#endif
