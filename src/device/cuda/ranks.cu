/* Kernels between ranks: sums that are bit-identical to the tree of device/sum.h, and copies of
 * many pieces at once. No kernel here waits for another one. */
#include "device/cuda/launch_impl.h"

#include <stdint.h>

enum { THREADS = 256, SEGMENTS = 48, PIECES = 96, COPY_ENGINE_BYTES = 512 << 10 };

/* Elements: loaded into an accumulator, combined, stored; bit-identical to sum_kernels.h. */

template <typename T> struct element;
template <> struct element<float> {
    typedef float acc;
    static __device__ float load(float x) { return x; }
    static __device__ float store(float x) { return x; }
    static __device__ float add(float a, float b) { return __fadd_rn(a, b); }
    static __device__ float average(float a, int n) { return __fmul_rn(a, __fdiv_rn(1.0f, (float)n)); }
};
template <> struct element<double> {
    typedef double acc;
    static __device__ double load(double x) { return x; }
    static __device__ double store(double x) { return x; }
    static __device__ double add(double a, double b) { return __dadd_rn(a, b); }
    static __device__ double average(double a, int n) { return __dmul_rn(a, __ddiv_rn(1.0, (double)n)); }
};
/* Integer sums wrap around: they are computed as unsigned numbers. */
template <> struct element<int32_t> {
    typedef int32_t acc;
    static __device__ int32_t load(int32_t x) { return x; }
    static __device__ int32_t store(int32_t x) { return x; }
    static __device__ int32_t add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
    static __device__ int32_t average(int32_t a, int n) { return a / n; }
};
template <> struct element<int64_t> {
    typedef int64_t acc;
    static __device__ int64_t load(int64_t x) { return x; }
    static __device__ int64_t store(int64_t x) { return x; }
    static __device__ int64_t add(int64_t a, int64_t b) { return (int64_t)((uint64_t)a + (uint64_t)b); }
    static __device__ int64_t average(int64_t a, int n) { return a / n; }
};
struct bf16 {
    uint16_t bits;
};
template <> struct element<bf16> : element<float> {
    static __device__ float load(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
    static __device__ bf16 store(float x) /* rounds to nearest even; NaN stays NaN (quiet) */
    {
        uint32_t u = __float_as_uint(x);
        uint32_t r = (u & 0x7fffffffu) > 0x7f800000u ? (u >> 16) | 0x40 : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
        return bf16{(uint16_t)r};
    }
};
struct fp16 {
    uint16_t bits;
};
template <> struct element<fp16> : element<float> {
    static __device__ float load(fp16 x)
    {
        uint32_t magnitude = (uint32_t)(x.bits & 0x7fff) << 13, sign = (uint32_t)(x.bits & 0x8000) << 16;
        bool special = (x.bits & 0x7c00) == 0x7c00;
        uint32_t finite = __float_as_uint(__fmul_rn(__uint_as_float(magnitude), 0x1p112f));
        return __uint_as_float((special ? magnitude | 0x7f800000u : finite) | sign);
    }
    static __device__ fp16 store(float x) /* rounds to nearest even; overflow gives infinity */
    {
        uint32_t u = __float_as_uint(x), sign = u & 0x80000000u, r;
        u ^= sign;
        if (u >= 143u << 23)
            r = u > 0x7f800000u ? 0x7e00 : 0x7c00;
        else if (u < 113u << 23)
            r = __float_as_uint(__fadd_rn(__uint_as_float(u), 0.5f)) - (126u << 23);
        else
            r = (u + 0xc8000fffu + ((u >> 13) & 1)) >> 13;
        return fp16{(uint16_t)(r | sign >> 16)};
    }
};

enum { REDUCE_SUM, REDUCE_MAX };

template <typename T, int REDUCE> __device__ typename element<T>::acc combine(typename element<T>::acc a, typename element<T>::acc b)
{
    if (REDUCE == REDUCE_MAX) return a > b || a != a ? a : b; /* a NaN stays */
    return element<T>::add(a, b);
}

struct sum_call {
    const void *sources[QD_SUM_RANKS_MOST];
    void *outs[QD_SUM_RANKS_MOST];
    int64_t in[SEGMENTS], out[SEGMENTS], count[SEGMENTS]; /* elements */
    int first_block[SEGMENTS + 1];
    int source_count, out_count, segment_count;
    bool average;
};

/* The largest vector of one access: 16 bytes. */
template <typename T, int WIDTH> struct alignas(sizeof(T) * WIDTH) pack {
    T v[WIDTH];
};

/* The tree over sources [first, first + N), with N a compile-time constant. */
template <typename T, int REDUCE, int WIDTH, int N> struct tree {
    typedef typename element<T>::acc acc;
    static __device__ void run(const sum_call &c, int first, int64_t i, acc *r)
    {
        constexpr int LEFT = N > 4 ? 4 : N > 2 ? 2 : 1; /* N is at most 8 here */
        acc b[WIDTH];
        tree<T, REDUCE, WIDTH, LEFT>::run(c, first, i, r);
        tree<T, REDUCE, WIDTH, N - LEFT>::run(c, first + LEFT, i, b);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) r[k] = combine<T, REDUCE>(r[k], b[k]);
    }
};
template <typename T, int REDUCE, int WIDTH> struct tree<T, REDUCE, WIDTH, 1> {
    typedef typename element<T>::acc acc;
    static __device__ void run(const sum_call &c, int first, int64_t i, acc *r)
    {
        pack<T, WIDTH> x = *(const pack<T, WIDTH> *)((const T *)c.sources[first] + i);
#pragma unroll
        for (int k = 0; k < WIDTH; k++) r[k] = element<T>::load(x.v[k]);
    }
};

