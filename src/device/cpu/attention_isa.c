/* Causal attention on blocks of BLOCK queries x BLOCK keys, packed to fp32 in the workspace. Scores are kept in units of
 * log 2 (queries are scaled by scale * log2 e when packed), so that exponentials are powers of two.
 *
 * In every block the row groups of a product leave out the keys that none of their rows sees. */
#include "device/cpu/attention_impl.h"
#include "device/cpu/transpose_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>

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

/* Buffers of the workspace, each with row stride `ld` (head_dim up to a whole vector) or BLOCK. */
typedef struct buffers {
    float *q, *d_o;         /* (BLOCK, ld): queries, scaled; gradient of the output. Forward: q has room for FORWARD rows */
    float *k_t, *v_t;       /* (head_dim, BLOCK) */
    float *k, *v;           /* (BLOCK, ld) */
    float *s, *dp;          /* (BLOCK, BLOCK): scores, then probabilities; gradient of them, then of the scores */
    float *o, *dk, *dv;     /* (BLOCK, ld): results; o is also dq. Forward: o has room for FORWARD rows */
    float *dq;              /* (group * seq, head_dim): dq in the making, where dq itself is not fp32 */
    int64_t ld;
    int vectors; /* ld / QD_VF */
} buffers;

static buffers carve(const job *a, void *workspace)
{
    enum { BY_HEAD = BLOCK * HEAD, SQUARE = BLOCK * BLOCK };
    _Static_assert((9 * BY_HEAD + 2 * SQUARE + QD_ATTENTION_DQ_FLOATS) * 4 <= QD_CPU_WORKSPACE_BYTES,
                   "the buffers must fit the workspace");
    float *next = workspace;
    buffers w = {.vectors = (a->head_dim + QD_VF - 1) / QD_VF};
    w.ld = w.vectors * QD_VF;
    /* after q and after o lie two buffers that the forward pass does not need: it has three times the room for q and o */
    _Static_assert(FORWARD <= 3 * BLOCK, "queries of the forward pass must fit three buffers");
    float **by_head[] = {&w.q, &w.d_o, &w.v_t, &w.k_t, &w.v, &w.k, &w.o, &w.dk, &w.dv};
    for (size_t i = 0; i < sizeof by_head / sizeof *by_head; i++, next += BY_HEAD)
        *by_head[i] = next;
    w.s = next;
    w.dp = next + SQUARE;
    w.dq = next + 2 * SQUARE;
    return w;
}

/* ---- products of packed blocks ---- */

