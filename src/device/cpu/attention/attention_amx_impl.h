/* Attention of bf16 operands with AMX tiles, on the blocks of attention_isa.c. Included by it for
 * AVX-512 and its emulation.
 *
 * Sums, scores, probabilities and their gradients are fp32, as in the fp32 kernels; probabilities
 * and the gradients of scores are rounded to bf16 where a GEMM reads them. Operands have two forms:
 *   rows   (BLOCK, dim) bf16: what a GEMM sums along its rows
 *   pairs  (columns / 32, k / 2, 32): see attention_pairs_impl.h
 * Heads are whole tiles of k (qd_cpu_attention_has_tiles), and rows up to a whole tile are 0. */
#ifndef QD_DEVICE_CPU_ATTENTION_ATTENTION_AMX_IMPL_H
#define QD_DEVICE_CPU_ATTENTION_ATTENTION_AMX_IMPL_H

#include "device/cpu/amx_impl.h"
#include "device/cpu/attention/attention_pairs_impl.h"

enum { GROUPS = BLOCK / AMX_LINES };
_Static_assert(BLOCK % AMX_LINES == 0 && FORWARD % BLOCK == 0 && AMX_LINES % QD_VF == 0, "blocks are whole tiles");
_Static_assert(3 * BLOCK * BLOCK * 2 <= BLOCK * HEAD * 4, "rounded scores must fit the buffer of v");

/* c (32, 32; row stride ldc) [+]= a · b over `tiles` times 32 elements of k. a: rows of `lda`
 * elements; b: pairs of 32 columns. */
QD_INLINE void tile_product(float *c, int64_t ldc, const uint16_t *a, int64_t lda, const float *b, int64_t tiles, bool add)
{
    amx_multiply_tiles(&(amx_block){.a = (const char *)a, .b = (const char *)b, .next = (const char *)a, .a_row = 2 * lda,
                                    .a_step = 4 * AMX_STEPS, .tiles = tiles, .add = add, .c = c, .ldc = ldc});
}

/* Groups of 32 keys of the block that any of the 32 rows from position t on attends to. */
static int key_groups(int64_t t, const key_block *k)
{
    return (int)((smaller(larger(t + AMX_LINES - k->position, 0), k->keys) + AMX_LINES - 1) / AMX_LINES);
}

/* s (BLOCK, BLOCK) = rows · keys, both of `dim` columns, for the keys that each group of rows
 * attends to. */
static void score_tiles(float *s, const uint16_t *rows, const float *keys, int dim, const int groups[GROUPS])
{
    for (int g = 0; g < GROUPS; g++)
        for (int k = 0; k < groups[g]; k++)
            tile_product(s + g * AMX_LINES * BLOCK + k * AMX_LINES, BLOCK, rows + g * AMX_LINES * dim, dim,
                         keys + k * (dim / 2) * AMX_LINES, dim / (2 * AMX_STEPS), false);
}

static void scale_rows(float *s, int rows, int vectors, float factor)
{
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            vf_store(s + r * BLOCK + v * QD_VF, vf_load(s + r * BLOCK + v * QD_VF) * factor);
}

/* to (keys, BLOCK): columns of 32 rows of s, rounded, at the place of these rows. */
static void round_columns(uint16_t *to, const float *s, int keys)
{
    for (int i = 0; i < keys; i += QD_VF) {
        vf square[QD_VF];
#pragma GCC unroll 16
        for (int r = 0; r < QD_VF; r++)
            square[r] = pair_of(vf_load(s + 2 * r * BLOCK + i), vf_load(s + (2 * r + 1) * BLOCK + i));
        transpose_square(square);
        for (int r = 0; r < QD_VF; r++)
            memcpy(to + (i + r) * BLOCK, &square[r], sizeof *square);
    }
}

