/* Loads tiktoken files: per line one token in base64, a space and its rank, which is also its
 * id. */
#include "base/text/base64.h"
#include "data/tokenizer/bpe.h"
#include "data/tokenizer/tokenizer_impl.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct special {
    const char *content;
    uint32_t id;
} special;

typedef struct encoding {
    const char *name;
    uint32_t ranks; /* number of ranks of the published file, which identifies it; 0: alias of one above */
    qd_pattern pattern;
    const char *regex; /* for QD_PATTERN_CUSTOM */
    special specials[5];
    uint32_t reserved; /* number of ids in a block of special tokens after the ranks */
} encoding;

/* Chinese characters by themselves, the rest like o200k. */
#define NOT_HAN "&&[^\\p{Han}]]"
#define ENDING  "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
#define UPPER   "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}" NOT_HAN
#define LOWER   "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}" NOT_HAN
#define KIMI                                                                                                           \
    "[\\p{Han}]+|[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" ENDING "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" ENDING       \
    "|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static const encoding encodings[] = {
    {"gpt2", 50256, QD_PATTERN_GPT2, NULL, {{"<|endoftext|>", 50256}}, 0},
    {"r50k_base", 0, QD_PATTERN_GPT2, NULL, {{"<|endoftext|>", 50256}}, 0},
    {"cl100k_base",
     100256,
     QD_PATTERN_CL100K,
     NULL,
     {{"<|endoftext|>", 100257},
      {"<|fim_prefix|>", 100258},
      {"<|fim_middle|>", 100259},
      {"<|fim_suffix|>", 100260},
      {"<|endofprompt|>", 100276}},
     0},
    {"o200k_base", 199998, QD_PATTERN_O200K, NULL, {{"<|endoftext|>", 199999}, {"<|endofprompt|>", 200018}}, 0},
    {"llama3", 128000, QD_PATTERN_LLAMA3, NULL, {{NULL, 0}}, 256},
    {"kimi", 163584, QD_PATTERN_CUSTOM, KIMI, {{NULL, 0}}, 256},
};
enum { ENCODINGS = sizeof encodings / sizeof *encodings, LONGEST = 1 << 16 };

typedef struct rank_file {
    const char *name, *at, *end;
    int line;
} rank_file;

