/* GEMM: all transposes, strides, types, bias and accumulation, sizes around the edges of tiles. */
#include "device/aligned_gemm.h"
#include "device/cpu/gemm/matmul_impl.h"
#include "support/ops.h"

#include "base/half.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CUT = -1 };

typedef struct matmul_case {
    int64_t m, n, k;
    bool trans_a, trans_b, accumulate, bias;
    qd_dtype a, b, c;
    int64_t pad; /* added to each row stride; CUT: strides are multiples of 64, and the two parts of qd_matmul_cut are run */
} matmul_case;

enum { A, B, BIAS, C };

static void describe(const void *p, char *text, size_t size)
{
    const matmul_case *c = p;
    snprintf(text, size, "%lldx%lldx%lld %c%c%s%s %s·%s→%s%s", (long long)c->m, (long long)c->n, (long long)c->k,
             c->trans_a ? 'T' : 'N', c->trans_b ? 'T' : 'N', c->accumulate ? " +=" : "", c->bias ? " bias" : "",
             qd_dtype_name(c->a), qd_dtype_name(c->b), qd_dtype_name(c->c), c->pad == CUT ? " cut" : c->pad ? " strided" : "");
}

static qd_matmul_args arguments(const matmul_case *c)
{
    qd_matmul_args a = {
        .m = c->m, .n = c->n, .k = c->k,
        .lda = (c->trans_a ? c->m : c->k) + c->pad,
        .ldb = (c->trans_b ? c->k : c->n) + c->pad,
        .ldc = c->n + c->pad,
        .trans_a = c->trans_a, .trans_b = c->trans_b, .accumulate = c->accumulate,
        .a_dtype = c->a, .b_dtype = c->b, .c_dtype = c->c,
    };
    if (c->pad == CUT) {
        a.lda = (a.lda + 64) / 64 * 64;
        a.ldb = (a.ldb + 64) / 64 * 64;
        a.ldc = (a.ldc + 64) / 64 * 64;
    }
    return a;
}

static int tensors(const void *p, ops_tensor *t)
{
    const matmul_case *c = p;
    qd_matmul_args a = arguments(c);
    t[A] = (ops_tensor){.name = "a", .role = OPS_IN, .dtype = c->a, .rows = c->trans_a ? c->k : c->m,
                        .cols = c->trans_a ? c->m : c->k, .ld = a.lda};
    t[B] = (ops_tensor){.name = "b", .role = OPS_IN, .dtype = c->b, .rows = c->trans_b ? c->n : c->k,
                        .cols = c->trans_b ? c->k : c->n, .ld = a.ldb};
    t[BIAS] = (ops_tensor){.name = "bias", .role = c->bias ? OPS_IN : OPS_ABSENT, .dtype = c->b, .cols = c->n};
    t[C] = (ops_tensor){.name = "c", .role = c->accumulate ? OPS_INOUT : OPS_OUT, .dtype = c->c, .rows = c->m,
                        .cols = c->n, .ld = a.ldc};
    return 4;
}

static void reference(const void *p, double *const *v)
{
    const matmul_case *c = p;
    qd_matmul_args a = arguments(c);
    for (int64_t i = 0; i < c->m; i++) {
        for (int64_t j = 0; j < c->n; j++) {
            double sum = c->bias ? v[BIAS][j] : 0;
            for (int64_t k = 0; k < c->k; k++)
                sum += v[A][c->trans_a ? k * a.lda + i : i * a.lda + k] *
                       v[B][c->trans_b ? j * a.ldb + k : k * a.ldb + j];
            double *to = &v[C][i * a.ldc + j];
            *to = c->accumulate ? *to + sum : sum;
        }
    }
}

static qd_status run(const qd_kernels *k, qd_stream *stream, const void *p, void *const *v)
{
    const matmul_case *c = p;
    qd_matmul_args a = arguments(c);
    a.a = v[A];
    a.b = v[B];
    a.bias = v[BIAS];
    a.c = v[C];
    if (c->pad != CUT)
        return k->matmul(stream, &a);
    qd_matmul_args parts[2];
    assert_int_equal(qd_matmul_cut(&a, 0, parts), 2);
    QD_TRY(k->matmul(stream, &parts[0]));
    return k->matmul(stream, &parts[1]);
}

