/* Streams for copies between host and device that overlap with kernels and communication, one per
 * direction of the link. On the CPU both are the compute stream. */
#ifndef QD_DEVICE_COPIES_H
#define QD_DEVICE_COPIES_H

#include "device/device.h"

qd_stream *qd_device_in_stream(qd_device *device);
qd_stream *qd_device_out_stream(qd_device *device);
#endif
