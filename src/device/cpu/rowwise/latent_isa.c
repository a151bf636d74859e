/* Queries, keys and values of latent attention: bound by copying, so only the rotation is
 * computed, once per row for the part that all keys share. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <string.h>

/* The angles of a row. */
typedef struct angles {
    float cosine[QD_CPU_LATENT_ROPE / 2], sine[QD_CPU_LATENT_ROPE / 2];
} angles;

static void angles_of(const qd_latent_args *a, int64_t row, bool inverse, angles *to)
{
    int64_t position = a->positions ? a->positions[row] : row % a->seq;
    const float *table = a->table + position * a->rope;
    for (int i = 0; i < a->rope / 2; i++) {
        to->cosine[i] = table[2 * i];
        to->sine[i] = inverse ? -table[2 * i + 1] : table[2 * i + 1];
    }
}

/* y = x rotated, `rope` elements. */
static void turn(const qd_latent_args *a, const angles *by, const float *x, float *y)
{
    int half = a->rope / 2, next = a->interleaved ? 1 : half, step = a->interleaved ? 2 : 1;
    for (int i = 0; i < half; i++) {
        float low = x[i * step], high = x[i * step + next];
        y[i * step] = low * by->cosine[i] - high * by->sine[i];
        y[i * step + next] = low * by->sine[i] + high * by->cosine[i];
    }
}

static void load(const void *x, float *to, int n, qd_dtype dtype)
{
    QD_FOR_VECTORS(i, width, n, { vec_store(to, i, vec_load(x, i, width, dtype), width, QD_F32); });
}

static void store(void *x, const float *from, int n, qd_dtype dtype)
{
    QD_FOR_VECTORS(i, width, n, { vec_store(x, i, vec_load(from, i, width, QD_F32), width, dtype); });
}

static void copy(const qd_latent_args *a, void *to, int64_t at, const void *from, int64_t first, int n)
{
    memcpy(qd_cpu_at_mut(to, at, a->dtype), qd_cpu_at(from, first, a->dtype), (size_t)n * qd_dtype_size(a->dtype));
}

/* Copies the parts without rotation of all heads of a row, from or to qkv. */
static void copy_row(const qd_latent_args *a, int64_t row, bool to_qkv)
{
    const int64_t dim = a->nope + a->rope, pair = a->nope + a->v, heads = a->heads;
    const int64_t q = row * heads * dim, kv = row * heads * pair, qkv = row * heads * (2 * dim + a->v);
    for (int64_t h = 0; h < heads; h++) {
        const struct {
            void *part;
            int64_t at, in_qkv;
            int n;
        } pieces[] = {{a->q, q + h * dim, qkv + h * dim, a->nope},
                      {a->kv, kv + h * pair, qkv + (heads + h) * dim, a->nope},
                      {a->kv, kv + h * pair + a->nope, qkv + 2 * heads * dim + h * a->v, a->v}};
        for (int i = 0; i < 3; i++)
            to_qkv ? copy(a, a->qkv, pieces[i].in_qkv, pieces[i].part, pieces[i].at, pieces[i].n)
                   : copy(a, pieces[i].part, pieces[i].at, a->qkv, pieces[i].in_qkv, pieces[i].n);
    }
}

static void join(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_latent_args *a = context;
    const int64_t dim = a->nope + a->rope;
    float x[QD_CPU_LATENT_ROPE], y[QD_CPU_LATENT_ROPE];
    angles by;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        int64_t q = row * a->heads * dim, qkv = row * a->heads * (2 * dim + a->v), k = qkv + a->heads * dim;
        angles_of(a, row, false, &by);
        copy_row(a, row, true);
        for (int64_t h = 0; h < a->heads; h++) {
            load(qd_cpu_at(a->q, q + h * dim + a->nope, a->dtype), x, a->rope, a->dtype);
            turn(a, &by, x, y);
            store(qd_cpu_at_mut(a->qkv, qkv + h * dim + a->nope, a->dtype), y, a->rope, a->dtype);
        }
        load(qd_cpu_at(a->k_rope, row * a->rope, a->dtype), x, a->rope, a->dtype);
        turn(a, &by, x, y);
        for (int64_t h = 0; h < a->heads; h++)
            store(qd_cpu_at_mut(a->qkv, k + h * dim + a->nope, a->dtype), y, a->rope, a->dtype);
    }
}

static void split(void *context, int64_t begin, int64_t end, int thread)
{
    const qd_latent_args *a = context;
    const int64_t dim = a->nope + a->rope;
    float x[QD_CPU_LATENT_ROPE], y[QD_CPU_LATENT_ROPE], sum[QD_CPU_LATENT_ROPE];
    angles by;
    (void)thread;
    for (int64_t row = begin; row < end; row++) {
        int64_t q = row * a->heads * dim, qkv = row * a->heads * (2 * dim + a->v), k = qkv + a->heads * dim;
        angles_of(a, row, true, &by);
        copy_row(a, row, false);
        memset(sum, 0, (size_t)a->rope * sizeof *sum);
        for (int64_t h = 0; h < a->heads; h++) {
            load(qd_cpu_at(a->qkv, qkv + h * dim + a->nope, a->dtype), x, a->rope, a->dtype);
            turn(a, &by, x, y);
            store(qd_cpu_at_mut(a->q, q + h * dim + a->nope, a->dtype), y, a->rope, a->dtype);
            load(qd_cpu_at(a->qkv, k + h * dim + a->nope, a->dtype), x, a->rope, a->dtype);
            for (int i = 0; i < a->rope; i++)
                sum[i] += x[i];
        }
        turn(a, &by, sum, y);
        store(qd_cpu_at_mut(a->k_rope, row * a->rope, a->dtype), y, a->rope, a->dtype);
    }
}

const qd_cpu_latent_ops QD_ISA_NAME(qd_cpu_latent_ops) = {.join = join, .split = split};
