/* Benchmarks of this machine: collectives, kernels, training steps, rates for the simulator. The
 * functions fill structs and print nothing. None of them is collective: each starts its own ranks.
 * Run them on an idle machine. */
#ifndef QUADRILLE_BENCH_H
#define QUADRILLE_BENCH_H

#include <quadrille/export.h>
#include <quadrille/options.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/types.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QD_BENCH_WAYS_MOST = 640 };
typedef struct qd_bench_collectives_config {
    size_t size;
    int ranks;                             /* processes on this machine */
    bool against_mpi;                      /* also time the MPI library's own calls and our mpi backend, in one run */
    int64_t smallest_bytes, largest_bytes; /* message sizes; each is four times the one before */
    double seconds;                        /* approximate time per size and operation, over all variants */
    int operation;                         /* only this qd_coll_kind (send includes receive); -1: all */
    /* NULL-terminated command that calls qd_bench_collectives_rank() with the arguments that are
     * appended to it. */
    const char *const *rank_command;
    const char *ways; /* as run.collectives: a file, "none", or NULL or "" for the user's cache folder */
} qd_bench_collectives_config;
/* Sets the defaults: 2 ranks, 4 B to 64 MiB, without MPI. */
QD_API void qd_bench_collectives_config_init(qd_bench_collectives_config *config, size_t size);
QD_SIZED_DEFAULT_BY_INIT(qd_bench_collectives_config)

/* Medians of the slowest rank, fp32 sums. `bytes` is the size of the whole message as in
 * qd_coll_bytes(); for all-to-all, what one rank sends, including its own block. Sizes of messages
 * that are split are rounded so that all parts are equal and none is empty. The root of broadcast,
 * reduce, gather and scatter advances by one rank per call, so that no call can run ahead of its
 * receivers. send: every rank sends to its right neighbour and receives from its left one. Bus
 * bandwidth is defined as in nccl-tests: bytes that each rank must move, per second. */
typedef struct qd_bench_collectives_row {
    qd_coll_kind kind;
    int ranks;
    int64_t bytes;
    double local_seconds;       /* backend local, buffers from qd_comm_alloc() */
    double plain_seconds;       /* backend local, ordinary memory */
    double mpi_backend_seconds; /* backend mpi; 0 without MPI */
    double mpi_seconds;         /* the MPI library's own call, in ordinary memory or memory of MPI_Alloc_mem(), whichever is
                                   faster; 0 without MPI */
    double copy_seconds;        /* only the copies of the operation, split evenly between the ranks, each one system call that
                                   reads a neighbour's memory; 0 for sums, below 64 KiB, or where that is not permitted */
    double bare_seconds;        /* the same number of bytes, copied by each rank within its own memory, with cached or
                                   non-temporal stores, whichever is faster; 0 for sums and below 64 KiB */
    double ratio;               /* mpi_seconds / local_seconds: above 1, backend local is faster; 0 without MPI */
    double local_bandwidth, mpi_backend_bandwidth, mpi_bandwidth; /* bytes per second; 0 for a barrier */
} qd_bench_collectives_row;

typedef struct qd_bench_collectives_result {
    size_t size;
    char mpi_version[128]; /* "Open MPI v4.1.4"; "" without MPI */
    qd_bench_collectives_row *rows; /* released by qd_bench_collectives_free() */
    int count;
    char ways[QD_BENCH_WAYS_MOST]; /* qd_comm_config.ways of the local world; "": those of a machine that was not measured */
    double ways_seconds;           /* that they took to measure just now; 0: they were known */
} qd_bench_collectives_result;
QD_SIZED_DEFAULT(qd_bench_collectives_result)

/* Starts the ranks (with mpirun if against_mpi), waits for them and fills `result`. Messages of
 * mpirun itself go to standard error. QD_USAGE for sizes or ranks out of range; QD_UNSUPPORTED if
 * against_mpi and this build has no MPI; QD_REMOTE if a rank failed. */
