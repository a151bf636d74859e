/* Hierarchical dispatch: places of row copies per node and of relayed rows. A block per node, or
 * per expert of a node, numbers its own; the warps of a block take stretches of rows, count, and
 * number starting at the counts of earlier stretches. Results do not depend on the order in which
 * warps run. */
#include "device/cuda/math_impl.cuh"

#include <limits.h>

enum { THREADS = 1024, WARPS = THREADS / 32, PLAIN = 256 };

/* Calls put(i, number) for all wanted i < n, in the lane that has i; numbers count the wanted ones
 * from 0 in the order of i. Returns how many there are, in every thread. All threads of the block
 * call it; `scratch` holds WARPS numbers. */
template <typename Wanted, typename Put>
static __device__ __forceinline__ int number_wanted(int64_t n, int *scratch, Wanted wanted, Put put)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t each = (n + WARPS * 32 - 1) / (WARPS * 32) * 32, first = min(warp * each, n), end = min(first + each, n);
    int own = 0;
#pragma unroll 4
    for (int64_t i = first + lane; i < end; i += 32)
        own += wanted(i);
    own = warp_sum(own);
    if (lane == 0)
        scratch[warp] = own;
    __syncthreads();
    int total = warp_sum(scratch[lane]), next = warp_sum(lane < warp ? scratch[lane] : 0);
    for (int64_t i = first; i < end; i += 32) {
        const bool is = i + lane < end && wanted(i + lane);
        const unsigned all = __ballot_sync(ALL_LANES, is);
        if (is)
            put(i + lane, next + __popc(all & ((1u << lane) - 1u)));
        next += __popc(all);
    }
    return total;
}

/* The sum of x[0 .. n), in every thread. */
static __device__ __forceinline__ int sum_of(const int32_t *x, int n)
{
    int sum = 0;
    for (int i = threadIdx.x % 32; i < n; i += 32)
        sum += x[i];
    return warp_sum(sum);
}

/* The following run on the row's own rank. */

static __device__ __forceinline__ bool goes_to(const qd_node_plan_args &a, int64_t row, int each, int node)
{
    for (int64_t i = row * a.per_token; i < (row + 1) * a.per_token; i++)
        if (a.kept[i] >= 0 && a.choice[i] / each == node)
            return true;
    return false;
}

/* Numbers the copies within each node; node_list_kernel turns the numbers into places. */
static __global__ void __launch_bounds__(THREADS) node_count_kernel(qd_node_plan_args a)
{
    __shared__ int scratch[WARPS];
    const int node = blockIdx.x, each = a.experts / a.nodes;
    for (int64_t row = threadIdx.x; row < a.rows; row += THREADS)
        a.place[row * a.nodes + node] = -1;
    for (int e = threadIdx.x; e < each; e += THREADS)
        a.counts[node * each + e] = a.count[node * each + e];
    __syncthreads();
    const int copies = number_wanted(
        a.rows, scratch, [&](int64_t row) { return goes_to(a, row, each, node); },
        [&](int64_t row, int number) { a.place[row * a.nodes + node] = number; });
    if (threadIdx.x == 0)
        a.copies[node] = a.counts[a.experts + node] = copies;
}

/* Turns numbers into places, after all nodes have counted. Items are pairs (row, node). */
static __global__ void __launch_bounds__(PLAIN) node_list_kernel(qd_node_plan_args a)
{
    const int k = a.per_token, each = a.experts / a.nodes, node = blockIdx.y;
    const int64_t row = (int64_t)blockIdx.x * PLAIN + threadIdx.x;
    const int begin = sum_of(a.copies, node);
    if (row >= a.rows)
        return;
    int place = a.place[row * a.nodes + node];
    if (place < 0)
        return;
    place += begin;
    a.place[row * a.nodes + node] = place;
    a.from[place] = (int32_t)(row * a.nodes + node);
    int32_t *list = a.chosen + (int64_t)place * 2 * k;
    for (int j = 0; j < k; j++) {
        const int64_t i = row * k + j;
        const int choice = a.choice[i];
        list[j] = a.kept[i] >= 0 && choice / each == node ? choice % each : -1;
        list[k + j] = __float_as_int(a.weight[i]);
    }
}

