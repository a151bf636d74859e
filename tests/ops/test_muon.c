/* The kernels of Muon: momentum, unit norm, linear combinations, updates, and the orthogonalization
 * built from them.
 * ctest: processors 2 */
#include "support/ops.h"

#include "optim/muon.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

typedef struct momentum_case {
    int64_t n;
    bool half, nesterov, out;
} momentum_case;

static const momentum_case momentum_cases[] = {
    {1, false, true, true}, {7, false, false, true}, {1000, true, true, true}, {40961, false, true, true}, {40961, true, false, false},
};
static const momentum_case momentum_speed[] = {{(int64_t)1 << 24, false, true, true}};
static const double inertia = 0.95, scale = 0.7;

static void momentum_describe(const void *p, char *text, size_t size)
{
    const momentum_case *c = p;
    snprintf(text, size, "%lld elements%s%s%s", (long long)c->n, c->half ? ", bf16" : "", c->nesterov ? ", nesterov" : "",
             c->out ? "" : ", no output");
}

static int momentum_tensors(const void *p, ops_tensor *t)
{
    const momentum_case *c = p;
    t[0] = (ops_tensor){.name = "grad", .role = OPS_IN, .dtype = c->half ? QD_BF16 : QD_F32, .cols = c->n};
    t[1] = (ops_tensor){.name = "m", .role = OPS_INOUT, .dtype = QD_F32, .cols = c->n};
    t[2] = (ops_tensor){.name = "out", .role = c->out ? OPS_OUT : OPS_ABSENT, .dtype = QD_F32, .cols = c->n};
    t[3] = (ops_tensor){.name = "scale", .role = OPS_IN, .dtype = QD_F64, .cols = 1};
    return 4;
}

static void momentum_derive(const void *p, double *const *v)
{
    (void)p;
    v[3][0] = scale;
}

static void momentum_reference(const void *p, double *const *v)
{
    const momentum_case *c = p;
    for (int64_t i = 0; i < c->n; i++) {
        double g = v[0][i] * scale;
        v[1][i] = inertia * v[1][i] + (1 - inertia) * g;
        if (c->out)
            v[2][i] = c->nesterov ? inertia * v[1][i] + (1 - inertia) * g : v[1][i];
    }
}

static qd_status momentum_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const momentum_case *c = p;
    return k->momentum(stream, &(qd_momentum_args){.grad = t[0], .m = t[1], .out = t[2], .n = c->n, .momentum = inertia, .grad_scale = t[3],
                                                   .nesterov = c->nesterov, .grad_dtype = c->half ? QD_BF16 : QD_F32});
}

static double momentum_bytes(const void *p)
{
    const momentum_case *c = p;
    return (double)c->n * ((c->half ? 2 : 4) + 8 + (c->out ? 4 : 0));
}

typedef struct matrix_case {
    int64_t rows, cols;
} matrix_case;

static const matrix_case matrix_cases[] = {{1, 1}, {1, 9}, {13, 5}, {64, 96}, {300, 170}};

static void matrix_describe(const void *p, char *text, size_t size)
{
    const matrix_case *c = p;
    snprintf(text, size, "%lld x %lld", (long long)c->rows, (long long)c->cols);
}

static int unit_norm_tensors(const void *p, ops_tensor *t)
{
    const matrix_case *c = p;
    t[0] = (ops_tensor){.name = "x", .role = OPS_INOUT, .dtype = QD_F32, .rows = c->rows, .cols = c->cols};
    t[1] = (ops_tensor){.name = "row squares", .role = OPS_IN, .dtype = QD_F64, .cols = c->rows};
    return 2;
}

static void unit_norm_derive(const void *p, double *const *v)
{
    const matrix_case *c = p;
    for (int64_t r = 0; r < c->rows; r++)
        v[1][r] = fabs(v[1][r]);
}

static void unit_norm_reference(const void *p, double *const *v)
{
    const matrix_case *c = p;
    double sum = 0;
    for (int64_t r = 0; r < c->rows; r++)
        sum += v[1][r];
    for (int64_t i = 0; i < c->rows * c->cols; i++)
        v[0][i] /= sqrt(sum);
}

static qd_status unit_norm_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const matrix_case *c = p;
    return k->unit_norm(stream, &(qd_unit_norm_args){.x = t[0], .row_squares = t[1], .rows = c->rows, .cols = c->cols, .eps = 1e-7});
}

typedef struct axpby_case {
    int64_t n;
    int over; /* 0: y is separate, 1: in place of a, 2: in place of b */
} axpby_case;

static const axpby_case axpby_cases[] = {{1, 0}, {7, 1}, {1000, 2}, {40961, 1}, {16384, 0}};

static void axpby_describe(const void *p, char *text, size_t size)
{
    const axpby_case *c = p;
    snprintf(text, size, "%lld elements%s", (long long)c->n, c->over == 1 ? ", over a" : c->over == 2 ? ", over b" : "");
}

