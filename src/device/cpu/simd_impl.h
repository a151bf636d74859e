/* Vectors for *_isa.c files: one source, compiled for each instruction set. Built on the compilers'
 * vector extension; intrinsics only where the extension has no equivalent. Arithmetic uses plain
 * operators (a * b + c is contracted to FMA where the instruction set has it).
 *
 * vf has QD_VF floats, vi as many int32. Loads and stores need only the alignment of an element. */
#ifndef QD_DEVICE_CPU_SIMD_IMPL_H
#define QD_DEVICE_CPU_SIMD_IMPL_H

#include "base/half.h"

#include <quadrille/types.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) || defined(QD_ISA_emulated)
#define QD_VF 16 /* emulated: AVX-512's vectors, which the compiler cuts into those of AVX2 */
#elif defined(__AVX2__)
#define QD_VF 8
#define QD_AVX2 1 /* vectors are those of AVX2 */
#else
#define QD_VF 4
#endif

typedef float vf __attribute__((vector_size(QD_VF * 4)));
typedef int32_t vi __attribute__((vector_size(QD_VF * 4)));
typedef uint32_t vu __attribute__((vector_size(QD_VF * 4)));
typedef uint16_t vh __attribute__((vector_size(QD_VF * 2)));
typedef double vd __attribute__((vector_size(QD_VF * 8)));

#define QD_INLINE static inline __attribute__((always_inline, unused))

QD_INLINE vf vf_set(float x)
{
    return x - (vf){0}; /* minus: -0 + 0 is +0, so the compiler would have to keep an addition */
}

/* Keeps v in a register: the compiler cannot fold its load into the instructions that use it. */
#if defined(QD_ISA_emulated) /* a vector is two registers */
#define QD_IN_REGISTER(v) (void)(v)
#elif defined(__x86_64__)
#define QD_IN_REGISTER(v) __asm__("" : "+v"(v))
#elif defined(__aarch64__)
#define QD_IN_REGISTER(v) __asm__("" : "+w"(v))
#else
#define QD_IN_REGISTER(v) (void)(v)
#endif

/* Hides the value of an integer or pointer from the optimizer. */
#define QD_HIDE(x) __asm__("" : "+r"(x))

/* Instrumenting the inner loops, which read the same panels many times, would take 80 % of a test's
 * time under the thread sanitizer. They are marked QD_UNSEEN_BY_TSAN, and their caller reports the
 * same memory to the sanitizer once: `rows` of `count` floats. */
#if defined(__SANITIZE_THREAD__)
#define QD_UNSEEN_BY_TSAN __attribute__((no_sanitize_thread))
void __tsan_read_range(void *from, long bytes);
void __tsan_write_range(void *to, long bytes);
#else
#define QD_UNSEEN_BY_TSAN
#define __tsan_read_range(from, bytes) ((void)(from), (void)(bytes))
#define __tsan_write_range(to, bytes) ((void)(to), (void)(bytes))
#endif

/* stride: bytes */
QD_INLINE void show_reads(const void *from, int64_t rows, int64_t stride, int64_t count)
{
    for (int64_t r = 0; r < rows; r++)
        __tsan_read_range((void *)((uintptr_t)from + (uintptr_t)(r * stride)), (long)(count * (int64_t)sizeof(float)));
}

QD_INLINE void show_writes(float *to, int64_t rows, int64_t stride, int64_t count)
{
    for (int64_t r = 0; r < rows; r++)
        __tsan_write_range(to + r * stride, (long)(count * (int64_t)sizeof *to));
}

/* A factor for many vectors: in all lanes, or, on arm64, in one. There multiply-adds can use one
 * lane for all, and a broadcast would take an instruction of the same units. */
#if defined(__aarch64__)
typedef float vf_factor;
#else
typedef vf vf_factor;
#endif

QD_INLINE vf_factor vf_factor_of(float x)
{
#if defined(__aarch64__)
    return x;
#else
    vf all = vf_set(x);
    QD_IN_REGISTER(all); /* else each multiply-add would load it */
    return all;
#endif
}

/* sum + x * y. Inline assembly, because compilers would move the sums of a large register tile
 * between registers. */
QD_INLINE vf vf_add_product(vf sum, vf_factor x, vf y)
{
#if defined(__x86_64__) && defined(__FMA__) && !defined(QD_ISA_emulated)
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(x), "v"(y));
    return sum;
