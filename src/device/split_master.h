/* Check of fp32 master weights split into a bf16 half and the low 16 bits (qd_adamw_args.rest),
 * shared by all devices. */
#ifndef QD_DEVICE_SPLIT_MASTER_H
#define QD_DEVICE_SPLIT_MASTER_H

#include "device/device.h"

static inline qd_status qd_check_rest(const char *kernel, const int16_t *rest, qd_dtype param)
{
    if (rest && param != QD_BF16)
        return QD_FAIL(QD_USAGE, "%s: with `rest`, the parameters must be bf16, not %s", kernel, qd_dtype_name(param));
    return QD_OK;
}
#endif
