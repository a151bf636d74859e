/* Embedding lookup and gradient sums of one range, vectorized. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

static void forward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_embedding_forward_args *a = context;
    int64_t cols = a->cols;
    for (int64_t row = begin; row < end; row++) {
        int64_t index = a->tokens[row] - a->first;
        bool here = a->held == 0 || (index >= 0 && index < a->held);
        const void *token = qd_cpu_at(a->token_table, (here ? index : 0) * cols, a->param_dtype);
        void *y = qd_cpu_at_mut(a->y, row * cols, a->dtype);
        if (!here && !a->position_table) {
            memset(y, 0, (size_t)cols * qd_dtype_size(a->dtype));
        } else if (a->position_table) {
            int64_t position = a->positions ? a->positions[row] : row % a->seq;
            const void *place = qd_cpu_at(a->position_table, position * cols, a->param_dtype);
            QD_FOR_VECTORS(i, n, cols, {
                vf sum = vec_load(place, i, n, a->param_dtype);
                if (here)
                    sum = vec_load(token, i, n, a->param_dtype) + sum;
                vec_store(y, i, sum, n, a->dtype);
            });
        } else {
            QD_FOR_VECTORS(i, n, cols, { vec_store(y, i, vec_load(token, i, n, a->param_dtype), n, a->dtype); });
        }
    }
}

#define STRETCH 1024 /* columns whose sums are held in fp32 at once */

static void add_rows(void *grad, qd_dtype grad_dtype, const void *dy, qd_dtype dtype, int64_t cols,
                     const uint64_t *keys, int64_t count)
{
    for (int64_t first = 0; first < cols; first += STRETCH) {
        int64_t width = cols - first < STRETCH ? cols - first : STRETCH;
        void *part = qd_cpu_at_mut(grad, first, grad_dtype);
        float sum[STRETCH];
        QD_FOR_VECTORS(i, n, width, { vec_store(sum, i, vec_load(part, i, n, grad_dtype), n, QD_F32); });
        for (int64_t k = 0; k < count; k++) {
            const void *row = qd_cpu_at(dy, (int64_t)(uint32_t)keys[k] * cols + first, dtype);
            QD_FOR_VECTORS(i, n, width, {
                vec_store(sum, i, vec_load(sum, i, n, QD_F32) + vec_load(row, i, n, dtype), n, QD_F32);
            });
        }
        QD_FOR_VECTORS(i, n, width, { vec_store(part, i, vec_load(sum, i, n, QD_F32), n, grad_dtype); });
    }
}

const qd_cpu_embedding_ops QD_ISA_NAME(qd_cpu_embedding_ops) = {.forward = forward, .add_rows = add_rows};
