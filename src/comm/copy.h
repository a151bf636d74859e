/* Copies of message data, through the caches or with non-temporal stores, for the backends. */
#ifndef QD_COMM_COPY_H
#define QD_COMM_COPY_H

#include <stdint.h>

/* How message data is written. */
typedef enum qd_copy_way {
    QD_COPY_NEAR,  /* through the caches */
    /* Non-temporal stores, for large messages, whose results are not read soon. Which of the three
     * is fastest depends on the processor. */
    QD_COPY_PAGE,  /* page by page, with software prefetch */
    QD_COPY_PAGES, /* two pages alternately, so that TLB misses overlap */
    QD_COPY_LINES, /* without software prefetch */
    QD_COPY_WAYS
} qd_copy_way;

/* memcpy. */
void qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way);
/* Copies to `count` destinations. */
void qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way);

#endif
