/* Places of assignments, by counting: each block takes a stretch of assignments, counts them by
 * expert, and numbers them starting at the counts of all earlier stretches. Results do not depend
 * on the order in which blocks or warps run. */
#include "device/cuda/experts/route_impl.cuh"
#include "device/split_master.h"

#include <limits.h>

enum { THREADS = 512, WARPS = THREADS / 32, STRETCHES_MOST = 128 };
static_assert((int)EXPERTS_MOST <= (int)THREADS, "list starts are summed with one thread per expert");

/* How the assignments are split: `count` stretches of `each`, of which every warp takes `per_warp`,
 * a multiple of 32. */
struct stretches {
    int64_t assignments, each, per_warp;
    int count;
};

static stretches cut(int64_t assignments)
{
    stretches s;
    int64_t wanted = divide_up(assignments, THREADS);
    wanted = wanted < 1 ? 1 : wanted > STRETCHES_MOST ? STRETCHES_MOST : wanted;
    s.assignments = assignments;
    s.per_warp = divide_up(divide_up(assignments, wanted * WARPS), 32) * 32;
    s.each = s.per_warp * WARPS;
    s.count = (int)divide_up(assignments, s.each);
    return s;
}

/* counts[stretch][expert] */
static __global__ void __launch_bounds__(THREADS) count_kernel(qd_route_plan_args a, stretches s, int *counts, qd_cuda_fault *fault)
{
    __shared__ int count[EXPERTS_MOST];
    for (int e = threadIdx.x; e < a.experts; e += THREADS)
        count[e] = 0;
    __syncthreads();
    const int64_t first = blockIdx.x * s.each, end = min(first + s.each, s.assignments);
    for (int64_t i = first + threadIdx.x; i < end; i += THREADS) {
        int e = a.choice[i];
        if (e >= 0 && e < a.experts)
            atomicAdd(&count[e], 1);
        else
            report_fault(fault, QD_CUDA_BAD_EXPERT, i / a.per_token, e, e < 0 ? -1 : a.experts);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < a.experts; e += THREADS)
        counts[blockIdx.x * (int64_t)a.experts + e] = count[e];
}

/* Exclusive prefix sum of x over the threads; at most THREADS values. `scratch` holds WARPS
 * numbers. All threads call it. */
static __device__ int sum_before(int x, int *scratch)
{
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int sum = warp_sum_so_far(x);
    __syncthreads(); /* the previous call may still be reading scratch */
    if (lane == 31)
        scratch[warp] = sum;
    __syncthreads();
    int before = 0;
    for (int w = 0; w < warp; w++)
        before += scratch[w];
    return before + sum - x;
}

static __device__ __forceinline__ int kept(int count, int64_t limit)
{
    return limit > 0 && count > limit ? (int)limit : count;
}

/* Numbers a stretch. An expert's list starts at the sum of the kept lengths of all earlier experts;
 * assignments above the limit have no place. With `all`, nothing is dropped yet: `all` becomes the
 * full lists, and `length` their lengths. Shared memory: next (WARPS, experts), total, before,
 * begin (experts). */
