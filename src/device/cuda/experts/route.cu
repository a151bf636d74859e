/* Routing: which experts a row chooses, and the gradient of its weights. One warp per row: lane l
 * holds experts l, l + 32, ... in registers. Scores are rounded as on the CPU (exponentials and
 * sums in double, one rounding), so that equal logits give equal choices. */
#include "device/cuda/experts/route_impl.cuh"

#include <limits.h>
#include <math.h>

enum { WARPS = 8, ROWS_PER_WARP = 4, BLOCK_ROWS = WARPS * ROWS_PER_WARP, CHOICES_MOST = 32 };

static qd_status check_rule(const char *kernel, const qd_route_rule *r)
{
    if (r->experts < 1 || r->per_token < 1 || r->per_token > r->experts || r->groups < 1 || r->experts % r->groups != 0 ||
        r->top_groups < 1 || r->top_groups > r->groups || r->top_groups * (r->experts / r->groups) < r->per_token)
        return QD_FAIL(QD_USAGE, "%s: cannot choose %d of %d experts from %d of %d groups", kernel, r->per_token, r->experts,
                       r->top_groups, r->groups);
    if (r->experts > EXPERTS_MOST || r->per_token > CHOICES_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: %d of %d experts; on a GPU a row chooses at most %d of at most %d", kernel, r->per_token,
                       r->experts, CHOICES_MOST, EXPERTS_MOST);
    return QD_OK;
}

/* Calls body with the number of experts per lane as a compile-time constant. */
template <int N> struct constant {
    static constexpr int value = N;
};
template <typename F> static qd_status with_experts(int experts, F body)
{
    if (experts <= 32)
        return body(constant<1>());
    if (experts <= 64)
        return body(constant<2>());
    if (experts <= 128)
        return body(constant<4>());
    return experts <= 256 ? body(constant<8>()) : body(constant<16>());
}

template <int PER> static __device__ __forceinline__ void load_logits(const float *logits, int experts, int lane, float (&x)[PER])
{
#pragma unroll
    for (int i = 0; i < PER; i++)
        x[i] = i * 32 + lane < experts ? logits[i * 32 + lane] : -INFINITY;
}

/* The largest logit; NaN is left to the sums. */
template <int PER> static __device__ __forceinline__ float row_max(const float (&x)[PER])
{
    float most = x[0];
#pragma unroll
    for (int i = 1; i < PER; i++)
        most = fmaxf(most, x[i]);
    return warp_max(most);
}

/* Scores beyond the last expert are 0. */
template <int PER>
static __device__ __forceinline__ void row_scores(const qd_route_rule &r, const float (&x)[PER], int lane, float (&score)[PER])
{
    if (r.sigmoid) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            score[i] = i * 32 + lane < r.experts ? __fdiv_rn(1.0f, __fadd_rn(1.0f, (float)exp(-(double)x[i]))) : 0.0f;
        return;
    }
    float most = row_max<PER>(x);
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        score[i] = i * 32 + lane < r.experts ? (float)exp((double)(x[i] - most)) : 0.0f;
        sum += (double)score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < PER; i++)
        score[i] = (float)((double)score[i] / sum);
}

/* x[index / 32] of lane index % 32, in every lane; index is uniform. */
template <int PER> static __device__ __forceinline__ float pick(const float (&x)[PER], int index)
{
    float found = 0.0f;
#pragma unroll
    for (int i = 0; i < PER; i++)
        found = i == index / 32 ? x[i] : found;
    return __shfl_sync(ALL_LANES, found, index % 32);
}

/* Sort key of experts and groups, largest first: 0 is reserved for those that may not be chosen,
 * and NaN comes last. */
static __device__ __forceinline__ unsigned key_of(float x)
{
    return isnan(x) ? 1u : order_of(x);
}

/* Index of the largest key, of equal ones the lowest, among begin <= index < end; its bit in
 * `taken` is set. The same in all lanes. */
template <int PER>
static __device__ __forceinline__ int take_best(const unsigned (&key)[PER], unsigned &taken, int begin, int end, int lane)
{
    unsigned best = 0;
    int at = INT_MAX;
#pragma unroll
    for (int i = 0; i < PER; i++) {
        int index = i * 32 + lane;
        bool better = index >= begin && index < end && !(taken >> i & 1u) && key[i] > best;
        best = better ? key[i] : best;
        at = better ? index : at;
    }
    unsigned top = __reduce_max_sync(ALL_LANES, best);
    int index = __reduce_min_sync(ALL_LANES, best == top ? at : INT_MAX);
    if (index % 32 == lane)
        taken |= 1u << index / 32;
    return index;
}

