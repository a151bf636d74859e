/* GEMM on the CPU: checks, blocks that fit the workspace, and work items for the threads.
 *
 * An item is a chunk of one operand's lines (rows of op(a) or columns of op(b)) in one block of k.
 * A thread packs the chunk into its own cache and multiplies it by the lines of the other operand,
 * which all items share. All threads together pack the shared operand beforehand, unless it can be
 * read in place. Where there are fewer chunks than threads, several threads pack a chunk for
 * different lines of the other operand; many threads avoid this if all fits (matmul_ahead.c).
 *
 * Chunks shrink towards the end, so that the threads finish together. */
#include "device/cpu/gemm/matmul_work_impl.h"

#include "base/fp8.h"

enum {
    LEAST = 48,               /* fewest lines of a chunk */
    CHUNKS = 2048,            /* most chunks, or chunks times parts, of a block */
    ITEMS = 4,                /* least number per thread, if there is enough work */
    PACK_LINES = 96,          /* lines of the shared operand that a thread packs at once … */
    PACK_WIDE = 768,          /* … or, for a b stored (k, n), so many lines and … */
    PACK_STEPS = 32,          /* … so many steps of k: long contiguous reads */
    SUMS_LINES = 4096,        /* most lines of the shared operand where sums are kept outside c */
    SMALL = 1 << 18,          /* GEMMs with fewer multiply-adds take less time than waking the threads */
};

typedef struct job {
    const qd_cpu *cpu;
    const qd_cpu_gemm *gemm;
    qd_gemm_block block; /* k and kc: the first block of k of a pass */
    bool own_a;          /* items are chunks of a's lines, else of b's */
    bool packs_own, packs_shared;
    float *own;    /* (threads, own_floats) */
    float *shared; /* the packed shared operand */
    int64_t blocks; /* blocks of k per pass */
    int64_t chunks, parts; /* parts: number of ranges of the shared operand's lines */
    int32_t begin[CHUNKS + 1]; /* first line of each chunk */
    _Atomic int64_t next;      /* next item to be taken, of (blocks, chunks, parts) */
    _Atomic int32_t done[CHUNKS]; /* blocks of k added to c so far, for each (chunk, part) */
} job;

/* Lines of an operand are split at multiples of this. */
static int64_t step_of(const job *j, bool a)
{
    return a ? j->gemm->row_step : j->gemm->nr;
}

static int64_t lines_of(const qd_gemm_block *g, bool a)
{
    return a ? g->rows : g->cols;
}

/* Packs lines [begin, begin + size) of the block's operand, steps [from, until) of k. */
static void pack(const job *j, const qd_gemm_block *g, bool a, float *to, int64_t begin, int64_t size, int64_t from, int64_t until)
{
    (a ? j->gemm->pack_a : j->gemm->pack_b)(g, to, begin, begin + round_up(size, step_of(j, a)), from, until);
}

/* How the shared operand is split for packing: pieces of (lines, steps). */
typedef struct pieces {
    int64_t lines, steps; /* per piece */
    int64_t down, along;  /* number of pieces */
} pieces;

static pieces cut_pieces(const job *j)
{
    const qd_gemm_block *g = &j->block;
    bool a = !j->own_a, wide = !a && !g->args->trans_b; /* panels of a are narrow: too many would be written at once */
    pieces p = {.lines = round_up(wide ? PACK_WIDE : PACK_LINES, step_of(j, a)), .steps = wide ? PACK_STEPS : larger(g->kc, 1)};
    p.down = count_parts(lines_of(g, a), p.lines);
    p.along = larger(count_parts(g->kc, p.steps), 1);
    return p;
}

static void pack_shared(void *context, int64_t begin, int64_t end, int thread)
{
    const job *j = context;
    (void)thread;
    const pieces p = cut_pieces(j);
    const int64_t lines = lines_of(&j->block, !j->own_a);
    for (int64_t i = begin; i < end; i++) {
        int64_t line = i / p.along * p.lines, step = i % p.along * p.steps;
        pack(j, &j->block, !j->own_a, j->shared, line, smaller(p.lines, lines - line), step, smaller(step + p.steps, j->block.kc));
    }
}