/* Any number of sources: complete left subtrees wait on a stack for a right subtree of the same
 * size; what remains at the end is combined from the right. That is the same tree. */
template <typename T, int REDUCE, int WIDTH> struct tree<T, REDUCE, WIDTH, 0> {
    typedef typename element<T>::acc acc;
    static __device__ void run(const sum_call &c, int, int64_t i, acc *r)
    {
        acc stack[7][WIDTH];
        int depth = 0;
        for (int s = 0; s < c.source_count; s++) {
            tree<T, REDUCE, WIDTH, 1>::run(c, s, i, stack[depth++]);
            for (int full = s + 1; (full & 1) == 0; full >>= 1) pop(stack, &depth);
        }
        while (depth > 1) pop(stack, &depth);
        for (int k = 0; k < WIDTH; k++) r[k] = stack[0][k];
    }
    static __device__ void pop(acc (*stack)[WIDTH], int *depth)
    {
        --*depth;
        for (int k = 0; k < WIDTH; k++)
            stack[*depth - 1][k] = combine<T, REDUCE>(stack[*depth - 1][k], stack[*depth][k]);
    }
};

template <typename T, int REDUCE, int WIDTH, int N>
__global__ void __launch_bounds__(THREADS) sum_kernel(const __grid_constant__ sum_call c)
{
    typedef typename element<T>::acc acc;
    int s = 0;
    while (s + 1 < c.segment_count && (int)blockIdx.x >= c.first_block[s + 1]) s++;
    int64_t blocks = c.first_block[s + 1] - c.first_block[s];
    int64_t step = blocks * THREADS * WIDTH;
    for (int64_t i = ((blockIdx.x - c.first_block[s]) * (int64_t)THREADS + threadIdx.x) * WIDTH; i < c.count[s]; i += step) {
        acc r[WIDTH];
        tree<T, REDUCE, WIDTH, N>::run(c, 0, c.in[s] + i, r);
        pack<T, WIDTH> x;
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
            x.v[k] = element<T>::store(c.average ? element<T>::average(r[k], c.source_count) : r[k]);
        for (int j = 0; j < c.out_count; j++) *(pack<T, WIDTH> *)((T *)c.outs[j] + c.out[s] + i) = x;
    }
}

template <typename T, int REDUCE, int N> static void launch_sum(const sum_call *c, int blocks, bool wide, cudaStream_t stream)
{
    constexpr int WIDTH = 16 / sizeof(T);
    if (wide)
        sum_kernel<T, REDUCE, WIDTH, N><<<blocks, THREADS, 0, stream>>>(*c);
    else
        sum_kernel<T, REDUCE, 1, N><<<blocks, THREADS, 0, stream>>>(*c);
}

