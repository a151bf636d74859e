/* Large blocks of ordinary memory. */
#ifndef QD_BASE_MEMORY_H
#define QD_BASE_MEMORY_H

#include <stdint.h>

#define QD_HUGE_PAGE ((int64_t)2 << 20)

/* Zeroed memory, aligned to 64 bytes, or NULL; given back with free(). Large blocks start at a huge
 * page and ask for huge pages as far as they fill them: products walk through long rows and would
 * miss the TLB at every row. What is not filled stays on small pages, so nothing more than `bytes`
 * becomes resident. */
void *qd_memory_take(int64_t bytes);

#endif
