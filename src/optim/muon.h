/* Muon: the momentum of a matrix is brought close to the nearest orthogonal matrix before it is
 * applied, by a few steps of a Newton-Schulz iteration (Jordan et al. 2024,
 * https://kellerjordan.github.io/posts/muon/). In fp32. */
#ifndef QD_OPTIM_MUON_H
#define QD_OPTIM_MUON_H

#include "device/device.h"

/* What one matrix needs beside itself; r = min(rows, cols). */
typedef struct qd_muon_room {
    float *gram, *poly; /* (r, r) */
    float *next;        /* (rows, cols) */
    double *squares;    /* (rows) */
} qd_muon_room;

/* x (rows, cols) becomes an approximation of U Vᵀ, where x = U S Vᵀ: singular values end up between
 * 0.7 and 1.2 or so. x that is zero stays zero. Enqueued on the stream; bits depend on the matrix
 * and its shape only. */
qd_status qd_muon_orthogonalize(const qd_kernels *kernels, qd_stream *stream, float *x, int64_t rows, int64_t cols, int steps,
                                const qd_muon_room *room);

/* The learning rate of matrices at a step, counted from 1, before the factor for their shape: what
 * weight decay goes by. */
double qd_muon_lr(const qd_optim *optim, int64_t step);
/* That factor. */
double qd_muon_shape_factor(const qd_optim *optim, int64_t rows, int64_t cols);
#endif
