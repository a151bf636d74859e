/* Copying, as the backends do it. */
#ifndef QD_COMM_COPY_H
#define QD_COMM_COPY_H

#include <stdint.h>

/* How what belongs to a message is written. */
typedef enum qd_copy_way {
    QD_COPY_NEAR, /* through the caches */
    QD_COPY_PAST, /* past them: large messages, whose results are not read again soon */
    QD_COPY_FAR   /* the same for messages that the TLB does not cover, or whose source lies in memory, not in any cache */
} qd_copy_way;
/* For a message of which `past_from` bytes and more are written past the caches. */
static inline qd_copy_way qd_comm_copy_way(int64_t message_bytes, int64_t past_from)
{
    return message_bytes < past_from ? QD_COPY_NEAR : message_bytes < 8 << 20 ? QD_COPY_PAST : QD_COPY_FAR;
}

/* memcpy. */
void qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way);
/* The same to `count` places. */
void qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way);
#define QD_COMM_STREAM_BYTES (1 << 20) /* own parts from this size on are written past the caches */

#endif
