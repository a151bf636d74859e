/* A file of prompts: one per line, as text or as JSON. */
#ifndef QD_APP_PROMPT_FILE_H
#define QD_APP_PROMPT_FILE_H

#include <quadrille/generate.h>

typedef struct qd_prompt_file {
    qd_prompt *prompts;
    size_t count;
    char *text; /* what the prompts point to */
    char *members; /* and members of JSON lines */
} qd_prompt_file;

/* Lines that are not empty, each a prompt of the given kind; the file of a name in .jsonl has
 * objects with `prompt` (of that kind) or `messages`. QD_USAGE names the line that is neither. */
qd_status qd_prompt_file_read(const char *path, qd_prompt_kind kind, qd_prompt_file *file);
void qd_prompt_file_free(qd_prompt_file *file); /* legal for {0} */
#endif
