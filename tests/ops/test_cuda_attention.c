/* Attention on a GPU through cuDNN compared with our own kernels, with kernels that may add in any
 * order: the graphs of training runs, which the deterministic devices of the other tests do not
 * use. */
#include "base/half.h"
#include "support/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef QD_TEST_CUDA
#include "device/cuda/gemm/search.h"

typedef struct shape {
    int64_t batch, seq, window;
    int heads, kv_heads, head_dim;
    float softcap;
    int v_dim; /* 0: head_dim */
} shape;

static const shape shapes[] = {
    {1, 1024, 0, 4, 2, 256, 0, 0},   {1, 1024, 300, 4, 2, 256, 20, 0}, {2, 1024, 0, 4, 4, 256, 20, 0},
    {1, 2048, 512, 8, 2, 128, 0, 0}, {2, 1024, 100, 4, 2, 128, 10, 0}, {1, 640, 0, 2, 2, 64, 5, 0},
    {2, 1024, 0, 4, 4, 192, 0, 128}, {1, 777, 0, 4, 4, 192, 0, 128},  {1, 1024, 0, 4, 4, 48, 0, 32},
    {1, 512, 0, 2, 2, 24, 0, 16},    {1, 512, 0, 2, 2, 64, 0, 128},
};

/* Queries, keys and values with their gradients, (rows, width_of); results. */
enum { QKV, D_QKV, O, D_O, LSE, DELTA, BUFFERS };

static int v_dim_of(const shape *s)
{
    return qd_attention_v_dim(s->head_dim, s->v_dim);
}

/* Columns of queries, keys and values side by side. */
static int64_t width_of(const shape *s)
{
    return (int64_t)(s->heads + s->kv_heads) * s->head_dim + (int64_t)s->kv_heads * v_dim_of(s);
}

static qd_attention_args arguments(const shape *s, void *const *at)
{
    const int64_t q = (int64_t)s->heads * s->head_dim, kv = (int64_t)s->kv_heads * s->head_dim, width = width_of(s);
    uint16_t *qkv = at[QKV], *d = at[D_QKV];
    return (qd_attention_args){
        .q = qkv, .k = qkv + q, .v = qkv + q + kv, .o = at[O], .lse = at[LSE], .batch = s->batch, .seq = s->seq, .q_stride = width,
        .k_stride = width, .v_stride = width, .o_stride = s->heads * v_dim_of(s), .window = s->window, .heads = s->heads,
        .kv_heads = s->kv_heads, .head_dim = s->head_dim, .v_dim = s->v_dim, .scale = (float)(1 / sqrt(s->head_dim)),
        .softcap = s->softcap, .dtype = QD_BF16, .d_o = at[D_O], .dq = d, .dk = d + q, .dv = d + q + kv, .delta = at[DELTA]};
}

/* |a - b| / |b| of two results on the device. */
static double difference(qd_stream *stream, const void *a, const void *b, int64_t elements, bool half)
{
    const int64_t bytes = elements * (half ? 2 : 4);
    void *x = malloc((size_t)bytes), *y = malloc((size_t)bytes);
    double error = 0, norm = 0;
    ops_assert_ok(qd_copy(stream, x, a, bytes));
    ops_assert_ok(qd_copy(stream, y, b, bytes));
    ops_assert_ok(qd_stream_wait(stream));
    for (int64_t i = 0; i < elements; i++) {
        const double p = half ? (double)qd_bf16_to_f32(((uint16_t *)x)[i]) : (double)((float *)x)[i];
        const double r = half ? (double)qd_bf16_to_f32(((uint16_t *)y)[i]) : (double)((float *)y)[i];
        error += (p - r) * (p - r);
        norm += r * r;
    }
    free(x);
    free(y);
    return sqrt(error / norm);
}

static void both_agree(qd_device *device, const shape *s)
{
    qd_stream *stream = qd_device_compute_stream(device);
    const qd_kernels *k = qd_device_kernels(device);
    const int64_t rows = s->batch * s->seq, o_cols = (int64_t)s->heads * v_dim_of(s), width = width_of(s);
    const int64_t lines = rows * s->heads, all = rows * width, out = rows * o_cols;
    const int64_t bytes[BUFFERS] = {all * 2, all * 2, out * 2, out * 2, lines * 4, lines * 4};
    void *at[2][BUFFERS];
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < BUFFERS; i++) {
            if (side && (i == QKV || i == D_O)) {
                at[side][i] = at[0][i];
                continue;
            }
            ops_assert_ok(qd_device_alloc(device, bytes[i], &at[side][i]));
            if (i != QKV && i != D_O)
                continue;
            uint16_t *values = malloc((size_t)bytes[i]);
            for (int64_t e = 0; e < bytes[i] / 2; e++)
                values[e] = qd_f32_to_bf16((float)ops_normal());
            ops_assert_ok(qd_copy(stream, at[side][i], values, bytes[i]));
            ops_assert_ok(qd_stream_wait(stream));
            free(values);
        }
    const qd_attention_args chosen = arguments(s, at[0]), own = arguments(s, at[1]);
    ops_assert_ok(k->attention_forward(stream, &chosen));
    ops_assert_ok(k->attention_backward(stream, &chosen));
    ops_assert_ok(qd_cuda_attention_forward_own(stream, &own));
    ops_assert_ok(qd_cuda_attention_backward_own(stream, &own));
    const double o = difference(stream, at[0][O], at[1][O], out, true), lse = difference(stream, at[0][LSE], at[1][LSE], lines, false),
                 d = difference(stream, at[0][D_QKV], at[1][D_QKV], all, true);
    printf("T%lld H%d/%d D%d V%d W%lld cap %g: o %.1e, lse %.1e, gradients %.1e\n", (long long)s->seq, s->heads, s->kv_heads, s->head_dim,
           v_dim_of(s), (long long)s->window, (double)s->softcap, o, lse, d);
    if (!(o < 6e-3 && lse < 2e-4 && d < 1e-2))
        fail_msg("they differ");
    for (int side = 0; side < 2; side++)
        for (int i = 0; i < BUFFERS; i++)
            if (!side || (i != QKV && i != D_O))
                qd_device_free(device, at[side][i], bytes[i]);
}

static void cudnn_agrees_with_own_kernels(void **state)
{
    (void)state;
    qd_device *device;
    if (!ops_cuda())
        skip();
    ops_assert_ok(qd_device_create("cuda", NULL, &device));
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        both_agree(device, &shapes[i]);
    qd_device_destroy(device);
}
#endif

int main(void)
{
#ifdef QD_TEST_CUDA
    const struct CMUnitTest tests[] = {cmocka_unit_test(cudnn_agrees_with_own_kernels)};
    return cmocka_run_group_tests(tests, NULL, NULL);
#else
    printf("skipped: a build without CUDA\n");
    return 77;
#endif
}
