/* Allocation of large blocks of host memory, on huge pages where possible. */
#ifndef QD_BASE_MEMORY_H
#define QD_BASE_MEMORY_H

#include <stdint.h>

#define QD_HUGE_PAGE ((int64_t)2 << 20)

/* Zeroed memory, aligned to 64 bytes, or NULL; released with free(). A large block starts at a huge
 * page and requests huge pages for all it fills completely: GEMMs stride over long rows and would
 * miss the TLB at every row. The remainder stays on small pages, so no more than `bytes` become
 * resident. */
void *qd_memory_take(int64_t bytes);

#endif
