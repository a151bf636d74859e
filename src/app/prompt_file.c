/* Reads a file of prompts. */
#include "app/prompt_file.h"

#include "base/error.h"
#include "base/file.h"
#include "base/text/json.h"
#include "base/text/strbuf.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 30 };

typedef struct reading {
    qd_prompt_file *file;
    qd_prompt_kind kind;
    bool json;
    const char *path;
    qd_strbuf members;
    size_t capacity;
} reading;

static qd_status add(reading *r, qd_prompt prompt)
{
    qd_prompt_file *f = r->file;
    if (f->count == r->capacity) {
        size_t capacity = r->capacity ? 2 * r->capacity : 64;
        qd_prompt *grown = realloc(f->prompts, capacity * sizeof *grown);
        if (!grown)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory for %zu prompts", r->path, capacity);
        f->prompts = grown;
        r->capacity = capacity;
    }
    f->prompts[f->count++] = prompt;
    return QD_OK;
}

/* The text of `prompt` is copied behind those before it; its address is known at the end. */
static qd_status add_json(reading *r, const char *text, size_t length, int64_t number)
{
    char name[PATH_MAX + 32];
    qd_json *document;
    size_t bytes = 0;
    snprintf(name, sizeof name, "%s (line %lld)", r->path, (long long)number);
    QD_TRY(qd_json_load_collected(name, text, length, &document));
    const qd_json_node *root = qd_json_root(document);
    const char *prompt = qd_json_as_bytes(qd_json_member(root, "prompt"), &bytes);
    qd_status status;
    if (qd_json_member(root, "messages")) {
        status = add(r, (qd_prompt){QD_PROMPT_MESSAGES, text, length});
    } else if (prompt) {
        status = add(r, (qd_prompt){r->kind, NULL, bytes});
        qd_strbuf_append(&r->members, prompt, bytes);
    } else {
        status = QD_FAIL(QD_USAGE, "%s: a line needs the text 'prompt' or the list 'messages'", name);
    }
    qd_json_destroy(document);
    return status;
}

static qd_status read_lines(reading *r, size_t length)
{
    int64_t number = 1;
    for (const char *at = r->file->text, *end = at + length; at < end; number++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        size_t count = (size_t)((stop ? stop : end) - at), shown = count;
        while (shown > 0 && (at[shown - 1] == '\r' || at[shown - 1] == ' ' || at[shown - 1] == '\t'))
            shown--;
        if (shown > 0)
            QD_TRY(r->json ? add_json(r, at, count, number) : add(r, (qd_prompt){r->kind, at, count - (at[count - 1] == '\r')}));
        at += count + 1;
    }
    return r->file->count > 0 ? QD_OK : QD_FAIL(QD_USAGE, "%s: has no prompt", r->path);
}

static qd_status take_members(reading *r)
{
    if (r->members.failed)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its prompts", r->path);
    const char *at = r->file->members = r->members.data;
    r->members = (qd_strbuf){0};
    for (size_t i = 0; i < r->file->count; i++)
        if (!r->file->prompts[i].text) {
            r->file->prompts[i].text = at ? at : "";
            at += r->file->prompts[i].length;
        }
    return QD_OK;
}

qd_status qd_prompt_file_read(const char *path, qd_prompt_kind kind, qd_prompt_file *file)
{
    size_t length, name = strlen(path);
    *file = (qd_prompt_file){0};
    reading r = {.file = file, .kind = kind, .json = name > 6 && strcmp(path + name - 6, ".jsonl") == 0, .path = path};
    QD_TRY(qd_file_read(path, MOST_BYTES, &file->text, &length));
    qd_status status = read_lines(&r, length);
    if (status == QD_OK)
        status = take_members(&r);
    qd_strbuf_free(&r.members);
    return status;
}

void qd_prompt_file_free(qd_prompt_file *file)
{
    free(file->prompts);
    free(file->text);
    free(file->members);
    *file = (qd_prompt_file){0};
}
