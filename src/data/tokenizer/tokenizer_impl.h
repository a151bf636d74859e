/* The tokenizer structure, shared by the files of this folder. */
#ifndef QD_DATA_TOKENIZER_TOKENIZER_IMPL_H
#define QD_DATA_TOKENIZER_TOKENIZER_IMPL_H

#include "data/tokenizer/decoder.h"
#include "data/tokenizer/normalize/normalize.h"
#include "data/tokenizer/split/split.h"
#include "data/tokenizer/trie.h"
#include "data/tokenizer/unigram.h"
#include "data/tokenizer/vocab.h"

#include <quadrille/tokenizer.h>

/* What becomes of the matches of a splitting step. */
typedef enum qd_behavior {
    QD_ISOLATED,
    QD_REMOVED,
    QD_CONTIGUOUS,    /* neighbouring matches are one piece */
    QD_WITH_PREVIOUS, /* a match belongs to the piece before it */
    QD_WITH_NEXT
} qd_behavior;

typedef enum qd_stage_kind {
    QD_STAGE_SPLIT,      /* at the matches of an expression */
    QD_STAGE_PREFIX,     /* a space before the text */
    QD_STAGE_CHARACTERS, /* at characters with one of the properties or classes, or at `mark` */
    QD_STAGE_WORDS,      /* Whitespace: words and runs of symbols */
    QD_STAGE_METASPACE,  /* spaces become `mark` */
    QD_STAGE_BYTES       /* each byte as a character, GPT-2's table */
} qd_stage_kind;

/* One step of splitting. */
typedef struct qd_stage {
    qd_stage_kind kind;
    qd_pattern pattern;
    qd_regex *regex;    /* for QD_PATTERN_CUSTOM */
    char *source;       /* its text, NUL-terminated */
    qd_behavior behavior;
    bool invert;        /* what does not match counts as a match */
    bool byte_level;    /* stored in the file as the expression of ByteLevel */
    unsigned properties, classes; /* QD_PUNCTUATION …, QD_SPACE … */
    char mark[5];       /* one character */
    enum { QD_PREPEND_ALWAYS, QD_PREPEND_FIRST, QD_PREPEND_NEVER } prepend;
    bool split;         /* Metaspace: pieces start at marks */
} qd_stage;

enum { QD_MOST_STAGES = 16, QD_MOST_FRAME = 8, QD_MOST_AFFIX = 64 };

typedef enum qd_model_kind {
    QD_MODEL_BYTES,    /* BPE on bytes: ByteLevel, tiktoken. Tokens are stored as their bytes */
    QD_MODEL_BPE,      /* BPE on characters. Tokens of this and the following are stored as written */
    QD_MODEL_UNIGRAM,
    QD_MODEL_WORDPIECE
} qd_model_kind;

/* Properties of an added token, in addition to its entry in the vocabulary. */
typedef struct qd_added {
    uint32_t id;
    bool special, single_word, left_strip, right_strip, normalized;
} qd_added;

struct qd_tokenizer {
    char *name; /* for messages */
    qd_vocab vocab;
    qd_model_kind model;
    bool whole_words;    /* a piece that is a token is encoded as that token, without merging */
    bool tiktoken;       /* loaded from a tiktoken file: ranks are ids */
    bool shared_ranks;   /* several pairs produce the same token with the same rank */
    uint32_t byte_id[256]; /* token of a byte (QD_MODEL_BYTES) or of <0x..>, or QD_NO_TOKEN */
    bool byte_fallback;  /* characters without a token are encoded as <0x..> */
    uint32_t unknown;    /* token for what has none; QD_NO_TOKEN: it is dropped */
    bool fuse_unknown;
    char prefix[QD_MOST_AFFIX], suffix[QD_MOST_AFFIX]; /* of symbols: not the first, the last */
    int64_t most_characters; /* WordPiece: longer words are unknown */
    qd_unigram unigram;
    char cut_mark[5];    /* pieces may be cut before this character unless it follows itself; "": not */
    qd_normalizer normalizer;
    qd_stage stages[QD_MOST_STAGES];
    int stage_count;
    qd_decoder decoder;
    struct qd_surface {
        uint32_t offset, length;
    } *surfaces;         /* (vocab.size): decoded text of each token; NULL: the token's bytes */
    char *surface_text;
    qd_added *added;
    size_t added_count;
    qd_trie raw, normalized; /* added tokens by text; values index `added` */
    uint32_t before[QD_MOST_FRAME], after[QD_MOST_FRAME];
    int before_count, after_count;
    int32_t end;         /* of texts, as the files next to this one state it; -1: they do not */
    char *end_problem;   /* they name a token that is not in the vocabulary; NULL: they do not */
    struct qd_sentencepiece *sentencepiece; /* NULL: another format */
    char *source;        /* the file, where it is saved as it was read */
    size_t source_length;
};

qd_status qd_tokenizer_new(const char *name, qd_tokenizer **tokenizer);
/* Index of the added token with this content, or -1. */
int64_t qd_tokenizer_find_added(const qd_tokenizer *tokenizer, const char *content, size_t length);
/* Builds byte tokens, tries and decoded texts once the vocabulary and the added tokens are
 * complete. */
qd_status qd_tokenizer_finish(qd_tokenizer *tokenizer);
/* Appends an empty stage. */
qd_status qd_tokenizer_add_stage(qd_tokenizer *tokenizer, const char *where, qd_stage_kind kind, qd_stage **stage);
/* Appends a stage that splits at a known pattern or (QD_PATTERN_CUSTOM) at the expression
 * `source`. */
qd_status qd_tokenizer_add_split(qd_tokenizer *tokenizer, const char *where, const char *source, size_t length);

qd_status qd_tokenizer_read_json(qd_tokenizer *tokenizer, const char *text, size_t length);
/* Whether a file is binary, which of all formats SentencePiece's is. */
bool qd_sentencepiece_is(const char *text, size_t length);
qd_status qd_tokenizer_read_sentencepiece(qd_tokenizer *tokenizer, const char *text, size_t length);
qd_status qd_tokenizer_read_tiktoken(qd_tokenizer *tokenizer, const char *text, size_t length, const char *encoding);

#endif
