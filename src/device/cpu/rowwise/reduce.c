/* Reductions: bias gradients, sums of squares, loss sums and the gradient norm, in orders that do
 * not depend on the number of threads. */
#include "device/cpu/kernels_impl.h"
#include "device/grad_norm.h"

#include <string.h>

/* Rows per partial sum: few enough that fp32 sums are accurate to a few units in the last place,
 * enough that partial sums are a small part of the traffic. */
#define BLOCK_ROWS 32
#define COLUMN_GRAIN 2048

typedef struct row_sum_job {
    qd_cpu_row_sum_body body;
    void *context;
    const qd_cpu_reduce_ops *ops;
    float *sum, *parts; /* (width), (blocks of this round, width) */
    int64_t rows, width, first_block, blocks;
} row_sum_job;

static void sum_blocks(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const row_sum_job *job = context;
    for (int64_t block = begin; block < end; block++) {
        float *part = job->parts + block * job->width;
        int64_t first = (job->first_block + block) * BLOCK_ROWS;
        int64_t last = first + BLOCK_ROWS < job->rows ? first + BLOCK_ROWS : job->rows;
        memset(part, 0, (size_t)job->width * sizeof *part);
        job->body(job->context, first, last, part);
    }
}

static void add_columns(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const row_sum_job *job = context;
    job->ops->add_parts(job->sum, job->parts, job->blocks, job->width, begin, end);
}

qd_status qd_cpu_row_sum(qd_cpu *cpu, const char *kernel, int64_t rows, int64_t width, qd_cpu_row_sum_body body,
                         void *context, const float **sum)
{
    /* The sum and as many partial sums as the workspaces of all threads hold; more blocks take
     * several rounds. */
    int64_t floats = QD_CPU_WORKSPACE_BYTES * qd_pool_threads(cpu->pool) / (int64_t)sizeof(float);
    int64_t most = QD_CPU_WORKSPACE_BYTES / (int64_t)sizeof(float) / 2;
    if (width > most)
        return QD_FAIL(QD_UNSUPPORTED, "%s: sums over rows of %lld columns in total; at most %lld fit in the workspace",
                       kernel, (long long)width, (long long)most);
    float *base = qd_cpu_workspace(cpu, 0);
    row_sum_job job = {.body = body,
                       .context = context,
                       .ops = qd_cpu_reduce_ops_for(cpu),
                       .sum = base,
                       .parts = base + width,
                       .rows = rows,
                       .width = width};
    memset(job.sum, 0, (size_t)width * sizeof *job.sum);
    int64_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS, round = width ? floats / width - 1 : blocks;
    for (; job.first_block < blocks; job.first_block += job.blocks) {
        job.blocks = blocks - job.first_block < round ? blocks - job.first_block : round;
        qd_pool_for(cpu->pool, job.blocks, 1, sum_blocks, &job);
        qd_pool_for(cpu->pool, width, COLUMN_GRAIN, add_columns, &job);
    }
    *sum = job.sum;
    return QD_OK;
}

typedef struct bias_grad_job {
    const qd_bias_grad_args *args;
    const qd_cpu_reduce_ops *ops;
} bias_grad_job;

static void bias_grad_block(void *context, int64_t begin, int64_t end, float *part)
{
    const bias_grad_job *job = context;
    job->ops->column_sums(job->args, begin, end, part);
}

qd_status qd_cpu_bias_grad(qd_stream *stream, const qd_bias_grad_args *a)
{
    qd_cpu *cpu = qd_cpu_of(stream);
    QD_TRY(qd_check_float("bias_grad", "dy", a->dtype));
    QD_TRY(qd_check_float("bias_grad", "grad", a->grad_dtype));
    bias_grad_job job = {a, qd_cpu_reduce_ops_for(cpu)};
    const float *sum;
    QD_TRY(qd_cpu_row_sum(cpu, "bias_grad", a->rows, a->cols, bias_grad_block, &job, &sum));
    job.ops->put_grad(a->grad, a->grad_dtype, sum, a->cols, a->accumulate);
    return QD_OK;
}

qd_status qd_cpu_row_squares(qd_stream *stream, const qd_row_squares_args *a)
{
    for (; a; a = a->next) {
        QD_TRY(qd_check_float("row_squares", "x", a->dtype));
        qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), qd_cpu_reduce_ops_for(qd_cpu_of(stream))->row_squares, a);
    }
    return QD_OK;
}

qd_status qd_cpu_run_sums(qd_stream *stream, const qd_run_sums_args *a)
{
    (void)stream;
    for (int64_t r = 0; r < a->run_count;) {
        double sum = 0.0;
        const int32_t which = a->runs[r].sum;
        for (; r < a->run_count && a->runs[r].sum == which; r++)
            for (int64_t i = 0; i < a->runs[r].count; i++)
                sum += a->x[a->runs[r].first + i];
        a->sums[which] = sum;
    }
    return QD_OK;
}

qd_status qd_cpu_grad_norm(qd_stream *stream, const qd_grad_norm_args *a)
{
    (void)stream;
    double total = 0.0;
    int64_t bad = a->count;
    for (int64_t i = a->count - 1; i >= 0; i--)
        bad = isfinite(a->sums[i]) ? bad : i;
    for (int64_t i = 0; i < a->count; i++)
        total += a->sums[i];
    qd_grad_norm_finish(a, total, bad);
    return QD_OK;
}

qd_status qd_cpu_loss_sum(qd_stream *stream, const qd_loss_sum_args *a)
{
    (void)stream;
    /* Added to the running total one by one, so that results are bit-identical however rows are
     * split into calls. */
    double total = *a->total, counted = *a->counted;
    for (int64_t row = 0; row < a->rows; row++) {
        total += (double)a->losses[row];
        counted += a->targets[row] >= 0;
    }
    *a->total = total;
    *a->counted = counted;
    return QD_OK;
}
