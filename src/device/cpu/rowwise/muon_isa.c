/* The element-wise steps of Muon on one range, vectorized. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

static void momentum(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_momentum_args *a = context;
    float scale = (float)*a->grad_scale, keep = (float)a->momentum, rest = (float)(1.0 - a->momentum);
    const void *grad = qd_cpu_at(a->grad, begin, a->grad_dtype);
    float *ms = a->m + begin, *out = a->out ? a->out + begin : NULL;
    QD_FOR_VECTORS(i, n, end - begin, {
        vf g = vec_load(grad, i, n, a->grad_dtype) * scale * rest;
        QD_IN_REGISTER(g); /* see adamw */
        vf m = vec_load(ms, i, n, QD_F32) * keep + g;
        vec_store(ms, i, m, n, QD_F32);
        if (out)
            vec_store(out, i, a->nesterov ? m * keep + g : m, n, QD_F32);
    });
}

static void unit_norm(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_cpu_unit_norm_job *job = context;
    float *x = job->args->x + begin;
    QD_FOR_VECTORS(i, n, end - begin, { vec_store(x, i, vec_load(x, i, n, QD_F32) * job->factor, n, QD_F32); });
}

static void axpby(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_axpby_args *a = context;
    QD_FOR_VECTORS(i, n, end - begin, {
        vf x = vec_load(a->a + begin, i, n, QD_F32) * a->alpha + vec_load(a->b + begin, i, n, QD_F32) * a->beta;
        vec_store(a->y + begin, i, x, n, QD_F32);
    });
}

static void matrix_update(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_matrix_update_args *a = context;
    float keep = (float)(1.0 - a->decay), rate = (float)a->rate;
    float *master = a->master + begin;
    void *param = a->param && a->param != (const void *)a->master ? qd_cpu_at_mut(a->param, begin, a->param_dtype) : NULL;
    QD_FOR_VECTORS(i, n, end - begin, {
        vf p = vec_load(master, i, n, QD_F32) * keep - vec_load(a->direction + begin, i, n, QD_F32) * rate;
        vec_store(master, i, p, n, QD_F32);
        if (param)
            vec_store(param, i, p, n, a->param_dtype);
    });
}

const qd_cpu_muon_ops QD_ISA_NAME(qd_cpu_muon_ops) = {
    .momentum = momentum, .unit_norm = unit_norm, .axpby = axpby, .matrix_update = matrix_update};
