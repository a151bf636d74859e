/* Operations on blocks that both passes of attention_isa.c use: GEMMs, packing, masks, powers of
 * two, prefetching. */
#ifndef QD_DEVICE_CPU_ATTENTION_ATTENTION_BLOCKS_IMPL_H
#define QD_DEVICE_CPU_ATTENTION_ATTENTION_BLOCKS_IMPL_H

#include "device/cpu/attention/attention_impl.h"
#include "device/cpu/dots_impl.h"
#include "device/cpu/transpose_impl.h"
#include "device/cpu/vec_math.h"

#if QD_VF == 16
enum { MR = 6, NV = 4 };
#elif QD_VF == 8
enum { MR = 6, NV = 2 };
#elif defined(__aarch64__)
enum { MR = 6, NV = 4 };
#else
enum { MR = 4, NV = 2 };
#endif
enum { BLOCK = QD_ATTENTION_BLOCK, FORWARD = QD_ATTENTION_FORWARD_ROWS, HEAD = QD_ATTENTION_HEAD_MOST };
_Static_assert(BLOCK % MR == 0 && BLOCK % QD_VF == 0 && HEAD % QD_VF == 0, "blocks are whole register tiles");

#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

typedef qd_cpu_attention_job job;
typedef qd_cpu_attention_tile tile;
typedef qd_cpu_attention_item item;

/* Buffers in the workspace, each with row stride `ld` (head_dim rounded up to a whole vector),
 * `v_ld` (the same of v_dim) or BLOCK. */
typedef struct buffers {
    float *q, *k, *dk;  /* (BLOCK, ld): scaled queries; keys; their gradient. Forward: q has FORWARD rows */
    float *d_o, *v, *dv; /* (BLOCK, v_ld): gradient of the output; values; their gradient */
    float *k_t, *v_t;   /* (head_dim, BLOCK), (v_dim, BLOCK) */
    float *s, *dp;      /* (BLOCK, BLOCK): scores, then probabilities; their gradient, then that of the scores */
    float *o;           /* forward: results (FORWARD, v_ld); backward: dq (BLOCK, ld) */
    float *kept; /* QD_ATTENTION_KEPT_FLOATS: slots of query tiles, or fp32 sums of a dq that is not fp32 */
    int64_t ld, v_ld;
    int vectors, v_vectors; /* ld / QD_VF, v_ld / QD_VF */
} buffers;

static buffers carve(const job *a, void *workspace)
{
    enum { BY_HEAD = BLOCK * HEAD, SQUARE = BLOCK * BLOCK };
    _Static_assert((9 * BY_HEAD + 2 * SQUARE + QD_ATTENTION_KEPT_FLOATS) * 4 <= QD_CPU_WORKSPACE_BYTES,
                   "the buffers must fit the workspace");
    float *next = workspace;
    buffers w = {.vectors = (a->head_dim + QD_VF - 1) / QD_VF, .v_vectors = (a->v_dim + QD_VF - 1) / QD_VF};
    w.ld = w.vectors * QD_VF;
    w.v_ld = w.v_vectors * QD_VF;
    /* q and o are each followed by two buffers that the forward pass does not use, so it has three
     * times the space for q and o. */
    _Static_assert(FORWARD <= 3 * BLOCK, "queries of the forward pass must fit three buffers");
    float **by_head[] = {&w.q, &w.d_o, &w.v_t, &w.k_t, &w.v, &w.k, &w.o, &w.dk, &w.dv};
    for (size_t i = 0; i < sizeof by_head / sizeof *by_head; i++, next += BY_HEAD)
        *by_head[i] = next;
    w.s = next;
    w.dp = next + SQUARE;
    w.kept = next + 2 * SQUARE;
    return w;
}

/* What a GEMM does with the contents of c: overwrite, overwrite by the product times *factor, add,
 * or add to `factor` (one per row) times c. */
typedef enum keeping { SET, SET_TIMES, ADD, SCALE } keeping;

/* c (rows, nv vectors) [+]= sum over p of a[i * row + p * step] * b[p * ldb + …]. dots: elements of
 * a and b are bf16 pairs. */
