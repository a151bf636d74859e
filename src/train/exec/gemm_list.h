/* The products that a run's programs make, each once: what qd_device_tune is to choose algorithms
 * for. */
#ifndef QD_TRAIN_EXEC_GEMM_LIST_H
#define QD_TRAIN_EXEC_GEMM_LIST_H

#include "device/device.h"
#include "spec/program/program.h"

#include <quadrille/comm.h>

typedef struct qd_products {
    qd_matmul_args *items; /* addresses say only whether there is one */
    int64_t *times;        /* how often the modules of the model make each in a micro-batch */
    int count;
} qd_products;

/* Collective over `world`: rank 0 has those of all ranks' programs, which differ between stages of
 * a pipeline; the others have none. */
qd_status qd_products_collect(const qd_program *program, qd_comm *world, qd_products *products);
void qd_products_free(qd_products *products);

#endif
