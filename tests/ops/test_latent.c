/* Latent attention: queries, keys and values from their parts and back, and attention whose values
 * have heads of another size than keys. */
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_OF(x) ((int)(sizeof(x) / sizeof *(x)))

typedef struct latent_case {
    int64_t rows, seq;
    int heads, nope, rope, v;
    bool interleaved, positions;
    qd_dtype dtype;
} latent_case;

static const latent_case cases[] = {
    {1, 1, 1, 1, 2, 1, true, false, QD_F32},
    {9, 4, 3, 5, 6, 7, true, false, QD_F32},
    {37, 16, 2, 16, 8, 24, false, true, QD_F32},
    {65, 65, 4, 128, 64, 128, true, true, QD_F32},
    {37, 16, 3, 14, 34, 5, false, false, QD_BF16},
    {50, 10, 4, 32, 16, 24, true, true, QD_BF16},
    {33, 33, 3, 128, 64, 128, true, false, QD_BF16},
    {21, 7, 2, 128, 64, 128, false, true, QD_BF16},
};
static const latent_case speed_cases[] = {{16384, 4096, 16, 128, 64, 128, true, false, QD_BF16}};

enum { Q, KV, K_ROPE, QKV, TABLE, POSITIONS, TENSORS };

static int64_t q_cols(const latent_case *c)
{
    return c->heads * (int64_t)(c->nope + c->rope);
}

static int64_t kv_cols(const latent_case *c)
{
    return c->heads * (int64_t)(c->nope + c->v);
}

static int64_t all_cols(const latent_case *c)
{
    return 2 * q_cols(c) + c->heads * (int64_t)c->v;
}

static void describe(const void *p, char *text, size_t size)
{
    const latent_case *c = p;
    snprintf(text, size, "%lld rows, %d heads of %d + %d, %d %s%s%s", (long long)c->rows, c->heads, c->nope, c->rope, c->v,
             qd_dtype_name(c->dtype), c->interleaved ? ", interleaved" : "", c->positions ? ", positions" : "");
}

static int list(const latent_case *c, ops_tensor *t, bool back)
{
    ops_role part = back ? OPS_OUT : OPS_IN, all = back ? OPS_IN : OPS_OUT;
    t[Q] = (ops_tensor){.name = "q", .role = part, .dtype = c->dtype, .rows = c->rows, .cols = q_cols(c)};
    t[KV] = (ops_tensor){.name = "kv", .role = part, .dtype = c->dtype, .rows = c->rows, .cols = kv_cols(c)};
    t[K_ROPE] = (ops_tensor){.name = "k_rope", .role = part, .dtype = c->dtype, .rows = c->rows, .cols = c->rope};
    t[QKV] = (ops_tensor){.name = "qkv", .role = all, .dtype = c->dtype, .rows = c->rows, .cols = all_cols(c)};
    t[TABLE] = (ops_tensor){.name = "table", .role = OPS_IN, .dtype = QD_F32, .rows = c->seq, .cols = c->rope};
    t[POSITIONS] = (ops_tensor){.name = "positions", .role = c->positions ? OPS_IN : OPS_ABSENT, .dtype = QD_I32, .cols = c->rows,
                                .scale = (double)c->seq};
    return TENSORS;
}

static int tensors_join(const void *p, ops_tensor *t)
{
    return list(p, t, false);
}

static int tensors_split(const void *p, ops_tensor *t)
{
    return list(p, t, true);
}

/* Element i of pair `pair` of a rotary part. */
static int element(const latent_case *c, int pair, int i)
{
    return c->interleaved ? 2 * pair + i : pair + i * c->rope / 2;
}

static void turn(const latent_case *c, double *const *v, int64_t row, double sign, const double *x, double *y)
{
    int64_t position = c->positions ? (int64_t)v[POSITIONS][row] : row % c->seq;
    for (int i = 0; i < c->rope / 2; i++) {
        double cosine = v[TABLE][position * c->rope + 2 * i], sine = sign * v[TABLE][position * c->rope + 2 * i + 1];
        double low = x[element(c, i, 0)], high = x[element(c, i, 1)];
        y[element(c, i, 0)] = low * cosine - high * sine;
        y[element(c, i, 1)] = low * sine + high * cosine;
    }
}

