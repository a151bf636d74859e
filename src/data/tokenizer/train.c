/* Learns merges exactly as the package `tokenizers` does: the pair with the highest count, ties by
 * lower ids. Two oddities are needed for equal results: a merged pair keeps its count, and when a
 * known token arises in a second way, pairs with it are queued again in addition to their old
 * entries. */
#include "data/encode.h"
#include "base/sized.h"
#include "data/tokenizer/byte_level.h"
#include "data/tokenizer/word_count.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

typedef struct pair_slot {
    uint32_t left, right; /* left QD_NO_TOKEN: empty */
    int64_t count;
    uint32_t *words;      /* words in which it has arisen since it was last queued */
    uint32_t word_count, word_capacity;
} pair_slot;

typedef struct queued_pair {
    int64_t count;
    uint32_t left, right;
    uint32_t round;       /* ties: the older entry comes first */
    uint32_t word_count;
    uint32_t *words;
} queued_pair;

typedef struct trainer {
    const qd_tokenizer_training *training;
    qd_tokenizer *tokenizer;
    /* Words: symbols[start[i] .. start[i] + length[i]). */
    uint32_t *symbols, *length;
    uint64_t *start;
    int64_t *frequency;
    uint32_t word_count;
    pair_slot *pairs;     /* open addressing */
    size_t pair_slots, pair_count;
    uint64_t *fresh;      /* keys of pairs that gained words in this round */
    size_t fresh_count, fresh_capacity;
    queued_pair *queue;   /* binary heap */
    size_t queued, queue_capacity;
    qd_merge *merges;
    uint32_t merge_count, merge_capacity;
    bool full;            /* out of memory */
} trainer;

void qd_tokenizer_training_init(qd_tokenizer_training *training, size_t size)
{
    const qd_tokenizer_training own = {.vocab = 32000, .pattern = "gpt2", .all_bytes = true};
    qd_sized_init(training, size, &own, sizeof own);
}

void qd_tokenizer_training_init_for_run(qd_tokenizer_training *training, size_t size, int32_t vocab)
{
    static const char *const special[] = {"<|endoftext|>"};
    qd_tokenizer_training t = qd_tokenizer_training_default();
    t.vocab = vocab;
    t.min_frequency = 2;
    t.whole_files = true;
    t.field = "text";
    t.special = special;
    t.special_count = 1;
    qd_sized_init(training, size, &t, sizeof t);
}

static void trainer_free(trainer *train)
{
    for (size_t i = 0; i < train->pair_slots; i++)
        free(train->pairs[i].words);
    for (size_t i = 0; i < train->queued; i++)
        free(train->queue[i].words);
    free(train->pairs);
    free(train->queue);
    free(train->fresh);
    free(train->symbols);
    free(train->length);
    free(train->start);
    free(train->frequency);
    free(train->merges);
}

/* Makes space for one more item of an array. False when out of memory. */
static bool room(void *array, size_t size, size_t count, size_t *capacity)
{
    void **place = array;
    if (count < *capacity)
        return true;
    size_t larger = *capacity ? *capacity * 2 : 64;
    void *moved = realloc(*place, larger * size);
    if (!moved)
        return false;
    *place = moved;
    *capacity = larger;
    return true;
}

static pair_slot *slot_of(pair_slot *pairs, size_t slots, uint32_t left, uint32_t right)
{
    uint64_t key = ((uint64_t)left << 32 | right) * UINT64_C(0x9e3779b97f4a7c15);
    size_t at = (size_t)(key ^ key >> 29) & (slots - 1);
    while (pairs[at].left != QD_NO_TOKEN && (pairs[at].left != left || pairs[at].right != right))
        at = (at + 1) & (slots - 1);
    return &pairs[at];
}

