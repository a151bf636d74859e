/* Draws tokens from logits: candidates in the order of likelihood, cut by top-k and top-p. */
#include "train/generate/sampling.h"

#include "base/error.h"
#include "base/rng.h"

#include <math.h>
#include <stdlib.h>

typedef struct candidate {
    float logit;
    int32_t token;
} candidate;

struct qd_sampler {
    int64_t vocab;
    candidate *candidates; /* (vocab) */
};

qd_status qd_sampler_create(int64_t vocab, qd_sampler **sampler)
{
    qd_sampler *s = calloc(1, sizeof *s);
    if (s)
        s->candidates = malloc((size_t)vocab * sizeof *s->candidates);
    if (!s || !s->candidates) {
        free(s);
        return QD_FAIL(QD_NO_MEMORY, "no memory to sample from %lld tokens", (long long)vocab);
    }
    s->vocab = vocab;
    *sampler = s;
    return QD_OK;
}

void qd_sampler_destroy(qd_sampler *s)
{
    if (s)
        free(s->candidates);
    free(s);
}

/* Logits are finite, so this is a total order. */
static int likelier_first(const void *a, const void *b)
{
    const candidate *x = a, *y = b;
    if (x->logit != y->logit)
        return x->logit > y->logit ? -1 : 1;
    return x->token < y->token ? -1 : 1;
}

int32_t qd_sampler_draw(qd_sampler *sampler, const qd_sampling *s, const float *logits, int64_t position)
{
    candidate *list = sampler->candidates;
    for (int64_t i = 0; i < sampler->vocab; i++)
        list[i] = (candidate){logits[i], (int32_t)i};
    qsort(list, (size_t)sampler->vocab, sizeof *list, likelier_first);
    if (s->temperature <= 0.0)
        return list[0].token;
    int64_t kept = s->top_k > 0 && s->top_k < sampler->vocab ? s->top_k : sampler->vocab;
    double total = 0.0, most = list[0].logit;
    for (int64_t i = 0; i < kept; i++)
        total += exp((list[i].logit - most) / s->temperature);
    /* top-p: the fewest most likely tokens whose total probability reaches it */
    double share = 0.0, limit = s->top_p < 1.0 ? s->top_p * total : total;
    int64_t within = 0;
    while (within < kept && share < limit)
        share += exp((list[within++].logit - most) / s->temperature);
    uint32_t words[4];
    qd_philox4x32(qd_rng_key(s->seed, "generate"), (uint64_t)position, 0, words);
    double draw = ((double)words[0] + (double)words[1] * 0x1p-32) * 0x1p-32 * share, sum = 0.0;
    for (int64_t i = 0; i < within; i++) {
        sum += exp((list[i].logit - most) / s->temperature);
        if (draw < sum)
            return list[i].token;
    }
    return list[within > 0 ? within - 1 : 0].token;
}
