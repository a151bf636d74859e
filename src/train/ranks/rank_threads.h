/* The ranks of a world as threads of this process, which call functions together: what runs with
 * run.ranks_as=threads, sessions, verify and tests stand on. */
#ifndef QD_TRAIN_RANKS_RANK_THREADS_H
#define QD_TRAIN_RANKS_RANK_THREADS_H

#include <quadrille/comm.h>

typedef struct qd_rank_threads qd_rank_threads;

/* Called on the thread of each rank. A rank that fails on its own calls qd_comm_abort(), or the
 * others wait for it. */
typedef qd_status (*qd_rank_function)(void *context, qd_comm *world);

/* Starts the threads, which join a local world. */
qd_status qd_rank_threads_create(int size, const qd_comm_config *config, qd_rank_threads **threads);
/* Waits for no call: none may be under way. NULL is legal. */
void qd_rank_threads_destroy(qd_rank_threads *threads);

/* Calls `function` on every rank's thread and waits for all. Returns the failure of the rank that
 * failed first in cause. Between calls the threads sleep. */
qd_status qd_rank_threads_call(qd_rank_threads *threads, qd_rank_function function, void *context);
/* The same on the thread of rank 0 alone. */
qd_status qd_rank_threads_call_first(qd_rank_threads *threads, qd_rank_function function, void *context);

int qd_rank_threads_size(const qd_rank_threads *threads);
#endif
