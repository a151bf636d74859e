/* Kernels that help casts to fp8: activations and their gradients that are cast without being
 * stored, norms that find the largest magnitude of what they write, casts that sum rows. Each is
 * compared with the kernels that do the same one after another: bit for bit on the CPU; a GPU may
 * contract other multiplications and additions, so single codes may differ there.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/fp8.h"
#include "support/ok.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

enum { BUFFERS = 24 };
typedef struct bench {
    qd_device *device;
    const qd_kernels *k;
    qd_stream *stream;
    struct {
        void *at;
        int64_t bytes;
    } buffer[BUFFERS];
    int count;
    bool cuda;
} bench;

static void *buffer(bench *b, int64_t bytes)
{
    assert_true(b->count < BUFFERS);
    ops_assert_ok(qd_device_alloc(b->device, bytes, &b->buffer[b->count].at));
    b->buffer[b->count].bytes = bytes;
    return b->buffer[b->count++].at;
}

static void release(bench *b)
{
    while (b->count-- > 0)
        qd_device_free(b->device, b->buffer[b->count].at, b->buffer[b->count].bytes);
    b->count = 0;
}

static void *halves(bench *b, int64_t count, double scale)
{
    uint16_t *values = malloc((size_t)count * 2);
    void *there = buffer(b, count * 2);
    assert_non_null(values);
    for (int64_t i = 0; i < count; i++)
        values[i] = qd_f32_to_bf16((float)(ops_normal() * scale));
    ops_assert_ok(qd_copy(b->stream, there, values, count * 2));
    ops_assert_ok(qd_stream_wait(b->stream));
    free(values);
    return there;
}

static void *fetch(bench *b, const void *there, int64_t bytes)
{
    void *here = malloc((size_t)bytes);
    assert_non_null(here);
    ops_assert_ok(qd_copy(b->stream, here, there, bytes));
    ops_assert_ok(qd_stream_wait(b->stream));
    return here;
}

static void same_floats(bench *b, const char *what, const float *got, const float *expected, int64_t count, double tol)
{
    float *g = fetch(b, got, count * 4), *e = fetch(b, expected, count * 4);
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < count; i++) {
        error += ((double)g[i] - e[i]) * ((double)g[i] - e[i]);
        norm += (double)e[i] * e[i];
    }
    if (!(sqrt(error) <= tol * sqrt(norm)))
        fail_msg("%s differs by %.3g of its norm", what, sqrt(error / norm));
    free(g);
    free(e);
}

/* Codes and scale. */
static void same_codes(bench *b, const char *what, const void *got, const void *expected, int64_t count)
{
    uint8_t *g = fetch(b, got, qd_fp8_bytes(count)), *e = fetch(b, expected, qd_fp8_bytes(count));
    int64_t different = 0;
    for (int64_t i = 0; i < count; i++)
        different += g[i] != e[i];
    if (different > (b->cuda ? count / 200 : 0))
        fail_msg("%s: %lld of %lld codes differ", what, (long long)different, (long long)count);
    if (memcmp(g + qd_fp8_scale_at(count), e + qd_fp8_scale_at(count), 4) != 0)
        fail_msg("%s: the scales differ", what);
    free(g);
    free(e);
}

