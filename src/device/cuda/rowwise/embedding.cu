/* Token and position embeddings. The backward pass sorts the rows by table row (stable) and sums
 * each table row's rows in that order: no atomics, bit-identical on every run. */
#include "device/cuda/math_impl.cuh"

#include <cub/device/device_radix_sort.cuh>

enum { THREADS = 256 };

/* Items: (row, vector of N columns). */
template <typename T, typename P, int N>
static __global__ void __launch_bounds__(THREADS) embedding_forward_kernel(qd_embedding_forward_args a, qd_cuda_fault *fault)
{
    int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, row, col;
    if (item >= a.rows * (a.cols / N))
        return;
    split_index(item, a.cols / N, row, col);
    col *= N;
    int token = a.tokens[row];
    if (token < 0 || token >= a.vocab) {
        report_fault(fault, QD_CUDA_BAD_TOKEN, row, token, a.vocab);
        return;
    }
    float v[N], w[N];
    const int64_t index = token - a.first;
    if (a.held == 0 || (index >= 0 && index < a.held)) {
        load<N>((const P *)a.token_table + index * a.cols + col, v);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] = 0.0f;
    }
    if (a.position_table) {
        int64_t position = a.positions ? a.positions[row] : row % a.seq;
        if (position < 0) {
            report_fault(fault, QD_CUDA_BAD_POSITION, row, (int)position, -1);
            return;
        }
        load<N>((const P *)a.position_table + position * a.cols + col, w);
#pragma unroll
        for (int i = 0; i < N; i++)
            v[i] += w[i];
    }
    store<N>((T *)a.y + row * a.cols + col, v);
}

extern "C" qd_status qd_cuda_embedding_forward(qd_stream *stream, const qd_embedding_forward_args *a)
{
    QD_TRY(qd_check_float("embedding_forward", "y", a->dtype));
    QD_TRY(qd_check_float("embedding_forward", "the table", a->param_dtype));
    int64_t n = a->rows * a->cols;
    if (n <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return with_type(a->param_dtype, [&](auto param) -> qd_status {
            using P = decltype(param);
            qd_cuda_launch l = qd_cuda_launch_of(stream);
            if (can_vector(a->cols, a->token_table, a->position_table, a->y))
                embedding_forward_kernel<T, P, VECTOR><<<(unsigned)divide_up(n / VECTOR, THREADS), THREADS, 0, l.stream>>>(*a, l.fault);
            else
                embedding_forward_kernel<T, P, 1><<<(unsigned)divide_up(n, THREADS), THREADS, 0, l.stream>>>(*a, l.fault);
            QD_CUDA_LAUNCHED();
            return QD_OK;
        });
    });
}

/* Backward, positions that are the row's index in its sequence. */

/* grad (seq, cols) += dy of rows position, position + seq, ... Items: (position, vector of N
 * columns). */
template <typename T, typename G, int N>
static __global__ void __launch_bounds__(THREADS) position_grad_kernel(qd_embedding_backward_args a, int64_t positions)
{
    int64_t item = (int64_t)blockIdx.x * THREADS + threadIdx.x, position, col;
    if (item >= positions * (a.cols / N))
        return;
    split_index(item, a.cols / N, position, col);
    col *= N;
    float sum[N], v[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] = 0.0f;
#pragma unroll 4
    for (int64_t row = position; row < a.rows; row += a.seq) {
        load<N>((const T *)a.dy + row * a.cols + col, v);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] += v[i];
    }
    G *grad = (G *)a.position_grad + position * a.cols + col;
    load<N>(grad, v);
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] += v[i];
    store<N>(grad, sum);
}

/* Backward, any table rows. */

enum { CHUNK = 32, BATCH = 8 }; /* sorted rows per block; rows whose loads are in flight together */
enum { NO_INDEX = 0x7fffffff }; /* sorts after every table row */

/* keys[row] = table row, values[row] = row. With held > 0 the table has rows [first, first + held)
 * of `bound`; others are sorted to the end. */
static __global__ void __launch_bounds__(THREADS)
    keys_kernel(const int32_t *indices, int64_t rows, int64_t bound, int64_t first, int64_t held, uint32_t *keys, uint32_t *values,
                int kind, qd_cuda_fault *fault)
{
    int64_t row = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (row >= rows)
        return;
    int index = indices[row];
    bool bad = index < 0 || (bound >= 0 && index >= bound);
    if (bad)
        report_fault(fault, kind, row, index, bound);
    if (held > 0)
        keys[row] = !bad && index >= first && index < first + held ? (uint32_t)(index - first) : (uint32_t)held;
    else
        keys[row] = bad ? (uint32_t)(bound >= 0 ? bound : NO_INDEX) : (uint32_t)index;
    values[row] = (uint32_t)row;
}

