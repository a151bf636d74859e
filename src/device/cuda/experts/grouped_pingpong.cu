/* Products of rows with experts on Hopper's tensor cores, for shallow depths: c's rows = a's rows ·
 * b, as grouped_hopper.cu does it too.
 *
 * There tensor cores wait while a tile's results are stored, which takes as long as one or two
 * steps of depth: 4 % of the time where depth has 32 of them. Here two warpgroups take tiles in
 * turn: while one stores its results, the tensor cores work for the other. A warpgroup then has a
 * whole tile's sums in registers, so that tiles are smaller, 128 x 176, and fetch more. Half of
 * that comes back with pairs of blocks that have y in common, of which each fetches half for both.
 * What is left makes deep products slower this way.
 *
 * x (128, depth) are columns of an expert's b, so that whole tiles of them are the rule, and y
 * (176, depth) rows of a. Results are turned in shared memory while they are stored: x runs along
 * their columns. Rows beyond an expert's last are computed and not stored.
 *
 * Since tensor cores do not wait for it, SwiGLU or its gradient is computed on the way to memory:
 * nobody reads the results again for it. What the gradient needs beside them, gate and up, the copy
 * engine brings a little ahead: registers, where loads would end, are full. */
#include "device/cuda/rowwise/activation_impl.cuh"
#include "device/cuda/experts/grouped_impl.cuh"
#include "device/cuda/experts/hopper_impl.cuh"

