/* Queries which accelerators a machine has, without creating a device. */
#ifndef QD_DEVICE_INFO_H
#define QD_DEVICE_INFO_H

#include <quadrille/status.h>
#include <stdint.h>

typedef struct qd_device_info {
    char name[96];
    char libraries[160]; /* "driver 13.0, runtime 13.0, cuBLAS 13.1.0, cuDNN 9.14.0" */
    int count;           /* accelerators of this kind visible to the process */
    int64_t free_bytes, total_bytes;
} qd_device_info;

/* kind: "cuda". QD_UNSUPPORTED with the reason if there is none. */
qd_status qd_device_look(const char *kind, int ordinal, qd_device_info *info);

/* Checks that the device exists without creating a context on it, which would take memory: ranks
 * ask before they know which device they get. Any kind of device; ordinal -1: any one will do. isa:
 * as in qd_device_config. */
qd_status qd_device_exists(const char *kind, int ordinal, const char *isa);

/* The CUDA implementation; builds without CUDA return QD_UNSUPPORTED. */
qd_status qd_cuda_device_look(int ordinal, qd_device_info *info);
qd_status qd_cuda_device_exists(int ordinal, const char *isa);

#endif
