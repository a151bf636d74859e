/* Products over experts: what the kernels of grouped.cu and grouped_hopper.cu share.
 *
 * How many rows an expert has stands in device memory, and the host does not wait for it: every block reads the counts, and
 * blocks go through the list of tiles that follows from them in strides of the grid. */
#ifndef QD_DEVICE_CUDA_GROUPED_IMPL_CUH
#define QD_DEVICE_CUDA_GROUPED_IMPL_CUH

#include "device/cuda/grouped_impl.h"
#include "device/cuda/tensor_impl.cuh"

/* Segment i holds the rows that source i / experts has for expert i % experts: of those at hand, [row[i], row[i + 1]).
 * tile[i] is the number of tiles of `height` rows before it; tile[segments] is their number in all. */
typedef struct grouped_segments {
    int32_t row[QD_GROUPED_SEGMENTS + 1], tile[QD_GROUPED_SEGMENTS + 1];
} grouped_segments;

template <typename V> static __device__ __forceinline__ V sum_before(V x, int lane)
{
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        V other = __shfl_up_sync(0xffffffffu, x, step);
        x += lane >= step ? other : V(0);
    }
    return x;
}

static __device__ __forceinline__ int32_t row_at_hand(const qd_grouped_args &g, int64_t number)
{
    int64_t row = number - g.begin;
    return (int32_t)(row < 0 ? 0 : row > g.rows ? g.rows : row);
}

/* By the block's first warp; a barrier makes the table visible to the others. */
static __device__ __forceinline__ void plan_segments(const qd_grouped_args &g, int height, grouped_segments *table)
{
    const int segments = g.sources * g.experts, lane = threadIdx.x % 32;
    int64_t at = 0;
    int32_t tiles = 0;
    for (int base = 0; base < segments; base += 32) {
        const int i = base + lane;
        const int64_t count = i < segments ? g.counts[i / g.experts * g.count_stride + i % g.experts] : 0;
        const int64_t end = sum_before(count, lane) + at;
        const int32_t first = row_at_hand(g, end - count), last = row_at_hand(g, end);
        const int32_t here = (last - first + height - 1) / height, tiles_end = sum_before(here, lane) + tiles;
        if (i < segments) {
            table->row[i] = first;
            table->tile[i] = tiles_end - here;
        }
        if (i == segments - 1) {
            table->row[segments] = last;
            table->tile[segments] = tiles_end;
        }
        at = __shfl_sync(0xffffffffu, end, 31);
        tiles = __shfl_sync(0xffffffffu, tiles_end, 31);
    }
}

/* A tile of an expert's product: rows and columns are counted in tiles. */
typedef struct grouped_tile {
    int row, column;
} grouped_tile;

/* Tile `i` of rows x columns tiles. Neighbours in time share operands: bands of at most `most` rows, as equal as can be, and in
 * a band column by column. */
static __device__ __forceinline__ grouped_tile tile_at(int i, int rows, int columns, int most)
{
    const int bands = (rows + most - 1) / most, band = (rows + bands - 1) / bands;
    const int before = i / (band * columns) * band, height = rows - before < band ? rows - before : band;
    const int within = i - before * columns;
    return {before + within % height, within / height};
}

#endif
