/* fp8 casts on one range, and a GEMM of codes: columns of b are decoded into a panel of fp32 that
 * rows of a, decoded element by element, pass by. An element of c is one chain of fp32 additions in
 * ascending k, however rows, columns and k are cut; with scales of blocks, one chain per block. */
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

/* A row of the result of an activation, or of the gradient of its input: computed in `space`, with
 * the result at `result` unless that is NULL. */
static const void *activation_row(const qd_activation_args *of, int64_t row, void *space, void *result)
{
    const qd_cpu_activation_ops *ops = &QD_ISA_NAME(qd_cpu_activation_ops);
    qd_activation_args a = *of;
    a.rows = 1;
    a.x = qd_cpu_at(of->x, row * of->cols * (qd_activation_is_gated(of->kind) ? 2 : 1), of->dtype);
    a.dy = of->dy ? qd_cpu_at(of->dy, row * of->cols, of->dtype) : NULL;
    a.dx = space;
    a.y = of->dy ? result : space;
    if (a.y)
        ops->forward(&a, 0, 1, 0);
    if (of->dy)
        ops->backward(&a, 0, 1, 0);
    return space;
}

/* Magnitudes compare as integers, NaNs above all numbers. */
static uint32_t largest(const void *x, int64_t count, qd_dtype dtype)
{
    vu most = {0};
    QD_FOR_VECTORS(i, n, count, {
        vu bits = (vu)vec_load(x, i, n, dtype) & 0x7fffffffu;
        most = (vu)vf_select((vi)bits > (vi)most, (vf)bits, (vf)most);
    });
    uint32_t bits = 0;
    for (int i = 0; i < QD_VF; i++)
        bits = most[i] > bits ? most[i] : bits;
    return bits;
}

static void amax(void *context, int64_t begin, int64_t end, int thread)
{
    qd_cpu_amax_job *job = context;
    const qd_amax_args *a = job->args;
    uint32_t bits = a->of ? 0 : largest(qd_cpu_at(a->x, begin, a->dtype), end - begin, a->dtype);
    for (int64_t row = begin; row < end && a->of; row++) {
        uint32_t of_row = largest(activation_row(a->of, row, qd_cpu_workspace(job->cpu, thread), NULL), a->n / a->of->rows, a->of->dtype);
        bits = of_row > bits ? of_row : bits;
    }
    uint32_t seen = atomic_load_explicit(&job->bits, memory_order_relaxed);
    while (bits > seen && !atomic_compare_exchange_weak(&job->bits, &seen, bits))
        ;
}

/* Codes of row `row` of `rows`, which has `cols` values at x. */
static void cast_row(const void *x, qd_dtype from, float factor, qd_dtype dtype, int64_t row, int64_t rows, int64_t cols, uint8_t *to,
                     uint8_t *transposed)
{
    for (int64_t i = 0; i < cols; i++) {
        float value = from == QD_F32 ? ((const float *)x)[i] : qd_bf16_to_f32(((const uint16_t *)x)[i]);
        uint8_t code = qd_f32_to_fp8(value * factor, dtype);
        if (to)
            to[row * cols + i] = code;
        if (transposed)
            transposed[i * rows + row] = code;
    }
}