struct sorted_rows {
    const void *dy;
    void *grad;
    const uint32_t *keys, *rows; /* (count), sorted by key */
    float *parts;                /* (chunks, 2, cols): sums of runs of equal keys that cross the chunk's start or end */
    int64_t count, cols;
    uint32_t bound;              /* keys from here on are skipped */
};

template <typename G, int N> static __device__ __forceinline__ void add_to_grad(G *grad, const float (&sum)[N])
{
    float v[N];
    load<N>(grad, v);
#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] += sum[i];
    store<N>(grad, v);
}

/* Block (chunk, tile of columns). A run of equal keys within the chunk is added to the table; a run
 * that extends beyond it stores its part in `parts`: [0] if it started earlier (even if it fills
 * the chunk), else [1]. */
template <typename T, typename G, int N> static __global__ void chunk_kernel(sorted_rows s)
{
    __shared__ uint32_t keys[CHUNK + 2], rows[CHUNK]; /* keys[i + 1] belongs to position i of the chunk */
    const int64_t first = (int64_t)blockIdx.x * CHUNK;
    const int here = (int)(s.count - first < CHUNK ? s.count - first : CHUNK);
    for (int i = threadIdx.x; i < CHUNK + 2; i += blockDim.x) {
        int64_t at = first + i - 1;
        keys[i] = at >= 0 && at < s.count ? s.keys[at] : 0xffffffffu; /* no key: a run ends here */
        if (i >= 1 && i <= CHUNK)
            rows[i - 1] = at < s.count ? s.rows[at] : 0;
    }
    __syncthreads();
    const int64_t col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (col >= s.cols)
        return;
    float sum[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        sum[i] = 0.0f;
    bool from_before = keys[0] == keys[1];
    for (int base = 0; base < here; base += BATCH) {
        float v[BATCH][N];
#pragma unroll
        for (int b = 0; b < BATCH; b++)
            if (base + b < here)
                load<N>((const T *)s.dy + rows[base + b] * s.cols + col, v[b]);
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            const int at = base + b;
            if (at >= here)
                break;
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] += v[b][i];
            const uint32_t key = keys[at + 1];
            const bool ends = keys[at + 2] != key;
            if (!ends && at + 1 < here)
                continue;
            if (key < s.bound) {
                if (from_before)
                    store<N>(s.parts + (2 * (int64_t)blockIdx.x) * s.cols + col, sum);
                else if (!ends)
                    store<N>(s.parts + (2 * (int64_t)blockIdx.x + 1) * s.cols + col, sum);
                else
                    add_to_grad<G, N>((G *)s.grad + key * s.cols + col, sum);
            }
#pragma unroll
            for (int i = 0; i < N; i++)
                sum[i] = 0.0f;
            from_before = false;
        }
    }
}

/* Runs that cross chunks: the block of the chunk in which a run starts adds its parts in order. */
template <typename G, int N> static __global__ void join_kernel(sorted_rows s)
{
    const int64_t chunk = blockIdx.x, last = chunk * CHUNK + CHUNK - 1; /* the last position of this chunk */
    if (last + 1 >= s.count || s.keys[last] != s.keys[last + 1])
        return; /* no run continues */
    const uint32_t key = s.keys[last];
    if (key >= s.bound || (chunk > 0 && s.keys[chunk * CHUNK - 1] == key))
        return; /* it started in an earlier chunk */
    const int64_t col = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (col >= s.cols)
        return;
    float sum[N], v[N];
    load<N>(s.parts + (2 * chunk + 1) * s.cols + col, sum);
#pragma unroll 4
    for (int64_t next = chunk + 1; next * CHUNK < s.count && s.keys[next * CHUNK] == key; next++) {
        load<N>(s.parts + (2 * next) * s.cols + col, v);
#pragma unroll
        for (int i = 0; i < N; i++)
            sum[i] += v[i];
    }
    add_to_grad<G, N>((G *)s.grad + key * s.cols + col, sum);
}

static int64_t padded(int64_t bytes)
{
    return divide_up(bytes, 256) * 256;
}

/* grad[indices[row] - first] += dy[row], where this index is below held (0: always). bound: of the
 * indices, or -1 if it is not known. */
