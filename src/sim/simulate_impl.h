/* A simulated step together with its inputs. */
#ifndef QD_SIM_SIMULATE_IMPL_H
#define QD_SIM_SIMULATE_IMPL_H

#include "sim/step.h"

struct qd_simulation {
    qd_cluster cluster;
    qd_config config; /* its strings belong to the options it was read from */
    qd_step step;
    qd_sim_stage *stages;
    qd_sim_report report;
};

/* Fills the report of a step; without times, only memory. `stages` and `report` are zeroed. */
void qd_simulation_fill(const qd_step *step, qd_sim_stage *stages, qd_sim_report *report);
#endif
