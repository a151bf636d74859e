/* Splits a bf16 GEMM with one unaligned size into an aligned GEMM and a small remainder. */
#include "device/aligned_gemm.h"

enum { VECTOR = 8 }; /* bf16 elements in 16 bytes, the widest load of a GPU thread */
typedef enum size_name { SIZE_M, SIZE_N, SIZE_K, SIZES } size_name;

/* Integer arithmetic: when the GEMMs of a program are listed, the addresses have no memory behind
 * them. */
static void *moved(const void *address, int64_t elements, qd_dtype dtype)
{
    return (void *)((uintptr_t)address + (uintptr_t)(elements * (int64_t)qd_dtype_size(dtype)));
}

/* Rows, columns or summands [first, first + length) of a GEMM. */
static qd_matmul_args part_of(const qd_matmul_args *a, size_name size, int64_t first, int64_t length)
{
    qd_matmul_args p = *a;
    if (size == SIZE_M) {
        p.m = length;
        p.a = moved(a->a, a->trans_a ? first : first * a->lda, a->a_dtype);
        p.c = moved(a->c, first * a->ldc, a->c_dtype);
    } else if (size == SIZE_N) {
        p.n = length;
        p.b = moved(a->b, a->trans_b ? first * a->ldb : first, a->b_dtype);
        p.c = moved(a->c, first, a->c_dtype);
    } else {
        p.k = length;
        p.a = moved(a->a, a->trans_a ? first * a->lda : first, a->a_dtype);
        p.b = moved(a->b, a->trans_b ? first : first * a->ldb, a->b_dtype);
    }
    return p;
}

int qd_matmul_cut(const qd_matmul_args *a, double least, qd_matmul_args parts[2])
{
    const int64_t length[SIZES] = {a->m, a->n, a->k};
    /* Sizes along which some operand or the result is contiguous. */
    const bool runs[SIZES] = {a->trans_a, true, !a->trans_a || a->trans_b};
    const bool bare = !a->bias && !a->residual && !a->bias_grad && a->gelu == QD_MATMUL_NO_GELU;
    const bool aligned = a->lda % VECTOR == 0 && a->ldb % VECTOR == 0 && a->ldc % VECTOR == 0;
    int odd = 0;
    size_name size = SIZE_M;
    for (int i = 0; i < SIZES; i++)
        if (runs[i] && length[i] % VECTOR != 0) {
            odd++;
            size = (size_name)i;
        }
    parts[0] = *a;
    if (odd != 1 || !bare || !aligned || a->a_dtype != QD_BF16 || a->b_dtype != QD_BF16 || length[size] < VECTOR ||
        (double)a->m * (double)a->n * (double)a->k < least)
        return 1;
    const int64_t rest = length[size] % VECTOR, whole = length[size] - rest;
    parts[0] = part_of(a, size, 0, whole);
    parts[1] = part_of(a, size, whole, rest);
    if (size == SIZE_K) {
        qd_matmul_args larger = parts[0];
        larger.accumulate = true;
        parts[0] = parts[1];
        parts[1] = larger;
    }
    return 2;
}
