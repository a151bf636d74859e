/* Products over experts for every size, type and device, and the choice between these kernels and Hopper's.
 *
 * A block of 256 threads computes tiles of SIDE x SIDE: bf16 operands on tensor cores (mma.m16n8k16, SIDE 128), all others in
 * fp32 (SIDE 64). The tile's operands x (rows, depth) and y (columns, depth) lie in shared memory as they do in device memory,
 * depth or the other side contiguous; the next step's are fetched into registers meanwhile. */
#include "device/cuda/grouped_impl.cuh"

namespace {

enum { THREADS = 256, STEP = 32, PIECE = 8, BAND = 16 };

/* An operand at one tile: element (i, depth) is at from + i * ld + depth, or at from + depth * ld + i. What is beyond
 * `sides` or `depth` counts as 0. */
struct operand {
    const void *from;
    int64_t ld;
    int sides, depth;
    bool along_depth, is_bf16, vectors;
};

template <typename S> struct piece;
template <> struct piece<bf16> {
    uint4 v;
};
template <> struct piece<float> {
    float v[PIECE];
};

__device__ __forceinline__ int64_t bytes_at(const operand &o, int64_t element)
{
    return element * (o.is_bf16 ? 2 : 4);
}

__device__ __forceinline__ float element(const operand &o, int64_t i)
{
    return o.is_bf16 ? __bfloat162float(((const bf16 *)o.from)[i]) : ((const float *)o.from)[i];
}

/* PIECE elements of a line from `at` on; `line` and `at` count sides and depth, or the other way round. */
__device__ __forceinline__ void fetch(piece<float> &p, const operand &o, int line, int at)
{
    const int lines = o.along_depth ? o.sides : o.depth, length = o.along_depth ? o.depth : o.sides;
    const int64_t start = line * o.ld + at;
    if (line < lines && at + PIECE <= length && o.vectors) {
        load_as<PIECE>(o.from, start, o.is_bf16, p.v);
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        p.v[i] = line < lines && at + i < length ? element(o, start + i) : 0.0f;
}

__device__ __forceinline__ void fetch(piece<bf16> &p, const operand &o, int line, int at)
{
    const int lines = o.along_depth ? o.sides : o.depth, length = o.along_depth ? o.depth : o.sides;
    const uint16_t *from = (const uint16_t *)o.from + line * o.ld + at;
    if (line < lines && at + PIECE <= length && o.vectors) {
        p.v = *reinterpret_cast<const uint4 *>(from);
        return;
    }
    uint32_t words[PIECE / 2];
#pragma unroll
    for (int i = 0; i < PIECE / 2; i++) {
        const uint32_t low = line < lines && at + 2 * i < length ? from[2 * i] : 0;
        const uint32_t high = line < lines && at + 2 * i + 1 < length ? from[2 * i + 1] : 0;
        words[i] = low | high << 16;
    }
    p.v = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void put(float *to, const piece<float> &p)
{
#pragma unroll
    for (int i = 0; i < PIECE; i++)
        to[i] = p.v[i];
}

__device__ __forceinline__ void put(bf16 *to, const piece<bf16> &p)
{
    *reinterpret_cast<uint4 *>(to) = p.v;
}

/* How lines of a tile lie in shared memory: the gap keeps reads of a column free of bank conflicts. */
template <typename S, int SIDE> struct shape {
    enum {
        GAP = sizeof(S) == 2 ? 8 : 1,
        ALONG_DEPTH = STEP + GAP, /* line by line of sides */
        ALONG_SIDES = SIDE + GAP, /* line by line of depth */
        ROOM = SIDE * ALONG_DEPTH > STEP * ALONG_SIDES ? SIDE * ALONG_DEPTH : STEP * ALONG_SIDES,
        PIECES = SIDE * STEP / PIECE / THREADS
    };
};

template <typename S, int SIDE>
__device__ __forceinline__ void fetch_tile(piece<S> (&p)[shape<S, SIDE>::PIECES], const operand &o)
{
    const int width = (o.along_depth ? STEP : SIDE) / PIECE;
#pragma unroll
    for (int i = 0; i < shape<S, SIDE>::PIECES; i++) {
        const int at = threadIdx.x + i * THREADS;
        fetch(p[i], o, at / width, at % width * PIECE);
    }
}

template <typename S, int SIDE>
__device__ __forceinline__ void put_tile(S *tile, const piece<S> (&p)[shape<S, SIDE>::PIECES], bool along_depth)
{
    const int width = (along_depth ? STEP : SIDE) / PIECE;
    const int stride = along_depth ? shape<S, SIDE>::ALONG_DEPTH : shape<S, SIDE>::ALONG_SIDES;
#pragma unroll
    for (int i = 0; i < shape<S, SIDE>::PIECES; i++) {
        const int at = threadIdx.x + i * THREADS;
        put(tile + at / width * stride + at % width * PIECE, p[i]);
    }
}

__device__ __forceinline__ void advance(operand &o, int depth)
{
    o.from = (const char *)o.from + bytes_at(o, o.along_depth ? depth : depth * o.ld);
    o.depth -= depth;
}

/* ---- sums of a tile: S says what is multiplied ---- */

template <typename S> struct sums;

/* Eight warps of 64 x 32 each; fragments as in attention_tensor.cu. */
template <> struct sums<bf16> {
    enum { SIDE = 128 };
    float c[4][4][4];

    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % 2 * 64; }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 64 * 32; }

    __device__ __forceinline__ void multiply(const bf16 *x, const bf16 *y, bool x_along, bool y_along)
    {
        const int lane = threadIdx.x % 32;
        typedef shape<bf16, SIDE> lines;
#pragma unroll
        for (int k = 0; k < STEP; k += 16) {
            uint32_t a[4][4], b[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = warp_row() + i * 16;
                if (x_along)
                    load_matrices(a[i], x + (row + lane % 16) * lines::ALONG_DEPTH + k + lane / 16 * 8);
                else
                    load_transposed(a[i], x + (k + lane % 8 + lane / 16 * 8) * lines::ALONG_SIDES + row + lane / 8 % 2 * 8);
            }
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int column = warp_column() + j * 16;
                if (y_along)
                    load_matrices(b[j], y + (column + lane / 16 * 8 + lane % 8) * lines::ALONG_DEPTH + k + lane / 8 % 2 * 8);
                else
                    load_transposed(b[j], y + (k + lane % 16) * lines::ALONG_SIDES + column + lane / 16 * 8);
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    multiply_add(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }

    template <typename F> __device__ __forceinline__ void each(F body)
    {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int v = 0; v < 4; v++)
                    body(warp_row() + i * 16 + lane / 4 + v / 2 * 8, warp_column() + j * 8 + lane % 4 * 2 + v % 2, c[i][j][v]);
    }
};

/* 4 x 4 sums per thread, 16 apart. */
template <> struct sums<float> {
    enum { SIDE = 64 };
    float c[4][4];

    __device__ __forceinline__ void multiply(const float *x, const float *y, bool x_along, bool y_along)
    {
        const int row = threadIdx.x / 16, column = threadIdx.x % 16;
        typedef shape<float, SIDE> lines;
        const int x_side = x_along ? lines::ALONG_DEPTH : 1, x_depth = x_along ? 1 : lines::ALONG_SIDES;
        const int y_side = y_along ? lines::ALONG_DEPTH : 1, y_depth = y_along ? 1 : lines::ALONG_SIDES;
#pragma unroll 4
        for (int k = 0; k < STEP; k++) {
            float a[4], b[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                a[i] = x[(row + 16 * i) * x_side + k * x_depth];
                b[i] = y[(column + 16 * i) * y_side + k * y_depth];
            }
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    c[i][j] = fmaf(a[i], b[j], c[i][j]);
        }
    }

    template <typename F> __device__ __forceinline__ void each(F body)
    {
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                body(threadIdx.x / 16 + 16 * i, threadIdx.x % 16 + 16 * j, c[i][j]);
    }
};

/* sum += x · yᵀ over all of the operands' depth. */
template <typename S>
__device__ __forceinline__ void add_product(sums<S> &sum, operand x, operand y, S *x_tile, S *y_tile)
{
    enum { SIDE = sums<S>::SIDE };
    piece<S> x_next[shape<S, SIDE>::PIECES], y_next[shape<S, SIDE>::PIECES];
    fetch_tile<S, SIDE>(x_next, x);
    fetch_tile<S, SIDE>(y_next, y);
    while (x.depth > 0) {
        __syncthreads(); /* the tiles have been read */
        put_tile<S, SIDE>(x_tile, x_next, x.along_depth);
        put_tile<S, SIDE>(y_tile, y_next, y.along_depth);
        __syncthreads();
        advance(x, STEP);
        advance(y, STEP);
        if (x.depth > 0) {
            fetch_tile<S, SIDE>(x_next, x);
            fetch_tile<S, SIDE>(y_next, y);
        }
        sum.multiply(x_tile, y_tile, x.along_depth, y.along_depth);
    }
}

/* `table` (rows, cols) from (row, column) on, its sides being columns, or rows if along_depth. */
__device__ __forceinline__ operand operand_at(const void *table, qd_dtype dtype, int64_t cols, int64_t row, int64_t column, int64_t sides,
                                              int64_t depth, bool along_depth, bool vectors)
{
    operand o = {table, cols, (int)(sides < (1 << 30) ? sides : 1 << 30), (int)depth, along_depth, dtype == QD_BF16, vectors};
    o.from = (const char *)table + bytes_at(o, row * cols + column);
    return o;
}

__device__ __forceinline__ float old_value(const void *p, int64_t i, qd_dtype dtype)
{
    return dtype == QD_BF16 ? __bfloat162float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}

__device__ __forceinline__ void put_value(void *p, int64_t i, qd_dtype dtype, float value)
{
    if (dtype == QD_BF16)
        ((bf16 *)p)[i] = __float2bfloat16_rn(value);
    else
        ((float *)p)[i] = value;
}

template <typename S> __global__ __launch_bounds__(THREADS) void by_rows(qd_grouped_args g, bool a_vectors, bool b_vectors)
{
    enum { SIDE = sums<S>::SIDE };
    __shared__ __align__(16) S x_tile[shape<S, SIDE>::ROOM], y_tile[shape<S, SIDE>::ROOM];
    __shared__ grouped_segments table;
    if (threadIdx.x < 32)
        plan_segments(g, SIDE, &table);
    __syncthreads();
    const int columns = (int)((g.n + SIDE - 1) / SIDE), tiles = table.tile[g.sources * g.experts] * columns;
    int segment = 0;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        while (i >= table.tile[segment + 1] * columns)
            segment++;
        const grouped_tile t = tile_at(i - table.tile[segment] * columns, table.tile[segment + 1] - table.tile[segment], columns, BAND);
        const int64_t row = table.row[segment] + (int64_t)t.row * SIDE, column = (int64_t)t.column * SIDE;
        const int64_t rows = table.row[segment + 1] - row, weights = segment % g.experts * g.n * g.k;
        const void *b = (const char *)g.b + weights * (g.b_dtype == QD_BF16 ? 2 : 4);
        const operand x = operand_at(g.a, g.a_dtype, g.k, row, 0, rows, g.k, true, a_vectors);
        const operand y = g.trans_b ? operand_at(b, g.b_dtype, g.k, column, 0, g.n - column, g.k, true, b_vectors)
                                    : operand_at(b, g.b_dtype, g.n, 0, column, g.n - column, g.k, false, b_vectors);
        sums<S> sum = {};
        add_product(sum, x, y, x_tile, y_tile);
        sum.each([&](int r, int c, float value) {
            if (r < rows && column + c < g.n)
                put_value(g.c, (row + r) * g.n + column + c, g.c_dtype, value);
        });
    }
}

template <typename S> __global__ __launch_bounds__(THREADS) void by_experts(qd_grouped_args g, bool a_vectors, bool c_vectors)
{
    enum { SIDE = sums<S>::SIDE };
    __shared__ __align__(16) S x_tile[shape<S, SIDE>::ROOM], y_tile[shape<S, SIDE>::ROOM];
    __shared__ grouped_segments table;
    if (threadIdx.x < 32)
        plan_segments(g, SIDE, &table);
    __syncthreads();
    const int rows = (int)((g.n + SIDE - 1) / SIDE), columns = (int)((g.k + SIDE - 1) / SIDE), tiles = rows * columns * g.experts;
    for (int i = blockIdx.x; i < tiles; i += gridDim.x) {
        const int expert = i / (rows * columns);
        const grouped_tile t = tile_at(i % (rows * columns), rows, columns, BAND);
        const int64_t row = (int64_t)t.row * SIDE, column = (int64_t)t.column * SIDE;
        sums<S> sum = {};
        bool any = false;
        for (int s = 0; s < g.sources; s++) {
            const int32_t *const at = table.row + s * g.experts + expert, depth = at[1] - at[0];
            if (depth == 0)
                continue;
            any = true;
            add_product(sum, operand_at(g.c, g.c_dtype, g.n, at[0], row, g.n - row, depth, false, c_vectors),
                        operand_at(g.a, g.a_dtype, g.k, at[0], column, g.k - column, depth, false, a_vectors), x_tile, y_tile);
        }
        sum.each([&](int r, int c, float value) {
            if ((any || !g.accumulate) && row + r < g.n && column + c < g.k) {
                const int64_t to = (expert * g.n + row + r) * g.k + column + c;
                put_value(g.b, to, g.b_dtype, g.accumulate ? old_value(g.b, to, g.b_dtype) + value : value);
            }
        });
    }
}

bool aligned_rows(const void *p, int64_t cols)
{
    return cols % PIECE == 0 && is_aligned(p);
}

} // namespace

