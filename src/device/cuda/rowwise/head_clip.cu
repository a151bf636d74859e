/* QK-Clip: rescales rows of query and key weights, one warp per row. Rarely does any row change. */
#include "device/cuda/math_impl.cuh"
#include "device/head_clip.h"
#include "device/split_master.h"

enum { WARPS = 8 };

static __global__ void __launch_bounds__(32 * WARPS) head_clip_kernel(qd_head_clip_args a)
{
    const int64_t row = a.first / a.cols + (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    const int64_t begin = max(row * a.cols - a.first, (int64_t)0), end = min((row + 1) * a.cols - a.first, a.count);
    if (begin >= end || (a.grad_scale && !isfinite(*a.grad_scale)))
        return;
    const double wanted = qd_head_factor(&a, row);
    if (wanted == 1.0)
        return;
    const float factor = (float)wanted;
    for (int64_t i = begin + threadIdx.x % 32; i < end; i += 32) {
        bf16 *half = (bf16 *)a.param + i;
        float v[1];
        if (a.rest) {
            load_parts<1>(half, a.rest + i, v);
            v[0] *= factor;
            store_parts<1>(half, a.rest + i, v);
            continue;
        }
        v[0] = a.master[i] * factor;
        a.master[i] = v[0];
        if (a.param_dtype == QD_BF16)
            store<1>(half, v);
    }
}

extern "C" qd_status qd_cuda_head_clip(qd_stream *stream, const qd_head_clip_args *a)
{
    QD_TRY(qd_check_float("head_clip", "the parameter", a->param_dtype));
    QD_TRY(qd_check_rest("head_clip", a->rest, a->param_dtype));
    if (a->count <= 0)
        return QD_OK;
    const int64_t rows = (a->first + a->count - 1) / a->cols - a->first / a->cols + 1;
    head_clip_kernel<<<(unsigned)divide_up(rows, WARPS), 32 * WARPS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