QD_API qd_status qd_bench_collectives(const qd_bench_collectives_config *config, qd_bench_collectives_result *result);
/* Frees the rows. */
QD_API void qd_bench_collectives_free(qd_bench_collectives_result *result);

/* Runs one rank of the benchmark; `arguments` are those appended to rank_command. After a failure
 * in an MPI job it does not return: it aborts the job. */
QD_API qd_status qd_bench_collectives_rank(int count, char *const *arguments);

/* One row of a profile: a kernel, or a part of the step. */
typedef struct qd_bench_row {
    char name[40], shape[64];
    double seconds;       /* kernels: best run; step: per step */
    double share;         /* step: of the step's time; kernels: 0 */
    double flops, bytes;  /* per second; 0 where it does not apply */
    double ceiling_share; /* of the measured FMA rate or copy bandwidth, whichever limits; 0: not applicable. Kernels: the
                             median over runs, each relative to the mean FMA rate right before and after it. GEMMs that use AMX tiles
                             or bf16 dot products: relative to that rate times amx_flops or dot_flops / fma_flops */
    double quiet_share;   /* kernels: the same over the quiet runs; 0: there were fewer than 5 */
    int runs, quiet_runs; /* kernels: all runs; those during which FMAs and integer additions reached 85 % of their best rate */
} qd_bench_row;

enum { QD_BENCH_ROWS = 64 };
typedef struct qd_bench_table {
    size_t size;
    char device[96];              /* instruction set, GEMM library, threads */
    double fma_flops, copy_bytes; /* measured ceilings of this machine with these threads, per second: the best of many runs */
    /* step: mean FMA rate measured right before and after each step and, with one rank, between its
     * ops */
    double beside_flops;
    qd_bench_row rows[QD_BENCH_ROWS];
    int count;
    double dot_flops; /* ceiling of bf16 dot products, as fma_flops; 0: the kernels have none */
    double amx_flops; /* ceiling of AMX tiles of bf16; 0: the kernels have none */
} qd_bench_table;
QD_SIZED_DEFAULT(qd_bench_table)

/* Times the kernels at the shapes of the configured model (default: GPT-2 124M), one micro-batch,
 * with run.threads threads. QD_USAGE for a configuration that cannot run. */
QD_API qd_status qd_bench_kernels(const qd_options *options, double seconds, qd_bench_table *table);

typedef struct qd_bench_step_result {
    size_t size;
    int ranks, threads;                     /* threads per rank */
    double step_seconds, tokens_per_second; /* median */
    double flops;                           /* executed per second, all ranks */
    double ceiling_share; /* of the FMA rate of all cores the ranks use: the median over steps, each relative to the rate
                             measured next to it, as in beside_flops. If uses_amx or uses_dots: times amx_flops or dot_flops /
                             fma_flops */
    double other_seconds; /* median step time of the other configuration; 0: none */
    double over_other;    /* our step time over the other's: median of two steps relative to the two between them; 0: none */
    double model_flops;                     /* per token: 6 x matrix parameters + 12 x layers x seq x width of attention */
    int64_t planned_bytes, allocated_bytes; /* of rank 0: as planned, and as allocated on the device */
    int64_t host_planned_bytes, host_allocated_bytes; /* the same for host memory: optimizer state of train.offload */
    int64_t workspace_bytes;                /* in addition: workspaces of kernels and libraries */
    int64_t device_bytes;                   /* accelerators: in use on rank 0's device, by all its ranks and the driver */
    char workspace[160];                    /* the parts of the workspace, by name */
    int64_t dispatch_bytes;                 /* per step, sent to experts of other ranks and back, sum over ranks */
    int64_t across_bytes, across_flat_bytes; /* the part between nodes (parallel.nodes); what flat dispatch would send there */
    bool uses_dots; /* GEMMs of this step use bf16 dot products */
    bool uses_amx;  /* … AMX tiles */
} qd_bench_step_result;
QD_SIZED_DEFAULT(qd_bench_step_result)

