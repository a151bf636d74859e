/* Grouped GEMM for every size, type and device, and the choice between these kernels and Hopper's.
 *
 * A block of 256 threads computes tiles of SIDE x SIDE: bf16 operands on tensor cores
 * (mma.m16n8k16, SIDE 128), all others in fp32 (SIDE 64). The tile's operands x (rows, depth) and y
 * (columns, depth) have the same layout in shared memory as in device memory, contiguous along
 * depth or along the other side; those of the next step are prefetched into registers. */
#include "device/cuda/experts/grouped_impl.cuh"

namespace {

enum { THREADS = 256, STEP = 32, PIECE = VECTOR };

/* An operand of one tile: element (i, depth) is at from + i * ld + depth if along_depth, else at
 * from + depth * ld + i. Elements beyond `sides` or `depth` count as 0. vectors: lines can be read
 * in vectors of PIECE elements. */
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

/* PIECE elements of a line starting at `at`; `line` and `at` count sides and depth, or the
 * reverse. */
__device__ __forceinline__ void fetch(piece<float> &p, const operand &o, int line, int at)
{
    const int lines = o.along_depth ? o.sides : o.depth, length = o.along_depth ? o.depth : o.sides;
    const int64_t start = line * o.ld + at;
    if (line < lines && at + PIECE <= length && o.vectors) {
        load_as<PIECE>(o.from, start, o.is_bf16, p.v);
        return;
    }
#pragma unroll
    for (int i = 0; i < PIECE; i++) {
        float value[1] = {0.0f};
        if (line < lines && at + i < length)
            load_as<1>(o.from, start + i, o.is_bf16, value);
        p.v[i] = value[0];
    }
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

/* Layout of a tile in shared memory: the gap keeps reads of a column free of bank conflicts. */
template <typename S, int SIDE> struct shape {
    enum {
        GAP = sizeof(S) == 2 ? 8 : 1,
        ALONG_DEPTH = STEP + GAP, /* one line per side element */
        ALONG_SIDES = SIDE + GAP, /* one line per depth element */
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

/* Sums of a tile; S is the type of the operands. */

/* A thread has SETS times four sums: c[i][v] belongs to (row_of(i, v), column_of(i, v)) of the
 * tile. */
template <typename S> struct sums;

/* Eight warps of 64 x 32 each; fragments as in attention_tensor.cu. */
template <> struct sums<bf16> {
    enum { SIDE = 128, SETS = 16 };
    float c[SETS][4];

    static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % 2 * 64; }
    static __device__ __forceinline__ int warp_column() { return threadIdx.x / 64 * 32; }
    static __device__ __forceinline__ int row_of(int i, int v) { return warp_row() + i / 4 * 16 + threadIdx.x % 32 / 4 + v / 2 * 8; }
    static __device__ __forceinline__ int column_of(int i, int v) { return warp_column() + i % 4 * 8 + threadIdx.x % 4 * 2 + v % 2; }

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
                    multiply_add(c[i * 4 + j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
    }
};

/* 4 x 4 sums per thread, rows and columns 16 apart. */
template <> struct sums<float> {
    enum { SIDE = 64, SETS = 4 };
    float c[SETS][4];

    static __device__ __forceinline__ int row_of(int i, int) { return threadIdx.x / 16 + 16 * i; }
    static __device__ __forceinline__ int column_of(int, int v) { return threadIdx.x % 16 + 16 * v; }

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
};

/* sum += x · yᵀ over the whole depth of the operands. */
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

/* `table` (rows, cols) starting at (row, column); its sides are columns, or rows if along_depth. */
__device__ __forceinline__ operand operand_at(const void *table, qd_dtype dtype, int64_t cols, int64_t row, int64_t column, int sides,
                                              int depth, bool along_depth, bool vectors)
{
    operand o = {table, cols, sides, depth, along_depth, dtype == QD_BF16, vectors};
    o.from = (const char *)table + bytes_at(o, row * cols + column);
    return o;
}

/* Stores the sums of tile t in out (.., n); its first row is `row`. add: accumulates, rounded
 * once. */
template <typename S>
__device__ __forceinline__ void store_sums(const sums<S> &sum, void *out, bool is_bf16, int64_t n, int64_t row, const grouped_tile &t,
                                           bool add)
{
#pragma unroll
    for (int i = 0; i < sums<S>::SETS; i++)
#pragma unroll
        for (int v = 0; v < 4; v++) {
            const int r = sum.row_of(i, v), c = sum.column_of(i, v);
            if (r >= t.rows || c >= t.columns)
                continue;
            const int64_t at = (row + r) * n + t.column + c;
            float value[1] = {sum.c[i][v]}, old[1];
            if (add) {
                load_as<1>(out, at, is_bf16, old);
                value[0] += old[0];
            }
            store_as<1>(out, at, is_bf16, value);
        }
}

/* The matrix of an expert. */
__device__ __forceinline__ void *matrix_of(const qd_grouped_args &g, int expert)
{
    return (char *)g.b + expert * g.b_stride * (g.b_dtype == QD_BF16 ? 2 : 4);
}

/* g has all strides. *_vectors: whether the operand can be read in vectors of PIECE elements. */
template <typename S, bool BY_EXPERTS>
__global__ __launch_bounds__(THREADS) void multiply(qd_grouped_args g, bool x_vectors, bool y_vectors)
{
    enum { SIDE = sums<S>::SIDE };
    __shared__ __align__(16) S x_tile[shape<S, SIDE>::ROOM], y_tile[shape<S, SIDE>::ROOM];
    __shared__ grouped_segments table;
    if (threadIdx.x < 32)
        plan_segments(g, SIDE, &table);
    __syncthreads();
    grouped_tiles<BY_EXPERTS, SIDE, SIDE> list(g, table, blockIdx.x, gridDim.x);
    grouped_tile t;
    while (list.next(t)) {
        sums<S> sum = {};
        bool any = false;
        for (int source = 0; source < (BY_EXPERTS ? g.sources : 1); source++) {
            int first;
            const int depth = depth_of<BY_EXPERTS>(g, table, t.expert, source, first);
            if (depth == 0)
                continue;
            any = true;
            operand x, y;
            if (BY_EXPERTS) {
                x = operand_at(g.c, g.c_dtype, g.c_stride, first, t.row, t.rows, depth, false, x_vectors);
                y = operand_at(g.a, g.a_dtype, g.a_stride, first, t.column, t.columns, depth, false, y_vectors);
            } else {
                const void *b = matrix_of(g, t.expert);
                x = operand_at(g.a, g.a_dtype, g.a_stride, t.row, 0, t.rows, depth, true, x_vectors);
                y = g.trans_b ? operand_at(b, g.b_dtype, g.k, t.column, 0, t.columns, depth, true, y_vectors)
                              : operand_at(b, g.b_dtype, g.n, 0, t.column, t.columns, depth, false, y_vectors);
            }
            add_product(sum, x, y, x_tile, y_tile);
        }
        if (!BY_EXPERTS)
            store_sums(sum, g.c, g.c_dtype == QD_BF16, g.c_stride, t.row, t, g.add_rows);
        else if (any || !g.accumulate)
            store_sums(sum, matrix_of(g, t.expert), g.b_dtype == QD_BF16, g.k, t.row, t, g.accumulate);
    }
}

} // namespace

static qd_status multiply_general(const qd_cuda_launch &launch, const qd_grouped_args *given)
{
    const int blocks = launch.multiprocessors * 2;
    qd_grouped_args strided = *given, *const a = &strided;
    a->a_stride = a->a_stride ? a->a_stride : a->k;
    a->b_stride = a->b_stride ? a->b_stride : a->n * a->k;
    a->c_stride = a->c_stride ? a->c_stride : a->n;
    const bool on_tensor_cores = a->a_dtype == QD_BF16 && (a->by_experts ? a->c_dtype : a->b_dtype) == QD_BF16;
    const bool a_vectors = can_vector(a->k, a->a) && a->a_stride % VECTOR == 0;
    const bool c_vectors = can_vector(a->n, a->c) && a->c_stride % VECTOR == 0;
    const bool b_vectors = can_vector(a->n, a->b) && a->k % VECTOR == 0 && a->b_stride % VECTOR == 0;
    if (a->by_experts && on_tensor_cores)
        multiply<bf16, true><<<blocks, THREADS, 0, launch.stream>>>(*a, c_vectors, a_vectors);
    else if (a->by_experts)
        multiply<float, true><<<blocks, THREADS, 0, launch.stream>>>(*a, c_vectors, a_vectors);
    else if (on_tensor_cores)
        multiply<bf16, false><<<blocks, THREADS, 0, launch.stream>>>(*a, a_vectors, b_vectors);
    else
        multiply<float, false><<<blocks, THREADS, 0, launch.stream>>>(*a, a_vectors, b_vectors);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

static qd_status check(const qd_grouped_args *a)
{
    QD_TRY(qd_grouped_check(a));
    if ((int64_t)a->sources * a->experts > QD_GROUPED_SEGMENTS)
        return QD_FAIL(QD_UNSUPPORTED, "grouped: %d experts times %d sources; the product must not exceed %d", a->experts, a->sources,
                       (int)QD_GROUPED_SEGMENTS);
    if (a->rows >= (int64_t)1 << 31 || a->n >= (int64_t)1 << 31 || a->k >= (int64_t)1 << 31)
        return QD_FAIL(QD_UNSUPPORTED, "grouped: rows %lld, n %lld, k %lld; each must be below 2^31", (long long)a->rows, (long long)a->n,
                       (long long)a->k);
    return QD_OK;
}

static qd_status square_rows(qd_stream *stream, const qd_grouped_args *a)
{
    qd_row_squares_args rows = {};
    rows.x = a->b;
    rows.out = a->squares;
    rows.rows = a->experts * a->n;
    rows.cols = a->k;
    rows.dtype = a->b_dtype;
    return qd_cuda_row_squares(stream, &rows);
}

static qd_status swiglu_of_rows(qd_stream *stream, const qd_grouped_args *a)
{
    qd_activation_args x = {};
    x.kind = a->limit > 0.0f ? QD_ACT_SWIGLU_CLAMPED : QD_ACT_SWIGLU;
    x.alpha = a->alpha;
    x.limit = a->limit;
    x.rows = a->rows;
    x.cols = a->gate_up ? a->n : a->n / 2;
    x.x = a->gate_up ? a->gate_up : a->c;
    x.dy = a->gate_up ? a->c : NULL;
    x.dx = a->d_gate_up;
    x.y = a->active;
    x.dtype = a->c_dtype;
    return a->gate_up ? qd_cuda_activation_backward(stream, &x) : qd_cuda_activation_forward(stream, &x);
}

static qd_status add_bias(qd_stream *stream, const qd_grouped_args *a)
{
    qd_grouped_bias_args x = {};
    x.x = a->c;
    x.bias = const_cast<void *>(a->bias);
    x.counts = a->counts;
    x.count_stride = a->count_stride;
    x.begin = a->begin;
    x.rows = a->rows;
    x.width = x.n = a->n;
    x.sources = a->sources;
    x.experts = a->experts;
    x.dtype = a->c_dtype;
    x.bias_dtype = a->bias_dtype;
    return qd_cuda_grouped_bias(stream, &x);
}

qd_status qd_cuda_grouped(qd_stream *stream, const qd_grouped_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    QD_TRY(check(a));
    const bool results = a->n > 0 && a->k > 0, hopper = results && a->rows > 0 && qd_cuda_grouped_hopper_takes(&launch, a);
    if (hopper && qd_cuda_grouped_pingpong_suits(&launch, a))
        return qd_cuda_grouped_pingpong(stream, a);
    if (hopper) {
        qd_grouped_args alone = *a; /* bias and SwiGLU follow in passes of their own */
        alone.active = alone.d_gate_up = NULL;
        alone.gate_up = alone.bias = NULL;
        QD_TRY(qd_cuda_grouped_pingpong_suits(&launch, &alone) ? qd_cuda_grouped_pingpong(stream, &alone)
                                                               : qd_cuda_grouped_hopper(stream, &alone));
        if (a->b_dtype == QD_BF16 && a->by_experts)
            return QD_OK; /* squares are done, too */
    } else if (results && a->rows > 0) {
        QD_TRY(multiply_general(launch, a));
    } else if (results && a->by_experts && !a->accumulate) {
        const size_t size = qd_dtype_size(a->b_dtype), width = (size_t)(a->n * a->k) * size;
        QD_CUDA_TRY(cudaMemset2DAsync(a->b, a->b_stride ? (size_t)a->b_stride * size : width, 0, width, (size_t)a->experts, launch.stream));
    }
    if (a->squares)
        return square_rows(stream, a);
    if (a->bias)
        QD_TRY(add_bias(stream, a));
    return a->active || a->gate_up ? swiglu_of_rows(stream, a) : QD_OK;
}
