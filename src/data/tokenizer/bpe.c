/* Byte-pair merging of one piece: a scan of all pairs for short pieces, a heap for long ones; and
 * WordPiece, which needs no more than lookups. */
#include "data/tokenizer/bpe.h"

#include "data/tokenizer/split/unicode.h"

#include <stdlib.h>
#include <string.h>

enum { SHORT_PIECE = 64 };
#define NO_RANK UINT32_MAX
#define NONE    UINT32_MAX

void qd_bpe_work_free(qd_bpe_work *work)
{
    free(work->ids);
    free(work->ranks);
    free(work->next);
    free(work->previous);
    free(work->heap);
    *work = (qd_bpe_work){0};
}

static bool resize(uint32_t **array, size_t count)
{
    uint32_t *larger = realloc(*array, count * sizeof *larger);
    if (larger)
        *array = larger;
    return larger != NULL;
}

qd_status qd_bpe_reserve(qd_bpe_work *work, size_t length)
{
    if (length <= work->capacity)
        return QD_OK;
    size_t capacity = length < SHORT_PIECE ? SHORT_PIECE : length + length / 2;
    if (length >= NONE || !resize(&work->ids, capacity) || !resize(&work->ranks, capacity) ||
        !resize(&work->next, capacity) || !resize(&work->previous, capacity))
        return QD_FAIL(QD_NO_MEMORY, "no memory to merge a piece of %zu bytes", length);
    work->capacity = capacity;
    return QD_OK;
}

static uint32_t rank_of(const qd_vocab *vocab, uint32_t left, uint32_t right)
{
    const qd_merge *merge = qd_vocab_merge(vocab, left, right);
    return merge ? merge->rank : NO_RANK;
}

/* ranks[i] belongs to the pair (i, i + 1). Removing a symbol shifts the rest, which is cheap for
 * short pieces. */
static size_t merge_short(const qd_vocab *vocab, uint32_t *ids, uint32_t *ranks, size_t count)
{
    for (size_t i = 0; i + 1 < count; i++)
        ranks[i] = rank_of(vocab, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++)
            if (ranks[i] < ranks[best])
                best = i;
        if (ranks[best] == NO_RANK)
            break;
        ids[best] = qd_vocab_merge(vocab, ids[best], ids[best + 1])->id;
        memmove(ids + best + 1, ids + best + 2, (count - best - 2) * sizeof *ids);
        memmove(ranks + best, ranks + best + 1, (count - best - 2) * sizeof *ranks);
        count--;
        if (best > 0)
            ranks[best - 1] = rank_of(vocab, ids[best - 1], ids[best]);
        if (best + 1 < count)
            ranks[best] = rank_of(vocab, ids[best], ids[best + 1]);
    }
    return count;
}

/* Heap entries are rank << 32 | index of the left symbol: the smallest is the next merge. */
static void sift_down(uint64_t *heap, size_t count, size_t at)
{
    uint64_t item = heap[at];
    for (size_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= item)
            break;
        heap[at] = heap[child];
    }
    heap[at] = item;
}

