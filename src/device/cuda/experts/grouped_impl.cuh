/* Grouped GEMM: what the kernels of grouped.cu, grouped_hopper.cu and grouped_pingpong.cu share.
 * They compute tiles of x · yᵀ:
 *
 *   by rows     x = rows of a, y = an expert's b (swapped in grouped_pingpong.cu), depth = k: gives
 *               rows of c. A tile starts at an expert's first row in a source, or a whole number of
 *               tiles after it.
 *   by experts  x = columns of c, y = columns of a, depth = an expert's rows, source by source:
 *               gives the expert's b.
 *
 * The number of rows per expert is in device memory, and the host does not wait for it: every block
 * reads the counts, and blocks, or pairs of them, visit the resulting list of tiles in strides of
 * the grid. */
#ifndef QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_CUH
#define QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_CUH

#include "device/cuda/experts/grouped_impl.h"
#include "device/cuda/tensor_impl.cuh"

/* Segment i: the rows that source i / experts has for expert i % experts, clipped to the rows of
 * this call: [row[i], row[i + 1]). tile[i] is the number of tiles of `height` rows before it;
 * tile[segments] is their total. */
typedef struct grouped_segments {
    int32_t row[QD_GROUPED_SEGMENTS + 1], tile[QD_GROUPED_SEGMENTS + 1];
} grouped_segments;

/* Row `number` of all segments, clipped to the rows of this call: [begin, begin + rows). */
static __device__ __forceinline__ int32_t row_at_hand(const qd_grouped_args &g, int64_t number)
{
    int64_t row = number - g.begin;
    return (int32_t)(row < 0 ? 0 : row > g.rows ? g.rows : row);
}

/* Called by the block's first warp; a barrier makes the table visible to the others. */
static __device__ __forceinline__ void plan_segments(const qd_grouped_args &g, int height, grouped_segments *table)
{
    const int segments = g.sources * g.experts, lane = threadIdx.x % 32;
    int64_t at = 0;
    int32_t tiles = 0;
    for (int base = 0; base < segments; base += 32) {
        const int i = base + lane;
        const int64_t count = i < segments ? g.counts[i / g.experts * g.count_stride + i % g.experts] : 0;
        const int64_t end = warp_sum_so_far(count) + at;
        const int32_t first = row_at_hand(g, end - count), last = row_at_hand(g, end);
        const int32_t here = (last - first + height - 1) / height, tiles_end = warp_sum_so_far(here) + tiles;
        if (i < segments) {
            table->row[i] = first;
            table->tile[i] = tiles_end - here;
        }
        if (i == segments - 1) {
            table->row[segments] = last;
            table->tile[segments] = tiles_end;
        }
        at = __shfl_sync(ALL_LANES, end, 31);
        tiles = __shfl_sync(ALL_LANES, tiles_end, 31);
    }
}

/* A tile of results: starts at (row, column) of c by rows, of the expert's b by experts; `rows` and
 * `columns` of it are valid. */
typedef struct grouped_tile {
    int expert, row, column, rows, columns;
} grouped_tile;

/* Iterates, in ascending order, over the HEIGHT x WIDTH tiles of one of `sharers` that share
 * them. */
template <bool BY_EXPERTS, int HEIGHT, int WIDTH> struct grouped_tiles {
    enum { FEW_COLUMNS = 3072 / WIDTH, BAND = 5120 / HEIGHT };
    const qd_grouped_args &g;
    const grouped_segments &table;
    int at, sharers, segment, count, columns;

    __device__ __forceinline__ grouped_tiles(const qd_grouped_args &args, const grouped_segments &planned, int sharer, int all_sharers)
        : g(args), table(planned), at(sharer), sharers(all_sharers), segment(0)
    {
        columns = (int)((all_columns() + WIDTH - 1) / WIDTH);
        count = columns * (BY_EXPERTS ? rows_of_expert() * g.experts : table.tile[g.sources * g.experts]);
    }

    __device__ __forceinline__ int64_t all_columns() const { return BY_EXPERTS ? g.k : g.n; }
    __device__ __forceinline__ int rows_of_expert() const { return (int)((g.n + HEIGHT - 1) / HEIGHT); }

    __device__ __forceinline__ bool has_more() const { return at < count; }

    __device__ __forceinline__ bool next(grouped_tile &t)
    {
        if (!has_more())
            return false;
        if (BY_EXPERTS) {
            const int here = rows_of_expert() * columns;
            t.expert = at / here;
            place(t, at - t.expert * here, rows_of_expert(), 0, (int)g.n);
        } else {
            while (at >= table.tile[segment + 1] * columns)
                segment++;
            t.expert = segment % g.experts;
            place(t, at - table.tile[segment] * columns, table.tile[segment + 1] - table.tile[segment], table.row[segment],
                  table.row[segment + 1]);
        }
        at += sharers;
        return true;
    }

    /* Tile `i` of the `rows` times `columns` tiles of rows [first, last). Concurrent tiles share
     * operands, which are read from memory once if they stay in the L2 cache until all have read
     * them. Where a row has few columns, whole rows of tiles are computed; else bands of at most
     * BAND rows, as equal as possible, column by column. */
    __device__ __forceinline__ void place(grouped_tile &t, int i, int rows, int first, int last) const
    {
        const int most = columns <= FEW_COLUMNS ? 1 : BAND, bands = (rows + most - 1) / most, band = (rows + bands - 1) / bands;
        const int before = i / (band * columns) * band, height = rows - before < band ? rows - before : band;
        const int within = i - before * columns;
        t.row = first + (before + within % height) * HEIGHT;
        t.column = within / height * WIDTH;
        const int64_t right = all_columns() - t.column;
        t.rows = last - t.row < HEIGHT ? last - t.row : HEIGHT;
        t.columns = right < WIDTH ? (int)right : WIDTH;
    }
};

/* The depth of a tile in one source, and where it starts: by experts the source's rows for the
 * expert, by rows all of k. */
template <bool BY_EXPERTS>
static __device__ __forceinline__ int depth_of(const qd_grouped_args &g, const grouped_segments &table, int expert, int source, int &first)
{
    if (!BY_EXPERTS) {
        first = 0;
        return (int)g.k;
    }
    first = table.row[source * g.experts + expert];
    return table.row[source * g.experts + expert + 1] - first;
}

#endif
