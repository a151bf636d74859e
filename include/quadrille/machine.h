/* What this machine offers to a run. */
#ifndef QUADRILLE_MACHINE_H
#define QUADRILLE_MACHINE_H

#include <quadrille/export.h>
#include <quadrille/status.h>
#include <quadrille/types.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QD_MACHINE_GPUS = 16 };

typedef struct qd_machine {
    char cpu[128];             /* "Intel(R) Xeon(R) …"; "" when unknown */
    char isa[32];              /* instruction set of our kernels: "avx512bf16" */
    char products[64];         /* what computes matrix products: "packed kernels" */
    int cores, cores_allowed;  /* of the machine; those this process may use */
    int64_t memory_bytes, memory_available_bytes;
    int64_t memory_limit_bytes; /* of the control group; 0: none */
    int64_t shared_bytes, shared_free_bytes; /* /dev/shm; 0: none */
    char huge_pages[32];       /* transparent: "always", "madvise", "never"; "" when unknown */
    bool mpi_built;
    double fma_flops;          /* per second: fp32 multiply-adds of one core, measured */
    double product_flops;      /* per second: fp32 matrix products on one core, measured */
    double dot_flops;          /* per second: bf16 dot products of one core, measured; 0: GEMMs of bf16 operands compute in fp32 */
    double bf16_product_flops; /* per second: bf16 matrix products on one core, measured */
    int gpu_count;             /* that this process sees; the first QD_MACHINE_GPUS are described */
    struct {
        char name[96]; /* "NVIDIA H200, sm_90" */
        int64_t bytes, free_bytes;
    } gpus[QD_MACHINE_GPUS];
    char gpu_libraries[224];   /* "driver 13.0, runtime 13.0, cuBLAS 13.1.0, cuDNN 9.14.0, NCCL 2.28.3" */
    char gpu_reason[256];      /* why there is none */
} qd_machine;

/* Takes about 0.2 s. */
QD_API qd_status qd_machine_look(qd_machine *machine);

/* Bytes of memory that a run could take now: what is free, within what the control groups of this
 * process still allow; 0: unknown. *swap (NULL: not asked for): what could be swapped out beyond
 * that. */
QD_API int64_t qd_machine_free_memory(int64_t *swap);

/* FLOP/s of all cores at once, measured in some 20 ms: of bf16 dot products if dtype is bf16 and the
 * kernels use them, otherwise of fp32 multiply-adds. Where this process may not use all cores,
 * scaled to all. */
QD_API qd_status qd_machine_peak(qd_dtype dtype, double *flops);

#ifdef __cplusplus
}
#endif
#endif