QD_INLINE void micro(bool dots, int rows, int nv, keeping keep, const float *factor, float *restrict c, int64_t ldc,
                     const float *restrict a, int64_t row, int64_t step, const float *restrict b, int64_t ldb,
                     int64_t count)
{
    vf sum[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            sum[i][j] = keep == SET || keep == SET_TIMES ? (vf){0}
                        : keep == SCALE                  ? vf_load(c + i * ldc + j * QD_VF) * factor[i]
                                                         : vf_load(c + i * ldc + j * QD_VF);
    for (int64_t p = 0; p < count; p++) {
        vf line[NV];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            line[j] = vf_load(b + p * ldb + j * QD_VF);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            float value;
            memcpy(&value, a + i * row + p * step, sizeof value); /* pairs are not floats to the compiler */
            vf_factor x = vf_factor_of(value);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++)
                sum[i][j] = dots ? add_dot(sum[i][j], x, line[j]) : vf_add_product(sum[i][j], x, line[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            vf_store(c + i * ldc + j * QD_VF, keep == SET_TIMES ? sum[i][j] * *factor : sum[i][j]);
}

/* c (MR, vectors) [+]= a · b, in stripes of up to NV vectors. transposed: a is stored (count, MR…)
 * with row stride lda, else (MR, count). */
QD_INLINE void stripes(bool dots, bool transposed, keeping keep, const float *factor, float *c, int64_t ldc, const float *a,
                       int64_t lda, const float *b, int64_t ldb, int64_t count, int vectors)
{
    int64_t row = transposed ? 1 : lda, step = transposed ? lda : 1;
    while (vectors > 0) {
        /* 5 and 6 as 3 + 2 and 3 + 3: narrow stripes leave multipliers idle. */
        int nv = vectors >= NV && (NV < 4 || vectors == 4 || vectors > 6) ? NV : vectors < 3 || NV < 3 ? vectors : 3;
        if (nv == NV)
            micro(dots, MR, NV, keep, factor, c, ldc, a, row, step, b, ldb, count);
        else if (NV > 3 && nv == 3)
            micro(dots, MR, 3 < NV ? 3 : NV, keep, factor, c, ldc, a, row, step, b, ldb, count);
        else if (NV > 2 && nv == 2)
            micro(dots, MR, 2 < NV ? 2 : NV, keep, factor, c, ldc, a, row, step, b, ldb, count);
        else
            micro(dots, MR, 1, keep, factor, c, ldc, a, row, step, b, ldb, count);
        c += nv * QD_VF;
        b += nv * QD_VF;
        vectors -= nv;
    }
}

static void product_set(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t count,
                        int vectors)
{
    stripes(false, false, SET, NULL, c, ldc, a, lda, b, ldb, count, vectors);
}
static void product_add(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t count,
                        int vectors)
{
    stripes(false, false, ADD, NULL, c, ldc, a, lda, b, ldb, count, vectors);
}
static void product_add_transposed(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb,
                                   int64_t count, int vectors)
{
    stripes(false, true, ADD, NULL, c, ldc, a, lda, b, ldb, count, vectors);
}

static void product_scale(const float *factor, float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                          int64_t ldb, int64_t count, int vectors)
{
    stripes(false, false, SCALE, factor, c, ldc, a, lda, b, ldb, count, vectors);
}

/* The same with dot products: count pairs, and row strides of a in pairs. factor: see micro(). */
#define DOTS(name, transposed, keep)                                                                                                   \
    static __attribute__((noinline)) void name##_unflushed(const float *factor, float *c, int64_t ldc, const float *a, int64_t lda,    \
                                                           const float *b, int64_t ldb, int64_t count, int vectors)                    \
    {                                                                                                                                  \
        stripes(true, transposed, keep, factor, c, ldc, a, lda, b, ldb, count, vectors);                                               \
    }                                                                                                                                  \
    static inline void name(const float *factor, float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb,      \
                            int64_t count, int vectors)                                                                                \
    {                                                                                                                                  \
        const unsigned saved = flush_subnormals();                                                                                     \
        name##_unflushed(factor, c, ldc, a, lda, b, ldb, count, vectors);                                                              \
        restore_subnormals(saved);                                                                                                     \
    }
DOTS(dots_set, false, SET)
DOTS(dots_set_times, false, SET_TIMES)
DOTS(dots_add, false, ADD)
DOTS(dots_add_transposed, true, ADD)
DOTS(dots_scale, false, SCALE)
#undef DOTS

/* to (rows, ld) = factor * rows of x (rows, head_dim; row stride `stride`), starting at element
 * `first`. Padding columns, and rows up to a whole register tile, are 0. */
QD_INLINE void pack_rows_as(float *to, int64_t ld, const void *x, int64_t first, int64_t stride, int rows, int head_dim,
                            float factor, qd_dtype dtype)
{
    for (int r = 0; r < rows; r++, to += ld) {
        int64_t at = first + r * stride;
        int i = 0;
        for (; i + QD_VF <= head_dim; i += QD_VF)
            vf_store(to + i, vf_load_as(x, at + i, dtype) * factor);
        if (i < head_dim)
            vf_store(to + i, vf_load_n_as(x, at + i, head_dim - i, dtype) * factor);
    }
    memset(to, 0, (size_t)((MR - rows % MR) % MR * ld) * sizeof(float));
}

static void pack_rows(float *to, int64_t ld, const void *x, int64_t first, int64_t stride, int rows, int head_dim,
                      float factor, qd_dtype dtype)
{
    if (dtype == QD_F32)
        pack_rows_as(to, ld, x, first, stride, rows, head_dim, factor, QD_F32);
    else
        pack_rows_as(to, ld, x, first, stride, rows, head_dim, factor, QD_BF16);
}

/* to (head_dim, BLOCK) = factor * transpose of rows of x; columns beyond `rows` are 0. */
static void pack_transposed(float *to, const void *x, int64_t first, int64_t stride, int rows, int head_dim,
                            float factor, qd_dtype dtype)
{
    if (rows < BLOCK)
        memset(to, 0, (size_t)(head_dim * BLOCK) * sizeof(float));
    if (dtype == QD_F32)
        transpose_panel(to, BLOCK, x, first, stride, rows, head_dim, factor, QD_F32);
    else
        transpose_panel(to, BLOCK, x, first, stride, rows, head_dim, factor, QD_BF16);
}

/* Whether rows of x, with heads of `dim`, are written with non-temporal stores: if the results of a
 * call, `cols` per row, are so large that most leave the caches before they are read. */
static bool streams_rows(const job *a, const void *x, int64_t stride, int dim, int64_t cols)
{
    enum { STREAMED_FLOATS = 1 << 18 };
    return a->out_dtype == QD_F32 && dim % QD_VF == 0 && stride % QD_VF == 0 && (uintptr_t)x % sizeof(vf) == 0 &&
           a->batch * a->q_seq * cols >= STREAMED_FLOATS;
}

/* Rows of x = factor * from (rows, ld). streamed: see streams_rows(); call stream_fence()
 * afterwards. */
static void unpack_rows(void *x, int64_t first, int64_t stride, const float *from, int64_t ld, int rows, int head_dim,
                        float factor, qd_dtype dtype, bool streamed)
{
    for (int r = 0; r < rows; r++, from += ld, first += stride) {
        for (int i = 0; streamed && i < head_dim; i += QD_VF)
            stream_store((float *)x + first + i, vf_load(from + i) * factor);
        if (!streamed)
            QD_FOR_VECTORS(i, n, head_dim, { vec_store(x, first + i, vf_load(from + i) * factor, n, dtype); });
    }
}

static int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static int64_t larger(int64_t x, int64_t y)
{
    return x > y ? x : y;
}

/* The first position in the window of a query at position t; below 0: all positions are in it. */
static int64_t window_start(const job *a, int64_t t)
{
    return a->window > 0 ? t - a->window + 1 : 0;
}

/* Row r of a tile, at position t = position + r, attends to keys at positions first_key(r) .. t. */
static int64_t first_key(const job *a, int64_t batch, const tile *at, int64_t r)
{
    int64_t start = a->doc_start ? a->doc_start[batch * a->q_seq + at->row + r] : 0;
    start = larger(start, window_start(a, at->position + r));
    return smaller(larger(start, 0), at->position + r);
}

/* The first position that any row of the tile attends to. Windows start at ascending positions. */
static int64_t first_key_of(const job *a, int64_t batch, const tile *at)
{
    int64_t least = first_key(a, batch, at, 0);
    for (int r = 1; a->doc_start && r < at->rows; r++)
        least = smaller(least, first_key(a, batch, at, r));
    return least;
}

/* A block of consecutive keys. */
typedef struct key_block {
    int64_t row, position; /* row within the part, position within the sequence */
    int keys;
} key_block;

static key_block block_at(const qd_row_run *run, int64_t at)
{
    return (key_block){run->row + at, run->position + at, (int)smaller(BLOCK, run->count - at)};
}

/* Number of keys of the block, from its first, that any of the MR rows starting at position t
 * attends to. */
static int64_t group_keys(int64_t t, const key_block *k)
{
    return smaller(larger(t + MR - k->position, 0), k->keys);
}

/* Whether the windows of all rows from position t on start behind the block. */
static bool outside_window(const job *a, int64_t t, const key_block *k)
{
    return a->window > 0 && window_start(a, t) >= k->position + k->keys;
}

static int key_vectors(int64_t keys)
{
    return (int)((keys + QD_VF - 1) / QD_VF);
}

/* 2^x for x <= 0; 0 below -126, and for NaN, which arises from infinities while a row has no key
 * yet. */
QD_INLINE vf exp2_negative(vf x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vf t = x + magic;
    vf r = x - (t - magic);
    vf p = vf_set(1.5403530e-4f); /* ln(2)^n / n!, n = 6 .. 1 */
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    vi y = (vi)((vu)p + ((vu)t << 23)); /* arbitrary below -126; masked out */
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_mov_epi32(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ), (__m512i)y);
#else
    return (vf)(y & (x >= -126.0f));
#endif
}

/* Sets s (one row, `vectors`) outside of keys [low, high) to `value`. Writes whole vectors: single
 * stores would stall the loads that follow. */
static void mask_row(float *s, int vectors, int64_t low, int64_t high, float value)
{
    vi lane;
#pragma GCC unroll 16
    for (int i = 0; i < QD_VF; i++)
        lane[i] = i;
    for (int v = 0; v < vectors; v++) {
        int from = (int)larger(low - v * QD_VF, 0), to = (int)smaller(high - v * QD_VF, QD_VF);
        if (from > 0 || to < QD_VF)
            vf_store(s + v * QD_VF, vf_select((lane >= from) & (lane < to), vf_load(s + v * QD_VF), vf_set(value)));
    }
}

/* Soft-caps scores: cap · tanh(s / cap), for `rows` rows of `vectors`. */
static void cap_scores(float *s, int rows, int vectors, float cap)
{
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            vf_store(s + r * BLOCK + v * QD_VF, cap * vec_tanh(vf_load(s + r * BLOCK + v * QD_VF) * (1.0f / cap)));
}

/* Rows that are prefetched a few at a time during other computation: the rows of a head are short
 * pieces, pages apart, which the hardware does not prefetch. */
typedef struct fetches {
    struct {
        const char *at;
        int64_t stride, rows; /* stride in bytes */
        int lines;            /* cache lines per row */
    } piece[5];
    int count, next;          /* pieces */
    int64_t done, rows, each; /* rows of the next piece done so far; rows in total; rows per call */
} fetches;

/* Adds rows of x: `cols` elements of each, starting at element `first`. */
static void add_fetch(fetches *f, const job *a, const void *x, int64_t first, int64_t stride, int cols, int64_t rows)
{
    int size = a->dtype == QD_F32 ? 4 : 2;
    if (rows <= 0)
        return;
    f->piece[f->count].at = (const char *)x + first * size;
    f->piece[f->count].stride = stride * size;
    f->piece[f->count].lines = (cols * size + 63) / 64;
    f->piece[f->count++].rows = rows;
    f->rows += rows;
}

static void fetch_some(fetches *f)
{
    for (int64_t rows = f->each; rows > 0 && f->next < f->count; rows--) {
        const char *at = f->piece[f->next].at + f->done * f->piece[f->next].stride;
        for (int i = 0; i < f->piece[f->next].lines; i++)
            __builtin_prefetch(at + i * 64, 0, 2);
        if (++f->done == f->piece[f->next].rows) {
            f->next++;
            f->done = 0;
        }
    }
}

#endif
