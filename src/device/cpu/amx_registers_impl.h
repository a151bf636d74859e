/* AMX tile registers: configuration, and the instructions on them. Included by *_isa.c files that
 * are compiled for AVX-512. */
#ifndef QD_DEVICE_CPU_AMX_REGISTERS_IMPL_H
#define QD_DEVICE_CPU_AMX_REGISTERS_IMPL_H

#include "device/cpu/simd_impl.h"

/* LDTILECFG's operand: palette 1, all eight tiles 16 rows of 64 bytes. */
typedef struct amx_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} amx_shapes;
_Static_assert(sizeof(amx_shapes) == 64, "as the instruction reads it");

/* Tile registers of this thread, between amx_begin and amx_end. */
QD_INLINE void amx_begin(void)
{
    amx_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
}

QD_INLINE void amx_end(void)
{
    __asm__ volatile("tilerelease");
}

#define AMX_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0, %1, 1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define AMX_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0, %1, 1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define AMX_ZERO(tile) __asm__ volatile("tilezero %tmm" #tile)
/* c += a · b; AT&T order: b, a, c */
#define AMX_DOT(c, a, b) __asm__ volatile("tdpbf16ps %tmm" #b ", %tmm" #a ", %tmm" #c)

#endif
