/* Streams for copies that run beside kernels and communication: from the host, and to it, one for
 * each direction of the link. On the CPU they are the compute stream. */
#ifndef QD_DEVICE_COPIES_H
#define QD_DEVICE_COPIES_H

#include "device/device.h"

qd_stream *qd_device_in_stream(qd_device *device);
qd_stream *qd_device_out_stream(qd_device *device);
#endif
