/* Grouped GEMM on Hopper's tensor cores (wgmma, sm_90a), bf16 with fp32 accumulation.
 *
 * A tile of 128 x 256 results per block: out (128, 256) = x (128, depth) · y (256, depth)ᵀ, depth
 * in steps of 64. One thread keeps a ring of STAGES such steps in shared memory full with TMA; two
 * warpgroups multiply, 64 rows each. Operands are stored as TMA writes them: blocks of 64 or more
 * lines of 128 bytes, whose 16-byte pieces are swizzled by the line's number modulo 8. A line runs
 * along depth (by rows: x and, if trans_b, y) or along the other side.
 *
 * By rows, rows beyond an expert's last are computed but not stored. By experts, in the last step
 * of a source the lines beyond its end are zeroed in shared memory.
 *
 * Pairs of blocks that fetch a common operand together (clusters, multicast) were no faster:
 * docs/notes/grouped-gemm.md. */
#include "device/cuda/experts/grouped_impl.cuh"
#include "device/cuda/experts/hopper_impl.cuh"
#include "device/cuda/sums_impl.h"

namespace {

enum { CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS), CONSUMER_WARPS = 4 * CONSUMERS };
enum { FETCHER_REGISTERS = 40, CONSUMER_REGISTERS = 232 }; /* per thread; on average the launch's 168 */
enum { ROWS = 128, COLUMNS = 256, STAGES = 4 };
enum { X_BYTES = ROWS * DEPTH * 2, Y_BYTES = COLUMNS * DEPTH * 2, STAGE = X_BYTES + Y_BYTES };
enum form { ROWS_TRANSPOSED, ROWS_PLAIN, EXPERTS };
enum result { STORE, ADD }; /* what to do with a tile's sums; ADD: accumulate */

struct shared {
    char stages[STAGES * STAGE];
    char staging[CONSUMER_WARPS][16 * LINE]; /* staging of results into rows of 16-byte pieces */
    uint64_t full[STAGES], empty[STAGES];
    grouped_segments table;
};
enum { SHARED_BYTES = sizeof(shared) + 1024 /* the ring is aligned to 1024 bytes */ };

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* c (64, WIDTH) = [c +] x (64, 16) · y (WIDTH, 16)ᵀ by the warpgroup, WIDTH 256 or 128. Of rows
 * lane / 4 and lane / 4 + 8 of its warp's 16, a lane has columns 8 j + lane % 4 * 2 and the next:
 * c[4 j], c[4 j + 1], and c[4 j + 2], c[4 j + 3]. *_SIDE: lines run along the side. */
template <int WIDTH, bool X_SIDE, bool Y_SIDE>
__device__ __forceinline__ void multiply_16(float (&c)[128], uint64_t x, uint64_t y, bool add)
{
    if constexpr (WIDTH == 256)
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                     "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                     "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                     "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                     "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
                     "%128, %129, p, 1, 1, %131, %132;\n}"
                     : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_16(80), SUMS_16(96), SUMS_16(112)
                     : "l"(x), "l"(y), "r"((int)add), "n"(X_SIDE ? 1 : 0), "n"(Y_SIDE ? 1 : 0));
    else
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                     "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                     "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                     "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                     "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
                     "%64, %65, p, 1, 1, %67, %68;\n}"
                     : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48)
                     : "l"(x), "l"(y), "r"((int)add), "n"(X_SIDE ? 1 : 0), "n"(Y_SIDE ? 1 : 0));
}

template <form FORM> using tiles = grouped_tiles<FORM == EXPERTS, ROWS, COLUMNS>;

/* Whether only the first half of the columns is valid: then the other half is not fetched, and the
 * GEMM takes half the time. Not by rows, where copies of half a tile take as long as those of a
 * whole one. */
template <form FORM> __device__ __forceinline__ bool is_narrow(const grouped_tile &t)
{
    return FORM == EXPERTS && t.columns <= COLUMNS / 2;
}

/* Fetching, by one thread. */