static double flops(const void *p)
{
    const matmul_case *c = p;
    return 2.0 * (double)c->m * (double)c->n * (double)c->k;
}

#define F QD_F32
#define H QD_BF16
static const matmul_case cases[] = {
    {1, 1, 1, false, false, false, false, F, F, F, 0},
    {1, 5, 3, false, true, false, true, F, F, F, 1},
    {7, 1, 9, true, false, true, false, F, F, F, 0},
    {3, 4, 0, false, false, false, true, F, F, F, 0}, /* k = 0: c = bias */
    {3, 4, 0, false, true, true, false, F, F, F, 2},
    {17, 33, 65, false, false, false, false, F, F, F, 0},
    {17, 33, 65, false, true, false, true, F, F, F, 3},
    {17, 33, 65, true, false, true, false, F, F, F, 5},
    {17, 33, 65, true, true, true, true, F, F, F, 1},
    {64, 48, 96, false, true, false, true, F, F, F, 0},
    {96, 768, 384, false, true, false, true, F, F, F, 0},
    {341, 131, 385, false, false, true, true, F, F, F, 7}, /* across the edge of a block of k */
    {13, 1601, 50, false, true, false, false, F, F, F, 0}, /* many items, few rows */
    {131, 97, 800, true, false, true, false, F, F, F, 0},
    {600, 800, 40, false, true, false, true, F, F, F, 0}, /* several items */
    {17, 33, 65, false, true, false, true, H, H, H, 3},
    {31, 18, 77, true, false, true, false, H, H, F, 0}, /* weight gradient into fp32 */
    {31, 18, 500, true, false, true, false, H, H, H, 1},
    {29, 66, 401, false, false, false, false, H, H, F, 1},
    {400, 790, 33, false, true, false, true, H, H, H, 0}, /* several items, sums on the side */
    {850, 870, 20, true, false, true, false, H, H, H, 0}, /* several blocks of sums */
    {900, 850, 70, true, false, true, false, F, F, F, 3}, /* b packed in pieces in both dimensions */
    {900, 850, 70, true, false, true, false, H, H, F, 3},
    {540, 530, 500, true, false, true, false, F, F, F, 1}, /* b packed with non-temporal stores */
    {540, 530, 500, true, false, false, true, F, H, H, 0},
    {2600, 2530, 2, false, true, false, true, F, F, F, 0}, /* more rows than one thread's workspace holds */
    /* dot products of pairs: odd k, which ends in half a pair; rows at odd places; blocks of
     * pairs */
    {1, 1, 1, false, false, false, false, H, H, F, 0},
    {9, 50, 2, true, true, true, true, H, H, H, 1},
    {5, 7, 3, false, false, false, true, H, H, F, 1},
    {3, 4, 0, false, true, false, true, H, H, H, 1},
    {17, 49, 64, false, true, true, true, H, H, F, 1}, /* a read in place, rows 65 elements apart */
    {17, 49, 65, false, true, true, false, H, H, F, 0},
    {23, 97, 65, false, false, false, true, H, H, H, 1},
    {23, 97, 65, true, true, true, true, H, H, H, 1},
    {40, 49, 31, true, true, false, false, H, H, F, 1},
    {40, 100, 2051, true, false, true, true, H, H, F, 3}, /* two blocks of pairs */
    {41, 53, 2053, false, true, true, true, H, H, H, 1},  /* sums kept between the blocks, then rounded */
    {41, 53, 2100, false, false, false, true, H, H, H, 0},
    {130, 47, 4099, true, true, true, false, H, H, H, 1},
    {19, 23, 29, false, true, false, true, F, H, F, 0},
    {19, 23, 29, true, true, false, false, H, F, H, 1},
    /* a head's logits, their input gradient and their weight gradient, for a vocabulary of odd
     * size */
    {24, 257, 40, false, true, false, false, H, H, H, CUT},
    {24, 263, 40, false, true, false, false, H, H, F, CUT},
    {24, 40, 257, false, false, false, false, H, H, H, CUT},
    {24, 40, 262, false, false, true, false, H, H, F, CUT},
    {257, 40, 24, true, false, true, false, H, H, H, CUT},
    {259, 40, 24, true, false, false, false, H, H, F, CUT},
    {257, 40, 24, true, true, false, false, H, H, F, CUT},
};
#define FORWARD(m, n, k, t) {m, n, k, false, true, false, true, t, t, t, 0}
#define INPUT_GRADIENT(m, n, k, t) {m, k, n, false, false, false, false, t, t, t, 0}
#define WEIGHT_GRADIENT(m, n, k, t) {n, k, m, true, false, true, false, t, t, F, 0}
#define LAYER(m, n, k, t) FORWARD(m, n, k, t), INPUT_GRADIENT(m, n, k, t), WEIGHT_GRADIENT(m, n, k, t)
static const matmul_case speed_cases[] = {
    LAYER(1024, 2304, 768, F), LAYER(1024, 768, 768, F), LAYER(1024, 3072, 768, F), LAYER(1024, 768, 3072, F),
    LAYER(4096, 2304, 768, F), LAYER(4096, 3072, 768, F), LAYER(4096, 768, 3072, F), LAYER(1024, 50257, 768, F),
    LAYER(1024, 2304, 768, H), LAYER(1024, 768, 768, H), LAYER(1024, 3072, 768, H), LAYER(1024, 768, 3072, H),
    LAYER(1024, 50304, 768, H), FORWARD(1, 768, 768, H), FORWARD(4, 3072, 768, H), FORWARD(16, 768, 768, H), LAYER(64, 64, 64, H),
    LAYER(128, 32, 128, H),
    FORWARD(1, 768, 768, F), FORWARD(4, 3072, 768, F), FORWARD(16, 768, 768, F), LAYER(64, 64, 64, F), LAYER(128, 32, 128, F),
};