/* Restricts the choice to experts of the best groups. Returns the marks of all others. */
template <int PER>
static __device__ __forceinline__ unsigned limit_groups(const qd_route_rule &r, const float (&value)[PER], const unsigned (&key)[PER],
                                                        int lane)
{
    int size = r.experts / r.groups, best = min(r.group_best, size);
    unsigned taken = 0, group_key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++)
        group_key[i] = 0;
    for (int g = 0; g < r.groups; g++) {
        float sum = 0.0f;
        for (int i = 0; i < best; i++)
            sum += pick<PER>(value, take_best<PER>(key, taken, g * size, (g + 1) * size, lane));
#pragma unroll
        for (int i = 0; i < PER; i++)
            group_key[i] = i * 32 + lane == g ? key_of(sum) : group_key[i];
    }
    unsigned groups = 0, others = ~0u;
    for (int n = 0; n < r.top_groups; n++) {
        int g = take_best<PER>(group_key, groups, 0, r.groups, lane);
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (i * 32 + lane >= g * size && i * 32 + lane < (g + 1) * size)
                others &= ~(1u << i);
    }
    return others;
}

template <int PER> static __global__ void __launch_bounds__(32 * WARPS) route_kernel(qd_route_args a, bool bias_half)
{
    __shared__ int counts[EXPERTS_MOST];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = a.rule.per_token, experts = a.rule.experts;
    const int64_t first = (int64_t)blockIdx.x * BLOCK_ROWS, last = min(first + BLOCK_ROWS, a.rows) - 1;
    /* Usually all rows of a block are of one sequence; they are then counted here first. */
    const int64_t sequence = (a.first_row + first) / a.load_rows;
    const bool together = (a.first_row + last) / a.load_rows == sequence;
    for (int e = threadIdx.x; e < experts; e += 32 * WARPS)
        counts[e] = 0;
    __syncthreads();
    for (int64_t row = first + warp; row <= last; row += WARPS) {
        float value[PER], score[PER];
        unsigned key[PER], taken = 0;
        load_logits<PER>(a.logits + row * experts, experts, lane, value);
        row_scores<PER>(a.rule, value, lane, score);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            int e = i * 32 + lane;
            float bias[1] = {0.0f};
            if (a.bias && e < experts)
                load_as<1>(a.bias, e, bias_half, bias);
            value[i] = score[i] + bias[0];
            key[i] = e < experts ? key_of(value[i]) : 0u;
        }
        if (a.rule.top_groups < a.rule.groups)
            taken = limit_groups<PER>(a.rule, value, key, lane);
        float weight = 0.0f, sum = 0.0f; /* lane j keeps choice j */
        int choice = 0;
        for (int j = 0; j < k; j++) {
            int e = take_best<PER>(key, taken, 0, experts, lane);
            float s = pick<PER>(score, e);
            sum = __fadd_rn(sum, s);
            if (lane == j) {
                choice = e;
                weight = s;
            }
        }
        if (lane < k) {
            a.choice[row * k + lane] = choice;
            a.weight[row * k + lane] = __fmul_rn(a.rule.normalised ? __fdiv_rn(weight, sum) : weight, a.rule.scale);
            if (together)
                atomicAdd(&counts[choice], 1);
            else /* integers: the sum does not depend on the order */
                atomicAdd(&a.load[(a.first_row + row) / a.load_rows % a.loads * experts + choice], 1.0f);
        }
        __syncwarp();
    }
    __syncthreads();
    for (int e = threadIdx.x; together && e < experts; e += 32 * WARPS)
        if (counts[e] > 0)
            atomicAdd(&a.load[sequence % a.loads * experts + e], (float)counts[e]);
}

