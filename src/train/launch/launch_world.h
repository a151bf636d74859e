/* A rank of a world that something else has started: mpirun or srun, which MPI connects, or what
 * sets the variables of environment.h. */
#ifndef QD_TRAIN_LAUNCH_WORLD_H
#define QD_TRAIN_LAUNCH_WORLD_H

#include "train/launch/environment.h"
#include "train/run/run.h"

#include <sys/types.h>

/* Who this process is, from the environment. */
typedef enum qd_launch_role { QD_ROLE_FIRST, QD_ROLE_LOCAL_RANK, QD_ROLE_MPI_RANK } qd_launch_role;

typedef struct qd_launch_place {
    qd_launch_role role;
    int rank; /* -1: unknown until MPI is initialized */
    int size; /* 0: unknown */
    const char *starter; /* of an MPI world: "mpirun", "srun" */
    bool told; /* the starter has set the variables by which MPI finds the other processes */
    bool joins; /* the ranks meet without MPI, as `world` says */
    qd_launch_world world;
    int world_fd, report_fd, config_fd;
    int order_fd, state_fd; /* -1: the run is not supervised; no state is handed over */
    pid_t launcher;
} qd_launch_place;

/* Of this process. */
typedef struct qd_launch_marks {
    atomic_int stop;   /* 0, or the signal that asks the run to end */
    atomic_int joined; /* one MPI rank that fails reports for all; before that, rank 0 does */
    atomic_int told;   /* the observer has reported the failure */
    atomic_int speaks_for_lost; /* this rank reports the loss of another, which cannot */
} qd_launch_marks;

/* Runs this rank. run: with options and stop. */
qd_status qd_launch_member(const qd_launch_place *place, qd_run *run, qd_run_summary *summary, const qd_train_observer *observer,
                           qd_launch_marks *marks);
/* qd_train_not_started() of such a rank. */
qd_status qd_launch_not_started(const qd_launch_place *place, qd_status status, const qd_train_observer *observer, qd_launch_marks *marks);
/* Stacks of ranks that hang are written to the run folder. */
void qd_launch_catch_stacks(const qd_config *config, int rank);
#endif
