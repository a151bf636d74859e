/* Maps samples of a run to windows of sources: pure functions of (seed, sample index), without
 * state and independent of the layout. Any rank can compute any sample, and a run can resume at any
 * step. */
#ifndef QD_DATA_SAMPLER_H
#define QD_DATA_SAMPLER_H

#include <quadrille/status.h>
#include <stdint.h>

enum { QD_MIXTURE_BLOCK = 4096 };

/* Image of `index` under permutation number `epoch` of [0, size): a Feistel network on a power of
 * two, repeated until the value is inside (cycle walking). */
int64_t qd_permute(uint64_t seed, int64_t epoch, int64_t index, int64_t size);

/* Samples are distributed to the sources in blocks of QD_MIXTURE_BLOCK. Within a block each source
 * has a fixed number of samples, its weight rounded by largest remainders and at least 1, in an
 * order permuted per block. */
typedef struct qd_mixture {
    uint64_t seed;
    int sources;
    const int64_t *windows; /* (sources): windows per epoch of each source */
    const int64_t *bounds;  /* (sources + 1): source s has the permuted slots [bounds[s], bounds[s+1]) of a block */
} qd_mixture;

/* bounds from weights > 0; at most QD_MIXTURE_BLOCK sources. */
void qd_mixture_bounds(const double *weights, int sources, int64_t *bounds);

typedef struct qd_sample {
    int source;
    int64_t epoch, window;
} qd_sample;

/* Sample number `index` of the run. windows[s] consecutive samples of source s contain each of its
 * windows once. */
qd_sample qd_mixture_sample(const qd_mixture *mixture, int64_t index);

#endif
