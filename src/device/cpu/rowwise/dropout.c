/* Dropout: checks and the random stream; the masks are drawn in dropout_isa.c. */
#include "device/cpu/kernels_impl.h"

#include <stdio.h>

/* The draw for element `index` is word index % 4 of Philox block (index / 4, step) under the key of
 * the stream "dropout.SITE". */
qd_status qd_cpu_dropout(qd_stream *stream, const qd_dropout_args *a)
{
    QD_TRY(qd_check_float("dropout", "x", a->dtype));
    if (!(a->p >= 0.0f && a->p < 1.0f))
        return QD_FAIL(QD_USAGE, "dropout: probability %g; it must be at least 0 and below 1", (double)a->p);
    char name[32];
    snprintf(name, sizeof name, "dropout.%u", (unsigned)a->site);
    qd_cpu_dropout_job job = {a, qd_rng_key(a->seed, name)};
    qd_cpu_for(stream, a->rows * a->cols, QD_CPU_GRAIN, qd_cpu_dropout_ops_for(qd_cpu_of(stream))->apply, &job);
    return QD_OK;
}
