/* The tokenizer object: loading by file type, lookup of special tokens, decoding, safe cuts. */
#include "data/tokenizer/tokenizer_impl.h"

#include "base/text/strbuf.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 30 };

qd_status qd_tokenizer_new(const char *name, qd_tokenizer **tokenizer)
{
    qd_tokenizer *made = calloc(1, sizeof *made);
    if (made)
        made->name = strdup(name);
    if (!made || !made->name) {
        free(made);
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for a tokenizer", name);
    }
    made->unknown = QD_NO_TOKEN;
    *tokenizer = made;
    return QD_OK;
}

void qd_tokenizer_destroy(qd_tokenizer *tokenizer)
{
    if (!tokenizer)
        return;
    for (int i = 0; i < tokenizer->stage_count; i++) {
        qd_regex_destroy(tokenizer->stages[i].regex);
        free(tokenizer->stages[i].source);
    }
    qd_vocab_free(&tokenizer->vocab);
    qd_trie_free(&tokenizer->raw);
    qd_trie_free(&tokenizer->normalized);
    free(tokenizer->added);
    free(tokenizer->name);
    free(tokenizer);
}

qd_status qd_tokenizer_load_text(const char *name, const char *text, size_t length, const char *encoding,
                                 qd_tokenizer **tokenizer)
{
    qd_tokenizer *made;
    QD_TRY(qd_tokenizer_new(name, &made));
    size_t at = 0;
    while (at < length && strchr(" \t\r\n", text[at]) && text[at])
        at++;
    qd_status status;
    if (at == length)
        status = QD_FAIL(QD_USAGE, "%s: the file is empty; expected a tokenizer.json or a tiktoken file", name);
    else if (text[at] != '{')
        status = qd_tokenizer_read_tiktoken(made, text, length, encoding);
    else if (encoding)
        status = QD_FAIL(QD_USAGE, "%s: a tokenizer.json defines its own encoding; '%s' can only be set for a "
                                   "tiktoken file", name, encoding);
    else
        status = qd_tokenizer_read_json(made, text, length);
    if (status == QD_OK)
        status = qd_tokenizer_finish(made);
    if (status != QD_OK) {
        qd_tokenizer_destroy(made);
        return status;
    }
    *tokenizer = made;
    return QD_OK;
}

qd_status qd_tokenizer_load(const char *path, const char *encoding, qd_tokenizer **tokenizer)
{
    char *text;
    size_t length;
    QD_TRY(qd_file_read(path, MOST_BYTES, &text, &length));
    qd_status status = qd_tokenizer_load_text(path, text, length, encoding, tokenizer);
    free(text);
    return status;
}

static int by_id(const void *a, const void *b)
{
    const qd_added *x = a, *y = b;
    return x->id < y->id ? -1 : x->id > y->id;
}

qd_status qd_tokenizer_finish(qd_tokenizer *tokenizer)
{
    if (tokenizer->added_count)
        qsort(tokenizer->added, tokenizer->added_count, sizeof *tokenizer->added, by_id);
    for (int byte = 0; byte < 256; byte++) {
        uint8_t bytes[1] = {(uint8_t)byte};
        tokenizer->byte_id[byte] = qd_vocab_find(&tokenizer->vocab, bytes, 1, QD_TOKEN_BYTES);
    }
    for (size_t i = 0; i < tokenizer->added_count; i++) {
        const qd_added *added = &tokenizer->added[i];
        size_t length;
        const uint8_t *content = qd_vocab_bytes(&tokenizer->vocab, added->id, &length);
        if (i > 0 && added[-1].id == added->id)
            return QD_FAIL(QD_USAGE, "%s: the added token %.*s appears twice", tokenizer->name, (int)length,
                           (const char *)content);
        QD_TRY(qd_trie_add(added->normalized ? &tokenizer->normalized : &tokenizer->raw, content, length, (int32_t)i));
    }
    return QD_OK;
}

