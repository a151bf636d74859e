/* Cuts the tokens to evaluate into windows, and reads them as samples. See windows.h. */
#include "data/windows.h"
#include "data/data_impl.h"

#include <stdlib.h>
#include <string.h>

static qd_token_range range_of(const qd_data *data, int source, bool held_out, int64_t train_seq)
{
    qd_data_source_info info = qd_data_source_info_default();
    qd_data_source_describe(data, source, &info);
    int64_t first = held_out ? info.windows * train_seq : 0;
    return (qd_token_range){.first = first, .end = held_out ? first + info.validation_windows * train_seq + 1 : info.tokens};
}

int64_t qd_windows_longest(const qd_data *data, bool held_out, int64_t train_seq)
{
    int64_t longest = 1;
    for (int s = 0; s < qd_data_source_count(data); s++) {
        qd_token_range r = range_of(data, s, held_out, train_seq);
        longest = r.end - r.first - 1 > longest ? r.end - r.first - 1 : longest;
    }
    return longest;
}

qd_status qd_windows_open(qd_data *data, const qd_tokenizer *tokenizer, bool held_out, int64_t train_seq, int64_t seq, int64_t most,
                          bool documents, qd_windows *w)
{
    *w = (qd_windows){.data = data, .tokenizer = tokenizer, .count = qd_data_source_count(data), .seq = seq, .documents = documents};
    if (held_out && seq == train_seq) {
        w->held = qd_data_validation_source(data);
        w->documents = w->held.documents;
    }
    w->ranges = calloc((size_t)w->count, sizeof *w->ranges);
    if (!w->ranges)
        return QD_FAIL(QD_NO_MEMORY, "no memory for %d sources", w->count);
    for (int s = 0; s < w->count; s++) {
        qd_token_range *r = &w->ranges[s];
        *r = range_of(data, s, held_out, train_seq);
        r->windows = (r->end - r->first - 2) / seq + 1;
        w->all += r->windows;
    }
    w->all = w->held.fill ? qd_data_validation_windows(data) : w->all;
    w->chosen = most > 0 && most < w->all ? most : w->all;
    return QD_OK;
}

void qd_windows_close(qd_windows *w)
{
    free(w->ranges);
    memset(w, 0, sizeof *w);
}

static void count_bytes(qd_windows *w, const int32_t *targets, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        size_t length = 1;
        if (w->tokenizer && targets[i] >= 0 && (qd_tokenizer_is_special(w->tokenizer, targets[i]) ||
                                                !qd_tokenizer_bytes(w->tokenizer, targets[i], &length)))
            length = 0; /* not part of the text */
        w->bytes += targets[i] >= 0 ? (int64_t)length : 0;
    }
}

/* The window that sample `index` reads; `all` for a sample past the last. index · all could
 * overflow, so the quotient and the remainder are spread separately. */
static int64_t chosen_window(const qd_windows *w, int64_t index)
{
    if (index >= w->chosen)
        return w->all;
    int64_t each = w->all / w->chosen, rest = w->all % w->chosen;
    return index * each + (int64_t)((double)index * (double)rest / (double)w->chosen);
}

static qd_status fill_one(qd_windows *w, int64_t index, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    int64_t have = 0;
    int s = 0;
    if (w->held.fill && index < w->all) {
        QD_TRY(w->held.fill(w->held.context, index, 1, seq, tokens, targets, doc_start));
        count_bytes(w, targets, seq);
        return QD_OK;
    }
    for (; s < w->count && index >= w->ranges[s].windows; s++)
        index -= w->ranges[s].windows;
    if (s < w->count) {
        const qd_token_range *r = &w->ranges[s];
        int64_t first = r->first + index * seq, left = r->end - 1 - first;
        have = left < seq ? left : seq;
        QD_TRY(qd_data_window(w->data, s, first, have, tokens, targets, doc_start));
        count_bytes(w, targets, have);
    }
    for (int64_t i = have; i < seq; i++) {
        tokens[i] = doc_start[i] = 0;
        targets[i] = -1;
    }
    return QD_OK;
}

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    qd_windows *w = context;
    for (int64_t i = 0; i < count; i++)
        QD_TRY(fill_one(w, chosen_window(w, first + i), seq, tokens + i * seq, targets + i * seq, doc_start + i * seq));
    return QD_OK;
}

static void fill_held_pairs(const qd_data *d, int64_t window, bool mean, int64_t stride, int32_t *parts)
{
    const int source = qd_data_held_out(d, &window);
    qd_pairs_fill(d, &d->sources[source], window, d->reference, mean, stride, parts);
}

/* Only held-out windows have pairs. */
static qd_status fill_pairs(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts)
{
    qd_windows *w = context;
    for (int64_t i = 0; i < count; i++) {
        const int64_t window = chosen_window(w, first + i);
        if (window < w->all)
            fill_held_pairs(w->data, window, mean, count * seq, parts + i * seq);
        else
            qd_pairs_clear(seq, count * seq, parts + i * seq);
    }
    return QD_OK;
}

qd_batch_source qd_windows_source(qd_windows *windows)
{
    return (qd_batch_source){.fill = fill, .fill_pairs = windows->held.fill_pairs ? fill_pairs : NULL, .context = windows,
                             .documents = windows->documents};
}