static int axpby_tensors(const void *p, ops_tensor *t)
{
    const axpby_case *c = p;
    t[0] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = QD_F32, .cols = c->n};
    t[1] = (ops_tensor){.name = "b", .role = OPS_IN, .dtype = QD_F32, .cols = c->n};
    t[2] = (ops_tensor){.name = "y", .role = OPS_OUT, .dtype = QD_F32, .cols = c->n, .shares = c->over};
    return 3;
}

static void axpby_reference(const void *p, double *const *v)
{
    const axpby_case *c = p;
    for (int64_t i = 0; i < c->n; i++)
        v[2][i] = -4.775 * v[0][i] + 2.0315 * v[1][i];
}

static qd_status axpby_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const axpby_case *c = p;
    return k->axpby(stream, &(qd_axpby_args){.a = t[0], .b = t[1], .y = t[2], .n = c->n, .alpha = -4.775f, .beta = 2.0315f});
}

typedef struct update_case {
    int64_t n;
    bool half;
} update_case;

static const update_case update_cases[] = {{1, false}, {7, true}, {1000, false}, {40961, true}};

static void update_describe(const void *p, char *text, size_t size)
{
    const update_case *c = p;
    snprintf(text, size, "%lld elements%s", (long long)c->n, c->half ? ", bf16" : "");
}

static int update_tensors(const void *p, ops_tensor *t)
{
    const update_case *c = p;
    t[0] = (ops_tensor){.name = "param", .role = c->half ? OPS_OUT : OPS_ABSENT, .dtype = QD_BF16, .cols = c->n};
    t[1] = (ops_tensor){.name = "master", .role = OPS_INOUT, .dtype = QD_F32, .cols = c->n};
    t[2] = (ops_tensor){.name = "direction", .role = OPS_IN, .dtype = QD_F32, .cols = c->n};
    return 3;
}

static void update_reference(const void *p, double *const *v)
{
    const update_case *c = p;
    for (int64_t i = 0; i < c->n; i++) {
        v[1][i] = v[1][i] * (1 - 0.01) - 0.3 * v[2][i];
        if (c->half)
            v[0][i] = v[1][i];
    }
}

static qd_status update_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const update_case *c = p;
    return k->matrix_update(stream, &(qd_matrix_update_args){.param = c->half ? t[0] : t[1], .master = t[1], .direction = t[2], .n = c->n,
                                                             .rate = 0.3, .decay = 0.01, .param_dtype = c->half ? QD_BF16 : QD_F32});
}

enum { X, GRAM, POLY, NEXT, SQUARES };

static int orthogonalize_tensors(const void *p, ops_tensor *t)
{
    const matrix_case *c = p;
    int64_t r = c->rows < c->cols ? c->rows : c->cols;
    /* Values near 0 grow by 3.4 in each of five steps, and so do errors. */
    t[X] = (ops_tensor){.name = "x", .role = OPS_INOUT, .dtype = QD_F32, .rows = c->rows, .cols = c->cols, .scale = 1e-3, .tol = 2e-4};
    t[GRAM] = (ops_tensor){.name = "gram", .role = OPS_SCRATCH, .dtype = QD_F32, .rows = r, .cols = r};
    t[POLY] = (ops_tensor){.name = "poly", .role = OPS_SCRATCH, .dtype = QD_F32, .rows = r, .cols = r};
    t[NEXT] = (ops_tensor){.name = "next", .role = OPS_SCRATCH, .dtype = QD_F32, .rows = c->rows, .cols = c->cols};
    t[SQUARES] = (ops_tensor){.name = "squares", .role = OPS_SCRATCH, .dtype = QD_F64, .cols = c->rows};
    return 5;
}

/* c (m, n) = a (m, k) · b (k, n). */
static void multiply(double *c, const double *a, const double *b, int64_t m, int64_t k, int64_t n)
{
    memset(c, 0, (size_t)(m * n) * sizeof *c);
    for (int64_t i = 0; i < m; i++)
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < n; j++)
                c[i * n + j] += a[i * k + l] * b[l * n + j];
}

static double *transposed(const double *x, int64_t rows, int64_t cols)
{
    double *t = malloc((size_t)(rows * cols) * sizeof *t);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < cols; j++)
            t[j * rows + i] = x[i * cols + j];
    return t;
}

