/* Grouped GEMM by rows on Hopper's tensor cores with ping-pong warpgroups, for small depths: c's
 * rows = a's rows · b, which grouped_hopper.cu computes too.
 *
 * There, tensor cores wait while a tile's results are stored, for as long as one or two steps of
 * depth take: 4 % of the time at 32 steps. Here two warpgroups compute tiles alternately: while one
 * stores its results, the tensor cores work for the other. Each warpgroup has the sums of a whole
 * tile in registers, so tiles are smaller, 128 x 176, and need more memory traffic. Half of the
 * increase is avoided by pairs of blocks that share y: each fetches half of it for both
 * (multicast). The remaining traffic makes this kernel slower at large depths.
 *
 * x (128, depth) are columns of an expert's b, so that most tiles are full, and y (176, depth) are
 * rows of a. Results are transposed in shared memory while they are stored: x runs along their
 * columns. Rows beyond an expert's last are computed but not stored.
 *
 * A bias, SwiGLU or its gradient is computed while results are stored: tensor cores do not wait for
 * it, and no other kernel reads the results again. The gradient also needs gate and up; TMA fetches
 * them shortly before, because no registers are left for loads. */
#include "device/cuda/rowwise/activation_impl.cuh"
#include "device/cuda/experts/grouped_impl.cuh"
#include "device/cuda/experts/hopper_impl.cuh"

namespace {

enum { CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS) };
enum { FETCHER_REGISTERS = 40, CONSUMER_REGISTERS = 232 }; /* per thread; on average the launch's 168 */
enum { PAIR = 2, X_ROWS = 128, Y_ROWS = 176, STAGES = 5 };
enum { HALVES = X_ROWS / 64, SUMS = Y_ROWS / 2 }; /* one wgmma has 64 rows of x, and a thread SUMS of its sums */
enum { X_BYTES = X_ROWS * LINE, Y_BYTES = Y_ROWS * LINE, STAGE = X_BYTES + Y_BYTES };
enum { SLOTS = 2, SLOT_ROWS = 32, SLOT_SIDE = SLOT_ROWS * LINE }; /* a slot has 64 columns of gate, and those of up */
enum swiglu { WITHOUT, FORWARD, GRADIENT }; /* FORWARD: the first half of x are rows of gate, the second half the matching rows of up */
enum { SHALLOW = 3072, TILES_OF_SEGMENT = 16 }; /* the last tile of a segment is half empty on average */
/* At less depth the gradient of SwiGLU takes longer than the other warpgroup's GEMM, and a pass of
 * its own is faster. */
enum { GRADIENT_DEPTH = 1536 };

struct shared {
    char stages[STAGES * STAGE];
    /* Staging of 64 x 64 results per warpgroup. GRADIENT: warpgroups also store alternately,
     * through the first buffer; slots use the others. */
    char staging[1 + SLOTS][64 * LINE];
    uint64_t full[STAGES], empty[STAGES], slot_full[SLOTS], slot_empty[SLOTS];
    grouped_segments table;
};
enum { SHARED_BYTES = sizeof(shared) + 1024 /* the ring is aligned to 1024 bytes */ };
static_assert(SHARED_BYTES <= 227 * 1024, "exceeds the shared memory of a block on Hopper");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Pairs of blocks. */

__device__ __forceinline__ int rank_in_pair()
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* Barrier of all threads of both blocks. */
__device__ __forceinline__ void pair_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* Earlier toolkits have only an arrival that is also a fence for all of memory, which is slower. */
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
#define ARRIVE "mbarrier.arrive.relaxed.cluster.shared::cluster.b64"
#else
#define ARRIVE "mbarrier.arrive.shared::cluster.b64"
#endif

/* Arrives at the same barrier in one of the two blocks. Nothing was written that the other would
 * have to see: its next fetch overwrites what wgmma has read, and that has completed. */
__device__ __forceinline__ void barrier_arrive_in(uint64_t *barrier, int rank)
{
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n" ARRIVE " _, [there];\n}" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

/* Copies to the same address in both blocks and signals the barriers of both. */
__device__ __forceinline__ void copy_box_to_both(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"((uint16_t)((1 << PAIR) - 1))
                 : "memory");
}

/* Tiles: the second block of a pair has the columns after those of the first. */

