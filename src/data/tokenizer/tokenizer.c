/* The tokenizer object: loading by file type, lookup of special tokens, decoding, safe cuts. */
#define _GNU_SOURCE /* memmem */
#include "data/tokenizer/files/settings.h"
#include "data/tokenizer/sentencepiece.h"
#include "data/tokenizer/tokenizer_impl.h"

#include "base/text/strbuf.h"

#include <stdio.h>
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
    made->end = -1;
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
    qd_normalizer_free(&tokenizer->normalizer);
    qd_decoder_free(&tokenizer->decoder);
    qd_unigram_free(&tokenizer->unigram);
    qd_sentencepiece_destroy(tokenizer->sentencepiece);
    free(tokenizer->surfaces);
    free(tokenizer->surface_text);
    free(tokenizer->source);
    qd_vocab_free(&tokenizer->vocab);
    qd_trie_free(&tokenizer->raw);
    qd_trie_free(&tokenizer->normalized);
    free(tokenizer->added);
    free(tokenizer->end_problem);
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
        status = QD_FAIL(QD_USAGE, "%s: the file is empty; expected a tokenizer.json, a tiktoken file or a SentencePiece model", name);
    else if (!encoding && qd_sentencepiece_is(text, length))
        status = qd_tokenizer_read_sentencepiece(made, text, length);
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

/* A name may also be that of an ordinary token. An id of config.json counts if it is a special
 * token: the model may have been trained with another tokenizer. */
static qd_status find_end(qd_tokenizer *tokenizer, const char *path)
{
    qd_strbuf name = {0}, file = {0}, problem = {0};
    int64_t id;
    qd_status status = qd_settings_end(path, &name, &id, &file);
    if (status == QD_OK && name.length > 0) {
        uint32_t plain = qd_vocab_find(&tokenizer->vocab, name.data, name.length, QD_TOKEN_BYTES);
        tokenizer->end = qd_tokenizer_special(tokenizer, name.data);
        if (tokenizer->end < 0 && plain != QD_NO_TOKEN)
            tokenizer->end = (int32_t)plain;
        if (tokenizer->end < 0) {
            qd_strbuf_printf(&problem, "%s: 'eos_token' is %s, which %s does not have", file.data, name.data, path);
            status = qd_strbuf_take(&problem, &tokenizer->end_problem);
        }
    } else if (status == QD_OK && id >= 0 && id <= INT32_MAX && qd_tokenizer_is_special(tokenizer, (int32_t)id)) {
        tokenizer->end = (int32_t)id;
    }
    qd_strbuf_free(&name);
    qd_strbuf_free(&file);
    return status;
}

qd_status qd_tokenizer_load(const char *path, const char *encoding, qd_tokenizer **tokenizer)
{
    char *text;
    size_t length;
    qd_tokenizer *made = NULL;
    QD_TRY(qd_file_read(path, MOST_BYTES, &text, &length));
    qd_status status = qd_tokenizer_load_text(path, text, length, encoding, &made);
    free(text);
    QD_TRY(status);
    status = find_end(made, path);
    if (status != QD_OK) {
        qd_tokenizer_destroy(made);
        return status;
    }
    *tokenizer = made;
    return QD_OK;
}

qd_status qd_tokenizer_end(const qd_tokenizer *tokenizer, int32_t *id)
{
    *id = tokenizer->end;
    return tokenizer->end_problem ? QD_FAIL(QD_USAGE, "%s", tokenizer->end_problem) : QD_OK;
}