static bool grow_pairs(trainer *train)
{
    size_t slots = train->pair_slots ? train->pair_slots * 2 : 1 << 16;
    pair_slot *larger = malloc(slots * sizeof *larger);
    if (!larger)
        return false;
    for (size_t i = 0; i < slots; i++)
        larger[i] = (pair_slot){.left = QD_NO_TOKEN};
    for (size_t i = 0; i < train->pair_slots; i++)
        if (train->pairs[i].left != QD_NO_TOKEN)
            *slot_of(larger, slots, train->pairs[i].left, train->pairs[i].right) = train->pairs[i];
    free(train->pairs);
    train->pairs = larger;
    train->pair_slots = slots;
    return true;
}

/* Changes the count of a pair; occurrences it gains are in `word`. */
static void change_pair(trainer *train, uint32_t left, uint32_t right, int64_t change, uint32_t word)
{
    if (train->pair_count * 3 >= train->pair_slots * 2 && !grow_pairs(train)) {
        train->full = true;
        return;
    }
    pair_slot *slot = slot_of(train->pairs, train->pair_slots, left, right);
    if (slot->left == QD_NO_TOKEN) {
        *slot = (pair_slot){.left = left, .right = right};
        train->pair_count++;
    }
    slot->count += change;
    if (change < 0 || (slot->word_count && slot->words[slot->word_count - 1] == word))
        return; /* a word is listed once: all its changes are consecutive */
    if (slot->word_count == 0) {
        if (!room(&train->fresh, sizeof *train->fresh, train->fresh_count, &train->fresh_capacity)) {
            train->full = true;
            return;
        }
        train->fresh[train->fresh_count++] = (uint64_t)left << 32 | right;
    }
    size_t capacity = slot->word_capacity;
    if (capacity == 0 && slot->word_count == 0) { /* most pairs occur in few words */
        slot->words = malloc(4 * sizeof *slot->words);
        capacity = slot->words ? 4 : 0;
    }
    if (capacity == 0 || !room(&slot->words, sizeof *slot->words, slot->word_count, &capacity)) {
        train->full = true;
        return;
    }
    slot->word_capacity = (uint32_t)capacity;
    slot->words[slot->word_count++] = word;
}

/* Whether a precedes b in the queue. */
static bool before(const queued_pair *a, const queued_pair *b)
{
    if (a->count != b->count)
        return a->count > b->count;
    if (a->left != b->left)
        return a->left < b->left;
    if (a->right != b->right)
        return a->right < b->right;
    return a->round < b->round;
}

static void sift_down(queued_pair *queue, size_t count, size_t at)
{
    queued_pair item = queue[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(&queue[child + 1], &queue[child]))
            child++;
        if (!before(&queue[child], &item))
            break;
        queue[at] = queue[child];
    }
    queue[at] = item;
}

static void queue_pair(trainer *train, queued_pair item)
{
    if (!room(&train->queue, sizeof *train->queue, train->queued, &train->queue_capacity)) {
        free(item.words);
        train->full = true;
        return;
    }
    size_t at = train->queued++;
    for (; at > 0 && before(&item, &train->queue[(at - 1) / 2]); at = (at - 1) / 2)
        train->queue[at] = train->queue[(at - 1) / 2];
    train->queue[at] = item;
}

/* Queues the pairs that arose in this round. */
static void queue_fresh(trainer *train, uint32_t round)
{
    for (size_t i = 0; i < train->fresh_count; i++) {
        uint32_t left = (uint32_t)(train->fresh[i] >> 32), right = (uint32_t)train->fresh[i];
        pair_slot *slot = slot_of(train->pairs, train->pair_slots, left, right);
        if (slot->count > 0)
            queue_pair(train, (queued_pair){slot->count, left, right, round, slot->word_count, slot->words});
        else
            free(slot->words);
        slot->words = NULL;
        slot->word_count = slot->word_capacity = 0;
    }
    train->fresh_count = 0;
}

/* Length of a token as max_token counts it. */
static size_t token_length(const trainer *train, uint32_t id)
{
    return train->tokenizer->vocab.tokens[id].length;
}

