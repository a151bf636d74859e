/* Dropout. Dropped elements are multiplied by 0, not replaced by 0, so that non-finite values stay
 * visible. */
#include "device/cpu/kernels_impl.h"
#include "device/cpu/vec_math.h"

#include <math.h>
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* 64-bit lanes: a Philox word is in the low half; the high half is ignored. */
typedef uint64_t vq __attribute__((vector_size(QD_VF * 4)));
enum { LANES = QD_VF / 2, BLOCKS = 32, DRAWS = 4 * BLOCKS };

/* The low halves times m, as 64-bit results. */
QD_INLINE vq multiply(vq a, uint32_t m)
{
#if defined(__AVX512F__)
    return (vq)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
    return (vq)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
    return (vq)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
#elif defined(__aarch64__)
    return (vq)vmull_n_u32(vmovn_u64((uint64x2_t)a), m);
#else
    return (a & 0xffffffffu) * m;
#endif
}

typedef struct round_keys {
    uint64_t k[10][2]; /* 64 bits wide, to be broadcast to all lanes */
} round_keys;

static round_keys expand(qd_philox_key key)
{
    round_keys keys;
    for (uint32_t round = 0; round < 10; round++) {
        keys.k[round][0] = key.k[0] + round * 0x9E3779B9u;
        keys.k[round][1] = key.k[1] + round * 0xBB67AE85u;
    }
    return keys;
}

/* words[4 * b + w] = word w of block (first + b, high): Philox4x32-10 as in qd_philox4x32, LANES
 * blocks in parallel. */
static void draw(uint32_t words[DRAWS], const round_keys *keys, uint64_t first, uint64_t high)
{
    for (int base = 0; base < BLOCKS; base += LANES) {
        vq c0 = (vq){0} + (first + (uint64_t)base), c2 = (vq){0} + high;
        for (int lane = 0; lane < LANES; lane++)
            c0[lane] += (uint64_t)lane;
        vq c1 = c0 >> 32, c3 = c2 >> 32;
        for (int round = 0; round < 10; round++) {
            vq p0 = multiply(c0, 0xD2511F53u), p1 = multiply(c2, 0xCD9E8D57u);
            c0 = (p1 >> 32) ^ c1 ^ keys->k[round][0];
            c1 = p1;
            c2 = (p0 >> 32) ^ c3 ^ keys->k[round][1];
            c3 = p0;
        }
        vq even = (c0 & 0xffffffffu) | c1 << 32, odd = (c2 & 0xffffffffu) | c3 << 32;
        uint64_t pairs[2 * LANES];
        for (int lane = 0; lane < LANES; lane++) {
            pairs[2 * lane] = even[lane];
            pairs[2 * lane + 1] = odd[lane];
        }
        memcpy(words + 4 * base, pairs, sizeof pairs);
    }
}

static void apply(void *context, int64_t begin, int64_t end, int thread)
{
    (void)thread;
    const qd_cpu_dropout_job *job = context;
    const qd_dropout_args *a = job->args;
    uint64_t first = (uint64_t)a->first_row * (uint64_t)a->cols; /* index of element 0 */
    round_keys keys = expand(job->key);
    vf keep = vf_set(1.0f / (1.0f - a->p));
    /* uniform >= p, in terms of the 24 bits of the uniform number */
    int32_t least = (int32_t)ceilf(a->p * 0x1p24f);
    for (int64_t at = begin; at < end;) {
        uint32_t words[DRAWS + QD_VF]; /* padded: a whole vector may be read at the last draw */
        uint64_t index = first + (uint64_t)at;
        draw(words, &keys, index / 4, a->step);
        const uint32_t *word = words + index % 4;
        int64_t count = DRAWS - (int64_t)(index % 4);
        count = count < end - at ? count : end - at;
        const void *x = qd_cpu_at(a->x, at, a->dtype);
        void *y = qd_cpu_at_mut(a->y, at, a->dtype);
        QD_FOR_VECTORS(i, n, count, {
            vu bits;
            memcpy(&bits, word + i, sizeof bits);
            vf factor = (vf)((vi)keep & ((vi)(bits >> 8) >= least));
            vec_store(y, i, vec_load(x, i, n, a->dtype) * factor, n, a->dtype);
        });
        at += count;
    }
}

const qd_cpu_dropout_ops QD_ISA_NAME(qd_cpu_dropout_ops) = {.apply = apply};