/* What dot products compute, bit by bit: in each block of k, two multiply-adds per pair, each
 * rounded to nearest, the second element first; then the blocks in ascending order. */
static float dot_model(const uint16_t *a, const uint16_t *b, int64_t k)
{
    const int64_t steps = (k + 1) / 2, block = qd_gemm_k_block(steps);
    float all = 0.0f;
    for (int64_t first = 0; first < steps; first += block) {
        float sum = 0.0f;
        for (int64_t p = first; p < first + block && p < steps; p++) {
            if (2 * p + 1 < k)
                sum = fmaf(qd_bf16_to_f32(a[2 * p + 1]), qd_bf16_to_f32(b[2 * p + 1]), sum);
            sum = fmaf(qd_bf16_to_f32(a[2 * p]), qd_bf16_to_f32(b[2 * p]), sum);
        }
        all = first ? all + sum : sum;
    }
    return all;
}

/* What AMX computes: in each tile of 32 steps of k, the sum of the even elements and that of the
 * odd ones, from 0 on; their sum is added to that of the block's earlier tiles. */
static float amx_model(const uint16_t *a, const uint16_t *b, int64_t k)
{
    const int64_t steps = (k + 1) / 2, block = qd_gemm_k_block(steps);
    float all = 0.0f;
    for (int64_t first = 0; first < steps; first += block) {
        float sum = 0.0f;
        for (int64_t tile = first; tile < first + block && tile < steps; tile += 16) {
            float half[2] = {0.0f, 0.0f};
            for (int64_t i = 2 * tile; i < 2 * tile + 32 && i < 2 * (first + block) && i < k; i++)
                half[i % 2] = fmaf(qd_bf16_to_f32(a[i]), qd_bf16_to_f32(b[i]), half[i % 2]);
            sum += half[0] + half[1];
        }
        all = first ? all + sum : sum;
    }
    return all;
}

/* Instructions that multiply bf16 pairs, and what they compute. */
typedef struct pair_isa {
    const char *name;
    float (*model)(const uint16_t *a, const uint16_t *b, int64_t k);
} pair_isa;
static const pair_isa pair_isas[] = {{"avx512bf16", dot_model}, {"amx", amx_model}, {"amx_emulated", amx_model},
                                     {"avx512bf16_emulated", dot_model}};

