/* Token and position embedding, forward and backward.
 * ctest: processors 2 */
#include "support/ops.h"

#include "base/half.h"

#include <stdio.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct embed_case {
    int64_t rows, cols, seq, vocab;
    bool place, positions; /* with a position table; with explicit positions */
    bool one_token;        /* all rows hold the same token */
    qd_dtype dtype, param_dtype; /* of y and dy; of tables and their gradients */
    int64_t first, held;         /* rows of the vocabulary that the table holds; held 0: all */
} embed_case;

static const embed_case cases[] = {
    {1, 1, 1, 1, false, false, false, QD_F32, QD_F32, 0, 0},
    {9, 7, 4, 5, true, false, false, QD_F32, QD_F32, 0, 0},
    {65, 7, 16, 3000, true, true, false, QD_F32, QD_F32, 0, 0},
    {130, 1000, 64, 50, true, false, false, QD_F32, QD_F32, 0, 0},
    {5000, 33, 512, 5001, true, false, false, QD_F32, QD_F32, 0, 0}, /* more rows than one batch of the backward pass */
    {300, 4097, 100, 17, false, false, true, QD_F32, QD_F32, 0, 0},
    {130, 1000, 64, 50, true, true, false, QD_BF16, QD_BF16, 0, 0},
    {65, 7, 16, 3000, true, false, false, QD_BF16, QD_F32, 0, 0},
    {65, 1025, 16, 11, true, false, false, QD_F32, QD_BF16, 0, 0},
    {65, 7, 16, 3000, true, true, false, QD_F32, QD_F32, 1000, 1500},
    {130, 1000, 64, 50, false, false, false, QD_BF16, QD_BF16, 25, 25},
    {5000, 33, 512, 101, true, false, false, QD_F32, QD_F32, 0, 51},
    {40, 8, 16, 30, false, false, true, QD_F32, QD_F32, 20, 10}, /* no row is held here */
};
static const embed_case speed[] = {
    {4096, 768, 1024, 50257, true, false, false, QD_F32, QD_F32, 0, 0},
    {4096, 768, 1024, 50257, true, false, false, QD_BF16, QD_BF16, 0, 0},
};

static void describe(const void *p, char *text, size_t size)
{
    const embed_case *c = p;
    int used = snprintf(text, size, "%lldx%lld, vocabulary %lld, %s, tables %s%s%s%s", (long long)c->rows, (long long)c->cols,
                        (long long)c->vocab, qd_dtype_name(c->dtype), qd_dtype_name(c->param_dtype),
                        c->place ? ", position table" : "", c->positions ? ", positions" : "",
                        c->one_token ? ", one token" : "");
    if (c->held > 0)
        snprintf(text + used, size - (size_t)used, ", rows %lld to %lld here", (long long)c->first, (long long)(c->first + c->held - 1));
}

/* TABLE and PLACES hold the tables forward and their gradients backward; Y holds y or dy. */
enum { TOKENS, POSITIONS, TABLE, PLACES, Y, TENSORS };

static int tensors(const embed_case *c, ops_tensor *t, bool backward)
{
    ops_role table = backward ? OPS_INOUT : OPS_IN;
    t[TOKENS] = (ops_tensor){.name = "tokens", .role = OPS_IN, .dtype = QD_I32, .cols = c->rows,
                             .offset = c->one_token ? (double)(c->vocab / 2) : 0,
                             .scale = c->one_token ? 1 : (double)c->vocab};
    t[POSITIONS] = (ops_tensor){.name = "positions", .role = c->positions ? OPS_IN : OPS_ABSENT, .dtype = QD_I32,
                                .cols = c->rows, .scale = (double)c->seq};
    t[TABLE] = (ops_tensor){.name = "token table", .role = table, .dtype = c->param_dtype, .rows = c->held > 0 ? c->held : c->vocab,
                            .cols = c->cols};
    t[PLACES] = (ops_tensor){.name = "position table", .role = c->place ? table : OPS_ABSENT, .dtype = c->param_dtype,
                             .rows = c->seq, .cols = c->cols};
    t[Y] = (ops_tensor){.name = backward ? "dy" : "y", .role = backward ? OPS_IN : OPS_OUT, .dtype = c->dtype,
                        .rows = c->rows, .cols = c->cols};
    return TENSORS;
}

static int forward_tensors(const void *c, ops_tensor *t)
{
    return tensors(c, t, false);
}

