/* Hardware and software of this machine, as far as a run depends on them. Nothing here is
 * collective. */
#ifndef QUADRILLE_MACHINE_H
#define QUADRILLE_MACHINE_H

#include <quadrille/export.h>
#include <quadrille/sized.h>
#include <quadrille/status.h>
#include <quadrille/types.h>
#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { QD_MACHINE_GPUS = 16 };

typedef struct qd_machine {
    size_t size;
    char cpu[128];             /* "Intel(R) Xeon(R) …"; "" when unknown */
    char isa[32];              /* instruction set of the kernels: "avx512bf16" */
    char products[64];         /* GEMM implementation: "packed kernels" */
    int cores, cores_allowed;  /* of the machine; those this process may use */
    int64_t memory_bytes, memory_available_bytes;
    int64_t memory_limit_bytes; /* of the cgroup; 0: none */
    int64_t shared_bytes, shared_free_bytes; /* /dev/shm; 0: none */
    char huge_pages[32];       /* transparent: "always", "madvise", "never"; "" when unknown */
    bool mpi_built;
    double fma_flops;          /* measured FLOP/s of fp32 multiply-adds on one core */
    double product_flops;      /* measured FLOP/s of fp32 GEMMs on one core */
    int gpu_count;             /* visible to this process; `gpus` describes the first QD_MACHINE_GPUS */
    struct {
        char name[96]; /* "NVIDIA H200, sm_90" */
        int64_t bytes, free_bytes;
    } gpus[QD_MACHINE_GPUS];
    char gpu_libraries[224];   /* "driver 13.0, runtime 13.0, cuBLAS 13.1.0, cuDNN 9.14.0, NCCL 2.28.3" */
    char gpu_reason[256];      /* why gpu_count is 0 */
    double dot_flops;          /* measured FLOP/s of bf16 dot products on one core; 0: the kernels have none */
    double bf16_product_flops; /* measured FLOP/s of bf16 GEMMs on one core */
    double amx_flops;          /* measured FLOP/s of AMX tiles of bf16 on one core; 0: the kernels have none */
    char ways[640];            /* how collectives between local ranks copy here: qd_comm_config.ways */
    char ways_file[1024];       /* where this is kept; "": nowhere */
    int64_t stream_bytes;      /* of it: buffers of all ranks of an operation from which on results bypass the caches */
    char stream_copy[16], far_copy[16]; /* of it: the non-temporal copy of such results, and of the largest */
} qd_machine;
QD_SIZED_DEFAULT(qd_machine)

/* Fills `machine`. Takes about 0.2 s, mostly for the measurements, and 0.3 s more once for `ways`,
 * which it keeps in the user's cache folder. */
QD_API qd_status qd_machine_look(qd_machine *machine);

/* Bytes of memory that a run could allocate now: free memory, within the limits of this process's
 * cgroups; 0: unknown. *swap (may be NULL): what could be swapped out in addition. */
QD_API int64_t qd_machine_free_memory(int64_t *swap);

/* Measures the fp32 FLOP/s of multiply-adds of all cores at once, in about 20 ms. If this process
 * may not use all cores, the result is scaled to all of them. */
QD_API qd_status qd_machine_peak(double *flops);

/* The same for GEMMs of this type: AMX tiles or bf16 dot products if dtype is bf16 and the kernels
 * use them. */
QD_API qd_status qd_machine_peak_for(qd_dtype dtype, double *flops);

#ifdef __cplusplus
}
#endif
#endif