#elif defined(__aarch64__)
    __asm__("fmla %0.4s, %2.4s, %1.s[0]" : "+w"(sum) : "w"(x), "w"(y));
    return sum;
#else
    return x * y + sum;
#endif
}

/* From memory of any type and alignment. */
QD_INLINE vf vf_load_bits(const void *p)
{
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

QD_INLINE vf vf_load(const float *p)
{
    return vf_load_bits(p);
}

QD_INLINE void vf_store(float *p, vf v)
{
    memcpy(p, &v, sizeof v);
}

/* The first n (0 .. QD_VF) elements; the others are 0 and their memory is not accessed. */
QD_INLINE vf vf_load_n(const float *p, int n)
{
#if defined(__AVX512F__)
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#else
    vf v = {0};
    memcpy(&v, p, (size_t)n * 4);
    return v;
#endif
}

QD_INLINE void vf_store_n(float *p, vf v, int n)
{
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#else
    memcpy(p, &v, (size_t)n * 4);
#endif
}

/* Non-temporal store to an aligned vector, for data that will not stay in the caches: the cache
 * line is not read first. Not under sanitizers, which would not see it, and not with shorter
 * vectors, which do not fill a cache line. */
#if defined(__AVX512F__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
QD_INLINE void stream_store(float *to, vf lanes)
{
    __asm__ volatile("vmovntps %1, %0" : "=m"(*(vf *)to) : "v"(lanes));
}

/* After such stores, before other threads are signalled. */
QD_INLINE void stream_fence(void)
{
    __asm__ volatile("sfence" ::: "memory");
}
#else
QD_INLINE void stream_store(float *to, vf lanes)
{
    vf_store(to, lanes);
}

QD_INLINE void stream_fence(void)
{
}
#endif

/* Mask lanes are 0 or -1, as comparisons return them. */
QD_INLINE vf vf_select(vi mask, vf yes, vf no)
{
    return (vf)(((vi)yes & mask) | ((vi)no & ~mask));
}

QD_INLINE vf vf_max(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(QD_AVX2)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vf_select(a > b, a, b);
#endif
}

QD_INLINE vf vf_min(vf a, vf b)
{
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(QD_AVX2)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return vf_select(a < b, a, b);
#endif
}

/* Sum and maximum of all lanes, by halving. */
QD_INLINE float vf_sum(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float x[QD_VF];
    memcpy(x, &v, sizeof x);
    for (int half = QD_VF / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] += x[i + half];
    return x[0];
#endif
}

QD_INLINE float vf_max_lane(vf v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[QD_VF];
    memcpy(x, &v, sizeof x);
    for (int half = QD_VF / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
#endif
}

/* bf16: the high half of a float; rounded to nearest even, NaN stays NaN. */
QD_INLINE vf vf_from_bf16(vh h)
{
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(QD_AVX2)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

/* The rounded value in the high half of each lane; the low half is arbitrary. */
QD_INLINE vu vf_round_to_bf16(vf v)
{
    vu bits = (vu)v;
#if defined(__AVX512F__)
    /* No constants in registers: long loops have none left, and the compiler would bring each by
     * way of a general register. A sum of NaNs is the first of them, quiet. */
    static const uint32_t almost_half = 0x7fff;
    __mmask16 nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    vu rounded = bits + (bits << 15 >> 31);
    __asm__("vpaddd %1%{1to16%}, %0, %0" : "+v"(rounded) : "m"(almost_half));
    return (vu)_mm512_mask_add_ps((__m512)rounded, nan, (__m512)v, (__m512)v);
#else
    vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    vu nan = (vu)(v != v);
    return (rounded & ~nan) | ((bits | 0x400000u) & nan);
#endif
}

/* The high halves of the lanes. */
QD_INLINE vh vu_high_halves(vu x)
{
#if defined(__AVX512F__)
    typedef uint16_t halves __attribute__((vector_size(64)));
    halves all = (halves)x;
    return __builtin_shufflevector(all, all, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
    return __builtin_convertvector(x >> 16, vh);
#endif
}

QD_INLINE vh vf_to_bf16(vf v)
{
    return vu_high_halves(vf_round_to_bf16(v));
}

/* A float split into a bf16 half and the low 16 bits; see base/half.h. */
QD_INLINE vf vf_join(vh half, vh rest)
{
#if defined(__AVX512F__)
    return (vf)((vi)vf_from_bf16(half) + (vi)_mm512_cvtepi16_epi32((__m256i)rest));
#elif defined(QD_AVX2)
    return (vf)((vi)vf_from_bf16(half) + (vi)_mm256_cvtepi16_epi32((__m128i)rest));
#else
    vi wide = (vi)(__builtin_convertvector(rest, vu) << 16);
    return (vf)((vu)vf_from_bf16(half) + (vu)(wide >> 16));
#endif
}

QD_INLINE vh vf_rest(vf v, vh half)
{
    vi rest = (vi)((vu)v - (vu)vf_from_bf16(half));
#if defined(__AVX512F__)
    return (vh)_mm512_cvtsepi32_epi16((__m512i)rest);
#else
    vi over = rest > INT16_MAX, under = rest < INT16_MIN;
    rest = (rest & ~(over | under)) | (over & INT16_MAX) | (under & INT16_MIN);
    return __builtin_convertvector((vu)rest & 0xffffu, vh);
#endif
}

/* Loads and stores of fp32 or bf16 memory by element index. If dtype is a compile-time constant,
 * the branch disappears. */
QD_INLINE vf vf_load_as(const void *p, int64_t i, qd_dtype dtype)
{
    if (dtype == QD_F32)
        return vf_load((const float *)p + i);
    vh h;
    memcpy(&h, (const uint16_t *)p + i, sizeof h);
    return vf_from_bf16(h);
}

QD_INLINE void vf_store_as(void *p, int64_t i, vf v, qd_dtype dtype)
{
    if (dtype == QD_F32) {
        vf_store((float *)p + i, v);
    } else {
        vh h = vf_to_bf16(v);
        memcpy((uint16_t *)p + i, &h, sizeof h);
    }
}

QD_INLINE vf vf_load_n_as(const void *p, int64_t i, int n, qd_dtype dtype)
{
    if (dtype == QD_F32)
        return vf_load_n((const float *)p + i, n);
    vh h = {0};
    memcpy(&h, (const uint16_t *)p + i, (size_t)n * 2);
    return vf_from_bf16(h);
}

QD_INLINE void vf_store_n_as(void *p, int64_t i, vf v, int n, qd_dtype dtype)
{
    if (dtype == QD_F32) {
        vf_store_n((float *)p + i, v, n);
    } else {
        vh h = vf_to_bf16(v);
        memcpy((uint16_t *)p + i, &h, (size_t)n * 2);
    }
}

QD_INLINE float load_as(const void *p, int64_t i, qd_dtype dtype)
{
    return dtype == QD_F32 ? ((const float *)p)[i] : qd_bf16_to_f32(((const uint16_t *)p)[i]);
}

QD_INLINE void store_as(void *p, int64_t i, float x, qd_dtype dtype)
{
    if (dtype == QD_F32)
        ((float *)p)[i] = x;
    else
        ((uint16_t *)p)[i] = qd_f32_to_bf16(x);
}

/* e^x, relative error below 1e-7. 0 below -87.33 (the result would be subnormal), infinity above
 * 88.72, NaN for NaN. Range reduction: x = n ln 2 + r with |r| <= ln 2 / 2, then a minimax
 * polynomial in r. */
QD_INLINE vf vf_exp(vf x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer in the low bits */
    vf low = vf_set(-87.33654f);
    vf t = vf_min(vf_set(88.8f), vf_max(low, x)); /* x second: min and max return it if it is NaN */
    vf shifted = t * 1.44269504f + magic;
    vf n = shifted - magic;
    vf r = t - n * 0.693145752f; /* ln 2 in two parts: the first has few bits, so n times it is exact */
    r = r - n * 1.42860677e-6f;
    vf p = vf_set(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    __mmask16 normal = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    return (vf)_mm512_maskz_scalef_ps(normal, (__m512)p, (__m512)n);
#else
    /* 2^n in two factors, because n may be 128 */
    vi whole = (vi)shifted - 0x4b400000, first = whole >> 1, second = whole - first;
    vf y = p * (vf)((first + 127) << 23) * (vf)((second + 127) << 23);
    return (vf)((vi)y & ~(x < low));
#endif
}

#endif
