/* The sample order: a Feistel permutation per epoch, and the interleaving of weighted sources. */
#include "data/sampler.h"

#include "base/rng.h"

#include <assert.h>
#include <math.h>

int64_t qd_permute(uint64_t seed, int64_t epoch, int64_t index, int64_t size)
{
    int bits = 2; /* width of the domain; even, so that both halves are equal */
    while (bits < 62 && (INT64_C(1) << bits) < size)
        bits += 2;
    const int half = bits / 2;
    const uint64_t mask = (UINT64_C(1) << half) - 1;
    const qd_philox_key key = qd_rng_key(seed, "sample order");
    uint64_t value = (uint64_t)index;
    do {
        uint64_t left = value >> half, right = value & mask;
        for (uint64_t round = 0; round < 4; round++) {
            uint32_t words[4];
            qd_philox4x32(key, right, (uint64_t)epoch * 4 + round, words);
            uint64_t next = left ^ ((((uint64_t)words[1] << 32) | words[0]) & mask);
            left = right;
            right = next;
        }
        value = (left << half) | right;
    } while (value >= (uint64_t)size);
    return (int64_t)value;
}

void qd_mixture_bounds(const double *weights, int sources, int64_t *bounds)
{
    assert(sources >= 1 && sources <= QD_MIXTURE_BLOCK);
    int64_t *counts = bounds + 1, total = 0;
    double sum = 0;
    for (int s = 0; s < sources; s++)
        sum += weights[s];
    bounds[0] = 0;
    for (int s = 0; s < sources; s++) {
        counts[s] = (int64_t)floor(weights[s] / sum * QD_MIXTURE_BLOCK);
        counts[s] = counts[s] > 0 ? counts[s] : 1;
        total += counts[s];
    }
    /* Too few: add one where the share exceeds the count most. Too many (tiny sources were rounded
     * up to 1): remove one where the count exceeds the share most, among sources with more than
     * one. Ties: the first. */
    while (total != QD_MIXTURE_BLOCK) {
        const int64_t step = total < QD_MIXTURE_BLOCK ? 1 : -1;
        int best = -1;
        double most = 0;
        for (int s = 0; s < sources; s++) {
            double gap = (double)step * (weights[s] / sum * QD_MIXTURE_BLOCK - (double)counts[s]);
            if ((step > 0 || counts[s] > 1) && (best < 0 || gap > most)) {
                best = s;
                most = gap;
            }
        }
        counts[best] += step;
        total += step;
    }
    for (int s = 0; s < sources; s++)
        bounds[s + 1] += bounds[s];
}

qd_sample qd_mixture_sample(const qd_mixture *m, int64_t index)
{
    qd_sample sample = {0};
    int64_t turn = index; /* ordinal of this sample within its source */
    uint64_t seed = m->seed;
    if (m->sources > 1) {
        const int64_t block = index / QD_MIXTURE_BLOCK;
        const int64_t place =
            qd_permute(m->seed ^ UINT64_C(0x6d69787475726500), block, index % QD_MIXTURE_BLOCK, QD_MIXTURE_BLOCK);
        int low = 0, high = m->sources; /* the source is in [low, high) */
        while (high - low > 1) {
            int middle = low + (high - low) / 2;
            if (m->bounds[middle] <= place)
                low = middle;
            else
                high = middle;
        }
        sample.source = low;
        turn = block * (m->bounds[low + 1] - m->bounds[low]) + (place - m->bounds[low]);
        seed ^= (uint64_t)low * UINT64_C(0x9e3779b97f4a7c15);
    }
    const int64_t windows = m->windows[sample.source];
    sample.epoch = turn / windows;
    sample.window = qd_permute(seed, sample.epoch, turn % windows, windows);
    return sample;
}
