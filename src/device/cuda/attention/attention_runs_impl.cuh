/* Which queries attend to which keys: tiles of runs of positions, in the order in which the
 * attention kernels visit them. A tile does not cross the end of a run, so its rows are at
 * consecutive positions. */
#ifndef QD_DEVICE_CUDA_ATTENTION_ATTENTION_RUNS_IMPL_CUH
#define QD_DEVICE_CUDA_ATTENTION_ATTENTION_RUNS_IMPL_CUH

#include "device/cuda/attention/attention_impl.h"
#include "device/cuda/math_impl.cuh"

typedef qd_cuda_attention_job job;
#define NO_KEY 0x7fffffff /* greater than any position */

/* Raises the largest score of a head; scores below 0 are not noted. As integers, positive floats
 * have the same order. */
static __device__ __forceinline__ void raise_to(float *most, float score)
{
    if (score > *(volatile float *)most)
        atomicMax((int *)most, __float_as_int(score));
}

/* Consecutive rows of a part: `rows` rows starting at `row`, at positions starting at
 * `position`. */
struct span {
    int row, position, rows;
};

static __device__ __forceinline__ int smaller(int a, int b)
{
    return a < b ? a : b;
}
static __device__ __forceinline__ int larger(int a, int b)
{
    return a > b ? a : b;
}

/* Up to B rows of a run, starting at its row `at`. */
template <int B> static __device__ __forceinline__ span span_of(const qd_cuda_run &run, int at)
{
    return span{run.row + at, run.position + at, smaller(run.count - at, B)};
}

/* Tile number `tile`, counted across all runs; it must exist. */
template <int B> static __device__ __forceinline__ span tile_of(const qd_cuda_run *runs, int tile)
{
    int run = 0;
    for (int tiles; tile >= (tiles = (runs[run].count + B - 1) / B); tile -= tiles)
        run++;
    return span_of<B>(runs[run], tile * B);
}

/* Number of tiles. */
static inline int64_t tile_count(const qd_cuda_run *runs, int count, int rows)
{
    int64_t tiles = 0;
    for (int i = 0; i < count; i++)
        tiles += divide_up(runs[i].count, rows);
    return tiles;
}

/* The first position that the window of a query leaves visible; may be negative. */
static __device__ __forceinline__ int window_start(const job &a, int position)
{
    return a.window ? position - a.window + 1 : 0;
}

/* The first position that row `i` of a span of queries attends to; NO_KEY beyond its end. */
static __device__ __forceinline__ int first_key(const job &a, int64_t batch, const span &q, int i)
{
    if (i >= q.rows)
        return NO_KEY;
    const int low = larger(window_start(a, q.position + i), 0);
    return a.doc_start ? larger(a.doc_start[batch * a.q_seq + q.row + i], low) : low;
}

/* Iterates over the keys that a span of queries attends to, positions [low, end), in tiles of B. */
struct key_walk {
    int run, at;
};

static __device__ __forceinline__ bool has_keys(const job &a, key_walk w)
{
    return w.run < a.k_run_count;
}

/* This tile, or the next one that has such a key. */
template <int B> static __device__ __forceinline__ key_walk settle_keys(const job &a, int low, int end, key_walk w)
{
    while (w.run < a.k_run_count) {
        const qd_cuda_run &run = a.k_runs[w.run];
        if (w.at < run.count) /* runs are ascending: everything after this tile is later still */
            return run.position + w.at < end ? w : key_walk{a.k_run_count, 0};
        w.run++;
        w.at = has_keys(a, w) ? larger(low - a.k_runs[w.run].position, 0) / B * B : 0;
    }
    return w;
}

template <int B> static __device__ __forceinline__ key_walk first_keys(const job &a, int low, int end)
{
    if (a.k_run_count == 0)
        return key_walk{0, 0};
    return settle_keys<B>(a, low, end, key_walk{0, larger(low - a.k_runs[0].position, 0) / B * B});
}

template <int B> static __device__ __forceinline__ key_walk next_keys(const job &a, int low, int end, key_walk w)
{
    return settle_keys<B>(a, low, end, key_walk{w.run, w.at + B});
}

/* Iterates over the queries of the heads before end_head that are at or after the first key of a
 * tile, and not a window after its last, in tiles of B rows. */
struct query_walk {
    int head, run, at;
};

/* The first query of a run that may attend to the keys. */
static __device__ __forceinline__ int first_query(const job &a, const span &k, int run)
{
    return run < a.q_run_count ? larger(k.position - a.q_runs[run].position, 0) : 0;
}

/* This tile of queries, or the next one that exists. */
static __device__ __forceinline__ query_walk settle_queries(const job &a, const span &k, int end_head, query_walk w)
{
    while (w.head < end_head) {
        if (w.run >= a.q_run_count)
            w = query_walk{w.head + 1, 0, first_query(a, k, 0)};
        else if (w.at >= a.q_runs[w.run].count ||
                 (a.window && a.q_runs[w.run].position + w.at - (k.position + k.rows - 1) >= a.window))
            w = query_walk{w.head, w.run + 1, first_query(a, k, w.run + 1)};
        else
            break;
    }
    return w;
}

#endif
