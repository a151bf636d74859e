/* Chooses an algorithm for each GEMM of a program, on devices that offer several: quickly before
 * the first step, and thoroughly between the steps that follow. */
#ifndef QD_TRAIN_EXEC_TUNING_H
#define QD_TRAIN_EXEC_TUNING_H

#include "device/device.h"
#include "parallel/bind.h"
#include "spec/config/config.h"

#include <quadrille/comm.h>

/* Collective over `world`. Rank 0 reads the choices from the file that config->tuning names, tunes
 * the GEMMs of all ranks that are missing there, and writes the file; all other ranks use its
 * choices. Does nothing on devices without a choice. */
qd_status qd_tune_products(const qd_config *config, const qd_program *program, qd_device *device, qd_comm *world);

/* Collective over the world, between steps: one search without a time limit, for the GEMM that
 * takes most of a step among those that qd_tune_products() searched for in a hurry. The memory of
 * the step's dynamic buffers is overwritten. *left, on rank 0: how many remain. */
qd_status qd_tune_one_more(const qd_config *config, const qd_bound *bound, int *left);
#endif
