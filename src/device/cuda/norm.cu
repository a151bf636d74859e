/* LayerNorm and RMSNorm, and sums over rows. Storage fp32 or bf16, computed in fp32; sums are taken in an order fixed by
 * the shapes and the number of multiprocessors.
 *
 * Rows of up to ROW_MOST columns that can be read in vectors stay in registers: PIECES vectors per thread, one block per
 * row, so that memory is read once. Other rows are read again for each pass over them, mostly from the caches. */
#include "device/cuda/math_impl.cuh"

enum { ROW_THREADS = 512, ROW_PIECES = 2, ROW_MOST = ROW_THREADS * VECTOR * ROW_PIECES };
enum { LOOP_THREADS = 256 };

static int row_threads(int64_t cols, int pieces)
{
    return (int)(divide_up(divide_up(cols, VECTOR * pieces), 32) * 32);
}

/* ---- forward ---- */

struct row_statistics {
    float mean, rstd;
};

static __device__ __forceinline__ void keep_statistics(const qd_norm_forward_args &a, int64_t row, row_statistics s)
{
    if (threadIdx.x == 0) {
        if (a.mean)
            a.mean[row] = s.mean;
        a.rstd[row] = s.rstd;
    }
}

template <typename T, typename P, int PIECES>
static __global__ void __launch_bounds__(ROW_THREADS) norm_forward_kernel(qd_norm_forward_args a)
{
    __shared__ float room[2][32];
    const int64_t at = (int64_t)blockIdx.x * a.cols;
    float x[PIECES][VECTOR], v[VECTOR];
    float sum = 0.0f, squares = 0.0f, count = (float)a.cols;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int col = (p * (int)blockDim.x + (int)threadIdx.x) * VECTOR;
        if (col >= a.cols)
            continue;
        load<VECTOR>((const T *)a.x + at + col, x[p]);
        if (a.add) {
            load<VECTOR>((const T *)a.add + at + col, v);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                x[p][i] = rounded<T>(x[p][i] + v[i]); /* as stored: the backward pass sees the rounded value too */
            store<VECTOR>((T *)a.sum + at + col, x[p]);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            sum += x[p][i];
    }
    row_statistics s = {0.0f, 0.0f};
    if (!a.rms)
        s.mean = block_sum(sum, room[0]) / count;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        if ((p * (int)blockDim.x + (int)threadIdx.x) * VECTOR >= a.cols)
            continue;
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            squares += (x[p][i] - s.mean) * (x[p][i] - s.mean);
    }
    s.rstd = 1.0f / sqrtf(block_sum(squares, room[1]) / count + a.eps);
    keep_statistics(a, blockIdx.x, s);
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int col = (p * (int)blockDim.x + (int)threadIdx.x) * VECTOR;
        if (col >= a.cols)
            continue;
        load<VECTOR>((const P *)a.gamma + col, v);
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            x[p][i] = (x[p][i] - s.mean) * s.rstd * v[i];
        if (a.beta) {
            load<VECTOR>((const P *)a.beta + col, v);
#pragma unroll
            for (int i = 0; i < VECTOR; i++)
                x[p][i] += v[i];
        }
        store<VECTOR>((T *)a.y + at + col, x[p]);
    }
}

/* Any row, one element at a time. */
template <typename T, typename P> static __global__ void norm_forward_loop(qd_norm_forward_args a)
{
    __shared__ float room[2][32];
    const int64_t at = (int64_t)blockIdx.x * a.cols;
    const T *x = (const T *)a.x + at;
    float sum = 0.0f, squares = 0.0f, count = (float)a.cols;
    if (a.add) {
        T *stored = (T *)a.sum + at;
        for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
            float v[1] = {to_float(x[c]) + to_float(((const T *)a.add)[at + c])};
            store<1>(stored + c, v);
        }
        x = stored; /* each thread reads what it wrote itself */
    }
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS)
        sum += to_float(x[c]);
    row_statistics s = {0.0f, 0.0f};
    if (!a.rms)
        s.mean = block_sum(sum, room[0]) / count;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS)
        squares += (to_float(x[c]) - s.mean) * (to_float(x[c]) - s.mean);
    s.rstd = 1.0f / sqrtf(block_sum(squares, room[1]) / count + a.eps);
    keep_statistics(a, blockIdx.x, s);
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float v[1] = {(to_float(x[c]) - s.mean) * s.rstd * to_float(((const P *)a.gamma)[c])};
        if (a.beta)
            v[0] += to_float(((const P *)a.beta)[c]);
        store<1>((T *)a.y + at + c, v);
    }
}