/* Merges a pair in one word, from left to right, and updates the counts. */
static void merge_in_word(trainer *train, uint32_t word, uint32_t left, uint32_t right, uint32_t merged)
{
    uint32_t *symbols = train->symbols + train->start[word];
    uint32_t length = train->length[word], kept = 0;
    int64_t frequency = train->frequency[word];
    size_t most = train->training->max_token ? (size_t)train->training->max_token : SIZE_MAX;
    for (uint32_t i = 0; i < length; i++) {
        if (symbols[i] != left || i + 1 == length || symbols[i + 1] != right) {
            symbols[kept++] = symbols[i];
            continue;
        }
        if (kept > 0) {
            change_pair(train, symbols[kept - 1], left, -frequency, word);
            if (token_length(train, symbols[kept - 1]) + token_length(train, merged) < most)
                change_pair(train, symbols[kept - 1], merged, frequency, word);
        }
        if (i + 2 < length) {
            change_pair(train, right, symbols[i + 2], -frequency, word);
            if (token_length(train, symbols[i + 2]) + token_length(train, merged) < most)
                change_pair(train, merged, symbols[i + 2], frequency, word);
        }
        symbols[kept++] = merged;
        i++;
    }
    train->length[word] = kept;
}

/* The token for left and right concatenated, existing or new. */
static qd_status merged_token(trainer *train, uint32_t left, uint32_t right, uint32_t *id)
{
    qd_vocab *vocab = &train->tokenizer->vocab;
    size_t left_length, right_length;
    const uint8_t *left_bytes = qd_vocab_bytes(vocab, left, &left_length);
    const uint8_t *right_bytes = qd_vocab_bytes(vocab, right, &right_length);
    uint8_t *bytes = malloc(left_length + right_length);
    if (!bytes)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a token");
    memcpy(bytes, left_bytes, left_length);
    memcpy(bytes + left_length, right_bytes, right_length);
    uint32_t old;
    qd_status status = qd_vocab_add(vocab, vocab->size, bytes, left_length + right_length, QD_TOKEN_BYTES, &old);
    *id = old == QD_NO_TOKEN ? vocab->size - 1 : old;
    free(bytes);
    return status;
}

static qd_status learn(trainer *train)
{
    const qd_tokenizer_training *training = train->training;
    qd_vocab *vocab = &train->tokenizer->vocab;
    uint32_t round = 0;
    while (vocab->entries < (uint32_t)training->vocab && train->queued > 0) {
        if (train->full)
            return QD_FAIL(QD_NO_MEMORY, "no memory to learn merges from %u different words", train->word_count);
        queued_pair *top = &train->queue[0];
        int64_t count = slot_of(train->pairs, train->pair_slots, top->left, top->right)->count;
        if (top->count != count) {
            top->count = count;
            sift_down(train->queue, train->queued, 0);
            continue;
        }
        if (top->count < 1 || top->count < training->min_frequency)
            return QD_OK;
        queued_pair pair = *top;
        train->queue[0] = train->queue[--train->queued];
        if (train->queued)
            sift_down(train->queue, train->queued, 0);
        uint32_t merged = 0;
        size_t capacity = train->merge_capacity;
        qd_status status = merged_token(train, pair.left, pair.right, &merged);
        if (status == QD_OK && !room(&train->merges, sizeof *train->merges, train->merge_count, &capacity))
            status = QD_FAIL(QD_NO_MEMORY, "no memory for merges");
        if (status != QD_OK) {
            free(pair.words);
            return status;
        }
        train->merge_capacity = (uint32_t)capacity;
        train->merges[train->merge_count] = (qd_merge){pair.left, pair.right, train->merge_count, merged};
        train->merge_count++;
        for (uint32_t i = 0; i < pair.word_count; i++)
            merge_in_word(train, pair.words[i], pair.left, pair.right, merged);
        free(pair.words);
        queue_fresh(train, ++round);
        if (training->progress && round % 256 == 0 &&
            !training->progress(training->progress_context, "merging", vocab->entries, training->vocab))
            return QD_FAIL(QD_INTERRUPTED, "interrupted");
    }
    return train->full ? QD_FAIL(QD_NO_MEMORY, "no memory to learn merges") : QD_OK;
}

