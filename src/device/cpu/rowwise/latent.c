/* Queries, keys and values of latent attention: checks and ranges of rows. */
#include "device/cpu/kernels_impl.h"

static qd_status check(const char *kernel, const qd_latent_args *a)
{
    QD_TRY(qd_check_float(kernel, "qkv", a->dtype));
    if (a->heads < 1 || a->nope < 0 || a->v < 1 || a->rope < 2 || a->rope % 2 || a->rope > QD_CPU_LATENT_ROPE)
        return QD_FAIL(QD_UNSUPPORTED, "%s: %d heads of %d + %d elements with values of %d; the rotated part must be even, from 2 to %d",
                       kernel, a->heads, a->nope, a->rope, a->v, QD_CPU_LATENT_ROPE);
    return QD_OK;
}

static int64_t grain(const qd_latent_args *a)
{
    return qd_cpu_row_grain((int64_t)a->heads * (2 * (a->nope + a->rope) + a->v));
}

qd_status qd_cpu_latent_join(qd_stream *stream, const qd_latent_args *a)
{
    QD_TRY(check("latent_join", a));
    qd_cpu_for(stream, a->rows, grain(a), qd_cpu_latent_ops_for(qd_cpu_of(stream))->join, a);
    return QD_OK;
}

qd_status qd_cpu_latent_split(qd_stream *stream, const qd_latent_args *a)
{
    QD_TRY(check("latent_split", a));
    qd_cpu_for(stream, a->rows, grain(a), qd_cpu_latent_ops_for(qd_cpu_of(stream))->split, a);
    return QD_OK;
}
