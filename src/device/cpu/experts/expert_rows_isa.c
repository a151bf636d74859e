/* Row copies of permute and combine, vectorized. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

static void permute(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_permute_args *a = context;
    int64_t copy_rows = a->copy_rows > 0 ? a->copy_rows : a->rows * a->per_token, cols = a->cols;
    for (int64_t place = begin; place < end; place++) {
        int32_t from = a->from[place];
        const void *x = qd_cpu_at(a->x, from / a->per_token * cols, a->dtype);
        void *y = qd_cpu_at_mut(a->y, place * cols, a->dtype);
        if (a->weight) {
            float weight = a->weight[from];
            QD_FOR_VECTORS(i, n, cols, { vec_store(y, i, vec_load(x, i, n, a->dtype) * weight, n, a->dtype); });
        } else {
            memcpy(y, x, (size_t)cols * (a->dtype == QD_F32 ? 4 : 2));
        }
        if (!a->old)
            continue;
        vf sum = {0};
        for (int copy = 0; copy < a->copies; copy++) {
            const void *old = qd_cpu_at(a->old, (copy * copy_rows + place) * cols, a->dtype);
            QD_FOR_VECTORS(i, n, cols, { sum += vec_first(vec_load(x, i, n, a->dtype) * vec_load(old, i, n, a->dtype), n, 0.0f); });
        }
        a->d_weight[from] = vf_sum(sum);
    }
}

static void combine(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_combine_args *a = context;
    int64_t copy_rows = a->copy_rows > 0 ? a->copy_rows : a->rows * a->per_token, cols = a->cols;
    for (int64_t row = begin; row < end; row++) {
        const void *add = a->add ? qd_cpu_at(a->add, row * cols, a->dtype) : NULL;
        void *y = qd_cpu_at_mut(a->y, row * cols, a->dtype);
        QD_FOR_VECTORS(i, n, cols, {
            vf sum = {0};
            if (add)
                sum = vec_load(add, i, n, a->dtype);
            for (int j = 0; j < a->per_token; j++) {
                int64_t at = row * a->per_token + j;
                if (a->place[at] < 0)
                    continue;
                vf value = {0};
                for (int copy = 0; copy < a->copies; copy++)
                    value += vec_load(qd_cpu_at(a->x, (copy * copy_rows + a->place[at]) * cols, a->dtype), i, n, a->dtype);
                sum += a->weight ? value * a->weight[at] : value;
            }
            vec_store(y, i, sum, n, a->dtype);
        });
    }
}

const qd_cpu_expert_rows_ops QD_ISA_NAME(qd_cpu_expert_rows_ops) = {.permute = permute, .combine = combine};