extern "C" qd_status qd_cuda_norm_forward(qd_stream *stream, const qd_norm_forward_args *a)
{
    QD_TRY(qd_cuda_check_float("norm_forward", "x", a->dtype));
    QD_TRY(qd_cuda_check_float("norm_forward", "gamma", a->param_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return with_type(a->param_dtype, [&](auto param) -> qd_status {
            using P = decltype(param);
            cudaStream_t s = qd_cuda_launch_of(stream).stream;
            unsigned rows = (unsigned)a->rows;
            bool vector = can_vector(a->cols, a->x, a->add, a->gamma, a->beta, a->y) && is_aligned(a->sum);
            if (vector && a->cols <= ROW_THREADS * VECTOR)
                norm_forward_kernel<T, P, 1><<<rows, row_threads(a->cols, 1), 0, s>>>(*a);
            else if (vector && a->cols <= ROW_MOST)
                norm_forward_kernel<T, P, ROW_PIECES><<<rows, row_threads(a->cols, ROW_PIECES), 0, s>>>(*a);
            else
                norm_forward_loop<T, P><<<rows, LOOP_THREADS, 0, s>>>(*a);
            QD_CUDA_LAUNCHED();
            return QD_OK;
        });
    });
}

/* ---- sums over rows: parts (count, width) of fp32 in the workspace, then their sum ---- */

enum { SUM_COLS = 32, SUM_LANES = 32 };

/* grad (cols) += sum over the parts of column `first` + col, part p at parts + p * width. A block takes SUM_COLS columns; its
 * SUM_LANES rows of threads sum every SUM_LANES-th part each, and then their sums are added in order. */
template <typename G>
static __global__ void __launch_bounds__(SUM_COLS *SUM_LANES)
    add_parts_kernel(G *grad, const float *parts, int count, int64_t width, int64_t cols)
{
    __shared__ float sums[SUM_LANES][SUM_COLS + 1];
    int64_t col = (int64_t)blockIdx.x * SUM_COLS + threadIdx.x;
    float sum = 0.0f;
    if (col < cols)
        for (int p = threadIdx.y; p < count; p += SUM_LANES)
            sum += parts[p * width + col];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    for (int half = SUM_LANES / 2; half; half /= 2) {
        if ((int)threadIdx.y < half)
            sums[threadIdx.y][threadIdx.x] += sums[threadIdx.y + half][threadIdx.x];
        __syncthreads();
    }
    if (threadIdx.y == 0 && col < cols) {
        float v[1] = {to_float(grad[col]) + sums[0][threadIdx.x]};
        store<1>(grad + col, v);
    }
}

static qd_status add_parts(cudaStream_t stream, void *grad, qd_dtype dtype, const float *parts, int count, int64_t width,
                           int64_t cols)
{
    return with_type(dtype, [&](auto type) -> qd_status {
        using G = decltype(type);
        dim3 block(SUM_COLS, SUM_LANES);
        add_parts_kernel<G><<<(unsigned)divide_up(cols, SUM_COLS), block, 0, stream>>>((G *)grad, parts, count, width, cols);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    });
}

/* Column sums of dy (rows, cols), or with xhat of dy * xhat and of dy together. */
struct column_source {
    const void *dy, *x;
    const float *mean, *rstd; /* rstd NULL: plain sums */
    int64_t rows, cols, rows_each;
    float *scaled, *plain; /* (parts, cols) with row stride `width`; either may be NULL */
    int64_t width;
};

enum { COLUMN_LANES = 8, COLUMN_THREADS = 32 }; /* rows and columns of a block's threads */