/* Runs check for each of them that the processor has. */
static void for_pair_isas(void (*check)(const pair_isa *isa, qd_device *device))
{
    int checked = 0;
    for (size_t i = 0; i < sizeof pair_isas / sizeof *pair_isas; i++) {
        qd_device *device = ops_cpu(pair_isas[i].name);
        if (!device) {
            printf("skipped: this processor does not have %s\n", pair_isas[i].name);
            continue;
        }
        check(&pair_isas[i], device);
        checked++;
    }
    if (!checked)
        skip();
}

static void check_rounding(const pair_isa *isa, qd_device *device)
{
    enum { M = 11, N = 50, K = 2 * QD_GEMM_KC + 101 };
    static uint16_t a[M * K], b[N * K];
    static float c[M * N];
    for (int i = 0; i < M * K; i++)
        a[i] = qd_f32_to_bf16((float)ops_normal());
    for (int i = 0; i < N * K; i++)
        b[i] = qd_f32_to_bf16((float)ops_normal());
    for (int64_t k = 1; k <= K; k += k < 4 ? 1 : k < K - 1000 ? 523 : K - k > 0 ? K - k : 1) {
        qd_matmul_args args = {.a = a, .b = b, .c = c, .m = M, .n = N, .k = k, .lda = K, .ldb = K, .ldc = N, .trans_b = true,
                               .a_dtype = QD_BF16, .b_dtype = QD_BF16, .c_dtype = QD_F32};
        ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
        for (int i = 0; i < M * N; i++) {
            float expected = isa->model(a + i / N * K, b + i % N * K, k);
            if (memcmp(&c[i], &expected, sizeof expected) != 0)
                fail_msg("%s, k = %lld: element %d is %a, its model %a", isa->name, (long long)k, i, c[i], expected);
        }
    }
}

static void pairs_round_as_documented(void **state)
{
    (void)state;
    for_pair_isas(check_rounding);
}

/* Subnormal operands and results count as 0. Infinities and NaN spread as elsewhere. */
static void check_subnormals(const pair_isa *isa, qd_device *device)
{
    static const struct {
        uint16_t a, b;
        float expected;
    } known[] = {
        {0x0040, 0x7f00, 0.0f}, /* 2^-127 * 2^127 */
        {0x7f00, 0x8001, 0.0f},
        {0x0100, 0x3e00, 0.0f},         /* 2^-125 * 2^-3 */
        {0x0080, 0x3f80, 0x1p-126f},    /* the least normal number remains */
        {0x7f80, 0x3f80, INFINITY},
        {0x7f80, 0x0000, NAN},
        {0x7fc0, 0x3f80, NAN},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        float c = 1.0f;
        qd_matmul_args args = {.a = &known[i].a, .b = &known[i].b, .c = &c, .m = 1, .n = 1, .k = 1, .lda = 1, .ldb = 1, .ldc = 1,
                               .a_dtype = QD_BF16, .b_dtype = QD_BF16, .c_dtype = QD_F32};
        ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
        if (isnan(known[i].expected) ? !isnan(c) : c != known[i].expected)
            fail_msg("%s: %04x * %04x is %a instead of %a", isa->name, known[i].a, known[i].b, c, known[i].expected);
    }
}

static void pairs_flush_subnormals(void **state)
{
    (void)state;
    for_pair_isas(check_subnormals);
}

