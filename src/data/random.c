/* A batch source of random tokens, for benchmarks and tests. */
#include "base/rng.h"
#include "data/data.h"

static qd_status fill(void *context, int64_t first, int64_t count, int64_t seq, int32_t *tokens, int32_t *targets,
                      int32_t *doc_start)
{
    const qd_random_tokens *r = context;
    const qd_philox_key key = qd_rng_key(r->seed, "random tokens");
    const int64_t length = r->documents ? (seq + r->documents - 1) / r->documents : seq;
    for (int64_t i = 0; i < count * seq; i++) {
        int64_t position = first * seq + i;
        tokens[i] = (int32_t)qd_rng_below(key, (uint64_t)position, (uint64_t)r->vocab);
        targets[i] = (int32_t)qd_rng_below(key, (uint64_t)position + 1, (uint64_t)r->vocab);
        if (r->ignored && position % r->ignored == 0)
            targets[i] = -1;
        doc_start[i] = (int32_t)(i % seq / length * length);
    }
    return QD_OK;
}

qd_batch_source qd_random_source(qd_random_tokens *random)
{
    return (qd_batch_source){.fill = fill, .context = random, .documents = random->documents > 0};
}