/* Block (column tile, part): sums rows [part * rows_each, ...) of N columns per thread. */
template <typename T, int N> static __global__ void column_sums_kernel(column_source s)
{
    __shared__ float sums[2][COLUMN_LANES][COLUMN_THREADS * N];
    int64_t col = ((int64_t)blockIdx.x * COLUMN_THREADS + threadIdx.x) * N;
    int64_t begin = blockIdx.y * s.rows_each, end = begin + s.rows_each;
    end = end < s.rows ? end : s.rows;
    float plain[N], scaled[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        plain[i] = scaled[i] = 0.0f;
    if (col < s.cols) {
#pragma unroll 4
        for (int64_t row = begin + threadIdx.y; row < end; row += COLUMN_LANES) {
            float d[N];
            load<N>((const T *)s.dy + row * s.cols + col, d);
#pragma unroll
            for (int i = 0; i < N; i++)
                plain[i] += d[i];
            if (s.rstd) {
                float x[N], rstd = s.rstd[row], mean = s.mean ? s.mean[row] : 0.0f;
                load<N>((const T *)s.x + row * s.cols + col, x);
#pragma unroll
                for (int i = 0; i < N; i++)
                    scaled[i] += d[i] * ((x[i] - mean) * rstd);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        sums[0][threadIdx.y][threadIdx.x * N + i] = plain[i];
        sums[1][threadIdx.y][threadIdx.x * N + i] = scaled[i];
    }
    __syncthreads();
    for (int c = threadIdx.y * COLUMN_THREADS + threadIdx.x; c < COLUMN_THREADS * N; c += COLUMN_LANES * COLUMN_THREADS) {
        int64_t to = (int64_t)blockIdx.x * COLUMN_THREADS * N + c;
        if (to >= s.cols)
            break;
        float p = 0.0f, q = 0.0f;
#pragma unroll
        for (int lane = 0; lane < COLUMN_LANES; lane++) {
            p += sums[0][lane][c];
            q += sums[1][lane][c];
        }
        if (s.plain)
            s.plain[blockIdx.y * s.width + to] = p;
        if (s.scaled)
            s.scaled[blockIdx.y * s.width + to] = q;
    }
}

/* How many parts the rows are cut into, so that all multiprocessors have blocks. Never more than there are rows. */
static int part_count(int64_t rows, int64_t tiles, int multiprocessors)
{
    int64_t parts = divide_up((int64_t)multiprocessors * 8, tiles), most = divide_up(rows, 4 * COLUMN_LANES);
    parts = parts < most ? parts : most;
    return (int)(parts < 1 ? 1 : parts > 4096 ? 4096 : parts);
}

static qd_status sum_columns(qd_stream *stream, column_source s, qd_dtype dtype, void *scaled_grad, void *plain_grad,
                             qd_dtype grad_dtype)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    bool vector = can_vector(s.cols, s.dy, s.x);
    int64_t tiles = divide_up(s.cols, COLUMN_THREADS * (vector ? VECTOR : 1));
    int parts = part_count(s.rows, tiles, l.multiprocessors);
    void *space;
    s.width = s.cols * ((scaled_grad != NULL) + (plain_grad != NULL));
    QD_TRY(qd_cuda_workspace(stream, parts * s.width * (int64_t)sizeof(float), &space));
    s.rows_each = divide_up(s.rows, parts);
    s.scaled = scaled_grad ? (float *)space : NULL;
    s.plain = plain_grad ? (float *)space + (scaled_grad ? s.cols : 0) : NULL;
    QD_TRY(with_type(dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        dim3 grid((unsigned)tiles, (unsigned)parts), block(COLUMN_THREADS, COLUMN_LANES);
        if (vector)
            column_sums_kernel<T, VECTOR><<<grid, block, 0, l.stream>>>(s);
        else
            column_sums_kernel<T, 1><<<grid, block, 0, l.stream>>>(s);
        QD_CUDA_LAUNCHED();
        return QD_OK;
    }));
    if (scaled_grad)
        QD_TRY(add_parts(l.stream, scaled_grad, grad_dtype, s.scaled, parts, s.width, s.cols));
    if (plain_grad)
        QD_TRY(add_parts(l.stream, plain_grad, grad_dtype, s.plain, parts, s.width, s.cols));
    return QD_OK;
}

extern "C" qd_status qd_cuda_bias_grad(qd_stream *stream, const qd_bias_grad_args *a)
{
    QD_TRY(qd_cuda_check_float("bias_grad", "dy", a->dtype));
    QD_TRY(qd_cuda_check_float("bias_grad", "grad", a->grad_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    column_source s = {};
    s.dy = a->dy;
    s.rows = a->rows;
    s.cols = a->cols;
    return sum_columns(stream, s, a->dtype, NULL, a->grad, a->grad_dtype);
}

/* ---- backward ---- */

/* With xhat = (x - mean) * rstd and g = dy * gamma: dx = rstd * (g - mean(g) - xhat * mean(g * xhat)); RMSNorm has no
 * mean(g). A block walks over every gridDim.x-th row; each thread keeps its columns' sums for dgamma and dbeta, which go to
 * parts + block * width at the end: dgamma (cols), then dbeta (cols). */
template <typename T, typename P, int PIECES>
static __global__ void __launch_bounds__(ROW_THREADS) norm_backward_kernel(qd_norm_backward_args a, float *parts, int64_t width)
{
    __shared__ float room[2][2][32]; /* (parity of the row, sum, warp): a row's sums are read while the next one's are written */
    float gamma[PIECES][VECTOR], dgamma[PIECES][VECTOR], dbeta[PIECES][VECTOR];
    const float count = (float)a.cols;
    bool inside[PIECES];
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int col = (p * (int)blockDim.x + (int)threadIdx.x) * VECTOR;
        inside[p] = col < a.cols;
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            gamma[p][i] = dgamma[p][i] = dbeta[p][i] = 0.0f;
        if (inside[p])
            load<VECTOR>((const P *)a.gamma + col, gamma[p]);
    }
    int parity = 0;
    for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x, parity ^= 1) {
        const float mean = a.rms ? 0.0f : a.mean[row], rstd = a.rstd[row];
        float g[PIECES][VECTOR], hat[PIECES][VECTOR], add[PIECES][VECTOR];
        float sum_g = 0.0f, sum_gx = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            int64_t at = row * a.cols + (p * (int)blockDim.x + (int)threadIdx.x) * VECTOR;
            if (!inside[p])
                continue;
            load<VECTOR>((const T *)a.dy + at, g[p]);
            load<VECTOR>((const T *)a.x + at, hat[p]);
            if (a.add)
                load<VECTOR>((const T *)a.add + at, add[p]);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                hat[p][i] = (hat[p][i] - mean) * rstd;
                dgamma[p][i] += g[p][i] * hat[p][i];
                dbeta[p][i] += g[p][i];
                g[p][i] *= gamma[p][i];
                sum_g += g[p][i];
                sum_gx += g[p][i] * hat[p][i];
            }
        }
        /* both sums with one barrier */
        int warps = blockDim.x / 32, lane = threadIdx.x % 32;
        sum_g = warp_sum(sum_g);
        sum_gx = warp_sum(sum_gx);
        if (warps > 1) {
            if (lane == 0) {
                room[parity][0][threadIdx.x / 32] = sum_g;
                room[parity][1][threadIdx.x / 32] = sum_gx;
            }
            __syncthreads();
            sum_g = warp_sum(lane < warps ? room[parity][0][lane] : 0.0f);
            sum_gx = warp_sum(lane < warps ? room[parity][1][lane] : 0.0f);
        }
        const float mean_g = a.rms ? 0.0f : sum_g / count, mean_gx = sum_gx / count;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            int64_t at = row * a.cols + (p * (int)blockDim.x + (int)threadIdx.x) * VECTOR;
            if (!inside[p])
                continue;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float d = (g[p][i] - mean_g - hat[p][i] * mean_gx) * rstd;
                g[p][i] = a.add ? d + add[p][i] : d;
            }
            store<VECTOR>((T *)a.dx + at, g[p]);
        }
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
        int64_t to = blockIdx.x * width + (p * (int)blockDim.x + (int)threadIdx.x) * VECTOR;
        if (!inside[p])
            continue;
        if (a.dgamma)
            store<VECTOR>(parts + to, dgamma[p]);
        if (a.dbeta)
            store<VECTOR>(parts + to + (a.dgamma ? a.cols : 0), dbeta[p]);
    }
}

