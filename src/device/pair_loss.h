/* The loss of one pair of sequences and its derivative, shared by all devices so that they
 * agree. */
#ifndef QD_DEVICE_PAIR_LOSS_H
#define QD_DEVICE_PAIR_LOSS_H

#include "device/device.h"

#include <math.h>

#ifdef __CUDACC__
#define QD_PAIR_LOSS_ON __device__
#else
#define QD_PAIR_LOSS_ON
#endif

QD_PAIR_LOSS_ON static inline double qd_log_sigmoid(double x)
{
    return x < 0.0 ? x - log1p(exp(x)) : -log1p(exp(-x));
}

QD_PAIR_LOSS_ON static inline double qd_sigmoid(double x)
{
    return x < 0.0 ? exp(x) / (1.0 + exp(x)) : 1.0 / (1.0 + exp(-x));
}

/* Loss of a pair (base/preference.h), and *slope, its derivative by h. */
QD_PAIR_LOSS_ON static inline double qd_pair_loss_of(const qd_preference *p, double h, double *slope)
{
    const double beta = p->beta, s = p->smoothing, z = beta * h, away = h - 0.5 / beta;
    switch (p->kind) {
    case QD_PREFERENCE_HINGE: /* NaN stays NaN */
        *slope = z >= 1.0 ? 0.0 : -beta;
        return z >= 1.0 ? 0.0 : 1.0 - z;
    case QD_PREFERENCE_IPO:
        *slope = 2.0 * away;
        return away * away;
    case QD_PREFERENCE_ROBUST:
        *slope = -beta * ((1.0 - s) * qd_sigmoid(-z) + s * qd_sigmoid(z)) / (1.0 - 2.0 * s);
        return (-(1.0 - s) * qd_log_sigmoid(z) + s * qd_log_sigmoid(-z)) / (1.0 - 2.0 * s);
    default:
        *slope = -beta * ((1.0 - s) * qd_sigmoid(-z) - s * qd_sigmoid(z));
        return -(1.0 - s) * qd_log_sigmoid(z) - s * qd_log_sigmoid(-z);
    }
}

/* What a row adds to figures: its loss and the rest for the first row of a chosen sequence, else
 * nothing. Returns the row's factor. */
QD_PAIR_LOSS_ON static inline float qd_pair_row(const qd_pair_loss_args *a, int64_t row, double figures[5])
{
    const int32_t mark = a->rows.sequence[row];
    if (mark < 0)
        return 0.0f;
    const int32_t number = mark >> 1;
    const double *pair = a->scores + row / a->rows.rows * a->rows.sequences + (number & ~1);
    const double h = pair[1] - pair[0];
    double slope, loss = qd_pair_loss_of(&a->loss, h, &slope);
    if (mark & 1 && !(number & 1)) {
        figures[0] += loss;
        figures[1] += 1.0;
        figures[2] += a->loss.beta * h;
        figures[3] -= a->loss.beta * pair[0];
        figures[4] += h > 0.0;
    }
    return (float)((number & 1 ? slope : -slope) * (double)a->rows.weight[row]);
}
#endif
