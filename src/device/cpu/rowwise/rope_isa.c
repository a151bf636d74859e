/* Rotary embedding. The table interleaves cosine and sine; a row's stretch of it is deinterleaved
 * once and used for all heads. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#define STRETCH 128 /* pairs of a head rotated at once */

static void rotate(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_rope_args *a = context;
    int64_t half = (a->dims > 0 ? a->dims : a->head_dim) / 2;
    float sign = a->inverse ? -1.0f : 1.0f;
    for (int64_t row = begin; row < end; row++) {
        int64_t position = a->positions ? a->positions[row] : row % a->seq;
        for (int64_t first = 0; first < half; first += STRETCH) {
            int64_t count = half - first < STRETCH ? half - first : STRETCH;
            const float *table = a->table + (position * half + first) * 2;
            float cosine[STRETCH], sine[STRETCH];
            for (int64_t i = 0; i < count; i++) {
                cosine[i] = table[2 * i];
                sine[i] = sign * table[2 * i + 1];
            }
            for (int head = 0; a->interleaved && head < a->heads; head++) {
                int64_t at = row * a->row_stride + head * (int64_t)a->head_dim + 2 * first;
                for (int64_t i = 0; i < count; i++) {
                    float x = load_as(a->x, at + 2 * i, a->dtype), y = load_as(a->x, at + 2 * i + 1, a->dtype);
                    store_as(a->x, at + 2 * i, x * cosine[i] - y * sine[i], a->dtype);
                    store_as(a->x, at + 2 * i + 1, x * sine[i] + y * cosine[i], a->dtype);
                }
            }
            for (int head = 0; !a->interleaved && head < a->heads; head++) {
                int64_t at = row * a->row_stride + head * (int64_t)a->head_dim + first;
                void *low = qd_cpu_at_mut(a->x, at, a->dtype), *high = qd_cpu_at_mut(low, half, a->dtype);
                QD_FOR_VECTORS(i, n, count, {
                    vf c = vec_load(cosine, i, n, QD_F32);
                    vf s = vec_load(sine, i, n, QD_F32);
                    vf x = vec_load(low, i, n, a->dtype);
                    vf y = vec_load(high, i, n, a->dtype);
                    vec_store(low, i, x * c - y * s, n, a->dtype);
                    vec_store(high, i, x * s + y * c, n, a->dtype);
                });
            }
        }
    }
}

const qd_cpu_rope_ops QD_ISA_NAME(qd_cpu_rope_ops) = {.rotate = rotate};
