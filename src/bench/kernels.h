/* Speed of a device's kernels at a model's sizes, beside what the machine can do at most. */
#ifndef QD_BENCH_KERNELS_H
#define QD_BENCH_KERNELS_H

#include "device/ceiling.h"
#include "device/device.h"

typedef struct qd_kernel_bench_config {
    int64_t batch, seq, channels, hidden, vocab; /* hidden: inner size of the MLP */
    int heads, kv_heads;
    qd_dtype dtype;
    double seconds; /* spent on each row, at least 5 runs; on products up to 5 times as long, until 15 runs were quiet */
} qd_kernel_bench_config;
qd_kernel_bench_config qd_kernel_bench_config_default(void); /* GPT-2 124M, one sequence of 1024, fp32 */

typedef struct qd_kernel_bench_row {
    char kernel[32], shape[64];
    double seconds;             /* best run */
    double flops, bytes;        /* per second; the one that limits the kernel, the other is 0 */
    double share;       /* products: median over the runs, each held against the mean of the multiply-adds right before and
                           right after it; others: of ceiling.copy_bytes */
    double quiet_share; /* the same over the quiet runs; 0: there were fewer than 5 */
    int runs;
    int quiet_runs;     /* beside which, before and after, multiply-adds and integer additions had 85 % of their best: nobody else was on
                           our cores */
} qd_kernel_bench_row;

enum { QD_KERNEL_BENCH_ROWS = 40 };

typedef struct qd_kernel_bench {
    qd_ceiling ceiling; /* the best of all looks, before the rows and beside their runs */
    int count;
    qd_kernel_bench_row rows[QD_KERNEL_BENCH_ROWS];
} qd_kernel_bench;

qd_status qd_kernel_bench_run(qd_device *device, const qd_kernel_bench_config *config, qd_kernel_bench *bench);

#endif
