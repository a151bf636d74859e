/* GELU (tanh form and exact), SwiGLU (plain and clamped) and GELU as a gate. Each element is read
 * before it is written, so results may overwrite inputs. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

/* 0.5 * (1 + tanh u) is the logistic function of 2u, and 2u = x * (TWO_B + TWO_BK x^2)
 * with TWO_B = 2 sqrt(2/pi), TWO_BK = 0.044715 * TWO_B. */
#define TWO_B 1.5957691216f
#define TWO_BK 0.0713548163f

QD_INLINE vf gelu_tanh(vf x, vf *derivative)
{
    vf squared = vf_min(x * x, vf_set(1e6f)); /* bounded: a finite x must not give 0 times infinity */
    vf complement;
    vf s = vec_logistic(x * (TWO_B + TWO_BK * squared), &complement);
    *derivative = s + x * (s * complement) * (TWO_B + 3.0f * TWO_BK * squared);
    return x * s;
}

QD_INLINE vf gelu(vf x, vf *derivative)
{
    vf density;
    vf p = vec_normal_cdf(x, &density);
    *derivative = p + x * density;
    return x * p;
}

QD_INLINE vf silu(vf x, vf *derivative)
{
    vf complement;
    vf s = vec_logistic(x, &complement);
    *derivative = s + x * (s * complement);
    return x * s;
}

/* The gate of swiglu_clamped and its derivative, and the other factor. */
QD_INLINE vf clamped(vf x, float alpha, float limit, vf *derivative)
{
    vf most = vf_set(limit), gate = vf_select(x > most, most, x), complement;
    vf s = vec_logistic(gate * alpha, &complement);
    *derivative = vf_select(x > most, vf_set(0.0f), s + gate * alpha * (s * complement));
    return gate * s;
}

QD_INLINE vf clamped_up(vf x, float limit, vf *derivative)
{
    vf most = vf_set(limit), least = vf_set(-limit);
    *derivative = vf_select((x > most) | (x < least), vf_set(0.0f), vf_set(1.0f));
    return vf_select(x > most, most, vf_select(x < least, least, x)) + 1.0f;
}

static void forward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_activation_args *a = context;
    qd_dtype type = a->dtype;
    int64_t cols = a->cols, x_cols = qd_activation_is_gated(a->kind) ? 2 * cols : cols;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * x_cols, type), *up = qd_cpu_at(x, cols, type);
        void *y = qd_cpu_at_mut(a->y, row * cols, type);
        vf unused, unused_too;
        switch (a->kind) {
        case QD_ACT_GELU_TANH:
            QD_FOR_VECTORS(i, n, cols, { vec_store(y, i, gelu_tanh(vec_load(x, i, n, type), &unused), n, type); });
            break;
        case QD_ACT_GELU:
            QD_FOR_VECTORS(i, n, cols, { vec_store(y, i, gelu(vec_load(x, i, n, type), &unused), n, type); });
            break;
        case QD_ACT_SWIGLU:
            QD_FOR_VECTORS(i, n, cols, {
                vec_store(y, i, silu(vec_load(x, i, n, type), &unused) * vec_load(up, i, n, type), n, type);
            });
            break;
        case QD_ACT_GEGLU_TANH:
            QD_FOR_VECTORS(i, n, cols, {
                vec_store(y, i, gelu_tanh(vec_load(x, i, n, type), &unused) * vec_load(up, i, n, type), n, type);
            });
            break;
        case QD_ACT_GEGLU:
            QD_FOR_VECTORS(i, n, cols, {
                vec_store(y, i, gelu(vec_load(x, i, n, type), &unused) * vec_load(up, i, n, type), n, type);
            });
            break;
        case QD_ACT_SWIGLU_CLAMPED:
            QD_FOR_VECTORS(i, n, cols, {
                vf s = clamped(vec_load(x, i, n, type), a->alpha, a->limit, &unused);
                vec_store(y, i, s * clamped_up(vec_load(up, i, n, type), a->limit, &unused_too), n, type);
            });
            break;
        }
    }
}

static void backward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_activation_args *a = context;
    qd_dtype type = a->dtype;
    int64_t cols = a->cols, x_cols = qd_activation_is_gated(a->kind) ? 2 * cols : cols;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * x_cols, type), *up = qd_cpu_at(x, cols, type);
        const void *dy = qd_cpu_at(a->dy, row * cols, type);
        void *dx = qd_cpu_at_mut(a->dx, row * x_cols, type), *dup = qd_cpu_at_mut(dx, cols, type);
        vf slope, up_slope;
        switch (a->kind) {
        case QD_ACT_GELU_TANH:
            QD_FOR_VECTORS(i, n, cols, {
                (void)gelu_tanh(vec_load(x, i, n, type), &slope);
                vec_store(dx, i, vec_load(dy, i, n, type) * slope, n, type);
            });
            break;
        case QD_ACT_GELU:
            QD_FOR_VECTORS(i, n, cols, {
                (void)gelu(vec_load(x, i, n, type), &slope);
                vec_store(dx, i, vec_load(dy, i, n, type) * slope, n, type);
            });
            break;
        case QD_ACT_SWIGLU:
            QD_FOR_VECTORS(i, n, cols, {
                vf d = vec_load(dy, i, n, type);
                vf u = vec_load(up, i, n, type);
                vf s = silu(vec_load(x, i, n, type), &slope);
                vec_store(dx, i, d * u * slope, n, type);
                vec_store(dup, i, d * s, n, type);
            });
            break;
        case QD_ACT_GEGLU_TANH:
            QD_FOR_VECTORS(i, n, cols, {
                vf d = vec_load(dy, i, n, type);
                vf u = vec_load(up, i, n, type);
                vf s = gelu_tanh(vec_load(x, i, n, type), &slope);
                vec_store(dx, i, d * u * slope, n, type);
                vec_store(dup, i, d * s, n, type);
            });
            break;
        case QD_ACT_GEGLU:
            QD_FOR_VECTORS(i, n, cols, {
                vf d = vec_load(dy, i, n, type);
                vf u = vec_load(up, i, n, type);
                vf s = gelu(vec_load(x, i, n, type), &slope);
                vec_store(dx, i, d * u * slope, n, type);
                vec_store(dup, i, d * s, n, type);
            });
            break;
        case QD_ACT_SWIGLU_CLAMPED:
            QD_FOR_VECTORS(i, n, cols, {
                vf d = vec_load(dy, i, n, type);
                vf u = clamped_up(vec_load(up, i, n, type), a->limit, &up_slope);
                vf s = clamped(vec_load(x, i, n, type), a->alpha, a->limit, &slope);
                vec_store(dx, i, d * u * slope, n, type);
                vec_store(dup, i, d * s * up_slope, n, type);
            });
            break;
        }
    }
}

const qd_cpu_activation_ops QD_ISA_NAME(qd_cpu_activation_ops) = {.forward = forward, .backward = backward};
