/* The element-wise steps of Muon. The thread that writes an element is the one that reads it first,
 * so results may overwrite inputs. */
#include "device/cuda/math_impl.cuh"

#include <math.h>

enum { THREADS = 256 };

static unsigned grid_for(int64_t items)
{
    return (unsigned)divide_up(items, THREADS);
}

static __device__ __forceinline__ int64_t item_index()
{
    return (int64_t)blockIdx.x * THREADS + threadIdx.x;
}

struct momentum_numbers {
    const void *grad;
    float *m, *out;
    int64_t n;
    const double *scale;
    float keep, rest;
    bool nesterov, grad_half;
};

template <int N> static __global__ void __launch_bounds__(THREADS) momentum_kernel(momentum_numbers a)
{
    int64_t i = item_index() * N;
    const float scale = (float)*a.scale;
    if (i >= a.n || !isfinite(scale))
        return;
    float g[N], m[N];
    load_as<N>(a.grad, i, a.grad_half, g);
    load<N>(a.m + i, m);
#pragma unroll
    for (int j = 0; j < N; j++) {
        g[j] *= scale;
        m[j] = m[j] * a.keep + g[j] * a.rest;
        g[j] = a.nesterov ? m[j] * a.keep + g[j] * a.rest : m[j];
    }
    store<N>(a.m + i, m);
    if (a.out)
        store<N>(a.out + i, g);
}

extern "C" qd_status qd_cuda_momentum(qd_stream *stream, const qd_momentum_args *a)
{
    QD_TRY(qd_check_float("momentum", "the gradient", a->grad_dtype));
    if (a->n <= 0)
        return QD_OK;
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    momentum_numbers n;
    n.grad = a->grad;
    n.m = a->m;
    n.out = a->out;
    n.n = a->n;
    n.scale = a->grad_scale;
    n.keep = (float)a->momentum;
    n.rest = (float)(1.0 - a->momentum);
    n.nesterov = a->nesterov;
    n.grad_half = a->grad_dtype == QD_BF16;
    if (can_vector(a->n, a->grad, a->m, a->out ? a->out : a->m))
        momentum_kernel<VECTOR><<<grid_for(a->n / VECTOR), THREADS, 0, s>>>(n);
    else
        momentum_kernel<1><<<grid_for(a->n), THREADS, 0, s>>>(n);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* One thread adds the rows in ascending order. */
static __global__ void norm_factor_kernel(const double *squares, int64_t rows, double eps, float *factor)
{
    double sum = 0;
    for (int64_t row = 0; row < rows; row++)
        sum += squares[row];
    const double norm = sqrt(sum);
    *factor = (float)(1.0 / (norm < eps ? eps : norm));
}

template <int N> static __global__ void __launch_bounds__(THREADS) scale_kernel(float *x, int64_t n, const float *factor)
{
    int64_t i = item_index() * N;
    if (i >= n)
        return;
    float v[N];
    load<N>(x + i, v);
#pragma unroll
    for (int j = 0; j < N; j++)
        v[j] *= *factor;
    store<N>(x + i, v);
}

extern "C" qd_status qd_cuda_unit_norm(qd_stream *stream, const qd_unit_norm_args *a)
{
    if (!(a->eps > 0))
        return QD_FAIL(QD_USAGE, "unit_norm: eps is %g; it must be above 0", a->eps);
    const int64_t n = a->rows * a->cols;
    if (n <= 0)
        return QD_OK;
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    void *factor;
    QD_TRY(qd_cuda_workspace(stream, sizeof(float), &factor));
    norm_factor_kernel<<<1, 1, 0, s>>>(a->row_squares, a->rows, a->eps, (float *)factor);
    QD_CUDA_LAUNCHED();
    if (can_vector(n, a->x))
        scale_kernel<VECTOR><<<grid_for(n / VECTOR), THREADS, 0, s>>>(a->x, n, (const float *)factor);
    else
        scale_kernel<1><<<grid_for(n), THREADS, 0, s>>>(a->x, n, (const float *)factor);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <int N> static __global__ void __launch_bounds__(THREADS) axpby_kernel(qd_axpby_args a)
{
    int64_t i = item_index() * N;
    if (i >= a.n)
        return;
    float x[N], y[N];
    load<N>(a.a + i, x);
    load<N>(a.b + i, y);
#pragma unroll
    for (int j = 0; j < N; j++)
        x[j] = x[j] * a.alpha + y[j] * a.beta;
    store<N>(a.y + i, x);
}

extern "C" qd_status qd_cuda_axpby(qd_stream *stream, const qd_axpby_args *a)
{
    if (a->n <= 0)
        return QD_OK;
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    if (can_vector(a->n, a->a, a->b, a->y))
        axpby_kernel<VECTOR><<<grid_for(a->n / VECTOR), THREADS, 0, s>>>(*a);
    else
        axpby_kernel<1><<<grid_for(a->n), THREADS, 0, s>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

struct matrix_update_numbers {
    void *param; /* NULL: only the master is stored */
    float *master;
    const float *direction;
    int64_t n;
    const double *scale;
    float keep, rate;
    bool param_half;
};

template <int N> static __global__ void __launch_bounds__(THREADS) matrix_update_kernel(matrix_update_numbers a)
{
    int64_t i = item_index() * N;
    if (i >= a.n || (a.scale && !isfinite(*a.scale)))
        return;
    float p[N], d[N];
    load<N>(a.master + i, p);
    load<N>(a.direction + i, d);
#pragma unroll
    for (int j = 0; j < N; j++)
        p[j] = p[j] * a.keep - d[j] * a.rate;
    store<N>(a.master + i, p);
    if (a.param)
        store_as<N>(a.param, i, a.param_half, p);
}

extern "C" qd_status qd_cuda_matrix_update(qd_stream *stream, const qd_matrix_update_args *a)
{
    QD_TRY(qd_check_float("matrix_update", "the parameter", a->param_dtype));
    if (a->n <= 0)
        return QD_OK;
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    matrix_update_numbers n;
    n.param = a->param == a->master ? NULL : a->param;
    n.master = a->master;
    n.direction = a->direction;
    n.n = a->n;
    n.scale = a->grad_scale;
    n.keep = (float)(1.0 - a->decay);
    n.rate = (float)a->rate;
    n.param_half = a->param_dtype == QD_BF16;
    if (can_vector(a->n, a->master, a->direction, n.param ? n.param : a->master))
        matrix_update_kernel<VECTOR><<<grid_for(a->n / VECTOR), THREADS, 0, s>>>(n);
    else
        matrix_update_kernel<1><<<grid_for(a->n), THREADS, 0, s>>>(n);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}
