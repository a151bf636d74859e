/* The memory of this process as the kernel reports it: an independent check of the planned
 * figures. */
#ifndef QD_TRAIN_RUN_FOOTPRINT_H
#define QD_TRAIN_RUN_FOOTPRINT_H

#include <quadrille/status.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct qd_footprint {
    int64_t resident;  /* now */
    int64_t peak;      /* highest since the process started or qd_footprint_reset_peak() */
    int64_t anonymous; /* of resident: heap, stacks, private mappings */
    int64_t file;      /* of resident: program, libraries, mapped files */
    int64_t shared;    /* of resident: shared segments */
} qd_footprint;

qd_status qd_footprint_read(qd_footprint *footprint);
/* Restarts the peak from what is resident now. False where the system does not allow it. */
bool qd_footprint_reset_peak(void);
#endif
