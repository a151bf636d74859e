/* Splits text into pieces; BPE merges tokens within a piece only. The published patterns are
 * hand-written; any other regular expression runs in PCRE2. Both treat each invalid UTF-8 sequence
 * as U+FFFD. */
#ifndef QD_DATA_TOKENIZER_SPLIT_SPLIT_H
#define QD_DATA_TOKENIZER_SPLIT_SPLIT_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum qd_pattern {
    QD_PATTERN_GPT2,
    QD_PATTERN_CL100K, /* as in tiktoken: white space at the end of the text is one piece */
    QD_PATTERN_LLAMA3, /* cl100k as first published, and as in Llama 3 */
    QD_PATTERN_QWEN2,  /* Llama 3 with single digits */
    QD_PATTERN_O200K,
    QD_PATTERN_COUNT,
    QD_PATTERN_CUSTOM = QD_PATTERN_COUNT
} qd_pattern;

/* "gpt2" …; QD_PATTERN_CUSTOM if the name is unknown. */
qd_pattern qd_pattern_by_name(const char *name);
/* The regular expression, as written to tokenizer.json. */
const char *qd_pattern_regex(qd_pattern pattern);
/* The pattern with this regular expression, in one of its known spellings. */
qd_pattern qd_pattern_by_regex(const char *regex, size_t length);

/* End of the piece that starts at `at` (at < end). Not for QD_PATTERN_CUSTOM. */
const uint8_t *qd_pattern_next(qd_pattern pattern, const uint8_t *at, const uint8_t *end);

/* A compiled expression, shared by threads, and the state one thread needs for matching. */
typedef struct qd_regex qd_regex;
typedef struct qd_regex_state qd_regex_state;

/* `where` names the expression in messages. An expression that can match the empty string is
 * refused. */
qd_status qd_regex_create(const char *where, const char *regex, size_t length, qd_regex **compiled);
void qd_regex_destroy(qd_regex *compiled);
qd_status qd_regex_state_create(qd_regex_state **state);
void qd_regex_state_destroy(qd_regex_state *state);

/* Calls emit(context, offset, length, matched) for the matches and the gaps between them, in order;
 * together they are the whole text. Stops at the first error. The state is in use while emit runs:
 * a nested split needs another one. */
typedef qd_status (*qd_regex_emit)(void *context, size_t offset, size_t length, bool matched);
qd_status qd_regex_split(const qd_regex *compiled, qd_regex_state *state, const uint8_t *text, size_t length,
                         qd_regex_emit emit, void *context);

#endif
