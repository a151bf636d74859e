/* Softmax and cross-entropy, row by row in two passes. The first computes the maximum and the sum
 * of exponentials together, in stretches that fit in the L1 cache; the second writes the gradient.
 * Where logits are replaced by their gradient, the first pass stores the exponentials for the
 * second, each stretch relative to the maximum so far: fp32 logits in their place, others in the
 * workspace. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>

#define STRETCH 4096
#define STRETCHES_MOST 128 /* of a row whose exponentials are stored */

/* *top = maximum of x (count); returns the sum of e^(x - *top). A row of minus infinities gives
 * *top = 0 and sum 0. kept: becomes e^(x - shift of the stretch), and may be x; NULL: is not
 * wanted. */
static double exp_sum(const void *x, int64_t vocab, qd_dtype dtype, float *top, float *kept, float *shifts)
{
    double sum = 0;
    float most = -INFINITY;
    for (int64_t first = 0; first < vocab; first += STRETCH) {
        int64_t count = vocab - first < STRETCH ? vocab - first : STRETCH;
        vf lanes = vf_set(-INFINITY);
        QD_FOR_VECTORS(i, n, count, {
            lanes = vf_max(lanes, vec_first(vec_load(x, first + i, n, dtype), n, -INFINITY));
        });
        float here = vf_max_lane(lanes);
        if (here > most) {
            sum *= exp((double)most - (double)here);
            most = here;
        }
        float shift = most == -INFINITY ? 0.0f : most;
        vf even = {0}, odd = {0};
        QD_FOR_VECTORS(i, n, count, {
            vf v = vf_exp(vec_first(vec_load(x, first + i, n, dtype), n, -INFINITY) - shift);
            if (kept)
                vec_store(kept, first + i, v, n, QD_F32);
            vf next = even + v;
            even = odd;
            odd = next;
        });
        if (kept)
            shifts[first / STRETCH] = most; /* minus infinity if all logits so far were: the exponentials stay 0 */
        sum += (double)vf_sum(even + odd);
    }
    *top = most == -INFINITY ? 0.0f : most;
    return sum;
}

/* x = factor * e^(x - top), from the exponentials that exp_sum() stored. */
static void scale_kept(void *x, qd_dtype dtype, const float *kept, int64_t vocab, float factor, const float *shifts, float top)
{
    for (int64_t first = 0; first < vocab; first += STRETCH) {
        int64_t count = vocab - first < STRETCH ? vocab - first : STRETCH;
        float here = factor * expf(shifts[first / STRETCH] - top);
        QD_FOR_VECTORS(i, n, count, { vec_store(x, first + i, vec_load(kept, first + i, n, QD_F32) * here, n, dtype); });
    }
}

static void row_capped(const qd_cross_entropy_args *a, int64_t row);

static void rows(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_cpu_cross_entropy_job *job = context;
    const qd_cross_entropy_args *a = job->args;
    _Static_assert((int64_t)STRETCH * STRETCHES_MOST * 4 <= QD_CPU_WORKSPACE_BYTES, "exponentials must fit the workspace");
    for (int64_t row = begin; row < end; row++) {
        if (a->cap > 0.0f) {
            row_capped(a, row);
            continue;
        }
        void *x = qd_cpu_at_mut(a->logits, row * a->ld, a->dtype);
        int32_t target = a->targets[row];
        int64_t cleared = 0; /* first column to be set to 0 */
        if (target < 0) {
            a->losses[row] = 0.0f;
        } else {
            float top, logit = load_as(x, target, a->dtype), shifts[STRETCHES_MOST];
            float *kept = a->dtype == QD_F32 ? x : qd_cpu_workspace(job->cpu, thread);
            if (!a->grad || a->vocab > (int64_t)STRETCH * STRETCHES_MOST)
                kept = NULL;
            double sum = exp_sum(x, a->vocab, a->dtype, &top, kept, shifts);
            double shifted = (double)logit - (double)top;
            a->losses[row] = (float)(log(sum) - shifted);
            if (a->grad) {
                float factor = (float)((double)a->scale / sum);
                if (kept)
                    scale_kept(x, a->dtype, kept, a->vocab, factor, shifts, top);
                else
                    QD_FOR_VECTORS(i, n, a->vocab, {
                        vec_store(x, i, vf_exp(vec_load(x, i, n, a->dtype) - top) * factor, n, a->dtype);
                    });
                store_as(x, target, (float)((exp(shifted) / sum - 1.0) * (double)a->scale), a->dtype);
                cleared = a->vocab;
            }
        }
        if (a->grad)
            memset(qd_cpu_at_mut(x, cleared, a->dtype), 0, (size_t)(a->ld - cleared) * qd_dtype_size(a->dtype));
    }
}

/* Cross-entropy over a sharded vocabulary. */

static float max_of(const void *x, int64_t vocab, qd_dtype dtype)
{
    vf lanes = vf_set(-INFINITY);
    QD_FOR_VECTORS(i, n, vocab, { lanes = vf_max(lanes, vec_first(vec_load(x, i, n, dtype), n, -INFINITY)); });
    return vf_max_lane(lanes);
}

/* cap * tanh(x / cap); cap 0: x. Grows with x, so the largest logit stays the largest. */
QD_INLINE vf capped(vf x, float cap)
{
    return cap > 0.0f ? vec_tanh(x / cap) * cap : x;
}

static float capped_one(float x, float cap)
{
    return cap > 0.0f ? (float)((double)cap * tanh((double)x / (double)cap)) : x;
}

