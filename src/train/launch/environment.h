/* Internal to the launcher: how the environment says that this process is a rank of a world that no
 * MPI connects. */
#ifndef QD_TRAIN_LAUNCH_ENVIRONMENT_H
#define QD_TRAIN_LAUNCH_ENVIRONMENT_H

#include <quadrille/comm.h>
#include <quadrille/options.h>
#include <stdatomic.h>

typedef struct qd_launch_world {
    const char *starter; /* "torchrun", "srun" or "another program" */
    char address[256];
    int port, rank, size;
} qd_launch_world;

/* The variables of torchrun and of Kubernetes operators: RANK, WORLD_SIZE, MASTER_ADDR and
 * MASTER_PORT. False if they are not set, or name a world of one rank. */
bool qd_launch_world_named(qd_launch_world *world);
/* Of these variables, one that is missing, or not a number, where others say that this process is
 * one of several; NULL: none. */
const char *qd_launch_world_missing(void);
/* A task of a Slurm step, whose ranks meet on the first machine of the step. */
bool qd_launch_world_slurm(int rank, int size, qd_launch_world *world);
/* Joins it. The secret: run.secret_file, or else the variable QUADRILLE_SECRET. options: NULL if
 * they cannot be read. how: what a run with several worlds says about this one; NULL: all ranks
 * meet, within run.join_deadline. stop: once it is not 0, the wait for other ranks ends with
 * QD_INTERRUPTED, unless `how` decides on that. NULL in *comm: there is nothing to join, because
 * the run has ended in order. */
qd_status qd_launch_world_join(const qd_launch_world *world, const qd_options *options, const qd_comm_join *how, const atomic_int *stop,
                               const qd_comm_config *config, qd_comm **comm);

#endif