/* One block of BLOCK rows, from row `first` of the item on, with a block of keys. */
static void forward_tiles(const job *a, const buffers *w, const item *now, int first, const key_block *k, bool fresh, running *state,
                          float *most, fetches *f)
{
    const tile *at = &now->tile;
    const int64_t position = at->position + first;
    const int hd = a->head_dim, v_dim = a->v_dim;
    int groups[GROUPS];
    for (int g = 0; g < GROUPS; g++)
        groups[g] = first + g * AMX_LINES < at->rows ? key_groups(position + g * AMX_LINES, k) : 0;
    score_tiles(w->s, (const uint16_t *)w->q + first * hd, w->k_t, hd, groups);
    for (int g = 0; g < BLOCK; g += MR) {
        const int vectors = (int)larger(groups[g / AMX_LINES], groups[(g + MR - 1) / AMX_LINES]) * (AMX_LINES / QD_VF);
        if (vectors == 0)
            continue;
        scale_rows(w->s + g * BLOCK, MR, vectors, a->scale * LOG2_E);
        if (a->softcap > 0)
            cap_scores(w->s + g * BLOCK, MR, vectors, a->softcap * LOG2_E);
        for (int r = g; r < g + MR; r++) { /* what no tile has written is masked too */
            const bool real = first + r < at->rows;
            mask_row(w->s + r * BLOCK, vectors, real ? first_key(a, now->batch, at, first + r) - k->position : 0,
                     real ? smaller(position + r + 1 - k->position, k->keys) : 0, -INFINITY);
        }
        if (a->maxima) {
            const float here = largest(w->s + g * BLOCK, (int)larger(smaller(MR, at->rows - first - g), 0), vectors);
            *most = here > *most ? here : *most;
        }
        softmax_rows(w->s + g * BLOCK, vectors, state, first + g, f);
    }
    uint16_t *rounded = (uint16_t *)w->dp;
    for (int g = 0; g < GROUPS; g++) {
        float *o = w->o + (first + g * AMX_LINES) * w->v_ld;
        if (groups[g] == 0) {
            if (fresh) /* its result starts empty */
                memset(o, 0, (size_t)(AMX_LINES * w->v_ld) * sizeof *o);
            continue;
        }
        round_rows(rounded, w->s + g * AMX_LINES * BLOCK, AMX_LINES, groups[g] * AMX_LINES);
        for (int r = 0; r < AMX_LINES && !fresh; r++)
            for (int i = 0; i < v_dim; i += QD_VF)
                vf_store(o + r * w->v_ld + i, vf_load(o + r * w->v_ld + i) * state->shrink[first + g * AMX_LINES + r]);
        for (int i = 0; i < v_dim; i += AMX_LINES)
            tile_product(o + i, w->v_ld, rounded, BLOCK, w->v + i * PAIR_ROWS, groups[g], !fresh);
    }
}

static void forward_amx(const job *a, const item *now, const item *ahead, void *workspace)
{
    buffers w = carve(a, workspace);
    const tile *at = &now->tile;
    const int64_t row0 = now->batch * a->q_seq, key0 = now->batch * a->k_seq, least = first_key_of(a, now->batch, at);
    const int head = now->head, rows = at->rows, hd = a->head_dim, v_dim = a->v_dim, kv = head / (a->heads / a->kv_heads);
    float *lse = a->lse + (now->batch * a->heads + head) * a->q_seq + at->row, most = 0;
    const bool streamed = streams_rows(a, a->o, a->o_stride, v_dim, (int64_t)a->heads * v_dim);
    bool begun = false;
    running state;
    amx_begin();
    for (int run = 0; run < a->k_run_count; run++) {
        const qd_row_run *k_run = &a->k_runs[run];
        for (int64_t from = larger(least - k_run->position, 0) / BLOCK * BLOCK;
             from < k_run->count && k_run->position + from < at->position + rows; from += BLOCK) {
            const key_block k = block_at(k_run, from);
            const bool fresh = !begun && !a->merge;
            if (!begun) {
                begin_rows(a, &w, at, row0, lse, head, &state);
                half_rows((uint16_t *)w.q, a->q, (row0 + at->row) * a->q_stride + head * hd, a->q_stride, rows,
                          (rows + BLOCK - 1) / BLOCK * BLOCK, hd);
                begun = true;
            }
            pairs_of_columns(w.k_t, AMX_LINES, a->k, (key0 + k.row) * a->k_stride + kv * hd, a->k_stride, k.keys, hd);
            pairs_of_rows(w.v, AMX_LINES, a->v, (key0 + k.row) * a->v_stride + kv * v_dim, a->v_stride, k.keys, v_dim);
            fetches f = fetches_of(a, now, ahead, k_run, from, least);
            for (int first = 0; first < rows; first += BLOCK)
                forward_tiles(a, &w, now, first, &k, fresh, &state, &most, &f);
        }
    }
    amx_end();
    if (a->maxima)
        raise_to(a->maxima + head, most * LN_2);
    if (!begun && a->merge)
        return; /* no row attends to a key of this call: the running result stays */
    if (!begun) {
        begin_rows(a, &w, at, row0, lse, head, &state);
        memset(w.o, 0, (size_t)(FORWARD * w.v_ld) * sizeof(float));
    }
    for (int g = 0; g < rows; g += MR)
        finish_rows(a, &w, &state, g, (int)smaller(MR, rows - g), row0 + at->row, head, lse, streamed);
    if (streamed)
        stream_fence();
}

/* Backward. */

static void pack_query_tiles(const job *a, const buffers *w, const pair *b)
{
    const int64_t row = b->batch * a->q_seq + b->q.row, q = row * a->q_stride + b->head * a->head_dim,
                  d_o = row * a->o_stride + b->head * a->v_dim;
    half_rows((uint16_t *)w->q, a->q, q, a->q_stride, b->q.rows, BLOCK, a->head_dim);
    half_rows((uint16_t *)w->d_o, a->d_o, d_o, a->o_stride, b->q.rows, BLOCK, a->v_dim);
    pairs_of_rows(pairs_behind(w->q, w->ld), AMX_LINES, a->q, q, a->q_stride, b->q.rows, a->head_dim);
    pairs_of_rows(pairs_behind(w->d_o, w->v_ld), AMX_LINES, a->d_o, d_o, a->o_stride, b->q.rows, a->v_dim);
}