typedef grouped_tiles<false, Y_ROWS, PAIR * X_ROWS> tiles;

/* Fetching, by one thread. */

/* The block's first column of a tile; with FORWARD, of gate and of up. */
template <swiglu SWIGLU> __device__ __forceinline__ int first_column(const grouped_tile &t, int rank)
{
    return SWIGLU == FORWARD ? t.column / 2 + rank * (X_ROWS / 2) : t.column + rank * X_ROWS;
}

template <bool TRANSPOSED, swiglu SWIGLU>
__device__ __forceinline__ void fetch_step(char *stage, uint64_t *full, const CUtensorMap *x_map, const CUtensorMap *y_map,
                                           const grouped_tile &t, int rank, int depth, int inner)
{
    const int column = first_column<SWIGLU>(t, rank);
    copy_box_to_both(stage + X_BYTES + rank * (Y_BYTES / PAIR), y_map, full, depth, t.row + rank * (Y_ROWS / PAIR));
    if (TRANSPOSED && SWIGLU == FORWARD) {
        copy_box(stage, x_map, full, depth, column, t.expert);
        copy_box(stage + BLOCK, x_map, full, depth, inner + column, t.expert);
    } else if (TRANSPOSED) {
        copy_box(stage, x_map, full, depth, column, t.expert);
    } else {
        copy_box(stage, x_map, full, column, depth, t.expert);
        copy_box(stage + BLOCK, x_map, full, column + 64, depth, t.expert);
    }
}

template <bool TRANSPOSED, swiglu SWIGLU>
__device__ __forceinline__ void fetch_all(shared &s, const CUtensorMap *x_map, const CUtensorMap *y_map, const qd_grouped_args &g, int rank)
{
    tiles list(g, s.table, blockIdx.x / PAIR, gridDim.x / PAIR);
    grouped_tile t;
    ring<STAGES> r;
    while (list.next(t))
        for (int at = 0; at < (int)g.k; at += DEPTH, r.advance()) {
            barrier_wait(&s.empty[r.stage], r.phase ^ 1);
            barrier_expect(&s.full[r.stage], STAGE);
            fetch_step<TRANSPOSED, SWIGLU>(s.stages + r.stage * STAGE, &s.full[r.stage], x_map, y_map, t, rank, at, (int)g.n / 2);
        }
}

/* Slots that the block's part of a tile needs. For each 64 rows: those of its first 64 columns,
 * then those of the others. */
__device__ __forceinline__ int slots_of(const grouped_tile &t, int rank)
{
    return first_column<GRADIENT>(t, rank) < t.column + t.columns ? HALVES * ((t.rows + SLOT_ROWS - 1) / SLOT_ROWS) : 0;
}

__device__ __forceinline__ void fetch_gate_up(shared &s, const CUtensorMap *map, const qd_grouped_args &g, int rank)
{
    tiles list(g, s.table, blockIdx.x / PAIR, gridDim.x / PAIR);
    grouped_tile t;
    ring<SLOTS> r;
    while (list.next(t)) {
        const int slots = slots_of(t, rank);
        for (int part = 0, done = 0; done < slots; part += 64)
            for (int column = first_column<GRADIENT>(t, rank), half = 0; half < HALVES; half++, column += 64)
                for (int below = part; below < part + 64 && below < t.rows; below += SLOT_ROWS, r.advance(), done++) {
                    char *slot = s.staging[1 + r.stage];
                    barrier_wait(&s.slot_empty[r.stage], r.phase ^ 1);
                    barrier_expect(&s.slot_full[r.stage], 2 * SLOT_SIDE);
                    copy_box(slot, map, &s.slot_full[r.stage], column, t.row + below);
                    copy_box(slot + SLOT_SIDE, map, &s.slot_full[r.stage], (int)g.n + column, t.row + below);
                }
    }
}

/* Multiplying, by the consumer warpgroups. */

/* c (64, 176) = [c +] x (64, 16) · y (176, 16)ᵀ by the warpgroup. Of rows lane / 4 and lane / 4 + 8
 * of its warp's 16, a lane has columns 8 j + lane % 4 * 2 and the next: c[4 j], c[4 j + 1], and c[4
 * j + 2], c[4 j + 3]. X_SIDE: lines of x run along its side. */
