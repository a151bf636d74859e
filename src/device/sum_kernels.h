/* Tree reductions for one instruction set. sum.c includes this once per set, with QD_SUM_ISA(name)
 * for the suffix and QD_SUM_WIDTH for the vector size in bytes. Elements are independent, so every
 * set does the same additions in the same order. No multiplication is followed by an addition, so
 * the compiler cannot contract to FMA. */

/* Unaligned and may alias: user buffers have only the alignment of their elements. */
#define VECTOR(name, type, lanes)                                                                  \
    typedef type QD_SUM_ISA(name) __attribute__((vector_size((lanes) * sizeof(type)), aligned(1), may_alias))
VECTOR(f32_vector, float, QD_SUM_WIDTH / 4);
VECTOR(f64_vector, double, QD_SUM_WIDTH / 8);
VECTOR(u16_vector, uint16_t, QD_SUM_WIDTH / 4); /* as many lanes as f32_vector */
VECTOR(u32_vector, uint32_t, QD_SUM_WIDTH / 4);
VECTOR(i32_vector, int32_t, QD_SUM_WIDTH / 4);
VECTOR(u64_vector, uint64_t, QD_SUM_WIDTH / 8);
VECTOR(i64_vector, int64_t, QD_SUM_WIDTH / 8);
#define f32_vector QD_SUM_ISA(f32_vector)
#define f64_vector QD_SUM_ISA(f64_vector)
#define u16_vector QD_SUM_ISA(u16_vector)
#define u32_vector QD_SUM_ISA(u32_vector)
#define i32_vector QD_SUM_ISA(i32_vector)
#define u64_vector QD_SUM_ISA(u64_vector)
#define i64_vector QD_SUM_ISA(i64_vector)

#define LANES_OF(vector) ((int64_t)(sizeof(vector) / sizeof((vector){0}[0])))

/* L(k): accumulator vector of source k at element i. C(a, b) combines two of them. */
#define TREE1 L(0)
#define TREE2 C(L(0), L(1))
#define TREE3 C(TREE2, L(2))
#define TREE4 C(TREE2, C(L(2), L(3)))
#define TREE8 C(TREE4, C(C(L(4), L(5)), C(L(6), L(7))))

#define LOOP(tree)                                                                                 \
    for (; i + LANES_OF(acc_vector) <= count; i += LANES_OF(acc_vector)) {                         \
        acc_vector r = tree;                                                                       \
        SCALE(r);                                                                                  \
        STORE(out + i, r);                                                                         \
    }                                                                                              \
    break

/* Defines the reduction NAME for elements ELEM with accumulator vectors ACC. Uses L, C, SCALE and
 * STORE. */
