/* The last step of the grad_norm kernel, shared by all devices so that they agree. */
#ifndef QD_DEVICE_GRAD_NORM_H
#define QD_DEVICE_GRAD_NORM_H

#include "device/device.h"

#include <math.h>

#ifdef __CUDACC__
#define QD_GRAD_NORM_ON __device__
#else
#define QD_GRAD_NORM_ON
#endif

/* total: sum of the sums of squares; bad: index of the first non-finite one, or count. */
QD_GRAD_NORM_ON static inline void qd_grad_norm_finish(const qd_grad_norm_args *a, double total, int64_t bad)
{
    const double correction = a->loss[1] > 0.0 ? a->planned / a->loss[1] : 0.0, norm = sqrt(total) * correction;
    const bool good = bad == a->count && isfinite(a->loss[0]) && isfinite(norm);
    const bool high = (a->most_norm > 0.0 && norm > a->most_norm) || (a->most_loss > 0.0 && a->loss[0] > a->most_loss * a->loss[1]);
    a->out[0] = norm;
    a->out[1] = !good || high ? (double)NAN : correction * (a->clip > 0.0 && norm > a->clip ? a->clip / (norm + 1e-6) : 1.0);
    a->out[2] = bad == a->count ? -1.0 : (double)bad;
}
#endif
