/* Attention of new rows to a key/value cache, for generation: checks, storing the new rows, and the
 * split into (row, head) pairs. */
#include "device/cpu/kernels_impl.h"

#include <string.h>

static void store_rows(const qd_attention_cached_args *a, void *cache, const void *rows, int64_t stride, int64_t cols)
{
    for (int64_t r = 0; r < a->rows; r++)
        memcpy(qd_cpu_at_mut(cache, (a->past + r) % a->context * cols, a->dtype), qd_cpu_at(rows, r * stride, a->dtype),
               (size_t)cols * qd_dtype_size(a->dtype));
}

qd_status qd_cpu_attention_cached(qd_stream *stream, const qd_attention_cached_args *a)
{
    QD_TRY(qd_check_float("attention_cached", "q", a->dtype));
    QD_TRY(qd_check_scores("attention_cached", a->window, a->softcap));
    bool ring = a->window > 0 && a->window + a->rows - 1 <= a->context;
    if (a->past < 0 || a->rows < 0 || (a->past + a->rows > a->context && !ring))
        return QD_FAIL(QD_USAGE, "attention_cached: positions %lld to %lld do not fit in a cache of %lld", (long long)a->past,
                       (long long)(a->past + a->rows), (long long)a->context);
    if (a->head_dim > QD_CPU_CACHED_HEAD_DIM || a->heads % a->kv_heads != 0)
        return QD_FAIL(QD_UNSUPPORTED, "attention_cached: head size %d with %d heads on %d; sizes up to %d, heads a multiple of "
                                       "key heads", a->head_dim, a->heads, a->kv_heads, QD_CPU_CACHED_HEAD_DIM);
    QD_TRY(qd_attention_cached_check_values(a));
    int64_t cols = (int64_t)a->kv_heads * a->head_dim;
    store_rows(a, a->k_cache, a->k, a->k_stride, cols);
    if (a->v)
        store_rows(a, a->v_cache, a->v, a->v_stride, cols);
    qd_cpu_for(stream, a->rows * a->heads, 1, qd_cpu_attention_cached_ops_for(qd_cpu_of(stream))->rows, a);
    return QD_OK;
}