/* Special tokens first, then the bytes in the order of their characters in tokenizer.json. */
static qd_status first_tokens(trainer *train, const qd_word_counts *counts)
{
    const qd_tokenizer_training *training = train->training;
    qd_tokenizer *tokenizer = train->tokenizer;
    qd_vocab *vocab = &tokenizer->vocab;
    uint32_t old;
    tokenizer->added = calloc(training->special_count + 1, sizeof *tokenizer->added);
    if (!tokenizer->added)
        return QD_FAIL(QD_NO_MEMORY, "no memory for special tokens");
    for (size_t i = 0; i < training->special_count; i++) {
        const char *content = training->special[i];
        size_t length = strlen(content), count;
        uint8_t *bytes = malloc(length + 1);
        if (!bytes)
            return QD_FAIL(QD_NO_MEMORY, "no memory for special tokens");
        bool byte_level = qd_byte_level_read(content, length, bytes, &count);
        bool other = byte_level && (count != length || memcmp(bytes, content, length) != 0);
        free(bytes);
        if (length == 0 || other)
            return QD_FAIL(QD_USAGE, "special token '%s': %s", content,
                           other ? "tokenizer.json would read it as other bytes; use ASCII characters" : "it is empty");
        QD_TRY(qd_vocab_add(vocab, vocab->size, content, length, byte_level ? QD_TOKEN_BYTES : QD_TOKEN_LITERAL, &old));
        if (old != QD_NO_TOKEN)
            return QD_FAIL(QD_USAGE, "special token '%s' is listed twice", content);
        tokenizer->added[tokenizer->added_count++] = (qd_added){.id = vocab->size - 1, .special = true};
    }
    bool seen[256] = {false};
    for (size_t i = 0; i < counts->bytes_used; i++)
        seen[counts->bytes[i]] = true;
    for (uint32_t character = 0; character < 512; character++) {
        int byte = qd_character_to_byte(character);
        if (byte < 0 || !(training->all_bytes || seen[byte]))
            continue;
        uint8_t one[1] = {(uint8_t)byte};
        QD_TRY(qd_vocab_add(vocab, vocab->size, one, 1, QD_TOKEN_BYTES, &old));
    }
    for (int byte = 0; byte < 256; byte++) {
        uint8_t one[1] = {(uint8_t)byte};
        tokenizer->byte_id[byte] = qd_vocab_find(vocab, one, 1, QD_TOKEN_BYTES);
    }
    return QD_OK;
}

/* Words as lists of symbols, and the pairs in them. */
static qd_status first_pairs(trainer *train, const qd_word_counts *counts)
{
    if (counts->used >= UINT32_MAX)
        return QD_FAIL(QD_USAGE, "more than 2^32 different words; train on less text");
    train->symbols = malloc((counts->bytes_used + 1) * sizeof *train->symbols);
    train->start = malloc((counts->used + 1) * sizeof *train->start);
    train->length = malloc((counts->used + 1) * sizeof *train->length);
    train->frequency = malloc((counts->used + 1) * sizeof *train->frequency);
    if (!train->symbols || !train->start || !train->length || !train->frequency || !grow_pairs(train))
        return QD_FAIL(QD_NO_MEMORY, "no memory to train on %zu different words", counts->used);
    for (size_t i = 0; i < counts->slot_count; i++) {
        const qd_word_entry *entry = &counts->slots[i];
        if (entry->length == 0)
            continue;
        uint32_t word = train->word_count++;
        train->start[word] = entry->offset;
        train->length[word] = entry->length;
        train->frequency[word] = entry->count;
        for (uint32_t j = 0; j < entry->length; j++)
            train->symbols[entry->offset + j] = train->tokenizer->byte_id[counts->bytes[entry->offset + j]];
        for (uint32_t j = 0; j + 1 < entry->length; j++) {
            const uint32_t *pair = train->symbols + entry->offset + j;
            change_pair(train, pair[0], pair[1], entry->count, word);
        }
    }
    queue_fresh(train, 0);
    return QD_OK;
}

