/* Transposes panels in registers, for *_isa.c files. */
#ifndef QD_DEVICE_CPU_TRANSPOSE_IMPL_H
#define QD_DEVICE_CPU_TRANSPOSE_IMPL_H

#include "device/cpu/simd_impl.h"

/* Exchanges the lanes of vectors a and b that differ in bit d: one step of a transpose. */
#define QD_LANE_LOW(lane, d) (((lane) & (d)) ? QD_VF + (lane) - (d) : (lane))
#define QD_LANE_HIGH(lane, d) (((lane) & (d)) ? QD_VF + (lane) : (lane) + (d))
#define QD_LANES4(F, l, d) F(l, d), F((l) + 1, d), F((l) + 2, d), F((l) + 3, d)
#if QD_VF == 16
#define QD_LANES(F, d) QD_LANES4(F, 0, d), QD_LANES4(F, 4, d), QD_LANES4(F, 8, d), QD_LANES4(F, 12, d)
#elif QD_VF == 8
#define QD_LANES(F, d) QD_LANES4(F, 0, d), QD_LANES4(F, 4, d)
#else
#define QD_LANES(F, d) QD_LANES4(F, 0, d)
#endif
#define QD_TRANSPOSE_STEP(r, d)                                                                             \
    _Pragma("GCC unroll 16") for (int qd_i = 0; qd_i < QD_VF; qd_i++)                                       \
    {                                                                                                       \
        if (!(qd_i & (d))) {                                                                                \
            vf qd_low = __builtin_shufflevector(r[qd_i], r[qd_i + (d)], QD_LANES(QD_LANE_LOW, d));          \
            r[qd_i + (d)] = __builtin_shufflevector(r[qd_i], r[qd_i + (d)], QD_LANES(QD_LANE_HIGH, d));     \
            r[qd_i] = qd_low;                                                                               \
        }                                                                                                   \
    }

/* r (QD_VF, QD_VF) becomes its transpose. */
QD_INLINE void transpose_square(vf *r)
{
#if QD_VF == 16
    QD_TRANSPOSE_STEP(r, 8)
#endif
#if QD_VF >= 8
    QD_TRANSPOSE_STEP(r, 4)
#endif
    QD_TRANSPOSE_STEP(r, 2)
    QD_TRANSPOSE_STEP(r, 1)
}

/* r = `lines` x `count` elements of x, starting at element `at`; zero elsewhere. */
QD_INLINE void load_square(vf *r, const void *x, int64_t at, int64_t stride, int lines, int count, qd_dtype dtype)
{
#pragma GCC unroll 16
    for (int i = 0; i < QD_VF; i++)
        r[i] = i < lines ? vf_load_n_as(x, at + i * stride, count, dtype) : (vf){0};
}

/* to (count, >= lines; row stride ld) = factor * transpose of x (lines, count; row stride
 * `stride`), starting at element `first`. Columns of `to` from `lines` up to the next multiple of
 * QD_VF are set to 0 and must exist. */
QD_INLINE void transpose_panel(float *to, int64_t ld, const void *x, int64_t first, int64_t stride, int64_t lines,
                               int64_t count, float factor, qd_dtype dtype)
{
    for (int64_t p = 0; p < count; p += QD_VF) {
        int rows = count - p < QD_VF ? (int)(count - p) : QD_VF;
        for (int64_t l = 0; l < lines; l += QD_VF) {
            int64_t at = first + l * stride + p;
            float *out = to + p * ld + l;
            vf r[QD_VF];
            if (rows == QD_VF && lines - l >= QD_VF) {
#pragma GCC unroll 16
                for (int i = 0; i < QD_VF; i++)
                    r[i] = vf_load_as(x, at + i * stride, dtype);
                transpose_square(r);
#pragma GCC unroll 16
                for (int i = 0; i < QD_VF; i++)
                    vf_store(out + i * ld, r[i] * factor);
            } else {
                load_square(r, x, at, stride, lines - l < QD_VF ? (int)(lines - l) : QD_VF, rows, dtype);
                transpose_square(r);
                for (int i = 0; i < rows; i++)
                    vf_store(out + i * ld, r[i] * factor);
            }
        }
    }
}

#endif
