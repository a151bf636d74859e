/* What communication needs from a CUDA device: peer access, the current device, native stream
 * handles. */
#include "device/cuda/cuda_impl.h"

qd_status qd_cuda_reach(qd_device *device, qd_device *other)
{
    int here = ((qd_cuda *)device)->ordinal, there = ((qd_cuda *)other)->ordinal, possible = 0;
    if (here == there) return QD_OK;
    QD_TRY(qd_cuda_make_current(device));
    QD_CUDA_TRY(cudaDeviceCanAccessPeer(&possible, here, there));
    if (!possible)
        return QD_FAIL(QD_UNSUPPORTED, "GPU %d cannot access the memory of GPU %d (nvidia-smi topo -p2p r shows which can); "
                                       "run.backend=nccl does not need it", here, there);
    cudaError_t error = cudaDeviceEnablePeerAccess(there, 0);
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        (void)cudaGetLastError(); /* another rank of this process enabled it first */
        return QD_OK;
    }
    QD_CUDA_TRY(error);
    return QD_OK;
}

qd_status qd_cuda_make_current(qd_device *device)
{
    QD_CUDA_TRY(cudaSetDevice(((qd_cuda *)device)->ordinal));
    return QD_OK;
}

void *qd_cuda_native(qd_stream *stream)
{
    return qd_cuda_stream_of(stream);
}