static int backward_tensors(const void *c, ops_tensor *t)
{
    return tensors(c, t, true);
}

static int64_t position_of(const embed_case *c, double *const *v, int64_t row)
{
    return c->positions ? (int64_t)v[POSITIONS][row] : row % c->seq;
}

/* The table row of a row's token, -1: not held here. */
static int64_t table_row(const embed_case *c, double *const *v, int64_t row)
{
    int64_t index = (int64_t)v[TOKENS][row] - c->first;
    return c->held > 0 && (index < 0 || index >= c->held) ? -1 : index;
}

static void forward_reference(const void *p, double *const *v)
{
    const embed_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < c->cols; i++)
            v[Y][r * c->cols + i] = (table_row(c, v, r) >= 0 ? v[TABLE][table_row(c, v, r) * c->cols + i] : 0) +
                                    (c->place ? v[PLACES][position_of(c, v, r) * c->cols + i] : 0);
}

static void backward_reference(const void *p, double *const *v)
{
    const embed_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        for (int64_t i = 0; i < c->cols; i++) {
            if (table_row(c, v, r) >= 0)
                v[TABLE][table_row(c, v, r) * c->cols + i] += v[Y][r * c->cols + i];
            if (c->place)
                v[PLACES][position_of(c, v, r) * c->cols + i] += v[Y][r * c->cols + i];
        }
}

static qd_status forward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const embed_case *c = p;
    return k->embedding_forward(stream, &(qd_embedding_forward_args){.tokens = t[TOKENS], .positions = t[POSITIONS],
                                                                     .token_table = t[TABLE],
                                                                     .position_table = t[PLACES], .y = t[Y],
                                                                     .rows = c->rows, .cols = c->cols, .seq = c->seq,
                                                                     .vocab = c->vocab, .first = c->first, .held = c->held,
                                                                     .dtype = c->dtype,
                                                                     .param_dtype = c->param_dtype});
}

static qd_status backward_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const embed_case *c = p;
    return k->embedding_backward(stream, &(qd_embedding_backward_args){.tokens = t[TOKENS], .positions = t[POSITIONS],
                                                                       .dy = t[Y], .token_grad = t[TABLE],
                                                                       .position_grad = t[PLACES], .rows = c->rows,
                                                                       .cols = c->cols, .seq = c->seq,
                                                                       .vocab = c->vocab, .first = c->first, .held = c->held,
                                                                       .dtype = c->dtype,
                                                                       .grad_dtype = c->param_dtype});
}

static double forward_bytes(const void *p)
{
    const embed_case *c = p;
    return (double)(c->rows * c->cols) * (double)(qd_dtype_size(c->dtype) + 2 * qd_dtype_size(c->param_dtype));
}

/* dy twice; each token's gradient read and written (random tokens: nearly all differ); the position
 * gradient. */
static double backward_bytes(const void *p)
{
    const embed_case *c = p;
    return (double)(c->rows * c->cols) * (double)(2 * qd_dtype_size(c->dtype) + 2 * qd_dtype_size(c->param_dtype)) +
           (double)(c->seq * c->cols) * 2 * (double)qd_dtype_size(c->param_dtype);
}

/* fp32 sums follow the rows in ascending order, and a bf16 gradient is rounded once per batch of
 * rows: exact to the bit. */
static void sums_in_row_order(void **state)
{
    (void)state;
    enum { ROWS = 4000, COLS = 19, VOCAB = 13 };
    static float dy[ROWS * COLS], grad[VOCAB * COLS], want[VOCAB * COLS];
    static uint16_t half[VOCAB * COLS];
    static int32_t tokens[ROWS];
    for (int r = 0; r < ROWS; r++)
        tokens[r] = (int32_t)(ops_uniform() * VOCAB);
    for (int i = 0; i < ROWS * COLS; i++)
        dy[i] = (float)ops_normal();
    for (int i = 0; i < ROWS * COLS; i++)
        want[tokens[i / COLS] * COLS + i % COLS] += dy[i];
    qd_device *device = ops_device(NULL, 2);
    qd_embedding_backward_args a = {.tokens = tokens, .dy = dy, .token_grad = grad, .rows = ROWS, .cols = COLS,
                                    .seq = 1, .vocab = VOCAB, .dtype = QD_F32, .grad_dtype = QD_F32};
    ops_assert_ok(qd_device_kernels(device)->embedding_backward(qd_device_compute_stream(device), &a));
    assert_memory_equal(grad, want, sizeof grad);
    a.token_grad = half;
    a.grad_dtype = QD_BF16;
    ops_assert_ok(qd_device_kernels(device)->embedding_backward(qd_device_compute_stream(device), &a));
    for (int i = 0; i < VOCAB * COLS; i++)
        assert_int_equal(half[i], qd_f32_to_bf16(want[i]));
}

