/* What the readers of examples share: completions (examples.c) and pairs of them
 * (preferences.c). */
#ifndef QD_DATA_EXAMPLES_EXAMPLES_IMPL_H
#define QD_DATA_EXAMPLES_EXAMPLES_IMPL_H

#include "data/encode.h"
#include "data/examples/examples.h"

typedef struct qd_example {
    qd_tokens tokens;
    uint8_t *counted; /* (tokens.count): whether the loss counts the prediction of the token; NULL: none yet */
} qd_example;

/* Part of a conversation: `messages` (the first `count`; 0: all), then `more`. */
typedef struct qd_talk {
    const qd_json_node *messages; /* a list */
    size_t count;
    const qd_json_node *more;  /* a list, or NULL: none */
    const qd_json_node *tools; /* a list, or NULL: none */
} qd_talk;

/* How many tokens two lists have in common at their start. */
size_t qd_example_common(const qd_tokens *a, const qd_tokens *b);
/* Tokens [from, to) count. */
qd_status qd_example_count(qd_example *example, size_t from, size_t to);
/* Encodes prompt (text[0]) and completion (text[1]) together, so that the tokens are those of the
 * whole text, with the end of the document. *from: the first token that reaches into the
 * completion. */
qd_status qd_example_text(const qd_examples_job *job, int thread, const char *const text[2], const size_t length[2], qd_example *example,
                          size_t *from);
/* QD_USAGE unless the job can render messages, and these are lists. */
qd_status qd_talk_check(const qd_examples_job *job, int thread, const qd_talk *talk);
/* The text of messages, with what the template puts before an answer or without. */
qd_status qd_talk_render(const qd_examples_job *job, const qd_talk *talk, bool answer, qd_strbuf *text);
qd_status qd_talk_encode(const qd_examples_job *job, int thread, const qd_strbuf *text, qd_tokens *out);
void qd_example_free(qd_example *example);

/* preferences.c: the chosen completion and the rejected one of a line, each with the prompt. */
qd_status qd_preference_encode(const qd_examples_job *job, int thread, const qd_json *document, qd_example pair[2]);
#endif
