/* Attention of new rows to a key/value cache, as in generation: whole caches, windows whose caches
 * are rings, soft-caps, values that are the beginnings of keys. */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>

#define COUNT_OF(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct cached_case {
    int64_t rows, past, context, window; /* window 0: none */
    int heads, kv_heads, head_dim;
    double softcap; /* 0: none */
    qd_dtype dtype;
    int v_dim; /* values are this many elements of keys; 0: there is a cache of values */
    bool lse;  /* whether log-sum-exps are wanted, as with sinks */
} cached_case;

static const cached_case cases[] = {
    {1, 0, 1, 0, 1, 1, 2, 0, QD_F32, 0, false},
    {3, 5, 16, 0, 4, 2, 6, 0, QD_F32, 0, true},
    {1, 700, 1024, 0, 2, 1, 64, 0, QD_F32, 0, true},
    {9, 0, 40, 0, 2, 2, 32, 5, QD_F32, 0, false},
    {1, 300, 300, 40, 4, 1, 16, 0, QD_F32, 0, false},  /* a ring longer than the window */
    {1, 77, 40, 40, 2, 1, 20, 3, QD_F32, 0, false},    /* as long as the window: its oldest row is overwritten */
    {5, 60, 44, 40, 2, 1, 24, 0, QD_F32, 0, true},
    {7, 0, 90, 16, 2, 2, 8, 4, QD_F32, 0, false},
    {1, 900, 256, 256, 8, 4, 256, 50, QD_BF16, 0, false},
    {4, 30, 64, 0, 4, 2, 128, 0, QD_BF16, 0, true},
    {3, 5, 16, 0, 4, 1, 26, 0, QD_F32, 20, true},
    {1, 700, 1024, 0, 5, 1, 576, 0, QD_F32, 512, false},
    {6, 40, 64, 0, 4, 1, 576, 9, QD_BF16, 512, false},
    {2, 300, 300, 40, 2, 2, 700, 0, QD_F32, 33, false},
};

static void describe(const void *p, char *text, size_t size)
{
    const cached_case *c = p;
    snprintf(text, size, "%lld rows after %lld in %lld, W%lld, H%d/%d D%d V%d cap %g %s", (long long)c->rows, (long long)c->past,
             (long long)c->context, (long long)c->window, c->heads, c->kv_heads, c->head_dim, c->v_dim, c->softcap,
             qd_dtype_name(c->dtype));
}

enum { Q, K, V, O, K_CACHE, V_CACHE, LSE, TENSORS };

static int value_dim(const cached_case *c)
{
    return qd_attention_v_dim(c->head_dim, c->v_dim);
}

static int tensors(const void *p, ops_tensor *t)
{
    const cached_case *c = p;
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    t[Q] = (ops_tensor){.name = "q", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = q};
    t[K] = (ops_tensor){.name = "k", .role = OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = kv};
    t[V] = (ops_tensor){.name = "v", .role = c->v_dim ? OPS_ABSENT : OPS_IN, .dtype = c->dtype, .rows = c->rows, .cols = kv};
    t[O] = (ops_tensor){.name = "o", .role = OPS_OUT, .dtype = c->dtype, .rows = c->rows, .cols = c->heads * value_dim(c)};
    t[K_CACHE] = (ops_tensor){.name = "k_cache", .role = OPS_INOUT, .dtype = c->dtype, .rows = c->context, .cols = kv};
    t[V_CACHE] = t[K_CACHE];
    t[V_CACHE].name = "v_cache";
    if (c->v_dim)
        t[V_CACHE].role = OPS_ABSENT;
    t[LSE] = (ops_tensor){.name = "lse", .role = c->lse ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .rows = c->heads, .cols = c->rows,
                          .floor = 0.1};
    return TENSORS;
}

static void reference(const void *p, double *const *v)
{
    const cached_case *c = p;
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim, ring = c->window > 0 ? c->context : INT64_MAX;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < kv; i++) {
            int64_t at = (c->past + r) % ring * kv + i;
            v[K_CACHE][at] = v[K][r * kv + i];
            if (!c->v_dim)
                v[V_CACHE][at] = v[V][r * kv + i];
        }
    for (int64_t r = 0; r < c->rows; r++)
        for (int h = 0; h < c->heads; h++) {
            int64_t last = c->past + r, first = c->window > 0 && last - c->window + 1 > 0 ? last - c->window + 1 : 0;
            double total = 0, *o = v[O] + (r * c->heads + h) * value_dim(c);
            for (int i = 0; i < value_dim(c); i++)
                o[i] = 0;
            for (int64_t key = first; key <= last; key++) {
                int64_t at = key % ring * kv + h / (c->heads / c->kv_heads) * c->head_dim;
                double score = 0;
                for (int i = 0; i < c->head_dim; i++)
                    score += v[Q][r * q + h * c->head_dim + i] * v[K_CACHE][at + i];
                score /= sqrt(c->head_dim);
                double weight = exp(c->softcap > 0 ? c->softcap * tanh(score / c->softcap) : score);
                total += weight;
                for (int i = 0; i < value_dim(c); i++)
                    o[i] += weight * v[c->v_dim ? K_CACHE : V_CACHE][at + i];
            }
            for (int i = 0; i < value_dim(c); i++)
                o[i] /= total;
            if (c->lse)
                v[LSE][h * c->rows + r] = log(total);
        }
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const cached_case *c = p;
    int64_t q = c->heads * c->head_dim, kv = c->kv_heads * c->head_dim;
    return k->attention_cached(stream, &(qd_attention_cached_args){
        .q = t[Q], .k = t[K], .v = t[V], .o = t[O], .k_cache = t[K_CACHE], .v_cache = t[V_CACHE], .lse = t[LSE], .rows = c->rows,
        .past = c->past, .context = c->context, .q_stride = q, .k_stride = kv, .v_stride = kv, .o_stride = c->heads * value_dim(c),
        .window = c->window, .heads = c->heads, .kv_heads = c->kv_heads, .head_dim = c->head_dim, .v_dim = c->v_dim,
        .scale = (float)(1 / sqrt(c->head_dim)), .softcap = (float)c->softcap, .dtype = c->dtype});
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {{.kernel = "attention_cached", .cases = cases, .case_size = sizeof *cases, .case_count = COUNT_OF(cases),
                           .describe = describe, .tensors = tensors, .reference = reference, .run = run}};
    return ops_main(argc, argv, ops, COUNT_OF(ops), NULL, 0);
}