qd_status qd_tokenizer_add_split(qd_tokenizer *tokenizer, const char *where, const char *source, size_t length)
{
    if (tokenizer->stage_count == QD_MOST_STAGES)
        return QD_FAIL(QD_USAGE, "%s: more than %d split steps; that many are not supported", where, QD_MOST_STAGES);
    qd_stage *stage = &tokenizer->stages[tokenizer->stage_count];
    *stage = (qd_stage){.kind = QD_STAGE_SPLIT, .keep_matches = true, .keep_gaps = true};
    stage->pattern = qd_pattern_by_regex(source, length);
    if (stage->pattern == QD_PATTERN_CUSTOM)
        QD_TRY(qd_regex_create(where, source, length, &stage->regex));
    tokenizer->stage_count++;
    stage->source = strndup(source, length);
    return stage->source ? QD_OK : QD_FAIL(QD_NO_MEMORY, "%s: no memory for a regular expression", where);
}

int64_t qd_tokenizer_find_added(const qd_tokenizer *tokenizer, const char *content, size_t length)
{
    for (size_t i = 0; i < tokenizer->added_count; i++) {
        size_t size;
        const uint8_t *bytes = qd_vocab_bytes(&tokenizer->vocab, tokenizer->added[i].id, &size);
        if (size == length && memcmp(bytes, content, length) == 0)
            return (int64_t)i;
    }
    return -1;
}

int32_t qd_tokenizer_size(const qd_tokenizer *tokenizer)
{
    return (int32_t)tokenizer->vocab.size;
}

int32_t qd_tokenizer_special(const qd_tokenizer *tokenizer, const char *content)
{
    int64_t found = qd_tokenizer_find_added(tokenizer, content, strlen(content));
    return found < 0 ? -1 : (int32_t)tokenizer->added[found].id;
}

int32_t qd_tokenizer_before(const qd_tokenizer *tokenizer, int index)
{
    return index >= 0 && index < (int)tokenizer->before_count ? (int32_t)tokenizer->before[index] : -1;
}

const char *qd_tokenizer_bytes(const qd_tokenizer *tokenizer, int32_t id, size_t *length)
{
    if (id < 0 || qd_vocab_kind(&tokenizer->vocab, (uint32_t)id) == QD_TOKEN_NONE)
        return NULL;
    return (const char *)qd_vocab_bytes(&tokenizer->vocab, (uint32_t)id, length);
}

bool qd_tokenizer_is_special(const qd_tokenizer *tokenizer, int32_t id)
{
    qd_added key = {.id = (uint32_t)id};
    const qd_added *found = tokenizer->added_count ? bsearch(&key, tokenizer->added, tokenizer->added_count,
                                                             sizeof *tokenizer->added, by_id) : NULL;
    return found && found->special;
}

qd_status qd_tokenizer_decode(const qd_tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special,
                              qd_strbuf *text)
{
    for (size_t i = 0; i < count; i++) {
        size_t length;
        const char *bytes = qd_tokenizer_bytes(tokenizer, ids[i], &length);
        if (!bytes)
            return QD_FAIL(QD_USAGE, "token %d at position %zu does not exist: %s has ids from 0 to %u", ids[i], i,
                           tokenizer->name, tokenizer->vocab.size - 1);
        if (skip_special && qd_tokenizer_is_special(tokenizer, ids[i]))
            continue;
        qd_strbuf_append(text, bytes, length);
    }
    return text->failed ? QD_FAIL(QD_NO_MEMORY, "no memory for the text of %zu tokens", count) : QD_OK;
}

size_t qd_tokenizer_cut(const qd_tokenizer *tokenizer, const char *text, size_t at)
{
    /* Between a line end that follows something visible and a letter, every known pattern splits,
     * whatever the context: the line end neither joins the letter nor waits for more space. */
    for (int i = 0; i < tokenizer->stage_count; i++)
        if (tokenizer->stages[i].kind == QD_STAGE_PREFIX || tokenizer->stages[i].pattern == QD_PATTERN_CUSTOM)
            return 0;
    if (tokenizer->stage_count == 0)
        return 0;
    for (size_t i = 0; i < tokenizer->added_count; i++) {
        size_t length;
        const uint8_t *content = qd_vocab_bytes(&tokenizer->vocab, tokenizer->added[i].id, &length);
        if (tokenizer->added[i].left_strip || tokenizer->added[i].single_word || memchr(content, '\n', length))
            return 0;
    }
    for (; at >= 2; at--) {
        char visible = text[at - 2], letter = text[at];
        if (text[at - 1] == '\n' && visible > ' ' && visible < 0x7f &&
            ((letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z')))
            return at;
    }
    return 0;
}
