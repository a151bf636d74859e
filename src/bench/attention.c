/* Times attention alone: whole, and in the parts of ring attention. */
#include "bench/rates.h"

#include "base/clock.h"
#include "spec/layout/context.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct qd_rate_attention {
    int64_t batch, seq, q, kv; /* columns of queries, of keys */
    int heads, kv_heads, head_dim;
    float *qkv, *kv_part, *o, *lse, *d_o, *delta, *dq, *d_kv, *d_qkv;
};

qd_status qd_rate_attention_create(const qd_model *m, const qd_strategy *s, qd_rate_attention **attention)
{
    qd_rate_attention *a = calloc(1, sizeof *a);
    if (!a)
        return QD_FAIL(QD_NO_MEMORY, "no memory to measure attention");
    *attention = a;
    *a = (qd_rate_attention){.batch = s->micro_batch, .seq = s->seq, .heads = m->heads,
                             .kv_heads = m->kv_heads, .head_dim = m->head_dim};
    a->q = (int64_t)m->heads * m->head_dim;
    a->kv = (int64_t)m->kv_heads * m->head_dim;
    size_t rows = (size_t)(a->batch * a->seq), wide = (size_t)(a->q + 2 * a->kv);
    const struct {
        float **at;
        size_t count;
    } all[] = {
        {&a->qkv, rows * wide},
        {&a->d_qkv, rows * wide},
        {&a->kv_part, rows * 2 * (size_t)a->kv},
        {&a->d_kv, rows * 2 * (size_t)a->kv},
        {&a->o, rows * (size_t)a->q},
        {&a->d_o, rows * (size_t)a->q},
        {&a->dq, rows * (size_t)a->q},
        {&a->lse, rows * (size_t)a->heads},
        {&a->delta, rows * (size_t)a->heads},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (!(*all[i].at = calloc(all[i].count, sizeof(float))))
            return QD_FAIL(QD_NO_MEMORY, "no memory to measure attention");
    return QD_OK;
}

void qd_rate_attention_destroy(qd_rate_attention *a)
{
    if (!a)
        return;
    float *all[] = {a->qkv, a->d_qkv, a->kv_part, a->d_kv, a->o, a->d_o, a->dq, a->lse, a->delta};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    free(a);
}

static qd_status run_whole(const qd_rate_attention *a, qd_device *device, bool backward)
{
    int64_t stride = a->q + 2 * a->kv;
    qd_attention_args args = {.q = a->qkv, .k = a->qkv + a->q, .v = a->qkv + a->q + a->kv, .o = a->o, .lse = a->lse, .batch = a->batch,
                              .seq = a->seq,
                              .q_stride = stride, .k_stride = stride, .v_stride = stride, .o_stride = a->q, .heads = a->heads,
                              .kv_heads = a->kv_heads,
                              .head_dim = a->head_dim, .scale = 1.0f / sqrtf((float)a->head_dim), .dtype = QD_F32, .d_o = a->d_o,
                              .dq = a->d_qkv,
                              .dk = a->d_qkv + a->q, .dv = a->d_qkv + a->q + a->kv, .delta = a->delta};
    const qd_kernels *k = qd_device_kernels(device);
    return (backward ? k->attention_backward : k->attention_forward)(qd_device_compute_stream(device), &args);
}

/* Rank 0 of cp processes the keys of all its ranks, one part after another. */
static qd_status run_parts(const qd_rate_attention *a, qd_device *device, int cp, bool backward)
{
    const qd_kernels *k = qd_device_kernels(device);
    for (int round = 0; round < cp; round++) {
        qd_row_run q_runs[QD_CONTEXT_RUNS], k_runs[QD_CONTEXT_RUNS];
        int of = (cp - round) % cp;
        qd_attention_part_args args = {.q = a->qkv, .k = a->kv_part, .v = a->kv_part + a->kv, .o = a->o, .lse = a->lse,
                                       .q_runs = q_runs, .k_runs = k_runs,
                                       .q_run_count = qd_context_runs(a->seq, cp, 0, q_runs),
                                       .k_run_count = qd_context_runs(a->seq, cp, of, k_runs),
                                       .batch = a->batch, .q_seq = qd_context_rows(a->seq, cp, 0), .k_seq = qd_context_rows(a->seq, cp, of),
                                       .q_stride = a->q + 2 * a->kv, .k_stride = 2 * a->kv, .v_stride = 2 * a->kv, .o_stride = a->q,
                                       .heads = a->heads,
                                       .kv_heads = a->kv_heads, .head_dim = a->head_dim, .scale = 1.0f / sqrtf((float)a->head_dim),
                                       .begin = round == 0,
                                       .dtype = QD_F32, .d_o = a->d_o, .delta = a->delta, .dq = a->dq, .dk = a->d_kv, .dv = a->d_kv + a->kv,
                                       .dq_stride = a->q, .dk_stride = 2 * a->kv, .dv_stride = 2 * a->kv};
        QD_TRY((backward ? k->attention_part_backward : k->attention_part_forward)(qd_device_compute_stream(device), &args));
    }
    return QD_OK;
}

qd_status qd_rate_attention_run(const qd_rate_attention *a, qd_device *device, double seconds[2][QD_RATE_CUTS])
{
    for (int i = 0; i < 2 * QD_RATE_CUTS; i++) {
        int cut = i % QD_RATE_CUTS, cp = 1 << cut;
        bool backward = i >= QD_RATE_CUTS;
        seconds[backward][cut] = 0.0;
        if (a->seq < 2 * cp)
            continue;
        double begin = qd_clock_now();
        QD_TRY(cp == 1 ? run_whole(a, device, backward) : run_parts(a, device, cp, backward));
        QD_TRY(qd_stream_wait(qd_device_compute_stream(device)));
        seconds[backward][cut] = qd_clock_now() - begin;
    }
    return QD_OK;
}
