/* Unigram: a Viterbi search over a trie of the tokens, with the sums, ties and unknown characters
 * of the package `tokenizers`. */
#include "data/tokenizer/unigram.h"

#include "data/tokenizer/split/unicode.h"
#include "data/tokenizer/tokenizer_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define UNKNOWN_PENALTY 10.0

void qd_unigram_free(qd_unigram *unigram)
{
    free(unigram->scores);
    free(unigram->nodes);
    *unigram = (qd_unigram){.count = 0};
}

void qd_unigram_work_free(qd_unigram_work *work)
{
    free(work->steps);
    free(work->ids);
    *work = (qd_unigram_work){.capacity = 0};
}

typedef struct sorted_token {
    const uint8_t *bytes;
    uint32_t length, id;
} sorted_token;

static int by_bytes(const void *a, const void *b)
{
    const sorted_token *x = a, *y = b;
    int order = memcmp(x->bytes, y->bytes, x->length < y->length ? x->length : y->length);
    return order ? order : x->length < y->length ? -1 : x->length > y->length;
}

/* A node of the trie that is being built: the tokens [from, to) share its first `depth` bytes. */
typedef struct open_node {
    uint32_t from, to, depth;
} open_node;

qd_status qd_unigram_build(qd_unigram *unigram, const qd_vocab *vocab)
{
    size_t total = 1, tokens = 0;
    qd_status status = QD_OK;
    sorted_token *sorted = malloc(((size_t)unigram->count + 1) * sizeof *sorted);
    open_node *open = NULL;
    unigram->lowest = INFINITY;
    for (uint32_t id = 0; sorted && id < unigram->count; id++) {
        size_t length;
        const uint8_t *bytes = qd_vocab_bytes(vocab, id, &length);
        unigram->lowest = unigram->scores[id] < unigram->lowest ? unigram->scores[id] : unigram->lowest;
        if (length == 0 || qd_vocab_kind(vocab, id) != QD_TOKEN_BYTES)
            continue;
        sorted[tokens++] = (sorted_token){bytes, (uint32_t)length, id};
        total += length;
    }
    if (sorted && tokens)
        qsort(sorted, tokens, sizeof *sorted, by_bytes);
    unigram->nodes = calloc(total, sizeof *unigram->nodes);
    open = malloc(total * sizeof *open);
    if (!sorted || !unigram->nodes || !open || total >= UINT32_MAX) {
        status = QD_FAIL(QD_NO_MEMORY, "no memory for %u tokens", unigram->count);
        goto done;
    }
    open[0] = (open_node){0, (uint32_t)tokens, 0};
    unigram->nodes[0].id = QD_NO_TOKEN;
    uint32_t made = 1;
    for (uint32_t node = 0; node < made; node++) { /* in breadth: children are neighbours */
        open_node at = open[node];
        if (at.depth > 0 && at.from < at.to && sorted[at.from].length == at.depth)
            unigram->nodes[node].id = sorted[at.from++].id;
        unigram->nodes[node].child = made;
        while (at.from < at.to) {
            uint8_t byte = sorted[at.from].bytes[at.depth];
            uint32_t to = at.from + 1;
            while (to < at.to && sorted[to].bytes[at.depth] == byte)
                to++;
            open[made] = (open_node){at.from, to, at.depth + 1};
            unigram->nodes[made].byte = byte;
            unigram->nodes[made].id = QD_NO_TOKEN;
            if (node == 0)
                unigram->first[byte] = made;
            made++;
            at.from = to;
        }
        unigram->nodes[node].children = (uint16_t)(made - unigram->nodes[node].child);
    }
    unigram->node_count = made;
done:
    free(sorted);
    free(open);
    return status;
}

