/* memory.json of a run folder: the measured memory of each rank, next to what was planned. */
#ifndef QD_TRAIN_RUN_RUN_MEMORY_H
#define QD_TRAIN_RUN_RUN_MEMORY_H

#include <quadrille/comm.h>

typedef struct qd_run_memory {
    int64_t allocated; /* bytes that the rank has allocated from its device */
    int64_t host;      /* planned host memory */
    int64_t staging;   /* staging memory shared with other processes and filled by it; not in the plan */
    int64_t resident;  /* peak of its process, without the memory of other ranks that it has mapped */
} qd_run_memory;

/* Collective over `world`: gathers the figures of all ranks, sets *most to the largest of each, and
 * writes the file on rank 0 unless path is NULL there. */
qd_status qd_run_memory_write(qd_comm *world, qd_run_memory mine, const char *path, qd_run_memory *most);
#endif