template <form FORM>
__device__ __forceinline__ void fetch_step(char *stage, uint64_t *full, const CUtensorMap *x_map, const CUtensorMap *y_map,
                                           const grouped_tile &t, int depth)
{
#pragma unroll
    for (int half = 0; half < 2; half++) {
        char *const x = stage + half * BLOCK, *const y = stage + X_BYTES + half * 2 * BLOCK;
        if (FORM == EXPERTS)
            copy_box(x, x_map, full, t.row + half * 64, depth);
        else
            copy_box(x, x_map, full, depth, t.row + half * 64);
        if (half == 0 || !is_narrow<FORM>(t)) {
            const int column = t.column + half * 128;
            if (FORM == EXPERTS) {
                copy_box(y, y_map, full, column, depth);
                copy_box(y + BLOCK, y_map, full, column + 64, depth);
            } else if (FORM == ROWS_PLAIN) {
                copy_box(y, y_map, full, column, depth, t.expert);
                copy_box(y + BLOCK, y_map, full, column + 64, depth, t.expert);
            } else {
                copy_box(y, y_map, full, depth, column, t.expert);
            }
        }
    }
}

template <form FORM>
__device__ __forceinline__ void fetch_all(shared &s, const CUtensorMap *x_map, const CUtensorMap *y_map, const qd_grouped_args &g)
{
    tiles<FORM> list(g, s.table, blockIdx.x, gridDim.x);
    grouped_tile t;
    ring<STAGES> r;
    while (list.next(t)) {
        const int bytes = STAGE - (is_narrow<FORM>(t) ? Y_BYTES / 2 : 0);
        for (int source = 0; source < (FORM == EXPERTS ? g.sources : 1); source++) {
            int first;
            const int depth = depth_of<FORM == EXPERTS>(g, s.table, t.expert, source, first);
            for (int at = 0; at < depth; at += DEPTH, r.advance()) {
                barrier_wait(&s.empty[r.stage], r.phase ^ 1);
                barrier_expect(&s.full[r.stage], bytes);
                fetch_step<FORM>(s.stages + r.stage * STAGE, &s.full[r.stage], x_map, y_map, t, first + at);
            }
        }
    }
}

/* Multiplying, by the consumer warpgroups. */

/* Zeroes lines [valid, DEPTH) of all blocks of a stage, by all consumers. */
__device__ __forceinline__ void clear_lines(char *stage, int valid)
{
    const int pieces = (DEPTH - valid) * (LINE / 16);
    for (int i = threadIdx.x - WARPGROUP; i < pieces * (STAGE / BLOCK); i += WARPGROUP * CONSUMERS)
        *reinterpret_cast<uint4 *>(stage + i / pieces * BLOCK + valid * LINE + i % pieces * 16) =
            make_uint4(0, 0, 0, 0);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    asm volatile("bar.sync 1, %0;" ::"n"(WARPGROUP * CONSUMERS) : "memory");
}

/* Each warp signals that it has read a stage. */
__device__ __forceinline__ void release(uint64_t *empty)
{
    if (threadIdx.x % 32 == 0)
        barrier_arrive(empty);
}

/* Destination of a warp's results: 16 rows, n elements apart, of COLUMNS columns; `rows` and
 * `columns` of them are valid. */
template <typename T> struct target {
    T *out;
    int64_t n;
    int rows, columns;
};

/* 64 columns as 16-byte pieces: a lane has its piece of every fourth row. */
struct pieces {
    uint4 v[4];
};

__device__ __forceinline__ bool has_piece(const target<bf16> &to, int part, int i)
{
    const int lane = threadIdx.x % 32;
    return i * 4 + lane / 8 < to.rows && part * 64 + lane % 8 * 8 < to.columns;
}

__device__ __forceinline__ bf16 *piece_at(const target<bf16> &to, int part, int i)
{
    const int lane = threadIdx.x % 32;
    return to.out + (i * 4 + lane / 8) * to.n + part * 64 + lane % 8 * 8;
}

__device__ __forceinline__ void load_pieces(pieces &old, const target<bf16> &to, int part)
{
#pragma unroll
    for (int i = 0; i < 4; i++)
        old.v[i] = has_piece(to, part, i) ? *reinterpret_cast<const uint4 *>(piece_at(to, part, i)) : make_uint4(0, 0, 0, 0);
}

/* 64 columns in the lane layout of wgmma, packed in pairs. */
__device__ __forceinline__ void words_of_pieces(uint32_t (&words)[16], const pieces &from, char *staging)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 4; i++)
        *reinterpret_cast<uint4 *>(staged(staging, i * 4 + lane / 8, lane % 8)) = from.v[i];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        load_matrices(reinterpret_cast<uint32_t(&)[4]>(words[2 * j]), (const bf16 *)staged(staging, lane % 16, j + lane / 16));
    __syncwarp();
}

