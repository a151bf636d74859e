/* The largest scores of heads where cuDNN computes attention: its kernel gives the largest score
 * and the sum of exponentials of each row, from which follow the row's log-sum-exp and the
 * maximum. */
#include "device/cuda/attention/attention_runs_impl.cuh"

enum { THREADS = 256, ROWS = 8 * THREADS };

/* Grid: x = stretches of ROWS rows, y = head, z = sequence. */
static __global__ void __launch_bounds__(THREADS) maxima_kernel(const float *most, float *lse, float *maxima, int64_t seq)
{
    const int64_t line = ((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * seq, first = (int64_t)blockIdx.x * ROWS;
    float largest = 0.0f;
    for (int64_t row = first + threadIdx.x; row < seq && row < first + ROWS; row += THREADS) {
        const float top = most[line + row];
        lse[line + row] = top + logf(lse[line + row]);
        largest = fmaxf(largest, top);
    }
    largest = warp_max(largest);
    if (threadIdx.x % 32 == 0)
        raise_to(maxima + blockIdx.y, largest);
}

extern "C" qd_status qd_cuda_attention_maxima(qd_stream *stream, const float *most, const qd_attention_args *a)
{
    const dim3 grid((unsigned)divide_up(a->seq, ROWS), (unsigned)a->heads, (unsigned)a->batch);
    maxima_kernel<<<grid, THREADS, 0, qd_cuda_launch_of(stream).stream>>>(most, a->lse, a->maxima, a->seq);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