static void out_of_range(void **state)
{
    (void)state;
    float table[8] = {0}, y[8];
    int32_t tokens[] = {1, 4}, below[] = {-2, 0}, fine[] = {0, 3};
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    qd_embedding_forward_args f = {.tokens = tokens, .token_table = table, .y = y, .rows = 2, .cols = 2, .seq = 2,
                                   .vocab = 4, .dtype = QD_F32, .param_dtype = QD_F32};
    ops_assert_fails(k->embedding_forward(stream, &f), QD_USAGE, "row 1 has token 4; it must be within 0 .. 3");
    f.tokens = below;
    ops_assert_fails(k->embedding_forward(stream, &f), QD_USAGE, "row 0 has token -2");
    f.tokens = fine;
    f.position_table = table;
    f.positions = below;
    ops_assert_fails(k->embedding_forward(stream, &f), QD_USAGE, "row 0 has position -2");
    qd_embedding_backward_args b = {.tokens = tokens, .dy = y, .token_grad = table, .rows = 2, .cols = 2, .seq = 2,
                                    .vocab = 4, .dtype = QD_F32, .grad_dtype = QD_F32};
    ops_assert_fails(k->embedding_backward(stream, &b), QD_USAGE, "row 1 has token 4");
    for (int i = 0; i < 8; i++)
        assert_true(table[i] == 0);
}

/* A GPU detects it later, and reports it when the host waits; nothing is written out of bounds. */
static void out_of_range_on_gpu(void **state)
{
    (void)state;
    qd_device *device = ops_cuda();
    if (!device)
        skip();
    enum { ROWS = 3, COLS = 8, VOCAB = 4 };
    int32_t tokens[ROWS] = {1, VOCAB, 2};
    float grad[VOCAB * COLS], dy[ROWS * COLS];
    void *t, *g, *d;
    qd_stream *stream = qd_device_compute_stream(device);
    for (int i = 0; i < ROWS * COLS; i++)
        dy[i] = 1;
    ops_assert_ok(qd_device_alloc(device, sizeof tokens, &t));
    ops_assert_ok(qd_device_alloc(device, sizeof grad, &g));
    ops_assert_ok(qd_device_alloc(device, sizeof dy, &d));
    ops_assert_ok(qd_copy(stream, t, tokens, sizeof tokens));
    ops_assert_ok(qd_copy(stream, d, dy, sizeof dy));
    qd_embedding_backward_args b = {.tokens = t, .dy = d, .token_grad = g, .rows = ROWS, .cols = COLS, .seq = ROWS,
                                    .vocab = VOCAB, .dtype = QD_F32, .grad_dtype = QD_F32};
    ops_assert_ok(qd_device_kernels(device)->embedding_backward(stream, &b));
    ops_assert_fails(qd_stream_wait(stream), QD_USAGE, "row 1 has token 4; it must be within 0 .. 3");
    ops_assert_ok(qd_copy(stream, grad, g, sizeof grad));
    ops_assert_ok(qd_stream_wait(stream)); /* reported once */
    for (int i = 0; i < VOCAB * COLS; i++)
        assert_true(grad[i] == (float)(i / COLS == 1 || i / COLS == 2));
    qd_device_free(device, t, sizeof tokens);
    qd_device_free(device, g, sizeof grad);
    qd_device_free(device, d, sizeof dy);
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "embedding_forward", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = forward_tensors,
         .reference = forward_reference, .run = forward_run, .bytes = forward_bytes},
        {.kernel = "embedding_backward", .cases = cases, .speed_cases = speed, .case_size = sizeof *cases,
         .case_count = COUNT(cases), .speed_count = COUNT(speed), .describe = describe, .tensors = backward_tensors,
         .reference = backward_reference, .run = backward_run, .bytes = backward_bytes},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(sums_in_row_order), cmocka_unit_test(out_of_range),
                                      cmocka_unit_test(out_of_range_on_gpu)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
