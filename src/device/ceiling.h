/* Measured peak performance of the machine: the reference that `bench` compares kernels with. */
#ifndef QD_DEVICE_CEILING_H
#define QD_DEVICE_CEILING_H

#include "device/device.h"

typedef struct qd_ceiling {
    double fma_flops;  /* fp32 FLOP/s of multiply-adds in registers, on all compute threads */
    double dot_flops;  /* the same of bf16 dot products; 0: the kernels have none */
    double amx_flops;  /* the same of AMX tiles of bf16; 0: the kernels have none */
    double copy_bytes; /* bytes/s read plus written by a copy between buffers far larger than the caches */
} qd_ceiling;

/* The ceiling of the instructions that multiply operands of this type in GEMMs. */
double qd_ceiling_of(const qd_ceiling *ceiling, qd_dtype dtype);

/* Takes about `seconds` and keeps the best of several runs. Allocates two buffers on the device
 * while it runs. */
qd_status qd_device_measure_ceiling(qd_device *device, double seconds, qd_ceiling *ceiling);

/* fma_flops only, the best of `runs` runs of about a millisecond each. Allocates nothing. */
qd_status qd_device_measure_fma(qd_device *device, int runs, double *fma_flops);

/* fma_flops, dot_flops and amx_flops, each measured as qd_device_measure_fma measures. */
qd_status qd_device_measure_flops(qd_device *device, int runs, qd_ceiling *ceiling);

/* The current fma_flops: the mean over `runs` consecutive runs. */
qd_status qd_device_average_fma(qd_device *device, int runs, double *fma_flops);

/* Integer additions per second in registers, summed over the compute threads, measured for about
 * 0.2 ms. A core whose second hardware thread runs another program issues half as many, while its
 * multiply-adds may be as fast as before: this detects a neighbour that fma_flops does not. 0 on
 * devices that do not measure it. */
qd_status qd_device_measure_adds(qd_device *device, double *adds);

/* Multiplies packed panels that stay in each core's L2 cache, as a GEMM does between its accesses
 * to memory, and returns FLOPs and time: the upper bound for a GEMM if packing and memory access
 * cost nothing. dtype: of both operands. 0 FLOPs on devices that do not measure it. */
qd_status qd_device_run_tiles(qd_device *device, qd_dtype dtype, double *flops, double *seconds);

#endif
