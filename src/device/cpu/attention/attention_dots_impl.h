/* The backward pass of attention with dot products of bf16 pairs. Included by attention_isa.c for
 * AVX-512 and its emulation; the forward pass there has both kinds of GEMMs.
 *
 * Scores, probabilities, their gradients and all sums are fp32, as in the fp32 kernels;
 * probabilities and the gradients of scores are rounded to bf16 where a GEMM reads them. Heads are
 * whole vectors of pairs (qd_cpu_attention_has_tiles). */
#ifndef QD_DEVICE_CPU_ATTENTION_ATTENTION_DOTS_IMPL_H
#define QD_DEVICE_CPU_ATTENTION_ATTENTION_DOTS_IMPL_H

#include "device/cpu/attention/attention_pairs_impl.h"

_Static_assert(MR % 2 == 0, "pairs of rows are in one group");
_Static_assert(3 * BLOCK * PAIR_ROWS <= BLOCK * HEAD, "rounded scores must fit the buffer of v");

static void pack_query_pairs(const job *a, const buffers *w, const pair *b)
{
    const int64_t row = b->batch * a->q_seq + b->q.row, q = row * a->q_stride + b->head * a->head_dim,
                  d_o = row * a->o_stride + b->head * a->v_dim;
    half_rows((uint16_t *)w->q, a->q, q, a->q_stride, b->q.rows, BLOCK, a->head_dim);
    half_rows((uint16_t *)w->d_o, a->d_o, d_o, a->o_stride, b->q.rows, BLOCK, a->v_dim);
    pairs_of_rows(pairs_behind(w->q, w->ld), a->head_dim, a->q, q, a->q_stride, b->q.rows, a->head_dim);
    pairs_of_rows(pairs_behind(w->d_o, w->v_ld), a->v_dim, a->d_o, d_o, a->o_stride, b->q.rows, a->v_dim);
}

static void pack_key_pairs(const job *a, const buffers *w, const pair *b, int kv)
{
    const int64_t row = b->batch * a->k_seq + b->k.row, k = row * a->k_stride + kv * a->head_dim,
                  v = row * a->v_stride + kv * a->v_dim;
    pairs_of_columns(w->k_t, BLOCK, a->k, k, a->k_stride, b->k.keys, a->head_dim);
    pairs_of_columns(w->v_t, BLOCK, a->v, v, a->v_stride, b->k.keys, a->v_dim);
    pairs_of_rows(w->k, a->head_dim, a->k, k, a->k_stride, b->k.keys, a->head_dim);
}

/* The rounded probabilities and gradients of scores of a pair of blocks, in the buffer that the
 * forward pass has for v. */
typedef struct rounded_pairs {
    float *p, *ds;     /* (PAIR_ROWS, BLOCK): pairs of rows */
    uint16_t *ds_rows; /* (BLOCK, BLOCK) */
} rounded_pairs;

static rounded_pairs rounded_pairs_of(const buffers *w)
{
    return (rounded_pairs){w->v, w->v + PAIR_ROWS * BLOCK, (uint16_t *)(w->v + 2 * PAIR_ROWS * BLOCK)};
}

/* Rounds rows r and r + 1, which are at s and dp. */
QD_INLINE void round_two_rows(const rounded_pairs *to, int r, const float *s, const float *dp, int vectors)
{
    for (int i = 0; i < vectors * QD_VF; i += QD_VF) {
        const vu even = vf_round_to_bf16(vf_load(dp + i)), odd = vf_round_to_bf16(vf_load(dp + BLOCK + i));
        const vh low = vu_high_halves(even), high = vu_high_halves(odd);
        vf_store(to->p + r / 2 * BLOCK + i, pair_of(vf_load(s + i), vf_load(s + BLOCK + i)));
        vf_store(to->ds + r / 2 * BLOCK + i, (vf)((odd & 0xffff0000u) | even >> 16));
        memcpy(to->ds_rows + r * BLOCK + i, &low, sizeof low);
        memcpy(to->ds_rows + (r + 1) * BLOCK + i, &high, sizeof high);
    }
}

/* As score_gradients(). */
static void score_gradients_by_dots(const job *a, const buffers *w, const pair *b, const rounded_pairs *to, fetches *f)
{
    const float factor = a->scale * LOG2_E;
    const int64_t q_ld = a->head_dim / 2, o_ld = a->v_dim / 2;
    for (int g = 0; g < b->q.rows; g += MR)
        dots_set_times(&factor, w->s + g * BLOCK, BLOCK, w->q + g * q_ld, q_ld, w->k_t, BLOCK, q_ld, pair_vectors(b, g));
    for (int g = 0; g < b->q.rows; g += MR) {
        const int vectors = pair_vectors(b, g);
        const int64_t seen = group_keys(b->q.position + g, &b->k);
        dots_set(NULL, w->dp + g * BLOCK, BLOCK, w->d_o + g * o_ld, o_ld, w->v_t, BLOCK, o_ld, vectors);
        for (int r = g; seen > 0 && r < g + MR; r += 2) {
            for (int i = r; i < r + 2; i++) {
                fetch_some(f);
                row_gradients(a, b, i, w->s + i * BLOCK, w->dp + i * BLOCK, vectors, seen);
            }
            round_two_rows(to, r, w->s + r * BLOCK, w->dp + r * BLOCK, vectors);
        }
    }
}

/* As add_key_gradient(), with scores and rows in pairs of rows. */
static void add_key_gradient_by_dots(const pair *b, float *to, const float *scores, const float *rows, int vectors)
{
    const int64_t ld = vectors * QD_VF;
    for (int g = 0; g < b->k.keys; g += MR) {
        const int64_t from = larger(b->k.position + g - b->q.position, 0) / MR * (MR / 2);
        if (2 * from >= b->q.rows)
            break;
        dots_add_transposed(NULL, to + g * ld, ld, scores + from * BLOCK + g, BLOCK, rows + from * ld, ld, (b->q.rows + 1) / 2 - from,
                            vectors);
    }
}

/* Adds a pair's part to dk and dv, and sets w->o to its dq or adds to it; dk and dq lack the factor
 * `scale`. */
static void dot_gradients(const job *a, const buffers *w, const pair *b, fetches *f, bool with_keys, bool with_dq, bool add_dq)
{
    const rounded_pairs to = rounded_pairs_of(w);
    score_gradients_by_dots(a, w, b, &to, f);
    if (with_keys) {
        add_key_gradient_by_dots(b, w->dv, to.p, pairs_behind(w->d_o, w->v_ld), w->v_vectors);
        add_key_gradient_by_dots(b, w->dk, to.ds, pairs_behind(w->q, w->ld), w->vectors);
    }
    for (int g = 0; with_dq && g < b->q.rows; g += MR)
        (add_dq ? dots_add : dots_set)(NULL, w->o + g * w->ld, w->ld, (const float *)to.ds_rows + g * PAIR_ROWS, PAIR_ROWS, w->k, w->ld,
                                       (group_keys(b->q.position + g, &b->k) + 1) / 2, w->vectors);
}

#endif
