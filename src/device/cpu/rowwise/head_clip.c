/* QK-Clip: rescales rows of query and key weights. Rarely does any row change, so the loop is
 * plain. */
#include "base/half.h"
#include "device/arguments_impl.h"
#include "device/cpu/kernels_impl.h"
#include "device/head_clip.h"
#include "device/split_master.h"

static void rescale(const qd_head_clip_args *a, int64_t begin, int64_t end, float factor)
{
    for (int64_t i = begin; i < end; i++) {
        if (a->rest) {
            uint16_t *half = (uint16_t *)a->param + i;
            const float value = qd_f32_join(*half, a->rest[i]) * factor;
            *half = qd_f32_to_bf16(value);
            a->rest[i] = qd_f32_rest(value, *half);
            continue;
        }
        a->master[i] *= factor;
        if (a->param_dtype == QD_BF16)
            ((uint16_t *)a->param)[i] = qd_f32_to_bf16(a->master[i]);
    }
}

static void clip_rows(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_head_clip_args *a = context;
    (void)thread;
    for (int64_t next; begin < end; begin = next) {
        const int64_t row = (a->first + begin) / a->cols, last = (row + 1) * a->cols - a->first;
        const double factor = qd_head_factor(a, row);
        next = last < end ? last : end;
        if (factor != 1.0)
            rescale(a, begin, next, (float)factor);
    }
}

qd_status qd_cpu_head_clip(qd_stream *stream, const qd_head_clip_args *a)
{
    QD_TRY(qd_check_float("head_clip", "the parameter", a->param_dtype));
    QD_TRY(qd_check_rest("head_clip", a->rest, a->param_dtype));
    if (!a->grad_scale || isfinite(*a->grad_scale))
        qd_cpu_for(stream, a->count, QD_CPU_GRAIN, clip_rows, a);
    return QD_OK;
}