extern "C" qd_status qd_cuda_route(qd_stream *stream, const qd_route_args *a)
{
    QD_TRY(check_rule("route", &a->rule));
    if (a->bias)
        QD_TRY(qd_check_float("route", "bias", a->bias_dtype));
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    QD_CUDA_TRY(cudaMemsetAsync(a->load, 0, (size_t)(a->loads * a->rule.experts) * sizeof *a->load, l.stream));
    if (a->rows <= 0)
        return QD_OK;
    return with_experts(a->rule.experts, [&](auto per) -> qd_status {
        unsigned blocks = (unsigned)divide_up(a->rows, BLOCK_ROWS);
        route_kernel<decltype(per)::value><<<blocks, 32 * WARPS, 0, l.stream>>>(*a, a->bias_dtype == QD_BF16);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* d becomes the gradient of the scores, from the weights and the balance loss. */
template <int PER>
static __device__ __forceinline__ void score_gradient(const qd_route_grad_args &a, int64_t row, const float (&score)[PER], int lane,
                                                      double (&d)[PER])
{
    const int k = a.rule.per_token, experts = a.rule.experts;
    const int choice = lane < k ? a.choice[row * k + lane] : 0;
    const double dw = lane < k ? (double)a.d_weight[row * k + lane] : 0.0;
    double sum = 0.0, dot = 0.0;
    for (int j = 0; j < k; j++) {
        double s = (double)pick<PER>(score, __shfl_sync(ALL_LANES, choice, j));
        sum += s;
        dot += __shfl_sync(ALL_LANES, dw, j) * s;
    }
    /* w = scale s / sum(s): ds = scale (dw - <dw, s> / sum) / sum; without the division ds = scale
     * dw. */
    const double own = (double)a.rule.scale * (a.rule.normalised ? (dw - dot / sum) / sum : dw);
#pragma unroll
    for (int i = 0; i < PER; i++)
        d[i] = 0.0;
    for (int j = 0; j < k; j++) {
        int e = __shfl_sync(ALL_LANES, choice, j);
        double value = __shfl_sync(ALL_LANES, own, j);
#pragma unroll
        for (int i = 0; i < PER; i++)
            d[i] = i * 32 + lane == e ? value : d[i];
    }
    if (a.aux == 0.0f)
        return;
    const float *load = a.load + (a.first_row + row) / a.load_rows * experts;
    float f[PER];
    double total = 1.0, mean = 0.0;
#pragma unroll
    for (int i = 0; i < PER; i++)
        f[i] = i * 32 + lane < experts ? load[i * 32 + lane] * a.load_scale : 0.0f;
    if (a.rule.sigmoid) {
        total = 0.0;
#pragma unroll
        for (int i = 0; i < PER; i++)
            total += (double)score[i];
        total = warp_sum(total);
#pragma unroll
        for (int i = 0; i < PER; i++)
            mean += (double)f[i] * (double)score[i] / total;
        mean = warp_sum(mean);
    }
#pragma unroll
    for (int i = 0; i < PER; i++)
        d[i] += (double)a.aux * ((double)f[i] - mean) / total;
}

template <int PER> static __global__ void __launch_bounds__(32 * WARPS) route_grad_kernel(qd_route_grad_args a, bool half)
{
    const int lane = threadIdx.x % 32, experts = a.rule.experts;
    const int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= a.rows)
        return;
    float x[PER], score[PER];
    double d[PER], dot = 0.0;
    load_logits<PER>(a.logits + row * experts, experts, lane, x);
    row_scores<PER>(a.rule, x, lane, score);
    score_gradient<PER>(a, row, score, lane, d);
    if (!a.rule.sigmoid) {
#pragma unroll
        for (int i = 0; i < PER; i++)
            dot += d[i] * (double)score[i];
        dot = warp_sum(dot);
    }
    double most = 0.0, all = 0.0, factor = 0.0, e[PER];
    if (a.z != 0.0f) {
        most = (double)row_max<PER>(x);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            e[i] = i * 32 + lane < experts ? exp((double)x[i] - most) : 0.0;
            all += e[i];
        }
        all = warp_sum(all);
        factor = 2.0 * (double)a.z * (most + log(all)) / all;
    }
#pragma unroll
    for (int i = 0; i < PER; i++) {
        double s = (double)score[i];
        float out = (float)(s * (a.rule.sigmoid ? d[i] * (1.0 - s) : d[i] - dot));
        if (a.z != 0.0f)
            out += (float)(factor * e[i]);
        if (i * 32 + lane < experts)
            store_as<1>(a.d_logits, row * experts + i * 32 + lane, half, {out});
    }
}

extern "C" qd_status qd_cuda_route_grad(qd_stream *stream, const qd_route_grad_args *a)
{
    QD_TRY(check_rule("route_grad", &a->rule));
    QD_TRY(qd_check_float("route_grad", "d_logits", a->grad_dtype));
    if (a->rows <= 0)
        return QD_OK;
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    return with_experts(a->rule.experts, [&](auto per) -> qd_status {
        route_grad_kernel<decltype(per)::value>
            <<<(unsigned)divide_up(a->rows, WARPS), 32 * WARPS, 0, l.stream>>>(*a, a->grad_dtype == QD_BF16);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}