namespace {

enum { CONSUMERS = 2, THREADS = WARPGROUP * (1 + CONSUMERS) };
enum { FETCHER_REGISTERS = 40, CONSUMER_REGISTERS = 232 }; /* of a thread: together what the launch gives, 168 on average */
enum { PAIR = 2, X_ROWS = 128, Y_ROWS = 176, STAGES = 5 };
enum { HALVES = X_ROWS / 64, SUMS = Y_ROWS / 2 }; /* a product has 64 rows of x, and a thread SUMS of its sums */
enum { X_BYTES = X_ROWS * LINE, Y_BYTES = Y_ROWS * LINE, STAGE = X_BYTES + Y_BYTES };
enum { SLOTS = 2, SLOT_ROWS = 32, SLOT_SIDE = SLOT_ROWS * LINE }; /* a slot has 64 columns of gate, and those of up */
enum swiglu { WITHOUT, FORWARD, GRADIENT }; /* FORWARD: the first half of x are rows of the gate, the second those of up beside them */
enum { SHALLOW = 3072, TILES_OF_SEGMENT = 16 }; /* the last tile of a segment is half empty */

struct shared {
    char stages[STAGES * STAGE];
    /* 64 x 64 results of each warpgroup on their way to memory. GRADIENT: they store in turn, too,
     * at the first place; slots are at the others. */
    char staging[1 + SLOTS][64 * LINE];
    uint64_t full[STAGES], empty[STAGES], slot_full[SLOTS], slot_empty[SLOTS];
    grouped_segments table;
};
enum { SHARED_BYTES = sizeof(shared) + 1024 /* the ring begins at a multiple of 1024 */ };
static_assert(SHARED_BYTES <= 227 * 1024, "more than a block of Hopper has");

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- pairs of blocks ---- */

__device__ __forceinline__ int rank_in_pair()
{
    int rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

/* All threads of both. */
__device__ __forceinline__ void pair_sync()
{
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

/* Earlier toolkits know only an arrival that is a fence for all of memory, too: slower. */
#if __CUDACC_VER_MAJOR__ > 12 || (__CUDACC_VER_MAJOR__ == 12 && __CUDACC_VER_MINOR__ >= 8)
#define ARRIVE "mbarrier.arrive.relaxed.cluster.shared::cluster.b64"
#else
#define ARRIVE "mbarrier.arrive.shared::cluster.b64"
#endif

/* At the barrier that stands in the same place in one of the two. Nothing was written that the
 * other would have to see: what it fetches next comes where products have read, and those have
 * ended. */
__device__ __forceinline__ void barrier_arrive_in(uint64_t *barrier, int rank)
{
    asm volatile("{\n.reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n" ARRIVE " _, [there];\n}" ::"r"(shared_address(barrier)),
                 "r"(rank)
                 : "memory");
}

/* To the same place in both, and told to the barriers of both. */
__device__ __forceinline__ void copy_box_to_both(void *to, const CUtensorMap *map, uint64_t *barrier, int x, int y)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "h"((uint16_t)((1 << PAIR) - 1))
                 : "memory");
}

/* ---- tiles: of a pair, the second block has the columns behind those of the first ---- */

typedef grouped_tiles<false, Y_ROWS, PAIR * X_ROWS> tiles;

/* ---- fetching ---- */

/* The first of the columns that a block has of a tile; of gate and up with FORWARD. */
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

/* Slots that the block's part of a tile takes. For each 64 rows they are those of its first 64
 * columns, then those of the others. */
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

/* ---- multiplying ---- */

/* c (64, 176) = [c +] x (64, 16) · y (176, 16)ᵀ by the warpgroup. A lane has, of rows lane / 4 and
 * lane / 4 + 8 of its warp's 16, columns 8 j + lane % 4 * 2 and the next: c[4 j], c[4 j + 1], and
 * c[4 j + 2], c[4 j + 3]. X_SIDE: lines of x run along its side. */
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

/* Barriers of warpgroups by number, one for each: its turn to multiply, and to store, has come; its
 * threads have come so far. */
enum { MULTIPLY = 1, STORE = MULTIPLY + CONSUMERS, TOGETHER = STORE + CONSUMERS };

/* A stage has steps of both warpgroups' tiles, and whether it is full is told by the parity of a
 * count: a warpgroup that looked before the other has seen its last step would take an earlier step
 * for its own. So it is with slots. */
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

/* Each warp says when it has read a stage, to both blocks: both fetch what comes there next. */
__device__ __forceinline__ void release(uint64_t *empty)
{
    if (threadIdx.x % 32 < PAIR)
        barrier_arrive_in(empty, threadIdx.x % 32);
}

/* c = the tile's sums over all of its depth, but for the products of the last step, which are under
 * way: returns the stage that they read. */
template <bool TRANSPOSED>
__device__ __forceinline__ int multiply_steps(float (&c)[HALVES][SUMS], shared &s, const qd_grouped_args &g, ring<STAGES> &r)
{
    constexpr bool x_side = !TRANSPOSED;
    const uint32_t x = describe_lower(s.stages), y = describe_lower(s.stages + X_BYTES);
    int before = -1;
    for (int at = 0; at < (int)g.k; at += DEPTH, r.advance()) {
        barrier_wait(&s.full[r.stage], r.phase);
        const uint32_t stage = __shfl_sync(ALL_LANES, r.stage * (STAGE / 16), 0); /* known to be the same in all lanes */
        products_begin();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                multiply_16<x_side>(c[half], x + stage + (half * BLOCK + k * (x_side ? 16 * LINE : 32)) / 16, y + stage + k * 32 / 16,
                                    before >= 0 || k > 0);
        products_end_group();
        if (before >= 0) {
            products_wait<1>();
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

__device__ __forceinline__ uint4 active_of(const uint4 &gate, const uint4 &up)
{
    float x[VECTOR], y[VECTOR], slope;
    load_piece(gate, x);
    load_piece(up, y);
#pragma unroll
    for (int i = 0; i < VECTOR; i++)
        x[i] = silu_for_bf16(x[i], slope) * y[i];
    return make_piece(x);
}

/* gate and up become their gradients, d what is active. */
__device__ __forceinline__ void turn_to_gradients(uint4 &gate, uint4 &up, uint4 &d)
{
    float x[VECTOR], y[VECTOR], z[VECTOR];
    load_piece(gate, x);
    load_piece(up, y);
    load_piece(d, z);
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        float slope, value = silu_for_bf16(x[i], slope), again = value * y[i];
        x[i] = z[i] * y[i] * slope;
        y[i] = z[i] * value;
        z[i] = again;
    }
    gate = make_piece(x);
    up = make_piece(y);
    d = make_piece(z);
}

/* Of staged results or of a slot, the thread's piece of the 16 rows of the warpgroup that begin
 * there. */
__device__ __forceinline__ uint4 staged_piece(char *staging, int row)
{
    return *reinterpret_cast<const uint4 *>(staged(staging, row + threadIdx.x % WARPGROUP / 8, threadIdx.x % 8));
}

__device__ __forceinline__ void store_gradients(const qd_grouped_args &g, uint4 d, uint4 gate, uint4 up, int64_t row, int column)
{
    turn_to_gradients(gate, up, d);
    piece_at(g.d_gate_up, 2 * g.n, row, column) = gate;
    piece_at(g.d_gate_up, 2 * g.n, row, g.n + column) = up;
    if (g.active)
        piece_at(g.active, g.n, row, column) = d;
}

/* The block's part of a tile, 64 x 64 at a time, by the warpgroup. */
template <swiglu SWIGLU>
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
                    store_gradients(g, piece, staged_piece(slot, in_slot), staged_piece(slot + SLOT_SIDE, in_slot), row, column);
                } else if (SWIGLU == FORWARD && counts) {
                    piece_at(g.c, g.n, row, half * (g.n / 2) + column) = piece;
                    if (half == 1)
                        piece_at(g.active, g.n / 2, row, column) = active_of(gates[i], piece);
                    gates[i] = piece;
                } else if (SWIGLU == WITHOUT && counts) {
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

template <bool TRANSPOSED, swiglu SWIGLU> __device__ __forceinline__ void multiply_all(shared &s, const qd_grouped_args &g, int rank)
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
        products_wait<0>();
        release(&s.empty[last]);
        if (SWIGLU == GRADIENT && number > 0)
            await_turn(STORE, warpgroup);
        store_turned<SWIGLU>(c, s, g, t, rank, slots);
        if (SWIGLU == GRADIENT && list.has_more())
            pass_turn(STORE, warpgroup);
    }
}

#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define IN_PAIRS /* there are none */
#else
#define IN_PAIRS __cluster_dims__(PAIR)
#endif

template <bool TRANSPOSED, swiglu SWIGLU>
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
            barrier_init(&s.empty[i], PAIR * WARPGROUP / 32); /* of both blocks, the warpgroup that has the tile */
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
        multiply_all<TRANSPOSED, SWIGLU>(s, g, rank);
    }
    pair_sync(); /* what the other block sends comes to memory that is still there */