qd_status qd_cuda_grouped_general(qd_stream *stream, const qd_grouped_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    const int blocks = launch.multiprocessors * 2;
    const bool a_vectors = aligned_rows(a->a, a->k), c_vectors = aligned_rows(a->c, a->n);
    const bool b_vectors = aligned_rows(a->b, a->n) && a->k % PIECE == 0;
    if (a->by_experts) {
        if (a->a_dtype == QD_BF16 && a->c_dtype == QD_BF16)
            by_experts<bf16><<<blocks, THREADS, 0, launch.stream>>>(*a, a_vectors, c_vectors);
        else
            by_experts<float><<<blocks, THREADS, 0, launch.stream>>>(*a, a_vectors, c_vectors);
    } else if (a->a_dtype == QD_BF16 && a->b_dtype == QD_BF16) {
        by_rows<bf16><<<blocks, THREADS, 0, launch.stream>>>(*a, a_vectors, b_vectors);
    } else {
        by_rows<float><<<blocks, THREADS, 0, launch.stream>>>(*a, a_vectors, b_vectors);
    }
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

/* squared: whether a->squares are there, too. */
static qd_status multiply(qd_stream *stream, const qd_grouped_args *a, bool *squared)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    *squared = false;
    QD_TRY(qd_cuda_check_float("grouped", "a", a->a_dtype));
    QD_TRY(qd_cuda_check_float("grouped", "b", a->b_dtype));
    QD_TRY(qd_cuda_check_float("grouped", "c", a->c_dtype));
    if ((int64_t)a->sources * a->experts > QD_GROUPED_SEGMENTS)
        return QD_FAIL(QD_UNSUPPORTED, "grouped: %d experts times %d sources; %d in all are the most here", a->experts, a->sources,
                       (int)QD_GROUPED_SEGMENTS);
    if (a->rows >= (int64_t)1 << 31 || a->n >= (int64_t)1 << 31 || a->k >= (int64_t)1 << 31)
        return QD_FAIL(QD_UNSUPPORTED, "grouped: rows %lld, n %lld, k %lld; each must be below 2^31", (long long)a->rows, (long long)a->n,
                       (long long)a->k);
    if (a->n < 1 || a->k < 1 || (a->rows < 1 && (!a->by_experts || a->accumulate)))
        return QD_OK;
    if (a->rows < 1) {
        QD_CUDA_TRY(cudaMemsetAsync(a->b, 0, (size_t)(a->experts * a->n * a->k) * qd_dtype_size(a->b_dtype), launch.stream));
        return QD_OK;
    }
    if (!qd_cuda_grouped_hopper_takes(&launch, a))
        return qd_cuda_grouped_general(stream, a);
    *squared = a->b_dtype == QD_BF16;
    return qd_cuda_grouped_hopper(stream, a);
}

qd_status qd_cuda_grouped(qd_stream *stream, const qd_grouped_args *a)
{
    bool squared;
    QD_TRY(multiply(stream, a, &squared));
    if (!a->squares || squared)
        return QD_OK;
    qd_row_squares_args rows = {};
    rows.x = a->b;
    rows.out = a->squares;
    rows.rows = a->experts * a->n;
    rows.cols = a->k;
    rows.dtype = a->b_dtype;
    return qd_cuda_row_squares(stream, &rows);
}
