#include "device/parts_impl.h"

qd_status qd_row_runs_check(const char *kernel, const char *what, const qd_row_run *runs, int count, int64_t rows, int64_t positions)
{
    for (int i = 0; i < count; i++) {
        const qd_row_run *r = &runs[i];
        if (r->row < 0 || r->position < 0 || r->count < 0 || r->row + r->count > rows)
            return QD_FAIL(QD_USAGE, "%s: run %d of %s, rows %lld to %lld at position %lld, does not lie in %lld rows", kernel, i, what,
                           (long long)r->row, (long long)(r->row + r->count), (long long)r->position, (long long)rows);
        if (r->position + r->count > positions)
            return QD_FAIL(QD_USAGE, "%s: run %d of %s ends at position %lld, beyond the last possible, %lld", kernel, i, what,
                           (long long)(r->position + r->count), (long long)positions);
        if (i > 0 && (r->position < runs[i - 1].position + runs[i - 1].count || r->row < runs[i - 1].row + runs[i - 1].count))
            return QD_FAIL(QD_USAGE, "%s: runs %d and %d of %s overlap or are not in the order of positions", kernel, i - 1, i, what);
    }
    return QD_OK;
}

qd_status qd_attention_part_check_gradients(const char *kernel, const qd_attention_part_args *a)
{
    int64_t q_width = (int64_t)a->heads * a->head_dim, kv_width = (int64_t)a->kv_heads * a->head_dim;
    if (a->dq_stride < q_width || a->dk_stride < kv_width || a->dv_stride < kv_width)
        return QD_FAIL(QD_USAGE, "%s: strides dq %lld, dk %lld, dv %lld are shorter than rows of %d and %d heads", kernel,
                       (long long)a->dq_stride, (long long)a->dk_stride, (long long)a->dv_stride, a->heads, a->kv_heads);
    return QD_OK;
}