#else
    __trap(); /* built for another device: qd_cuda_grouped_hopper_takes said no */
#endif
}

template <bool TRANSPOSED, swiglu SWIGLU> qd_status launch_turns(qd_stream *stream, const qd_grouped_args *a)
{
    const qd_cuda_launch launch = qd_cuda_launch_of(stream);
    CUtensorMap x_map, y_map, gate_up_map = {};
    QD_TRY(TRANSPOSED ? qd_cuda_tensor_map(&x_map, a->b, a->experts, a->n, a->k, SWIGLU == FORWARD ? X_ROWS / 2 : (int)X_ROWS)
                      : qd_cuda_tensor_map(&x_map, a->b, a->experts, a->k, a->n, 64));
    QD_TRY(qd_cuda_tensor_map(&y_map, a->a, 0, a->rows, a->k, Y_ROWS / PAIR));
    if (SWIGLU == GRADIENT)
        QD_TRY(qd_cuda_tensor_map(&gate_up_map, a->gate_up, 0, a->rows, 2 * a->n, SLOT_ROWS));
    QD_CUDA_TRY(cudaFuncSetAttribute(multiply<TRANSPOSED, SWIGLU>, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    const int blocks = launch.multiprocessors / PAIR * PAIR;
    multiply<TRANSPOSED, SWIGLU><<<blocks, THREADS, SHARED_BYTES, launch.stream>>>(x_map, y_map, gate_up_map, *a);
    QD_CUDA_LAUNCHED();
    return QD_OK;
}

} // namespace

static bool suits_swiglu(const qd_grouped_args *a)
{
    if (a->gate_up)
        return !a->trans_b && is_aligned(a->gate_up) && is_aligned(a->d_gate_up) && is_aligned(a->active);
    return !a->active || (a->trans_b && a->n % (2 * VECTOR) == 0 && is_aligned(a->active));
}

bool qd_cuda_grouped_turns_suits(const qd_cuda_launch *launch, const qd_grouped_args *a)
{
    return !a->by_experts && a->k <= SHALLOW && a->rows >= (int64_t)TILES_OF_SEGMENT * Y_ROWS * a->sources * a->experts &&
           launch->multiprocessors >= PAIR && launch->shared_most >= SHARED_BYTES && suits_swiglu(a);
}

qd_status qd_cuda_grouped_turns(qd_stream *stream, const qd_grouped_args *a)
{
    if (a->gate_up)
        return launch_turns<false, GRADIENT>(stream, a);
    if (a->active)
        return launch_turns<true, FORWARD>(stream, a);
    return a->trans_b ? launch_turns<true, WITHOUT>(stream, a) : launch_turns<false, WITHOUT>(stream, a);
}