/* Times steps of the configured run on random tokens, with ranks as threads of this process.
 * in_turn: another configuration on the same kind of device, whose steps alternate with these, so
 * that both see the same machine conditions; NULL: none. table: the time of a step by part.
 * QD_USAGE for a configuration that cannot run. */
QD_API qd_status qd_bench_step(const qd_options *options, const qd_options *in_turn, int warm_up, int steps, qd_bench_step_result *result,
                               qd_bench_table *table);

/* Cost of a GEMM: (m, n) over k takes 2 m n k (1 + half_m / m + half_n / n + half_k / k) / flops
 * seconds. */
typedef struct qd_bench_product {
    double flops, half_m, half_n, half_k;
} qd_bench_product;
/* Cost of a collective for one rank: latency in seconds, bytes that the rank moves per second. */
typedef struct qd_bench_exchange {
    double latency, bandwidth;
} qd_bench_exchange;

/* Rates that ranks reach on this machine's cores: per core, with a one-thread rank on each. */
typedef struct qd_bench_machine {
    size_t size;
    int cores;
    double peak;                   /* FLOP/s of multiply-adds, all cores */
    double step_seconds;           /* of the profiled step */
    qd_bench_product product[3];   /* GEMMs: y = x Wᵀ, dx = dy W, dW += dyᵀ x */
    double attention[2];           /* FLOP/s, forward and backward */
    double part[2];                /* forward and backward: keys per part of attention (cp) at which a FLOP takes twice as long */
    double stream, update;         /* bytes per second of the memory-bound kernels, and of the optimizer */
    double together[3];            /* GEMMs, attention, the rest: rate of one rank on all cores over the sum of the cores' rates */
    qd_bench_exchange exchange[4]; /* all-reduce, all-gather, reduce-scatter, message */
    /* Extra seconds per GEMM when ranks synchronize after each: with one rank per core, with two
     * ranks per core. */
    double meeting, meeting_crowd;
    /* Extra time, relative to computing alone: a step of one rank; a step with one rank per core,
     * which wait for the slowest; GEMMs of two ranks per core, which share it. */
    double late[3];
} qd_bench_machine;
QD_SIZED_DEFAULT(qd_bench_machine)

/* Measures the rates above. Interleaves steps of the configured model with one rank per core and
 * with one rank on all cores, GEMMs around its shapes, also with two ranks per core, and
 * collectives, and takes medians over the steps. Ranks are threads of this process. QD_USAGE for
 * more than QD_BENCH_MACHINE_STEPS steps, QD_UNSUPPORTED if run.device is not cpu. */
enum { QD_BENCH_MACHINE_STEPS = 100 };
QD_API qd_status qd_bench_measure_machine(const qd_options *options, int warm_up, int steps, qd_bench_machine *machine);

/* CPU seconds that a rank's thread spends in each compute action of its program; 0 for other
 * actions. Initialize with qd_bench_actions_default(). */
typedef struct qd_bench_actions {
    size_t size;
    int ranks, steps;
    int *counts;      /* per rank: actions */
    /* per rank and action: undisturbed time of the module's pass, the 10th percentile over all
     * micro-batches and steps */
    double **pass;
    double **single;  /* the time of this action alone: median over steps */
    double **samples; /* per rank: steps x actions */
} qd_bench_actions;
QD_SIZED_DEFAULT(qd_bench_actions)

/* Times the actions of the configured run on random tokens, with ranks as threads of this process,
 * one compute thread each. Adds to earlier measurements of the same run in `actions`, so that they
 * can be spread over time; QD_USAGE if those are of another program. The caller frees `actions`,
 * also after a failure. */
QD_API qd_status qd_bench_measure_actions(const qd_options *options, int warm_up, int steps, qd_bench_actions *actions);
/* Frees what `actions` points to. */
QD_API void qd_bench_actions_free(qd_bench_actions *actions);

#ifdef __cplusplus
}
#endif
#endif
