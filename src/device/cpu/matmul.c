/* Matrix products: checks, blocks that fit the workspace, and the threads' items.
 *
 * Of the two operands the one with fewer lines (rows of op(a), columns of op(b)) is packed by all threads together. Then
 * each item packs a chunk of the other's lines for itself, which stays in its core's cache, and multiplies it with the
 * first, or with a part of it. So little is packed twice, and one thread's reading of memory overlaps with another's
 * arithmetic. */
#include "device/cpu/matmul_impl.h"

enum {
    CHUNK = 192, /* most lines of an item: packed, they take a part of a second-level cache */
    LEAST = 48,  /* fewest, where there are too few items otherwise */
    CHUNK_FLOATS = (CHUNK + 64) * QD_GEMM_KC, /* with room for the rounding to whole panels */
    ITEMS = 3,   /* per thread at least, if there is enough to share */
    SMALL = 1 << 18, /* products of fewer multiply-adds take less time than waking the threads */
};

typedef struct job {
    const qd_cpu *cpu;
    const qd_cpu_gemm *gemm;
    qd_gemm_block block;
    bool share_a;         /* else b is packed together */
    float *own;           /* (threads, CHUNK_FLOATS) */
    int64_t chunks;       /* of the other operand */
    int64_t shared_parts; /* that the shared operand's lines are cut into */
} job;

static int64_t count_parts(int64_t size, int64_t part)
{
    return (size + part - 1) / part;
}

static int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static int64_t round_up(int64_t size, int64_t step)
{
    return count_parts(size, step) * step;
}

/* Lines [*begin, *begin + *size) of part `index`, cut at multiples of `step`. */
static void part_range(int64_t lines, int64_t parts, int64_t step, int64_t index, int64_t *begin, int64_t *size)
{
    int64_t steps = count_parts(lines, step);
    *begin = steps * index / parts * step;
    *size = smaller(steps * (index + 1) / parts * step, lines) - *begin;
}

static int64_t step_of(const job *j, bool a)
{
    return a ? j->gemm->row_step : j->gemm->nr;
}

static void pack(const job *j, const qd_gemm_block *g, bool a, int64_t begin, int64_t size)
{
    (a ? j->gemm->pack_a : j->gemm->pack_b)(g, begin, begin + round_up(size, step_of(j, a)));
}

/* Narrows the block to lines [begin, begin + size) of op(a) or op(b), without the packed operand itself. */
static void narrow(qd_gemm_block *g, bool a, int64_t begin, int64_t size)
{
    if (a) {
        g->m += begin;
        g->rows = size;
        if (g->sums)
            g->sums += begin * g->ld_sums;
    } else {
        g->n += begin;
        g->cols = size;
        if (g->sums)
            g->sums += begin;
    }
}

static int64_t shared_lines(const job *j)
{
    return j->share_a ? j->block.rows : j->block.cols;
}

static void pack_shared(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    (void)thread;
    int64_t step = step_of(j, j->share_a), parts = count_parts(shared_lines(j), CHUNK), from, size;
    for (int64_t i = begin; i < end; i++) {
        part_range(shared_lines(j), parts, step, i, &from, &size);
        pack(j, &j->block, j->share_a, from, size);
    }
}

/* Items: (chunks, shared_parts). */
static void multiply_items(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    bool a = j->share_a;
    int64_t from, size;
    for (int64_t i = begin; i < end; i++) {
        qd_gemm_block g = j->block;
        part_range(shared_lines(j), j->shared_parts, step_of(j, a), i % j->shared_parts, &from, &size);
        if (size <= 0)
            continue;
        *(a ? &g.a : &g.b) += from * g.kc;
        narrow(&g, a, from, size);
        part_range(a ? g.cols : g.rows, j->chunks, step_of(j, !a), i / j->shared_parts, &from, &size);
        if (size <= 0)
            continue;
        *(a ? &g.b : &g.a) = j->own + thread * (int64_t)CHUNK_FLOATS;
        narrow(&g, !a, from, size);
        pack(j, &g, !a, 0, size);
        j->gemm->multiply(&g);
    }
}

