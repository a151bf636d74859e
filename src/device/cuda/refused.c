/* Kernels that have no CUDA version. Configurations that need them are refused before anything is
 * built (spec/config/device_models.c), so these are not reached. */
#include "device/cuda/launch_impl.h"

#define REFUSE(slot, args)                                                                                  \
    qd_status qd_cuda_##slot(qd_stream *stream, const args *a)                                              \
    {                                                                                                       \
        (void)stream;                                                                                       \
        (void)a;                                                                                            \
        return QD_FAIL(QD_UNSUPPORTED, "%s has no kernel on a GPU: use run.device=cpu", #slot);             \
    }
QD_CPU_KERNEL_TABLE(REFUSE)
