/* Examples for supervised fine-tuning: lines of .jsonl files with a prompt and a completion, or
 * with the messages of a conversation, as tokens of which only those of completions and of the
 * assistant count in the loss. */
#ifndef QD_DATA_EXAMPLES_EXAMPLES_H
#define QD_DATA_EXAMPLES_EXAMPLES_H

#include <quadrille/data.h>

#include "data/chat/chat.h"
#include "data/files.h"

typedef struct qd_examples {
    int32_t *tokens; /* (token_count): of all examples, one after another */
    uint8_t *counted; /* (token_count): whether the loss counts the prediction of the token */
    int64_t token_count;
    int64_t *first; /* (count): where each begins; at least 2 tokens each, at least one of them counted */
    int64_t count;
    int64_t cut;     /* examples that were longer than `most` tokens and lost their end */
    int64_t skipped; /* that were left out: longer than `most`, or without a counted token */
} qd_examples;

typedef struct qd_examples_job {
    const qd_file_list *files; /* .jsonl */
    const qd_text_encoder *encoder;
    const qd_chat *chat; /* renders messages; NULL: they are refused, */
    const char *no_chat; /* for this reason */
    bool pairs;          /* lines have a prompt with a chosen completion and a rejected one; both become examples, one after the other */
    int64_t most; /* tokens of an example */
    qd_overlong overlong;
    int threads; /* 0: all cores */
    bool (*progress)(void *context, const qd_tokenize_progress *progress); /* NULL is legal */
    void *progress_context;
} qd_examples_job;

/* Reads all examples in the order of the files. The result does not depend on the number of
 * threads. QD_USAGE names file and line of an example that cannot be used. */
qd_status qd_examples_read(const qd_examples_job *job, qd_examples *examples);
/* QD_USAGE if text of the messages or tools (NULL: none) of a conversation would pass for a special
 * token of the template, unless the encoder's policy is QD_SPECIAL_ALLOW. */
qd_status qd_conversation_check(const qd_text_encoder *encoder, int thread, const qd_json_node *messages, const qd_json_node *tools);
void qd_examples_free(qd_examples *examples); /* legal for {0} */
#endif
