/* Causal attention on blocks of BLOCK queries x BLOCK keys, packed to fp32 in the workspace. Scores
 * are in units of log 2 (queries or keys are scaled by scale * log2 e when packed), so that
 * exponentials are powers of two.
 *
 * In every block, the row groups of a GEMM skip the keys that none of their rows attends to. */
#include "device/cpu/attention/attention_blocks_impl.h"
#include "device/cpu/attention/attention_pairs_impl.h"

#include <math.h>

#if defined(__AVX512F__)
#define QD_ATTENTION_TILES qd_cpu_attention_amx
#define QD_ATTENTION_DOTS qd_cpu_attention_dots
#elif defined(QD_ISA_emulated)
#define QD_ATTENTION_TILES qd_cpu_attention_amx_emulated
#define QD_ATTENTION_DOTS qd_cpu_attention_dots_emulated
#endif

/* The running result of an item's rows, and the factor by which the current block of keys shrinks
 * it. */
typedef struct running {
    float most[FORWARD], total[FORWARD], shrink[FORWARD];
} running;

/* to[i] = sum or maximum of the lanes of x[i]. All rows are reduced together, with lanes of two
 * rows in a vector: half the instructions and 1/MR of the latency of reducing row by row. */
QD_INLINE void reduce_rows(float *to, vf x[MR], bool sum)
{
#if QD_VF >= 8
    _Static_assert(MR <= 8, "eight rows share a vector at the end");
    vf r[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        r[i] = x[i < MR ? i : MR - 1];
#define REDUCE_STEP(rows, d)                                                                                           \
    _Pragma("GCC unroll 4") for (int i = 0; i < (rows) / 2; i++)                                                       \
    {                                                                                                                  \
        vf low = __builtin_shufflevector(r[i], r[i + (rows) / 2], QD_LANES(QD_LANE_LOW, d));                           \
        vf high = __builtin_shufflevector(r[i], r[i + (rows) / 2], QD_LANES(QD_LANE_HIGH, d));                         \
        r[i] = sum ? low + high : vf_max(low, high);                                                                   \
    }
    REDUCE_STEP(8, QD_VF / 2)
    REDUCE_STEP(4, QD_VF / 4)
    REDUCE_STEP(2, QD_VF / 8)
#undef REDUCE_STEP
#if QD_VF == 16
    vf other = __builtin_shufflevector(r[0], r[0], 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    r[0] = sum ? r[0] + other : vf_max(r[0], other);
#endif
    /* Each step halves the lanes per row: row i ends at lane i * QD_VF / 8. */
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
        to[i] = r[0][i * (QD_VF / 8)];
#else
    for (int i = 0; i < MR; i++)
        to[i] = sum ? vf_sum(x[i]) : vf_max_lane(x[i]);
#endif
}

/* MR rows of scores become probabilities relative to the running maximum. */
QD_INLINE void softmax_rows(float *s, int vectors, running *state, int row, fetches *f)
{
    vf all[MR];
    float now[MR], sums[MR], *most = state->most + row, *total = state->total + row, *shrink = state->shrink + row;
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
        all[i] = vf_load(s + i * BLOCK);
    for (int v = 1; v < vectors; v++)
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++)
            all[i] = vf_max(all[i], vf_load(s + i * BLOCK + v * QD_VF));
    reduce_rows(now, all, false);
#pragma GCC unroll 2
    for (int j = 0; j < MR; j += QD_VF) {
        const int n = MR - j < QD_VF ? MR - j : QD_VF;
        vf before = vf_load_n(most + j, n), after = vf_max(before, vf_load_n(now + j, n));
        vf_store_n(shrink + j, exp2_negative(before - after), n);
        vf_store_n(most + j, after, n);
    }
    for (int i = 0; i < MR; i++) {
        vf sum = {0}, top = vf_set(most[i]);
        for (int v = 0; v < vectors; v++) {
            vf p = exp2_negative(vf_load(s + i * BLOCK + v * QD_VF) - top);
            sum += p;
            vf_store(s + i * BLOCK + v * QD_VF, p);
        }
        all[i] = sum;
        fetch_some(f); /* a few at a time: many cache lines at once would delay the loads */
    }
    reduce_rows(sums, all, true);
    for (int i = 0; i < MR; i++)
        total[i] = total[i] * shrink[i] + sums[i];
}

/* Initializes the running result of the rows before the first keys of this call. */
static void begin_rows(const job *a, const buffers *w, const tile *at, int64_t row0, const float *lse, int head,
                       running *state)
{
    for (int r = 0; r < FORWARD; r++) {
        bool merged = a->merge && r < at->rows && lse[r] != -INFINITY;
        state->most[r] = merged ? lse[r] * LOG2_E : -INFINITY;
        state->total[r] = merged ? 1 : 0;
    }
    if (a->merge)
        pack_rows(w->o, w->v_ld, a->o, (row0 + at->row) * a->o_stride + head * a->v_dim, a->o_stride, at->rows,
                  a->v_dim, 1, QD_F32);
}

/* What to prefetch during the block of keys at `from` of the run: the next block of this item's
 * keys, and a share of what the next item starts with, in proportion to the block's share of the
 * work. */
static fetches fetches_of(const job *a, const item *now, const item *ahead, const qd_row_run *run, int64_t from,
                          int64_t least)
{
    fetches f = {0};
    const tile *at = &now->tile;
    int64_t hd = a->head_dim, v_dim = a->v_dim, group = a->heads / a->kv_heads, key = now->batch * a->k_seq + run->row + from + BLOCK;
    int64_t end = smaller(run->count, at->position + at->rows - run->position),
            keys = smaller(end - from - BLOCK, BLOCK);
    add_fetch(&f, a, a->k, key * a->k_stride + now->head / group * hd, a->k_stride, a->head_dim, keys);
    add_fetch(&f, a, a->v, key * a->v_stride + now->head / group * v_dim, a->v_stride, a->v_dim, keys);
    int64_t work = 0, before = 0, here = 0; /* rows that attend to the blocks: in total, to earlier blocks, to this one */
    for (int64_t i = larger(least - run->position, 0) / BLOCK * BLOCK; i < end; i += BLOCK) {
        int64_t seeing = smaller(at->rows, at->position + at->rows - run->position - i);
        work += seeing;
        before += i < from ? seeing : 0;
        here = i == from ? seeing : here;
    }
    if (ahead && a->k_run_count == 1) {
        int64_t rows = ahead->tile.rows, q0 = rows * before / work, q1 = rows * (before + here) / work;
        int64_t start = larger(window_start(a, ahead->tile.position) - run->position, 0) / BLOCK * BLOCK;
        int64_t most = larger(smaller(BLOCK, run->count - start), 0), k0 = most * before / work, k1 = most * (before + here) / work;
        key = ahead->batch * a->k_seq + run->row + start + k0;
        add_fetch(&f, a, a->q, (ahead->batch * a->q_seq + ahead->tile.row + q0) * a->q_stride + ahead->head * hd,
                  a->q_stride, a->head_dim, q1 - q0);
        add_fetch(&f, a, a->k, key * a->k_stride + ahead->head / group * hd, a->k_stride, a->head_dim, k1 - k0);
        add_fetch(&f, a, a->v, key * a->v_stride + ahead->head / group * v_dim, a->v_stride, a->v_dim, k1 - k0);
    }
    f.each = (f.rows + here - 1) / here;
    return f;
}

/* Prefetches a row of o for writing. */
static void expect_row(const job *a, int64_t row, int head)
{
    int size = a->out_dtype == QD_F32 ? 4 : 2;
    for (int i = 0; i < a->v_dim * size; i += 64)
        __builtin_prefetch((const char *)a->o + (row * a->o_stride + head * a->v_dim) * size + i, 1);
}

/* log2 x for x >= 1, absolute error below 2e-7 in addition to the rounding of the result, up to
 * 2^24; minus infinity for 0. */
QD_INLINE vf log2_above_one(vf x)
{
    const int half_root = 0x3f3504f3; /* sqrt(1/2): m below is between it and twice it */
    vi exponent = ((vi)x - half_root) >> 23;
    vf m = (vf)((vu)x - ((vu)exponent << 23)), z = (m - 1.0f) / (m + 1.0f), y = z * z;
    vf p = vf_set(2.0f / 9 * LOG2_E); /* 2 log2(e) z^n / n, odd n */
    p = p * y + 2.0f / 7 * LOG2_E;
    p = p * y + 2.0f / 5 * LOG2_E;
    p = p * y + 2.0f / 3 * LOG2_E;
    p = p * y + 2.0f * LOG2_E;
    return vf_select(x > 0.0f, p * z + __builtin_convertvector(exponent, vf), vf_set(-INFINITY));
}

/* o and lse of up to MR rows that have been through all their keys. */
static void finish_rows(const job *a, const buffers *w, const running *state, int from, int rows, int64_t o_row,
                        int head, float *lse, bool streamed)
{
    for (int j = 0; j < rows; j += QD_VF) {
        int n = (int)smaller(QD_VF, rows - j);
        vf total = vf_load_n(state->total + from + j, n);
        vf_store_n(lse + from + j, (vf_load_n(state->most + from + j, n) + log2_above_one(total)) * LN_2, n);
    }
    for (int r = from; r < from + rows; r++) {
        int64_t at = (o_row + r) * a->o_stride + head * a->v_dim;
        /* No key was seen (0), or a score overflowed (NaN): the latter must not look like a
         * result. */
        float nothing = state->most[r] == -INFINITY ? 0 : NAN;
        float factor = state->total[r] == 0 ? nothing : 1 / state->total[r];
        unpack_rows(a->o, at, 0, w->o + r * w->v_ld, w->v_ld, 1, a->v_dim, factor, a->out_dtype, streamed);
    }
}

/* The largest of rows of scores. */
static float largest(const float *s, int rows, int vectors)
{
    vf most = vf_set(-INFINITY);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            most = vf_max(most, vf_load(s + r * BLOCK + v * QD_VF));
    return vf_max_lane(most);
}

/* Raises *to to a value; other threads do so too, and the result does not depend on their order. */
static void raise_to(float *to, float value)
{
    float now;
    __atomic_load(to, &now, __ATOMIC_RELAXED);
    while (value > now && !__atomic_compare_exchange(to, &now, &value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

/* pairs: q, k and v are bf16, heads are whole vectors of pairs, and dot products multiply them.
 * Scores and sums are fp32 all the same; probabilities are rounded to bf16 where they are
 * multiplied by v. */
QD_INLINE void forward_as(const job *a, const item *now, const item *ahead, void *workspace, bool pairs)
{
    buffers w = carve(a, workspace);
    const tile *at = &now->tile;
    const int64_t batch = now->batch;
    const int head = now->head;
    int64_t row0 = batch * a->q_seq, key0 = batch * a->k_seq, least = first_key_of(a, batch, at);
    int64_t q0 = (row0 + at->row) * a->q_stride + head * a->head_dim;
    int rows = at->rows, hd = a->head_dim, kv = head / (a->heads / a->kv_heads);
    float *lse = a->lse + (batch * a->heads + head) * a->q_seq + at->row;
    /* Queries that are fp32 or whole pairs are read in place, except for the rows of an incomplete
     * group. */
    const bool readable = pairs ? a->q_stride % 2 == 0 && (uintptr_t)a->q % sizeof(float) == 0 : a->dtype == QD_F32;
    const int per = pairs ? 2 : 1, in_place = readable ? rows / MR * MR : 0; /* per: elements of a step */
    const int64_t packed_ld = pairs ? hd / 2 : w.ld;
    const float cap = a->softcap * LOG2_E, factor = a->scale * LOG2_E;
    int done = 0;
    bool streamed = streams_rows(a, a->o, a->o_stride, a->v_dim, (int64_t)a->heads * a->v_dim), begun = false;
    running state;
    float most = 0;
    for (int run = 0; run < a->k_run_count; run++) {
        const qd_row_run *k_run = &a->k_runs[run];
        for (int64_t from = larger(least - k_run->position, 0) / BLOCK * BLOCK;
             from < k_run->count && k_run->position + from < at->position + rows; from += BLOCK) {
            key_block k = block_at(k_run, from);
            bool fresh = !begun && !a->merge;
            if (!begun) {
                begin_rows(a, &w, at, row0, lse, head, &state);
                const int64_t at_q = q0 + in_place * a->q_stride;
                const int left = rows - in_place;
                if (pairs)
                    half_rows((uint16_t *)(w.q + in_place * packed_ld), a->q, at_q, a->q_stride, left, (left + MR - 1) / MR * MR, hd);
                else
                    pack_rows(w.q + in_place * packed_ld, packed_ld, a->q, at_q, a->q_stride, left, hd, 1, a->dtype);
                begun = true;
            }
            const int64_t at_k = (key0 + k.row) * a->k_stride + kv * hd, at_v = (key0 + k.row) * a->v_stride + kv * a->v_dim;
            if (pairs) {
                pairs_of_columns(w.k_t, BLOCK, a->k, at_k, a->k_stride, k.keys, hd);
                pairs_of_rows(w.v, a->v_dim, a->v, at_v, a->v_stride, k.keys, a->v_dim);
            } else {
                pack_transposed(w.k_t, a->k, at_k, a->k_stride, k.keys, hd, factor, a->dtype);
                pack_rows(w.v, w.v_ld, a->v, at_v, a->v_stride, k.keys, a->v_dim, 1, a->dtype);
            }
            fetches f = fetches_of(a, now, ahead, k_run, from, least);
            for (int g = 0; g < rows; g += MR) {
                int64_t seen = outside_window(a, at->position + g, &k) ? 0 : group_keys(at->position + g, &k);
                float *o = w.o + g * w.v_ld;
                if (seen == 0 && fresh) /* its result starts empty */
                    memset(o, 0, (size_t)(MR * w.v_ld) * sizeof *o);
                if (seen == 0)
                    continue;
                /* the last keys of the group */
                bool last = a->k_run_count == 1 &&
                            (at->position + g + MR <= k.position + k.keys || from + BLOCK >= k_run->count);
                int vectors = key_vectors(seen);
                const float *q = g < in_place ? qd_cpu_at(a->q, q0 + g * a->q_stride, a->dtype) : w.q + g * packed_ld;
                const int64_t q_ld = g < in_place ? a->q_stride / per : packed_ld;
                if (pairs)
                    dots_set_times(&factor, w.s, BLOCK, q, q_ld, w.k_t, BLOCK, hd / 2, vectors);
                else
                    product_set(w.s, BLOCK, q, q_ld, w.k_t, BLOCK, hd, vectors);
                if (cap > 0)
                    cap_scores(w.s, MR, vectors, cap);
                for (int r = g; r < g + MR; r++) {
                    if (last && !streamed && r < rows)
                        expect_row(a, row0 + at->row + r, head);
                    int64_t low = r < rows ? first_key(a, batch, at, r) - k.position : 0;
                    int64_t high = smaller(at->position + r + 1 - k.position, seen);
                    if (low > 0 || high < vectors * QD_VF)
                        mask_row(w.s + (r - g) * BLOCK, vectors, low, high, -INFINITY);
                }
                if (a->maxima) {
                    float here = largest(w.s, (int)smaller(MR, rows - g), vectors);
                    most = here > most ? here : most;
                }
                softmax_rows(w.s, vectors, &state, g, &f);
                if (pairs) {
                    round_rows((uint16_t *)w.dp, w.s, MR, vectors * QD_VF);
                    (fresh ? dots_set : dots_scale)(state.shrink + g, o, w.v_ld, w.dp, PAIR_ROWS, w.v, w.v_ld, (seen + 1) / 2,
                                                    w.v_vectors);
                } else if (fresh)
                    product_set(o, w.v_ld, w.s, BLOCK, w.v, w.v_ld, seen, w.v_vectors);
                else
                    product_scale(state.shrink + g, o, w.v_ld, w.s, BLOCK, w.v, w.v_ld, seen, w.v_vectors);
                if (last) {
                    for (; done <= g; done += MR) /* earlier rows attend to no keys */
                        finish_rows(a, &w, &state, done, (int)smaller(MR, rows - done), row0 + at->row, head, lse,
                                    streamed);
                }
            }
        }
    }
    if (a->maxima)
        raise_to(a->maxima + head, most * LN_2);
    if (!begun && a->merge)
        return; /* no row attends to a key of this call: the running result stays */
    if (!begun) {
        begin_rows(a, &w, at, row0, lse, head, &state);
        memset(w.o, 0, (size_t)(FORWARD * w.v_ld) * sizeof(float));
    }
    for (int g = done; g < rows; g += MR)
        finish_rows(a, &w, &state, g, (int)smaller(MR, rows - g), row0 + at->row, head, lse, streamed);
    if (streamed)
        stream_fence();
}

static void forward(const job *a, const item *now, const item *ahead, void *workspace)
{
    forward_as(a, now, ahead, workspace, false);
}

static void backward_delta(const qd_attention_args *a, int64_t batch, int64_t t)
{
    const int v_dim = qd_attention_v_dim(a->head_dim, a->v_dim);
    for (int head = 0; head < a->heads; head++) {
        int64_t at = (batch * a->seq + t) * a->o_stride + head * v_dim;
        vf sum = {0};
        QD_FOR_VECTORS(i, n, v_dim, { sum += vec_load(a->o, at + i, n, a->dtype) * vec_load(a->d_o, at + i, n, a->dtype); });
        a->delta[(batch * a->heads + head) * a->seq + t] = vf_sum(sum);
    }
}

/* A pair of blocks: queries and keys. */
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
    pack_rows(w->d_o, w->v_ld, a->d_o, row * a->o_stride + b->head * a->v_dim, a->o_stride, b->q.rows, a->v_dim, 1,
              a->dtype);
}

/* Keys are packed with the factor `scale`, for dq. */
static void pack_keys(const job *a, const buffers *w, const pair *b, int kv)
{
    int64_t row = b->batch * a->k_seq + b->k.row, k = row * a->k_stride + kv * a->head_dim,
            v = row * a->v_stride + kv * a->v_dim;
    pack_transposed(w->k_t, a->k, k, a->k_stride, b->k.keys, a->head_dim, 1, a->dtype);
    pack_transposed(w->v_t, a->v, v, a->v_stride, b->k.keys, a->v_dim, 1, a->dtype);
    pack_rows(w->k, w->ld, a->k, k, a->k_stride, b->k.keys, a->head_dim, a->scale, a->dtype);
}

/* Number of key vectors of the pair for which row group g has scores, rounded up to a whole group
 * of MR keys; 0: it attends to none. */
static int pair_vectors(const pair *b, int g)
{
    int64_t seen = group_keys(b->q.position + g, &b->k);
    return key_vectors(smaller((seen + MR - 1) / MR * MR, b->k.keys));
}

/* dp = (dp - delta) times the derivative of the soft-cap that gave s, 1 - (s / cap)^2; 0 where s is
 * masked. */
static void cap_gradients(float *dp, const float *s, int vectors, float cap, float delta)
{
    for (int v = 0; v < vectors; v++) {
        vf t = vf_max(vf_load(s + v * QD_VF) * (1.0f / cap), vf_set(-1.0f));
        vf_store(dp + v * QD_VF, (vf_load(dp + v * QD_VF) - delta) * (1.0f - t * t));
    }
}

/* One row of a pair, at `vectors` of keys: s, which holds scores, becomes probabilities, and dp,
 * which holds d_o · v^T, becomes s * (dp - delta): the gradient of the scores, without `scale`.
 * Zero where masked. Rows of its group attend to the first `seen` keys at most. */
QD_INLINE void row_gradients(const job *a, const pair *b, int r, float *s, float *dp, int vectors, int64_t seen)
{
    const int64_t at = (b->batch * a->heads + b->head) * a->q_seq + b->q.row + r;
    const float cap = a->softcap * LOG2_E;
    int64_t low = r < b->q.rows ? first_key(a, b->batch, &b->q, r) - b->k.position : seen;
    int64_t high = smaller(b->q.position + r + 1 - b->k.position, seen);
    if (low < high && cap > 0)
        cap_scores(s, 1, vectors, cap);
    if (low >= high) {
        memset(s, 0, (size_t)vectors * sizeof(vf));
        memset(dp, 0, (size_t)vectors * sizeof(vf));
        return;
    }
    if (low > 0 || high < vectors * QD_VF)
        mask_row(s, vectors, low, high, -INFINITY);
    float shift = a->lse[at] * LOG2_E, delta = a->delta[at];
    if (cap > 0) {
        cap_gradients(dp, s, vectors, cap, delta);
        delta = 0;
    }
    for (int v = 0; v < vectors; v++) {
        vf p = exp2_negative(vf_load(s + v * QD_VF) - shift);
        vf_store(s + v * QD_VF, p);
        vf_store(dp + v * QD_VF, p * (vf_load(dp + v * QD_VF) - delta));
    }
}

/* The probabilities and score gradients of a pair, up to the last group of MR keys that the row
 * group attends to. */
static void score_gradients(const job *a, const buffers *w, const pair *b, fetches *f)
{
    /* One GEMM after the other: the operands of both do not fit in the L1 cache together. */
    for (int g = 0; g < b->q.rows; g += MR)
        product_set(w->s + g * BLOCK, BLOCK, w->q + g * w->ld, w->ld, w->k_t, BLOCK, a->head_dim, pair_vectors(b, g));
    for (int g = 0; g < b->q.rows; g += MR) {
        int vectors = pair_vectors(b, g);
        int64_t seen = group_keys(b->q.position + g, &b->k);
        product_set(w->dp + g * BLOCK, BLOCK, w->d_o + g * w->v_ld, w->v_ld, w->v_t, BLOCK, a->v_dim, vectors);
        for (int r = g; seen > 0 && r < g + MR; r++) {
            fetch_some(f);
            row_gradients(a, b, r, w->s + r * BLOCK, w->dp + r * BLOCK, vectors, seen);
        }
    }
}

/* to += scores^T · rows, for dk or dv: for each group of keys, over the rows that attend to
 * them. */
static void add_key_gradient(const pair *b, float *to, const float *scores, const float *rows, int vectors)
{
    const int64_t ld = vectors * QD_VF;
    for (int g = 0; g < b->k.keys; g += MR) {
        /* Rows before the group's first key do not attend to it; their group of MR rows may not
         * have been written either. */
        int64_t from = larger(b->k.position + g - b->q.position, 0) / MR * MR;
        if (from >= b->q.rows)
            break;
        product_add_transposed(to + g * ld, ld, scores + from * BLOCK + g, BLOCK, rows + from * ld, ld, b->q.rows - from,
                               vectors);
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

static void block_gradients(const job *a, const buffers *w, const pair *b, fetches *f, bool with_keys, bool with_dq, bool add_dq)
{
    score_gradients(a, w, b, f);
    if (with_keys) {
        add_key_gradient(b, w->dv, w->s, w->d_o, w->v_vectors); /* again one GEMM after the other */
        add_key_gradient(b, w->dk, w->dp, w->q, w->vectors);
    }
    if (with_dq)
        query_gradients(w, b, add_dq);
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

/* Writes gradients of rows of head `head`, which has `dim` elements, or adds to them. */
static void put_gradients(const job *a, void *to, int64_t stride, int64_t row, int head, int dim, const float *from,
                          int64_t ld, int rows, float factor)
{
    int64_t at = row * stride + head * dim, cols = (int64_t)(a->heads + a->kv_heads) * a->head_dim + (int64_t)a->kv_heads * a->v_dim;
    if (a->accumulate)
        add_rows((float *)to + at, stride, from, ld, rows, dim, factor);
    else
        unpack_rows(to, at, stride, from, ld, rows, dim, factor, a->out_dtype, streams_rows(a, to, stride, dim, cols));
}

#ifdef QD_ATTENTION_TILES
#include "device/cpu/attention/attention_amx_impl.h"
#include "device/cpu/attention/attention_dots_impl.h"
#endif

/* With which instructions a pass computes. The factors are those that dq and dk still lack. */
typedef struct means {
    void (*pack_queries)(const job *a, const buffers *w, const pair *b);
    void (*pack_keys)(const job *a, const buffers *w, const pair *b, int kv);
    /* Adds a pair's part to dk and dv, if wanted, and sets w->o to its dq or adds to it. */
    void (*gradients)(const job *a, const buffers *w, const pair *b, fetches *f, bool with_keys, bool with_dq, bool add_dq);
    float dq_factor, dk_factor;
} means;

/* The queries of a key head. kept: each tile of each query head has a slot in the workspace for its
 * packed queries, the gradient of its results and its dq, which are then read and written once.
 * Else tiles are packed for every block of keys, and dq is accumulated at `dq` (first query head,
 * row 0 of the part); NULL: dq is not computed. */
enum { KEPT_MOST = 128 }; /* tiles; fewer where heads are longer than two vectors */
typedef struct queries {
    bool kept;
    bool begun[KEPT_MOST]; /* tiles whose dq has been written */
    float *dq;
    int64_t dq_stride;
    fetches ahead;
} queries;

static int tiles_of(const qd_row_run *run)
{
    return (int)((run->count + BLOCK - 1) / BLOCK);
}

/* Packed queries, gradients of results and dq of a tile. */
static int64_t place_floats(const buffers *w)
{
    return BLOCK * (2 * w->ld + w->v_ld);
}

/* w with the slot of a tile. */
static buffers place_of(const buffers *w, int place)
{
    buffers at = *w;
    at.q = w->kept + (int64_t)place * place_floats(w);
    at.d_o = at.q + BLOCK * w->ld;
    at.o = at.d_o + BLOCK * w->v_ld;
    return at;
}

/* The queries of one run of query head h (relative to the key head) that attend to keys of block
 * b->k, tile by tile. The slots start at `first`. */
static void run_backward(const job *a, const means *by, const buffers *w, pair *b, const qd_row_run *run, queries *all, int h,
                         int first)
{
    for (int64_t from = larger(b->k.position - run->position, 0) / BLOCK * BLOCK; from < run->count; from += BLOCK) {
        b->q = (tile){run->row + from, run->position + from, (int)smaller(BLOCK, run->count - from)};
        if (outside_window(a, b->q.position, &b->k))
            break;
        if (first_key_of(a, b->batch, &b->q) >= b->k.position + b->k.keys || b->q.position + b->q.rows <= b->k.position)
            continue;
        int place = first + (int)(from / BLOCK);
        buffers at = all->kept ? place_of(w, place) : *w;
        if (!all->kept)
            by->pack_queries(a, &at, b);
        by->gradients(a, &at, b, &all->ahead, true, all->kept || all->dq, all->kept && all->begun[place]);
        if (all->kept)
            all->begun[place] = true;
        else if (all->dq)
            add_rows(all->dq + h * a->head_dim + b->q.row * all->dq_stride, all->dq_stride, at.o, w->ld, b->q.rows,
                     a->head_dim, by->dq_factor);
    }
}

/* Packs the tiles of all slots or, with `end`, stores their dq. */
static void visit_places(const job *a, const means *by, const buffers *w, int64_t batch, int kv, const queries *all, bool end)
{
    int group = a->heads / a->kv_heads, place = 0;
    for (int h = 0; h < group; h++) {
        for (int i = 0; i < a->q_run_count; i++) {
            const qd_row_run *run = &a->q_runs[i];
            for (int64_t from = 0; from < run->count; from += BLOCK, place++) {
                buffers at = place_of(w, place);
                tile q = {run->row + from, run->position + from, (int)smaller(BLOCK, run->count - from)};
                pair b = {.batch = batch, .head = kv * group + h, .q = q};
                if (!end) {
                    by->pack_queries(a, &at, &b);
                    continue;
                }
                if (!all->begun[place])
                    memset(at.o, 0, (size_t)(BLOCK * w->ld) * sizeof(float));
                put_gradients(a, a->dq, a->dq_stride, batch * a->q_seq + q.row, b.head, a->head_dim, at.o, w->ld, q.rows,
                              by->dq_factor);
            }
        }
    }
}

/* What the next key head needs, prefetched a few rows at a time, if enough of the L2 cache is left
 * for the current one. */
static void expect_keys(const job *a, const qd_cpu_attention_keys *ahead, int tiles, fetches *f)
{
    int group = a->heads / a->kv_heads;
    int64_t floats = a->q_seq * (group + 1) * (a->head_dim + a->v_dim), head = ahead->kv_head * a->head_dim,
            v_head = ahead->kv_head * a->v_dim;
    int64_t row = ahead->batch * a->q_seq;
    if (floats > QD_ATTENTION_AHEAD_FLOATS || a->accumulate)
        return;
    add_fetch(f, a, a->q, row * a->q_stride + group * head, a->q_stride, group * a->head_dim, a->q_seq);
    add_fetch(f, a, a->d_o, row * a->o_stride + group * v_head, a->o_stride, group * a->v_dim, a->q_seq);
    add_fetch(f, a, a->k, row * a->k_stride + head, a->k_stride, a->head_dim, a->k_seq);
    add_fetch(f, a, a->v, row * a->v_stride + v_head, a->v_stride, a->v_dim, a->k_seq);
    f->each = f->rows / (group * a->q_seq * (tiles + 1) / 2) + 1; /* a row attends to about half of the key blocks */
}

static void backward_by(const job *a, const means *by, const qd_cpu_attention_keys *now, const qd_cpu_attention_keys *ahead,
                        bool with_dq, void *workspace)
{
    buffers w = carve(a, workspace);
    const int64_t batch = now->batch;
    int group = a->heads / a->kv_heads, hd = a->head_dim, kv = now->kv_head, tiles = 0;
    for (int i = 0; i < a->q_run_count; i++)
        tiles += tiles_of(&a->q_runs[i]);
    queries all = {.kept = with_dq && group * tiles <= KEPT_MOST &&
                           group * tiles * place_floats(&w) <= QD_ATTENTION_KEPT_FLOATS};
    bool direct = a->out_dtype == QD_F32; /* if not kept, dq is accumulated in place */
    if (all.kept) {
        visit_places(a, by, &w, batch, kv, &all, false);
    } else if (with_dq) {
        all.dq = direct ? (float *)a->dq + batch * a->q_seq * a->dq_stride + kv * group * hd : w.kept;
        all.dq_stride = direct ? a->dq_stride : (int64_t)group * hd;
        for (int64_t t = 0; !a->accumulate && t < a->q_seq; t++)
            memset(all.dq + t * all.dq_stride, 0, (size_t)(group * hd) * sizeof(float));
    }
    if (ahead)
        expect_keys(a, ahead, tiles, &all.ahead);
    for (int k_run = 0; k_run < a->k_run_count; k_run++) {
        for (int64_t from = 0; from < a->k_runs[k_run].count; from += BLOCK) {
            pair b = {.batch = batch, .k = block_at(&a->k_runs[k_run], from)};
            if (a->accumulate && !qd_cpu_attention_meets(a, &(qd_row_run){b.k.row, b.k.position, b.k.keys}))
                continue;
            by->pack_keys(a, &w, &b, kv);
            memset(w.dk, 0, (size_t)(BLOCK * w.ld) * sizeof(float));
            memset(w.dv, 0, (size_t)(BLOCK * w.v_ld) * sizeof(float));
            for (int h = 0, place = 0; h < group; h++) {
                b.head = kv * group + h;
                for (int q_run = 0; q_run < a->q_run_count; place += tiles_of(&a->q_runs[q_run++]))
                    run_backward(a, by, &w, &b, &a->q_runs[q_run], &all, h, place);
            }
            int64_t row = batch * a->k_seq + b.k.row;
            put_gradients(a, a->dk, a->dk_stride, row, kv, hd, w.dk, w.ld, b.k.keys, by->dk_factor);
            put_gradients(a, a->dv, a->dv_stride, row, kv, a->v_dim, w.dv, w.v_ld, b.k.keys, 1);
        }
    }
    if (all.kept)
        visit_places(a, by, &w, batch, kv, &all, true);
    for (int64_t t = 0; all.dq && !direct && t < a->q_seq; t++)
        for (int i = 0; i < group * hd; i++)
            store_as(a->dq, (batch * a->q_seq + t) * a->dq_stride + kv * group * hd + i, all.dq[t * all.dq_stride + i],
                     a->out_dtype);
    stream_fence();
}

static void backward_dq_by(const job *a, const means *by, const item *now, void *workspace)
{
    buffers w = carve(a, workspace);
    const tile *at = &now->tile;
    const int64_t batch = now->batch;
    const int head = now->head;
    pair b = {.batch = batch, .head = head, .q = *at};
    fetches none = {0};
    int64_t least = first_key_of(a, batch, at);
    by->pack_queries(a, &w, &b);
    memset(w.o, 0, (size_t)(BLOCK * w.ld) * sizeof(float));
    for (int run = 0; run < a->k_run_count; run++) {
        const qd_row_run *k_run = &a->k_runs[run];
        for (int64_t from = larger(least - k_run->position, 0) / BLOCK * BLOCK;
             from < k_run->count && k_run->position + from < at->position + at->rows; from += BLOCK) {
            b.k = block_at(k_run, from);
            by->pack_keys(a, &w, &b, head / (a->heads / a->kv_heads));
            by->gradients(a, &w, &b, &none, false, true, true);
        }
    }
    put_gradients(a, a->dq, a->dq_stride, batch * a->q_seq + at->row, head, a->head_dim, w.o, w.ld, at->rows, by->dq_factor);
    stream_fence();
}

/* Keys are packed with `scale`, and queries with scale * log2 e. */
static means vectors_of(const job *a)
{
    (void)a;
    return (means){pack_queries, pack_keys, block_gradients, 1.0f, LN_2};
}

static void backward(const job *a, const qd_cpu_attention_keys *now, const qd_cpu_attention_keys *ahead, bool with_dq,
                     void *workspace)
{
    const means by = vectors_of(a);
    backward_by(a, &by, now, ahead, with_dq, workspace);
}

static void backward_dq(const job *a, const item *now, const item *ahead, void *workspace)
{
    const means by = vectors_of(a);
    (void)ahead;
    backward_dq_by(a, &by, now, workspace);
}

const qd_cpu_attention QD_ISA_NAME(qd_cpu_attention) = {
    .forward = forward,
    .backward = backward,
    .backward_dq = backward_dq,
    .backward_delta = backward_delta,
};

#ifdef QD_ATTENTION_DOTS
static means dots_of(const job *a)
{
    return (means){pack_query_pairs, pack_key_pairs, dot_gradients, a->scale, a->scale};
}

static void forward_dots(const job *a, const item *now, const item *ahead, void *workspace)
{
    forward_as(a, now, ahead, workspace, true);
}

static void backward_dots(const job *a, const qd_cpu_attention_keys *now, const qd_cpu_attention_keys *ahead, bool with_dq,
                          void *workspace)
{
    const means by = dots_of(a);
    backward_by(a, &by, now, ahead, with_dq, workspace);
}

static void backward_dq_dots(const job *a, const item *now, const item *ahead, void *workspace)
{
    const means by = dots_of(a);
    (void)ahead;
    backward_dq_by(a, &by, now, workspace);
}

const qd_cpu_attention QD_ATTENTION_DOTS = {
    .forward = forward_dots,
    .backward = backward_dots,
    .backward_dq = backward_dq_dots,
    .backward_delta = backward_delta,
};
#endif

#ifdef QD_ATTENTION_TILES
static means tiles_of_amx(const job *a)
{
    return (means){pack_query_tiles, pack_key_tiles, pair_gradients, a->scale, a->scale};
}

static void backward_amx(const job *a, const qd_cpu_attention_keys *now, const qd_cpu_attention_keys *ahead, bool with_dq,
                         void *workspace)
{
    const means by = tiles_of_amx(a);
    amx_begin();
    backward_by(a, &by, now, ahead, with_dq, workspace);
    amx_end();
}

static void backward_dq_amx(const job *a, const item *now, const item *ahead, void *workspace)
{
    const means by = tiles_of_amx(a);
    (void)ahead;
    amx_begin();
    backward_dq_by(a, &by, now, workspace);
    amx_end();
}

const qd_cpu_attention QD_ATTENTION_TILES = {
    .forward = forward_amx,
    .backward = backward_amx,
    .backward_dq = backward_dq_amx,
    .backward_delta = backward_delta,
};
#endif