/* 0: no child has this byte. */
static uint32_t child_of(const qd_unigram *unigram, uint32_t node, uint8_t byte)
{
    uint32_t low = unigram->nodes[node].child, high = low + unigram->nodes[node].children;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (unigram->nodes[middle].byte == byte)
            return middle;
        if (unigram->nodes[middle].byte < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return 0;
}

static qd_status reserve(qd_unigram_work *work, size_t length)
{
    if (length + 1 <= work->capacity)
        return QD_OK;
    size_t capacity = length + length / 2 + 64;
    void *steps = realloc(work->steps, capacity * sizeof *work->steps);
    if (steps)
        work->steps = steps;
    void *ids = realloc(work->ids, capacity * sizeof *work->ids);
    if (ids)
        work->ids = ids;
    if (!steps || !ids || length >= UINT32_MAX)
        return QD_FAIL(QD_NO_MEMORY, "no memory to encode a piece of %zu bytes", length);
    work->capacity = capacity;
    return QD_OK;
}

static void offer(const qd_unigram *unigram, struct qd_unigram_step *step, double score, size_t start, uint32_t id)
{
    score = unigram->floats ? (double)(float)score : score;
    if (step->start == UINT32_MAX || score > step->score)
        *step = (struct qd_unigram_step){score, (uint32_t)start, id};
}

/* Appends the ids of a text in reverse order; its bytes if it has no token and there is a token for
 * each. */
static void put_text(const qd_tokenizer *t, qd_unigram_work *work, size_t *count, const uint8_t *text, size_t length, bool unknown)
{
    uint32_t id = t->unigram.floats && unknown ? QD_NO_TOKEN : qd_vocab_find(&t->vocab, text, length, QD_TOKEN_BYTES);
    bool bytes = id == QD_NO_TOKEN && t->byte_fallback;
    for (size_t i = 0; bytes && i < length; i++)
        bytes = t->byte_id[text[i]] != QD_NO_TOKEN;
    if (!bytes)
        work->ids[(*count)++] = id == QD_NO_TOKEN ? t->unknown : id;
    for (size_t i = length; bytes && i-- > 0;)
        work->ids[(*count)++] = t->byte_id[text[i]];
}

qd_status qd_unigram_encode(const struct qd_tokenizer *t, qd_unigram_work *work, const uint8_t *text, size_t length,
                            const uint32_t **ids, size_t *count)
{
    const qd_unigram *unigram = &t->unigram;
    QD_TRY(reserve(work, length));
    for (size_t i = 0; i <= length; i++)
        work->steps[i].start = UINT32_MAX;
    work->steps[0].score = 0.0;
    for (size_t at = 0, size; at < length; at += size) {
        uint32_t character;
        double score = work->steps[at].score;
        bool single = false;
        size = text[at] < 0x80 ? 1 : qd_utf8_read(text + at, text + length, &character);
        uint32_t node = unigram->first[text[at]];
        for (size_t end = at + 1; node; node = child_of(unigram, node, text[end++])) {
            uint32_t id = unigram->nodes[node].id;
            if (id != QD_NO_TOKEN) {
                offer(unigram, &work->steps[end], unigram->scores[id] + score, at, id);
                single = single || end - at == size;
            }
            if (end == length)
                break;
        }
        if (!single) {
            if (t->unknown == QD_NO_TOKEN)
                return QD_FAIL(QD_USAGE, "%s: the text has a character without a token, and the model has no unk_id", t->name);
            double penalized = unigram->lowest - UNKNOWN_PENALTY;
            offer(unigram, &work->steps[at + size], (unigram->floats ? (double)(float)penalized : penalized) + score, at, t->unknown);
        }
    }
    size_t made = 0, unknown_end = 0; /* the end of a run of unknown characters; 0: none is open */
    for (size_t end = length; end > 0;) {
        const struct qd_unigram_step *step = &work->steps[end];
        size_t start = step->start;
        if (t->fuse_unknown && step->id == t->unknown && t->unknown != QD_NO_TOKEN) {
            unknown_end = unknown_end ? unknown_end : end;
        } else {
            if (unknown_end)
                put_text(t, work, &made, text + end, unknown_end - end, true);
            unknown_end = 0;
            put_text(t, work, &made, text + start, end - start, false);
        }
        end = start;
    }
    if (unknown_end)
        put_text(t, work, &made, text, unknown_end, true);
    for (size_t i = 0; i < made / 2; i++) {
        uint32_t id = work->ids[i];
        work->ids[i] = work->ids[made - 1 - i];
        work->ids[made - 1 - i] = id;
    }
    *ids = work->ids;
    *count = made;
    return QD_OK;
}