static void reference_join(const void *p, double *const *v)
{
    const latent_case *c = p;
    int64_t dim = c->nope + c->rope;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t h = 0; h < c->heads; h++) {
            const double *q = v[Q] + r * q_cols(c) + h * dim, *kv = v[KV] + r * kv_cols(c) + h * (c->nope + c->v);
            double *query = v[QKV] + r * all_cols(c) + h * dim, *key = query + q_cols(c),
                   *value = v[QKV] + r * all_cols(c) + 2 * q_cols(c) + h * c->v;
            memcpy(query, q, (size_t)c->nope * sizeof *q);
            turn(c, v, r, 1, q + c->nope, query + c->nope);
            memcpy(key, kv, (size_t)c->nope * sizeof *q);
            turn(c, v, r, 1, v[K_ROPE] + r * c->rope, key + c->nope);
            memcpy(value, kv + c->nope, (size_t)c->v * sizeof *q);
        }
}

static void reference_split(const void *p, double *const *v)
{
    const latent_case *c = p;
    int64_t dim = c->nope + c->rope;
    for (int64_t r = 0; r < c->rows; r++) {
        double sum[256] = {0};
        for (int64_t h = 0; h < c->heads; h++) {
            const double *query = v[QKV] + r * all_cols(c) + h * dim, *key = query + q_cols(c),
                         *value = v[QKV] + r * all_cols(c) + 2 * q_cols(c) + h * c->v;
            double *q = v[Q] + r * q_cols(c) + h * dim, *kv = v[KV] + r * kv_cols(c) + h * (c->nope + c->v);
            memcpy(q, query, (size_t)c->nope * sizeof *q);
            turn(c, v, r, -1, query + c->nope, q + c->nope);
            memcpy(kv, key, (size_t)c->nope * sizeof *q);
            memcpy(kv + c->nope, value, (size_t)c->v * sizeof *q);
            for (int i = 0; i < c->rope; i++)
                sum[i] += key[c->nope + i];
        }
        turn(c, v, r, -1, sum, v[K_ROPE] + r * c->rope);
    }
}

static qd_latent_args arguments(const latent_case *c, void *const *t)
{
    return (qd_latent_args){.q = t[Q], .kv = t[KV], .k_rope = t[K_ROPE], .qkv = t[QKV], .table = t[TABLE], .positions = t[POSITIONS],
                            .rows = c->rows, .seq = c->seq, .heads = c->heads, .nope = c->nope, .rope = c->rope, .v = c->v,
                            .interleaved = c->interleaved, .dtype = c->dtype};
}

static qd_status run_join(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_latent_args a = arguments(c, t);
    return k->latent_join(stream, &a);
}

static qd_status run_split(const qd_kernels *k, qd_stream *stream, const void *c, void *const *t)
{
    qd_latent_args a = arguments(c, t);
    return k->latent_split(stream, &a);
}

static double bytes(const void *p)
{
    const latent_case *c = p;
    return (double)(c->rows * (q_cols(c) + kv_cols(c) + c->rope + all_cols(c))) * (double)qd_dtype_size(c->dtype);
}

/* Attention with heads of `dim` and values of `v_dim` equals attention with both padded to the
 * longer of the two by zeros. */

typedef struct sizes {
    int64_t seq;
    int heads, kv_heads, dim, v_dim;
} sizes;

static const sizes shapes[] = {{7, 2, 2, 6, 3},    {40, 3, 1, 24, 16},  {130, 2, 2, 192, 128}, {97, 2, 1, 18, 33},
                               {320, 4, 4, 48, 32}, {200, 2, 2, 16, 150}, {420, 20, 1, 64, 40}};

enum { TQ, TK, TV, TO, TLSE, TDO, TDQ, TDK, TDV, TDELTA, PARTS };

typedef struct attended {
    float *at[PARTS];
    int64_t count[PARTS];
} attended;

