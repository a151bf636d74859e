/* What kernels ask of fp32 values in two parts (qd_adamw_args.rest), the same on every device. */
#ifndef QD_DEVICE_SPLIT_MASTER_H
#define QD_DEVICE_SPLIT_MASTER_H

#include "device/device.h"

static inline qd_status qd_check_rest(const char *kernel, const int16_t *rest, qd_dtype param)
{
    if (rest && param != QD_BF16)
        return QD_FAIL(QD_USAGE, "%s: the values are in two parts, and the upper one is %s; it must be bf16", kernel, qd_dtype_name(param));
    return QD_OK;
}
#endif