template <bool X_SIDE> __device__ __forceinline__ void multiply_16(float (&c)[SUMS], uint32_t x, uint32_t y, bool add)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %90, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87}, "
                 "%88, %89, p, 1, 1, %91, 0;\n}"
                 : SUMS_16(0), SUMS_16(16), SUMS_16(32), SUMS_16(48), SUMS_16(64), SUMS_4(80), SUMS_4(84)
                 : "l"(description(x)), "l"(description(y)), "r"((int)add), "n"(X_SIDE ? 1 : 0));
}

/* Named barriers, one per warpgroup: its turn to multiply, its turn to store, and a barrier of its
 * own threads. */
enum { MULTIPLY = 1, STORE = MULTIPLY + CONSUMERS, TOGETHER = STORE + CONSUMERS };

/* A stage holds steps of both warpgroups' tiles, and whether it is full is known only by the parity
 * of a count: a warpgroup that waited before the other has seen its last step would take an earlier
 * step for its own. The same holds for slots. */
__device__ __forceinline__ void await_turn(int turn, int warpgroup)
{
    asm volatile("bar.sync %0, %1;" ::"r"(turn + warpgroup), "n"(CONSUMERS * WARPGROUP) : "memory");
}
__device__ __forceinline__ void pass_turn(int turn, int warpgroup)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(turn + 1 - warpgroup), "n"(CONSUMERS * WARPGROUP) : "memory");
}

__device__ __forceinline__ void warpgroup_sync()
{
    asm volatile("bar.sync %0, %1;" ::"r"(TOGETHER + threadIdx.x / WARPGROUP - 1), "n"((int)WARPGROUP) : "memory");
}

/* Each warp signals to both blocks that it has read a stage: both fetch what comes there next. */
__device__ __forceinline__ void release(uint64_t *empty)
{
    if (threadIdx.x % 32 < PAIR)
        barrier_arrive_in(empty, threadIdx.x % 32);
}

/* c = the tile's sums over its whole depth, with the wgmma group of the last step still in flight.
 * Returns the stage that it reads. */
template <bool TRANSPOSED>
__device__ __forceinline__ int multiply_steps(float (&c)[HALVES][SUMS], shared &s, const qd_grouped_args &g, ring<STAGES> &r)
{
    constexpr bool x_side = !TRANSPOSED;
    const uint32_t x = describe_lower(s.stages), y = describe_lower(s.stages + X_BYTES);
    int before = -1;
    for (int at = 0; at < (int)g.k; at += DEPTH, r.advance()) {
        barrier_wait(&s.full[r.stage], r.phase);
        const uint32_t stage = __shfl_sync(ALL_LANES, r.stage * (STAGE / 16), 0); /* makes it warp-uniform for the compiler */
        wgmma_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                multiply_16<x_side>(c[half], x + stage + (half * BLOCK + k * (x_side ? 16 * LINE : 32)) / 16, y + stage + k * 32 / 16,
                                    before >= 0 || k > 0);
        wgmma_end_group();
        if (before >= 0) {
            wgmma_wait<1>();
            release(&s.empty[before]);
        }
        before = r.stage;
    }
    return before;
}

/* Eight columns of a row. */
__device__ __forceinline__ uint4 &piece_at(void *table, int64_t cols, int64_t row, int64_t column)
{
    return *reinterpret_cast<uint4 *>((bf16 *)table + row * cols + column);
}

__device__ __forceinline__ void load_piece(const uint4 &piece, float (&v)[VECTOR])
{
    unpack(piece.x, v[0], v[1]), unpack(piece.y, v[2], v[3]), unpack(piece.z, v[4], v[5]), unpack(piece.w, v[6], v[7]);
}

