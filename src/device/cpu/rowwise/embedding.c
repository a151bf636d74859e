/* Token and position embeddings: table lookup, and gradients by sorting rows instead of atomics. */
#include "device/cpu/kernels_impl.h"

/* bound < 0: only the lower end is checked, because the length of the table is not known. */
static qd_status check_indices(const char *kernel, const char *what, const int32_t *indices, int64_t rows,
                               int64_t bound)
{
    for (int64_t row = 0; indices && row < rows; row++)
        if (indices[row] < 0 || (bound >= 0 && indices[row] >= bound)) {
            if (bound < 0)
                return QD_FAIL(QD_USAGE, "%s: row %lld has %s %d; it must be at least 0", kernel, (long long)row, what,
                               indices[row]);
            return QD_FAIL(QD_USAGE, "%s: row %lld has %s %d; it must be within 0 .. %lld", kernel, (long long)row,
                           what, indices[row], (long long)bound - 1);
        }
    return QD_OK;
}

qd_status qd_cpu_embedding_forward(qd_stream *stream, const qd_embedding_forward_args *a)
{
    QD_TRY(qd_check_float("embedding_forward", "y", a->dtype));
    QD_TRY(qd_check_float("embedding_forward", "the table", a->param_dtype));
    QD_TRY(check_indices("embedding_forward", "token", a->tokens, a->rows, a->vocab));
    if (a->position_table)
        QD_TRY(check_indices("embedding_forward", "position", a->positions, a->rows, -1));
    const qd_cpu_embedding_ops *ops = qd_cpu_embedding_ops_for(qd_cpu_of(stream));
    qd_cpu_for(stream, a->rows, qd_cpu_row_grain(a->cols), ops->forward, a);
    return QD_OK;
}

/* Rows of dy are processed in batches. Within a batch they are sorted by table row (stable), so
 * that each table row's gradient is loaded once, summed in fp32 over its rows in ascending order,
 * and rounded once. Table rows are independent. */
#define BATCH ((int64_t)4096)
#define DIGIT_BITS 11

typedef struct scatter_job {
    const qd_cpu_embedding_ops *ops;
    const void *dy; /* first row of the batch */
    void *grad;
    const uint64_t *keys; /* table row << 32 | row within the batch, ascending */
    int64_t count, cols;
    qd_dtype dtype, grad_dtype;
} scatter_job;

/* The runs of equal table rows that start in [begin, end), each to its end. */
static void scatter_range(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const scatter_job *job = context;
    const uint64_t *keys = job->keys;
    for (int64_t at = begin; at < end;) {
        uint64_t index = keys[at] >> 32;
        int64_t next = at + 1;
        while (next < job->count && keys[next] >> 32 == index)
            next++;
        if (at == 0 || keys[at - 1] >> 32 != index)
            job->ops->add_rows(qd_cpu_at_mut(job->grad, (int64_t)index * job->cols, job->grad_dtype), job->grad_dtype,
                               job->dy, job->dtype, job->cols, keys + at, next - at);
        at = next;
    }
}

/* Stable radix sort by the high halves of the keys, none of which exceeds `most`. Returns the
 * buffer that holds the result. */
static uint64_t *sort_keys(uint64_t *keys, uint64_t *other, int64_t count, uint64_t most)
{
    for (int shift = 0; most >> shift; shift += DIGIT_BITS) {
        int32_t starts[(1 << DIGIT_BITS) + 1] = {0};
        uint64_t mask = (1 << DIGIT_BITS) - 1;
        for (int64_t i = 0; i < count; i++)
            starts[((keys[i] >> (32 + shift)) & mask) + 1]++;
        for (uint64_t digit = 0; digit < mask; digit++)
            starts[digit + 1] += starts[digit];
        for (int64_t i = 0; i < count; i++)
            other[starts[(keys[i] >> (32 + shift)) & mask]++] = keys[i];
        uint64_t *sorted = other;
        other = keys;
        keys = sorted;
    }
    return keys;
}

/* grad[index of row - base] += dy[row] where this index is below `held` (0: always). indices NULL:
 * row % seq. */
static void scatter_add(qd_stream *stream, const qd_embedding_backward_args *a, const int32_t *indices, int64_t base, int64_t held,
                        void *grad)
{
    uint64_t *keys = qd_cpu_workspace(qd_cpu_of(stream), 0);
    _Static_assert(2 * BATCH * sizeof(uint64_t) <= QD_CPU_WORKSPACE_BYTES, "two key buffers fit the workspace");
    for (int64_t first = 0; first < a->rows; first += BATCH) {
        int64_t count = a->rows - first < BATCH ? a->rows - first : BATCH;
        uint64_t most = 0;
        int64_t found = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t index = (indices ? indices[first + i] : (first + i) % a->seq) - base;
            if (held > 0 && (index < 0 || index >= held))
                continue;
            keys[found++] = (uint64_t)index << 32 | (uint64_t)i;
            most = (uint64_t)index > most ? (uint64_t)index : most;
        }
        scatter_job job = {.ops = qd_cpu_embedding_ops_for(qd_cpu_of(stream)),
                           .dy = qd_cpu_at(a->dy, first * a->cols, a->dtype),
                           .grad = grad,
                           .keys = sort_keys(keys, keys + BATCH, found, most),
                           .count = found,
                           .cols = a->cols,
                           .dtype = a->dtype,
                           .grad_dtype = a->grad_dtype};
        qd_cpu_for(stream, found, qd_cpu_row_grain(a->cols), scatter_range, &job);
    }
}

qd_status qd_cpu_embedding_backward(qd_stream *stream, const qd_embedding_backward_args *a)
{
    QD_TRY(qd_check_float("embedding_backward", "dy", a->dtype));
    QD_TRY(qd_check_float("embedding_backward", "the gradient", a->grad_dtype));
    if (a->token_grad)
        QD_TRY(check_indices("embedding_backward", "token", a->tokens, a->rows, a->vocab));
    if (a->position_grad)
        QD_TRY(check_indices("embedding_backward", "position", a->positions, a->rows, -1));
    if (a->token_grad)
        scatter_add(stream, a, a->tokens, a->first, a->held, a->token_grad);
    if (a->position_grad)
        scatter_add(stream, a, a->positions, 0, 0, a->position_grad);
    return QD_OK;
}
