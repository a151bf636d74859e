/* Tree reductions over the values of several ranks: one version per instruction set, chosen at run
 * time. */
#include "device/sum.h"

#include <assert.h>
#include <stdatomic.h>
#include <string.h>

/* MAX_OF nests statement expressions: its temporaries shadow each other on purpose. */
#pragma GCC diagnostic ignored "-Wshadow"

typedef void (*reduction)(void *out, const void *const *sources, int n, int64_t count);

/* A converting load as an expression. */
#define QD_SUM_VALUE(type, load, from)                                                                      \
    __extension__({                                                                                         \
        type loaded_value;                                                                                  \
        load(&loaded_value, (from));                                                                        \
        loaded_value;                                                                                       \
    })

int qd_sum_left(int n)
{
    int left = 1;
    while (left * 2 < n) left *= 2;
    return left;
}

#define QD_SUM_ISA(name) name##_generic
#define QD_SUM_WIDTH 16
#include "device/sum_kernels.h"
#undef QD_SUM_ISA
#undef QD_SUM_WIDTH

#if defined(__x86_64__)
#define QD_SUM_X86 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define QD_SUM_ISA(name) name##_avx2
#define QD_SUM_WIDTH 32
#include "device/sum_kernels.h"
#undef QD_SUM_ISA
#undef QD_SUM_WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq")
#endif
#define QD_SUM_ISA(name) name##_avx512
#define QD_SUM_WIDTH 64
#include "device/sum_kernels.h"
#undef QD_SUM_ISA
#undef QD_SUM_WIDTH
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

typedef const reduction (*table_pointer)[3];

static table_pointer find_table(const char *isa)
{
#ifdef QD_SUM_X86
    if (strcmp(isa, "avx512") == 0)
        return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512dq")
                   ? table_avx512
                   : NULL;
    if (strcmp(isa, "avx2") == 0) return __builtin_cpu_supports("avx2") ? table_avx2 : NULL;
#endif
    return strcmp(isa, "generic") == 0 ? table_generic : NULL;
}

/* Every thread makes the same choice, so a race to store it is harmless. */
static _Atomic(table_pointer) chosen;

static table_pointer choose(void)
{
    table_pointer table = find_table("avx512");
    if (!table) table = find_table("avx2");
    if (!table) table = find_table("generic");
    atomic_store_explicit(&chosen, table, memory_order_relaxed);
    return table;
}

bool qd_sum_use(const char *isa)
{
    table_pointer table = find_table(isa);
    if (table) atomic_store_explicit(&chosen, table, memory_order_relaxed);
    return table != NULL;
}

bool qd_sum_supported(qd_dtype dtype)
{
    return table_generic[dtype][0] != NULL;
}

void qd_sum_tree(void *out, const void *const *sources, int n, int64_t count, qd_dtype dtype, qd_reduce_op op)
{
    assert(n >= 1 && qd_sum_supported(dtype));
    table_pointer table = atomic_load_explicit(&chosen, memory_order_relaxed);
    if (!table) table = choose();
    table[dtype][op](out, sources, n, count);
}