__device__ __forceinline__ uint4 make_piece(const float (&v)[VECTOR])
{
    return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

/* Both are bf16 numbers; the sum is rounded again. */
__device__ __forceinline__ uint32_t sum_of_pairs(uint32_t x, uint32_t y)
{
    float low, high, more_low, more_high;
    unpack(x, low, high);
    unpack(y, more_low, more_high);
    return pack(low + more_low, high + more_high);
}

/* The bias of a piece of an expert's row is added. It is loaded each time: registers are scarce,
 * and it stays in the L1 cache. */
__device__ __forceinline__ void add_bias(uint4 &piece, const qd_grouped_args &g, int expert, int64_t column)
{
    const uint4 bias = __ldg(reinterpret_cast<const uint4 *>((const bf16 *)g.bias + expert * g.n + column));
    piece = make_uint4(sum_of_pairs(piece.x, bias.x), sum_of_pairs(piece.y, bias.y), sum_of_pairs(piece.z, bias.z),
                       sum_of_pairs(piece.w, bias.w));
}

/* The function of a gate, and its slope. */
template <bool CLAMPED> __device__ __forceinline__ float gate_factor(const qd_grouped_args &g, float x, float &slope)
{
    if constexpr (CLAMPED)
        return limit_gate(x, g.limit, slope, [&](float gate, float &d) { return silu_for_bf16(gate, d, g.alpha); });
    else
        return silu_for_bf16(x, slope);
}

template <bool CLAMPED> __device__ __forceinline__ float up_factor(const qd_grouped_args &g, float x, float &slope)
{
    slope = 1.0f;
    return CLAMPED ? limit_up(x, g.limit, slope) : x;
}

template <bool CLAMPED> __device__ __forceinline__ uint4 active_of(const qd_grouped_args &g, const uint4 &gate, const uint4 &up)
{
    float x[VECTOR], y[VECTOR], slope;
    load_piece(gate, x);
    load_piece(up, y);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        x[i] = gate_factor<CLAMPED>(g, x[i], slope) * up_factor<CLAMPED>(g, y[i], slope);
    return make_piece(x);
}

/* gate and up become their gradients, d (the gradient of active) becomes active. */
template <bool CLAMPED> __device__ __forceinline__ void turn_to_gradients(const qd_grouped_args &g, uint4 &gate, uint4 &up, uint4 &d)
{
    float x[VECTOR], y[VECTOR], z[VECTOR];
    load_piece(gate, x);
    load_piece(up, y);
    load_piece(d, z);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float slope, up_slope, value = gate_factor<CLAMPED>(g, x[i], slope), factor = up_factor<CLAMPED>(g, y[i], up_slope);
        float again = value * factor;
        x[i] = z[i] * factor * slope;
        y[i] = z[i] * value * up_slope;
        z[i] = again;
    }
    gate = make_piece(x);
    up = make_piece(y);
    d = make_piece(z);
}

/* The thread's piece of the warpgroup's 16 rows that start at `row`, of staged results or of a
 * slot. */
__device__ __forceinline__ uint4 staged_piece(char *staging, int row)
{
    return *reinterpret_cast<const uint4 *>(staged(staging, row + threadIdx.x % WARPGROUP / 8, threadIdx.x % 8));
}

template <bool CLAMPED>
__device__ __forceinline__ void store_gradients(const qd_grouped_args &g, uint4 d, uint4 gate, uint4 up, int64_t row, int column)
{
    turn_to_gradients<CLAMPED>(g, gate, up, d);
    piece_at(g.d_gate_up, 2 * g.n, row, column) = gate;
    piece_at(g.d_gate_up, 2 * g.n, row, g.n + column) = up;
    if (g.active)
        piece_at(g.active, g.n, row, column) = d;
}

