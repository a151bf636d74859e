/* The GEMMs of a run's programs, each shape once: the input of qd_device_tune(), which chooses
 * algorithms for them. */
#ifndef QD_TRAIN_EXEC_GEMM_LIST_H
#define QD_TRAIN_EXEC_GEMM_LIST_H

#include "device/device.h"
#include "spec/program/program.h"

#include <quadrille/comm.h>

typedef struct qd_products {
    qd_matmul_args *items; /* addresses are only NULL or not NULL */
    int64_t *times;        /* how often the model's modules run each one per micro-batch */
    int count;
} qd_products;

/* Collective over `world`. Rank 0 gets the GEMMs of all ranks' programs, which differ between
 * pipeline stages; the others get none. */
qd_status qd_products_collect(const qd_program *program, qd_comm *world, qd_products *gemms);
void qd_products_free(qd_products *gemms);

#endif
