/* Matrix products: checks, and the cut of c into tiles for the compute threads. */
#include "device/cpu/matmul_impl.h"

#include <math.h>

typedef struct cut {
    const qd_cpu *cpu;
    const qd_matmul_args *args;
    const qd_cpu_gemm *gemm;
    int64_t tm, tn; /* tiles along m and n */
} cut;

/* Tile `index` of `tiles` of `size` items, cut at multiples of `step` as evenly as that allows. */
static void tile_range(int64_t size, int64_t tiles, int64_t step, int64_t index, int64_t *begin, int64_t *end)
{
    int64_t steps = (size + step - 1) / step;
    *begin = steps * index / tiles * step;
    *end = steps * (index + 1) / tiles * step;
    *end = *end < size ? *end : size;
}

static void run_tiles(void *context, int64_t begin, int64_t end, int thread)
{
    const cut *c = context;
    const qd_matmul_args *a = c->args;
    for (int64_t t = begin; t < end; t++) {
        int64_t m0, m1, n0, n1;
        tile_range(a->m, c->tm, c->gemm->mr, t % c->tm, &m0, &m1);
        tile_range(a->n, c->tn, c->gemm->nr, t / c->tm, &n0, &n1);
        if (m0 < m1 && n0 < n1)
            c->gemm->tile(a, m0, m1, n0, n1, qd_cpu_workspace(c->cpu, thread));
    }
}

static int64_t at_least(int64_t size, int64_t tile)
{
    return (size + tile - 1) / tile;
}

/* Time of the cut, in units of packing one element: a register tile takes k steps whether it is full or not; packing
 * moves (m + n) * k elements per tile; the threads take tiles until none is left. */
static double cut_cost(const cut *c, int threads, int64_t tm, int64_t tn)
{
    double rows = (double)at_least(at_least(c->args->m, c->gemm->mr), tm) * c->gemm->mr;
    double cols = (double)at_least(at_least(c->args->n, c->gemm->nr), tn) * c->gemm->nr;
    double rounds = (double)at_least(tm * tn, threads);
    return rounds * (rows * cols / 16 + rows + cols);
}

/* Any cut gives the same bits with our own products (gemm_isa.c), so it may look at the number of threads. */
static void choose_cut(cut *c, int threads)
{
    int64_t step_m = c->gemm->mr, step_n = c->gemm->nr;
    bool direct = c->args->c_dtype == QD_F32;
    int64_t least_m = direct ? 1 : at_least(c->args->m, QD_GEMM_MT_ROUNDED / step_m * step_m);
    int64_t least_n = at_least(c->args->n, (direct ? QD_GEMM_NT : QD_GEMM_NT_ROUNDED) / step_n * step_n);
    double best = INFINITY;
    for (int64_t tn = least_n; tn < least_n + 2 * threads; tn++) {
        for (int64_t tm = least_m; tm < least_m + 4 * threads; tm++) {
            double cost = cut_cost(c, threads, tm, tn);
            if (cost < best) {
                best = cost;
                c->tm = tm;
                c->tn = tn;
            }
            if (threads == 1)
                return;
        }
    }
}

/* A library may sum in another order in a tile of another size, so its cut looks at the shape only: tiles of at most
 * 1024 x 1024, cut on into at least six where they stay large enough to keep packing cheap. */
static void choose_blas_cut(cut *c)
{
    const qd_matmul_args *a = c->args;
    c->tm = at_least(a->m, 1024);
    c->tn = at_least(a->n, 1024);
    while (c->tm * c->tn < 6 && (a->m / c->tm) * (a->n / c->tn) >= 2 * 512 * 384) {
        if (a->m / c->tm >= a->n / c->tn)
            c->tm *= 2;
        else
            c->tn *= 2;
    }
}

static void run_blas_tiles(void *context, int64_t begin, int64_t end, int thread)
{
    const cut *c = context;
    const qd_matmul_args *a = c->args;
    (void)thread;
    for (int64_t t = begin; t < end; t++) {
        int64_t m0, m1, n0, n1;
        tile_range(a->m, c->tm, 16, t % c->tm, &m0, &m1);
        tile_range(a->n, c->tn, 16, t / c->tm, &n0, &n1);
        if (m0 == m1 || n0 == n1)
            continue;
        const float *ta = (const float *)a->a + (a->trans_a ? m0 : m0 * a->lda);
        const float *tb = (const float *)a->b + (a->trans_b ? n0 * a->ldb : n0);
        float *tc = (float *)a->c + m0 * a->ldc + n0;
        c->cpu->blas->sgemm(a->trans_a, a->trans_b, m1 - m0, n1 - n0, a->k, ta, a->lda, tb, a->ldb, a->accumulate, tc,
                            a->ldc);
        if (a->bias)
            c->gemm->add_bias(tc, a->ldc, m1 - m0, n1 - n0, (const float *)a->bias + n0);
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
    if (a->m == 0 || a->n == 0)
        return QD_OK;
    qd_cpu *cpu = qd_cpu_of(stream);
    cut c = {.cpu = cpu, .args = a, .gemm = qd_cpu_gemm_for(cpu)};
    bool plain = a->a_dtype == QD_F32 && a->b_dtype == QD_F32 && a->c_dtype == QD_F32 && a->k > 0;
    /* In tiles oneDNN is slow where it must transpose a (weight gradients: 94 against our 107 GFLOP/s on average). */
    if (plain && cpu->blas && !a->trans_a) {
        choose_blas_cut(&c);
        qd_pool_for(cpu->pool, c.tm * c.tn, 1, run_blas_tiles, &c);
    } else {
        choose_cut(&c, qd_pool_threads(cpu->pool));
        qd_pool_for(cpu->pool, c.tm * c.tn, 1, run_tiles, &c);
    }
    return QD_OK;
}

const char *qd_cpu_blas_name(const qd_cpu *cpu)
{
    return cpu->blas ? cpu->blas->name : "own kernels";
}