/* dx of any row, one element at a time; the columns are summed by another kernel. dx may be add: each thread reads its
 * elements before it writes them. */
template <typename T, typename P> static __global__ void norm_backward_loop(qd_norm_backward_args a)
{
    __shared__ float room[2][32];
    const int64_t row = blockIdx.x, at = row * a.cols;
    const T *dy = (const T *)a.dy + at, *x = (const T *)a.x + at;
    const P *gamma = (const P *)a.gamma;
    const float mean = a.rms ? 0.0f : a.mean[row], rstd = a.rstd[row], count = (float)a.cols;
    float sum_g = 0.0f, sum_gx = 0.0f;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float g = to_float(dy[c]) * to_float(gamma[c]), hat = (to_float(x[c]) - mean) * rstd;
        sum_g += g;
        sum_gx += g * hat;
    }
    const float mean_g = a.rms ? 0.0f : block_sum(sum_g, room[0]) / count, mean_gx = block_sum(sum_gx, room[1]) / count;
    for (int64_t c = threadIdx.x; c < a.cols; c += LOOP_THREADS) {
        float g = to_float(dy[c]) * to_float(gamma[c]), hat = (to_float(x[c]) - mean) * rstd;
        float v[1] = {(g - mean_g - hat * mean_gx) * rstd};
        if (a.add)
            v[0] += to_float(((const T *)a.add)[at + c]);
        store<1>((T *)a.dx + at + c, v);
    }
}

