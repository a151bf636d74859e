/* Internal to `bench collectives`: what the parent process and its ranks share. */
#ifndef QD_BENCH_COLLECTIVES_H
#define QD_BENCH_COLLECTIVES_H

#include <quadrille/bench.h>
#include <stdatomic.h>

#define QD_BENCH_ROWS_MOST 512
#define QD_BENCH_RANKS_MOST 256

/* A memfd of the parent. Ranks open it, like the segment of the local world, through
 * /proc/<parent>/fd: mpirun passes no descriptors on, and nothing has a name that could be left
 * behind. */
typedef struct qd_bench_board {
    _Atomic int failed; /* the first rank that fails claims the message */
    int status;         /* its qd_status */
    char message[512];
    int count;
    qd_bench_collectives_row rows[QD_BENCH_ROWS_MOST]; /* written by rank 0 */
} qd_bench_board;

/* Arguments of a rank, in this order. rank: -1 means that MPI assigns it. */
typedef struct qd_bench_rank_arguments {
    int rank, ranks;
    int64_t smallest_bytes, largest_bytes;
    double seconds;
    int operation; /* -1: all */
    const char *world_path, *board_path;
} qd_bench_rank_arguments;
enum { QD_BENCH_RANK_ARGUMENTS = 8 };

#endif
