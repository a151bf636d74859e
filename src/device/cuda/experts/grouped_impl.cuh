/* Products over experts: what the kernels of grouped.cu, grouped_hopper.cu and grouped_turns.cu
 * share. They compute tiles of x · yᵀ:
 *
 *   by rows     x = rows of a, y = an expert's b (in grouped_turns.cu the other way round), depth = k: rows of c. A tile begins at an
 *               expert's first row in a source, or a whole number of tiles after it.
 *   by experts  x = columns of c, y = columns of a, depth = an expert's rows, source by source: the expert's b.
 *
 * How many rows an expert has stands in device memory, and the host does not wait for it: every
 * block reads the counts, and blocks, or pairs of them, go through the list of tiles that follows
 * from them in strides of the grid. */
#ifndef QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_CUH
#define QD_DEVICE_CUDA_EXPERTS_GROUPED_IMPL_CUH

#include "device/cuda/experts/grouped_impl.h"
#include "device/cuda/tensor_impl.cuh"

/* Segment i holds the rows that source i / experts has for expert i % experts: of those at hand,
 * [row[i], row[i + 1]). tile[i] is the number of tiles of `height` rows before it; tile[segments]
 * is their number in all. */
typedef struct grouped_segments {
    int32_t row[QD_GROUPED_SEGMENTS + 1], tile[QD_GROUPED_SEGMENTS + 1];
} grouped_segments;

/* Row `number` of all segments as one of those at hand: [begin, begin + rows). */
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

/* A tile of results: (row, column) of c by rows, of the expert's b by experts; so many rows and
 * columns of it count. */
typedef struct grouped_tile {
    int expert, row, column, rows, columns;
} grouped_tile;

/* The tiles of HEIGHT x WIDTH results of one of `sharers` that share them, in ascending order. */
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

    /* Tile `i` of those of rows [first, last), `rows` times `columns` of them. Tiles that are
     * computed at the same time share operands, which come from memory once if they stay in the L2
     * cache until all have read them. Where a row has few columns, whole rows are computed at a
     * time; else bands of at most BAND rows, as equal as can be, column by column. */
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

/* The depth that a tile has in one source, and where it begins: by experts the source's rows for
 * the expert, by rows all of k. */
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
