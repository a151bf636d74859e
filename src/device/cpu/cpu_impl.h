/* The CPU device, as its kernels see it.
 *
 * The kernel of slot S is the function qd_cpu_S(stream, args). It checks its arguments, splits the
 * work into ranges that depend on the shapes only, and passes them to qd_pool_for. Vectorized code
 * is in files *_isa.c. The build compiles each of them once per instruction set, with QD_ISA set to
 * its name; each exports one table of functions. QD_CPU_TABLE declares the tables and the function
 * that picks one for a device. */
#ifndef QD_DEVICE_CPU_CPU_IMPL_H
#define QD_DEVICE_CPU_CPU_IMPL_H

#include "base/thread.h"
#include "device/arguments_impl.h"
#include "device/device_impl.h"

/* Best first. The build compiles every *_isa.c for avx512, avx2 and generic. amx and avx512bf16 are
 * avx512 whose GEMMs of bf16 operands multiply pairs (qd_cpu.dots), with AMX tiles or dot products.
 * Their emulations are for tests, on any machine with AVX2: GEMMs and attention compute what those
 * of amx and avx512bf16 do, with vectors of the same length in two registers; the other kernels are
 * those of avx2. */
#if defined(__x86_64__)
#define QD_CPU_ISA_LIST(X) X(amx) X(avx512bf16) X(avx512) X(amx_emulated) X(avx512bf16_emulated) X(avx2) X(generic)
#elif defined(__aarch64__)
#define QD_CPU_ISA_LIST(X) X(neon)
#else
#define QD_CPU_ISA_LIST(X) X(generic)
#endif

typedef enum qd_cpu_isa {
#define QD_CPU_ISA_ENUM(name) QD_CPU_##name,
    QD_CPU_ISA_LIST(QD_CPU_ISA_ENUM)
#undef QD_CPU_ISA_ENUM
        QD_CPU_ISA_COUNT
} qd_cpu_isa;

/* Workspace of each compute thread, aligned to 64 bytes; its contents are undefined at the start of
 * a range. A kernel that needs more makes its ranges smaller. */
#define QD_CPU_WORKSPACE_BYTES ((int64_t)4 << 20)

typedef struct qd_cpu {
    qd_device base; /* first: a qd_device * of kind "cpu" is a qd_cpu * */
    qd_stream stream;
    qd_pool *pool;
    qd_cpu_isa isa;
    bool dots;       /* GEMMs of bf16 operands multiply pairs instead of using fp32 multiply-adds */
    char *workspace; /* (threads, QD_CPU_WORKSPACE_BYTES) */
} qd_cpu;

static inline qd_cpu *qd_cpu_of(qd_stream *stream)
{
    return (qd_cpu *)stream->device;
}

/* thread: the argument of a qd_pool_body. */
static inline void *qd_cpu_workspace(const qd_cpu *cpu, int thread)
{
    return cpu->workspace + thread * QD_CPU_WORKSPACE_BYTES;
}

/* QD_CPU_TABLE(struct_type, qd_cpu_norm) declares qd_cpu_norm_avx512, qd_cpu_norm_avx2 … (each
 * defined in norm_isa.c as `const struct_type QD_ISA_NAME(qd_cpu_norm) = {…};`) and
 * qd_cpu_norm_for(cpu). */
#define QD_CPU_TABLE_EXTERN(type, name, isa) extern const type name##_##isa;
#if defined(__x86_64__)
#define QD_CPU_TABLE_OF(type, name, emulation)                                                              \
    QD_CPU_TABLE_EXTERN(type, name, avx512)                                                                 \
    QD_CPU_TABLE_EXTERN(type, name, avx2)                                                                   \
    QD_CPU_TABLE_EXTERN(type, name, generic)                                                                \
    static inline const type *name##_for(const qd_cpu *cpu)                                                 \
    {                                                                                                       \
        return cpu->isa <= QD_CPU_avx512  ? &name##_avx512                                                  \
               : cpu->isa < QD_CPU_avx2   ? &name##_##emulation                                             \
               : cpu->isa == QD_CPU_avx2 ? &name##_avx2                                                     \
                                         : &name##_generic;                                                 \
    }
#define QD_CPU_TABLE(type, name) QD_CPU_TABLE_OF(type, name, avx2)
/* Of kernels that are compiled for emulations too. */
#define QD_CPU_TABLE_EMULATED(type, name)                                                                   \
    QD_CPU_TABLE_EXTERN(type, name, emulated)                                                               \
    QD_CPU_TABLE_OF(type, name, emulated)
#else
#if defined(__aarch64__)
#define QD_CPU_ONLY_ISA(name) name##_neon
#else
#define QD_CPU_ONLY_ISA(name) name##_generic
#endif
#define QD_CPU_TABLE(type, name)                                                                            \
    extern const type QD_CPU_ONLY_ISA(name);                                                                \
    static inline const type *name##_for(const qd_cpu *cpu)                                                 \
    {                                                                                                       \
        (void)cpu;                                                                                          \
        return &QD_CPU_ONLY_ISA(name);                                                                      \
    }
#define QD_CPU_TABLE_EMULATED(type, name) QD_CPU_TABLE(type, name)
#endif

/* Inside a *_isa.c: QD_ISA_NAME(qd_cpu_norm) is qd_cpu_norm_avx512 and so on. */
#define QD_ISA_JOIN2(name, isa) name##_##isa
#define QD_ISA_JOIN(name, isa) QD_ISA_JOIN2(name, isa)
#define QD_ISA_NAME(name) QD_ISA_JOIN(name, QD_ISA)

/* The kernels, one function per slot. */
#define QD_CPU_KERNEL(slot, args) qd_status qd_cpu_##slot(qd_stream *stream, const args *a);
QD_KERNEL_TABLE(QD_CPU_KERNEL)
#undef QD_CPU_KERNEL

/* qd_device_ops.run_fma, run_bf16, run_tiles and run_adds (gemm/ceiling.c). */
qd_status qd_cpu_run_fma(qd_stream *stream, double *flops);
qd_status qd_cpu_run_bf16(qd_stream *stream, qd_bf16_unit unit, double *flops);
qd_status qd_cpu_run_tiles(qd_stream *stream, qd_dtype dtype, double *flops, double *seconds);
qd_status qd_cpu_run_adds(qd_stream *stream, double *adds);

/* base + index elements of dtype (fp32 or bf16). */
static inline const void *qd_cpu_at(const void *base, int64_t index, qd_dtype dtype)
{
    return (const char *)base + index * (dtype == QD_F32 ? 4 : 2);
}
static inline void *qd_cpu_at_mut(void *base, int64_t index, qd_dtype dtype)
{
    return (char *)base + index * (dtype == QD_F32 ? 4 : 2);
}

/* GEMM with a residual, GELU or bias gradient (gemm/matmul_fused.c); called by qd_cpu_matmul. */
qd_status qd_cpu_matmul_fused(qd_stream *stream, const qd_matmul_args *a);
/* GEMM of fp8 operands (gemm/fp8.c); called by qd_cpu_matmul. */
void qd_cpu_matmul_fp8(qd_stream *stream, const qd_matmul_args *a);

#endif