/* The block of item `index`, before packing. */
static qd_gemm_block item_block(const job *j, int64_t index)
{
    qd_gemm_block g = j->block;
    int64_t part = index % j->parts, chunk = index / j->parts % j->chunks;
    g.k += index / j->parts / j->chunks * g.kc;
    g.kc = smaller(g.kc, qd_gemm_steps(g.args, g.pairs) - g.k);
    narrow(&g, j->own_a, j->begin[chunk], j->begin[chunk + 1] - j->begin[chunk]);
    if (j->parts > 1) {
        int64_t step = step_of(j, !j->own_a), lines = lines_of(&g, !j->own_a), steps = count_parts(lines, step);
        int64_t from = steps * part / j->parts * step, to = smaller(steps * (part + 1) / j->parts * step, lines);
        narrow(&g, !j->own_a, from, larger(to - from, 0));
    }
    return g;
}

static int64_t take_item(job *j)
{
    return atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed);
}

static void run_items(void *context, int64_t begin, int64_t end, int thread)
{
    job *j = context;
    (void)begin;
    (void)end;
    const int64_t per_block = j->chunks * j->parts, items = j->blocks * per_block;
    float *own = j->own + thread * (int64_t)j->gemm->own_floats;
    for (int64_t item; (item = take_item(j)) < items;) {
        qd_gemm_block g = item_block(j, item);
        if (g.rows > 0 && g.cols > 0) {
            const qd_matmul_args *a = g.args;
            const int64_t first = g.m * a->lda + qd_gemm_element(g.k, g.pairs);
            const void *in_place = qd_cpu_at(a->a, first, a->a_dtype); /* a, if it is read in place */
            const float *shared = j->shared;
            g.b_stays = !j->own_a;
            if (j->packs_own)
                pack(j, &g, j->own_a, own, 0, lines_of(&g, j->own_a), 0, g.kc);
            if (j->own_a) {
                g.a = j->packs_own ? own : in_place;
                g.b = shared + j->gemm->offset_b(g.n - j->block.n, g.kc);
            } else {
                g.a = j->packs_shared ? (const void *)(shared + j->gemm->offset_a(g.m - j->block.m, g.kc)) : in_place;
                g.b = own;
            }
            /* Blocks of k are added to c in ascending order, and items are taken in that order. */
            wait_for(&j->done[item % per_block], (int32_t)(item / per_block));
            j->gemm->multiply(&g);
        }
        atomic_store_explicit(&j->done[item % per_block], (int32_t)(item / per_block + 1), memory_order_release);
    }
}

/* Splits the lines of the own operand into chunks: as long as the cache allows, shorter towards the
 * end. */
static void cut_chunks(job *j, int threads)
{
    int64_t step = step_of(j, j->own_a), lines = lines_of(&j->block, j->own_a), at = 0;
    int64_t least = round_up(LEAST, step), kc = larger(j->block.kc, 1);
    int64_t fits = j->gemm->own_floats / (kc + 16); /* 16: padding of panels */
    /* A panel of a is widened once for each chunk of b, so those are larger. */
    if (!(j->block.direct && qd_gemm_widens(j->block.args, j->block.pairs)))
        fits = smaller(fits, j->gemm->chunk_floats / kc);
    int64_t most = larger(fits / step * step, least);
    j->chunks = 0;
    j->begin[0] = 0;
    while (at < lines) {
        int64_t share = threads == 1 ? most : (lines - at) / (2 * threads) / step * step;
        at += smaller(larger(smaller(share, most), least), lines - at);
        j->begin[++j->chunks] = (int32_t)at;
    }
    int64_t wanted = threads == 1 ? 1 : ITEMS * threads;
    int64_t units = count_parts(lines_of(&j->block, !j->own_a), larger(step_of(j, !j->own_a), LEAST));
    j->parts = larger(smaller(count_parts(wanted, j->chunks), smaller(units, CHUNKS / j->chunks)), 1);
}

static void run_block(job *j, bool small)
{
    qd_gemm_block *g = &j->block;
    const int64_t k = qd_gemm_steps(g->args, g->pairs), kc = qd_gemm_k_block(k);
    int threads = small ? 1 : qd_pool_threads(j->cpu->pool);
    g->kc = kc;
    cut_chunks(j, threads);
    /* k == 0 still writes c: one empty block */
    int64_t blocks = larger(count_parts(k, larger(kc, 1)), 1), pass = j->packs_shared ? 1 : blocks;
    for (int64_t block = 0; block < blocks; block += pass) {
        g->k = block * kc;
        g->kc = smaller(kc, k - g->k);
        j->blocks = pass;
        for (int64_t i = 0; i < j->chunks * j->parts; i++)
            atomic_init(&j->done[i], 0);
        atomic_init(&j->next, 0);
        if (j->packs_shared) {
            pieces p = cut_pieces(j);
            qd_pool_for(j->cpu->pool, p.down * p.along, small ? p.down * p.along : 1, pack_shared, j);
        }
        qd_pool_for(j->cpu->pool, threads, 1, run_items, j);
    }
}