static void run_block(job *j, bool small)
{
    qd_gemm_block *g = &j->block;
    int threads = qd_pool_threads(j->cpu->pool);
    int64_t packing = count_parts(shared_lines(j), CHUNK);
    int64_t others = j->share_a ? g->cols : g->rows, wanted = threads == 1 ? 1 : ITEMS * threads;
    int64_t steps = count_parts(others, step_of(j, !j->share_a)), step = step_of(j, !j->share_a);
    int64_t each = smaller(CHUNK / step, steps / wanted); /* whole panels, as evenly as that allows */
    each = each * step < LEAST ? count_parts(LEAST, step) : each;
    j->chunks = count_parts(steps, each);
    j->shared_parts = smaller(count_parts(wanted, j->chunks), packing);
    int64_t items = j->chunks * j->shared_parts;
    /* k == 0 still writes c: one empty block */
    for (g->k = 0; g->k < g->args->k || g->k == 0; g->k += QD_GEMM_KC) {
        g->kc = smaller(g->args->k - g->k, QD_GEMM_KC);
        qd_pool_for(j->cpu->pool, packing, small ? packing : 1, pack_shared, j);
        qd_pool_for(j->cpu->pool, items, small ? items : 1, multiply_items, j);
    }
}

static void run(qd_cpu *cpu, const qd_matmul_args *a)
{
    job j = {.cpu = cpu, .gemm = qd_cpu_gemm_for(cpu), .block = {.args = a}, .share_a = a->m <= a->n};
    qd_gemm_block *g = &j.block;
    int64_t threads = qd_pool_threads(cpu->pool), kc = smaller(a->k, QD_GEMM_KC);
    int64_t floats = threads * (QD_CPU_WORKSPACE_BYTES / (int64_t)sizeof(float) - CHUNK_FLOATS);
    j.own = qd_cpu_workspace(cpu, 0);
    float *shared = j.own + threads * CHUNK_FLOATS;

    /* The shared operand's lines per block, and the other's: as many as there are if only the former take room. */
    int64_t lines[2] = {j.share_a ? a->m : a->n, j.share_a ? a->n : a->m};
    int64_t most = floats / QD_GEMM_KC / 64 * 64, step = step_of(&j, j.share_a);
    if (a->c_dtype != QD_F32) /* sums take room too: a third for the packed operand */
        most = smaller(most / 3, 1024) / 64 * 64;
    lines[0] = round_up(count_parts(lines[0], count_parts(lines[0], most - step)), step);
    if (a->c_dtype != QD_F32)
        lines[1] = smaller(lines[1], (floats - lines[0] * QD_GEMM_KC) / lines[0] / CHUNK * CHUNK);
    int64_t rows = lines[j.share_a ? 0 : 1], cols = lines[j.share_a ? 1 : 0];

    *(j.share_a ? &g->a : &g->b) = shared;
    float *sums = a->c_dtype == QD_F32 ? NULL : shared + lines[0] * kc;
    g->ld_sums = cols;
    bool small = (double)a->m * (double)a->n * (double)a->k < SMALL;
    for (int64_t m = 0; m < a->m; m += rows) {
        for (int64_t n = 0; n < a->n; n += cols) {
            g->m = m;
            g->n = n;
            g->sums = sums;
            g->rows = smaller(rows, a->m - m);
            g->cols = smaller(cols, a->n - n);
            run_block(&j, small);
        }
    }
}
qd_status qd_cpu_matmul(qd_stream *stream, const qd_matmul_args *a)
{
    QD_TRY(qd_cpu_check_float("matmul", "a", a->a_dtype));
    QD_TRY(qd_cpu_check_float("matmul", "b", a->b_dtype));
    QD_TRY(qd_cpu_check_float("matmul", "c", a->c_dtype));
    if (a->m < 0 || a->n < 0 || a->k < 0)
        return QD_FAIL(QD_USAGE, "matmul: size (%lld, %lld, %lld) is negative", (long long)a->m, (long long)a->n,
                       (long long)a->k);
    if (a->lda < (a->trans_a ? a->m : a->k) || a->ldb < (a->trans_b ? a->k : a->n) || a->ldc < a->n)
        return QD_FAIL(QD_USAGE, "matmul: row strides a %lld, b %lld, c %lld are shorter than the rows of (%lld, %lld, %lld)",
                       (long long)a->lda, (long long)a->ldb, (long long)a->ldc, (long long)a->m, (long long)a->n,
                       (long long)a->k);
    if (a->residual || a->gelu != QD_MATMUL_NO_GELU || a->bias_grad)
        return qd_cpu_matmul_fused(stream, a);
    if (a->m > 0 && a->n > 0)
        run(qd_cpu_of(stream), a);
    return QD_OK;
}
