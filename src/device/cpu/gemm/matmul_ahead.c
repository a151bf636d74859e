/* A GEMM on many threads whose operands both need packing, as those of weight gradients.
 *
 * The threads take items from one queue: pieces of the operands to pack, and tiles of c to
 * multiply. The pieces of each block of k are spread among the tiles of the block before it, so
 * some threads read memory while the others compute, nothing is packed twice, and no thread waits
 * at a barrier. The packed blocks of k take turns in two or three slots of the workspace. An item
 * waits for earlier items only: a piece for the tiles that have read its slot, a tile for its
 * block's pieces and for itself in the block before. So blocks of k are added to c in ascending
 * order, as everywhere. */
#include "device/cpu/gemm/matmul_work_impl.h"

enum {
    THREADS = 4,  /* fewer: matmul.c is as fast */
    SLOTS = 3,    /* most */
    BLOCKS = 256, /* most */
    TILES = 1024, /* most */
    ITEMS = 3,    /* tiles per thread, at least, if they do not become too small */
    LEAST = 64,   /* lines of a tile */
    LINES = 96,   /* of a piece with all steps of a block … */
    WIDE = 768,   /* … or, of an operand stored (k, …), so many lines and … */
    STEPS = 32,   /* … so many steps: long contiguous reads */
    MOST_MACS_SMALL = 1 << 24, /* GEMMs with fewer multiply-adds are too short */
};

/* How an operand is split for packing. */
typedef struct pieces {
    int64_t lines, steps; /* per piece */
    int64_t along, count; /* pieces along k, and in total */
} pieces;

typedef struct job {
    const qd_cpu_gemm *gemm;
    qd_gemm_block block; /* all of c; k and kc of the first block */
    int64_t blocks, slots, threads;
    float *slot;           /* (slots, slot_floats): the panels of a, then those of b */
    int64_t slot_floats, a_floats;
    pieces a, b;
    int64_t packs;         /* pieces of a block */
    int64_t rows, cols;    /* of a tile */
    int64_t along, tiles;  /* tiles along a row of c, and in total */
    _Atomic int64_t next;  /* next item of the queue */
    _Atomic int32_t packed[BLOCKS], multiplied[BLOCKS]; /* pieces and tiles of each block that are done */
    _Atomic int32_t done[TILES]; /* blocks added to each tile of c */
} job;

static pieces cut(int64_t lines, int64_t step, int64_t kc, bool wide)
{
    pieces p = {.lines = round_up(wide ? WIDE : LINES, step), .steps = wide ? STEPS : kc};
    p.along = count_parts(kc, p.steps);
    p.count = count_parts(lines, p.lines) * p.along;
    return p;
}

static qd_gemm_block block_at(const job *j, int64_t block)
{
    qd_gemm_block g = j->block;
    g.k = block * g.kc;
    g.kc = smaller(g.kc, qd_gemm_steps(g.args, g.pairs) - g.k);
    return g;
}

static float *slot_of_block(const job *j, int64_t block)
{
    return j->slot + block % j->slots * j->slot_floats;
}

static void pack_piece(job *j, int64_t block, int64_t piece)
{
    const qd_gemm_block g = block_at(j, block);
    const bool a = piece < j->a.count;
    const pieces *p = a ? &j->a : &j->b;
    const int64_t i = a ? piece : piece - j->a.count, step = a ? j->gemm->row_step : j->gemm->nr;
    const int64_t line = i / p->along * p->lines, from = i % p->along * p->steps, until = smaller(from + p->steps, g.kc);
    const int64_t end = line + round_up(smaller(p->lines, (a ? g.rows : g.cols) - line), step);
    if (block >= j->slots)
        wait_for(&j->multiplied[block - j->slots], (int32_t)j->tiles);
    float *slot = slot_of_block(j, block);
    if (from < until)
        (a ? j->gemm->pack_a : j->gemm->pack_b)(&g, a ? slot : slot + j->a_floats, line, end, from, until);
    atomic_fetch_add_explicit(&j->packed[block], 1, memory_order_release);
}

static void multiply_tile(job *j, int64_t block, int64_t tile)
{
    qd_gemm_block g = block_at(j, block);
    const float *slot = slot_of_block(j, block);
    const int64_t row = tile / j->along * j->rows, col = tile % j->along * j->cols;
    narrow(&g, true, row, smaller(j->rows, g.rows - row));
    narrow(&g, false, col, smaller(j->cols, g.cols - col));
    g.a = slot + j->gemm->offset_a(row, g.kc);
    g.b = slot + j->a_floats + j->gemm->offset_b(col, g.kc);
    wait_for(&j->packed[block], (int32_t)j->packs);
    wait_for(&j->done[tile], (int32_t)block);
    j->gemm->multiply(&g);
    atomic_store_explicit(&j->done[tile], (int32_t)(block + 1), memory_order_release);
    atomic_fetch_add_explicit(&j->multiplied[block], 1, memory_order_release);
}