static void cast(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_cpu_cast_job *job = context;
    const qd_fp8_cast_args *a = job->args;
    float *space = qd_cpu_workspace(job->cpu, thread), *result = a->result_transposed ? space + a->cols : NULL;
    const float factor = 1.0f / qd_fp8_scale(*a->amax, a->to_dtype);
    const float result_factor = result ? 1.0f / qd_fp8_scale(*a->result_amax, QD_F8E4M3) : 0.0f;
    for (int64_t row = begin; row < end; row++) {
        const void *x = a->of ? activation_row(a->of, row, space, result) : qd_cpu_at(a->x, row * a->cols, a->dtype);
        cast_row(x, a->of ? a->of->dtype : a->dtype, factor, a->to_dtype, row, a->rows, a->cols, a->to, a->transposed);
        if (result)
            cast_row(result, a->of->dtype, result_factor, QD_F8E4M3, row, a->rows, a->of->cols, NULL, a->result_transposed);
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

/* The same for a panel that starts at k, where blocks of k have scales of their own: their sums are
 * scaled before they are added. column_scales (blocks, WIDE). row: of the first of `lines`. */
static void add_blocks(const qd_matmul_args *a, const uint8_t *const rows[HIGH], const float table[256], const float *panel, int64_t steps,
                       int64_t row, int64_t k, const float *column_scales, float *sums)
{
    for (int64_t p = 0; p < steps; p += QD_FP8_BLOCK) {
        const int64_t block = (k + p) / QD_FP8_BLOCK, here = p + QD_FP8_BLOCK < steps ? QD_FP8_BLOCK : steps - p;
        const uint8_t *lines[HIGH];
        float part[HIGH * WIDE] = {0};
        for (int r = 0; r < HIGH; r++)
            lines[r] = rows[r] + p;
        add_steps(lines, table, panel + p * WIDE, here, part);
        for (int r = 0; r < HIGH; r++) {
            const int64_t of = row + r < a->m ? row + r : a->m - 1;
            const float scale = a->a_scale[qd_fp8_scale_index(a->a_scaling, a->m, a->k, of, block)];
            for (int v = 0; v < VECTORS; v++) {
                vf factor = vf_load(column_scales + p / QD_FP8_BLOCK * WIDE + v * QD_VF) * scale;
                vf_store(sums + r * WIDE + v * QD_VF,
                         vf_load(sums + r * WIDE + v * QD_VF) + vf_load(part + r * WIDE + v * QD_VF) * factor);
            }
        }
    }
}

/* Scales of columns [n, n + WIDE) in the blocks of a panel: (blocks, WIDE). */
static void fill_scales(const qd_matmul_args *a, int64_t n, int64_t k, int64_t steps, float *scales)
{
    for (int64_t p = 0; p < steps; p += QD_FP8_BLOCK)
        for (int c = 0; c < WIDE; c++) {
            const int64_t column = n + c < a->n ? n + c : a->n - 1;
            scales[p / QD_FP8_BLOCK * WIDE + c] = a->b_scale[qd_fp8_scale_index(a->b_scaling, a->n, a->k, column, (k + p) / QD_FP8_BLOCK)];
        }
}

/* The scale that remains for a whole sum. */
static float scale_of_row(qd_fp8_scaling scaling, const float *scales, int64_t row)
{
    return scaling == QD_FP8_TENSOR ? *scales : scaling == QD_FP8_ROWS ? scales[row] : 1.0f;
}

static void put_row(const qd_matmul_args *a, int64_t row, int64_t n, const float *sums)
{
    const float of_row = scale_of_row(a->a_scaling, a->a_scale, row);
    float scales[WIDE];
    for (int c = 0; c < WIDE; c++)
        scales[c] = of_row * scale_of_row(a->b_scaling, a->b_scale, n + c < a->n ? n + c : a->n - 1);
    const int64_t count = a->n - n < WIDE ? a->n - n : WIDE;
    QD_FOR_VECTORS(i, here, count, {
        vf value = vec_load(sums, i, here, QD_F32) * vec_load(scales, i, here, QD_F32);
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
    const bool in_blocks = a->a_scaling >= QD_FP8_VECTORS;
    float scales[STEPS / QD_FP8_BLOCK * WIDE];
    for (int64_t m = 0; m < a->m; m += ROWS) {
        const int64_t rows = a->m - m < ROWS ? a->m - m : ROWS;
        memset(sums, 0, (size_t)((rows + HIGH - 1) / HIGH * HIGH * WIDE) * sizeof *sums);
        for (int64_t k = 0; k < a->k; k += STEPS) {
            const int64_t steps = a->k - k < STEPS ? a->k - k : STEPS;
            fill_panel(a, table_b, n, k, steps, panel);
            if (in_blocks)
                fill_scales(a, n, k, steps, scales);
            for (int64_t r = 0; r < rows; r += HIGH) {
                const uint8_t *lines[HIGH];
                for (int i = 0; i < HIGH; i++)
                    lines[i] = (const uint8_t *)a->a + (m + (r + i < rows ? r + i : rows - 1)) * a->lda + k;
                if (in_blocks)
                    add_blocks(a, lines, table_a, panel, steps, m + r, k, scales, sums + r * WIDE);
                else
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