/* A GEMM with one row has a kernel of its own: its result equals that of the row among others. */
static void check_a_row_alone(const char *isa)
{
    enum { MOST_K = 2600, MOST_N = 403 };
    static const int64_t lengths[] = {1, 7, 16, 33, 800, 1029, 2100, MOST_K - 1, MOST_K}, widths[] = {1, 16, 100, MOST_N};
    uint16_t *half = malloc((size_t)MOST_N * MOST_K * sizeof *half);
    float *full = malloc((size_t)MOST_N * MOST_K * sizeof *full), row[2 * MOST_K];
    uint16_t row_half[2 * MOST_K];
    assert_true(half && full);
    uint32_t random = 1;
    for (int64_t i = 0; i < (int64_t)MOST_N * MOST_K; i++) {
        random = random * 1664525u + 1013904223u;
        full[i] = (float)(int32_t)random * 0x1p-31f;
        half[i] = qd_f32_to_bf16(full[i]);
    }
    for (int i = 0; i < 2 * MOST_K; i++) {
        row[i] = full[(i * 37) % 5000];
        row_half[i] = qd_f32_to_bf16(row[i]);
    }
    qd_device *device = ops_device(isa, 2);
    for (int types = 0; types < 8; types++)
        for (size_t l = 0; l < sizeof lengths / sizeof *lengths; l++)
            for (size_t w = 0; w < sizeof widths / sizeof *widths; w++) {
                int64_t k = lengths[l], n = widths[w];
                float two[2 * MOST_N], one[2 * MOST_N];
                for (int i = 0; i < 2 * MOST_N; i++)
                    two[i] = one[i] = full[i];
                qd_matmul_args a = {.a = types & 1 ? (void *)row_half : row, .b = types & 2 ? (void *)half : full, .c = two, .m = 2, .n = n,
                                    .k = k, .lda = k, .ldb = k, .ldc = n, .trans_b = true, .accumulate = w % 2 == 0,
                                    .bias = l % 2 ? (types & 2 ? (void *)(half + 9) : full + 9) : NULL,
                                    .a_dtype = types & 1 ? QD_BF16 : QD_F32,
                                    .b_dtype = types & 2 ? QD_BF16 : QD_F32, .c_dtype = types & 4 ? QD_BF16 : QD_F32};
                ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &a));
                a.c = one;
                a.m = 1;
                ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &a));
                if (memcmp(one, two, (size_t)n * (types & 4 ? 2 : 4)) != 0)
                    fail_msg("types %d, k %lld, n %lld: the row differs from the same row of two", types, (long long)k, (long long)n);
            }
    free(half);
    free(full);
}

static void a_row_alone_is_bit_identical(void **state)
{
    (void)state;
    check_a_row_alone(NULL);
    for (int s = 0; s < OPS_CPU_ISAS; s++)
        if (strstr(ops_cpu_isas[s], "emulated") && ops_cpu(ops_cpu_isas[s]))
            check_a_row_alone(ops_cpu_isas[s]);
}

/* From four threads on, operands that need packing are packed ahead of the tiles that read them. */
static void check_threads(const char *isa, int threads, int64_t m, int64_t n, int64_t k, qd_dtype dtype, qd_dtype c_dtype, bool trans_a)
{
    qd_device_config config = qd_device_config_default();
    qd_device *devices[2];
    config.isa = isa;
    for (int d = 0; d < 2; d++) {
        config.threads = d ? threads : 1;
        ops_assert_ok(qd_device_create("cpu", &config, &devices[d]));
    }
    const int64_t pad = 3, lda = (trans_a ? m : k) + pad, ldb = n + pad, ldc = n + pad;
    const size_t size = dtype == QD_F32 ? 4 : 2, c_size = c_dtype == QD_F32 ? 4 : 2;
    char *a = malloc((size_t)((trans_a ? k : m) * lda) * size), *b = malloc((size_t)(k * ldb) * size), *c[2];
    assert_true(a && b);
    uint32_t random = 1;
    for (int64_t i = 0; i < (trans_a ? k : m) * lda + k * ldb; i++) {
        const int64_t at = i - (trans_a ? k : m) * lda;
        random = random * 1664525u + 1013904223u;
        const float x = (float)(int32_t)random * 0x1p-31f;
        const uint16_t half = qd_f32_to_bf16(x);
        memcpy(at < 0 ? a + (size_t)i * size : b + (size_t)at * size, dtype == QD_F32 ? (const void *)&x : &half, size);
    }
    for (int d = 0; d < 2; d++) {
        c[d] = calloc((size_t)(m * ldc), c_size);
        assert_non_null(c[d]);
        qd_matmul_args args = {.a = a, .b = b, .c = c[d], .m = m, .n = n, .k = k, .lda = lda, .ldb = ldb, .ldc = ldc, .trans_a = trans_a,
                               .accumulate = true, .a_dtype = dtype, .b_dtype = dtype, .c_dtype = c_dtype};
        for (int twice = 0; twice < 2; twice++) /* the second time, slots have contents */
            ops_assert_ok(qd_device_kernels(devices[d])->matmul(qd_device_compute_stream(devices[d]), &args));
        qd_device_destroy(devices[d]);
    }
    if (memcmp(c[0], c[1], (size_t)(m * ldc) * c_size) != 0)
        fail_msg("%s: %lldx%lldx%lld differs between 1 and %d threads", isa ? isa : "best", (long long)m, (long long)n, (long long)k,
                 threads);
    free(a);
    free(b);
    free(c[0]);
    free(c[1]);
}

