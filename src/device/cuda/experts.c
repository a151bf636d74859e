/* Norms of queries and keys have no kernels here yet; configurations that need them are refused. */
#include "device/cuda/launch_impl.h"

#define ABSENT(slot, args)                                                                                  \
    qd_status qd_cuda_##slot(qd_stream *stream, const args *a)                                              \
    {                                                                                                       \
        (void)stream;                                                                                       \
        (void)a;                                                                                            \
        return QD_FAIL(QD_UNSUPPORTED, #slot ": models with experts or norms of queries and keys run on the cpu only so far"); \
    }
ABSENT(head_norm, qd_head_norm_args)
ABSENT(head_norm_backward, qd_head_norm_args)
