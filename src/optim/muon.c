/* Muon's orthogonalization by Newton-Schulz iteration, and its learning rate. */
#include "optim/muon.h"

#include "optim/optim.h"

#include <math.h>

/* p(s) = as + bs³ + cs⁵: steep at 0, so that small singular values grow fast, and within 0.7 .. 1.2
 * near 1 (Jordan et al.). */
static const float a = 3.4445f, b = -4.7750f, c = 2.0315f;

/* x = a x + (b A + c A²) x with A = x xᵀ, or from the right with A = xᵀ x if that is smaller. */
static qd_status iterate(const qd_kernels *k, qd_stream *stream, float *x, int64_t rows, int64_t cols, const qd_muon_room *room)
{
    bool wide = rows <= cols;
    int64_t r = wide ? rows : cols;
    qd_matmul_args gram = {.a = x, .b = x, .c = room->gram, .m = r, .n = r, .k = wide ? cols : rows, .lda = cols, .ldb = cols,
                           .ldc = r, .trans_a = !wide, .trans_b = wide};
    qd_matmul_args square = {.a = room->gram, .b = room->gram, .c = room->poly, .m = r, .n = r, .k = r, .lda = r, .ldb = r, .ldc = r};
    qd_matmul_args apply = {.a = wide ? room->poly : x, .b = wide ? x : room->poly, .c = room->next, .m = rows, .n = cols, .k = r,
                            .lda = wide ? r : cols, .ldb = cols, .ldc = cols};
    QD_TRY(k->matmul(stream, &gram));
    QD_TRY(k->matmul(stream, &square));
    QD_TRY(k->axpby(stream, &(qd_axpby_args){.a = room->gram, .b = room->poly, .y = room->poly, .n = r * r, .alpha = b, .beta = c}));
    QD_TRY(k->matmul(stream, &apply));
    return k->axpby(stream, &(qd_axpby_args){.a = x, .b = room->next, .y = x, .n = rows * cols, .alpha = a, .beta = 1.0f});
}

qd_status qd_muon_orthogonalize(const qd_kernels *k, qd_stream *stream, float *x, int64_t rows, int64_t cols, int steps,
                                const qd_muon_room *room)
{
    /* No singular value exceeds the Frobenius norm, so the iteration does not diverge after this
     * division. */
    QD_TRY(k->row_squares(stream, &(qd_row_squares_args){.x = x, .out = room->squares, .rows = rows, .cols = cols, .dtype = QD_F32}));
    QD_TRY(k->unit_norm(stream, &(qd_unit_norm_args){.x = x, .row_squares = room->squares, .rows = rows, .cols = cols, .eps = 1e-7}));
    for (int step = 0; step < steps; step++)
        QD_TRY(iterate(k, stream, x, rows, cols, room));
    return QD_OK;
}

double qd_muon_lr(const qd_optim *o, int64_t step)
{
    return qd_optim_lr(o, step) * (o->muon_lr > 0.0 ? o->muon_lr / o->lr : 1.0);
}

double qd_muon_shape_factor(const qd_optim *o, int64_t rows, int64_t cols)
{
    double r = (double)rows, s = (double)cols;
    if (o->muon_scale == QD_MUON_MATCH_ADAMW)
        return 0.2 * sqrt(r > s ? r : s); /* the RMS of the update is about 0.2, as with AdamW (Liu et al. 2025) */
    return sqrt(r > s ? r / s : 1.0);
}
