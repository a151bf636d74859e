/* Attention of one query row and head to cached keys, with online softmax: bound by reading the
 * cache. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>
#include <string.h>

#define BLOCK 64 /* keys per step of the online softmax */

static float dot(const float *q, const void *k, int64_t n, qd_dtype dtype)
{
    vf sum = vf_set(0.0f);
    QD_FOR_VECTORS(i, width, n, { sum += vec_load(q, i, width, QD_F32) * vec_load(k, i, width, dtype); });
    return vf_sum(sum);
}

/* Row of a ring. */
static int64_t row_at(const qd_attention_cached_args *a, int64_t at)
{
    return at < a->context ? at : at - a->context;
}

static void one_row(const qd_attention_cached_args *a, int64_t row, int head)
{
    const int64_t d = a->head_dim, v_dim = a->v ? d : a->v_dim, cols = a->kv_heads * d, from = (head / (a->heads / a->kv_heads)) * d;
    const int64_t keys = a->past + row + 1, window = a->window > 0 && a->window < keys ? a->window : keys;
    float q[QD_CPU_CACHED_HEAD_DIM], o[QD_CPU_CACHED_HEAD_DIM], scores[BLOCK];
    const void *values = a->v ? a->v_cache : a->k_cache;
    memset(o, 0, (size_t)v_dim * sizeof *o);
    const void *query = qd_cpu_at(a->q, row * a->q_stride + head * d, a->dtype);
    QD_FOR_VECTORS(i, width, d, { vec_store(q, i, vec_load(query, i, width, a->dtype) * vf_set(a->scale), width, QD_F32); });
    float most = -INFINITY, total = 0.0f;
    for (int64_t first = keys - window; first < keys; first += BLOCK) {
        int64_t count = keys - first < BLOCK ? keys - first : BLOCK, at = first % a->context;
        float block_most = most;
        for (int64_t j = 0; j < count; j++) {
            scores[j] = dot(q, qd_cpu_at(a->k_cache, row_at(a, at + j) * cols + from, a->dtype), d, a->dtype);
            if (a->softcap > 0)
                scores[j] = a->softcap * tanhf(scores[j] / a->softcap);
            block_most = scores[j] > block_most ? scores[j] : block_most;
        }
        float shrink = expf(most - block_most); /* 0 for the first block */
        total *= shrink;
        for (int64_t i = 0; i < v_dim; i++)
            o[i] *= shrink;
        for (int64_t j = 0; j < count; j++) {
            float weight = expf(scores[j] - block_most);
            const void *value = qd_cpu_at(values, row_at(a, at + j) * cols + from, a->dtype);
            total += weight;
            QD_FOR_VECTORS(i, width, v_dim, {
                vec_store(o, i, vec_load(o, i, width, QD_F32) + vec_load(value, i, width, a->dtype) * vf_set(weight), width, QD_F32);
            });
        }
        most = block_most;
    }
    void *out = qd_cpu_at_mut(a->o, row * a->o_stride + head * v_dim, a->dtype);
    QD_FOR_VECTORS(i, width, v_dim, { vec_store(out, i, vec_load(o, i, width, QD_F32) * vf_set(1.0f / total), width, a->dtype); });
    if (a->lse)
        a->lse[head * a->rows + row] = most + logf(total);
}

static void rows(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_attention_cached_args *a = context;
    for (int64_t i = begin; i < end; i++)
        one_row(a, i / a->heads, (int)(i % a->heads));
}

const qd_cpu_attention_cached_ops QD_ISA_NAME(qd_cpu_attention_cached_ops) = {.rows = rows};
