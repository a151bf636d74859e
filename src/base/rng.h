/* Counter-based random numbers: Philox4x32-10. A draw is a pure function of (seed, stream, index),
 * so a parameter or a dropout mask is bit-identical on any layout, whichever rank computes it and
 * in whatever order. */
#ifndef QD_BASE_RNG_H
#define QD_BASE_RNG_H

#include <stdint.h>

typedef struct qd_philox_key {
    uint32_t k[2];
} qd_philox_key;

/* Key of a named stream: seed mixed with a 64-bit hash of the name (XXH3). */
qd_philox_key qd_rng_key(uint64_t seed, const char *name);

/* One block of four 32-bit words for counter (counter_low, counter_high). */
void qd_philox4x32(qd_philox_key key, uint64_t counter_low, uint64_t counter_high, uint32_t out[4]);

/* Uniform in [0, 1) from the upper 24 bits of a word. */
static inline float qd_rng_to_uniform(uint32_t word)
{
    return (float)(word >> 8) * 0x1p-24f;
}

/* out[i] = normal number with mean 0 and the given standard deviation for element `first + i`.
 * Box-Muller in double on the words of block (first + i) / 2, so any sub-range gives the same
 * values. */
void qd_rng_normal(qd_philox_key key, int64_t first, int64_t count, double stddev, float *out);

/* Uniform integer in [0, bound) for an index; the modulo bias is at most 2^-32. */
uint64_t qd_rng_below(qd_philox_key key, uint64_t index, uint64_t bound);

#endif
