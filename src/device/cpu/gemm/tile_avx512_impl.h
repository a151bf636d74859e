/* The GEMM register tile for AVX-512, in assembly: 8 rows x 3 vectors of sums. Compilers move sums
 * between registers in this loop, and the loop is at the limit of the machine: a step has 24
 * multiply-adds and 11 loads (3 of 64 bytes, 8 broadcasts), and a core does little more than one
 * load per cycle. Broadcasts as memory operands of the multiply-adds load more often and are
 * slower.
 *
 * The same tile multiplies bf16 pairs with dot products instead of multiply-adds.
 *
 * zmm0..2: a row of b; zmm3: a step of a; zmm8..31: the sums, three for each row. Included by
 * gemm_isa.c after `tile`. */
#ifndef QD_DEVICE_CPU_GEMM_TILE_AVX512_IMPL_H
#define QD_DEVICE_CPU_GEMM_TILE_AVX512_IMPL_H

#include <stddef.h>

_Static_assert(MR == 8 && NV == 3 && QD_VF == 16, "the tile below");

/* Values that are not needed in every step stay in memory. Strides are in bytes. */
typedef struct tile_frame {
    int64_t blocks, rest; /* groups of 8 steps per prefetched row of c; steps after all groups */
    int64_t ldc, next_row, next_step, expected_row;
    const char *next, *expected, *expected_end;
    char *c;
    const vf *bias;
    int64_t add;
} tile_frame;

/* Multiply-adds of floats, or dot products of bf16 pairs: Zen 4 starts one of either per cycle. A
 * dot product takes 6 cycles instead of 4, which 24 independent sums hide. */
#define TILE_FMA "vfmadd231ps"
#define TILE_DOT "vdpbf16ps"
#define QD_TILE_PAIRS 1

/* op: one of these. mem: a step of a. x, y, z: the accumulator registers of its row. */
#define TILE_ROW(op, mem, x, y, z)                                                                              \
    "vbroadcastss " mem ", %%zmm3\n"                                                                        \
    op " %%zmm0, %%zmm3, %%zmm" #x "\n"                                                             \
    op " %%zmm1, %%zmm3, %%zmm" #y "\n"                                                             \
    op " %%zmm2, %%zmm3, %%zmm" #z "\n"
/* Step q after the last update of the pointers. */
#define TILE_LINE_OF_B(q)                                                                                   \
    "vmovups 192*" #q "(%[b]), %%zmm0\n"                                                                    \
    "vmovups 64+192*" #q "(%[b]), %%zmm1\n"                                                                 \
    "vmovups 128+192*" #q "(%[b]), %%zmm2\n"