template <typename T, typename P, int PIECES>
static qd_status backward_rows(qd_stream *stream, const qd_norm_backward_args *a)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    int threads = row_threads(a->cols, PIECES), resident = 1;
    QD_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, norm_backward_kernel<T, P, PIECES>, threads, 0));
    int64_t blocks = (int64_t)l.multiprocessors * (resident > 0 ? resident : 1), width = 0;
    blocks = blocks < a->rows ? blocks : a->rows;
    width = a->cols * ((a->dgamma != NULL) + (a->dbeta != NULL));
    void *parts;
    QD_TRY(qd_cuda_workspace(stream, blocks * width * (int64_t)sizeof(float), &parts));
    norm_backward_kernel<T, P, PIECES><<<(unsigned)blocks, threads, 0, l.stream>>>(*a, (float *)parts, width);
    QD_CUDA_LAUNCHED();
    const float *sums = (const float *)parts;
    if (a->dgamma)
        QD_TRY(add_parts(l.stream, a->dgamma, a->grad_dtype, sums, (int)blocks, width, a->cols));
    if (a->dbeta)
        QD_TRY(add_parts(l.stream, a->dbeta, a->grad_dtype, sums + (a->dgamma ? a->cols : 0), (int)blocks, width, a->cols));
    return QD_OK;
}

/* The sums first: dx may lie where dy or x does. */
template <typename T, typename P> static qd_status backward_any(qd_stream *stream, const qd_norm_backward_args *a)
{
    column_source s = {};
    s.dy = a->dy;
    s.x = a->x;
    s.mean = a->rms ? NULL : a->mean;
    s.rstd = a->rstd;
    s.rows = a->rows;
    s.cols = a->cols;
    if (a->dgamma || a->dbeta)
        QD_TRY(sum_columns(stream, s, a->dtype, a->dgamma, a->dbeta, a->grad_dtype));
    norm_backward_loop<T, P><<<(unsigned)a->rows, LOOP_THREADS, 0, qd_cuda_launch_of(stream).stream>>>(*a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

extern "C" qd_status qd_cuda_norm_backward(qd_stream *stream, const qd_norm_backward_args *a)
{
    QD_TRY(qd_cuda_check_float("norm_backward", "x", a->dtype));
    QD_TRY(qd_cuda_check_float("norm_backward", "gamma", a->param_dtype));
    if (a->dgamma || a->dbeta)
        QD_TRY(qd_cuda_check_float("norm_backward", "dgamma", a->grad_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return with_type(a->param_dtype, [&](auto param) -> qd_status {
            using P = decltype(param);
            bool vector = can_vector(a->cols, a->dy, a->x, a->gamma, a->add, a->dx);
            if (vector && a->cols <= ROW_THREADS * VECTOR)
                return backward_rows<T, P, 1>(stream, a);
            if (vector && a->cols <= ROW_MOST)
                return backward_rows<T, P, ROW_PIECES>(stream, a);
            return backward_any<T, P>(stream, a);
        });
    });
}