/* The common sums, with the number of ranks as a compile-time constant. */
template <typename T> static void launch_usual(const sum_call *c, int blocks, bool wide, cudaStream_t stream)
{
    switch (c->source_count) {
    case 2: launch_sum<T, REDUCE_SUM, 2>(c, blocks, wide, stream); return;
    case 4: launch_sum<T, REDUCE_SUM, 4>(c, blocks, wide, stream); return;
    case 8: launch_sum<T, REDUCE_SUM, 8>(c, blocks, wide, stream); return;
    default: launch_sum<T, REDUCE_SUM, 0>(c, blocks, wide, stream);
    }
}

template <typename T> static void launch_any(const sum_call *c, int blocks, bool max, bool wide, cudaStream_t stream)
{
    if (max)
        launch_sum<T, REDUCE_MAX, 0>(c, blocks, wide, stream);
    else
        launch_sum<T, REDUCE_SUM, 0>(c, blocks, wide, stream);
}

static bool launch_type(const sum_call *c, int blocks, qd_dtype dtype, bool max, bool wide, cudaStream_t stream)
{
    switch (dtype) {
    case QD_F32:
        if (max) launch_sum<float, REDUCE_MAX, 0>(c, blocks, wide, stream);
        else launch_usual<float>(c, blocks, wide, stream);
        return true;
    case QD_BF16:
        if (max) launch_sum<bf16, REDUCE_MAX, 0>(c, blocks, wide, stream);
        else launch_usual<bf16>(c, blocks, wide, stream);
        return true;
    case QD_F16: launch_any<fp16>(c, blocks, max, wide, stream); return true;
    case QD_F64: launch_any<double>(c, blocks, max, wide, stream); return true;
    case QD_I32: launch_any<int32_t>(c, blocks, max, wide, stream); return true;
    case QD_I64: launch_any<int64_t>(c, blocks, max, wide, stream); return true;
    default: return false;
    }
}

static bool aligned(const void *base, int64_t offset)
{
    return ((uintptr_t)base + (uintptr_t)offset) % 16 == 0;
}

/* Whether all loads and stores of the call can be 16 bytes wide. */
static bool is_wide(const sum_call *c, int64_t size)
{
    for (int s = 0; s < c->segment_count; s++) {
        if (c->count[s] * size % 16 != 0) return false;
        for (int k = 0; k < c->source_count; k++)
            if (!aligned(c->sources[k], c->in[s] * size)) return false;
        for (int j = 0; j < c->out_count; j++)
            if (!aligned(c->outs[j], c->out[s] * size)) return false;
    }
    return true;
}

/* Adds a segment unless it is empty, with blocks in proportion to its size. */
static void add_segment(sum_call *c, int64_t in, int64_t out, int64_t count, int64_t per_block, int most)
{
    if (count == 0) return;
    int s = c->segment_count++;
    int64_t blocks = (count + per_block - 1) / per_block;
    c->in[s] = in;
    c->out[s] = out;
    c->count[s] = count;
    c->first_block[s + 1] = c->first_block[s] + (int)(blocks < most ? blocks : most);
}

static qd_status run_sum(const qd_cuda_launch *launch, sum_call *c, qd_dtype dtype, bool max)
{
    if (c->segment_count == 0) return QD_OK;
    bool wide = is_wide(c, (int64_t)qd_dtype_size(dtype));
    if (!launch_type(c, c->first_block[c->segment_count], dtype, max, wide, launch->stream))
        return QD_FAIL(QD_UNSUPPORTED, "sum_ranks: %s can be sent but not reduced", qd_dtype_name(dtype));
    c->segment_count = 0;
    QD_CUDA_TRY(cudaGetLastError());
    return QD_OK;
}

