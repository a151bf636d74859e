/* memory.json in a run's folder: what each rank took, measured, beside what the accountant
 * planned. */
#ifndef QD_TRAIN_RUN_RUN_MEMORY_H
#define QD_TRAIN_RUN_RUN_MEMORY_H

#include <quadrille/comm.h>

typedef struct qd_run_memory {
    int64_t allocated; /* bytes that the rank holds from its device */
    int64_t host;      /* in host memory, by plan */
    int64_t staging;   /* shared with other processes and filled by it, beside the plan */
    int64_t resident;  /* peak of its process, without memory that other ranks share with it */
} qd_run_memory;

/* Collective over `world`: gathers the figures of all ranks, sets *most to the largest of each, and
 * writes the file on rank 0 unless path is NULL, there. */
qd_status qd_run_memory_write(qd_comm *world, qd_run_memory mine, const char *path, qd_run_memory *most);
#endif
