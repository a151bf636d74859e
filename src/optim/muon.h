/* Muon: brings the momentum of a matrix close to the nearest orthogonal matrix before it is
 * applied, by a few steps of a Newton-Schulz iteration (Jordan et al. 2024,
 * https://kellerjordan.github.io/posts/muon/). In fp32. */
#ifndef QD_OPTIM_MUON_H
#define QD_OPTIM_MUON_H

#include "base/optim_config.h"
#include "device/device.h"

/* Workspace for one matrix; r = min(rows, cols). */
typedef struct qd_muon_room {
    float *gram, *poly; /* (r, r) */
    float *next;        /* (rows, cols) */
    double *squares;    /* (rows) */
} qd_muon_room;

/* Replaces x (rows, cols) by an approximation of U Vᵀ, where x = U S Vᵀ: singular values end up
 * between about 0.7 and 1.2. A zero matrix stays zero. Enqueued on the stream; the bits of the
 * result depend only on the matrix and its shape. */
qd_status qd_muon_orthogonalize(const qd_kernels *kernels, qd_stream *stream, float *x, int64_t rows, int64_t cols, int steps,
                                const qd_muon_room *room);

/* The learning rate of matrices at a step, counted from 1, without the factor for their shape.
 * Weight decay uses this rate. */
double qd_muon_lr(const qd_optim *optim, int64_t step);
/* The factor of the learning rate for the shape of a matrix. */
double qd_muon_shape_factor(const qd_optim *optim, int64_t rows, int64_t cols);
#endif