extern "C" qd_status qd_cuda_node_plan(qd_stream *stream, const qd_node_plan_args *a)
{
    if (a->nodes < 1 || a->experts % a->nodes != 0 || a->rows < 0 || a->rows * a->nodes > INT_MAX)
        return QD_FAIL(QD_USAGE, "node_plan: cannot distribute %lld rows and %d experts over %d nodes", (long long)a->rows, a->experts,
                       a->nodes);
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    node_count_kernel<<<(unsigned)a->nodes, THREADS, 0, l.stream>>>(*a);
    QD_CUDA_LAUNCHED();
    if (a->rows == 0)
        return QD_OK;
    node_list_kernel<<<dim3((unsigned)divide_up(a->rows, PLAIN), (unsigned)a->nodes), PLAIN, 0, l.stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static __global__ void __launch_bounds__(PLAIN) node_weights_kernel(qd_node_weights_args a)
{
    const int64_t i = (int64_t)blockIdx.x * PLAIN + threadIdx.x;
    if (i >= a.rows * a.per_token)
        return;
    int64_t row, j;
    split_index(i, a.per_token, row, j);
    float d = 0.0f;
    if (a.kept[i] >= 0)
        d = a.copies[(int64_t)a.place[row * a.nodes + a.choice[i] / (a.experts / a.nodes)] * a.per_token + j];
    a.d_weight[i] = d;
}

extern "C" qd_status qd_cuda_node_weights(qd_stream *stream, const qd_node_weights_args *a)
{
    if (a->rows <= 0)
        return QD_OK;
    node_weights_kernel<<<(unsigned)divide_up(a->rows * a->per_token, PLAIN), PLAIN, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* The following run on the relaying rank. */

/* A block per expert; places are initialized to -1. */
static __global__ void __launch_bounds__(THREADS) relay_plan_kernel(qd_relay_plan_args a)
{
    __shared__ int scratch[WARPS];
    const int expert = blockIdx.x, k = a.per_token, taken = a.taken[expert], take = a.take[expert], begin = sum_of(a.take, expert);
    if (threadIdx.x == 0)
        a.count[expert] = take;
    if (take == 0)
        return;
    const auto wanted = [&](int64_t i) {
        int64_t row, j;
        split_index(i, k, row, j);
        return a.chosen[row * 2 * k + j] == expert;
    };
    number_wanted(a.relayed * k, scratch, wanted, [&](int64_t i, int number) {
        if (number < taken || number - taken >= take)
            return;
        const int place = begin + number - taken;
        a.place[i] = place;
        a.from[place] = (int32_t)i;
    });
}

static __global__ void __launch_bounds__(PLAIN) relay_weight_kernel(const int32_t *chosen, float *weight, int64_t n, int k)
{
    const int64_t i = (int64_t)blockIdx.x * PLAIN + threadIdx.x;
    if (i >= n)
        return;
    int64_t row, j;
    split_index(i, k, row, j);
    weight[i] = __int_as_float(chosen[(2 * row + 1) * k + j]);
}

extern "C" qd_status qd_cuda_relay_plan(qd_stream *stream, const qd_relay_plan_args *a)
{
    const int64_t relayed = a->relayed * a->per_token;
    if (a->experts < 1 || a->relayed > a->rows || a->rows * a->per_token > INT_MAX)
        return QD_FAIL(QD_USAGE, "relay_plan: %lld of %lld rows of %d choices are too many", (long long)a->relayed, (long long)a->rows,
                       a->per_token);
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    if (a->rows > 0)
        QD_CUDA_TRY(cudaMemsetAsync(a->place, 0xff, (size_t)(a->rows * a->per_token) * sizeof *a->place, l.stream));
    relay_plan_kernel<<<(unsigned)a->experts, THREADS, 0, l.stream>>>(*a);
    QD_CUDA_LAUNCHED();
    if (!a->weight || relayed == 0)
        return QD_OK;
    relay_weight_kernel<<<(unsigned)divide_up(relayed, PLAIN), PLAIN, 0, l.stream>>>(a->chosen, a->weight, relayed, a->per_token);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static __global__ void __launch_bounds__(PLAIN) relay_keep_kernel(qd_relay_keep_args a)
{
    const int64_t i = (int64_t)blockIdx.x * PLAIN + threadIdx.x;
    if (i < a.n && a.place[i] >= 0)
        a.to[i] = a.from[i];
}

extern "C" qd_status qd_cuda_relay_keep(qd_stream *stream, const qd_relay_keep_args *a)
{
    if (a->n <= 0)
        return QD_OK;
    relay_keep_kernel<<<(unsigned)divide_up(a->n, PLAIN), PLAIN, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