/* Stores them through shared memory, so that a row's are stored as whole lines. */
__device__ __forceinline__ void put_words(const uint32_t (&words)[16], const target<bf16> &to, int part, char *staging)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2)
        store_matrices<false>(staged(staging, lane % 16, j + lane / 16), words + 2 * j);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (has_piece(to, part, i))
            *reinterpret_cast<uint4 *>(piece_at(to, part, i)) =
                *reinterpret_cast<const uint4 *>(staged(staging, i * 4 + lane / 8, lane % 8));
    __syncwarp();
}

/* While the last wgmma group is in flight: loads the values to add to. */
__device__ __forceinline__ void prepare_add(pieces &old, const target<bf16> &to)
{
    load_pieces(old, to, 0);
}
__device__ __forceinline__ void prepare_add(pieces &, const target<float> &)
{
}

/* Destination of the sums of squares of a warp's rows, one per row and tile: row r's at at[r *
 * stride]. NULL: not requested. */
struct squares {
    double *at;
    int64_t stride;
};

/* Adds the squares of 64 columns to those of a lane's two rows: 16 of them in fp32, in which the
 * square of a bf16 is exact for magnitudes from 1e-19 to 1e18. With larger gradients the norm is
 * not finite, and the step is skipped. */
__device__ __forceinline__ void add_squares(double (&sum)[2], const uint32_t (&words)[16])
{
    float part[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 16; i++) {
        float low, high;
        unpack(words[i], low, high);
        part[i % 2] = fmaf(low, low, fmaf(high, high, part[i % 2]));
    }
    sum[0] += (double)part[0];
    sum[1] += (double)part[1];
}

/* Adds the sums of the four lanes that share a row. */
__device__ __forceinline__ void put_squares(const squares &to, double (&sum)[2], int rows)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
        sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
        if (lane % 4 == 0 && lane / 4 + half * 8 < rows)
            to.at[(lane / 4 + half * 8) * to.stride] = sum[half];
    }
}

/* bf16 results, in steps of 64 columns. ADD: the sum is rounded once. SQUARES: sums of squares may
 * be requested. */
template <result RESULT, bool SQUARES>
__device__ __forceinline__ void store_sums(const float (&c)[128], const target<bf16> &to, char *staging, pieces &old, const squares &square)
{
    double sum[2] = {0.0, 0.0};
#pragma unroll
    for (int part = 0; part < 4; part++) {
        uint32_t words[16];
        if (part * 64 >= to.columns)
            break;
        if (RESULT == ADD) {
            words_of_pieces(words, old, staging);
            if (part < 3)
                load_pieces(old, to, part + 1);
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float low, high;
                unpack(words[i], low, high);
                words[i] = pack(low + c[part * 32 + 2 * i], high + c[part * 32 + 2 * i + 1]);
            }
        } else {
            words_of_sums(words, c, part);
        }
        if (SQUARES && square.at) /* columns and rows beyond the end are zeros */
            add_squares(sum, words);
        put_words(words, to, part, staging);
    }
    if (SQUARES && square.at)
        put_squares(square, sum, to.rows);
}

/* fp32: added in the L2 cache. Each element has one addition per call, so results do not depend on
 * the order of blocks. */
template <result RESULT, bool SQUARES>
__device__ __forceinline__ void store_sums(const float (&c)[128], const target<float> &to, char *, pieces &, const squares &)
{
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < 32; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = lane / 4 + half * 8, column = j * 8 + lane % 4 * 2, i = 4 * j + 2 * half;
            float *const at = to.out + row * to.n + column;
            if (row >= to.rows || column >= to.columns)
                continue;
            if (RESULT == ADD)
                asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(c[i]), "f"(c[i + 1]) : "memory");
            else
                *reinterpret_cast<float2 *>(at) = make_float2(c[i], c[i + 1]);
        }
}

/* c = the tile's sums over its whole depth, with the wgmma group of the last step still in flight.
 * Returns the stage that it reads, or -1 for an expert without rows. */
