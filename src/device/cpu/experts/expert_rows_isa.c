/* Row copies of permute and combine, and gates of rows, vectorized. */
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

/* The sigmoid of a row's gate, and 1 minus it, in every lane. */
static vf gate_of(const qd_gate_args *a, int64_t row, vf *complement)
{
    return vec_logistic(vf_set(a->gate[row]), complement);
}

static void gate(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_gate_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * a->cols, a->dtype);
        void *y = qd_cpu_at_mut(a->y, row * a->cols, a->dtype);
        vf rest, open = gate_of(a, row, &rest);
        QD_FOR_VECTORS(i, n, a->cols, { vec_store(y, i, vec_load(x, i, n, a->dtype) * open, n, a->dtype); });
    }
}

static void gate_backward(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_gate_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        const void *x = qd_cpu_at(a->x, row * a->cols, a->dtype), *dy = qd_cpu_at(a->dy, row * a->cols, a->dtype);
        void *dx = qd_cpu_at_mut(a->dx, row * a->cols, a->dtype);
        vf rest, open = gate_of(a, row, &rest), dot = {0};
        QD_FOR_VECTORS(i, n, a->cols, {
            vf d = vec_load(dy, i, n, a->dtype);
            dot += vec_first(d * vec_load(x, i, n, a->dtype), n, 0.0f);
            vec_store(dx, i, d * open, n, a->dtype);
        });
        vec_store(qd_cpu_at_mut(a->d_gate, row, a->dtype), 0, vf_sum(dot) * (open * rest), 1, a->dtype);
    }
}

const qd_cpu_expert_rows_ops QD_ISA_NAME(qd_cpu_expert_rows_ops) = {
    .permute = permute, .combine = combine, .gate = gate, .gate_backward = gate_backward};