static void sift_up(uint64_t *heap, size_t at)
{
    uint64_t item = heap[at];
    for (; at > 0 && heap[(at - 1) / 2] > item; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = item;
}

/* Looks up the pair that starts at `place` and pushes it. Each merge pushes at most two, so a
 * capacity of 3 · count suffices. */
static void queue_pair(const qd_vocab *vocab, qd_bpe_work *work, uint32_t place, size_t *queued)
{
    uint32_t next = work->next[place];
    work->ranks[place] = next == NONE ? NO_RANK : rank_of(vocab, work->ids[place], work->ids[next]);
    if (work->ranks[place] == NO_RANK)
        return;
    work->heap[*queued] = (uint64_t)work->ranks[place] << 32 | place;
    sift_up(work->heap, (*queued)++);
}

static qd_status merge_long(const qd_vocab *vocab, qd_bpe_work *work, size_t *count)
{
    if (work->heap_capacity < 3 * *count) {
        free(work->heap);
        work->heap_capacity = 0;
        work->heap = malloc(3 * *count * sizeof *work->heap);
        if (!work->heap)
            return QD_FAIL(QD_NO_MEMORY, "no memory to merge a piece of %zu bytes", *count);
        work->heap_capacity = 3 * *count;
    }
    size_t queued = 0;
    for (uint32_t i = 0; i < *count; i++) {
        work->previous[i] = i ? i - 1 : NONE;
        work->next[i] = i + 1 < *count ? i + 1 : NONE;
        work->ranks[i] = i + 1 < *count ? rank_of(vocab, work->ids[i], work->ids[i + 1]) : NO_RANK;
        if (work->ranks[i] != NO_RANK)
            work->heap[queued++] = (uint64_t)work->ranks[i] << 32 | i;
    }
    for (size_t i = queued / 2; i-- > 0;)
        sift_down(work->heap, queued, i);
    while (queued > 0) {
        uint32_t rank = (uint32_t)(work->heap[0] >> 32), left = (uint32_t)work->heap[0];
        work->heap[0] = work->heap[--queued];
        if (queued)
            sift_down(work->heap, queued, 0);
        if (work->ranks[left] != rank)
            continue; /* stale entry: the pair has changed */
        uint32_t right = work->next[left], next = work->next[right], previous = work->previous[left];
        work->ids[left] = qd_vocab_merge(vocab, work->ids[left], work->ids[right])->id;
        work->ranks[right] = NO_RANK;
        work->next[left] = next;
        if (next != NONE)
            work->previous[next] = left;
        queue_pair(vocab, work, left, &queued);
        if (previous != NONE)
            queue_pair(vocab, work, previous, &queued);
    }
    size_t kept = 0;
    for (uint32_t i = 0; i != NONE; i = work->next[i])
        work->ids[kept++] = work->ids[i]; /* kept <= i: nothing unread is overwritten */
    *count = kept;
    return QD_OK;
}

/* Byte symbols. */
static size_t byte_symbols(const qd_tokenizer *tokenizer, const uint8_t *piece, size_t length, uint32_t *ids)
{
    size_t symbols = 0;
    bool unknown = false; /* the previous symbol is the unknown token */
    for (size_t i = 0; i < length; i++) {
        uint32_t id = tokenizer->byte_id[piece[i]];
        if (id == QD_NO_TOKEN) {
            if (tokenizer->unknown == QD_NO_TOKEN || (unknown && tokenizer->fuse_unknown))
                continue;
            unknown = true;
            id = tokenizer->unknown;
        } else {
            unknown = false;
        }
        ids[symbols++] = id;
    }
    return symbols;
}

/* The token of a character at [at, at + size), with the prefix of symbols that are not the first
 * and the suffix of the last. */
static uint32_t character_token(const qd_tokenizer *tokenizer, const uint8_t *at, size_t size, bool first, bool last)
{
    char text[2 * QD_MOST_AFFIX + 8];
    size_t prefix = first ? 0 : strlen(tokenizer->prefix), suffix = last ? strlen(tokenizer->suffix) : 0;
    if (prefix + suffix == 0)
        return qd_vocab_find(&tokenizer->vocab, at, size, QD_TOKEN_BYTES);
    memcpy(text, tokenizer->prefix, prefix);
    memcpy(text + prefix, at, size);
    memcpy(text + prefix + size, tokenizer->suffix, suffix);
    return qd_vocab_find(&tokenizer->vocab, text, prefix + size + suffix, QD_TOKEN_BYTES);
}

/* Character symbols; a character without a token becomes its bytes or the unknown token. An unknown
 * token is written when a known character follows, as in `tokenizers`: bytes overtake it. */
static size_t character_symbols(const qd_tokenizer *tokenizer, const uint8_t *piece, size_t length, uint32_t *ids)
{
    size_t symbols = 0, size;
    bool unknown = false; /* an unknown token is waiting */
    for (size_t at = 0; at < length; at += size) {
        uint32_t character, id;
        size = piece[at] < 0x80 ? 1 : qd_utf8_read(piece + at, piece + length, &character);
        id = character_token(tokenizer, piece + at, size, at == 0, at + size == length);
        if (id != QD_NO_TOKEN) {
            if (unknown)
                ids[symbols++] = tokenizer->unknown;
            unknown = false;
            ids[symbols++] = id;
            continue;
        }
        bool bytes = tokenizer->byte_fallback;
        for (size_t i = 0; bytes && i < size; i++)
            bytes = tokenizer->byte_id[piece[at + i]] != QD_NO_TOKEN;
        if (bytes) {
            for (size_t i = 0; i < size; i++)
                ids[symbols++] = tokenizer->byte_id[piece[at + i]];
        } else if (tokenizer->unknown != QD_NO_TOKEN) {
            if (unknown && !tokenizer->fuse_unknown)
                ids[symbols++] = tokenizer->unknown;
            unknown = true;
        }
    }
    if (unknown)
        ids[symbols++] = tokenizer->unknown;
    return symbols;
}

qd_status qd_bpe_merge(const qd_vocab *vocab, qd_bpe_work *work, size_t *count)
{
    if (*count > SHORT_PIECE)
        return merge_long(vocab, work, count);
    *count = merge_short(vocab, work->ids, work->ranks, *count);
    return QD_OK;
}

qd_status qd_bpe(const qd_tokenizer *tokenizer, qd_bpe_work *work, const uint8_t *piece, size_t length,
                 const uint32_t **ids, size_t *count)
{
    QD_TRY(qd_bpe_reserve(work, length));
    size_t symbols = tokenizer->model == QD_MODEL_BYTES ? byte_symbols(tokenizer, piece, length, work->ids)
                                                        : character_symbols(tokenizer, piece, length, work->ids);
    QD_TRY(qd_bpe_merge(&tokenizer->vocab, work, &symbols));
    *ids = work->ids;
    *count = symbols;
    return QD_OK;
}

/* The longest token at each position; a word with a part that has none is unknown as a whole. */
qd_status qd_word_piece(const qd_tokenizer *tokenizer, qd_bpe_work *work, const uint8_t *piece, size_t length,
                        const uint32_t **ids, size_t *count)
{
    const size_t prefix = strlen(tokenizer->prefix);
    int64_t characters = 0;
    size_t made = 0;
    for (size_t i = 0; i < length; i++)
        characters += (piece[i] & 0xc0) != 0x80;
    *ids = &tokenizer->unknown;
    *count = 1;
    if (characters > tokenizer->most_characters)
        return QD_OK;
    QD_TRY(qd_bpe_reserve(work, length));
    for (size_t start = 0, end; start < length; start = end) {
        uint32_t id = QD_NO_TOKEN;
        for (end = length; end > start; end--) {
            char text[QD_MOST_AFFIX + 4 * QD_MOST_WORD_PIECE];
            if (end < length && (piece[end] & 0xc0) == 0x80)
                continue;
            size_t size = end - start;
            if (start == 0) {
                id = qd_vocab_find(&tokenizer->vocab, piece, size, QD_TOKEN_BYTES);
            } else {
                memcpy(text, tokenizer->prefix, prefix);
                memcpy(text + prefix, piece + start, size);
                id = qd_vocab_find(&tokenizer->vocab, text, prefix + size, QD_TOKEN_BYTES);
            }
            if (id != QD_NO_TOKEN)
                break;
        }
        if (id == QD_NO_TOKEN)
            return QD_OK;
        work->ids[made++] = id;
    }
    *ids = work->ids;
    *count = made;
    return QD_OK;
}