template <form FORM, int WIDTH>
__device__ __forceinline__ int multiply_steps(float (&c)[128], shared &s, const qd_grouped_args &g, const grouped_tile &t, ring<STAGES> &r)
{
    constexpr bool x_side = FORM == EXPERTS, y_side = FORM != ROWS_TRANSPOSED;
    const uint64_t x = describe(s.stages + (threadIdx.x / WARPGROUP - 1) * BLOCK), y = describe(s.stages + X_BYTES);
    int before = -1;
    for (int source = 0; source < (FORM == EXPERTS ? g.sources : 1); source++) {
        int first;
        const int depth = depth_of<FORM == EXPERTS>(g, s.table, t.expert, source, first);
        for (int at = 0; at < depth; at += DEPTH, r.advance()) {
            barrier_wait(&s.full[r.stage], r.phase);
            if (FORM == EXPERTS && depth - at < DEPTH)
                clear_lines(s.stages + r.stage * STAGE, depth - at);
            wgmma_begin();
#pragma unroll
            for (int k = 0; k < DEPTH / 16; k++)
                multiply_16<WIDTH, x_side, y_side>(c, x + (r.stage * STAGE + k * (x_side ? 16 * LINE : 32)) / 16,
                                                   y + (r.stage * STAGE + k * (y_side ? 16 * LINE : 32)) / 16, before >= 0 || k > 0);
            wgmma_end_group();
            if (before >= 0) {
                wgmma_wait<1>();
                release(&s.empty[before]);
            }
            before = r.stage;
        }
    }
    return before;
}

/* Does not go through the sums: wgmma stays asynchronous only if no other instruction writes the
 * accumulator registers. */
template <typename T> __device__ __forceinline__ void store_zeros(const target<T> &to)
{
    constexpr int piece = 16 / sizeof(T);
    for (int row = 0; row < 16 && row < to.rows; row++)
        for (int column = threadIdx.x % 32 * piece; column < COLUMNS && column < to.columns; column += 32 * piece)
            *reinterpret_cast<uint4 *>(to.out + row * to.n + column) = make_uint4(0, 0, 0, 0);
}

/* Squares of rows that keep their values, or are zero. */
template <result RESULT> __device__ __forceinline__ void square_rows(const target<bf16> &to, const squares &square)
{
    const int lane = threadIdx.x % 32;
    for (int row = 0; row < 16 && row < to.rows && square.at; row++) {
        double sum = 0.0;
        for (int column = lane; column < COLUMNS && column < to.columns && RESULT == ADD; column += 32) {
            const double v = (double)to_float(to.out[row * to.n + column]);
            sum += v * v;
        }
        sum = warp_sum(sum);
        if (lane == 0)
            square.at[row * square.stride] = sum;
    }
}
template <result RESULT> __device__ __forceinline__ void square_rows(const target<float> &, const squares &)
{
}

template <form FORM, result RESULT, typename T>
__device__ __forceinline__ void multiply_all(shared &s, const qd_grouped_args &g)
{
    const int warp = threadIdx.x / 32 - 4, row = warp * 16;
    tiles<FORM> list(g, s.table, blockIdx.x, gridDim.x);
    grouped_tile t, next;
    ring<STAGES> r;
    for (bool more = list.next(t); more; t = next) {
        float c[128];
        const int last = is_narrow<FORM>(t) ? multiply_steps<FORM, COLUMNS / 2>(c, s, g, t, r)
                                            : multiply_steps<FORM, COLUMNS>(c, s, g, t, r);
        const int64_t n = FORM == EXPERTS ? g.k : g.n;
        T *const out = FORM == EXPERTS ? (T *)g.b + t.expert * g.n * g.k : (T *)g.c;
        const target<T> to = {out + (t.row + row) * n + t.column, n, t.rows - row, t.columns};
        squares square = {NULL, (n + COLUMNS - 1) / COLUMNS};
        if (FORM == EXPERTS && g.squares)
            square.at = g.squares + (t.expert * g.n + t.row + row) * square.stride + t.column / COLUMNS;
        pieces old;
        if (RESULT == ADD && last >= 0)
            prepare_add(old, to);
        more = list.next(next); /* while the last wgmma group runs */
        wgmma_wait<0>();
        if (FORM == EXPERTS && last < 0) { /* the expert has no rows */
            if (RESULT == STORE)
                store_zeros(to);
            square_rows<RESULT>(to, square);
            continue;
        }
        release(&s.empty[last]);
        store_sums<RESULT, FORM == EXPERTS>(c, to, s.staging[warp], old, square);
    }
}

