/* fp8 casts on one range, and a GEMM of codes: columns of b are decoded into a panel of fp32 that
 * rows of a, decoded element by element, pass by. An element of c is one chain of fp32 additions in
 * ascending k, however rows, columns and k are cut into blocks. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include "base/fp8.h"

enum {
    WIDE = QD_CPU_FP8_COLUMNS,
    VECTORS = WIDE / QD_VF,
    HIGH = 4,        /* rows of c at once */
    STEPS = 8192,    /* of k in a panel */
    ROWS = 16384,    /* whose sums are kept between panels */
};
_Static_assert((STEPS + ROWS) * WIDE * 4 <= QD_CPU_WORKSPACE_BYTES, "panel and sums fit into the workspace of a thread");

static void amax(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    qd_cpu_amax_job *job = context;
    const qd_amax_args *a = job->args;
    const void *x = qd_cpu_at(a->x, begin, a->dtype);
    vu most = {0}; /* magnitudes compare as integers, NaNs above all numbers */
    QD_FOR_VECTORS(i, n, end - begin, {
        vu bits = (vu)vec_load(x, i, n, a->dtype) & 0x7fffffffu;
        most = (vu)vf_select((vi)bits > (vi)most, (vf)bits, (vf)most);
    });
    uint32_t bits = 0;
    for (int i = 0; i < QD_VF; i++)
        bits = most[i] > bits ? most[i] : bits;
    uint32_t seen = atomic_load_explicit(&job->bits, memory_order_relaxed);
    while (bits > seen && !atomic_compare_exchange_weak(&job->bits, &seen, bits))
        ;
}

static void cast(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_fp8_cast_args *a = context;
    const float factor = 1.0f / qd_fp8_scale(*a->amax, a->to_dtype);
    uint8_t *to = a->to, *transposed = a->transposed;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * a->cols, a->dtype);
        for (int64_t i = 0; i < a->cols; i++) {
            float value = a->dtype == QD_F32 ? ((const float *)x)[i] : qd_bf16_to_f32(((const uint16_t *)x)[i]);
            uint8_t code = qd_f32_to_fp8(value * factor, a->to_dtype);
            if (to)
                to[row * a->cols + i] = code;
            if (transposed)
                transposed[i * a->rows + row] = code;
        }
    }
}

static void decode_table(float table[256], qd_dtype dtype)
{
    for (int code = 0; code < 256; code++)
        table[code] = qd_fp8_to_f32((uint8_t)code, dtype);
}

/* panel (steps, WIDE) = columns [n, n + WIDE) of op(b), steps from k on; 0 beyond the last
 * column. */
static void fill_panel(const qd_matmul_args *a, const float table[256], int64_t n, int64_t k, int64_t steps, float *panel)
{
    for (int c = 0; c < WIDE; c++) {
        const uint8_t *line = (const uint8_t *)a->b + (n + c) * a->ldb + k;
        for (int64_t p = 0; p < steps; p++)
            panel[p * WIDE + c] = n + c < a->n ? table[line[p]] : 0.0f;
    }
}

/* sums (HIGH, WIDE) += `steps` steps of HIGH rows; rows beyond the last repeat it. */
static void add_steps(const uint8_t *const rows[HIGH], const float table[256], const float *panel, int64_t steps, float *sums)
{
    vf sum[HIGH][VECTORS];
    for (int r = 0; r < HIGH; r++)
        for (int v = 0; v < VECTORS; v++)
            sum[r][v] = vf_load(sums + r * WIDE + v * QD_VF);
    for (int64_t p = 0; p < steps; p++)
        for (int v = 0; v < VECTORS; v++) {
            vf b = vf_load(panel + p * WIDE + v * QD_VF);
            for (int r = 0; r < HIGH; r++)
                sum[r][v] += b * table[rows[r][p]];
        }
    for (int r = 0; r < HIGH; r++)
        for (int v = 0; v < VECTORS; v++)
            vf_store(sums + r * WIDE + v * QD_VF, sum[r][v]);
}

static void put_row(const qd_matmul_args *a, int64_t row, int64_t n, const float *sums)
{
    const float scale = *a->a_scale * *a->b_scale;
    const int64_t count = a->n - n < WIDE ? a->n - n : WIDE;
    QD_FOR_VECTORS(i, here, count, {
        vf value = vec_load(sums, i, here, QD_F32) * scale;
        if (a->bias)
            value += vec_load(a->bias, n + i, here, a->c_dtype);
        if (a->accumulate)
            value += vec_load(a->c, row * a->ldc + n + i, here, a->c_dtype);
        vec_store(a->c, row * a->ldc + n + i, value, here, a->c_dtype);
    });
}

static void multiply_columns(const qd_matmul_args *a, int64_t n, const float table_a[256], const float table_b[256], float *panel,
                             float *sums)
{
    for (int64_t m = 0; m < a->m; m += ROWS) {
        const int64_t rows = a->m - m < ROWS ? a->m - m : ROWS;
        memset(sums, 0, (size_t)((rows + HIGH - 1) / HIGH * HIGH * WIDE) * sizeof *sums);
        for (int64_t k = 0; k < a->k; k += STEPS) {
            const int64_t steps = a->k - k < STEPS ? a->k - k : STEPS;
            fill_panel(a, table_b, n, k, steps, panel);
            for (int64_t r = 0; r < rows; r += HIGH) {
                const uint8_t *lines[HIGH];
                for (int i = 0; i < HIGH; i++)
                    lines[i] = (const uint8_t *)a->a + (m + (r + i < rows ? r + i : rows - 1)) * a->lda + k;
                add_steps(lines, table_a, panel, steps, sums + r * WIDE);
            }
        }
        for (int64_t r = 0; r < rows; r++)
            put_row(a, m + r, n, sums + r * WIDE);
    }
}

static void multiply(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_cpu_fp8_job *job = context;
    float *panel = qd_cpu_workspace(job->cpu, thread), *sums = panel + (int64_t)STEPS * WIDE;
    float table_a[256], table_b[256];
    decode_table(table_a, job->args->a_dtype);
    decode_table(table_b, job->args->b_dtype);
    for (int64_t block = begin; block < end; block++)
        multiply_columns(job->args, block * WIDE, table_a, table_b, panel, sums);
}

const qd_cpu_fp8_ops QD_ISA_NAME(qd_cpu_fp8_ops) = {.amax = amax, .cast = cast, .multiply = multiply};