/* to (rows, heads, wide) = from (rows, heads, narrow), padded. */
static void pad(const float *from, int64_t rows, int heads, int narrow, int wide, float *to)
{
    for (int64_t r = 0; r < rows * heads; r++)
        for (int i = 0; i < wide; i++)
            to[r * wide + i] = i < narrow ? from[r * narrow + i] : 0.0f;
}

static attended allocate(const sizes *s, int dim, int v_dim)
{
    int64_t q = s->seq * s->heads, k = s->seq * s->kv_heads;
    attended a = {.count = {q * dim, k * dim, k * v_dim, q * v_dim, q, q * v_dim, q * dim, k * dim, k * v_dim, q}};
    for (int i = 0; i < PARTS; i++)
        a.at[i] = calloc((size_t)a.count[i], sizeof(float));
    return a;
}

static void release(attended *a)
{
    for (int i = 0; i < PARTS; i++)
        free(a->at[i]);
}

static void attend(qd_device *device, const sizes *s, int dim, int v_dim, bool parts, attended *t)
{
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    const float scale = 0.3f;
    float *const *p = t->at;
    qd_attention_args a = {.q = p[TQ], .k = p[TK], .v = p[TV], .o = p[TO], .lse = p[TLSE], .batch = 1, .seq = s->seq,
                           .q_stride = s->heads * dim, .k_stride = s->kv_heads * dim, .v_stride = s->kv_heads * v_dim,
                           .o_stride = s->heads * v_dim, .heads = s->heads, .kv_heads = s->kv_heads, .head_dim = dim, .v_dim = v_dim,
                           .scale = scale, .dtype = QD_F32, .d_o = p[TDO], .dq = p[TDQ], .dk = p[TDK], .dv = p[TDV], .delta = p[TDELTA]};
    if (!parts) {
        ops_assert_ok(k->attention_forward(stream, &a));
        ops_assert_ok(k->attention_backward(stream, &a));
        return;
    }
    /* Keys in two calls, as ranks of cp pass them on. */
    int64_t first = s->seq / 3, begin[2] = {0, first}, count[2] = {first, s->seq - first};
    qd_row_run rows = {0, 0, s->seq}, keys;
    for (int back = 0; back < 2; back++) {
        if (back)
            ops_assert_ok(k->attention_delta(stream, &a));
        for (int i = 0; i < 2; i++) {
            keys = (qd_row_run){0, begin[i], count[i]};
            qd_attention_part_args b = {.q = p[TQ], .k = p[TK] + begin[i] * a.k_stride, .v = p[TV] + begin[i] * a.v_stride, .o = p[TO],
                                        .lse = p[TLSE], .q_runs = &rows, .k_runs = &keys, .q_run_count = 1, .k_run_count = 1, .batch = 1,
                                        .q_seq = s->seq, .k_seq = count[i], .q_stride = a.q_stride, .k_stride = a.k_stride,
                                        .v_stride = a.v_stride, .o_stride = a.o_stride, .heads = s->heads, .kv_heads = s->kv_heads,
                                        .head_dim = dim, .v_dim = v_dim, .scale = scale, .begin = i == 0, .dtype = QD_F32, .d_o = p[TDO],
                                        .delta = p[TDELTA], .dq = p[TDQ], .dk = p[TDK] + begin[i] * a.k_stride,
                                        .dv = p[TDV] + begin[i] * a.v_stride, .dq_stride = a.q_stride, .dk_stride = a.k_stride,
                                        .dv_stride = a.v_stride};
            ops_assert_ok(back ? k->attention_part_backward(stream, &b) : k->attention_part_forward(stream, &b));
        }
    }
}