/* Always from the left, as in the publication; a tall matrix is transposed before and after. */
static void orthogonalize_reference(const void *p, double *const *v)
{
    const matrix_case *c = p;
    bool tall = c->rows > c->cols;
    int64_t m = tall ? c->cols : c->rows, n = tall ? c->rows : c->cols;
    double *x = transposed(v[X], c->rows, c->cols);
    if (!tall)
        memcpy(x, v[X], (size_t)(m * n) * sizeof *x);
    double *a = malloc((size_t)(m * m) * sizeof *a), *b = malloc((size_t)(m * m) * sizeof *b), *y = malloc((size_t)(m * n) * sizeof *y);
    double sum = 0;
    for (int64_t i = 0; i < m * n; i++)
        sum += x[i] * x[i];
    for (int64_t i = 0; i < m * n; i++)
        x[i] /= sqrt(sum);
    for (int step = 0; step < 5; step++) {
        double *t = transposed(x, m, n);
        multiply(a, x, t, m, n, m);
        multiply(b, a, a, m, m, m);
        for (int64_t i = 0; i < m * m; i++)
            b[i] = -4.7750 * a[i] + 2.0315 * b[i];
        multiply(y, b, x, m, m, n);
        for (int64_t i = 0; i < m * n; i++)
            x[i] = 3.4445 * x[i] + y[i];
        free(t);
    }
    double *result = tall ? transposed(x, m, n) : x;
    memcpy(v[X], result, (size_t)(m * n) * sizeof *result);
    if (tall)
        free(result);
    free(x);
    free(a);
    free(b);
    free(y);
}

static qd_status orthogonalize_run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *t)
{
    const matrix_case *c = p;
    const qd_muon_room room = {.gram = t[GRAM], .poly = t[POLY], .next = t[NEXT], .squares = t[SQUARES]};
    return qd_muon_orthogonalize(k, stream, t[X], c->rows, c->cols, 5, &room);
}

/* All singular values end up near 1, whatever they were: the squared norm is near the rank. Zero
 * stays zero. */
static void singular_values_are_near_one(void **state)
{
    (void)state;
    enum { ROWS = 24, COLS = 40 };
    static float x[ROWS * COLS], next[ROWS * COLS], gram[ROWS * ROWS], poly[ROWS * ROWS];
    static double squares[ROWS];
    qd_device *device = ops_device(NULL, 2);
    const qd_muon_room room = {gram, poly, next, squares};
    qd_stream *stream = qd_device_compute_stream(device);
    ops_assert_ok(qd_muon_orthogonalize(qd_device_kernels(device), stream, x, ROWS, COLS, 5, &room));
    for (int i = 0; i < ROWS * COLS; i++)
        assert_true(x[i] == 0.0f);
    for (int i = 0; i < ROWS * COLS; i++)
        x[i] = (float)((i / COLS + 1) * ops_normal()); /* rows of very different norm */
    ops_assert_ok(qd_muon_orthogonalize(qd_device_kernels(device), stream, x, ROWS, COLS, 5, &room));
    double largest = 0, least = INFINITY;
    for (int i = 0; i < ROWS; i++) {
        double sum = 0;
        for (int j = 0; j < COLS; j++)
            sum += (double)x[i * COLS + j] * (double)x[i * COLS + j];
        largest = sum > largest ? sum : largest;
        least = sum < least ? sum : least;
    }
    assert_true(least > 0.4 && largest < 1.6); /* the norm of a row is between the singular values */
}

static void bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    qd_unit_norm_args u = {.eps = 0};
    ops_assert_fails(qd_device_kernels(device)->unit_norm(qd_device_compute_stream(device), &u), QD_USAGE, "eps");
    qd_momentum_args m = {.grad_dtype = QD_I32};
    ops_assert_fails(qd_device_kernels(device)->momentum(qd_device_compute_stream(device), &m), QD_UNSUPPORTED, "int32");
}

int main(int argc, char **argv)
{
    const ops_op ops[] = {
        {.kernel = "momentum", .cases = momentum_cases, .speed_cases = momentum_speed, .case_size = sizeof *momentum_cases,
         .case_count = COUNT(momentum_cases), .speed_count = COUNT(momentum_speed), .describe = momentum_describe,
         .tensors = momentum_tensors, .derive = momentum_derive, .reference = momentum_reference, .run = momentum_run,
         .bytes = momentum_bytes},
        {.kernel = "unit_norm", .cases = matrix_cases, .case_size = sizeof *matrix_cases, .case_count = COUNT(matrix_cases),
         .describe = matrix_describe, .tensors = unit_norm_tensors, .derive = unit_norm_derive, .reference = unit_norm_reference,
         .run = unit_norm_run},
        {.kernel = "axpby", .cases = axpby_cases, .case_size = sizeof *axpby_cases, .case_count = COUNT(axpby_cases),
         .describe = axpby_describe, .tensors = axpby_tensors, .reference = axpby_reference, .run = axpby_run},
        {.kernel = "matrix_update", .cases = update_cases, .case_size = sizeof *update_cases, .case_count = COUNT(update_cases),
         .describe = update_describe, .tensors = update_tensors, .reference = update_reference, .run = update_run},
        {.kernel = "orthogonalize", .cases = matrix_cases, .case_size = sizeof *matrix_cases, .case_count = COUNT(matrix_cases),
         .describe = matrix_describe, .tensors = orthogonalize_tensors, .reference = orthogonalize_reference, .run = orthogonalize_run},
    };
    const struct CMUnitTest more[] = {cmocka_unit_test(singular_values_are_near_one), cmocka_unit_test(bad_arguments)};
    return ops_main(argc, argv, ops, COUNT(ops), more, COUNT(more));
}
