/* A single row times a matrix stored (n, k), the GEMM of generating one token: b is read once, and
 * transposed in registers instead of packed. Included by gemm_isa.c. Sums have its order, so the
 * results are bit-identical to those of a GEMM with more rows. */
#ifndef QD_DEVICE_CPU_GEMM_ROW_IMPL_H
#define QD_DEVICE_CPU_GEMM_ROW_IMPL_H

/* sum + x · y, where x is one step for all lanes. */
QD_INLINE vf add_step(vf sum, float x, vf y, slot kind)
{
#ifdef QD_TILE_PAIRS
    if (kind == PAIRS) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        return add_dot(sum, (vf)((vu){0} + bits), y);
    }
#endif
    (void)kind;
    return vf_add_product(sum, vf_factor_of(x), y);
}

/* The sums of `here` lines of b over kc steps. line (kc): the row; b's first line is at element
 * `at`, and `left` elements of each are left. While the lines are read, the next ones are
 * prefetched. */
QD_INLINE vf row_sums(const float *line, const void *b, int64_t at, int64_t stride, int here, int64_t kc, int64_t left, slot kind)
{
    const int per = kind == PAIRS ? 2 : 1;
    vf sum = {0};
    for (int64_t p = 0; p < kc; p += QD_VF) {
        const int steps = kc - p < QD_VF ? (int)(kc - p) : QD_VF;
        const int64_t from = at + p * per, count = smaller((int64_t)steps * per, left - p * per);
        vf r[QD_VF];
        if (here == QD_VF && count == QD_VF * per) {
#pragma GCC unroll 16
            for (int i = 0; i < QD_VF; i++) {
                __builtin_prefetch(element(b, from + (QD_VF + i) * stride, kind), 0, 2);
                r[i] = load_steps(b, from + i * stride, kind);
            }
            transpose_square(r);
#pragma GCC unroll 16
            for (int i = 0; i < QD_VF; i++)
                sum = add_step(sum, line[p + i], r[i], kind);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < QD_VF; i++)
                r[i] = i < here ? load_last_steps(b, from + i * stride, count, kind) : (vf){0};
            transpose_square(r);
            for (int i = 0; i < steps; i++)
                sum = add_step(sum, line[p + i], r[i], kind);
        }
    }
    return sum;
}

#ifdef QD_ISA_emulated
static __attribute__((noinline)) vf emulated_row_sums(const float *line, const void *b, int64_t at, int64_t stride, int here,
                                                      int64_t kc, int64_t left)
{
    return row_sums(line, b, at, stride, here, kc, left, PAIRS);
}
#endif

static vf pair_row_sums(const float *line, const void *b, int64_t at, int64_t stride, int here, int64_t kc, int64_t left)
{
#ifdef QD_ISA_emulated
    const unsigned saved = flush_subnormals();
    const vf sum = emulated_row_sums(line, b, at, stride, here, kc, left);
    restore_subnormals(saved);
    return sum;
#else
    return row_sums(line, b, at, stride, here, kc, left, PAIRS);
#endif
}

/* Steps [k, k + kc) of the row, as 32 bits each. */
static void row_line(const qd_matmul_args *a, bool pairs, int64_t k, int64_t kc, float *line)
{
    const int64_t first = qd_gemm_element(k, pairs);
    if (pairs) {
        memset(line, 0, (size_t)kc * sizeof *line);
        memcpy(line, element(a->a, first, PAIRS), (size_t)smaller(2 * kc, a->k - first) * 2);
    } else {
        QD_FOR_VECTORS(p, n, kc, { vec_store(line, p, vec_load(a->a, first + p, n, a->a_dtype), n, QD_F32); });
    }
}

/* c[begin, end) of a GEMM with one row; at most QD_GEMM_ROW_COLUMNS columns. */
static void multiply_row(const qd_matmul_args *a, bool pairs, int64_t begin, int64_t end)
{
    float line[QD_GEMM_KC], sums[QD_GEMM_ROW_COLUMNS];
    const slot kind = pairs ? PAIRS : a->b_dtype == QD_F32 ? FLOATS : WIDENED;
    const int64_t steps = qd_gemm_steps(a, pairs), block = qd_gemm_k_block(steps);
    const bool direct = a->c_dtype == QD_F32;
    for (int64_t k = 0; k < steps; k += block) {
        const int64_t kc = smaller(block, steps - k), first = qd_gemm_element(k, pairs);
        row_line(a, pairs, k, kc, line);
        for (int64_t n = begin; n < end; n += QD_VF) {
            const int here = (int)smaller(end - n, QD_VF);
            const int64_t at = n * a->ldb + first, left = a->k - first;
            vf sum = kind == PAIRS    ? pair_row_sums(line, a->b, at, a->ldb, here, kc, left)
                     : kind == FLOATS ? row_sums(line, a->b, at, a->ldb, here, kc, left, FLOATS)
                                      : row_sums(line, a->b, at, a->ldb, here, kc, left, WIDENED);
            if (k == 0 && a->bias)
                sum += vf_load_n_as(a->bias, n, here, a->b_dtype);
            if (k == 0 && direct && a->accumulate)
                sum = vec_load(a->c, n, here, QD_F32) + sum;
            if (k > 0)
                sum = vec_load(sums, n - begin, here, QD_F32) + sum;
            vec_store(sums, n - begin, sum, here, QD_F32);
        }
    }
    QD_FOR_VECTORS(i, n, end - begin, {
        vf sum = vec_load(sums, i, n, QD_F32);
        if (!direct && a->accumulate)
            sum += vec_load(a->c, begin + i, n, a->c_dtype);
        vec_store(a->c, begin + i, sum, n, a->c_dtype);
    });
}
#endif
