/* What a machine has of a kind of accelerator, without taking it into use. */
#ifndef QD_DEVICE_INFO_H
#define QD_DEVICE_INFO_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_device_info {
    char name[96];
    char libraries[160]; /* "driver 13.0, runtime 13.0, cuBLAS 13.1.0, cuDNN 9.14.0" */
    int count;           /* accelerators of this kind that the process sees */
    int64_t free_bytes, total_bytes;
} qd_device_info;

/* kind: "cuda". QD_UNSUPPORTED with the reason where there is none. */
qd_status qd_device_look(const char *kind, int ordinal, qd_device_info *info);

/* Whether there is that accelerator, without a context on it, which would take memory there: ranks
 * ask before they know which one is theirs. Any kind of device; ordinal -1: one of them is
 * enough. */
qd_status qd_device_exists(const char *kind, int ordinal);

/* The CUDA device's part of it; in builds without CUDA it says so. */
qd_status qd_cuda_device_look(int ordinal, qd_device_info *info);
qd_status qd_cuda_device_exists(int ordinal);

#endif
