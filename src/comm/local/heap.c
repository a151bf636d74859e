/* Memory of a rank that other processes reach by address: its part of the world's file, which all
 * ranks have mapped. The file is sparse, so a part as large as the machine's memory uses address
 * space only. Ranks exchange offsets in the file. Ranks as threads share all memory and do not need
 * this, except under no_remote_reads. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* madvise */
#endif
#include "comm/local/local_impl.h"

#include "base/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25 /* Linux 6.1 */
#endif

static char *own_part(const qd_local_rank_world *view, int rank)
{
    return (char *)view->header + view->header->heap_at + rank * view->header->heap_bytes;
}

/* First fit: finds `bytes` bytes between the allocated ranges, which are sorted. Returns the index
 * of the next range, or -1. */
static int find_gap(const qd_local_heap *heap, int64_t whole, int64_t bytes, int64_t alignment, int64_t *begin)
{
    int64_t at = 0;
    for (int i = 0; i <= heap->count; i++) {
        int64_t end = i < heap->count ? heap->ranges[i].begin : whole;
        if (end - at >= bytes) {
            *begin = at;
            return i;
        }
        if (i < heap->count) at = qd_local_round_up(heap->ranges[i].begin + heap->ranges[i].bytes, alignment);
    }
    return -1;
}

static qd_status no_room(int64_t bytes, int64_t whole)
{
    return QD_FAIL(QD_NO_MEMORY, "%lld bytes do not fit into the %lld bytes of memory that a local rank can share",
                   (long long)bytes, (long long)whole);
}

static qd_status take(qd_local_heap *heap, int64_t whole, int64_t page, int64_t bytes, int64_t *begin)
{
    int64_t alignment = bytes >= 2 * QD_HUGE_PAGE ? QD_HUGE_PAGE : page;
    if (heap->count == heap->room) {
        int room = heap->room ? 2 * heap->room : 16;
        qd_local_range *grown = realloc(heap->ranges, (size_t)room * sizeof *grown);
        if (!grown) return QD_FAIL(QD_NO_MEMORY, "no memory for the table of shared memory");
        heap->ranges = grown;
        heap->room = room;
    }
    int index = find_gap(heap, whole, bytes, alignment, begin);
    if (index < 0) return no_room(bytes, whole);
    memmove(heap->ranges + index + 1, heap->ranges + index, (size_t)(heap->count - index) * sizeof *heap->ranges);
    heap->ranges[index] = (qd_local_range){*begin, bytes};
    heap->count++;
    return QD_OK;
}

qd_status qd_local_heap_alloc(qd_world *world, int64_t bytes, void **memory)
{
    qd_local_rank_world *view = world->backend_data;
    *memory = NULL;
    if (view->all_reached || view->header->heap_bytes == 0) return QD_OK; /* plain memory */
    int64_t begin = 0, whole = view->header->heap_bytes;
    if (bytes > whole) return no_room(bytes, whole);
    /* Whole pages (not always 4 KiB): freeing part of a page would free its neighbours' data
     * too. */
    int64_t page = view->header->page, pages = qd_local_round_up(bytes > 0 ? bytes : 1, page);
    pthread_mutex_lock(&view->heap.lock);
    qd_status status = take(&view->heap, whole, page, pages, &begin);
    pthread_mutex_unlock(&view->heap.lock);
    QD_TRY(status);
    char *at = own_part(view, world->rank) + begin;
#ifdef MADV_HUGEPAGE
    /* For systems that use huge pages for shared memory on request. */
    if (pages >= 2 * QD_HUGE_PAGE) (void)madvise(at, (size_t)(pages / QD_HUGE_PAGE * QD_HUGE_PAGE), MADV_HUGEPAGE);
#endif
    /* Allocate the pages now: lack of memory is then an error here and not a signal later. */
    if (madvise(at, (size_t)pages, MADV_POPULATE_WRITE) != 0) {
        if (errno != EINVAL) {
            int error = errno;
            (void)qd_local_heap_free(world, at);
            return QD_FAIL(QD_NO_MEMORY, "no memory for a shared buffer of %lld bytes: %s", (long long)bytes,
                           strerror(error));
        }
        memset(at, 0, (size_t)pages);
    }
    /* Some systems form huge pages in shared memory only on this request. Only whole huge pages; a
     * failure is ignored, the memory then keeps small pages. */
    if (pages >= 2 * QD_HUGE_PAGE) (void)madvise(at, (size_t)(pages / QD_HUGE_PAGE * QD_HUGE_PAGE), MADV_COLLAPSE);
    *memory = at;
    return QD_OK;
}

bool qd_local_heap_free(qd_world *world, void *memory)
{
    qd_local_rank_world *view = world->backend_data;
    if (view->all_reached) return false;
    int64_t begin = (char *)memory - own_part(view, world->rank);
    bool found = false;
    pthread_mutex_lock(&view->heap.lock);
    for (int i = 0; i < view->heap.count && !found; i++) {
        if (view->heap.ranges[i].begin != begin) continue;
        found = true;
        /* Zero it for the next owner. The kernel may refuse the advice, and emulators report
         * success without acting on it. */
        size_t bytes = (size_t)view->heap.ranges[i].bytes;
        if (madvise(memory, bytes, MADV_REMOVE) != 0 || qd_local_filled(memory, (char *)memory + 1) > 0) memset(memory, 0, bytes);
        memmove(view->heap.ranges + i, view->heap.ranges + i + 1,
                (size_t)(--view->heap.count - i) * sizeof *view->heap.ranges);
    }
    pthread_mutex_unlock(&view->heap.lock);
    return found;
}

int64_t qd_local_place(const qd_local_group *group, const void *memory)
{
    intptr_t at = (intptr_t)memory - (intptr_t)group->header;
    if (group->view->all_reached || !memory) return at;
    return at >= group->header->heap_at && at < group->header->total_bytes ? at : QD_LOCAL_NOWHERE;
}
