/* Draws tokens from logits. Only as many candidates are sorted as top-k and top-p look at. */
#include "train/generate/sampling.h"

#include "base/error.h"
#include "base/rng.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

typedef struct candidate {
    float logit;
    int32_t token;
    double weight; /* exp((logit - highest) / temperature) */
} candidate;

struct qd_sampler {
    int64_t vocab;
    float *logits;         /* (vocab), penalized */
    candidate *candidates; /* (vocab) */
};

qd_status qd_sampler_create(int64_t vocab, qd_sampler **sampler)
{
    qd_sampler *s = calloc(1, sizeof *s);
    if (s) {
        s->vocab = vocab;
        s->logits = malloc((size_t)vocab * sizeof *s->logits);
        s->candidates = malloc((size_t)vocab * sizeof *s->candidates);
    }
    if (!s || !s->candidates || !s->logits) {
        qd_sampler_destroy(s);
        return QD_FAIL(QD_NO_MEMORY, "no memory to sample from %lld tokens", (long long)vocab);
    }
    *sampler = s;
    return QD_OK;
}

void qd_sampler_destroy(qd_sampler *s)
{
    if (s) {
        free(s->logits);
        free(s->candidates);
    }
    free(s);
}

/* Logits are finite, so this is a total order. */
static int likelier_first(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->token < y->token ? -1 : x->token > y->token;
}

static void swap(candidate *a, candidate *b)
{
    candidate kept = *a;
    *a = *b;
    *b = kept;
}

/* Moves the `first` likeliest candidates to the front, sorted. Quickselect with the median of
 * three; the candidates differ, so every step excludes its pivot. */
static void sort_first(candidate *list, int64_t count, int64_t first)
{
    int64_t low = 0, high = count - 1;
    while (first < count && low < high) {
        candidate *middle = &list[low + (high - low) / 2];
        if (likelier_first(middle, &list[low]) < 0)
            swap(middle, &list[low]);
        if (likelier_first(&list[high], &list[low]) < 0)
            swap(&list[high], &list[low]);
        if (likelier_first(middle, &list[high]) < 0)
            swap(middle, &list[high]);
        int64_t end = low; /* list[high] is the median */
        for (int64_t i = low; i < high; i++)
            if (likelier_first(&list[i], &list[high]) < 0)
                swap(&list[i], &list[end++]);
        swap(&list[high], &list[end]);
        if (end >= first)
            high = end - 1;
        else
            low = end + 1;
    }
    qsort(list, (size_t)(first < count ? first : count), sizeof *list, likelier_first);
}

/* As in transformers: a token counts once, however often it occurs. */
static const float *penalize(qd_sampler *s, const qd_sampling *by, const float *logits, const int32_t *history, size_t count)
{
    if (by->repetition_penalty == 0.0 || by->repetition_penalty == 1.0)
        return logits;
    memcpy(s->logits, logits, (size_t)s->vocab * sizeof *logits);
    for (size_t i = 0; i < count; i++) {
        float logit = logits[history[i]];
        s->logits[history[i]] = (float)(logit > 0.0f ? logit / by->repetition_penalty : logit * by->repetition_penalty);
    }
    return s->logits;
}

static int32_t likeliest(const float *logits, int64_t vocab)
{
    int64_t best = 0;
    for (int64_t i = 1; i < vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    return (int32_t)best;
}

static double total_weight(const candidate *list, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++)
        sum += list[i].weight;
    return sum;
}

/* top-p: the fewest likeliest candidates whose total probability reaches it, at the front. */
static int64_t cut_top_p(candidate *list, int64_t count, double top_p)
{
    double limit = top_p * total_weight(list, count);
    for (int64_t sorted = 64;; sorted *= 8) {
        double share = 0.0;
        sort_first(list, count, sorted);
        for (int64_t i = 0; i < (sorted < count ? sorted : count); i++) {
            share += list[i].weight;
            if (share >= limit)
                return i + 1;
        }
        if (sorted >= count)
            return count;
    }
}

/* A number in [0, 1) with 64 random bits. */
static double uniform(const qd_sampling *s, size_t position)
{
    uint32_t words[4];
    qd_philox4x32(qd_rng_key(s->seed, "generate"), (uint64_t)position, s->stream, words);
    return ((double)words[0] + (double)words[1] * 0x1p-32) * 0x1p-32;
}

int32_t qd_sampler_draw(qd_sampler *sampler, const qd_sampling *s, const float *given, const int32_t *history, size_t past)
{
    candidate *list = sampler->candidates;
    const float *logits = penalize(sampler, s, given, history, past);
    int32_t best = likeliest(logits, sampler->vocab);
    int64_t count = 0;
    if (s->temperature <= 0.0)
        return best;
    bool all = (s->top_k == 0 || s->top_k >= sampler->vocab) && s->top_p >= 1.0; /* then min-p can be applied at once */
    for (int64_t i = 0; i < sampler->vocab; i++) {
        double weight = exp((logits[i] - logits[best]) / s->temperature);
        if (!all || weight >= s->min_p)
            list[count++] = (candidate){logits[i], (int32_t)i, weight};
    }
    if (s->top_k > 0 && s->top_k < count) {
        sort_first(list, count, s->top_k);
        count = s->top_k;
    }
    if (s->top_p < 1.0)
        count = cut_top_p(list, count, s->top_p);
    while (!all && count > 1 && list[count - 1].weight < s->min_p)
        count--;
    double draw = uniform(s, past) * total_weight(list, count), sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += list[i].weight;
        if (draw < sum)
            return list[i].token;
    }
    return list[count - 1].token;
}
