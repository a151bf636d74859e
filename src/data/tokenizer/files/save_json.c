/* Writes tokenizer.json so that `tokenizers` reads the same tokenizer back. */
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/tokenizer_impl.h"

#include "base/text/json_writer.h"
#include "base/text/strbuf.h"

#include <stdlib.h>
#include <string.h>

typedef struct saver {
    const qd_tokenizer *tokenizer;
    qd_json_writer writer;
    qd_strbuf text; /* a token in the file's notation */
} saver;

/* A token in the file's notation; valid until the next call. */
static const char *token_text(saver *save, uint32_t id)
{
    size_t length;
    const uint8_t *bytes = qd_vocab_bytes(&save->tokenizer->vocab, id, &length);
    qd_strbuf_clear(&save->text);
    qd_strbuf_puts(&save->text, "");
    if (qd_vocab_kind(&save->tokenizer->vocab, id) == QD_TOKEN_BYTES)
        qd_byte_level_write(bytes, length, &save->text);
    else
        qd_strbuf_append(&save->text, (const char *)bytes, length);
    return save->text.data ? save->text.data : "";
}

static void put_byte_level(saver *save, const char *key, bool prefix, bool regex)
{
    qd_json_object_begin(&save->writer, key);
    qd_json_put_string(&save->writer, "type", "ByteLevel");
    qd_json_put_bool(&save->writer, "add_prefix_space", prefix);
    qd_json_put_bool(&save->writer, "trim_offsets", true);
    qd_json_put_bool(&save->writer, "use_regex", regex);
    qd_json_end(&save->writer);
}

static void put_pre_tokenizer(saver *save)
{
    const qd_tokenizer *tokenizer = save->tokenizer;
    qd_json_writer *writer = &save->writer;
    bool prefix = false, regex = false;
    int splits = 0;
    for (int i = 0; i < tokenizer->stage_count; i++) {
        prefix = prefix || tokenizer->stages[i].kind == QD_STAGE_PREFIX;
        regex = regex || tokenizer->stages[i].byte_level;
        splits += tokenizer->stages[i].kind == QD_STAGE_SPLIT && !tokenizer->stages[i].byte_level;
    }
    if (splits == 0) {
        put_byte_level(save, "pre_tokenizer", prefix, regex);
        return;
    }
    qd_json_object_begin(writer, "pre_tokenizer");
    qd_json_put_string(writer, "type", "Sequence");
    qd_json_list_begin(writer, "pretokenizers");
    for (int i = 0; i < tokenizer->stage_count; i++) {
        const qd_stage *stage = &tokenizer->stages[i];
        if (stage->kind != QD_STAGE_SPLIT || stage->byte_level)
            continue;
        qd_json_object_begin(writer, NULL);
        qd_json_put_string(writer, "type", "Split");
        qd_json_object_begin(writer, "pattern");
        qd_json_put_string(writer, "Regex", stage->source);
        qd_json_end(writer);
        bool isolated = stage->behavior == QD_ISOLATED;
        qd_json_put_string(writer, "behavior", isolated ? "Isolated" : "Removed");
        qd_json_put_bool(writer, "invert", !isolated && stage->invert);
        qd_json_end(writer);
    }
    put_byte_level(save, NULL, prefix, regex);
    qd_json_end(writer);
    qd_json_end(writer);
}

static void put_piece(saver *save, const char *kind, const char *id, int type)
{
    qd_json_object_begin(&save->writer, NULL);
    qd_json_object_begin(&save->writer, kind);
    qd_json_put_string(&save->writer, "id", id);
    qd_json_put_int(&save->writer, "type_id", type);
    qd_json_end(&save->writer);
    qd_json_end(&save->writer);
}

static void put_framed(saver *save, const char *sequence, int type)
{
    const qd_tokenizer *tokenizer = save->tokenizer;
    for (int i = 0; i < tokenizer->before_count; i++)
        put_piece(save, "SpecialToken", token_text(save, tokenizer->before[i]), type);
    put_piece(save, "Sequence", sequence, type);
    for (int i = 0; i < tokenizer->after_count; i++)
        put_piece(save, "SpecialToken", token_text(save, tokenizer->after[i]), type);
}

static void put_post_processor(saver *save)
{
    const qd_tokenizer *tokenizer = save->tokenizer;
    qd_json_writer *writer = &save->writer;
    if (tokenizer->before_count + tokenizer->after_count == 0) {
        qd_json_put_null(writer, "post_processor");
        return;
    }
    qd_json_object_begin(writer, "post_processor");
    qd_json_put_string(writer, "type", "TemplateProcessing");
    qd_json_list_begin(writer, "single");
    put_framed(save, "A", 0);
    qd_json_end(writer);
    qd_json_list_begin(writer, "pair"); /* a pair of texts: each framed like a single one */
    put_framed(save, "A", 0);
    put_framed(save, "B", 1);
    qd_json_end(writer);
    qd_json_object_begin(writer, "special_tokens");
    uint32_t ids[2 * QD_MOST_FRAME];
    int count = 0;
    for (int i = 0; i < tokenizer->before_count + tokenizer->after_count; i++) {
        uint32_t id = i < tokenizer->before_count ? tokenizer->before[i] : tokenizer->after[i - tokenizer->before_count];
        bool seen = false;
        for (int j = 0; j < count; j++)
            seen = seen || ids[j] == id;
        if (seen)
            continue;
        ids[count++] = id;
        const char *text = token_text(save, id);
        qd_json_object_begin(writer, text);
        qd_json_put_string(writer, "id", text);
        qd_json_list_begin(writer, "ids");
        qd_json_put_int(writer, NULL, id);
        qd_json_end(writer);
        qd_json_list_begin(writer, "tokens");
        qd_json_put_string(writer, NULL, text);
        qd_json_end(writer);
        qd_json_end(writer);
    }
    qd_json_end(writer);
    qd_json_end(writer);
}