static void values_of_another_size(void **state)
{
    (void)state;
    static const char *const names[PARTS] = {"q", "k", "v", "o", "lse", "d_o", "dq", "dk", "dv", "delta"};
    for (int isa = 0; isa < OPS_CPU_ISAS; isa++) {
        qd_device *device = ops_cpu(ops_cpu_isas[isa]);
        for (int i = 0; device && i < 2 * COUNT_OF(shapes); i++) {
            const sizes *s = &shapes[i / 2];
            int wide = s->dim > s->v_dim ? s->dim : s->v_dim;
            attended own = allocate(s, s->dim, s->v_dim), padded = allocate(s, wide + wide % 2, wide + wide % 2);
            wide += wide % 2;
            const int heads[PARTS] = {s->heads, s->kv_heads, s->kv_heads, s->heads, 0, s->heads, s->heads, s->kv_heads, s->kv_heads, 0};
            const int dims[PARTS] = {s->dim, s->dim, s->v_dim, s->v_dim, 0, s->v_dim, s->dim, s->dim, s->v_dim, 0};
            for (int p = 0; p < PARTS; p++) {
                for (int64_t k = 0; (p <= TV || p == TDO) && k < own.count[p]; k++)
                    own.at[p][k] = (float)ops_normal();
                if (p <= TV || p == TDO)
                    pad(own.at[p], s->seq, heads[p], dims[p], wide, padded.at[p]);
            }
            attend(device, s, s->dim, s->v_dim, i % 2, &own);
            attend(device, s, wide, wide, i % 2, &padded);
            for (int p = TO; p < PARTS; p++) {
                double error = 0, size = 0;
                for (int64_t k = 0; k < own.count[p]; k++) {
                    int64_t at = dims[p] ? k / dims[p] * wide + k % dims[p] : k;
                    error += pow((double)(own.at[p][k] - padded.at[p][at]), 2);
                    size += pow((double)padded.at[p][at], 2);
                }
                if (!(size > 0 && error <= 1e-11 * size))
                    fail_msg("%s: %lld rows, heads of %d and %d%s: %s differs by %g", ops_cpu_isas[isa], (long long)s->seq, s->dim,
                             s->v_dim, i % 2 ? ", in parts" : "", names[p], sqrt(error / size));
            }
            release(&own);
            release(&padded);
        }
    }
}

static void refuses_bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    float x[64] = {0};
    qd_latent_args l = {.heads = 1, .nope = 2, .rope = 3, .v = 2, .seq = 1};
    ops_assert_fails(k->latent_join(stream, &l), QD_UNSUPPORTED, "must be even");
    qd_attention_args a = {.q = x, .k = x, .v = x, .o = x, .lse = x, .batch = 1, .seq = 1, .heads = 2, .kv_heads = 1, .head_dim = 4,
                           .v_dim = 6, .q_stride = 8, .k_stride = 4, .v_stride = 4, .o_stride = 12};
    ops_assert_fails(k->attention_forward(stream, &a), QD_USAGE, "strides");
    a.v_dim = 300;
    ops_assert_fails(k->attention_forward(stream, &a), QD_UNSUPPORTED, "v_dim 300");
    qd_attention_cached_args c = {.q = x, .k = x, .o = x, .k_cache = x, .rows = 1, .context = 2, .heads = 1, .kv_heads = 1, .head_dim = 4,
                                  .v_dim = 5};
    ops_assert_fails(k->attention_cached(stream, &c), QD_UNSUPPORTED, "values of 5 elements in keys of 4");
}

static const ops_op ops[] = {
    {.kernel = "latent_join", .cases = cases, .case_size = sizeof *cases, .case_count = COUNT_OF(cases), .describe = describe,
     .tensors = tensors_join, .reference = reference_join, .run = run_join, .speed_cases = speed_cases,
     .speed_count = COUNT_OF(speed_cases), .bytes = bytes},
    {.kernel = "latent_split", .cases = cases, .case_size = sizeof *cases, .case_count = COUNT_OF(cases), .describe = describe,
     .tensors = tensors_split, .reference = reference_split, .run = run_split, .speed_cases = speed_cases,
     .speed_count = COUNT_OF(speed_cases), .bytes = bytes},
};

int main(int argc, char **argv)
{
    const struct CMUnitTest more[] = {cmocka_unit_test(values_of_another_size), cmocka_unit_test(refuses_bad_arguments)};
    return ops_main(argc, argv, ops, COUNT_OF(ops), more, COUNT_OF(more));
}
