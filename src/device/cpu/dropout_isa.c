/* Dropout. Dropped elements are multiplied by 0, not replaced, so that what is not finite stays visible. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#define BLOCKS 32            /* Philox blocks computed side by side */
#define DRAWS (4 * BLOCKS)

/* factor[4 * b + w] = keep if word w of block (first + b, high) makes a draw of at least p, else 0. Philox4x32-10 as
 * qd_philox4x32, which the test compares, with one array per word so that the loops become vector code. */
static void draw(float factor[DRAWS], qd_philox_key key, uint64_t first, uint64_t high, float p, float keep)
{
    uint32_t c0[BLOCKS], c1[BLOCKS], c2[BLOCKS], c3[BLOCKS];
    for (int b = 0; b < BLOCKS; b++) {
        c0[b] = (uint32_t)(first + (uint64_t)b);
        c1[b] = (uint32_t)((first + (uint64_t)b) >> 32);
        c2[b] = (uint32_t)high;
        c3[b] = (uint32_t)(high >> 32);
    }
    uint32_t k0 = key.k[0], k1 = key.k[1];
    for (int round = 0; round < 10; round++) {
        for (int b = 0; b < BLOCKS; b++) {
            uint64_t p0 = (uint64_t)0xD2511F53u * c0[b], p1 = (uint64_t)0xCD9E8D57u * c2[b];
            c0[b] = (uint32_t)(p1 >> 32) ^ c1[b] ^ k0;
            c1[b] = (uint32_t)p1;
            c2[b] = (uint32_t)(p0 >> 32) ^ c3[b] ^ k1;
            c3[b] = (uint32_t)p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    for (int b = 0; b < BLOCKS; b++) {
        factor[4 * b] = qd_rng_to_uniform(c0[b]) >= p ? keep : 0.0f;
        factor[4 * b + 1] = qd_rng_to_uniform(c1[b]) >= p ? keep : 0.0f;
        factor[4 * b + 2] = qd_rng_to_uniform(c2[b]) >= p ? keep : 0.0f;
        factor[4 * b + 3] = qd_rng_to_uniform(c3[b]) >= p ? keep : 0.0f;
    }
}

static void apply(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_cpu_dropout_job *job = context;
    const qd_dropout_args *a = job->args;
    uint64_t first = (uint64_t)a->first_row * (uint64_t)a->cols; /* index of element 0 */
    float keep = 1.0f / (1.0f - a->p);
    for (int64_t at = begin; at < end;) {
        float factors[DRAWS];
        uint64_t index = first + (uint64_t)at;
        draw(factors, job->key, index / 4, a->step, a->p, keep);
        const float *factor = factors + index % 4;
        int64_t count = DRAWS - (int64_t)(index % 4);
        count = count < end - at ? count : end - at;
        const void *x = qd_cpu_at(a->x, at, a->dtype);
        void *y = qd_cpu_at_mut(a->y, at, a->dtype);
        QD_FOR_VECTORS(i, n, count, {
            vec_store(y, i, vec_load(x, i, n, a->dtype) * vec_load(factor, i, n, QD_F32), n, a->dtype);
        });
        at += count;
    }
}

const qd_cpu_dropout_ops QD_ISA_NAME(qd_cpu_dropout_ops) = {.apply = apply};
