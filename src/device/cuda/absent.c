/* Stands in for the CUDA device in builds without CUDA. */
#include "device/device_impl.h"
#include "device/info.h"

static qd_status absent(void)
{
    return QD_FAIL(QD_UNSUPPORTED, "device 'cuda': this build has no CUDA; configure it where nvcc, cuBLAS and cuDNN are "
                                   "installed (QD_CUDA=on reports what is missing)");
}

qd_status qd_cuda_device_create(const qd_device_config *config, qd_device **device)
{
    (void)config;
    *device = NULL;
    return absent();
}

qd_status qd_cuda_device_look(int ordinal, qd_device_info *info)
{
    (void)ordinal;
    (void)info;
    return absent();
}

qd_status qd_cuda_device_exists(int ordinal, const char *isa)
{
    (void)isa;
    (void)ordinal;
    return absent();
}