/* Stores the block's part of a tile, 64 x 64 per step, by the warpgroup. */
template <swiglu SWIGLU, bool CLAMPED>
__device__ __forceinline__ void store_turned(const float (&c)[HALVES][SUMS], shared &s, const qd_grouped_args &g, const grouped_tile &t,
                                             int rank, ring<SLOTS> &slots)
{
    const int thread = threadIdx.x % WARPGROUP, warp = thread / 32, lane = thread % 32;
    const int first = first_column<SWIGLU>(t, rank), end = SWIGLU == FORWARD ? (t.column + t.columns) / 2 : t.column + t.columns;
    char *staging = s.staging[SWIGLU == GRADIENT ? 0 : threadIdx.x / WARPGROUP - 1];
    if (first >= end)
        return;
#pragma unroll
    for (int part = 0; part < Y_ROWS; part += 64) {
        uint4 gates[4];
        if (part >= t.rows)
            break;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int column = first + (SWIGLU == FORWARD ? 0 : half * 64) + thread % 8 * 8;
            uint32_t words[16];
            words_of_sums(words, c[half], part / 64);
#pragma unroll
            for (int i = 0; i < 4 && part + i * 16 < Y_ROWS; i++) /* a warp has 16 columns, two pieces of each row */
                store_matrices<true>(staged(staging, i * 16 + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2), words + i * 4);
            warpgroup_sync();
#pragma unroll
            for (int i = 0; i < 4 && part + i * 16 < Y_ROWS; i++) {
                const int below = part + i * 16 + thread / 8, in_slot = i * 16 % SLOT_ROWS;
                const bool counts = below < t.rows && column < end, has_slot = SWIGLU == GRADIENT && part + i * 16 - in_slot < t.rows;
                const int64_t row = t.row + below;
                char *slot = s.staging[1 + slots.stage];
                uint4 piece = staged_piece(staging, i * 16);
                if (has_slot && in_slot == 0)
                    barrier_wait(&s.slot_full[slots.stage], slots.phase);
                if (SWIGLU == GRADIENT && counts) {
                    store_gradients<CLAMPED>(g, piece, staged_piece(slot, in_slot), staged_piece(slot + SLOT_SIDE, in_slot), row, column);
                } else if (SWIGLU == FORWARD && counts) {
                    if (CLAMPED && g.bias)
                        add_bias(piece, g, t.expert, half * (g.n / 2) + column);
                    piece_at(g.c, g.n, row, half * (g.n / 2) + column) = piece;
                    if (half == 1)
                        piece_at(g.active, g.n / 2, row, column) = active_of<CLAMPED>(g, gates[i], piece);
                    gates[i] = piece;
                } else if (SWIGLU == WITHOUT && counts) {
                    if (g.bias)
                        add_bias(piece, g, t.expert, column);
                    piece_at(g.c, g.n, row, column) = piece;
                }
                if (has_slot && (in_slot + 16 == SLOT_ROWS || part + i * 16 + 16 >= Y_ROWS)) {
                    __syncwarp();
                    if (lane == 0)
                        barrier_arrive(&s.slot_empty[slots.stage]);
                    slots.advance();
                }
            }
            warpgroup_sync();
        }
    }
}