static __global__ void __launch_bounds__(THREADS) place_kernel(qd_route_plan_args a, stretches s, const int *counts, int *all, int *length)
{
    extern __shared__ int shared[];
    __shared__ int scratch[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, experts = a.experts;
    int *next = shared, *total = next + WARPS * experts, *before = total + experts, *begin = before + experts;
    const int64_t limit = all ? 0 : a.limit;
    for (int i = threadIdx.x; i < (WARPS + 2) * experts; i += THREADS)
        shared[i] = 0;
    __syncthreads();

    /* Counts of all stretches, and of the earlier ones; several threads share an expert if there
     * are enough. */
    const int parts = THREADS / experts > 0 ? THREADS / experts : 1;
    for (int i = threadIdx.x; i < parts * experts; i += THREADS) {
        int e = i % experts, sum = 0, earlier = 0;
        for (int b = i / experts; b < s.count; b += parts) {
            int n = counts[b * (int64_t)experts + e];
            sum += n;
            earlier += b < (int)blockIdx.x ? n : 0;
        }
        atomicAdd(&total[e], sum);
        atomicAdd(&before[e], earlier);
    }
    /* Counts per warp. */
    const int64_t first = blockIdx.x * s.each + warp * s.per_warp, end = min(first + s.per_warp, s.assignments);
    int *own = next + warp * experts;
    for (int64_t i = first; i < end; i += 32) {
        int e = i + lane < end ? a.choice[i + lane] : -1;
        if (e >= 0 && e < experts)
            atomicAdd(&own[e], 1);
    }
    __syncthreads();
    /* Where each expert's list starts, and where each warp continues in it. */
    const int e = threadIdx.x, mine = e < experts ? kept(total[e], limit) : 0, start = sum_before(mine, scratch);
    if (e < experts) {
        int at = before[e];
        begin[e] = start;
        for (int w = 0; w < WARPS; w++) {
            int n = next[w * experts + e];
            next[w * experts + e] = at;
            at += n;
        }
        if (blockIdx.x == 0) {
            a.count[e] = kept(total[e], a.limit);
            if (all)
                length[e] = total[e];
        }
    }
    __syncthreads();
    for (int64_t i = first; i < end; i += 32) {
        const int choice = i + lane < end ? a.choice[i + lane] : -1;
        const bool valid = choice >= 0 && choice < experts;
        const unsigned same = __match_any_sync(ALL_LANES, valid ? choice : -1);
        const int rank = (valid ? own[choice] : 0) + __popc(same & ((1u << lane) - 1u));
        __syncwarp();
        if (valid && lane == __ffs(same) - 1)
            own[choice] += __popc(same);
        __syncwarp();
        const bool taken = valid && (limit == 0 || rank < limit);
        const int place = taken ? begin[choice] + rank : -1;
        if (taken)
            (all ? all : a.from)[place] = (int32_t)(i + lane);
        if (i + lane < end)
            a.place[i + lane] = all ? -1 : place;
    }
}

/* One block per expert: keeps the `limit` heaviest of its list, of equal ones the first, in the
 * order of the list. The cutoff weight is found digit by digit (radix select). */
static __global__ void __launch_bounds__(THREADS) heaviest_kernel(qd_route_plan_args a, const int *all, const int *length)
{
    __shared__ int scratch[WARPS], digits[256], chosen, left;
    const int expert = blockIdx.x, limit = (int)min(a.limit, (int64_t)INT_MAX), count = length[expert];
    int shares[2] = {0, 0}; /* of this thread's expert: length of its full list and of its kept list */
    if (threadIdx.x < expert) {
        shares[0] = length[threadIdx.x];
        shares[1] = kept(shares[0], limit);
    }
    /* The total is the prefix sum of the last thread plus its own value. */
    __shared__ int starts[2];
    for (int i = 0; i < 2; i++) {
        int before = sum_before(shares[i], scratch);
        if (threadIdx.x == THREADS - 1)
            starts[i] = before + shares[i];
    }
    __syncthreads();
    const int *list = all + starts[0];
    const int begin = starts[1];
    unsigned prefix = 0, mask = 0; /* known digits of the cutoff */
    int wanted = limit;            /* how many to keep of those that match these digits */
    for (int shift = 24; count > limit && shift >= 0; shift -= 8) {
        for (int i = threadIdx.x; i < 256; i += THREADS)
            digits[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS) {
            unsigned key = order_of(a.weight[list[i]]);
            if ((key & mask) == prefix)
                atomicAdd(&digits[key >> shift & 255u], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255, rest = wanted;
            while (digit > 0 && digits[digit] < rest)
                rest -= digits[digit--];
            chosen = digit;
            left = rest;
        }
        __syncthreads();
        prefix |= (unsigned)chosen << shift;
        mask |= 255u << shift;
        wanted = left;
        __syncthreads();
    }
    /* All heavier ones are kept, and the first `wanted` of those at the cutoff. */
    int taken = 0, equal = 0; /* in earlier stretches of the list */
    for (int at = 0; at < count; at += THREADS) {
        const int i = at + threadIdx.x, from = i < count ? list[i] : -1;
        const unsigned key = i < count && count > limit ? order_of(a.weight[from]) : 0;
        const bool at_cut = i < count && count > limit && key == prefix;
        const int rank = equal + sum_before(at_cut, scratch);
        const bool take = i < count && (count <= limit || key > prefix || (at_cut && rank < wanted));
        const int place = taken + sum_before(take, scratch);
        if (take) {
            a.from[begin + place] = from;
            a.place[from] = begin + place;
        }
        __syncthreads();
        if (threadIdx.x == THREADS - 1) {
            digits[0] = rank + at_cut;
            digits[1] = place + take;
        }
        __syncthreads();
        equal = digits[0];
        taken = digits[1];
    }
}

extern "C" qd_status qd_cuda_route_plan(qd_stream *stream, const qd_route_plan_args *a)
{
    if (a->experts < 1 || a->experts > EXPERTS_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "route_plan: %d experts; 1 to %d are supported on a GPU", a->experts, EXPERTS_MOST);
    if (a->rows < 0 || a->rows * a->per_token > INT_MAX)
        return QD_FAIL(QD_USAGE, "route_plan: %lld rows of %d choices are too many", (long long)a->rows, a->per_token);
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    if (a->rows == 0) {
        QD_CUDA_TRY(cudaMemsetAsync(a->count, 0, (size_t)a->experts * sizeof *a->count, l.stream));
        return QD_OK;
    }
    const stretches s = cut(a->rows * a->per_token);
    const bool least = a->least && a->limit > 0;
    const int64_t table = (int64_t)s.count * a->experts;
    void *scratch;
    QD_TRY(qd_cuda_workspace(stream, (table + (least ? a->experts + s.assignments : 0)) * (int64_t)sizeof(int), &scratch));
    int *counts = (int *)scratch, *length = least ? counts + table : NULL, *all = least ? length + a->experts : NULL;
    const size_t shared = (size_t)(WARPS + 3) * (size_t)a->experts * sizeof(int);
    count_kernel<<<s.count, THREADS, 0, l.stream>>>(*a, s, counts, l.fault);
    QD_CUDA_LAUNCHED();
    place_kernel<<<s.count, THREADS, shared, l.stream>>>(*a, s, counts, all, length);
    QD_CUDA_LAUNCHED();
    if (least) {
        heaviest_kernel<<<a->experts, THREADS, 0, l.stream>>>(*a, all, length);
        QD_CUDA_LAUNCHED();
    }
    return QD_OK;
}

static __global__ void __launch_bounds__(THREADS) load_kernel(qd_route_load_args a)
{
    __shared__ int count[EXPERTS_MOST];
    for (int e = threadIdx.x; e < a.experts; e += THREADS)
        count[e] = 0;
    __syncthreads();
    for (int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x; i < a.assignments; i += (int64_t)gridDim.x * THREADS)
        atomicAdd(&count[a.choice[i]], 1);
    __syncthreads();
    for (int e = threadIdx.x; e < a.experts; e += THREADS)
        if (count[e] > 0) /* integers: the sum does not depend on the order */
            atomicAdd(&a.total[e], (float)count[e]);
}

extern "C" qd_status qd_cuda_route_load(qd_stream *stream, const qd_route_load_args *a)
{
    if (a->experts > EXPERTS_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "route_load: %d experts; at most %d are supported on a GPU", a->experts, EXPERTS_MOST);
    if (a->assignments <= 0)
        return QD_OK;
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    int64_t blocks = divide_up(a->assignments, 4 * THREADS);
    load_kernel<<<(unsigned)(blocks < STRETCHES_MOST ? blocks : STRETCHES_MOST), THREADS, 0, l.stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static __global__ void bias_kernel(qd_expert_bias_args a, bool half)
{
    int64_t e = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (e >= a.experts || (a.grad_scale && !isfinite(*a.grad_scale)))
        return;
    double over = (double)a.total[e] - a.mean;
    float bias[1];
    if (a.rest)
        load_parts<1>((const bf16 *)a.param + e, a.rest + e, bias);
    else
        bias[0] = a.bias[e];
    bias[0] = (float)((double)bias[0] - a.rate * (double)((over > 0.0) - (over < 0.0)));
    if (a.rest) {
        store_parts<1>((bf16 *)a.param + e, a.rest + e, bias);
        return;
    }
    a.bias[e] = bias[0];
    store_as<1>(a.param, e, half, bias);
}

extern "C" qd_status qd_cuda_expert_bias(qd_stream *stream, const qd_expert_bias_args *a)
{
    QD_TRY(qd_check_float("expert_bias", "param", a->param_dtype));
    QD_TRY(qd_check_rest("expert_bias", a->rest, a->param_dtype));
    if (a->experts <= 0)
        return QD_OK;
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    bias_kernel<<<(unsigned)divide_up(a->experts, THREADS), THREADS, 0, l.stream>>>(*a, a->param_dtype == QD_BF16);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