static void pack_key_tiles(const job *a, const buffers *w, const pair *b, int kv)
{
    const int64_t row = b->batch * a->k_seq + b->k.row, k = row * a->k_stride + kv * a->head_dim,
                  v = row * a->v_stride + kv * a->v_dim;
    pairs_of_columns(w->k_t, AMX_LINES, a->k, k, a->k_stride, b->k.keys, a->head_dim);
    pairs_of_columns(w->v_t, AMX_LINES, a->v, v, a->v_stride, b->k.keys, a->v_dim);
    pairs_of_rows(w->k, AMX_LINES, a->k, k, a->k_stride, b->k.keys, a->head_dim);
}

/* The rounded probabilities and gradients of scores of a pair, (BLOCK, BLOCK) each, in the buffer
 * that the forward pass has for v. */
typedef struct rounded_scores {
    uint16_t *p_columns, *ds_columns, *ds_rows; /* (keys, queries) twice, (queries, keys) */
} rounded_scores;

static rounded_scores rounded_of(const buffers *w)
{
    uint16_t *first = (uint16_t *)w->v;
    return (rounded_scores){first, first + BLOCK * BLOCK, first + 2 * BLOCK * BLOCK};
}

/* Adds a pair's part to dk and dv, and sets w->o to its dq or adds to it; dk and dq lack the factor
 * `scale`. */
static void pair_gradients(const job *a, const buffers *w, const pair *b, fetches *f, bool with_keys, bool with_dq, bool add_dq)
{
    const rounded_scores to = rounded_of(w);
    const int hd = a->head_dim, v_dim = a->v_dim;
    int groups[GROUPS];
    for (int g = 0; g < GROUPS; g++)
        groups[g] = g * AMX_LINES < b->q.rows ? key_groups(b->q.position + g * AMX_LINES, &b->k) : 0;
    score_tiles(w->s, (const uint16_t *)w->q, w->k_t, hd, groups);
    score_tiles(w->dp, (const uint16_t *)w->d_o, w->v_t, v_dim, groups);
    for (int g = 0; g < GROUPS; g++) {
        const int keys = groups[g] * AMX_LINES;
        float *s = w->s + g * AMX_LINES * BLOCK, *dp = w->dp + g * AMX_LINES * BLOCK, *dq = w->o + g * AMX_LINES * w->ld;
        if (keys == 0) {
            if (with_dq && !add_dq)
                memset(dq, 0, (size_t)(AMX_LINES * w->ld) * sizeof *dq);
            continue;
        }
        scale_rows(s, AMX_LINES, keys / QD_VF, a->scale * LOG2_E);
        for (int r = 0; r < AMX_LINES; r++) {
            fetch_some(f);
            row_gradients(a, b, g * AMX_LINES + r, s + r * BLOCK, dp + r * BLOCK, keys / QD_VF, b->k.keys);
        }
        if (with_keys) {
            round_columns(to.p_columns + g * AMX_LINES, s, keys);
            round_columns(to.ds_columns + g * AMX_LINES, dp, keys);
        }
        if (with_dq) {
            round_rows(to.ds_rows, dp, AMX_LINES, keys);
            for (int i = 0; i < hd; i += AMX_LINES)
                tile_product(dq + i, w->ld, to.ds_rows, BLOCK, w->k + i * PAIR_ROWS, groups[g], add_dq);
        }
    }
    for (int k = 0; with_keys && k < GROUPS; k++) {
        int from = 0; /* the first group of rows that attends to these keys */
        while (from < GROUPS && groups[from] <= k)
            from++;
        int end = GROUPS; /* behind the last one: rows that do not exist have no groups */
        while (end > from && groups[end - 1] == 0)
            end--;
        const int64_t tiles = end - from, at = (int64_t)k * AMX_LINES * BLOCK + from * AMX_LINES;
        if (tiles <= 0)
            continue;
        for (int i = 0; i < v_dim; i += AMX_LINES)
            tile_product(w->dv + k * AMX_LINES * w->v_ld + i, w->v_ld, to.p_columns + at, BLOCK,
                         pairs_behind(w->d_o, w->v_ld) + (i / AMX_LINES * PAIR_ROWS + from * AMX_STEPS) * AMX_LINES, tiles, true);
        for (int i = 0; i < hd; i += AMX_LINES)
            tile_product(w->dk + k * AMX_LINES * w->ld + i, w->ld, to.ds_columns + at, BLOCK,
                         pairs_behind(w->q, w->ld) + (i / AMX_LINES * PAIR_ROWS + from * AMX_STEPS) * AMX_LINES, tiles, true);
    }
}

#endif