static void activation(bench *b, qd_activation kind, qd_dtype grad, int64_t rows, int64_t cols)
{
    const int64_t wide = qd_activation_is_gated(kind) ? 2 * cols : cols;
    char what[128];
    qd_activation_args of = {.kind = kind, .rows = rows, .cols = cols, .alpha = 1.702f, .limit = 2.0f, .dtype = QD_BF16};
    of.x = halves(b, rows * wide, 2.0);
    void *dy = halves(b, rows * cols, 1e-4), *y = buffer(b, rows * cols * 2), *dx = buffer(b, rows * wide * 2);
    float *amax = buffer(b, 4), *dx_amax = buffer(b, 4), *fused_amax = buffer(b, 4), *fused_dx_amax = buffer(b, 4);
    void *codes[8];
    for (int i = 0; i < 8; i++)
        codes[i] = buffer(b, qd_fp8_bytes(rows * wide));
    /* one after another */
    qd_activation_args whole = of;
    whole.y = y;
    whole.dx = dx;
    ops_assert_ok(b->k->activation_forward(b->stream, &whole));
    whole.dy = dy;
    whole.y = NULL;
    ops_assert_ok(b->k->activation_backward(b->stream, &whole));
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.x = y, .amax = amax, .n = rows * cols, .dtype = QD_BF16}));
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.x = dx, .amax = dx_amax, .n = rows * wide, .dtype = QD_BF16}));
    ops_assert_ok(b->k->fp8_cast(b->stream, &(qd_fp8_cast_args){.x = y, .amax = amax, .to = codes[0], .transposed = codes[1], .rows = rows,
                                                                .cols = cols, .dtype = QD_BF16, .to_dtype = QD_F8E4M3}));
    ops_assert_ok(b->k->fp8_cast(b->stream, &(qd_fp8_cast_args){.x = dx, .amax = dx_amax, .to = codes[2], .transposed = codes[3],
                                                                .rows = rows, .cols = wide, .dtype = QD_BF16, .to_dtype = grad}));
    /* at once; the forward cast also without a transposed copy */
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.of = &of, .amax = fused_amax, .n = rows * cols, .dtype = QD_BF16}));
    ops_assert_ok(b->k->fp8_cast(b->stream, &(qd_fp8_cast_args){.of = &of, .amax = fused_amax, .to = codes[4], .rows = rows, .cols = cols,
                                                                .dtype = QD_BF16, .to_dtype = QD_F8E4M3}));
    snprintf(what, sizeof what, "activation %d", (int)kind);
    same_codes(b, what, codes[4], codes[0], rows * cols);
    ops_assert_ok(b->k->fp8_cast(b->stream, &(qd_fp8_cast_args){.of = &of, .amax = fused_amax, .to = codes[4], .transposed = codes[5],
                                                                .rows = rows, .cols = cols, .dtype = QD_BF16, .to_dtype = QD_F8E4M3}));
    same_codes(b, what, codes[4], codes[0], rows * cols);
    same_codes(b, what, codes[5], codes[1], rows * cols);
    same_floats(b, what, fused_amax, amax, 1, b->cuda ? 0.01 : 0.0);
    of.dy = dy;
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.of = &of, .amax = fused_dx_amax, .n = rows * wide, .dtype = QD_BF16}));
    ops_assert_ok(b->k->fp8_cast(b->stream, &(qd_fp8_cast_args){
        .of = &of, .amax = fused_dx_amax, .to = codes[6], .transposed = codes[7], .result_amax = fused_amax, .result_transposed = codes[5],
        .rows = rows, .cols = wide, .dtype = QD_BF16, .to_dtype = grad}));
    snprintf(what, sizeof what, "gradient of activation %d", (int)kind);
    same_floats(b, what, fused_dx_amax, dx_amax, 1, b->cuda ? 0.01 : 0.0);
    same_codes(b, what, codes[6], codes[2], rows * wide);
    same_codes(b, what, codes[7], codes[3], rows * wide);
    same_codes(b, what, codes[5], codes[1], rows * cols);
    if (b->cuda && !qd_activation_is_gated(kind)) { /* with the gradient of a bias */
        float *sums = buffer(b, cols * 4), *expected = buffer(b, cols * 4);
        ops_assert_ok(b->k->bias_grad(b->stream, &(qd_bias_grad_args){.dy = dx, .grad = expected, .rows = rows, .cols = cols,
                                                                      .dtype = QD_BF16, .grad_dtype = QD_F32}));
        ops_assert_ok(b->k->fp8_cast(b->stream, &(qd_fp8_cast_args){
            .of = &of, .amax = fused_dx_amax, .to = codes[6], .transposed = codes[7], .rows = rows, .cols = wide, .dtype = QD_BF16,
            .to_dtype = grad, .sums = sums, .sums_dtype = QD_F32}));
        same_floats(b, what, sums, expected, cols, 1e-3);
        same_codes(b, what, codes[7], codes[3], rows * wide);
    }
    release(b);
}

