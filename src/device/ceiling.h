/* What the machine can do at most, measured: the yardstick of `bench`. */
#ifndef QD_DEVICE_CEILING_H
#define QD_DEVICE_CEILING_H

#include "device/device.h"

typedef struct qd_ceiling {
    double fma_flops;  /* fp32 FLOP/s of multiply-adds that stay in registers, all compute threads at once */
    double copy_bytes; /* bytes/s read and written by a copy between buffers far larger than the caches */
} qd_ceiling;

/* Takes about `seconds`; best of several runs. Allocates two buffers on the device for the time it
 * runs. */
qd_status qd_device_measure_ceiling(qd_device *device, double seconds, qd_ceiling *ceiling);

/* fma_flops alone, from `runs` runs of about a millisecond. Allocates nothing. */
qd_status qd_device_measure_fma(qd_device *device, int runs, double *fma_flops);

/* The same as it is now: the mean over `runs` runs one after another. */
qd_status qd_device_average_fma(qd_device *device, int runs, double *fma_flops);

/* Integer additions per second in registers, as many as the compute threads issue together, over
 * some 0.2 ms. A core that runs another program on its second hardware thread issues half as many,
 * while its multiply-adds may go on as before: this shows a neighbour that fma_flops does not. A
 * device that shares nothing gives 0. */
qd_status qd_device_measure_adds(qd_device *device, double *adds);

/* Multiplies panels that lie packed in each core's second-level cache, as products do between their
 * visits to memory, and says with how many FLOPs and how long: what a product could reach if
 * packing and memory cost nothing. A device that has no such thing gives 0 FLOPs. */
qd_status qd_device_run_tiles(qd_device *device, double *flops, double *seconds);

#endif
