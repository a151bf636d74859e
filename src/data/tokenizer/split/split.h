/* Cuts text into the pieces inside which tokens are merged. The patterns that everyone uses are
 * written out by hand; any other regular expression goes through PCRE2. Both cut broken UTF-8 as if
 * each broken part were U+FFFD. */
#ifndef QD_DATA_TOKENIZER_SPLIT_SPLIT_H
#define QD_DATA_TOKENIZER_SPLIT_SPLIT_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum qd_pattern {
    QD_PATTERN_GPT2,
    QD_PATTERN_CL100K, /* as tiktoken cuts: space at the very end stays together */
    QD_PATTERN_LLAMA3, /* as cl100k was first published, and as Llama 3 cuts */
    QD_PATTERN_QWEN2,  /* Llama 3 with one digit at a time */
    QD_PATTERN_O200K,
    QD_PATTERN_COUNT,
    QD_PATTERN_CUSTOM = QD_PATTERN_COUNT
} qd_pattern;

/* "gpt2" …; QD_PATTERN_CUSTOM when there is none of that name. */
qd_pattern qd_pattern_by_name(const char *name);
/* The regular expression, as written to tokenizer.json. */
const char *qd_pattern_regex(qd_pattern pattern);
/* The pattern whose regular expression, in one of its known spellings, this is. */
qd_pattern qd_pattern_by_regex(const char *regex, size_t length);

/* End of the piece that starts at `at` (at < end). Not for QD_PATTERN_CUSTOM. */
const uint8_t *qd_pattern_next(qd_pattern pattern, const uint8_t *at, const uint8_t *end);

/* A compiled expression, shared by threads, and what one thread needs to match. */
typedef struct qd_regex qd_regex;
typedef struct qd_regex_state qd_regex_state;

/* `where` names the expression in messages. An expression that may match nothing is refused. */
qd_status qd_regex_create(const char *where, const char *regex, size_t length, qd_regex **compiled);
void qd_regex_destroy(qd_regex *compiled);
qd_status qd_regex_state_create(qd_regex_state **state);
void qd_regex_state_destroy(qd_regex_state *state);

/* Calls emit(context, offset, length, matched) for the matches and the gaps between them, in order,
 * which together are the whole text. Stops at the first failure. The state is in use while emit
 * runs: it needs another to split further. */
typedef qd_status (*qd_regex_emit)(void *context, size_t offset, size_t length, bool matched);
qd_status qd_regex_split(const qd_regex *compiled, qd_regex_state *state, const uint8_t *text, size_t length,
                         qd_regex_emit emit, void *context);

#endif