/* c (rows, nv vectors) [+]= sum over p of a[i * row + p * step] * b[p * ldb + …]. */
QD_INLINE void micro(int rows, int nv, bool add, float *restrict c, int64_t ldc, const float *restrict a, int64_t row,
                     int64_t step, const float *restrict b, int64_t ldb, int64_t count)
{
    vf sum[MR][NV];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            sum[i][j] = add ? vf_load(c + i * ldc + j * QD_VF) : (vf){0};
    for (int64_t p = 0; p < count; p++) {
        vf line[NV];
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            line[j] = vf_load(b + p * ldb + j * QD_VF);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            vf_factor x = vf_factor_of(a[i * row + p * step]);
#pragma GCC unroll 4
            for (int j = 0; j < nv; j++)
                sum[i][j] = vf_add_product(sum[i][j], x, line[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            vf_store(c + i * ldc + j * QD_VF, sum[i][j]);
}

/* c (MR, vectors) [+]= a · b, in stripes of up to NV vectors. transposed: a is stored (count, MR…) with row stride lda,
 * otherwise (MR, count) . */
QD_INLINE void stripes(bool transposed, bool add, float *c, int64_t ldc, const float *a, int64_t lda, const float *b,
                       int64_t ldb, int64_t count, int vectors)
{
    int64_t row = transposed ? 1 : lda, step = transposed ? lda : 1;
    while (vectors > 0) {
        /* 5 and 6 as 3 + 2 and 3 + 3: narrow stripes leave multipliers idle */
        int nv = vectors >= NV && (NV < 4 || vectors == 4 || vectors > 6) ? NV : vectors < 3 || NV < 3 ? vectors : 3;
        if (nv == NV)
            micro(MR, NV, add, c, ldc, a, row, step, b, ldb, count);
        else if (NV > 3 && nv == 3)
            micro(MR, 3 < NV ? 3 : NV, add, c, ldc, a, row, step, b, ldb, count);
        else if (NV > 2 && nv == 2)
            micro(MR, 2 < NV ? 2 : NV, add, c, ldc, a, row, step, b, ldb, count);
        else
            micro(MR, 1, add, c, ldc, a, row, step, b, ldb, count);
        c += nv * QD_VF;
        b += nv * QD_VF;
        vectors -= nv;
    }
}

static void product_set(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t count,
                        int vectors)
{
    stripes(false, false, c, ldc, a, lda, b, ldb, count, vectors);
}
static void product_add(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb, int64_t count,
                        int vectors)
{
    stripes(false, true, c, ldc, a, lda, b, ldb, count, vectors);
}
static void product_add_transposed(float *c, int64_t ldc, const float *a, int64_t lda, const float *b, int64_t ldb,
                                   int64_t count, int vectors)
{
    stripes(true, true, c, ldc, a, lda, b, ldb, count, vectors);
}

/* ---- packing ---- */

/* to (rows, ld) = factor * rows of x (rows, head_dim; row stride `stride`) from element `first`, zero in between; the
 * rows up to a whole register tile are 0. */
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

/* to (head_dim, BLOCK) = transpose of rows of x; columns beyond `rows` are 0. */
static void pack_transposed(float *to, const void *x, int64_t first, int64_t stride, int rows, int head_dim,
                            qd_dtype dtype)
{
    if (rows < BLOCK)
        memset(to, 0, (size_t)(head_dim * BLOCK) * sizeof(float));
    if (dtype == QD_F32)
        transpose_panel(to, BLOCK, x, first, stride, rows, head_dim, QD_F32);
    else
        transpose_panel(to, BLOCK, x, first, stride, rows, head_dim, QD_BF16);
}

/* Rows of x = factor * from (rows, ld). */
static void unpack_rows(void *x, int64_t first, int64_t stride, const float *from, int64_t ld, int rows, int head_dim,
                        float factor, qd_dtype dtype)
{
    for (int r = 0; r < rows; r++, from += ld)
        QD_FOR_VECTORS(i, n, head_dim, { vec_store(x, first + r * stride + i, vf_load(from + i) * factor, n, dtype); });
}

/* ---- masks ---- */

static int64_t smaller(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

static int64_t larger(int64_t x, int64_t y)
{
    return x > y ? x : y;
}

/* Row r of a tile, at position t = position + r, sees keys at positions first_key(r) .. t. */
static int64_t first_key(const job *a, int64_t batch, const tile *at, int64_t r)
{
    int64_t start = a->doc_start ? a->doc_start[batch * a->q_seq + at->row + r] : 0;
    return smaller(larger(start, 0), at->position + r);
}

/* The first position that some row of the tile sees. */
static int64_t first_key_of(const job *a, int64_t batch, const tile *at)
{
    int64_t least = first_key(a, batch, at, 0);
    for (int r = 1; a->doc_start && r < at->rows; r++)
        least = smaller(least, first_key(a, batch, at, r));
    return least;
}

/* A block of neighbouring keys. */
typedef struct key_block {
    int64_t row, position; /* in the sequence's part, in the sequence */
    int keys;
} key_block;

static key_block block_at(const qd_row_run *run, int64_t at)
{
    return (key_block){run->row + at, run->position + at, (int)smaller(BLOCK, run->count - at)};
}

/* Keys of the block that some row of the group of MR rows from position t on sees: the count from its first on. */
static int64_t group_keys(int64_t t, const key_block *k)
{
    return smaller(larger(t + MR - k->position, 0), k->keys);
}

static int key_vectors(int64_t keys)
{
    return (int)((keys + QD_VF - 1) / QD_VF);
}

/* 2^x for x <= 0, 0 below -126. */
QD_INLINE vf exp2_negative(vf x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    vf low = vf_set(-126.0f);
    vf clamped = vf_max(x, low);
    vf t = clamped + magic;
    vf r = clamped - (t - magic);
    vf p = vf_set(1.5403530e-4f); /* ln(2)^n / n!, n = 6 .. 1 */
    p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    vf y = (vf)((vi)p + ((vi)t << 23));
    return vf_select(x < low, (vf){0}, y);
}

/* s (one row, `vectors`) outside of keys [low, high) becomes `value`. Whole vectors: single stores would hold up the loads
 * that follow. */
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

/* ---- memory to come ---- */

/* Rows that are fetched into the caches a few at a time, while something else is computed: the rows of a head are short pieces, pages
 * apart, which no machine fetches by itself. */
typedef struct fetches {
    struct {
        const char *at;
        int64_t stride, rows; /* stride in bytes */
    } piece[6];
    int count, next, lines; /* lines of a row */
    int64_t done, rows;     /* rows of the next piece that are done; rows in all */
} fetches;

static fetches begin_fetches(const job *a)
{
    return (fetches){.lines = (a->head_dim * (a->dtype == QD_F32 ? 4 : 2) + 63) / 64};
}

static void add_fetch(fetches *f, const job *a, const void *x, int64_t first, int64_t stride, int64_t rows)
{
    int size = a->dtype == QD_F32 ? 4 : 2;
    if (rows <= 0)
        return;
    f->piece[f->count].at = (const char *)x + first * size;
    f->piece[f->count].stride = stride * size;
    f->piece[f->count++].rows = rows;
    f->rows += rows;
}

static void fetch_some(fetches *f, int64_t rows)
{
    for (; rows > 0 && f->next < f->count; rows--) {
        for (int i = 0; i < f->lines; i++)
            __builtin_prefetch(f->piece[f->next].at + f->done * f->piece[f->next].stride + i * 64, 0, 2);
        if (++f->done == f->piece[f->next].rows) {
            f->next++;
            f->done = 0;
        }
    }
}

/* ---- forward ---- */

/* One row of scores becomes probabilities relative to the running maximum; the row of o is rescaled when that rises. */
QD_INLINE void softmax_row(float *s, int vectors, float *o, int o_vectors, float *most, float *total)
{
    vf top = vf_load(s);
    for (int v = 1; v < vectors; v++)
        top = vf_max(top, vf_load(s + v * QD_VF));
    float high = vf_max_lane(top);
    if (high > *most) {
        if (*total > 0) { /* nothing to rescale the first time */
            vf shrink = exp2_negative(vf_set(*most - high));
            *total *= shrink[0];
            for (int v = 0; v < o_vectors; v++)
                vf_store(o + v * QD_VF, vf_load(o + v * QD_VF) * shrink);
        }
        *most = high;
    }
    vf sum = {0};
    for (int v = 0; v < vectors; v++) {
        vf p = exp2_negative(vf_load(s + v * QD_VF) - *most);
        sum += p;
        vf_store(s + v * QD_VF, p);
    }
    *total += vf_sum(sum);
}

/* The running result of the rows before the first keys of this call. */
static void begin_rows(const job *a, const buffers *w, const tile *at, int64_t row0, const float *lse, int head, float *most,
                       float *total)
{
    memset(w->o, 0, (size_t)(FORWARD * w->ld) * sizeof(float));
    for (int r = 0; r < FORWARD; r++) {
        bool merged = a->merge && r < at->rows && lse[r] != -INFINITY;
        most[r] = merged ? lse[r] * LOG2_E : -INFINITY;
        total[r] = merged ? 1 : 0;
    }
    if (a->merge)
        pack_rows(w->o, w->ld, a->o, (row0 + at->row) * a->o_stride + head * a->head_dim, a->o_stride, at->rows, a->head_dim, 1,
                  QD_F32);
}

/* What the block of keys at `from` of the run makes time for: the next block of this item's keys, and part of what the item ahead begins
 * with. */
static fetches fetches_of(const job *a, const item *now, const item *ahead, const qd_row_run *run, int64_t from, int64_t least)
{
    fetches f = begin_fetches(a);
    int64_t hd = a->head_dim, group = a->heads / a->kv_heads, key = now->batch * a->k_seq + run->row + from + BLOCK;
    int64_t end = smaller(run->count, now->tile.position + now->tile.rows - run->position), keys = smaller(end - from - BLOCK, BLOCK);
    add_fetch(&f, a, a->k, key * a->k_stride + now->head / group * hd, a->k_stride, keys);
    add_fetch(&f, a, a->v, key * a->v_stride + now->head / group * hd, a->v_stride, keys);
    if (!ahead || a->k_run_count > 1)
        return f;
    int64_t first = larger(least - run->position, 0) / BLOCK, blocks = (end - 1) / BLOCK - first + 1, at = from / BLOCK - first;
    int64_t rows = ahead->tile.rows, q0 = rows * at / blocks, q1 = rows * (at + 1) / blocks;
    int64_t most = smaller(BLOCK, run->count), k0 = most * at / blocks, k1 = most * (at + 1) / blocks;
    key = ahead->batch * a->k_seq + run->row + k0;
    add_fetch(&f, a, a->q, (ahead->batch * a->q_seq + ahead->tile.row + q0) * a->q_stride + ahead->head * hd, a->q_stride, q1 - q0);
    add_fetch(&f, a, a->k, key * a->k_stride + ahead->head / group * hd, a->k_stride, k1 - k0);
    add_fetch(&f, a, a->v, key * a->v_stride + ahead->head / group * hd, a->v_stride, k1 - k0);
    return f;
}

/* A row of o that will be stored to. */
static void expect_row(const job *a, int64_t row, int head)
{
    int size = a->out_dtype == QD_F32 ? 4 : 2;
    for (int i = 0; i < a->head_dim * size; i += 64)
        __builtin_prefetch((const char *)a->o + (row * a->o_stride + head * a->head_dim) * size + i, 1);
}

static void forward(const job *a, const item *now, const item *ahead, void *workspace)
{
    buffers w = carve(a, workspace);
    const tile *at = &now->tile;
    const int64_t batch = now->batch;
    const int head = now->head;
    int64_t row0 = batch * a->q_seq, key0 = batch * a->k_seq, least = first_key_of(a, batch, at);
    int rows = at->rows, hd = a->head_dim, kv = head / (a->heads / a->kv_heads);
    float most[FORWARD], total[FORWARD], *lse = a->lse + (batch * a->heads + head) * a->q_seq + at->row;
    bool begun = false;
    for (int run = 0; run < a->k_run_count; run++) {
        const qd_row_run *k_run = &a->k_runs[run];
        for (int64_t from = larger(least - k_run->position, 0) / BLOCK * BLOCK;
             from < k_run->count && k_run->position + from < at->position + rows; from += BLOCK) {
            key_block k = block_at(k_run, from);
            if (!begun) {
                begin_rows(a, &w, at, row0, lse, head, most, total);
                pack_rows(w.q, w.ld, a->q, (row0 + at->row) * a->q_stride + head * hd, a->q_stride, rows, hd, a->scale * LOG2_E,
                          a->dtype);
                begun = true;
            }
            pack_transposed(w.k_t, a->k, (key0 + k.row) * a->k_stride + kv * hd, a->k_stride, k.keys, hd, a->dtype);
            pack_rows(w.v, w.ld, a->v, (key0 + k.row) * a->v_stride + kv * hd, a->v_stride, k.keys, hd, 1, a->dtype);
            fetches f = fetches_of(a, now, ahead, k_run, from, least);
            int64_t seeing = smaller(rows, at->position + rows - k.position), each = (f.rows + seeing - 1) / seeing;
            for (int g = 0; g < rows; g += MR) {
                int64_t seen = group_keys(at->position + g, &k);
                if (seen == 0)
                    continue;
                int vectors = key_vectors(seen);
                product_set(w.s, BLOCK, w.q + g * w.ld, w.ld, w.k_t, BLOCK, hd, vectors);
                for (int r = g; r < g + MR; r++) { /* memory to come is fetched bit by bit: many lines at once would hold up the loads */
                    fetch_some(&f, each);
                    if (r < rows && at->position + r < k.position + k.keys) /* its last keys */
                        expect_row(a, row0 + at->row + r, head);
                    float *s = w.s + (r - g) * BLOCK;
                    int64_t low = r < rows ? first_key(a, batch, at, r) - k.position : seen;
                    int64_t high = smaller(at->position + r + 1 - k.position, seen);
                    if (low >= high) { /* nothing of this block, or a row beyond the end */
                        memset(s, 0, (size_t)vectors * sizeof(vf));
                        continue;
                    }
                    if (low > 0 || high < vectors * QD_VF)
                        mask_row(s, vectors, low, high, -INFINITY);
                    softmax_row(s, vectors, w.o + r * w.ld, w.vectors, &most[r], &total[r]);
                }
                product_add(w.o + g * w.ld, w.ld, w.s, BLOCK, w.v, w.ld, seen, w.vectors);
            }
        }
    }
    if (!begun && a->merge)
        return; /* no key of this call is seen: the running result stays */
    if (!begun)
        begin_rows(a, &w, at, row0, lse, head, most, total);
    for (int r = 0; r < rows; r++) {
        unpack_rows(a->o, (row0 + at->row + r) * a->o_stride + head * hd, 0, w.o + r * w.ld, w.ld, 1, hd,
                    total[r] == 0 ? 0 : 1 / total[r], a->out_dtype);
        lse[r] = (most[r] + log2f(total[r])) * LN_2;
    }
}

/* ---- backward ---- */

static void backward_delta(const qd_attention_args *a, int64_t batch, int64_t t)
{
    for (int head = 0; head < a->heads; head++) {
        int64_t at = (batch * a->seq + t) * a->o_stride + head * a->head_dim;
        vf sum = {0};
        QD_FOR_VECTORS(i, n, a->head_dim, { sum += vec_load(a->o, at + i, n, a->dtype) * vec_load(a->d_o, at + i, n, a->dtype); });
        a->delta[(batch * a->heads + head) * a->seq + t] = vf_sum(sum);
    }
}

/* A pair of blocks. */
typedef struct pair {
    int64_t batch;
    int head;
    tile q;
    key_block k;
} pair;

static void pack_queries(const job *a, const buffers *w, const pair *b)
{
    int64_t row = b->batch * a->q_seq + b->q.row;
    pack_rows(w->q, w->ld, a->q, row * a->q_stride + b->head * a->head_dim, a->q_stride, b->q.rows, a->head_dim,
              a->scale * LOG2_E, a->dtype);
    pack_rows(w->d_o, w->ld, a->d_o, row * a->o_stride + b->head * a->head_dim, a->o_stride, b->q.rows, a->head_dim, 1,
              a->dtype);
}

/* Keys are packed with the factor `scale`, which dq needs. */
static void pack_keys(const job *a, const buffers *w, const pair *b, int kv)
{
    int64_t row = b->batch * a->k_seq + b->k.row, k = row * a->k_stride + kv * a->head_dim,
            v = row * a->v_stride + kv * a->head_dim;
    pack_transposed(w->k_t, a->k, k, a->k_stride, b->k.keys, a->head_dim, a->dtype);
    pack_transposed(w->v_t, a->v, v, a->v_stride, b->k.keys, a->head_dim, a->dtype);
    pack_rows(w->k, w->ld, a->k, k, a->k_stride, b->k.keys, a->head_dim, a->scale, a->dtype);
}

/* s = probabilities, dp = s * (d_o · v^T - delta): the gradient of the scores, but for `scale`. Zero where masked, up to
 * the last group of MR keys that the row's group sees. */
static void score_gradients(const job *a, const buffers *w, const pair *b)
{
    int64_t at = (b->batch * a->heads + b->head) * a->q_seq + b->q.row;
    for (int g = 0; g < b->q.rows; g += MR) {
        int64_t seen = group_keys(b->q.position + g, &b->k);
        if (seen == 0)
            continue;
        int vectors = key_vectors(smaller((seen + MR - 1) / MR * MR, b->k.keys));
        product_set(w->s + g * BLOCK, BLOCK, w->q + g * w->ld, w->ld, w->k_t, BLOCK, a->head_dim, vectors);
        product_set(w->dp + g * BLOCK, BLOCK, w->d_o + g * w->ld, w->ld, w->v_t, BLOCK, a->head_dim, vectors);
        for (int r = g; r < g + MR; r++) {
            float *s = w->s + r * BLOCK, *dp = w->dp + r * BLOCK;
            int64_t low = r < b->q.rows ? first_key(a, b->batch, &b->q, r) - b->k.position : seen;
            int64_t high = smaller(b->q.position + r + 1 - b->k.position, seen);
            if (low >= high) {
                memset(s, 0, (size_t)vectors * sizeof(vf));
                memset(dp, 0, (size_t)vectors * sizeof(vf));
                continue;
            }
            if (low > 0 || high < vectors * QD_VF)
                mask_row(s, vectors, low, high, -INFINITY);
            float shift = a->lse[at + r] * LOG2_E, delta = a->delta[at + r];
            for (int v = 0; v < vectors; v++) {
                /* a score may lie above its lse by rounding: the power of two must not see it */
                vf p = exp2_negative(vf_min(vf_load(s + v * QD_VF) - shift, (vf){0}));
                vf_store(s + v * QD_VF, p);
                vf_store(dp + v * QD_VF, p * (vf_load(dp + v * QD_VF) - delta));
            }
        }
    }
}

/* dv += s^T · d_o, dk += dp^T · q: for each group of keys, over the rows that see them. */
static void add_key_gradients(const buffers *w, const pair *b)
{
    for (int g = 0; g < b->k.keys; g += MR) {
        /* rows before the group's first key do not see it; their group of MR rows may not have been written either */
        int64_t from = larger(b->k.position + g - b->q.position, 0) / MR * MR;
        if (from >= b->q.rows)
            break;
        int64_t count = b->q.rows - from;
        product_add_transposed(w->dv + g * w->ld, w->ld, w->s + from * BLOCK + g, BLOCK, w->d_o + from * w->ld, w->ld,
                               count, w->vectors);
        product_add_transposed(w->dk + g * w->ld, w->ld, w->dp + from * BLOCK + g, BLOCK, w->q + from * w->ld, w->ld,
                               count, w->vectors);
    }
}

/* o [+]= dp · k */
static void query_gradients(const buffers *w, const pair *b, bool add)
{
    for (int g = 0; g < b->q.rows; g += MR) {
        int64_t seen = group_keys(b->q.position + g, &b->k);
        (add ? product_add : product_set)(w->o + g * w->ld, w->ld, w->dp + g * BLOCK, BLOCK, w->k, w->ld, seen,
                                          w->vectors);
    }
}

/* to (rows, head_dim; row stride `stride`) += factor * from (rows, ld) */
static void add_rows(float *to, int64_t stride, const float *from, int64_t ld, int rows, int head_dim, float factor)
{
    for (int r = 0; r < rows; r++, to += stride, from += ld) {
        int i = 0;
        for (; i + QD_VF <= head_dim; i += QD_VF)
            vf_store(to + i, vf_load(to + i) + vf_load(from + i) * factor);
        if (i < head_dim)
            vf_store_n(to + i, vf_load_n(to + i, head_dim - i) + vf_load(from + i) * factor, head_dim - i);
    }
}

/* The gradients of a block of keys, written or added to what is there. */
static void key_results(const job *a, void *to, int64_t stride, const pair *b, int kv, const float *from, int64_t ld, float factor)
{
    int64_t at = (b->batch * a->k_seq + b->k.row) * stride + kv * a->head_dim;
    if (a->accumulate)
        add_rows((float *)to + at, stride, from, ld, b->k.keys, a->head_dim, factor);
    else
        unpack_rows(to, at, stride, from, ld, b->k.keys, a->head_dim, factor, a->out_dtype);
}

/* Queries of one run that see keys of the block b->k, a tile at a time. dq: of the key head's first query head, row 0 of the
 * sequence's part; NULL: not wanted. */
static void run_backward(const job *a, const buffers *w, pair *b, const qd_row_run *run, float *dq, int64_t dq_stride)
{
    for (int64_t from = larger(b->k.position - run->position, 0) / BLOCK * BLOCK; from < run->count; from += BLOCK) {
        b->q = (tile){run->row + from, run->position + from, (int)smaller(BLOCK, run->count - from)};
        if (first_key_of(a, b->batch, &b->q) >= b->k.position + b->k.keys || b->q.position + b->q.rows <= b->k.position)
            continue;
        pack_queries(a, w, b);
        score_gradients(a, w, b);
        add_key_gradients(w, b);
        if (dq) {
            query_gradients(w, b, false);
            add_rows(dq + b->q.row * dq_stride, dq_stride, w->o, w->ld, b->q.rows, a->head_dim, 1);
        }
    }
}

static void backward(const job *a, int64_t batch, int kv, bool with_dq, void *workspace)
{
    buffers w = carve(a, workspace);
    int group = a->heads / a->kv_heads, hd = a->head_dim;
    /* where dq is summed: in place if it is fp32 */
    bool direct = a->out_dtype == QD_F32;
    float *dq = direct ? (float *)a->dq + batch * a->q_seq * a->dq_stride + kv * group * hd : w.dq;
    int64_t dq_stride = direct ? a->dq_stride : (int64_t)group * hd;
    for (int64_t t = 0; with_dq && !a->accumulate && t < a->q_seq; t++)
        memset(dq + t * dq_stride, 0, (size_t)(group * hd) * sizeof(float));
    for (int k_run = 0; k_run < a->k_run_count; k_run++) {
        for (int64_t from = 0; from < a->k_runs[k_run].count; from += BLOCK) {
            pair b = {.batch = batch, .k = block_at(&a->k_runs[k_run], from)};
            pack_keys(a, &w, &b, kv);
            memset(w.dk, 0, (size_t)(BLOCK * w.ld) * sizeof(float));
            memset(w.dv, 0, (size_t)(BLOCK * w.ld) * sizeof(float));
            for (int h = 0; h < group; h++) {
                b.head = kv * group + h;
                for (int q_run = 0; q_run < a->q_run_count; q_run++)
                    run_backward(a, &w, &b, &a->q_runs[q_run], with_dq ? dq + h * hd : NULL, dq_stride);
            }
            key_results(a, a->dk, a->dk_stride, &b, kv, w.dk, w.ld, LN_2);
            key_results(a, a->dv, a->dv_stride, &b, kv, w.dv, w.ld, 1);
        }
    }
    for (int64_t t = 0; with_dq && !direct && t < a->q_seq; t++)
        for (int i = 0; i < group * hd; i++)
            store_as(a->dq, (batch * a->q_seq + t) * a->dq_stride + kv * group * hd + i, dq[t * dq_stride + i], a->out_dtype);
}

static void backward_dq(const job *a, const item *now, const item *ahead, void *workspace)
{
    (void)ahead;
    buffers w = carve(a, workspace);
    const tile *at = &now->tile;
    const int64_t batch = now->batch;
    const int head = now->head;
    pair b = {.batch = batch, .head = head, .q = *at};
    int64_t least = first_key_of(a, batch, at);
    pack_queries(a, &w, &b);
    memset(w.o, 0, (size_t)(BLOCK * w.ld) * sizeof(float));
    for (int run = 0; run < a->k_run_count; run++) {
        const qd_row_run *k_run = &a->k_runs[run];
        for (int64_t from = larger(least - k_run->position, 0) / BLOCK * BLOCK;
             from < k_run->count && k_run->position + from < at->position + at->rows; from += BLOCK) {
            b.k = block_at(k_run, from);
            pack_keys(a, &w, &b, head / (a->heads / a->kv_heads));
            score_gradients(a, &w, &b);
            query_gradients(&w, &b, true);
        }
    }
    unpack_rows(a->dq, (batch * a->q_seq + at->row) * a->dq_stride + head * a->head_dim, a->dq_stride, w.o, w.ld, at->rows,
                a->head_dim, 1, a->out_dtype);
}

const qd_cpu_attention QD_ISA_NAME(qd_cpu_attention) = {
    .forward = forward,
    .backward = backward,
    .backward_dq = backward_dq,
    .backward_delta = backward_delta,
};