#define FAIL(...) fail(file, __VA_ARGS__)
static qd_status __attribute__((format(printf, 2, 3))) fail(const rank_file *file, const char *format, ...)
{
    char message[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    return QD_FAIL(QD_USAGE, "%s:%d: %s", file->name, file->line, message);
}

/* The next non-empty line; *length 0 at the end of the file. */
static qd_status next_entry(rank_file *file, const char **word, size_t *length, uint32_t *rank)
{
    *length = 0;
    for (;;) {
        if (file->at == file->end)
            return QD_OK;
        const char *stop = memchr(file->at, '\n', (size_t)(file->end - file->at));
        const char *next = stop ? stop + 1 : file->end;
        stop = stop ? stop : file->end;
        if (stop > file->at && stop[-1] == '\r')
            stop--;
        const char *start = file->at;
        file->at = next;
        file->line++;
        if (start == stop)
            continue;
        const char *space = memchr(start, ' ', (size_t)(stop - start));
        if (!space || space == start || stop - space > 11 || stop - space < 2)
            return FAIL("expected a token in base64, a space and its rank");
        uint64_t number = 0;
        for (const char *c = space + 1; c < stop; c++) {
            if (*c < '0' || *c > '9')
                return FAIL("the rank must be a number");
            number = number * 10 + (uint64_t)(*c - '0');
        }
        if (number >= INT32_MAX)
            return FAIL("rank %llu is too high", (unsigned long long)number);
        *word = start;
        *length = (size_t)(space - start);
        *rank = (uint32_t)number;
        return QD_OK;
    }
}

static qd_status measure(rank_file *file, uint32_t *count, uint32_t *size, size_t *bytes)
{
    const rank_file start = *file;
    uint64_t entries = 0;
    uint32_t highest = 0;
    *bytes = 0;
    for (;;) {
        const char *word;
        size_t length;
        uint32_t rank;
        QD_TRY(next_entry(file, &word, &length, &rank));
        if (length == 0)
            break;
        if (length > LONGEST)
            return FAIL("a token of more than %d bytes", LONGEST / 4 * 3);
        *bytes += length / 4 * 3;
        highest = rank > highest ? rank : highest;
        entries++;
    }
    if (highest > 2 * entries + QD_MOST_HOLES)
        return FAIL("rank %u is too high for %llu tokens", highest, (unsigned long long)entries);
    *count = (uint32_t)entries;
    *size = highest + 1;
    *file = start;
    return QD_OK;
}

static qd_status read_ranks(rank_file *file, qd_vocab *vocab)
{
    uint32_t count = 0, size = 0;
    size_t total = 0;
    QD_TRY(measure(file, &count, &size, &total));
    QD_TRY(qd_vocab_reserve(vocab, size, count, total));
    uint8_t bytes[LONGEST / 4 * 3 + 3];
    for (;;) {
        const char *word;
        size_t length, token;
        uint32_t rank, old;
        QD_TRY(next_entry(file, &word, &length, &rank));
        if (length == 0)
            return QD_OK;
        if (!qd_base64_read(word, length, bytes, &token) || token == 0)
            return FAIL("the token is not base64");
        QD_TRY(qd_vocab_add(vocab, rank, bytes, token, QD_TOKEN_BYTES, &old));
        if (old != QD_NO_TOKEN)
            return FAIL("%s", old == rank ? "the rank appears twice" : "the token appears twice");
    }
}

/* tiktoken merges two tokens whenever their concatenated bytes are a token. If merges of lower
 * ranks reduce a token to two parts, it can only arise from these two: a merge across its boundary
 * would never be undone, and the merges inside it are independent of the surrounding text. If that
 * holds for all tokens, one merge per token is equivalent to all pairs. */
static qd_status one_merge_each(qd_tokenizer *tokenizer, qd_bpe_work *work, bool *enough)
{
    qd_vocab *vocab = &tokenizer->vocab;
    *enough = false;
    QD_TRY(qd_vocab_reserve_merges(vocab, vocab->entries));
    for (uint32_t id = 0; id < vocab->size; id++) {
        size_t length, parts;
        const uint32_t *ids;
        if (qd_vocab_kind(vocab, id) == QD_TOKEN_NONE)
            continue;
        const uint8_t *bytes = qd_vocab_bytes(vocab, id, &length);
        if (length == 1)
            continue;
        QD_TRY(qd_bpe(tokenizer, work, bytes, length, &ids, &parts));
        if (parts != 2)
            return QD_OK;
        qd_vocab_add_merge(vocab, ids[0], ids[1], id, id);
    }
    *enough = true;
    return QD_OK;
}

static qd_status all_pairs(qd_vocab *vocab)
{
    vocab->merge_count = 0;
    memset(vocab->merges, 0xff, vocab->merge_slots * sizeof *vocab->merges);
    for (uint32_t id = 0; id < vocab->size; id++) {
        if (qd_vocab_kind(vocab, id) == QD_TOKEN_NONE)
            continue;
        size_t length;
        const uint8_t *bytes = qd_vocab_bytes(vocab, id, &length);
        for (size_t cut = 1; cut < length; cut++) {
            uint32_t left = qd_vocab_find(vocab, bytes, cut, QD_TOKEN_BYTES);
            uint32_t right = left == QD_NO_TOKEN ? left : qd_vocab_find(vocab, bytes + cut, length - cut, QD_TOKEN_BYTES);
            if (right == QD_NO_TOKEN)
                continue;
            QD_TRY(qd_vocab_reserve_merges(vocab, vocab->merge_count + 1));
            qd_vocab_add_merge(vocab, left, right, id, id);
        }
    }
    return QD_OK;
}

static qd_status choose_encoding(const qd_tokenizer *tokenizer, const char *name, const encoding **chosen)
{
    for (int i = 0; i < ENCODINGS; i++)
        if (name ? strcmp(name, encodings[i].name) == 0 : encodings[i].ranks == tokenizer->vocab.entries) {
            *chosen = &encodings[i];
            return QD_OK;
        }
    return QD_FAIL(QD_USAGE, "%s: %s%s; set the encoding of this tiktoken file: gpt2, r50k_base, cl100k_base, o200k_base, "
                             "llama3 or kimi", tokenizer->name, name ? "unknown encoding " : "its number of ranks matches no "
                             "published encoding", name ? name : "");
}

static qd_status add_special(qd_tokenizer *tokenizer, const char *content, uint32_t id)
{
    uint32_t old;
    QD_TRY(qd_vocab_add(&tokenizer->vocab, id, content, strlen(content), QD_TOKEN_LITERAL, &old));
    if (old != QD_NO_TOKEN)
        return QD_FAIL(QD_USAGE, "%s: id %u of the special token %s is also the rank of another token; is this a different encoding?",
                       tokenizer->name, id, content);
    tokenizer->added[tokenizer->added_count++] = (qd_added){.id = id, .special = true};
    return QD_OK;
}

/* Name of number `index` of the block of special tokens, whose first id is `first`. *number counts
 * those without a name of their own. */
static void reserved_name(const encoding *chosen, uint32_t first, uint32_t index, uint32_t *number, char name[64])
{
    static const struct {
        uint32_t index;
        const char *content;
    } llama[] = {{0, "<|begin_of_text|>"}, {1, "<|end_of_text|>"}, {4, "<|finetune_right_pad_id|>"},
                 {6, "<|start_header_id|>"}, {7, "<|end_header_id|>"}, {8, "<|eom_id|>"}, {9, "<|eot_id|>"},
                 {10, "<|python_tag|>"}},
      kimi[] = {{0, "[BOS]"}, {1, "[EOS]"}, {254, "[UNK]"}, {255, "[PAD]"}};
    const bool is_kimi = chosen->pattern == QD_PATTERN_CUSTOM; /* its other names depend on the version of the model */
    for (size_t j = 0; j < (is_kimi ? sizeof kimi / sizeof *kimi : sizeof llama / sizeof *llama); j++)
        if ((is_kimi ? kimi[j].index : llama[j].index) == index) {
            snprintf(name, 64, "%s", is_kimi ? kimi[j].content : llama[j].content);
            return;
        }
    if (is_kimi)
        snprintf(name, 64, "<|reserved_token_%u|>", first + index);
    else
        snprintf(name, 64, "<|reserved_special_token_%u|>", (*number)++);
}

static qd_status add_specials(qd_tokenizer *tokenizer, const encoding *chosen)
{
    const uint32_t most = chosen->reserved + sizeof chosen->specials / sizeof *chosen->specials;
    tokenizer->added = calloc(most, sizeof *tokenizer->added);
    if (!tokenizer->added)
        return QD_FAIL(QD_NO_MEMORY, "%s: no memory for its special tokens", tokenizer->name);
    for (size_t i = 0; i < sizeof chosen->specials / sizeof *chosen->specials && chosen->specials[i].content; i++)
        QD_TRY(add_special(tokenizer, chosen->specials[i].content, chosen->specials[i].id));
    uint32_t number = 0, first = chosen->reserved ? tokenizer->vocab.size : 0;
    for (uint32_t i = 0; i < chosen->reserved; i++) {
        char name[64];
        reserved_name(chosen, first, i, &number, name);
        QD_TRY(add_special(tokenizer, name, first + i));
    }
    if (chosen->reserved && chosen->pattern == QD_PATTERN_LLAMA3) {
        tokenizer->before[0] = first; /* Llama 3 texts start with <|begin_of_text|> */
        tokenizer->before_count = 1;
    }
    return QD_OK;
}

qd_status qd_tokenizer_read_tiktoken(qd_tokenizer *tokenizer, const char *text, size_t length, const char *name)
{
    const encoding *chosen = NULL;
    qd_vocab *vocab = &tokenizer->vocab;
    rank_file file = {tokenizer->name, text, text + length, 0};
    QD_TRY(read_ranks(&file, vocab));
    QD_TRY(choose_encoding(tokenizer, name, &chosen));
    for (int byte = 0; byte < 256; byte++) {
        uint8_t bytes[1] = {(uint8_t)byte};
        tokenizer->byte_id[byte] = qd_vocab_find(vocab, bytes, 1, QD_TOKEN_BYTES);
        if (tokenizer->byte_id[byte] == QD_NO_TOKEN)
            return QD_FAIL(QD_USAGE, "%s: byte 0x%02x is not a token, so text that contains it cannot be encoded",
                           tokenizer->name, byte);
    }
    tokenizer->tiktoken = tokenizer->whole_words = true;
    qd_bpe_work work = {0};
    bool enough = false;
    qd_status status = one_merge_each(tokenizer, &work, &enough);
    if (status == QD_OK && !enough)
        status = all_pairs(vocab);
    qd_bpe_work_free(&work);
    QD_TRY(status);
    tokenizer->shared_ranks = !enough;
    const char *regex = chosen->regex ? chosen->regex : qd_pattern_regex(chosen->pattern);
    QD_TRY(qd_tokenizer_add_split(tokenizer, tokenizer->name, regex, strlen(regex)));
    return add_specials(tokenizer, chosen);
}
