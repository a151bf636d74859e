/* Moves Muon's matrices between the ranks that hold their rows and the ranks that orthogonalize
 * them; see spec/program/muon.h. */
#ifndef QD_PARALLEL_MATRICES_H
#define QD_PARALLEL_MATRICES_H

#include "parallel/bind.h"

/* COLLECT, HAND_BACK and SHARE. Collective over the action's group; work as in quadrille/comm.h. */
qd_status qd_matrices_collect(qd_bound *bound, const qd_action *action, qd_work **work);
qd_status qd_matrices_hand_back(qd_bound *bound, const qd_action *action, qd_work **work);
qd_status qd_matrices_share(qd_bound *bound, const qd_action *action, qd_work **work);

/* The address at which SHARE and UPDATE_MATRICES find this rank's box of a result. */
qd_status qd_matrices_result(const qd_bound *bound, const qd_action *action, int matrix, void **data);
#endif
