/* Normalizers of tokenizer.json: steps that rewrite a text before it is split. Each gives the text
 * that the package `tokenizers` gives. */
#ifndef QD_DATA_TOKENIZER_NORMALIZE_NORMALIZE_H
#define QD_DATA_TOKENIZER_NORMALIZE_NORMALIZE_H

#include "data/tokenizer/normalize/charsmap.h"
#include "data/tokenizer/split/split.h"

#include <quadrille/strbuf.h>

typedef enum qd_normal_kind {
    QD_NORMAL_NFC,
    QD_NORMAL_NFD,
    QD_NORMAL_NFKC,
    QD_NORMAL_NFKD,
    QD_NORMAL_LOWERCASE,
    QD_NORMAL_STRIP,         /* left, right */
    QD_NORMAL_STRIP_ACCENTS,
    QD_NORMAL_NONSPACING,    /* the strip_accents of BertNormalizer, after NFD */
    QD_NORMAL_CLEAN,         /* its clean_text */
    QD_NORMAL_CHINESE,       /* its handle_chinese_chars */
    QD_NORMAL_REPLACE,       /* pattern or regex, by content */
    QD_NORMAL_PREPEND,       /* content */
    QD_NORMAL_BYTES,         /* each byte as a character, GPT-2's table */
    QD_NORMAL_PRECOMPILED    /* SentencePiece's character map */
} qd_normal_kind;

typedef struct qd_normal_step {
    qd_normal_kind kind;
    bool left, right;
    char *content, *pattern; /* NUL-terminated; may contain any other byte */
    size_t content_length, pattern_length;
    qd_regex *regex;         /* instead of pattern */
    qd_charsmap *map;
} qd_normal_step;

enum { QD_MOST_NORMAL_STEPS = 32 };
typedef struct qd_normalizer {
    qd_normal_step steps[QD_MOST_NORMAL_STEPS];
    int count;
} qd_normalizer;

void qd_normalizer_free(qd_normalizer *normalizer);
/* Whether the text may be cut before an ASCII letter that follows a line end: the normalized parts
 * together are the normalized whole. */
bool qd_normalizer_cuts(const qd_normalizer *normalizer);

/* Buffers of one thread, initialized with {0}. */
typedef struct qd_normal_work {
    qd_strbuf texts[2];
    uint32_t *segment; /* characters with their combining class */
    size_t count, capacity;
    qd_regex_state *regex;
} qd_normal_work;
void qd_normal_work_free(qd_normal_work *work);

/* *result is the text itself or belongs to `work` until the next call. *zero: how many bytes at the
 * start of the text belong to the first character of the document; the same for the result. */
qd_status qd_normalize(const qd_normalizer *normalizer, qd_normal_work *work, const uint8_t *text, size_t length, size_t *zero,
                       const uint8_t **result, size_t *result_length);

#endif
