/* Measurements that a program can make of this machine and print as it likes. */
#ifndef QUADRILLE_BENCH_H
#define QUADRILLE_BENCH_H

#include <quadrille/export.h>
#include <quadrille/options.h>
#include <quadrille/status.h>
#include <quadrille/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- collectives ---- */

typedef struct qd_bench_collectives_config {
    int ranks;                             /* processes on this machine */
    bool against_mpi;                      /* also time the MPI library's own calls and our mpi backend, in one run */
    int64_t smallest_bytes, largest_bytes; /* message sizes, in steps of four */
    double seconds;                        /* time to spend on each size and operation, about, all sides together */
    int operation;                         /* only this qd_coll_kind (send stands for receive too); -1: all */
    /* The command, ended by NULL, that calls qd_bench_collectives_rank() with the arguments
     * appended to it. */
    const char *const *rank_command;
} qd_bench_collectives_config;
QD_API qd_bench_collectives_config qd_bench_collectives_config_default(void); /* 2 ranks, 4 B to 64 MiB, without MPI */

/* Medians of the slowest rank, fp32, sums. bytes: of the whole message as in qd_coll_bytes();
 * all-to-all: of what a rank sends, its own block included. Messages that are cut in parts are
 * rounded so that all parts are equal and none is empty. The root of broadcast, reduce, gather and
 * scatter moves on by one rank from call to call, so that no call can run ahead of its receivers.
 * send: all ranks send to their right and receive from their left neighbour. Bus bandwidth is that
 * of NCCL's tests: bytes that each rank must move, per second. */
typedef struct qd_bench_collectives_row {
    qd_coll_kind kind;
    int ranks;
    int64_t bytes;
    double local_seconds;       /* ours, backend local, in memory of qd_comm_alloc() */
    double plain_seconds;       /* the same in ordinary memory */
    double mpi_backend_seconds; /* ours, backend mpi; 0 without MPI */
    double mpi_seconds;         /* the MPI library's own call, in ordinary memory or in that of MPI_Alloc_mem(), whichever
                                   is faster; 0 without MPI */
    double copy_seconds;        /* the operation's copies alone, shared evenly between the ranks, each by one system call
                                   from a neighbour's memory; 0 for sums, below 64 KiB, or where that is not allowed */
    double bare_seconds;        /* as many bytes as the copies alone, copied by each rank within its own memory, through the caches
                                   or past them, whichever is faster; 0 for sums and below 64 KiB */
    double ratio;               /* mpi_seconds / local_seconds: above 1, ours is faster; 0 without MPI */
    double local_bandwidth, mpi_backend_bandwidth, mpi_bandwidth; /* bytes per second; 0 for a barrier */
} qd_bench_collectives_row;

typedef struct qd_bench_collectives_result {
    char mpi_version[128]; /* "Open MPI v4.1.4"; "" without */
    qd_bench_collectives_row *rows;
    int count;
} qd_bench_collectives_result;

/* Starts the ranks (with mpirun if against_mpi) and waits for them. QD_UNSUPPORTED if against_mpi
 * and this build has no MPI. Prints nothing; what mpirun itself has to say goes to standard
 * error. */
QD_API qd_status qd_bench_collectives(const qd_bench_collectives_config *config, qd_bench_collectives_result *result);
QD_API void qd_bench_collectives_free(qd_bench_collectives_result *result);

/* One rank of the measurement; `arguments` are what was appended to rank_command. After a failure
 * in an MPI job this does not return: it ends the job. */
QD_API qd_status qd_bench_collectives_rank(int count, char *const *arguments);

/* ---- kernels and the training step ---- */

/* One line of a table of where time goes. */
typedef struct qd_bench_row {
    char name[40], shape[64];
    double seconds;       /* kernels: best run; step: per step */
    double share;         /* step: of the step's time; kernels: 0 */
    double flops, bytes;  /* per second; 0 where it does not apply */
    double ceiling_share; /* of the measured FMA rate or copy bandwidth, whichever limits; 0: not applicable. Kernels: the
                             median over runs, each held against the mean of multiply-adds timed right before and after it.
                             GEMMs that use bf16 dot products: of that rate times dot_flops / fma_flops */
    double quiet_share;   /* kernels: the same over the quiet runs; 0: there were fewer than 5 */
    int runs, quiet_runs; /* kernels: all; those beside which multiply-adds and integer additions had 85 % of their best */
} qd_bench_row;

enum { QD_BENCH_ROWS = 64 };
typedef struct qd_bench_table {
    char device[96];              /* instruction set, product library, threads */
    double fma_flops, copy_bytes; /* measured ceilings of this machine with these threads, per second: the best of many runs */
    double dot_flops;             /* the same of bf16 dot products; 0: GEMMs of bf16 operands compute in fp32 */
    /* step: the mean of fma_flops as measured right before and after each step and, with one rank,
     * between its ops */
    double beside_flops;
    qd_bench_row rows[QD_BENCH_ROWS];
    int count;
} qd_bench_table;

