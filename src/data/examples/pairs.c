/* Pairs of completions in samples: which rows belong to which sequence, and what the reference
 * model gives them (base/preference.h). */
#include "base/preference.h"
#include "data/data_impl.h"

#include <string.h>

static void put_float(int32_t *at, double value)
{
    const float narrow = (float)value;
    memcpy(at, &narrow, sizeof narrow);
}

void qd_pairs_clear(int64_t seq, int64_t stride, int32_t *parts)
{
    for (int64_t t = 0; t < seq; t++) {
        parts[QD_PAIR_SEQUENCE * stride + t] = -1;
        for (int part = QD_PAIR_WEIGHT; part < QD_PAIR_PARTS; part++)
            parts[part * stride + t] = 0; /* as a float, too */
    }
}

static int64_t first_sequence(const qd_data *d, const qd_token_source *s)
{
    int64_t first = 0;
    for (const qd_token_source *other = d->sources; other < s; other++)
        first += other->documents;
    return first;
}

void qd_pairs_fill(const qd_data *d, const qd_token_source *s, int64_t window, const double *reference, bool mean, int64_t stride,
                   int32_t *parts)
{
    const int64_t base = first_sequence(d, s);
    qd_window_walk walk = qd_window_examples(d, s, window);
    int32_t number = 0;
    qd_pairs_clear(d->seq, stride, parts);
    for (const int64_t *begin; (begin = qd_window_next(&walk)) != NULL; number++) {
        const uint8_t *counted = s->counted + begin[0] + 1; /* of the targets */
        const int64_t count = begin[1] - begin[0] - 1;
        int64_t tokens = 0;
        for (int64_t t = 0; t < count; t++)
            tokens += counted[t];
        const double weight = mean ? (double)(float)(1.0 / (double)tokens) : 1.0;
        const double all = reference ? reference[base + (begin - s->examples)] * weight : 0.0;
        bool first = true;
        for (int64_t t = 0; t < count; t++) {
            if (!counted[t])
                continue;
            parts[QD_PAIR_SEQUENCE * stride + t] = 2 * number + first;
            put_float(&parts[QD_PAIR_WEIGHT * stride + t], weight);
            put_float(&parts[QD_PAIR_REFERENCE * stride + t], first ? all : 0.0);
            put_float(&parts[QD_PAIR_REST * stride + t], first ? all - (double)(float)all : 0.0);
            first = false;
        }
        parts += count;
    }
}

qd_status qd_pairs_fill_training(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts)
{
    const qd_data *d = context;
    for (int64_t i = 0; i < count; i++) {
        qd_sample sample = qd_mixture_sample(&d->mixture, first + i);
        qd_pairs_fill(d, &d->sources[sample.source], sample.window, d->reference, mean, count * seq, parts + i * seq);
    }
    return QD_OK;
}

qd_status qd_pairs_fill_validation(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts)
{
    const qd_data *d = context;
    for (int64_t i = 0; i < count; i++) {
        int64_t window = first + i;
        int source = qd_data_held_out(d, &window);
        qd_pairs_fill(d, &d->sources[source], window, d->reference, mean, count * seq, parts + i * seq);
    }
    return QD_OK;
}

/* Source and number of one of all windows, training and held out; -1: past the last. */
static int find_window(const qd_data *d, int64_t *window)
{
    for (int s = 0; s < d->source_count; s++) {
        const int64_t all = d->sources[s].windows + d->sources[s].validation_windows;
        if (*window < all)
            return s;
        *window -= all;
    }
    return -1;
}

static qd_status fill_every(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets, int32_t *doc_start)
{
    const qd_data *d = context;
    for (int64_t i = 0; i < count; i++) {
        int64_t window = first + i;
        int source = find_window(d, &window);
        if (source >= 0) {
            QD_TRY(qd_data_fill_window(d, source, window, tokens + i * seq, targets + i * seq, doc_start + i * seq));
            continue;
        }
        for (int64_t t = i * seq; t < (i + 1) * seq; t++) {
            tokens[t] = doc_start[t] = 0;
            targets[t] = -1;
        }
    }
    return QD_OK;
}

/* Sums of log-probabilities: without the reference, and never means. */
static qd_status fill_every_pairs(void *context, int64_t first, int64_t count, int64_t seq, bool mean, int32_t *parts)
{
    const qd_data *d = context;
    (void)mean;
    for (int64_t i = 0; i < count; i++) {
        int64_t window = first + i;
        int source = find_window(d, &window);
        if (source >= 0)
            qd_pairs_fill(d, &d->sources[source], window, NULL, false, count * seq, parts + i * seq);
        else
            qd_pairs_clear(seq, count * seq, parts + i * seq);
    }
    return QD_OK;
}

qd_batch_source qd_data_every_window(qd_data *data)
{
    return (qd_batch_source){.fill = fill_every, .fill_pairs = fill_every_pairs, .context = data, .documents = data->document_mask};
}

int64_t qd_data_sequences(const qd_data *data)
{
    int64_t count = 0;
    for (int s = 0; s < data->source_count; s++)
        count += data->sources[s].documents;
    return count;
}

void qd_data_set_reference(qd_data *data, const double *reference)
{
    data->reference = reference;
}

void qd_data_keep_scores(const qd_data *d, int64_t window, const double *scores, double *reference)
{
    int source = find_window(d, &window);
    if (source < 0)
        return;
    const qd_token_source *s = &d->sources[source];
    const int64_t base = first_sequence(d, s);
    qd_window_walk walk = qd_window_examples(d, s, window);
    for (const int64_t *begin; (begin = qd_window_next(&walk)) != NULL; scores++)
        reference[base + (begin - s->examples)] = -*scores;
}