static void norm(bench *b, bool rms, bool add, int64_t rows, int64_t cols)
{
    void *x = halves(b, rows * cols, 1.0), *more = add ? halves(b, rows * cols, 1.0) : NULL, *gamma = halves(b, cols, 1.0);
    void *dy = halves(b, rows * cols, 1e-5), *y = buffer(b, rows * cols * 2), *sum = buffer(b, rows * cols * 2);
    void *dx = buffer(b, rows * cols * 2);
    float *mean = buffer(b, rows * 4), *rstd = buffer(b, rows * 4), *amax = buffer(b, 4), *expected = buffer(b, 4);
    float *dgamma = buffer(b, cols * 4);
    ops_assert_ok(b->k->norm_forward(b->stream, &(qd_norm_forward_args){
        .x = x, .add = more, .gamma = gamma, .sum = sum, .y = y, .mean = mean, .rstd = rstd, .amax = amax, .rows = rows, .cols = cols,
        .eps = 1e-5f, .rms = rms, .dtype = QD_BF16, .param_dtype = QD_BF16}));
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.x = y, .amax = expected, .n = rows * cols, .dtype = QD_BF16}));
    same_floats(b, "amax of a norm", amax, expected, 1, 0.0);
    ops_assert_ok(b->k->norm_backward(b->stream, &(qd_norm_backward_args){
        .dy = dy, .x = x, .gamma = gamma, .add = add ? dy : NULL, .mean = mean, .rstd = rstd, .dx = dx, .dgamma = dgamma, .amax = amax,
        .rows = rows, .cols = cols, .rms = rms, .dtype = QD_BF16, .param_dtype = QD_BF16, .grad_dtype = QD_F32}));
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.x = dx, .amax = expected, .n = rows * cols, .dtype = QD_BF16}));
    same_floats(b, "amax of the gradient of a norm", amax, expected, 1, 0.0);
    release(b);
}

static void sums(bench *b, qd_dtype to, bool plain, bool accumulate, int64_t rows, int64_t cols)
{
    void *x = halves(b, rows * cols, 1.0), *codes[4];
    float *amax = buffer(b, 4), *got = buffer(b, cols * 4), *expected = buffer(b, cols * 4);
    for (int i = 0; i < 4; i++)
        codes[i] = buffer(b, qd_fp8_bytes(rows * cols));
    ops_assert_ok(b->k->amax(b->stream, &(qd_amax_args){.x = x, .amax = amax, .n = rows * cols, .dtype = QD_BF16}));
    qd_fp8_cast_args a = {.x = x, .amax = amax, .to = codes[0], .transposed = codes[1], .rows = rows, .cols = cols, .dtype = QD_BF16,
                          .to_dtype = to, .sums_dtype = QD_F32};
    ops_assert_ok(b->k->fp8_cast(b->stream, &a));
    a.to = plain ? codes[2] : NULL;
    a.transposed = codes[3];
    a.sums = got;
    for (int i = 0; i <= accumulate; i++) {
        a.accumulate = i > 0;
        ops_assert_ok(b->k->fp8_cast(b->stream, &a));
        ops_assert_ok(b->k->bias_grad(b->stream, &(qd_bias_grad_args){.dy = x, .grad = expected, .rows = rows, .cols = cols,
                                                                      .accumulate = i > 0, .dtype = QD_BF16, .grad_dtype = QD_F32}));
    }
    same_floats(b, "sums of rows", got, expected, cols, b->cuda ? 1e-5 : 0.0);
    if (plain)
        same_codes(b, "codes of a cast with sums", codes[2], codes[0], rows * cols);
    same_codes(b, "transposed codes of a cast with sums", codes[3], codes[1], rows * cols);
    release(b);
}

static void on_device(bench *b)
{
    static const qd_activation kinds[] = {QD_ACT_GELU_TANH,  QD_ACT_GELU,  QD_ACT_SWIGLU,
                                          QD_ACT_GEGLU_TANH, QD_ACT_GEGLU, QD_ACT_SWIGLU_CLAMPED};
    for (int i = 0; i < COUNT(kinds); i++) {
        activation(b, kinds[i], QD_F8E5M2, 144, 208);
        activation(b, kinds[i], QD_F8E4M3, 64, 16);
    }
    for (int i = 0; i < 4; i++) {
        norm(b, i & 1, i & 2, 33, 256);
        norm(b, i & 1, i & 2, 130, 2048);
        norm(b, i & 1, i & 2, 5, 72);
    }
    norm(b, true, true, 9, 10240);
    for (int i = 0; i < 4; i++)
        sums(b, i & 1 ? QD_F8E4M3 : QD_F8E5M2, i & 2, i & 1, 272, 528);
}

static void same_as_apart(void **state)
{
    (void)state;
    bench cpu = {.device = ops_device(NULL, 2)};
    cpu.k = qd_device_kernels(cpu.device);
    cpu.stream = qd_device_compute_stream(cpu.device);
    on_device(&cpu);
}

static void same_as_apart_on_a_gpu(void **state)
{
    (void)state;
    bench gpu = {.device = ops_cuda(), .cuda = true};
    if (!gpu.device)
        skip();
    gpu.k = qd_device_kernels(gpu.device);
    gpu.stream = qd_device_compute_stream(gpu.device);
    on_device(&gpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(same_as_apart), cmocka_unit_test(same_as_apart_on_a_gpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
