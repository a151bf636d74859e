/* Causal attention: checks, and the cut into ranges that one thread computes alone and in a fixed order. */
#include "device/cpu/attention_impl.h"

static qd_status check(const char *kernel, const qd_attention_args *a)
{
    QD_TRY(qd_cpu_check_float(kernel, "q", a->dtype));
    if (a->batch < 0 || a->seq < 0)
        return QD_FAIL(QD_USAGE, "%s: batch %lld and seq %lld must not be negative", kernel, (long long)a->batch,
                       (long long)a->seq);
    if (a->head_dim < 2 || a->head_dim % 2 || a->head_dim > QD_ATTENTION_HEAD_MOST)
        return QD_FAIL(QD_UNSUPPORTED, "%s: head_dim %d; even sizes from 2 to %d are supported", kernel, a->head_dim,
                       QD_ATTENTION_HEAD_MOST);
    if (a->heads < 1 || a->kv_heads < 1 || a->heads % a->kv_heads)
        return QD_FAIL(QD_USAGE, "%s: %d heads and %d kv_heads; heads must be a multiple of kv_heads", kernel, a->heads,
                       a->kv_heads);
    int64_t q_width = (int64_t)a->heads * a->head_dim, kv_width = (int64_t)a->kv_heads * a->head_dim;
    if (a->q_stride < q_width || a->o_stride < q_width || a->k_stride < kv_width || a->v_stride < kv_width)
        return QD_FAIL(QD_USAGE, "%s: strides q %lld, k %lld, v %lld, o %lld are shorter than rows of %d and %d heads",
                       kernel, (long long)a->q_stride, (long long)a->k_stride, (long long)a->v_stride,
                       (long long)a->o_stride, a->heads, a->kv_heads);
    return QD_OK;
}

typedef struct job {
    const qd_cpu *cpu;
    const qd_attention_args *args;
    const qd_cpu_attention *kernel;
    int64_t blocks; /* of queries in a sequence */
    bool with_dq;
} job;

static job make_job(qd_stream *stream, const qd_attention_args *a, int64_t rows)
{
    const qd_cpu *cpu = qd_cpu_of(stream);
    return (job){.cpu = cpu, .args = a, .kernel = qd_cpu_attention_for(cpu),
                 .blocks = (a->seq + rows - 1) / rows};
}

/* Item i of (blocks, batch, heads). The last blocks see the most keys and come first, so that the threads end together. */
typedef void block_kernel(const qd_attention_args *a, int64_t batch, int head, int64_t block, void *workspace);
static void run_blocks(const job *j, block_kernel *kernel, int64_t begin, int64_t end, int thread)
{
    const qd_attention_args *a = j->args;
    for (int64_t i = begin; i < end; i++) {
        int64_t block = j->blocks - 1 - i / (a->batch * a->heads), rest = i % (a->batch * a->heads);
        kernel(a, rest / a->heads, (int)(rest % a->heads), block, qd_cpu_workspace(j->cpu, thread));
    }
}

static void forward_range(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    run_blocks(j, j->kernel->forward, begin, end, thread);
}

static void backward_dq_range(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    run_blocks(j, j->kernel->backward_dq, begin, end, thread);
}

static void backward_delta_range(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        j->kernel->backward_delta(j->args, i / j->args->heads, (int)(i % j->args->heads));
}

static void backward_range(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    for (int64_t i = begin; i < end; i++)
        j->kernel->backward(j->args, i / j->args->kv_heads, (int)(i % j->args->kv_heads), j->with_dq,
                            qd_cpu_workspace(j->cpu, thread));
}

qd_status qd_cpu_attention_forward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_forward", a));
    job j = make_job(stream, a, QD_ATTENTION_FORWARD_ROWS);
    qd_pool_for(j.cpu->pool, a->batch * a->heads * j.blocks, 1, forward_range, &j);
    return QD_OK;
}

qd_status qd_cpu_attention_backward(qd_stream *stream, const qd_attention_args *a)
{
    QD_TRY(check("attention_backward", a));
    job j = make_job(stream, a, QD_ATTENTION_BLOCK);
    /* One pass over the pairs of blocks when dq can be summed in fp32 while the keys go by, two otherwise. */
    int64_t group = a->heads / a->kv_heads;
    j.with_dq = a->dtype == QD_F32 || group * a->seq * a->head_dim <= QD_ATTENTION_DQ_FLOATS;
    qd_pool_for(j.cpu->pool, a->batch * a->heads, 1, backward_delta_range, &j);
    qd_pool_for(j.cpu->pool, a->batch * a->kv_heads, 1, backward_range, &j);
    if (!j.with_dq)
        qd_pool_for(j.cpu->pool, a->batch * a->heads * j.blocks, 1, backward_dq_range, &j);
    return QD_OK;
}