static qd_status check_training(const qd_tokenizer_training *training)
{
    if (training->vocab < 1)
        return QD_FAIL(QD_USAGE, "a vocabulary of %d entries cannot be trained; it needs at least 256", training->vocab);
    if (training->broken == QD_BROKEN_TIKTOKEN)
        return QD_FAIL(QD_USAGE, "training can only keep or replace invalid UTF-8");
    if (!training->pattern || !training->pattern[0])
        return QD_FAIL(QD_USAGE, "a pattern is needed: gpt2, cl100k, o200k, llama3, qwen2 or a regular expression");
    if (training->threads < 0 || training->max_token < 0 || training->min_frequency < 0)
        return QD_FAIL(QD_USAGE, "threads, max_token and min_frequency must not be negative");
    return QD_OK;
}

static qd_status set_pattern(qd_tokenizer *tokenizer, const char *pattern)
{
    qd_pattern known = qd_pattern_by_name(pattern);
    const char *regex = known == QD_PATTERN_CUSTOM ? pattern : qd_pattern_regex(known);
    QD_TRY(qd_tokenizer_add_split(tokenizer, "pattern", regex, strlen(regex)));
    tokenizer->stages[0].byte_level = tokenizer->stages[0].pattern == QD_PATTERN_GPT2;
    return QD_OK;
}

static qd_status list_files(const qd_tokenizer_training *training, qd_file_list *files)
{
    if (training->path_count == 0)
        return QD_FAIL(QD_USAGE, "no text files are given");
    for (size_t i = 0; i < training->path_count; i++)
        QD_TRY(qd_file_list_add(files, training->paths[i]));
    for (int64_t i = 0; i < files->count; i++)
        if (files->items[i].kind == QD_FILE_SHARD)
            return QD_FAIL(QD_USAGE, "%s contains tokens; a tokenizer is trained on text", files->items[i].path);
    return qd_file_list_check_text(files);
}

qd_status qd_tokenizer_train(const qd_tokenizer_training *given, qd_tokenizer **tokenizer)
{
    qd_status status = QD_OK;
    qd_tokenizer_training own = qd_tokenizer_training_default();
    const qd_tokenizer_training *training = &own;
    qd_file_list files = {0};
    qd_word_counts counts = {0};
    qd_pool *pool = NULL;
    trainer train = {.training = training};
    QD_TRY(QD_SIZED_READ(given, qd_tokenizer_training, &own));
    QD_TRY(check_training(training));
    QD_TRY_DONE(list_files(training, &files));
    QD_TRY_DONE(qd_tokenizer_new("the trained tokenizer", &train.tokenizer));
    QD_TRY_DONE(set_pattern(train.tokenizer, training->pattern));
    QD_TRY_DONE(qd_pool_create(qd_threads_or_all(training->threads), -1, &pool));
    QD_TRY_DONE(qd_word_count(&files, train.tokenizer, training, pool, &counts));
    QD_TRY_DONE(first_tokens(&train, &counts));
    QD_TRY_DONE(first_pairs(&train, &counts));
    QD_TRY_DONE(learn(&train));
    QD_TRY_DONE(qd_vocab_reserve_merges(&train.tokenizer->vocab, train.merge_count));
    for (uint32_t i = 0; i < train.merge_count; i++)
        qd_vocab_add_merge(&train.tokenizer->vocab, train.merges[i].left, train.merges[i].right, i, train.merges[i].id);
    QD_TRY_DONE(qd_tokenizer_finish(train.tokenizer));
    *tokenizer = train.tokenizer;
    train.tokenizer = NULL;
done:
    trainer_free(&train);
    qd_tokenizer_destroy(train.tokenizer);
    qd_pool_destroy(pool);
    qd_word_counts_free(&counts);
    qd_file_list_free(&files);
    return status;
}