static void put_added(saver *save)
{
    const qd_tokenizer *tokenizer = save->tokenizer;
    qd_json_writer *writer = &save->writer;
    qd_json_list_begin(writer, "added_tokens");
    for (size_t i = 0; i < tokenizer->added_count; i++) {
        const qd_added *added = &tokenizer->added[i];
        qd_json_object_begin(writer, NULL);
        qd_json_put_int(writer, "id", added->id);
        qd_json_put_string(writer, "content", token_text(save, added->id));
        qd_json_put_bool(writer, "single_word", added->single_word);
        qd_json_put_bool(writer, "lstrip", added->left_strip);
        qd_json_put_bool(writer, "rstrip", added->right_strip);
        qd_json_put_bool(writer, "normalized", added->normalized);
        qd_json_put_bool(writer, "special", added->special);
        qd_json_end(writer);
    }
    qd_json_end(writer);
}

/* The vocabulary contains all tokens, also the added ones: `tokenizers` assigns ids to added tokens
 * that it lacks, which would move them if ids have gaps. */
static qd_status put_model(saver *save)
{
    const qd_tokenizer *tokenizer = save->tokenizer;
    const qd_vocab *vocab = &tokenizer->vocab;
    qd_json_writer *writer = &save->writer;
    qd_merge *merges;
    QD_TRY(qd_vocab_sorted_merges(vocab, &merges));
    qd_json_object_begin(writer, "model");
    qd_json_put_string(writer, "type", "BPE");
    qd_json_put_null(writer, "dropout");
    qd_json_put_string(writer, "unk_token", tokenizer->unknown == QD_NO_TOKEN ? NULL : token_text(save, tokenizer->unknown));
    qd_json_put_null(writer, "continuing_subword_prefix");
    qd_json_put_null(writer, "end_of_word_suffix");
    qd_json_put_bool(writer, "fuse_unk", tokenizer->fuse_unknown);
    qd_json_put_bool(writer, "byte_fallback", false);
    qd_json_put_bool(writer, "ignore_merges", tokenizer->whole_words);
    qd_json_object_begin(writer, "vocab");
    for (uint32_t id = 0; id < vocab->size; id++)
        if (qd_vocab_kind(vocab, id) != QD_TOKEN_NONE)
            qd_json_put_int(writer, token_text(save, id), id);
    qd_json_end(writer);
    qd_json_list_begin(writer, "merges");
    for (uint32_t i = 0; i < vocab->merge_count; i++) {
        qd_json_list_begin(writer, NULL);
        qd_json_put_string(writer, NULL, token_text(save, merges[i].left));
        qd_json_put_string(writer, NULL, token_text(save, merges[i].right));
        qd_json_end(writer);
    }
    qd_json_end(writer);
    qd_json_end(writer);
    free(merges);
    return QD_OK;
}

/* A name that consists only of characters of the ByteLevel alphabet would be read back from the
 * vocabulary as other bytes. */
static qd_status check_names(const qd_tokenizer *tokenizer)
{
    for (size_t i = 0; i < tokenizer->added_count; i++) {
        size_t length, count;
        uint32_t id = tokenizer->added[i].id;
        const char *name = (const char *)qd_vocab_bytes(&tokenizer->vocab, id, &length);
        uint8_t *bytes = malloc(length + 1);
        if (!bytes)
            return QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", tokenizer->name);
        bool other = qd_vocab_kind(&tokenizer->vocab, id) == QD_TOKEN_LITERAL &&
                     qd_byte_level_read(name, length, bytes, &count) &&
                     (count != length || memcmp(bytes, name, length) != 0);
        free(bytes);
        if (other)
            return QD_FAIL(QD_UNSUPPORTED, "%s: the added token %.*s cannot be written: tokenizer.json would read it as other "
                                           "bytes", tokenizer->name, (int)length, name);
    }
    return QD_OK;
}

qd_status qd_tokenizer_save_text(const qd_tokenizer *tokenizer, qd_strbuf *out)
{
    saver save = {.tokenizer = tokenizer, .writer = qd_json_writer_on(out)};
    qd_json_writer *writer = &save.writer;
    if (tokenizer->source) {
        qd_strbuf_append(out, tokenizer->source, tokenizer->source_length);
        return out->failed ? QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", tokenizer->name) : QD_OK;
    }
    if (tokenizer->shared_ranks)
        return QD_FAIL(QD_UNSUPPORTED, "%s: some tokens are not a merge of two others; tokenizer.json cannot express that",
                       tokenizer->name);
    QD_TRY(check_names(tokenizer));
    qd_json_object_begin(writer, NULL);
    qd_json_put_string(writer, "version", "1.0");
    qd_json_put_null(writer, "truncation");
    qd_json_put_null(writer, "padding");
    put_added(&save);
    qd_json_put_null(writer, "normalizer");
    put_pre_tokenizer(&save);
    put_post_processor(&save);
    put_byte_level(&save, "decoder", true, true);
    qd_status status = put_model(&save); /* on failure it has written nothing */
    qd_json_end(writer);
    qd_json_newline(writer);
    if (status == QD_OK && (out->failed || save.text.failed))
        status = QD_FAIL(QD_NO_MEMORY, "%s: no memory to write it", tokenizer->name);
    qd_strbuf_free(&save.text);
    return status;
}

qd_status qd_tokenizer_save(const qd_tokenizer *tokenizer, const char *path)
{
    qd_strbuf out = {0};
    qd_status status = qd_tokenizer_save_text(tokenizer, &out);
    if (status == QD_OK)
        status = qd_file_replace(path, out.data, out.length);
    qd_strbuf_free(&out);
    return status;
}
