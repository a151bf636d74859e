/* Which GPUs are visible, and which libraries this process would use on them. */
#include "device/cuda/cuda_impl.h"
#include "device/cuda/libraries.h"
#include "device/info.h"

#include <stdio.h>

static qd_status count_gpus(int *count)
{
    cudaError_t error = cudaGetDeviceCount(count);
    if (error == cudaSuccess && *count > 0)
        return QD_OK;
    (void)cudaGetLastError();
    *count = 0;
    return QD_FAIL(QD_UNSUPPORTED, "no GPU is visible on this machine (%s)",
                   error != cudaSuccess ? cudaGetErrorString(error) : "the driver lists none");
}

static qd_status check_ordinal(int ordinal, int count)
{
    if (ordinal >= 0 && ordinal < count)
        return QD_OK;
    return QD_FAIL(QD_USAGE, "GPU %d; this machine has 0 .. %d", ordinal, count - 1);
}

qd_status qd_cuda_device_exists(int ordinal, const char *isa)
{
    (void)isa;
    int count = 0;
    qd_status status = count_gpus(&count);
    if (status == QD_OK && ordinal >= 0)
        status = check_ordinal(ordinal, count);
    return status == QD_OK ? QD_OK : qd_error_prefix(status, "device 'cuda': ");
}

qd_status qd_cuda_device_look(int ordinal, qd_device_info *info)
{
    int driver = 0, runtime = 0;
    size_t left = 0, total = 0;
    struct cudaDeviceProp properties;
    QD_TRY(count_gpus(&info->count));
    QD_TRY(check_ordinal(ordinal, info->count));
    QD_TRY(qd_cuda_libraries_load());
    size_t blas = cublasLtGetVersion(), cudnn = cudnnGetVersion();
    QD_CUDA_TRY(cudaGetDeviceProperties(&properties, ordinal));
    QD_CUDA_TRY(cudaSetDevice(ordinal));
    QD_CUDA_TRY(cudaMemGetInfo(&left, &total));
    QD_CUDA_TRY(cudaDriverGetVersion(&driver));
    QD_CUDA_TRY(cudaRuntimeGetVersion(&runtime));
    info->free_bytes = (int64_t)left;
    info->total_bytes = (int64_t)total;
    snprintf(info->name, sizeof info->name, "%.80s, sm_%d%d", properties.name, properties.major, properties.minor);
    snprintf(info->libraries, sizeof info->libraries,
             "driver %d.%d, runtime %d.%d, cuBLAS %zu.%zu.%zu, cuDNN %zu.%zu.%zu", driver / 1000, driver % 1000 / 10,
             runtime / 1000, runtime % 1000 / 10, blas / 10000, blas / 100 % 100, blas % 100, cudnn / 10000, cudnn / 100 % 100,
             cudnn % 100);
    return QD_OK;
}