/* Its derivative, from the result. */
QD_INLINE vf cap_slope(vf y, float cap)
{
    return cap > 0.0f ? 1.0f - (y / cap) * (y / cap) : vf_set(1.0f);
}

QD_INLINE double exp_sum_by(const void *x, int64_t vocab, qd_dtype dtype, float shift, float cap)
{
    double sum = 0;
    for (int64_t first = 0; first < vocab; first += STRETCH) {
        int64_t count = vocab - first < STRETCH ? vocab - first : STRETCH;
        vf lanes = {0};
        QD_FOR_VECTORS(i, n, count, { lanes += vf_exp(vec_first(capped(vec_load(x, first + i, n, dtype), cap), n, -INFINITY) - shift); });
        sum += (double)vf_sum(lanes);
    }
    return sum;
}

/* The loops are compiled without a cap, and with one. */
static double exp_sum_from(const void *x, int64_t vocab, qd_dtype dtype, float shift, float cap)
{
    return cap > 0.0f ? exp_sum_by(x, vocab, dtype, shift, cap) : exp_sum_by(x, vocab, dtype, shift, 0.0f);
}

/* x = factor * e^(x - top), the gradient of all logits but the target's. */
QD_INLINE void gradient_by(void *x, int64_t vocab, qd_dtype dtype, float factor, float top, float cap)
{
    QD_FOR_VECTORS(i, n, vocab, {
        vf y = capped(vec_load(x, i, n, dtype), cap);
        vec_store(x, i, cap > 0.0f ? vf_exp(y - top) * factor * cap_slope(y, cap) : vf_exp(y - top) * factor, n, dtype);
    });
}

static void gradient(void *x, int64_t vocab, qd_dtype dtype, float factor, float top, float cap)
{
    if (cap > 0.0f)
        gradient_by(x, vocab, dtype, factor, top, cap);
    else
        gradient_by(x, vocab, dtype, factor, top, 0.0f);
}

/* The gradient of the target's logit, `shifted` above `top`. */
static float target_gradient(double shifted, double sum, float top, float scale, float cap)
{
    double slope = cap > 0.0f ? 1.0 - pow((shifted + (double)top) / (double)cap, 2.0) : 1.0;
    return (float)((exp(shifted) / sum - 1.0) * (double)scale * slope);
}

static void row_capped(const qd_cross_entropy_args *a, int64_t row)
{
    void *x = qd_cpu_at_mut(a->logits, row * a->ld, a->dtype);
    int32_t target = a->targets[row];
    int64_t cleared = 0; /* first column to be set to 0 */
    a->losses[row] = 0.0f;
    if (target >= 0) {
        float top = capped_one(max_of(x, a->vocab, a->dtype), a->cap), logit = capped_one(load_as(x, target, a->dtype), a->cap);
        double sum = exp_sum_from(x, a->vocab, a->dtype, top, a->cap), shifted = (double)logit - (double)top;
        a->losses[row] = (float)(log(sum) - shifted);
        if (a->grad) {
            gradient(x, a->vocab, a->dtype, (float)((double)a->scale / sum), top, a->cap);
            store_as(x, target, target_gradient(shifted, sum, top, a->scale, a->cap), a->dtype);
            cleared = a->vocab;
        }
    }
    if (a->grad)
        memset(qd_cpu_at_mut(x, cleared, a->dtype), 0, (size_t)(a->ld - cleared) * qd_dtype_size(a->dtype));
}

static void part_row(const qd_cross_entropy_part_args *a, int64_t row)
{
    void *x = qd_cpu_at_mut(a->logits, row * a->ld, a->dtype);
    if (a->stage == QD_CROSS_ENTROPY_MAX) {
        a->top[row] = capped_one(max_of(x, a->vocab, a->dtype), a->cap);
        return;
    }
    float top = a->top[row] == -INFINITY ? 0.0f : a->top[row];
    int64_t target = a->targets[row] < 0 ? -1 : a->targets[row] - a->first;
    bool here = a->targets[row] >= 0 && target >= 0 && target < a->vocab;
    if (a->stage == QD_CROSS_ENTROPY_SUM) {
        a->sums[2 * row] = (float)exp_sum_from(x, a->vocab, a->dtype, top, a->cap);
        a->sums[2 * row + 1] = here ? capped_one(load_as(x, target, a->dtype), a->cap) - top : 0.0f;
        return;
    }
    int64_t cleared = 0; /* first column to be set to 0 */
    double sum = a->sums[2 * row], shifted = a->sums[2 * row + 1];
    a->losses[row] = a->targets[row] < 0 ? 0.0f : (float)(log(sum) - shifted);
    if (!a->grad)
        return;
    if (a->targets[row] >= 0) {
        const float scale = a->factors ? a->scale * a->factors[row] : a->scale, factor = (float)((double)scale / sum);
        gradient(x, a->vocab, a->dtype, factor, top, a->cap);
        if (here)
            store_as(x, target, target_gradient(shifted, sum, top, scale, a->cap), a->dtype);
        cleared = a->vocab;
    }
    memset(qd_cpu_at_mut(x, cleared, a->dtype), 0, (size_t)(a->ld - cleared) * qd_dtype_size(a->dtype));
}

static void part(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    for (int64_t row = begin; row < end; row++)
        part_row(context, row);
}

const qd_cpu_cross_entropy_ops QD_ISA_NAME(qd_cpu_cross_entropy_ops) = {.rows = rows, .part = part};
