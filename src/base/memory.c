/* Large allocations on huge pages. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include "base/memory.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

void *qd_memory_take(int64_t bytes)
{
    bool large = bytes >= 2 * QD_HUGE_PAGE;
    size_t alignment = large ? QD_HUGE_PAGE : 64;
    if (bytes < 0 || bytes > INT64_MAX - QD_HUGE_PAGE)
        return NULL;
    void *address = aligned_alloc(alignment, ((size_t)bytes + alignment - 1) / alignment * alignment);
    if (!address)
        return NULL;
#ifdef MADV_HUGEPAGE
    if (large)
        (void)madvise(address, (size_t)(bytes / QD_HUGE_PAGE * QD_HUGE_PAGE), MADV_HUGEPAGE);
#endif
    memset(address, 0, (size_t)bytes);
    return address;
}