/* Whether items are chunks of a: of the operand with more lines. Where a is read in place, chunks
 * of b need no packing beforehand, if b has enough lines for all threads. AMX reads operands too
 * fast for that: short chunks of b would read all of a from memory again and again. */
static bool takes_a(const qd_cpu_gemm *gemm, const qd_matmul_args *a, bool direct, int64_t threads)
{
    if (direct && gemm->tile_steps == 1 && a->n >= ITEMS * threads * gemm->nr)
        return false;
    return a->m >= a->n;
}

typedef struct row_job {
    const qd_cpu_gemm *gemm;
    const qd_matmul_args *args;
    bool pairs;
} row_job;

static void run_row(void *context, int64_t begin, int64_t end, int thread)
{
    const row_job *j = context;
    (void)thread;
    for (int64_t i = begin; i < end; i++)
        j->gemm->multiply_row(j->args, j->pairs, i * QD_GEMM_ROW_COLUMNS, smaller((i + 1) * QD_GEMM_ROW_COLUMNS, j->args->n));
}

static void run(qd_cpu *cpu, const qd_matmul_args *a)
{
    const bool pairs = cpu->dots && a->a_dtype == QD_BF16 && a->b_dtype == QD_BF16;
    const qd_cpu_gemm *gemm = qd_cpu_gemm_of(cpu, pairs);
    if (gemm->multiply_row && a->m == 1 && a->k > 0 && !a->trans_a && a->trans_b) {
        row_job row = {gemm, a, pairs};
        int64_t parts = count_parts(a->n, QD_GEMM_ROW_COLUMNS);
        qd_pool_for(cpu->pool, parts, (double)a->n * (double)a->k < SMALL ? parts : 1, run_row, &row);
        return;
    }
    const int64_t threads = qd_pool_threads(cpu->pool);
    bool direct = qd_gemm_direct(gemm, a, pairs), own_a = takes_a(gemm, a, direct, threads);
    if (own_a && qd_gemm_widens(a, pairs))
        direct = false;
    if (!direct && qd_gemm_run_ahead(cpu, gemm, a, pairs))
        return;
    job j = {.cpu = cpu, .gemm = gemm, .block = {.args = a, .pairs = pairs, .direct = direct}, .own_a = own_a};
    qd_gemm_block *g = &j.block;
    const int64_t steps = qd_gemm_steps(a, pairs), kc = larger(qd_gemm_k_block(steps), 1);
    const bool keeps_sums = a->c_dtype != QD_F32 && kc < steps;
    j.packs_own = !j.own_a || !direct;
    j.packs_shared = j.own_a || !direct;
    j.own = qd_cpu_workspace(cpu, 0);
    j.shared = j.own + threads * gemm->own_floats;
    const int64_t floats = threads * (QD_CPU_WORKSPACE_BYTES / (int64_t)sizeof(float) - gemm->own_floats);

    /* lines per block: of the shared operand, of the own operand */
    int64_t lines[2] = {j.own_a ? a->n : a->m, j.own_a ? a->m : a->n}, most[2] = {lines[0], (int64_t)LEAST * CHUNKS};
    int64_t step = step_of(&j, !j.own_a), packed = 0;
    if (keeps_sums)
        most[0] = SUMS_LINES;
    if (j.packs_shared) /* including padding between panels; sums leave a third of the space */
        most[0] = smaller(most[0], floats / (keeps_sums ? 3 : 1) / (kc + 16) / step * step - step);
    lines[0] = smaller(lines[0], round_up(count_parts(lines[0], count_parts(lines[0], most[0])), step));
    if (j.packs_shared)
        packed = (lines[0] + step) * (kc + 16);
    if (keeps_sums)
        most[1] = smaller(most[1], (floats - packed) / lines[0] / LEAST * LEAST);
    lines[1] = smaller(lines[1], most[1]);
    const int64_t rows = lines[j.own_a ? 1 : 0], cols = lines[j.own_a ? 0 : 1];

    float *sums = keeps_sums ? j.shared + packed : NULL;
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
    QD_TRY(qd_matmul_check(a));
    if (a->residual || a->gelu != QD_MATMUL_NO_GELU || a->bias_grad)
        return qd_cpu_matmul_fused(stream, a);
    if (qd_dtype_is_fp8(a->a_dtype))
        qd_cpu_matmul_fp8(stream, a);
    else if (a->m > 0 && a->n > 0)
        run(qd_cpu_of(stream), a);
    return QD_OK;
}
