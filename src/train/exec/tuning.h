/* Which algorithm each product of a program uses, on devices that offer several. */
#ifndef QD_TRAIN_EXEC_TUNING_H
#define QD_TRAIN_EXEC_TUNING_H

#include "device/device.h"
#include "spec/config/config.h"

#include <quadrille/comm.h>

/* Collective over `world`. Rank 0 takes the choices from the file that config->tuning names,
 * searches for those of all ranks' products that are missing, and writes them back; all other ranks
 * take its choices. Nothing to do on devices without a choice. */
qd_status qd_tune_products(const qd_config *config, const qd_program *program, qd_device *device, qd_comm *world);
#endif