qd_status qd_cuda_sum_ranks(qd_stream *stream, const qd_sum_ranks_args *a)
{
    if (a->source_count < 1 || a->source_count > QD_SUM_RANKS_MOST || a->out_count > QD_SUM_RANKS_MOST)
        return QD_FAIL(QD_USAGE, "sum_ranks: %d sources and %d outputs; 1 to %d are supported", a->source_count, a->out_count,
                       QD_SUM_RANKS_MOST);
    qd_cuda_launch launch = qd_cuda_launch_of(stream);
    int64_t size = (int64_t)qd_dtype_size(a->dtype), wide = 16 / size;
    sum_call c;
    c.segment_count = c.first_block[0] = 0;
    c.source_count = a->source_count;
    c.out_count = a->out_count;
    c.average = a->reduce == QD_AVG;
    for (int k = 0; k < a->source_count; k++) c.sources[k] = a->sources[k];
    for (int j = 0; j < a->out_count; j++) c.outs[j] = a->outs[j];
    bool max = a->reduce == QD_MAX;
    /* Whole vectors first, then the tails: one odd length must not slow down the rest. */
    for (int tails = 0; tails < 2; tails++) {
        for (int s = 0; s < a->segment_count; s++) {
            qd_sum_segment segment = a->segments[s];
            int64_t body = segment.count / wide * wide;
            if (tails)
                add_segment(&c, segment.in + body, segment.out + body, segment.count - body, THREADS, 1);
            else
                add_segment(&c, segment.in, segment.out, body, THREADS * wide * 4, 4 * launch.multiprocessors);
            if (c.segment_count == SEGMENTS) QD_TRY(run_sum(&launch, &c, a->dtype, max));
        }
        QD_TRY(run_sum(&launch, &c, a->dtype, max));
    }
    return QD_OK;
}

struct copy_call {
    const char *from[PIECES];
    char *to[PIECES];
    int64_t bytes[PIECES];
    int first_block[PIECES + 1];
    int count;
};

template <typename T> __device__ static void copy_as(const char *from, char *to, int64_t n, int64_t first, int64_t step)
{
    for (int64_t i = first; i < n; i += step) ((T *)to)[i] = ((const T *)from)[i];
}

__global__ void __launch_bounds__(THREADS) copy_kernel(const __grid_constant__ copy_call c)
{
    int p = 0;
    while (p + 1 < c.count && (int)blockIdx.x >= c.first_block[p + 1]) p++;
    int64_t first = (blockIdx.x - c.first_block[p]) * (int64_t)THREADS + threadIdx.x;
    int64_t step = (c.first_block[p + 1] - c.first_block[p]) * (int64_t)THREADS;
    const char *from = c.from[p];
    char *to = c.to[p];
    int64_t bytes = c.bytes[p];
    if (((uintptr_t)from | (uintptr_t)to | (uintptr_t)bytes) % 16 == 0)
        copy_as<uint4>(from, to, bytes / 16, first, step);
    else if (((uintptr_t)from | (uintptr_t)to | (uintptr_t)bytes) % 2 == 0)
        copy_as<uint16_t>(from, to, bytes / 2, first, step);
    else
        copy_as<uint8_t>(from, to, bytes, first, step);
}

static qd_status run_copy(const qd_cuda_launch *launch, copy_call *c)
{
    if (c->count == 0) return QD_OK;
    copy_kernel<<<c->first_block[c->count], THREADS, 0, launch->stream>>>(*c);
    c->count = 0;
    QD_CUDA_TRY(cudaGetLastError());
    return QD_OK;
}

/* Large pieces are copied one by one with cudaMemcpyAsync, which picks the fastest path between two
 * addresses; small ones share a kernel. */
qd_status qd_cuda_copy_pieces(qd_stream *stream, const qd_copy_pieces_args *a)
{
    qd_cuda_launch launch = qd_cuda_launch_of(stream);
    copy_call c;
    c.count = c.first_block[0] = 0;
    for (int i = 0; i < a->count; i++) {
        const qd_piece *piece = &a->pieces[i];
        if (piece->bytes == 0 || piece->to == piece->from) continue;
        if (piece->bytes >= COPY_ENGINE_BYTES || a->count == 1) {
            QD_CUDA_TRY(cudaMemcpyAsync(piece->to, piece->from, (size_t)piece->bytes, cudaMemcpyDefault, launch.stream));
            continue;
        }
        int p = c.count++;
        int64_t blocks = (piece->bytes + THREADS * 64 - 1) / (THREADS * 64);
        c.from[p] = (const char *)piece->from;
        c.to[p] = (char *)piece->to;
        c.bytes[p] = piece->bytes;
        c.first_block[p + 1] = c.first_block[p] + (int)blocks;
        if (c.count == PIECES) QD_TRY(run_copy(&launch, &c));
    }
    return run_copy(&launch, &c);
}
