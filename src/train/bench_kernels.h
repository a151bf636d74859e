/* Speed of a device's kernels at a model's sizes, beside what the machine can do at most. */
#ifndef QD_TRAIN_BENCH_KERNELS_H
#define QD_TRAIN_BENCH_KERNELS_H

#include "device/ceiling.h"
#include "device/device.h"

typedef struct qd_kernel_bench_config {
    int64_t batch, seq, channels, hidden, vocab; /* hidden: inner size of the MLP */
    int heads, kv_heads;
    qd_dtype dtype;
    double seconds; /* spent on each row, at least one run */
} qd_kernel_bench_config;
qd_kernel_bench_config qd_kernel_bench_config_default(void); /* GPT-2 124M, one sequence of 1024, fp32 */

typedef struct qd_kernel_bench_row {
    char kernel[32], shape[64];
    double seconds;             /* best run */
    double flops, bytes;        /* per second; the one that limits the kernel, the other is 0 */
    double share;       /* products: median over the runs, each held against the multiply-adds right beside it; others: of
                           ceiling.copy_bytes */
    double quiet_share; /* the same over the runs beside which the machine did nearly ceiling.fma_flops; 0: there were none */
} qd_kernel_bench_row;

enum { QD_KERNEL_BENCH_ROWS = 40 };

typedef struct qd_kernel_bench {
    qd_ceiling ceiling;
    int count;
    qd_kernel_bench_row rows[QD_KERNEL_BENCH_ROWS];
} qd_kernel_bench;

qd_status qd_kernel_bench_run(qd_device *device, const qd_kernel_bench_config *config, qd_kernel_bench *bench);

#endif
