/* What collectives must give, computed serially and independently of src/comm: inputs from a hash,
 * sums by a plain recursion over the ranks. Shared by the tests of this tier. */
#ifndef QD_TEST_DIST_REFERENCE_H
#define QD_TEST_DIST_REFERENCE_H

#include "base/half.h"
#include "support/ranks.h"

#include <quadrille/comm.h>
#include <stdlib.h>
#include <string.h>

static inline uint64_t ref_hash(uint64_t a, uint64_t b, uint64_t c)
{
    uint64_t h = a * 0x9e3779b97f4a7c15u ^ (b + 0x7f4a7c15u) * 0xbf58476d1ce4e5b9u ^ (c + 1) * 0x94d049bb133111ebu;
    h ^= h >> 31;
    h *= 0xd6e8feb86659fd93u;
    return h ^ h >> 32;
}

/* Element i of a rank's input: values of mixed magnitude, so that another order of summation
 * shows. */
static inline void ref_input(void *to, qd_dtype dtype, uint64_t salt, int rank, int64_t i)
{
    uint64_t h = ref_hash(salt, (uint64_t)rank, (uint64_t)i);
    double value = ((double)(h >> 40) / (double)(1 << 23) - 1.0) * (double)(1 << (h & 7));
    switch (dtype) {
    case QD_F32: *(float *)to = (float)value; break;
    case QD_BF16: *(uint16_t *)to = qd_f32_to_bf16((float)value); break;
    case QD_F16: *(uint16_t *)to = qd_f32_to_f16((float)value); break;
    case QD_F64: *(double *)to = value; break;
    case QD_I32: *(int32_t *)to = (int32_t)h; break;
    case QD_I64: *(int64_t *)to = (int64_t)(h * 0x9e3779b97f4a7c15u); break;
    default: *(uint8_t *)to = (uint8_t)h; break;
    }
}

/* The bits of one element. Copies of a known size are cheap, also under sanitizers. */
static inline uint64_t ref_word(const void *at, qd_dtype dtype)
{
    uint64_t word = 0;
    switch (qd_dtype_size(dtype)) {
    case 8: memcpy(&word, at, 8); break;
    case 4: memcpy(&word, at, 4); break;
    case 2: memcpy(&word, at, 2); break;
    default: memcpy(&word, at, 1); break;
    }
    return word;
}

typedef union ref_value {
    float f;
    double d;
    uint32_t u;
    uint64_t w;
} ref_value;

static inline ref_value ref_load(const void *from, qd_dtype dtype)
{
    ref_value v = {.w = 0};
    switch (dtype) {
    case QD_BF16: v.f = qd_bf16_to_f32((uint16_t)ref_word(from, dtype)); break;
    case QD_F16: v.f = qd_f16_to_f32((uint16_t)ref_word(from, dtype)); break;
    default: v.w = ref_word(from, dtype); break;
    }
    return v;
}

/* One node of the tree over ranks [first, first + n). */
static inline ref_value ref_tree(qd_dtype dtype, qd_reduce_op op, uint64_t salt, int first, int n, int64_t i)
{
    if (n == 1) {
        uint64_t room[1];
        ref_input(room, dtype, salt, first, i);
        return ref_load(room, dtype);
    }
    int left = 1;
    while (left * 2 < n) left *= 2;
    ref_value a = ref_tree(dtype, op, salt, first, left, i), b = ref_tree(dtype, op, salt, first + left, n - left, i), r;
    r.w = 0;
    switch (dtype) {
    case QD_F64: r.d = op == QD_MAX ? (a.d > b.d ? a.d : b.d) : a.d + b.d; break;
    case QD_I32: r.u = op == QD_MAX ? ((int32_t)a.u > (int32_t)b.u ? a.u : b.u) : a.u + b.u; break;
    case QD_I64: r.w = op == QD_MAX ? ((int64_t)a.w > (int64_t)b.w ? a.w : b.w) : a.w + b.w; break;
    default: r.f = op == QD_MAX ? (a.f > b.f ? a.f : b.f) : a.f + b.f; break;
    }
    return r;
}

/* The reduced element i over n ranks, stored as dtype. */
static inline void ref_reduced(void *to, qd_dtype dtype, qd_reduce_op op, uint64_t salt, int n, int64_t i)
{
    ref_value v = ref_tree(dtype, op, salt, 0, n, i);
    if (op == QD_AVG) switch (dtype) {
        case QD_F64: v.d *= 1.0 / n; break;
        case QD_I32: v.u = (uint32_t)((int32_t)v.u / n); break;
        case QD_I64: v.w = (uint64_t)((int64_t)v.w / n); break;
        default: v.f *= 1.0f / (float)n; break;
        }
    uint16_t half;
    switch (dtype) {
    case QD_BF16: half = qd_f32_to_bf16(v.f); memcpy(to, &half, 2); break;
    case QD_F16: half = qd_f32_to_f16(v.f); memcpy(to, &half, 2); break;
    case QD_F64:
    case QD_I64: memcpy(to, &v, 8); break;
    default: memcpy(to, &v, 4); break;
    }
}

/* The memory of a body's buffers, from the run's text: "" ordinary memory, "shared" memory of
 * qd_comm_alloc(), "mixed" one of each, differently on even and odd ranks. */
static inline bool ref_is_shared(const qd_comm *comm, const char *text, int which)
{
    if (strcmp(text, "mixed") == 0) return (qd_comm_rank(comm) + which) % 2 == 0;
    return strcmp(text, "shared") == 0;
}

static inline void *ref_take(qd_comm *comm, const char *text, int which, int64_t bytes)
{
    void *memory = NULL;
    if (!ref_is_shared(comm, text, which)) return calloc(1, (size_t)bytes);
    return qd_comm_alloc(comm, bytes, &memory) == QD_OK ? memory : NULL;
}

static inline void ref_give(qd_comm *comm, const char *text, int which, void *memory)
{
    if (ref_is_shared(comm, text, which))
        qd_comm_free(comm, memory);
    else
        free(memory);
}

/* The texts to run a mode with: processes have several kinds of memory. */
static inline int ref_texts(qd_ranks_mode mode, const char *texts[3])
{
    texts[0] = "";
    texts[1] = "shared";
    texts[2] = "mixed";
    return mode == QD_RANKS_PROCESSES ? 3 : mode == QD_RANKS_STAGED ? 2 : 1;
}

#endif