#define TILE_STEP_ROWS(op, q)                                                                                   \
    TILE_LINE_OF_B(q)                                                                                       \
    TILE_ROW(op, "4*" #q "(%[a])", 8, 9, 10)                                                                    \
    TILE_ROW(op, "4*" #q "(%[a], %[row])", 11, 12, 13)                                                          \
    TILE_ROW(op, "4*" #q "(%[a], %[row], 2)", 14, 15, 16)                                                       \
    TILE_ROW(op, "4*" #q "(%[a3])", 17, 18, 19)                                                                 \
    TILE_ROW(op, "4*" #q "(%[a3], %[row])", 20, 21, 22)                                                         \
    TILE_ROW(op, "4*" #q "(%[a3], %[row], 2)", 23, 24, 25)                                                      \
    TILE_ROW(op, "4*" #q "(%[a6])", 26, 27, 28)                                                                 \
    TILE_ROW(op, "4*" #q "(%[a6], %[row])", 29, 30, 31)
#define TILE_STEP_COLUMNS(op, q)                                                                                \
    TILE_LINE_OF_B(q)                                                                                       \
    TILE_ROW(op, "0+32*" #q "(%[a])", 8, 9, 10)                                                                 \
    TILE_ROW(op, "4+32*" #q "(%[a])", 11, 12, 13)                                                               \
    TILE_ROW(op, "8+32*" #q "(%[a])", 14, 15, 16)                                                               \
    TILE_ROW(op, "12+32*" #q "(%[a])", 17, 18, 19)                                                              \
    TILE_ROW(op, "16+32*" #q "(%[a])", 20, 21, 22)                                                              \
    TILE_ROW(op, "20+32*" #q "(%[a])", 23, 24, 25)                                                              \
    TILE_ROW(op, "24+32*" #q "(%[a])", 26, 27, 28)                                                              \
    TILE_ROW(op, "28+32*" #q "(%[a])", 29, 30, 31)

#define TILE_ALL_ROWS(F)                                                                                    \
    F(8, 9, 10) F(11, 12, 13) F(14, 15, 16) F(17, 18, 19) F(20, 21, 22) F(23, 24, 25) F(26, 27, 28) F(29, 30, 31)
#define TILE_CLEAR(x, y, z)                                                                                 \
    "vpxord %%zmm" #x ", %%zmm" #x ", %%zmm" #x "\n"                                                        \
    "vpxord %%zmm" #y ", %%zmm" #y ", %%zmm" #y "\n"                                                        \
    "vpxord %%zmm" #z ", %%zmm" #z ", %%zmm" #z "\n"
#define TILE_ADD_BIAS(x, y, z)                                                                              \
    "vaddps %%zmm0, %%zmm" #x ", %%zmm" #x "\n"                                                             \
    "vaddps %%zmm1, %%zmm" #y ", %%zmm" #y "\n"                                                             \
    "vaddps %%zmm2, %%zmm" #z ", %%zmm" #z "\n"
#define TILE_STORE(x, y, z)                                                                                 \
    "vmovups %%zmm" #x ", (%[c])\n"                                                                         \
    "vmovups %%zmm" #y ", 64(%[c])\n"                                                                       \
    "vmovups %%zmm" #z ", 128(%[c])\n"                                                                      \
    "add %c[ldc](%[f]), %[c]\n"
#define TILE_ADD_STORE(x, y, z)                                                                             \
    "vaddps (%[c]), %%zmm" #x ", %%zmm" #x "\n"                                                             \
    "vaddps 64(%[c]), %%zmm" #y ", %%zmm" #y "\n"                                                           \
    "vaddps 128(%[c]), %%zmm" #z ", %%zmm" #z "\n" TILE_STORE(x, y, z)

/* BY8, BY1: advance the pointers into a by 8 steps, by 1 step. As in micro_tile_as, rows of c are
 * prefetched one at a time, and a cache line of the next panel every four steps. */
#define TILE_CODE(STEP, op, BY8, BY1)                                                                           \
    TILE_ALL_ROWS(TILE_CLEAR)                                                                               \
    "cmpq $0, %c[blocks](%[f])\n"                                                                           \
    "mov %c[expected](%[f]), %[c]\n"                                                                        \
    "je 3f\n"                                                                                               \
    "1:\n"                                                                                                  \
    "prefetchw (%[c])\n"                                                                                    \
    "prefetchw 64(%[c])\n"                                                                                  \
    "prefetchw 128(%[c])\n"                                                                                 \
    "prefetchw 188(%[c])\n"                                                                                 \
    "add %c[expected_row](%[f]), %[c]\n"                                                                    \
    "mov %c[next](%[f]), %[n]\n"                                                                            \
    "mov %c[blocks](%[f]), %[i]\n"                                                                          \
    ".p2align 5\n"                                                                                          \
    "2:\n"                                                                                                  \
    "prefetcht1 (%[n])\n" STEP(op, 0) STEP(op, 1) STEP(op, 2) STEP(op, 3)                                                   \
    "prefetcht1 (%[n], %[ahead])\n" STEP(op, 4) STEP(op, 5) STEP(op, 6) STEP(op, 7)                                         \
    "lea (%[n], %[ahead], 2), %[n]\n"                                                                       \
    "add $8*192, %[b]\n" BY8                                                                                \
    "dec %[i]\n"                                                                                            \
    "jnz 2b\n"                                                                                              \
    "mov %c[next_row](%[f]), %[i]\n"                                                                        \
    "add %[i], %c[next](%[f])\n"                                                                            \
    "cmp %[c], %c[expected_end](%[f])\n"                                                                    \
    "jne 1b\n"                                                                                              \
    "3: mov %c[rest](%[f]), %[i]\n"                                                                         \
    "test %[i], %[i]\n"                                                                                     \
    "jz 5f\n"                                                                                               \
    "4:\n" STEP(op, 0)                                                                                          \
    "add $192, %[b]\n" BY1                                                                                  \
    "dec %[i]\n"                                                                                            \
    "jnz 4b\n"                                                                                              \
    "5: mov %c[c_](%[f]), %[c]\n"                                                                           \
    "mov %c[bias](%[f]), %[i]\n"                                                                            \
    "test %[i], %[i]\n"                                                                                     \
    "jz 6f\n"                                                                                               \
    "vmovups (%[i]), %%zmm0\n"                                                                              \
    "vmovups 64(%[i]), %%zmm1\n"                                                                            \
    "vmovups 128(%[i]), %%zmm2\n" TILE_ALL_ROWS(TILE_ADD_BIAS)                                              \
    "6: cmpq $0, %c[add](%[f])\n"                                                                           \
    "je 7f\n" TILE_ALL_ROWS(TILE_ADD_STORE)                                                                 \
    "jmp 8f\n"                                                                                              \
    "7:\n" TILE_ALL_ROWS(TILE_STORE)                                                                        \
    "8:\n"

#define TILE_FIELD(name, field) [name] "i"(offsetof(tile_frame, field))
#define TILE_FIELDS                                                                                         \
    TILE_FIELD(blocks, blocks), TILE_FIELD(rest, rest), TILE_FIELD(ldc, ldc), TILE_FIELD(next_row, next_row), \
        TILE_FIELD(next, next), TILE_FIELD(expected, expected), TILE_FIELD(expected_row, expected_row),              \
        TILE_FIELD(expected_end, expected_end), TILE_FIELD(c_, c), TILE_FIELD(bias, bias), TILE_FIELD(add, add)
#define TILE_CLOBBERS                                                                                       \
    "zmm0", "zmm1", "zmm2", "zmm3", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "zmm13", "zmm14", "zmm15", "zmm16", "zmm17", \
        "zmm18", "zmm19", "zmm20", "zmm21", "zmm22", "zmm23", "zmm24", "zmm25", "zmm26", "zmm27", "zmm28", "zmm29", "zmm30", \
        "zmm31", "memory", "cc"

/* Cache lines per piece of the next panel that a tile of kc steps prefetches: two in every eight
 * steps of a row of c. */
QD_INLINE int64_t lines_fetched(int64_t kc)
{
    return 2 * (kc / (8 * MR));
}

QD_INLINE tile_frame frame_of(const tile *t)
{
    int64_t blocks = t->kc / (8 * MR);
    return (tile_frame){.blocks = blocks, .rest = t->kc - blocks * 8 * MR, .ldc = t->ldc * 4, .next_row = t->next_row,
                        .next_step = t->next_step, .next = t->next, .expected = t->expected, .expected_row = t->expected_row,
                        .expected_end = t->expected + MR * t->expected_row, .c = (char *)t->c, .bias = t->bias, .add = t->add};
}

#define TILE_BY_ROWS(name, op)                                                                              \
    static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void name(const tile *t)                             \
    {                                                                                                       \
        tile_frame f = frame_of(t);                                                                         \
        int64_t row = t->a_row, i;                                                                          \
        const char *a = t->a, *a3 = a + 3 * row, *a6 = a + 6 * row, *b = (const char *)t->b, *c, *n;        \
        __asm__ volatile(TILE_CODE(TILE_STEP_ROWS, op, "add $32, %[a]\nadd $32, %[a3]\nadd $32, %[a6]\n",   \
                                   "add $4, %[a]\nadd $4, %[a3]\nadd $4, %[a6]\n")                          \
                         : [a] "+&r"(a), [a3] "+&r"(a3), [a6] "+&r"(a6), [b] "+&r"(b), [c] "=&r"(c), [n] "=&r"(n), [i] "=&r"(i) \
                         : [f] "r"(&f), [row] "r"(row), [ahead] "r"(f.next_step), TILE_FIELDS               \
                         : TILE_CLOBBERS);                                                                  \
    }
#define TILE_BY_COLUMNS(name, op)                                                                           \
    static __attribute__((noinline)) QD_UNSEEN_BY_TSAN void name(const tile *t)                             \
    {                                                                                                       \
        tile_frame f = frame_of(t);                                                                         \
        const char *a = t->a, *b = (const char *)t->b, *c, *n;                                              \
        int64_t i;                                                                                          \
        __asm__ volatile(TILE_CODE(TILE_STEP_COLUMNS, op, "add $8*32, %[a]\n", "add $32, %[a]\n")           \
                         : [a] "+&r"(a), [b] "+&r"(b), [c] "=&r"(c), [n] "=&r"(n), [i] "=&r"(i)             \
                         : [f] "r"(&f), [ahead] "r"(f.next_step), TILE_FIELDS                               \
                         : TILE_CLOBBERS);                                                                  \
    }

TILE_BY_ROWS(micro_tile_rows, TILE_FMA)
TILE_BY_COLUMNS(micro_tile_columns, TILE_FMA)
TILE_BY_ROWS(micro_tile_pair_rows, TILE_DOT)
TILE_BY_COLUMNS(micro_tile_pair_columns, TILE_DOT)

#endif
