/* Loading of cuBLASLt and cuDNN at run time. */
#ifndef QD_DEVICE_CUDA_LIBRARIES_H
#define QD_DEVICE_CUDA_LIBRARIES_H

#include <quadrille/status.h>

/* QD_UNSUPPORTED, with the loader's reason, if one of them cannot be loaded. */
qd_status qd_cuda_libraries_load(void);
#endif
