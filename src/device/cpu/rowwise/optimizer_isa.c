/* Parameter updates in one pass: read gradient, master weight and state, write them back, and round
 * the master weight into the parameter. With `rest`, the master weight is joined from parameter and
 * low 16 bits, and split again afterwards. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

/* The elements of chunk number `chunk`. */
static qd_param_range chunk_part(const qd_param_range *ranges, int64_t chunk)
{
    while (chunk >= qd_cpu_range_chunks(ranges)) {
        chunk -= qd_cpu_range_chunks(ranges);
        ranges++;
    }
    int64_t first = chunk * QD_CPU_GRAIN, left = ranges->count - first;
    return (qd_param_range){.offset = ranges->offset + first,
                            .count = left < QD_CPU_GRAIN ? left : QD_CPU_GRAIN,
                            .decay = ranges->decay};
}

/* Addresses of a chunk's values. */
typedef struct values {
    float *master;   /* or NULL */
    uint16_t *param; /* bf16; NULL: only the master is stored */
    int16_t *rest;   /* low 16 bits of the master weight, if there is no master */
} values;

/* Addresses do not show whether a master is stored next to the parameter: they are those of element
 * 0, which a buffer that starts at a later element does not contain, and two of them may be
 * equal. */
static values values_at(void *param, float *master, int16_t *rest, int64_t offset, qd_dtype dtype)
{
    return (values){
        .master = rest ? NULL : master + offset,
        .param = dtype == QD_F32 ? NULL : (uint16_t *)param + offset,
        .rest = rest ? rest + offset : NULL,
    };
}

/* split: a compile-time constant at the call, so that the loops have no branch for it. */
QD_INLINE vf load_values(const values *x, int64_t i, int n, bool split)
{
    return split ? vec_load_parts(x->param, x->rest, i, n) : vec_load(x->master, i, n, QD_F32);
}

QD_INLINE void store_values(const values *x, int64_t i, vf p, int n, bool split)
{
    if (split) {
        vec_store_parts(x->param, x->rest, i, p, n);
        return;
    }
    vec_store(x->master, i, p, n, QD_F32);
    if (x->param)
        vec_store(x->param, i, p, n, QD_BF16);
}

QD_INLINE void adamw_chunks(const qd_adamw_args *a, int64_t begin, int64_t end, bool split)
{
    float scale = (float)*a->grad_scale, eps = (float)a->eps;
    float new1 = (float)(1.0 - a->beta1), new2 = (float)(1.0 - a->beta2);
    float rate = (float)(a->lr / a->bias_correction1);
    float correction = (float)(1.0 / __builtin_sqrt(a->bias_correction2));
    qd_dtype grad_dtype = a->grad_dtype;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        qd_param_range part = chunk_part(a->ranges, chunk);
        float decay = part.decay ? (float)(a->lr * a->weight_decay) : 0.0f;
        const void *grad = qd_cpu_at(a->grad, part.offset, grad_dtype);
        values x = values_at(a->param, a->master, a->rest, part.offset, a->param_dtype);
        float *ms = a->m + part.offset, *vs = a->v + part.offset;
        QD_FOR_VECTORS(i, n, part.count, {
            vf g = vec_load(grad, i, n, grad_dtype) * scale;
            vf m = vec_load(ms, i, n, QD_F32), v = vec_load(vs, i, n, QD_F32);
            vf first = m - m * new1, second = v - v * new2;
            /* Of two multiplications and their sum, always the same one is fused: results are
             * bit-identical wherever a range begins. */
            QD_IN_REGISTER(first);
            QD_IN_REGISTER(second);
            m = g * new1 + first;
            v = g * g * new2 + second;
            vf p = load_values(&x, i, n, split);
            p = p - (rate * m / (vec_sqrt(v) * correction + eps) + decay * p);
            vec_store(ms, i, m, n, QD_F32);
            vec_store(vs, i, v, n, QD_F32);
            store_values(&x, i, p, n, split);
        });
    }
}

static void adamw(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_adamw_args *a = context;
    if (a->rest)
        adamw_chunks(a, begin, end, true);
    else
        adamw_chunks(a, begin, end, false);
}

QD_INLINE void sgd_chunks(const qd_sgd_args *a, int64_t begin, int64_t end, bool split)
{
    float scale = (float)*a->grad_scale, momentum = (float)a->momentum, lr = (float)a->lr;
    qd_dtype grad_dtype = a->grad_dtype;
    for (int64_t chunk = begin; chunk < end; chunk++) {
        qd_param_range part = chunk_part(a->ranges, chunk);
        float decay = part.decay ? (float)a->weight_decay : 0.0f;
        const void *grad = qd_cpu_at(a->grad, part.offset, grad_dtype);
        values x = values_at(a->param, a->master, a->rest, part.offset, a->param_dtype);
        float *ms = a->m ? a->m + part.offset : NULL;
        QD_FOR_VECTORS(i, n, part.count, {
            vf d = vec_load(grad, i, n, grad_dtype) * scale;
            QD_IN_REGISTER(d);
            if (ms) {
                d = vec_load(ms, i, n, QD_F32) * momentum + d;
                vec_store(ms, i, d, n, QD_F32);
            }
            vf p = load_values(&x, i, n, split);
            p = p - lr * (d + decay * p);
            store_values(&x, i, p, n, split);
        });
    }
}

static void sgd(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_sgd_args *a = context;
    if (a->rest)
        sgd_chunks(a, begin, end, true);
    else
        sgd_chunks(a, begin, end, false);
}

const qd_cpu_optimizer_ops QD_ISA_NAME(qd_cpu_optimizer_ops) = {.adamw = adamw, .sgd = sgd};
