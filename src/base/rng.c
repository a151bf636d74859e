/* Philox4x32-10 and the distributions drawn from it. */
#include "base/rng.h"

#include <math.h>
#include <string.h>
#include <xxhash.h>

/* Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3" (SC11). */
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u
#define TWO_PI 6.283185307179586476925

qd_philox_key qd_rng_key(uint64_t seed, const char *name)
{
    uint64_t hash = XXH3_64bits_withSeed(name, strlen(name), seed);
    return (qd_philox_key){{(uint32_t)hash, (uint32_t)(hash >> 32)}};
}

void qd_philox4x32(qd_philox_key key, uint64_t counter_low, uint64_t counter_high, uint32_t out[4])
{
    uint32_t c0 = (uint32_t)counter_low, c1 = (uint32_t)(counter_low >> 32);
    uint32_t c2 = (uint32_t)counter_high, c3 = (uint32_t)(counter_high >> 32);
    uint32_t k0 = key.k[0], k1 = key.k[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)PHILOX_M0 * c0, p1 = (uint64_t)PHILOX_M1 * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

static uint64_t join(uint32_t low, uint32_t high)
{
    return (uint64_t)high << 32 | low;
}

/* The two normal numbers of block `block`: elements 2 * block and 2 * block + 1. */
static void normal_pair(qd_philox_key key, uint64_t block, double stddev, float pair[2])
{
    uint32_t words[4];
    qd_philox4x32(key, block, 0, words);
    /* u in (0, 1], so that the logarithm is finite; v in [0, 1). */
    double u = (double)((join(words[0], words[1]) >> 11) + 1) * 0x1p-53;
    double v = (double)(join(words[2], words[3]) >> 11) * 0x1p-53;
    double radius = stddev * sqrt(-2.0 * log(u));
    pair[0] = (float)(radius * cos(TWO_PI * v));
    pair[1] = (float)(radius * sin(TWO_PI * v));
}

void qd_rng_normal(qd_philox_key key, int64_t first, int64_t count, double stddev, float *out)
{
    float pair[2];
    int64_t i = 0;
    while (i < count) {
        uint64_t element = (uint64_t)(first + i);
        normal_pair(key, element / 2, stddev, pair);
        if (element % 2 == 1) {
            out[i++] = pair[1];
            continue;
        }
        out[i++] = pair[0];
        if (i < count)
            out[i++] = pair[1];
    }
}

uint64_t qd_rng_below(qd_philox_key key, uint64_t index, uint64_t bound)
{
    uint32_t words[4];
    qd_philox4x32(key, index, 0, words);
    /* The high word of random * bound, from 32-bit partial results: C has no standard 128-bit
     * type. */
    uint64_t low = (uint64_t)words[0] * (uint32_t)bound;
    uint64_t cross = (uint64_t)words[1] * (uint32_t)bound + (low >> 32);
    uint64_t middle = (uint64_t)words[0] * (bound >> 32) + (uint32_t)cross;
    return (uint64_t)words[1] * (bound >> 32) + (cross >> 32) + (middle >> 32);
}
