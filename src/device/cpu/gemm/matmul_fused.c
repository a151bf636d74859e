/* GEMMs with the steps that other devices fuse, here as separate kernels: the CPU gains little from
 * fusion, but op lists for other devices can be run and tested on it. */
#include "device/cpu/kernels_impl.h"

/* The separate kernels need contiguous rows. */
static qd_status check(const qd_matmul_args *a)
{
    if ((a->residual || a->gelu != QD_MATMUL_NO_GELU) && a->ldc != a->n)
        return QD_FAIL(QD_UNSUPPORTED, "matmul: residual and GELU need a contiguous c (ldc == n)");
    if (a->bias_grad && (!a->trans_a || a->lda != a->m))
        return QD_FAIL(QD_UNSUPPORTED, "matmul: bias_grad needs a transposed, contiguous a (lda == m)");
    return QD_OK;
}

qd_status qd_cpu_matmul_fused(qd_stream *stream, const qd_matmul_args *a)
{
    QD_TRY(check(a));
    qd_matmul_args plain = *a;
    plain.residual = plain.aux = plain.bias_grad = NULL;
    plain.gelu = QD_MATMUL_NO_GELU;
    if (a->gelu == QD_MATMUL_GELU)
        plain.c = a->aux;
    QD_TRY(qd_cpu_matmul(stream, &plain));
    qd_activation_args gelu = {.kind = QD_ACT_GELU_TANH, .x = a->aux, .rows = a->m, .cols = a->n, .dtype = a->c_dtype};
    if (a->gelu == QD_MATMUL_GELU) {
        gelu.y = a->c;
        QD_TRY(qd_cpu_activation_forward(stream, &gelu));
    } else if (a->gelu == QD_MATMUL_GELU_GRAD) {
        gelu.dy = gelu.dx = a->c;
        QD_TRY(qd_cpu_activation_backward(stream, &gelu));
    }
    if (a->residual)
        QD_TRY(qd_cpu_add(stream, &(qd_add_args){.a = a->c, .b = a->residual, .y = a->c, .n = a->m * a->n,
                                                 .a_dtype = a->c_dtype, .b_dtype = a->c_dtype, .y_dtype = a->c_dtype}));
    if (a->bias_grad)
        QD_TRY(qd_cpu_bias_grad(stream, &(qd_bias_grad_args){.dy = a->a, .grad = a->bias_grad, .rows = a->k, .cols = a->m,
                                                             .accumulate = a->accumulate, .dtype = a->a_dtype, .grad_dtype = a->c_dtype}));
    return QD_OK;
}
