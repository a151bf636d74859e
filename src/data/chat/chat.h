/* Chat templates: renders a list of messages as the text that a model was trained on.
 *
 * A template is Jinja text from tokenizer_config.json or chat_template.jinja. It is interpreted,
 * not executed: it can read the variables of one rendering and nothing else. What is rendered is
 * what transformers renders; constructs outside the implemented subset are refused by name, with
 * line and column, when the template is loaded. Size, nesting, steps, memory and output are
 * limited. */
#ifndef QD_DATA_CHAT_CHAT_H
#define QD_DATA_CHAT_CHAT_H

#include "base/text/json.h"
#include "base/text/strbuf.h"

typedef struct qd_chat qd_chat;

/* `name` is used in messages: "name:line:column: …". QD_USAGE: a syntax error or something that is
 * not implemented. A loaded template may be rendered by several threads concurrently. */
qd_status qd_chat_load_text(const char *name, const char *text, size_t length, qd_chat **chat);

/* The template and the special tokens of a tokenizer folder: chat_template.jinja, otherwise
 * `chat_template` of tokenizer_config.json. `which` selects one of several named templates; NULL is
 * "default". QD_USAGE: the folder has no (such) template. */
qd_status qd_chat_load_folder(const char *folder, const char *which, qd_chat **chat);
/* The default template of a folder, or a file with a template. */
qd_status qd_chat_load(const char *path, qd_chat **chat);
/* The path (PATH_MAX) of the template that belongs to a tokenizer file: its folder, or what a run
 * keeps next to its tokenizer. False: neither has one, and the path is the folder. */
bool qd_chat_find(const char *tokenizer, char *path);
void qd_chat_destroy(qd_chat *chat); /* NULL is legal */

/* Defines a variable of all renderings, such as "bos_token", as a copy of the text. */
qd_status qd_chat_set_token(qd_chat *chat, const char *variable, const char *text);
/* The text of such a variable; NULL if it was never set. */
const char *qd_chat_token(const qd_chat *chat, const char *variable);

typedef struct qd_chat_input {
    const qd_json_node *messages;  /* a list of objects (role, content, …) */
    size_t message_count;          /* only the first so many of them; 0: all */
    const qd_json_node *more;      /* messages that follow these, or NULL */
    const qd_json_node *tools;     /* a list, or NULL: none */
    const qd_json_node *documents; /* a list, or NULL: none */
    const qd_json_node *variables; /* an object with further variables (enable_thinking), or NULL; replaces tokens */
    bool add_generation_prompt;
    const char *date; /* "2025-01-31" or "2025-01-31 12:30:00", for strftime_now(); NULL: it is refused */
} qd_chat_input;

/* Bytes [begin, end) of the text that came from a {% generation %} block. */
typedef struct qd_chat_span {
    size_t begin, end;
} qd_chat_span;
typedef struct qd_chat_spans {
    qd_chat_span *spans;
    size_t count, capacity;
} qd_chat_spans;
void qd_chat_spans_free(qd_chat_spans *spans);

/* Appends the rendered text to `text` (positions of spans are relative to what is appended). spans:
 * NULL, or receives the spans of this rendering instead of its old ones. QD_USAGE: the messages are
 * not what the template expects, it calls raise_exception(), or it exceeds a limit; `text` then
 * keeps its old length. */
qd_status qd_chat_render(const qd_chat *chat, const qd_chat_input *input, qd_strbuf *text, qd_chat_spans *spans);

/* Whether the template has {% generation %} blocks: only then there are spans. */
bool qd_chat_has_generation(const qd_chat *chat);

#endif