template <bool TRANSPOSED, swiglu SWIGLU, bool CLAMPED>
__device__ __forceinline__ void multiply_all(shared &s, const qd_grouped_args &g, int rank)
{
    const int warpgroup = threadIdx.x / WARPGROUP - 1;
    tiles list(g, s.table, blockIdx.x / PAIR, gridDim.x / PAIR);
    grouped_tile t;
    ring<STAGES> r;
    ring<SLOTS> slots;
    for (int number = 0; list.next(t); number++) {
        if (number % CONSUMERS != warpgroup) {
            r.skip(((int)g.k + DEPTH - 1) / DEPTH);
            if (SWIGLU == GRADIENT)
                slots.skip(slots_of(t, rank));
            continue;
        }
        float c[HALVES][SUMS];
        if (number > 0)
            await_turn(MULTIPLY, warpgroup);
        const int last = multiply_steps<TRANSPOSED>(c, s, g, r);
        if (list.has_more())
            pass_turn(MULTIPLY, warpgroup);
        wgmma_wait<0>();
        release(&s.empty[last]);
        if (SWIGLU == GRADIENT && number > 0)
            await_turn(STORE, warpgroup);
        store_turned<SWIGLU, CLAMPED>(c, s, g, t, rank, slots);
        if (SWIGLU == GRADIENT && list.has_more())
            pass_turn(STORE, warpgroup);
    }
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define IN_PAIRS /* no clusters before sm_90 */
#else
#define IN_PAIRS __cluster_dims__(PAIR)
#endif

template <bool TRANSPOSED, swiglu SWIGLU, bool CLAMPED>
__global__ __launch_bounds__(THREADS, 1) IN_PAIRS void multiply(const __grid_constant__ CUtensorMap x_map,
                                                                const __grid_constant__ CUtensorMap y_map,
                                                                const __grid_constant__ CUtensorMap gate_up_map,
                                                                const __grid_constant__ qd_grouped_args g)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ char room[];
    shared &s = *reinterpret_cast<shared *>(room + (1024 - shared_address(room) % 1024) % 1024);
    if (threadIdx.x < 32)
        plan_segments(g, Y_ROWS, &s.table);
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], PAIR * WARPGROUP / 32); /* in both blocks, the warpgroup that has the tile */
        }
        for (int i = 0; i < SLOTS; i++) {
            barrier_init(&s.slot_full[i], 1);
            barrier_init(&s.slot_empty[i], WARPGROUP / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    const int rank = rank_in_pair();
    __syncthreads();
    pair_sync();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"((int)FETCHER_REGISTERS));
        if (threadIdx.x == 0)
            fetch_all<TRANSPOSED, SWIGLU>(s, &x_map, &y_map, g, rank);
        if (SWIGLU == GRADIENT && threadIdx.x == 32)
            fetch_gate_up(s, &gate_up_map, g, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"((int)CONSUMER_REGISTERS));
        multiply_all<TRANSPOSED, SWIGLU, CLAMPED>(s, g, rank);
    }
    pair_sync(); /* a block must not exit while the other may still write to its shared memory */
#else
    __trap(); /* built for another device, which qd_cuda_grouped_hopper_takes excludes */
#endif
}

template <bool TRANSPOSED, swiglu SWIGLU, bool CLAMPED> qd_status launch_pingpong(qd_stream *stream, const qd_grouped_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    CUtensorMap x_map, y_map, gate_up_map = {};
    QD_TRY(TRANSPOSED ? qd_cuda_tensor_map(&x_map, a->b, a->experts, a->n, a->k, SWIGLU == FORWARD ? X_ROWS / 2 : (int)X_ROWS)
                      : qd_cuda_tensor_map(&x_map, a->b, a->experts, a->k, a->n, 64));
    QD_TRY(qd_cuda_tensor_map(&y_map, a->a, 0, a->rows, a->k, Y_ROWS / PAIR));
    if (SWIGLU == GRADIENT)
        QD_TRY(qd_cuda_tensor_map(&gate_up_map, a->gate_up, 0, a->rows, 2 * a->n, SLOT_ROWS));
    QD_CUDA_TRY(cudaFuncSetAttribute(multiply<TRANSPOSED, SWIGLU, CLAMPED>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    const int blocks = launch.multiprocessors / PAIR * PAIR;
    multiply<TRANSPOSED, SWIGLU, CLAMPED><<<blocks, THREADS, SHARED_BYTES, launch.stream>>>(x_map, y_map, gate_up_map, *a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

} // namespace

/* With SwiGLU, biases are added by the instance for clamped ones only: registers of the other are
 * exhausted. */
static bool suits_bias(const qd_grouped_args *a)
{
    if (a->bias && a->active && !(a->limit > 0.0f))
        return false;
    return !a->bias || (a->bias_dtype == QD_BF16 && is_aligned(a->bias));
}

static bool suits_swiglu(const qd_grouped_args *a)
{
    if (a->gate_up)
        return !a->trans_b && a->k >= GRADIENT_DEPTH && is_aligned(a->gate_up) && is_aligned(a->d_gate_up) && is_aligned(a->active);
    return !a->active || (a->trans_b && a->n % (2 * VECTOR) == 0 && is_aligned(a->active));
}

bool qd_cuda_grouped_pingpong_suits(const qd_cuda_launch *launch, const qd_grouped_args *a)
{
    return !a->by_experts && a->k <= SHALLOW && a->rows >= (int64_t)TILES_OF_SEGMENT * Y_ROWS * a->sources * a->experts &&
           launch->multiprocessors >= PAIR && launch->shared_most >= SHARED_BYTES && suits_swiglu(a) && suits_bias(a);
}

qd_status qd_cuda_grouped_pingpong(qd_stream *stream, const qd_grouped_args *a)
{
    if (a->gate_up)
        return a->limit > 0.0f ? launch_pingpong<false, GRADIENT, true>(stream, a) : launch_pingpong<false, GRADIENT, false>(stream, a);
    if (a->active)
        return a->limit > 0.0f ? launch_pingpong<true, FORWARD, true>(stream, a) : launch_pingpong<true, FORWARD, false>(stream, a);
    return a->trans_b ? launch_pingpong<true, WITHOUT, false>(stream, a) : launch_pingpong<false, WITHOUT, false>(stream, a);
}
