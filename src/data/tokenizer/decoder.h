/* Decoders of tokenizer.json: steps that turn the texts of tokens into text. */
#ifndef QD_DATA_TOKENIZER_DECODER_H
#define QD_DATA_TOKENIZER_DECODER_H

#include "data/tokenizer/split/split.h"

#include <quadrille/strbuf.h>

typedef enum qd_decode_kind {
    QD_DECODE_BYTES,         /* characters to bytes, GPT-2's table; joins */
    QD_DECODE_METASPACE,     /* content: the mark, which becomes a space */
    QD_DECODE_REPLACE,       /* pattern or regex, by content */
    QD_DECODE_STRIP,         /* up to start and stop times content */
    QD_DECODE_BYTE_FALLBACK, /* <0x..> to bytes */
    QD_DECODE_FUSE,          /* joins */
    QD_DECODE_WORDPIECE,     /* content: the prefix of continued words */
    QD_DECODE_BPE            /* content: the suffix of words */
} qd_decode_kind;

typedef struct qd_decode_step {
    qd_decode_kind kind;
    char *content, *pattern; /* NUL-terminated */
    qd_regex *regex;
    int64_t start, stop;
    bool flag;               /* METASPACE: no mark was prepended; WORDPIECE: clean up spaces */
} qd_decode_step;

enum { QD_MOST_DECODE_STEPS = 16 };
typedef struct qd_decoder {
    qd_decode_step steps[QD_MOST_DECODE_STEPS];
    int count;
    bool joined; /* there is no decoder: tokens are joined with spaces */
} qd_decoder;

void qd_decoder_free(qd_decoder *decoder);

/* A list of texts that the steps rewrite. Initialized with {0}. */
typedef struct qd_texts {
    qd_strbuf bytes;
    size_t *ends;      /* (count) */
    size_t count, capacity;
} qd_texts;
void qd_texts_free(qd_texts *texts);
qd_status qd_texts_add(qd_texts *texts, const void *bytes, size_t length);

/* Appends the decoded text of all tokens to `out`. */
qd_status qd_decoder_run(const qd_decoder *decoder, qd_texts *texts, qd_strbuf *out);
/* Appends what one token adds to a text that other tokens precede. */
qd_status qd_decoder_surface(const qd_decoder *decoder, const void *token, size_t length, qd_strbuf *out);

#endif
