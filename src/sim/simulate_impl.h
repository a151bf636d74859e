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

/* An event of the simulated step: an action of a stage, or, if op >= 0, an exchange inside it.
 * waited: when the computation began to wait for it. */
typedef struct qd_sim_event {
    int stage, action, op;
    double begin, end, waited;
} qd_sim_event;
/* Calls `each` for the events of all stages, until it fails. */
qd_status qd_simulation_events(const qd_simulation *simulation, qd_status (*each)(void *context, const qd_sim_event *event), void *context);

/* The timeline for a report, in memory of the arena; the program's texts are borrowed. */
struct qd_report_timeline;
qd_status qd_simulation_timeline(const qd_simulation *simulation, qd_arena *arena, struct qd_report_timeline *timeline);

/* Fills the report of a step; without times, only memory. `stages` and `report` are zeroed. */
void qd_simulation_fill(const qd_step *step, qd_sim_stage *stages, qd_sim_report *report);
#endif