/* The queue: the pieces of block 0, then for each block its tiles and, spread among them, the
 * pieces of the next block. With two slots those begin behind the tiles that the threads take
 * first, since they wait for the previous block's last tiles. */
static void run_item(job *j, int64_t item)
{
    if (item < j->packs) {
        pack_piece(j, 0, item);
        return;
    }
    const int64_t all = j->packs + j->tiles, block = smaller((item - j->packs) / all, j->blocks - 1);
    const int64_t at = item - j->packs - block * all;
    if (block == j->blocks - 1) {
        multiply_tile(j, block, at);
        return;
    }
    const int64_t lead = j->slots > 2 ? 0 : smaller(j->threads, j->tiles / 4), span = larger((all - lead) * 7 / 8, j->packs);
    const int64_t before = smaller(larger(at - lead, 0) * j->packs / span, j->packs);
    const int64_t after = smaller(larger(at + 1 - lead, 0) * j->packs / span, j->packs);
    if (after > before)
        pack_piece(j, block + 1, before);
    else
        multiply_tile(j, block, at - before);
}

static void run_items(void *context, int64_t begin, int64_t end, int thread)
{
    job *j = context;
    (void)begin;
    (void)end;
    (void)thread;
    const int64_t items = j->blocks * (j->packs + j->tiles);
    for (int64_t item; (item = atomic_fetch_add_explicit(&j->next, 1, memory_order_relaxed)) < items;)
        run_item(j, item);
}

/* Tiles as square as possible, whose part of b fits the cache. */
static void cut_tiles(job *j)
{
    const int64_t m = j->block.rows, n = j->block.cols, row_step = j->gemm->row_step, nr = j->gemm->nr;
    const int64_t most = larger(j->gemm->chunk_floats / j->block.kc / nr * nr, nr);
    int64_t down = 1, along = count_parts(n, most);
    for (;;) {
        j->rows = round_up(count_parts(m, down), row_step);
        j->cols = smaller(round_up(count_parts(n, along), nr), most);
        j->along = count_parts(n, j->cols);
        j->tiles = count_parts(m, j->rows) * j->along;
        const bool rows = j->rows > LEAST && (j->rows >= j->cols || j->cols <= LEAST);
        if (j->tiles >= ITEMS * j->threads || (!rows && j->cols <= LEAST))
            return;
        if (rows)
            down++;
        else
            along++;
    }
}

bool qd_gemm_run_ahead(const qd_cpu *cpu, const qd_cpu_gemm *gemm, const qd_matmul_args *a, bool pairs)
{
    job j = {.gemm = gemm, .threads = qd_pool_threads(cpu->pool)};
    const int64_t steps = qd_gemm_steps(a, pairs), kc = qd_gemm_k_block(steps);
    if (j.threads < THREADS || steps <= kc || (double)a->m * (double)a->n * (double)a->k < MOST_MACS_SMALL)
        return false;
    j.blocks = count_parts(steps, kc);
    j.block = (qd_gemm_block){.args = a, .rows = a->m, .cols = a->n, .kc = kc, .pairs = pairs, .b_stays = true};
    /* 16: padding of panels and of the last steps */
    j.a_floats = (round_up(a->m, gemm->row_step) + gemm->row_step) * (kc + 16);
    j.slot_floats = j.a_floats + (round_up(a->n, gemm->nr) + gemm->nr) * (kc + 16);
    const int64_t sums = a->c_dtype == QD_F32 ? 0 : a->m * a->n;
    const int64_t floats = j.threads * (QD_CPU_WORKSPACE_BYTES / (int64_t)sizeof(float)) - sums;
    j.slots = smaller(smaller(floats / j.slot_floats, SLOTS), j.blocks);
    if (j.slots < 2 || j.blocks > BLOCKS)
        return false;
    cut_tiles(&j);
    if (j.tiles > TILES)
        return false;
    j.slot = qd_cpu_workspace(cpu, 0);
    if (sums > 0) {
        j.block.sums = j.slot + j.slots * j.slot_floats;
        j.block.ld_sums = a->n;
    }
    j.a = cut(a->m, gemm->row_step, kc, a->trans_a && gemm->tile_steps > 1); /* narrow panels: too many would be written at once */
    j.b = cut(a->n, gemm->nr, kc, !a->trans_b);
    j.packs = j.a.count + j.b.count;
    qd_pool_for(cpu->pool, j.threads, 1, run_items, &j);
    return true;
}