#endif

template <form FORM, result RESULT, typename T>
__global__ __launch_bounds__(THREADS, 1) void multiply(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap y_map,
                                                        const __grid_constant__ qd_grouped_args g)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char scratch[];
    shared &s = *reinterpret_cast<shared *>(scratch + (1024 - shared_address(scratch) % 1024) % 1024);
    if (threadIdx.x < 32)
        plan_segments(g, ROWS, &s.table);
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], CONSUMER_WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FETCHER_REGISTERS));
        if (threadIdx.x == 0)
            fetch_all<FORM>(s, &x_map, &y_map, g);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        multiply_all<FORM, RESULT, T>(s, g);
    }
#else
    __trap(); /* built for another device, which qd_cuda_grouped_hopper_takes excludes */
#endif
}

/* Launching, by the host. */

template <form FORM, result RESULT, typename T> qd_status launch_form(qd_stream *stream, const qd_grouped_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    CUtensorMap x_map, y_map;
    if (FORM == EXPERTS) {
        QD_TRY(qd_cuda_tensor_map(&x_map, a->c, 0, a->rows, a->n, 64));
        QD_TRY(qd_cuda_tensor_map(&y_map, a->a, 0, a->rows, a->k, 64));
    } else {
        QD_TRY(qd_cuda_tensor_map(&x_map, a->a, 0, a->rows, a->k, 64));
        QD_TRY(FORM == ROWS_PLAIN ? qd_cuda_tensor_map(&y_map, a->b, a->experts, a->k, a->n, 64)
                                  : qd_cuda_tensor_map(&y_map, a->b, a->experts, a->n, a->k, 128));
    }
    QD_CUDA_TRY(cudaFuncSetAttribute(multiply<FORM, RESULT, T>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    multiply<FORM, RESULT, T><<<launch.multiprocessors, THREADS, SHARED_BYTES, launch.stream>>>(x_map, y_map, *a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

} // namespace

bool qd_cuda_grouped_hopper_takes(const qd_cuda_launch *launch, const qd_grouped_args *a)
{
    const bool operands = a->a_dtype == QD_BF16 && a->c_dtype == QD_BF16 && (a->by_experts || a->b_dtype == QD_BF16);
    return launch->has_wgmma && operands && !qd_grouped_is_part(a) && a->n % 8 == 0 && a->k % 8 == 0 && is_aligned(a->a) &&
           is_aligned(a->b) && is_aligned(a->c) && launch->shared_most >= SHARED_BYTES && qd_cuda_has_tensor_maps();
}

static qd_status launch_experts(qd_stream *stream, const qd_grouped_args *a)
{
    return with_type(a->b_dtype, [&](auto type) -> qd_status {
        using T = decltype(type);
        return a->accumulate ? launch_form<EXPERTS, ADD, T>(stream, a) : launch_form<EXPERTS, STORE, T>(stream, a);
    });
}

/* Squares are summed per tile, then over the tiles of a row: in an order that does not depend on
 * the blocks. */
static qd_status launch_experts_and_squares(qd_stream *stream, const qd_grouped_args *a)
{
    const int tiles_of_row = (int)divide_up(a->k, COLUMNS);
    const int64_t rows = a->experts * a->n;
    qd_grouped_args parts = *a;
    void *scratch;
    QD_TRY(qd_cuda_workspace(stream, rows * tiles_of_row * (int64_t)sizeof *a->squares, &scratch));
    parts.squares = (double *)scratch;
    QD_TRY(launch_experts(stream, &parts));
    return qd_cuda_join_squares(qd_cuda_launch_of(stream).stream, a->squares, parts.squares, rows, tiles_of_row);
}

qd_status qd_cuda_grouped_hopper(qd_stream *stream, const qd_grouped_args *a)
{
    if (a->by_experts)
        return a->squares && a->b_dtype == QD_BF16 ? launch_experts_and_squares(stream, a) : launch_experts(stream, a);
    return a->trans_b ? launch_form<ROWS_TRANSPOSED, STORE, bf16>(stream, a) : launch_form<ROWS_PLAIN, STORE, bf16>(stream, a);
}