static int by_id(const void *a, const void *b)
{
    const qd_added *x = a, *y = b;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Adds the texts of added tokens to the tries: as they are, or normalized as the text will be. Of
 * tokens that become equal, the first special one wins, so they are added in reverse. */
static qd_status add_tries(qd_tokenizer *tokenizer)
{
    qd_normal_work work = {0};
    qd_status status = QD_OK;
    for (int special = 0; special < 2; special++)
        for (size_t i = tokenizer->added_count; i-- > 0 && status == QD_OK;) {
            const qd_added *added = &tokenizer->added[i];
            size_t length, zero = 0;
            const uint8_t *content = qd_vocab_bytes(&tokenizer->vocab, added->id, &length);
            if (added->special != special)
                continue;
            if (added->normalized)
                status = qd_normalize(&tokenizer->normalizer, &work, content, length, &zero, &content, &length);
            if (status == QD_OK && length > 0)
                status = qd_trie_add(added->normalized ? &tokenizer->normalized : &tokenizer->raw, content, length, (int32_t)i);
        }
    qd_normal_work_free(&work);
    return status;
}

/* Whether no merge produces a token with the mark behind another character. */
static bool marks_start_tokens(const qd_tokenizer *tokenizer, const char *mark)
{
    const qd_vocab *vocab = &tokenizer->vocab;
    const size_t size = strlen(mark);
    if (qd_vocab_find(vocab, mark, size, QD_TOKEN_BYTES) == QD_NO_TOKEN)
        return false;
    for (uint32_t i = 0; i < vocab->merge_slots; i++) {
        if (vocab->merges[i].left == QD_NO_TOKEN)
            continue;
        size_t length;
        const uint8_t *bytes = qd_vocab_bytes(vocab, vocab->merges[i].id, &length), *at = bytes;
        while ((size_t)(bytes + length - at) >= size && memcmp(at, mark, size) == 0)
            at += size;
        if (memmem(at, (size_t)(bytes + length - at), mark, size))
            return false;
    }
    return true;
}

/* The decoded text of each token, for tokenizers whose tokens are not stored as bytes. */
static qd_status make_surfaces(qd_tokenizer *tokenizer)
{
    const qd_vocab *vocab = &tokenizer->vocab;
    qd_strbuf text = {0};
    qd_status status = QD_OK;
    tokenizer->surfaces = calloc((size_t)vocab->size + 1, sizeof *tokenizer->surfaces);
    if (!tokenizer->surfaces)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its tokens", tokenizer->name);
    for (uint32_t id = 0; id < vocab->size && status == QD_OK; id++) {
        size_t length, from = text.length;
        if (qd_vocab_kind(vocab, id) == QD_TOKEN_NONE)
            continue;
        const uint8_t *bytes = qd_vocab_bytes(vocab, id, &length);
        if (qd_tokenizer_is_special(tokenizer, (int32_t)id))
            qd_strbuf_append(&text, (const char *)bytes, length);
        else
            status = qd_decoder_surface(&tokenizer->decoder, bytes, length, &text);
        if (status == QD_OK && text.length > UINT32_MAX)
            status = QD_FAIL(QD_USAGE, "%s: its tokens have more than 4 GiB of text", tokenizer->name);
        tokenizer->surfaces[id] = (struct qd_surface){(uint32_t)from, (uint32_t)(text.length - from)};
    }
    qd_strbuf_puts(&text, "");
    return status == QD_OK ? qd_strbuf_take(&text, &tokenizer->surface_text) : (qd_strbuf_free(&text), status);
}

static void find_byte_tokens(qd_tokenizer *tokenizer)
{
    for (int byte = 0; byte < 256; byte++) {
        char name[8] = {(char)byte};
        if (tokenizer->model != QD_MODEL_BYTES)
            snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        tokenizer->byte_id[byte] =
            qd_vocab_find(&tokenizer->vocab, name, tokenizer->model == QD_MODEL_BYTES ? 1 : 6, QD_TOKEN_BYTES);
    }
}

qd_status qd_tokenizer_finish(qd_tokenizer *tokenizer)
{
    if (tokenizer->added_count)
        qsort(tokenizer->added, tokenizer->added_count, sizeof *tokenizer->added, by_id);
    if (!tokenizer->sentencepiece)
        find_byte_tokens(tokenizer);
    for (size_t i = 1; i < tokenizer->added_count; i++) {
        const qd_added *added = &tokenizer->added[i];
        size_t length;
        const uint8_t *content = qd_vocab_bytes(&tokenizer->vocab, added->id, &length);
        if (added[-1].id == added->id)
            return QD_FAIL(QD_USAGE, "%s: the added token %.*s appears twice", tokenizer->name, (int)length,
                           (const char *)content);
    }
    QD_TRY(add_tries(tokenizer));
    if (tokenizer->model == QD_MODEL_BYTES)
        return QD_OK;
    bool user = tokenizer->sentencepiece && tokenizer->sentencepiece->has_user; /* such symbols may contain the mark */
    static const char *const marks[] = {"\xe2\x96\x81", " "};
    for (size_t i = 0; i < 2 && !tokenizer->cut_mark[0]; i++)
        if (tokenizer->model == QD_MODEL_BPE && !tokenizer->whole_words && !tokenizer->prefix[0] && !tokenizer->suffix[0] && !user &&
            marks_start_tokens(tokenizer, marks[i]))
            memcpy(tokenizer->cut_mark, marks[i], strlen(marks[i]) + 1);
    return make_surfaces(tokenizer);
}

qd_status qd_tokenizer_add_stage(qd_tokenizer *tokenizer, const char *where, qd_stage_kind kind, qd_stage **stage)
{
    if (tokenizer->stage_count == QD_MOST_STAGES)
        return QD_FAIL(QD_USAGE, "%s: more than %d split steps; that many are not supported", where, QD_MOST_STAGES);
    *stage = &tokenizer->stages[tokenizer->stage_count++];
    **stage = (qd_stage){.kind = kind};
    return QD_OK;
}

qd_status qd_tokenizer_add_split(qd_tokenizer *tokenizer, const char *where, const char *source, size_t length)
{
    qd_stage *stage = NULL;
    QD_TRY(qd_tokenizer_add_stage(tokenizer, where, QD_STAGE_SPLIT, &stage));
    stage->pattern = qd_pattern_by_regex(source, length);
    if (stage->pattern == QD_PATTERN_CUSTOM)
        QD_TRY(qd_regex_create(where, source, length, &stage->regex));
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
    if (tokenizer->surfaces) {
        *length = tokenizer->surfaces[id].length;
        return tokenizer->surface_text + tokenizer->surfaces[id].offset;
    }
    return (const char *)qd_vocab_bytes(&tokenizer->vocab, (uint32_t)id, length);
}

static const qd_added *find_added(const qd_tokenizer *tokenizer, int32_t id)
{
    qd_added key = {.id = (uint32_t)id};
    return tokenizer->added_count ? bsearch(&key, tokenizer->added, tokenizer->added_count, sizeof *tokenizer->added, by_id) : NULL;
}

bool qd_tokenizer_is_special(const qd_tokenizer *tokenizer, int32_t id)
{
    const qd_added *found = find_added(tokenizer, id);
    return found && found->special;
}

/* The text of a token for the decoder. As in `tokenizers`, an added token that matches normalized
 * text is its normalized content. */
static qd_status add_token(const qd_tokenizer *tokenizer, int32_t id, qd_texts *texts)
{
    size_t length, zero = 0;
    const uint8_t *token = qd_vocab_bytes(&tokenizer->vocab, (uint32_t)id, &length);
    const qd_added *added = tokenizer->normalizer.count ? find_added(tokenizer, id) : NULL;
    if (!added || !added->normalized)
        return qd_texts_add(texts, token, length);
    qd_normal_work work = {0};
    qd_status status = qd_normalize(&tokenizer->normalizer, &work, token, length, &zero, &token, &length);
    if (status == QD_OK)
        status = qd_texts_add(texts, token, length);
    qd_normal_work_free(&work);
    return status;
}

qd_status qd_tokenizer_decode(const qd_tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip_special,
                              qd_strbuf *text)
{
    for (size_t i = 0; tokenizer->sentencepiece && i < count; i++)
        if (ids[i] < 0 || qd_vocab_kind(&tokenizer->vocab, (uint32_t)ids[i]) == QD_TOKEN_NONE)
            return QD_FAIL(QD_USAGE, "token %d at position %zu does not exist: %s has ids from 0 to %u", ids[i], i, tokenizer->name,
                           tokenizer->vocab.size - 1);
    if (tokenizer->sentencepiece)
        return qd_sentencepiece_decode(tokenizer, ids, count, skip_special, text);
    qd_texts texts = {0}; /* for models whose tokens a decoder joins */
    qd_status status = QD_OK;
    for (size_t i = 0; i < count && status == QD_OK; i++) {
        size_t length;
        const char *bytes = qd_tokenizer_bytes(tokenizer, ids[i], &length);
        if (!bytes) {
            status = QD_FAIL(QD_USAGE, "token %d at position %zu does not exist: %s has ids from 0 to %u", ids[i], i,
                             tokenizer->name, tokenizer->vocab.size - 1);
        } else if (skip_special && qd_tokenizer_is_special(tokenizer, ids[i])) {
            continue;
        } else if (tokenizer->model == QD_MODEL_BYTES) {
            qd_strbuf_append(text, bytes, length);
        } else {
            status = add_token(tokenizer, ids[i], &texts);
        }
    }
    if (status == QD_OK && tokenizer->model != QD_MODEL_BYTES)
        status = qd_decoder_run(&tokenizer->decoder, &texts, text);
    qd_texts_free(&texts);
    if (status == QD_OK && text->failed)
        status = QD_FAIL(QD_NO_MEMORY, "no memory for the text of %zu tokens", count);
    return status;
}

size_t qd_tokenizer_cut(const qd_tokenizer *tokenizer, const char *text, size_t at)
{
    /* Between a line end that follows something visible and a letter, every known pattern splits,
     * whatever the context: the line end neither joins the letter nor waits for more space. */
    for (int i = 0; i < tokenizer->stage_count; i++)
        if (tokenizer->stages[i].kind != QD_STAGE_SPLIT || tokenizer->stages[i].pattern == QD_PATTERN_CUSTOM ||
            tokenizer->stages[i].behavior > QD_REMOVED)
            return 0;
    if (tokenizer->stage_count == 0 || tokenizer->model != QD_MODEL_BYTES || !qd_normalizer_cuts(&tokenizer->normalizer))
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