template <typename T, typename G>
static qd_status scatter_add(qd_stream *stream, const qd_embedding_backward_args *a, const int32_t *indices, void *grad, int64_t bound,
                             int64_t first, int64_t held, int kind)
{
    qd_cuda_launch l = qd_cuda_launch_of(stream);
    if (a->rows > 0x7fffffff || bound >= NO_INDEX)
        return QD_FAIL(QD_UNSUPPORTED, "embedding_backward: %lld rows of a table of %lld; fewer than 2^31 are supported",
                       (long long)a->rows, (long long)bound);
    int bits = 31;
    if (bound >= 0)
        for (bits = 1; bound >> bits;)
            bits++;
    const int64_t chunks = divide_up(a->rows, CHUNK), list = padded(a->rows * 4), parts = padded(chunks * 2 * a->cols * 4);
    size_t sort_bytes = 0;
    QD_CUDA_TRY(cub::DeviceRadixSort::SortPairs(NULL, sort_bytes, (const uint32_t *)NULL, (uint32_t *)NULL, (const uint32_t *)NULL,
                                                (uint32_t *)NULL, (int)a->rows, 0, bits, l.stream));
    void *space;
    QD_TRY(qd_cuda_workspace(stream, 4 * list + parts + (int64_t)sort_bytes, &space));
    char *at = (char *)space;
    uint32_t *keys = (uint32_t *)at, *rows = (uint32_t *)(at + list), *sorted_keys = (uint32_t *)(at + 2 * list);
    uint32_t *sorted = (uint32_t *)(at + 3 * list);
    keys_kernel<<<(unsigned)divide_up(a->rows, THREADS), THREADS, 0, l.stream>>>(indices, a->rows, bound, first, held, keys, rows, kind,
                                                                                 l.fault);
    QD_CUDA_LAUNCHED();
    QD_CUDA_TRY(cub::DeviceRadixSort::SortPairs(at + 4 * list + parts, sort_bytes, keys, sorted_keys, rows, sorted, (int)a->rows, 0,
                                                bits, l.stream));
    sorted_rows s = {a->dy, grad, sorted_keys, sorted, (float *)(at + 4 * list), a->rows, a->cols,
                     (uint32_t)(held > 0 ? held : bound >= 0 ? bound : NO_INDEX)};
    bool vector = can_vector(a->cols, a->dy, grad);
    int64_t columns = vector ? a->cols / VECTOR : a->cols, threads = divide_up(columns < THREADS ? columns : THREADS, 32) * 32;
    dim3 grid((unsigned)chunks, (unsigned)divide_up(columns, threads));
    if (vector) {
        chunk_kernel<T, G, VECTOR><<<grid, (unsigned)threads, 0, l.stream>>>(s);
        join_kernel<G, VECTOR><<<grid, (unsigned)threads, 0, l.stream>>>(s);
    } else {
        chunk_kernel<T, G, 1><<<grid, (unsigned)threads, 0, l.stream>>>(s);
        join_kernel<G, 1><<<grid, (unsigned)threads, 0, l.stream>>>(s);
    }
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

template <typename T, typename G> static qd_status backward(qd_stream *stream, const qd_embedding_backward_args *a)
{
    cudaStream_t s = qd_cuda_launch_of(stream).stream;
    if (a->token_grad)
        QD_TRY((scatter_add<T, G>(stream, a, a->tokens, a->token_grad, a->vocab, a->first, a->held, QD_CUDA_BAD_TOKEN)));
    if (a->position_grad && a->positions)
        QD_TRY((scatter_add<T, G>(stream, a, a->positions, a->position_grad, -1, 0, 0, QD_CUDA_BAD_POSITION)));
    if (a->position_grad && !a->positions) {
        int64_t positions = a->rows < a->seq ? a->rows : a->seq, items = positions * a->cols;
        if (can_vector(a->cols, a->dy, a->position_grad))
            position_grad_kernel<T, G, VECTOR><<<(unsigned)divide_up(items / VECTOR, THREADS), THREADS, 0, s>>>(*a, positions);
        else
            position_grad_kernel<T, G, 1><<<(unsigned)divide_up(items, THREADS), THREADS, 0, s>>>(*a, positions);
        QD_CUDA_LAUNCHED();
    }
    return QD_OK;
}

extern "C" qd_status qd_cuda_embedding_backward(qd_stream *stream, const qd_embedding_backward_args *a)
{
    QD_TRY(qd_check_float("embedding_backward", "dy", a->dtype));
    QD_TRY(qd_check_float("embedding_backward", "the gradient", a->grad_dtype));
    if (a->rows <= 0 || a->cols <= 0)
        return QD_OK;
    return with_type(a->dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return with_type(a->grad_dtype, [&](auto grad) -> qd_status { return backward<T, decltype(grad)>(stream, a); });
    });
}