/* Kernels at the sizes of the configured model (default: GPT-2 124M), one micro-batch, with
 * run.threads threads. */
QD_API qd_status qd_bench_kernels(const qd_options *options, double seconds, qd_bench_table *table);

typedef struct qd_bench_step_result {
    qd_bench_table table;
    int ranks, threads;                     /* threads per rank */
    double step_seconds, tokens_per_second; /* median */
    double flops;                           /* executed per second, all ranks */
    double ceiling_share; /* of the FMA rate of all cores the ranks use: the median over steps, each held against the rate
                             beside it, as in beside_flops. If GEMMs use bf16 dot products: of that rate times dot_flops / fma_flops */
    bool uses_dots;       /* GEMMs of this step use bf16 dot products */
    double other_seconds, over_other;       /* of the other configuration's steps; how many of them ours takes, two steps held against the
                                               two between them: medians. 0: there is none */
    double model_flops;                     /* per token: 6 x matrix parameters + 12 x layers x seq x width of attention */
    int64_t planned_bytes, allocated_bytes; /* of rank 0: the accountant's figure, and what was taken from the device */
    int64_t host_planned_bytes, host_allocated_bytes; /* the same in host memory: optimizer state that train.offload keeps there */
    int64_t workspace_bytes;                /* beside it: held for kernels and libraries */
    int64_t device_bytes;                   /* accelerators: in use on rank 0's, by all its ranks and the driver */
    char workspace[160];                    /* what the workspace is, by name */
    int64_t dispatch_bytes;                 /* per step, sent to experts of other ranks and back, all ranks together */
    int64_t across_bytes, across_flat_bytes; /* of these between nodes (parallel.nodes); what flat dispatch would have sent there */
} qd_bench_step_result;

/* Steps of the configured run on random tokens, ranks as threads of this process. in_turn: another
 * configuration on the same kind of device, whose steps are taken in turn with these, so that both
 * see the same machine; NULL: none. */
QD_API qd_status qd_bench_step(const qd_options *options, const qd_options *in_turn, int warm_up, int steps, qd_bench_step_result *result);

/* ---- the machine ---- */

/* (m, n) over k takes 2 m n k (1 + half_m / m + half_n / n + half_k / k) / flops. */
typedef struct qd_bench_product {
    double flops, half_m, half_n, half_k;
} qd_bench_product;
/* A rank's part: seconds, and bytes that it moves per second. */
typedef struct qd_bench_exchange {
    double latency, bandwidth;
} qd_bench_exchange;

/* What ranks on this machine's cores reach: rates are per core, with a rank of one thread on
 * each. */
typedef struct qd_bench_machine {
    int cores;
    double peak;                   /* FLOPs per second of multiply-adds, all cores */
    double step_seconds;           /* of the step that was taken apart */
    qd_bench_product product[3];   /* y = x Wᵀ, dx = dy W, dW += dyᵀ x */
    double attention[2];           /* FLOPs per second, forward and backward */
    double part[2];                /* the same: keys of a part of attention (cp) at which it takes twice as long per FLOP */
    double stream, update;         /* bytes per second of kernels between products, and of the optimizer */
    double together[3];            /* products, attention, the rest: one rank on all cores, over the sum of the rates */
    qd_bench_exchange exchange[4]; /* all-reduce, all-gather, reduce-scatter, message */
    /* seconds by which products take longer when ranks meet after each: with a core to each rank,
     * with two ranks to a core */
    double meeting, meeting_crowd;
    double late[3]; /* how much longer it takes than the computing alone: a step of one rank; a step with a rank per core (which wait for
                                      the last); products of two ranks per core, which take turns */
} qd_bench_machine;

/* Steps of the configured model with a rank on each core and with one rank on all of them; products
 * around its shapes, also with two ranks on each core; exchanges: all in turn, and medians over the
 * steps. Ranks are threads of this process. */
enum { QD_BENCH_MACHINE_STEPS = 100 };
QD_API qd_status qd_bench_measure_machine(const qd_options *options, int warm_up, int steps, qd_bench_machine *machine);

/* ---- actions ---- */

/* CPU seconds that the thread of a rank spends in each action of its program that computes; 0 for
 * the others. All zero before the first measurement. */
typedef struct qd_bench_actions {
    int ranks, steps;
    int *counts;      /* per rank: actions */
    /* per rank and action: the pass of the module undisturbed, a tenth of all its times being
     * shorter (micro-batches x steps) */
    double **pass;
    double **single;  /* the action for itself: median over steps */
    double **samples; /* per rank: steps x actions */
} qd_bench_actions;

/* Steps of the configured run on random tokens, ranks as threads of this process with one compute
 * thread each; added to what `actions` has of the same run, so that measurements can be spread over
 * time. `actions` is freed by the caller, also after a failure. */
QD_API qd_status qd_bench_measure_actions(const qd_options *options, int warm_up, int steps, qd_bench_actions *actions);
QD_API void qd_bench_actions_free(qd_bench_actions *actions);

#ifdef __cplusplus
}
#endif
#endif
