/* Sequences that are compared in pairs: sums of their log-probabilities, and the loss of pairs. Few
 * numbers: one block per window, or one block, and orders of summation that are fixed. */
#include "device/cuda/math_impl.cuh"
#include "device/pair_loss.h"

/* A thread sums the rows of its sequences in ascending order; all read the same marks, from
 * cache. */
static __global__ void __launch_bounds__(1024) pair_sums_kernel(qd_pair_sums_args a)
{
    const qd_pair_rows r = a.rows;
    const int64_t first = (int64_t)blockIdx.x * r.rows;
    for (int64_t number = threadIdx.x; number < r.sequences; number += blockDim.x) {
        double score = 0.0;
        for (int64_t row = first; row < first + r.rows; row++)
            if (r.sequence[row] >> 1 == number)
                score += (double)r.weight[row] * (double)a.losses[row] + ((double)r.reference[row] + (double)r.rest[row]);
        a.scores[(int64_t)blockIdx.x * r.sequences + number] = score;
    }
}

extern "C" qd_status qd_cuda_pair_sums(qd_stream *stream, const qd_pair_sums_args *a)
{
    if (a->rows.windows <= 0)
        return QD_OK;
    pair_sums_kernel<<<(unsigned)a->rows.windows, 1024, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static __global__ void __launch_bounds__(1024) pair_loss_kernel(qd_pair_loss_args a)
{
    __shared__ double scratch[5][32];
    double figures[5] = {0, 0, 0, 0, 0};
    for (int64_t row = threadIdx.x; row < a.rows.windows * a.rows.rows; row += 1024)
        a.factors[row] = qd_pair_row(&a, row, figures);
    for (int i = 0; i < 5; i++) {
        double sum = block_sum(figures[i], scratch[i]);
        if (threadIdx.x == 0)
            a.figures[i] += sum;
    }
}

extern "C" qd_status qd_cuda_pair_loss(qd_stream *stream, const qd_pair_loss_args *a)
{
    pair_loss_kernel<<<1, 1024, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
