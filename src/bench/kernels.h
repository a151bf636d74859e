/* Speed of a device's kernels at a model's sizes, compared with the machine's peak. */
#ifndef QD_BENCH_KERNELS_H
#define QD_BENCH_KERNELS_H

#include "device/ceiling.h"
#include "device/device.h"

typedef struct qd_kernel_bench_config {
    int64_t batch, seq, channels, hidden, vocab; /* hidden: inner size of the MLP */
    int heads, kv_heads;
    qd_dtype dtype;
    double seconds; /* per row, at least 5 runs; GEMMs and attention up to 5 times as long, until 15 runs were quiet */
} qd_kernel_bench_config;
qd_kernel_bench_config qd_kernel_bench_config_default(void); /* GPT-2 124M, one sequence of 1024, fp32 */

typedef struct qd_kernel_bench_row {
    char kernel[32], shape[64];
    double seconds;             /* best run */
    double flops, bytes;        /* per second; the one that limits the kernel, the other is 0 */
    double share;       /* compute-bound rows: median over the runs, each compared with the mean of the multiply-adds right
                           before and after it; others: of ceiling.copy_bytes */
    double quiet_share; /* the same over the quiet runs; 0: there were fewer than 5 */
    int runs;
    int quiet_runs;     /* runs before and after which multiply-adds and integer additions reached 85 % of their best: no other
                           program was on our cores */
} qd_kernel_bench_row;

enum { QD_KERNEL_BENCH_ROWS = 40 };

typedef struct qd_kernel_bench {
    qd_ceiling ceiling; /* the best of all measurements, before the rows and around their runs */
    int count;
    qd_kernel_bench_row rows[QD_KERNEL_BENCH_ROWS];
} qd_kernel_bench;

qd_status qd_kernel_bench_run(qd_device *device, const qd_kernel_bench_config *config, qd_kernel_bench *bench);

#endif