static void threads_change_no_bit(void **state)
{
    (void)state;
    for (int s = 0; s < OPS_CPU_ISAS; s++) {
        if (!ops_cpu(ops_cpu_isas[s]))
            continue;
        check_threads(ops_cpu_isas[s], 5, 131, 85, 1700, QD_F32, QD_F32, true);
        check_threads(ops_cpu_isas[s], 5, 131, 85, 3501, QD_BF16, QD_F32, true);
        check_threads(ops_cpu_isas[s], 4, 67, 205, 4101, QD_BF16, QD_BF16, true);
        check_threads(ops_cpu_isas[s], 4, 67, 205, 4101, QD_BF16, QD_BF16, false);
    }
    check_threads(NULL, 4, 1100, 800, 3000, QD_F32, QD_F32, true); /* two slots */
}

/* Without dot products a bf16 operand is the floats that its elements stand for: results have the
 * bits of a GEMM of those, and a bf16 c those of its sums, rounded once. */
static void check_widening(const char *isa, int threads, int64_t m, int64_t n, int64_t k, bool trans_b, bool with_bias)
{
    const int64_t pad = 5, lda = k + pad, ldb = (trans_b ? k : n) + pad, ldc = n + pad, b_rows = trans_b ? n : k;
    const int64_t elements = m * lda + b_rows * ldb + ldc;
    uint16_t *half = malloc((size_t)elements * sizeof *half), *rounded = malloc((size_t)(m * ldc) * sizeof *rounded);
    float *full = malloc((size_t)elements * sizeof *full), *sums = malloc((size_t)(m * ldc) * sizeof *sums);
    float *same = malloc((size_t)(m * ldc) * sizeof *same);
    assert_true(half && rounded && full && sums && same);
    for (int64_t i = 0; i < elements; i++) {
        half[i] = qd_f32_to_bf16((float)ops_normal());
        full[i] = qd_bf16_to_f32(half[i]);
    }
    qd_device *device = ops_device(isa, threads);
    qd_matmul_args args = {.a = full, .b = full + m * lda, .bias = with_bias ? full + m * lda + b_rows * ldb : NULL, .c = sums,
                           .m = m, .n = n, .k = k, .lda = lda, .ldb = ldb, .ldc = ldc, .trans_b = trans_b};
    ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
    args.a_dtype = args.b_dtype = QD_BF16;
    args.a = half;
    args.b = half + m * lda;
    args.bias = with_bias ? half + m * lda + b_rows * ldb : NULL;
    args.c = same;
    ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
    args.c = rounded;
    args.c_dtype = QD_BF16;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        const float before = 0.375f;
        for (int64_t i = 0; i < m * ldc; i++)
            rounded[i] = qd_f32_to_bf16(before);
        args.accumulate = accumulate;
        ops_assert_ok(qd_device_kernels(device)->matmul(qd_device_compute_stream(device), &args));
        for (int64_t i = 0; i < m * n; i++) {
            const int64_t at = i / n * ldc + i % n;
            const uint16_t wanted = qd_f32_to_bf16(accumulate ? sums[at] + before : sums[at]);
            if (memcmp(&same[at], &sums[at], sizeof same[at]) != 0 || rounded[at] != wanted)
                fail_msg("%s, %lld x %lld x %lld: element %lld of bf16 operands is %a and, rounded, %04x, of floats %a and %04x", isa,
                         (long long)m, (long long)n, (long long)k, (long long)i, same[at], rounded[at], sums[at], wanted);
        }
        for (int64_t i = 0; i < m * ldc; i++)
            if (i % ldc >= n)
                assert_int_equal(rounded[i], qd_f32_to_bf16(before));
    }
    free(half);
    free(rounded);
    free(full);
    free(sums);
    free(same);
}

