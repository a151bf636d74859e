/* Softmax, its loss and gradient in one pass over memory, and the sum of losses. */
#include "device/cuda/math_impl.cuh"

#include <math.h>

#define LOG2_E 1.4426950408889634f

/* Maximum and sum of exponentials of what was seen so far. An empty one has most = -infinity, sum = 0. */
struct running {
    float most, sum;
};

static __device__ __forceinline__ float shift_of(float most)
{
    return most == -INFINITY ? 0.0f : most; /* infinity minus infinity must not arise */
}

static __device__ __forceinline__ float exp_of(float x, float shift)
{
    return exp2f((x - shift) * LOG2_E);
}

static __device__ __forceinline__ running join(running a, running b)
{
    running r;
    r.most = fmaxf(a.most, b.most);
    float shift = shift_of(r.most);
    r.sum = a.sum * exp_of(a.most, shift) + b.sum * exp_of(b.most, shift);
    return r;
}

static __device__ __forceinline__ running warp_join(running r)
{
#pragma unroll
    for (int step = 16; step; step /= 2) {
        running other = {__shfl_xor_sync(0xffffffffu, r.most, step), __shfl_xor_sync(0xffffffffu, r.sum, step)};
        /* the same order of the two in both lanes, so that both get the same bits */
        r = threadIdx.x & step ? join(other, r) : join(r, other);
    }
    return r;
}

/* One block per row. The first `kept` vectors of the row stay in shared memory between the two passes; what does not fit is
 * read again, from the second-level cache if it is still there. N is VECTOR or 1. */
template <typename T, int N>
static __global__ void __launch_bounds__(1024) cross_entropy_kernel(qd_cross_entropy_args a, int64_t kept, qd_cuda_fault *fault)
{
    extern __shared__ uint4 shared[];
    __shared__ running room[32];
    struct alignas(N * sizeof(T)) vector_of {
        T v[N];
    };
    T *row = (T *)a.logits + (int64_t)blockIdx.x * a.ld;
    vector_of *keep = (vector_of *)shared;
    const int64_t vectors = (a.vocab + N - 1) / N; /* with a logit in them */
    const int target = a.targets[blockIdx.x];
    if (target < 0 || target >= a.vocab) {
        if (threadIdx.x == 0) {
            a.losses[blockIdx.x] = 0.0f;
            if (target >= 0)
                report_fault(fault, QD_CUDA_BAD_TARGET, blockIdx.x, target, a.vocab);
        }
        if (a.grad) {
            const float zero[N] = {};
            for (int64_t i = threadIdx.x; i < a.ld / N; i += blockDim.x)
                store<N>(row + i * N, zero);
        }
        return;
    }
    const float chosen = to_float(row[target]); /* before anyone overwrites it: see the barrier below */

    running r = {-INFINITY, 0.0f};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
        vector_of raw = *(const vector_of *)(row + i * N);
        float x[N], most = r.most;
        if (i < kept)
            keep[i] = raw; /* each thread reads back what it wrote itself */
#pragma unroll
        for (int j = 0; j < N; j++) {
            x[j] = i * N + j < a.vocab ? to_float(raw.v[j]) : -INFINITY;
            most = fmaxf(most, x[j]);
        }
        float shift = shift_of(most), sum = 0.0f;
#pragma unroll
        for (int j = 0; j < N; j++)
            sum += exp_of(x[j], shift);
        r.sum = r.sum * exp_of(r.most, shift) + sum;
        r.most = most;
    }
    r = warp_join(r);
    if (threadIdx.x % 32 == 0)
        room[threadIdx.x / 32] = r;
    __syncthreads(); /* also: everyone has read `chosen` */
    r = threadIdx.x % 32 < blockDim.x / 32 ? room[threadIdx.x % 32] : running{-INFINITY, 0.0f};
    r = warp_join(r);

    const float shift = shift_of(r.most);
    const double shifted = (double)chosen - (double)shift;
    if (threadIdx.x == 0)
        a.losses[blockIdx.x] = (float)(log((double)r.sum) - shifted);
    if (!a.grad)
        return;
    const float factor = (float)((double)a.scale / (double)r.sum);
    const float at_target = (float)((exp(shifted) / (double)r.sum - 1.0) * (double)a.scale);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < vectors; i += blockDim.x) {
        vector_of raw = i < kept ? keep[i] : *(const vector_of *)(row + i * N);
        float x[N];
#pragma unroll
        for (int j = 0; j < N; j++) {
            x[j] = i * N + j < a.vocab ? exp_of(to_float(raw.v[j]), shift) * factor : 0.0f;
            x[j] = i * N + j == target ? at_target : x[j];
        }
        store<N>(row + i * N, x);
    }
    const float zero[N] = {};
    for (int64_t i = vectors + threadIdx.x; i < a.ld / N; i += blockDim.x)
        store<N>(row + i * N, zero);
}

template <typename T, int N> static qd_status launch_cross_entropy(qd_stream *stream, const qd_cross_entropy_args *a)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    const int64_t vectors = divide_up(a->vocab, N), size = N * (int64_t)sizeof(T);
    const int64_t spare = 2048; /* the kernel's own and the system's shared memory */
    int64_t most = l.shared_most - spare, half = (l.shared_most - 2 * spare) / 2;
    /* Two blocks per multiprocessor where two rows fit: one computes while the other moves. */
    bool two = vectors * size <= half;
    int64_t kept = !a->grad ? 0 : two ? vectors : vectors * size <= most ? vectors : most / size;
    int threads = two ? 512 : 1024;
    while (threads > 32 && threads / 2 >= vectors)
        threads /= 2;
    QD_CUDA_TRY(cudaFuncSetAttribute(cross_entropy_kernel<T, N>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)most));
    cross_entropy_kernel<T, N><<<(unsigned)a->rows, threads, (size_t)(kept * size), l.stream>>>(*a, kept, l.fault);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_cross_entropy(qd_stream *stream, const qd_cross_entropy_args *a)
{
    QD_TRY(qd_cuda_check_float("cross_entropy", "logits", a->dtype));
    if (a->ld < a->vocab)
        return QD_FAIL(QD_USAGE, "cross_entropy: row stride %lld is less than the vocabulary of %lld", (long long)a->ld,
                       (long long)a->vocab);
    if (a->rows <= 0 || a->vocab <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return can_vector(a->ld, a->logits) ? launch_cross_entropy<T, 16 / sizeof(T)>(stream, a)
                                            : launch_cross_entropy<T, 1>(stream, a);
    });
}

/* One block: thread t sums rows t, t + 1024, ... in double, then the threads' sums are added in a fixed tree. */
static __global__ void __launch_bounds__(1024) loss_sum_kernel(qd_loss_sum_args a)
{
    __shared__ double room[2][32];
    double total = 0, counted = 0;
#pragma unroll 4
    for (int64_t row = threadIdx.x; row < a.rows; row += 1024) {
        total += (double)a.losses[row];
        counted += a.targets[row] >= 0;
    }
    total = block_sum(total, room[0]);
    counted = block_sum(counted, room[1]);
    if (threadIdx.x == 0) {
        *a.total += total;
        *a.counted += counted;
    }
}

extern "C" qd_status qd_cuda_loss_sum(qd_stream *stream, const qd_loss_sum_args *a)
{
    loss_sum_kernel<<<1, 1024, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
