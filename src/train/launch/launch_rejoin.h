/* A rank of a world that no launcher of ours has started, and no MPI connects (environment.h),
 * with run.restarts: when another rank is lost, it leaves the world, keeps its process and its
 * state, and meets the others again where they met first. The process of the lost rank returns in
 * some other way, such as a pod that is restarted.
 *
 * All ranks judge the failure in the same way, from what all of them know of it; rank 0 keeps the
 * journal. A rank that has failed without dying comes too, without its state. */
#ifndef QD_TRAIN_LAUNCH_REJOIN_H
#define QD_TRAIN_LAUNCH_REJOIN_H

#include "train/launch/launch_journal.h"

typedef struct qd_rejoin qd_rejoin;

/* ranks: WORLD_SIZE. run: complete but for its configuration, which the functions below set.
 * observer: of rank 0. Both outlive it. */
qd_status qd_rejoin_create(qd_run *run, int rank, int ranks, const qd_train_observer *observer, qd_rejoin **rejoin);
/* status: how the run has ended; ranks that wait learn of it. NULL is legal. */
void qd_rejoin_destroy(qd_rejoin *rejoin, qd_status status);
qd_journal *qd_rejoin_journal(qd_rejoin *rejoin);

/* A new process, before it joins the others: qd_run_plan() in the layout for all ranks. */
qd_status qd_rejoin_plan(qd_rejoin *rejoin, qd_run_summary *summary);
/* How it is to join the others. */
void qd_rejoin_how(qd_rejoin *rejoin, qd_comm_join *how);
/* It could not join them, with *status. True: it is to try again; false: the run ends with what is
 * now in *status and the error record. */
bool qd_rejoin_tries(qd_rejoin *rejoin, qd_status *status);

/* Collective, once the ranks have met. A new process that was started with run.resume takes the
 * configuration of those that stay, if there are any; one that no layout has used takes that of
 * rank 0 if none stays. *first: the lowest of those that stay; 0: none. */
qd_status qd_rejoin_settle(qd_rejoin *rejoin, qd_comm *world, int *first);
/* Collective, in place of qd_config_resolve(): options and configuration of the run, the state to
 * start with, and the line of the journal. *agreed: the run ends with the
 * returned status, of which all ranks know. *complete: there is nothing left to do. *narrows: the
 * ranks are to leave this world and to meet again, fewer than they are. */
qd_status qd_rejoin_agree(qd_rejoin *rejoin, qd_comm *world, bool *agreed, bool *complete, bool *narrows);

/* Collective: all ranks know of a failure, before anything was done in `world`. True: it concerns
 * processes that are new in a run that others continue: those end with *status, the others leave
 * the world in order and meet *again. */
bool qd_rejoin_parts(qd_rejoin *rejoin, qd_comm *world, qd_status *status, bool *again);

/* All ranks have agreed that the run may use its folder. */
void qd_rejoin_begun(qd_rejoin *rejoin);

/* This rank rests, because the number of ranks is to change: it is to join the others again. Takes
 * both over. */
void qd_rejoin_pauses(qd_rejoin *rejoin, qd_comm *world, qd_kept *kept);
/* This rank has failed in `world`, which it passes on together with what it keeps (NULL: nothing).
 * True: it is to join the others again. False: the run ends with *status. */
bool qd_rejoin_rests(qd_rejoin *rejoin, qd_comm *world, qd_kept *kept, qd_status *status);
/* Whether this process was in an earlier world of the run. */
bool qd_rejoin_stayed(const qd_rejoin *rejoin);
#endif