static void bf16_counts_as_its_floats(void **state)
{
    (void)state;
    static const struct {
        int64_t m, n, k;
    } sizes[] = {{3, 40, 1}, {21, 700, 37}, {8, 600, 1024}, {13, 620, 2 * QD_GEMM_KC + 37}, {70, 61, 1500}};
    for (int s = 0; s < OPS_CPU_ISAS; s++) {
        if (!ops_cpu(ops_cpu_isas[s]) || strstr(ops_cpu_isas[s], "bf16") || strstr(ops_cpu_isas[s], "amx"))
            continue;
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
            for (int threads = 1; threads <= 3; threads += 2)
                check_widening(ops_cpu_isas[s], threads, sizes[i].m, sizes[i].n, sizes[i].k, (i + (size_t)threads / 2) % 2, i % 2);
    }
}

static void refuses_bad_arguments(void **state)
{
    (void)state;
    qd_device *device = ops_device(NULL, 1);
    const qd_kernels *k = qd_device_kernels(device);
    qd_stream *stream = qd_device_compute_stream(device);
    float x[4] = {0};
    qd_matmul_args a = {.a = x, .b = x, .c = x, .m = 2, .n = 2, .k = 2, .lda = 2, .ldb = 2, .ldc = 2};
    ops_assert_ok(k->matmul(stream, &a));
    a.ldc = 1;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "row strides");
    a.ldc = 2;
    a.b_dtype = QD_F16;
    ops_assert_fails(k->matmul(stream, &a), QD_UNSUPPORTED, "b has type fp16");
    a.b_dtype = QD_F32;
    a.m = -1;
    ops_assert_fails(k->matmul(stream, &a), QD_USAGE, "negative");
}

/* Cases that are not split: nothing odd, more than one odd size, other types, epilogues, unaligned
 * rows, little work. */
static void cuts_only_what_gains(void **state)
{
    (void)state;
    static char here[1];
    qd_matmul_args parts[2], a = {.m = 8192, .n = 50257, .k = 768, .lda = 768, .ldb = 768, .ldc = 50304, .trans_b = true,
                                  .a_dtype = QD_BF16, .b_dtype = QD_BF16, .c_dtype = QD_BF16};
    assert_int_equal(qd_matmul_cut(&a, 4e9, parts), 2);
    assert_int_equal(parts[0].n, 50256);
    assert_int_equal(parts[1].n, 1);
    for (int i = 0; i < 7; i++) {
        qd_matmul_args b = a;
        if (i == 0)
            b.n = 50256;
        if (i == 1)
            b.k = 767;
        if (i == 2)
            b.a_dtype = QD_F32;
        if (i == 3)
            b.bias = here;
        if (i == 4)
            b.ldc = 50257;
        if (i == 5)
            b.m = 1;
        if (i == 6)
            b.n = 7;
        assert_int_equal(qd_matmul_cut(&b, 4e9, parts), 1);
        assert_int_equal(parts[0].n, b.n);
    }
}

static const ops_op op = {
    .kernel = "matmul",
    .cases = cases, .case_count = sizeof cases / sizeof *cases, .case_size = sizeof *cases,
    .speed_cases = speed_cases, .speed_count = sizeof speed_cases / sizeof *speed_cases,
    .describe = describe, .tensors = tensors, .reference = reference, .run = run, .flops = flops,
};

int main(int argc, char **argv)
{
    const struct CMUnitTest more[] = {cmocka_unit_test(refuses_bad_arguments), cmocka_unit_test(cuts_only_what_gains),
                                      cmocka_unit_test(pairs_round_as_documented), cmocka_unit_test(pairs_flush_subnormals),
                                      cmocka_unit_test(a_row_alone_is_bit_identical), cmocka_unit_test(threads_change_no_bit),
                                      cmocka_unit_test(bf16_counts_as_its_floats)};
    return ops_main(argc, argv, &op, 1, more, sizeof more / sizeof *more);
}
