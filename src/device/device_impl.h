/* The interface that a device backend implements. Only files below src/device include this. */
#ifndef QD_DEVICE_DEVICE_IMPL_H
#define QD_DEVICE_DEVICE_IMPL_H

#include "device/device.h"

#include <stdatomic.h>

/* Instructions that multiply bf16 operands: dot products of vectors, AMX tiles. */
typedef enum qd_bf16_unit { QD_BF16_DOTS, QD_BF16_AMX } qd_bf16_unit;

/* Slots are required up to describe_workspace. Sizes are in bytes; copy and fill_zero are never
 * called with size 0. */
typedef struct qd_device_ops {
    void (*destroy)(qd_device *device); /* frees the backend's struct, whose first member is qd_device */
    qd_status (*alloc)(qd_device *device, int64_t bytes, void **address); /* zeroed; bytes >= 1 */
    void (*free)(qd_device *device, void *address, int64_t bytes);
    qd_status (*wait)(qd_stream *stream);
    qd_status (*copy)(qd_stream *stream, void *to, const void *from, int64_t bytes);
    qd_status (*fill_zero)(qd_stream *stream, void *to, int64_t bytes);
    qd_status (*memory)(qd_device *device, int64_t *free_bytes, int64_t *total_bytes);
    qd_status (*host_alloc)(qd_device *device, int64_t bytes, void **address);
    void (*host_free)(qd_device *device, void *address);
    qd_status (*event_create)(qd_device *device, qd_event **event);
    void (*event_destroy)(qd_event *event);
    qd_status (*event_record)(qd_event *event, qd_stream *stream);
    qd_status (*stream_wait_event)(qd_stream *stream, qd_event *event);
    qd_status (*event_wait)(qd_event *event);
    qd_status (*event_done)(qd_event *event, bool *done);
    qd_status (*event_seconds)(qd_event *from, qd_event *to, double *seconds);
    /* Optional, except run_fma: NULL where the device has nothing to choose or report. */
    void (*describe_workspace)(const qd_device *device, qd_strbuf *text);
    qd_status (*tune)(qd_device *device, const qd_tune_args *args, bool *searched);
    qd_status (*tune_more)(qd_device *device, const qd_tune_args *args, int *left);
    qd_status (*tuning_get)(qd_device *device, qd_strbuf *text);
    qd_status (*tuning_set)(qd_device *device, const char *text);
    qd_status (*reach)(qd_device *device, qd_device *other); /* NULL: all devices of this kind reach each other */
    qd_status (*make_current)(qd_device *device);
    void *(*native)(qd_stream *stream);
    qd_status (*run_fma)(qd_stream *stream, double *flops); /* required; keeps all multiply-add units busy and returns the FLOPs */
    /* Optional; with bf16 dot products or AMX tiles, 0 FLOPs if these kernels have none. */
    qd_status (*run_bf16)(qd_stream *stream, qd_bf16_unit unit, double *flops);
    qd_status (*run_tiles)(qd_stream *stream, qd_dtype dtype, double *flops, double *seconds); /* optional; see qd_device_run_tiles */
    qd_status (*run_adds)(qd_stream *stream, double *adds);                    /* optional; see qd_device_measure_adds */
} qd_device_ops;

struct qd_stream {
    qd_device *device;
};

/* First member of a backend's event. */
struct qd_event {
    qd_device *device;
};

struct qd_device {
    const qd_device_ops *ops;
    const qd_kernels *kernels;
    qd_stream *compute, *comm, *in, *out;
    qd_device_caps caps;
    _Atomic int64_t allocated;
};

/* Constructors, one per backend, listed in the registry of device.c. */
qd_status qd_cpu_device_create(const qd_device_config *config, qd_device **device);
qd_status qd_cpu_device_exists(int ordinal, const char *isa);
/* In builds without CUDA: QD_UNSUPPORTED, with what was missing. */
qd_status qd_cuda_device_create(const qd_device_config *config, qd_device **device);

#endif