#define DEFINE_REDUCTION(NAME, ELEM, ACC)                                                          \
    static void QD_SUM_ISA(NAME##_at)(ACC * result, const ELEM *const *sources, int n, int64_t i)  \
    {                                                                                              \
        typedef ACC acc_vector;                                                                    \
        switch (n) {                                                                               \
        case 1: *result = TREE1; return;                                                           \
        case 2: *result = TREE2; return;                                                           \
        case 3: *result = TREE3; return;                                                           \
        case 4: *result = TREE4; return;                                                           \
        default: break;                                                                            \
        }                                                                                          \
        acc_vector a, b;                                                                           \
        int left = qd_sum_left(n);                                                                 \
        QD_SUM_ISA(NAME##_at)(&a, sources, left, i);                                               \
        QD_SUM_ISA(NAME##_at)(&b, sources + left, n - left, i);                                    \
        *result = C(a, b);                                                                         \
    }                                                                                              \
    /* Less than a vector, through padded copies. */                                               \
    static void QD_SUM_ISA(NAME##_tail)(ACC * result, const ELEM *const *from, int n, int64_t i, int64_t valid) \
    {                                                                                              \
        typedef ACC acc_vector;                                                                    \
        if (n == 1) {                                                                              \
            ELEM padded[QD_SUM_WIDTH / 4] = {0};                                                   \
            const ELEM *one = padded;                                                              \
            memcpy(padded, from[0] + i, (size_t)valid * sizeof(ELEM));                             \
            QD_SUM_ISA(NAME##_at)(result, &one, 1, 0);                                             \
            return;                                                                                \
        }                                                                                          \
        acc_vector a, b;                                                                           \
        int left = qd_sum_left(n);                                                                 \
        QD_SUM_ISA(NAME##_tail)(&a, from, left, i, valid);                                         \
        QD_SUM_ISA(NAME##_tail)(&b, from + left, n - left, i, valid);                              \
        *result = C(a, b);                                                                         \
    }                                                                                              \
    static void QD_SUM_ISA(NAME)(void *out_any, const void *const *sources_any, int n, int64_t count)       \
    {                                                                                              \
        typedef ACC acc_vector;                                                                    \
        ELEM *out = out_any;                                                                       \
        const ELEM *const *sources = (const ELEM *const *)sources_any;                             \
        const int ranks = n;                                                                       \
        (void)ranks;                                                                               \
        int64_t i = 0;                                                                             \
        switch (n) {                                                                               \
        case 1: LOOP(TREE1);                                                                       \
        case 2: LOOP(TREE2);                                                                       \
        case 3: LOOP(TREE3);                                                                       \
        case 4: LOOP(TREE4);                                                                       \
        case 8: LOOP(TREE8);                                                                       \
        default:                                                                                   \
            for (; i + LANES_OF(acc_vector) <= count; i += LANES_OF(acc_vector)) {                 \
                acc_vector r;                                                                      \
                QD_SUM_ISA(NAME##_at)(&r, sources, n, i);                                          \
                SCALE(r);                                                                          \
                STORE(out + i, r);                                                                 \
            }                                                                                      \
        }                                                                                          \
        if (i < count) {                                                                           \
            acc_vector r;                                                                          \
            ELEM last[QD_SUM_WIDTH / 4];                                                           \
            QD_SUM_ISA(NAME##_tail)(&r, sources, n, i, count - i);                                 \
            SCALE(r);                                                                              \
            STORE(last, r);                                                                        \
            memcpy(out + i, last, (size_t)(count - i) * sizeof(ELEM));                             \
        }                                                                                          \
    }

/* Vectors are selected by masks: C has no vector ?: operator. */
#define SELECT(mask, a, b) (((mask) & (a)) | (~(mask) & (b)))

/* Conversions of a vector. */

static inline __attribute__((always_inline)) void QD_SUM_ISA(load_bf16)(f32_vector *to, const uint16_t *from)
{
    *to = (f32_vector)(__builtin_convertvector(*(const u16_vector *)from, u32_vector) << 16);
}

/* Rounds to nearest even; NaN stays NaN (quiet). */
static inline __attribute__((always_inline)) void QD_SUM_ISA(store_bf16)(uint16_t *to, const f32_vector *from)
{
    u32_vector u = (u32_vector)*from;
    u32_vector rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    u32_vector nan = (u32_vector)((u & 0x7fffffff) > 0x7f800000);
    *(u16_vector *)to = __builtin_convertvector(SELECT(nan, (u >> 16) | 0x40, rounded), u16_vector);
}

static inline __attribute__((always_inline)) void QD_SUM_ISA(load_fp16)(f32_vector *to, const uint16_t *from)
{
    u32_vector h = __builtin_convertvector(*(const u16_vector *)from, u32_vector);
    u32_vector magnitude = (h & 0x7fff) << 13;
    /* Scaling by 2^112 moves the exponent from fp16's bias to fp32's; exact for subnormals too. */
    u32_vector finite = (u32_vector)((f32_vector)magnitude * 0x1p112f);
    u32_vector special = (u32_vector)((h & 0x7c00) == 0x7c00);
    *to = (f32_vector)(SELECT(special, magnitude | 0x7f800000, finite) | ((h & 0x8000) << 16));
}

/* Rounds to nearest even; overflow gives infinity. */
static inline __attribute__((always_inline)) void QD_SUM_ISA(store_fp16)(uint16_t *to, const f32_vector *from)
{
    const uint32_t smallest_normal = 113u << 23, overflow = 143u << 23, magic = 126u << 23; /* magic: 0.5 */
    u32_vector u = (u32_vector)*from;
    u32_vector sign = u & 0x80000000u;
    u ^= sign;
    u32_vector normal = (u + 0xc8000fffu + ((u >> 13) & 1)) >> 13; /* exponent - 112, rounded */
    u32_vector subnormal = (u32_vector)((f32_vector)u + 0.5f) - magic;
    u32_vector r = SELECT((u32_vector)(u < smallest_normal), subnormal, normal);
    u32_vector huge = SELECT((u32_vector)(u > 0x7f800000), (u32_vector){0} + 0x7e00, (u32_vector){0} + 0x7c00);
    r = SELECT((u32_vector)(u >= overflow), huge, r);
    *(u16_vector *)to = __builtin_convertvector(r | (sign >> 16), u16_vector);
}

/* Sums and averages. */

#define C(a, b) ((a) + (b))
#define SCALE(r) (void)0

#define L(k) (*(const f32_vector *)(sources[k] + i))
#define STORE(to, r) (*(f32_vector *)(to) = (r))
DEFINE_REDUCTION(sum_fp32, float, f32_vector)
#undef SCALE
#define SCALE(r) ((r) *= 1.0f / (float)ranks)
DEFINE_REDUCTION(avg_fp32, float, f32_vector)
#undef L
#undef STORE

#define L(k) QD_SUM_VALUE(f32_vector, QD_SUM_ISA(load_bf16), sources[k] + i)
#define STORE(to, r) QD_SUM_ISA(store_bf16)((to), &(r))
DEFINE_REDUCTION(avg_bf16, uint16_t, f32_vector)
#undef SCALE
#define SCALE(r) (void)0
DEFINE_REDUCTION(sum_bf16, uint16_t, f32_vector)
#undef L
#undef STORE

#define L(k) QD_SUM_VALUE(f32_vector, QD_SUM_ISA(load_fp16), sources[k] + i)
#define STORE(to, r) QD_SUM_ISA(store_fp16)((to), &(r))
DEFINE_REDUCTION(sum_fp16, uint16_t, f32_vector)
#undef SCALE
#define SCALE(r) ((r) *= 1.0f / (float)ranks)
DEFINE_REDUCTION(avg_fp16, uint16_t, f32_vector)
#undef L
#undef STORE
#undef SCALE

#define L(k) (*(const f64_vector *)(sources[k] + i))
#define STORE(to, r) (*(f64_vector *)(to) = (r))
#define SCALE(r) ((r) *= 1.0 / (double)ranks)
DEFINE_REDUCTION(avg_fp64, double, f64_vector)
#undef SCALE
#define SCALE(r) (void)0
DEFINE_REDUCTION(sum_fp64, double, f64_vector)
#undef L
#undef STORE

#define L(k) (*(const u32_vector *)(sources[k] + i))
#define STORE(to, r) (*(u32_vector *)(to) = (r))
DEFINE_REDUCTION(sum_int32, uint32_t, u32_vector)
#undef SCALE
#define SCALE(r) ((r) = (u32_vector)((i32_vector)(r) / (int32_t)ranks))
DEFINE_REDUCTION(avg_int32, uint32_t, u32_vector)
#undef L
#undef STORE
#undef SCALE

#define L(k) (*(const u64_vector *)(sources[k] + i))
#define STORE(to, r) (*(u64_vector *)(to) = (r))
#define SCALE(r) ((r) = (u64_vector)((i64_vector)(r) / (int64_t)ranks))
DEFINE_REDUCTION(avg_int64, uint64_t, u64_vector)
#undef SCALE
#define SCALE(r) (void)0
DEFINE_REDUCTION(sum_int64, uint64_t, u64_vector)
#undef L
#undef STORE
#undef C

/* Maximum. A NaN stays: a NaN `a` is chosen explicitly, and with a NaN `b` the comparison `a > b`
 * is false, which chooses b. */

#define MAX_OF(value, bits, a, b)                                                                  \
    __extension__({                                                                                \
        value max_a = (a), max_b = (b);                                                            \
        bits max_mask = (bits)((max_a > max_b) | (max_a != max_a));                                \
        (value) SELECT(max_mask, (bits)max_a, (bits)max_b);                                        \
    })

#define C(a, b) MAX_OF(f32_vector, u32_vector, a, b)
#define L(k) (*(const f32_vector *)(sources[k] + i))
#define STORE(to, r) (*(f32_vector *)(to) = (r))
DEFINE_REDUCTION(max_fp32, float, f32_vector)
#undef L
#undef STORE
#define L(k) QD_SUM_VALUE(f32_vector, QD_SUM_ISA(load_bf16), sources[k] + i)
#define STORE(to, r) QD_SUM_ISA(store_bf16)((to), &(r))
DEFINE_REDUCTION(max_bf16, uint16_t, f32_vector)
#undef L
#undef STORE
#define L(k) QD_SUM_VALUE(f32_vector, QD_SUM_ISA(load_fp16), sources[k] + i)
#define STORE(to, r) QD_SUM_ISA(store_fp16)((to), &(r))
DEFINE_REDUCTION(max_fp16, uint16_t, f32_vector)
#undef L
#undef STORE
#undef C
#define C(a, b) MAX_OF(f64_vector, u64_vector, a, b)
#define L(k) (*(const f64_vector *)(sources[k] + i))
#define STORE(to, r) (*(f64_vector *)(to) = (r))
DEFINE_REDUCTION(max_fp64, double, f64_vector)
#undef L
#undef STORE
#undef C
#define C(a, b) MAX_OF(i32_vector, u32_vector, a, b)
#define L(k) (*(const i32_vector *)(sources[k] + i))
#define STORE(to, r) (*(i32_vector *)(to) = (r))
DEFINE_REDUCTION(max_int32, int32_t, i32_vector)
#undef L
#undef STORE
#undef C
#define C(a, b) MAX_OF(i64_vector, u64_vector, a, b)
#define L(k) (*(const i64_vector *)(sources[k] + i))
#define STORE(to, r) (*(i64_vector *)(to) = (r))
DEFINE_REDUCTION(max_int64, int64_t, i64_vector)
#undef L
#undef STORE
#undef C
#undef SCALE

/* Rows in the order of qd_dtype, columns in the order of qd_reduce_op. */
static const reduction QD_SUM_ISA(table)[QD_DTYPE_COUNT][3] = {
    [QD_F32] = {QD_SUM_ISA(sum_fp32), QD_SUM_ISA(max_fp32), QD_SUM_ISA(avg_fp32)},
    [QD_BF16] = {QD_SUM_ISA(sum_bf16), QD_SUM_ISA(max_bf16), QD_SUM_ISA(avg_bf16)},
    [QD_F16] = {QD_SUM_ISA(sum_fp16), QD_SUM_ISA(max_fp16), QD_SUM_ISA(avg_fp16)},
    [QD_F64] = {QD_SUM_ISA(sum_fp64), QD_SUM_ISA(max_fp64), QD_SUM_ISA(avg_fp64)},
    [QD_I32] = {QD_SUM_ISA(sum_int32), QD_SUM_ISA(max_int32), QD_SUM_ISA(avg_int32)},
    [QD_I64] = {QD_SUM_ISA(sum_int64), QD_SUM_ISA(max_int64), QD_SUM_ISA(avg_int64)},
};

#undef LANES_OF
#undef VECTOR
#undef f32_vector
#undef f64_vector
#undef u16_vector
#undef u32_vector
#undef i32_vector
#undef u64_vector
#undef i64_vector
#undef LOOP
#undef TREE1
#undef TREE2
#undef TREE3
#undef TREE4
#undef TREE8
#undef DEFINE_REDUCTION
#undef SELECT
#undef MAX_OF
