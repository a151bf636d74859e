/* Chooses an algorithm for each GEMM of a program, on devices that offer several. */
#ifndef QD_TRAIN_EXEC_TUNING_H
#define QD_TRAIN_EXEC_TUNING_H

#include "device/device.h"
#include "spec/config/config.h"

#include <quadrille/comm.h>

/* Collective over `world`. Rank 0 reads the choices from the file that config->tuning names, tunes
 * the GEMMs of all ranks that are missing there, and writes the file; all other ranks use its
 * choices. Does nothing on devices without a choice. */
qd_status qd_tune_products(const qd_config *config, const qd_program *program, qd_device *device, qd_comm *world);
#endif
