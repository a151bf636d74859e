/* Copies of message data, through the caches or with non-temporal stores, for the backends. */
#ifndef QD_COMM_COPY_H
#define QD_COMM_COPY_H

#include <stdint.h>

/* How message data is written. */
typedef enum qd_copy_way {
    QD_COPY_NEAR, /* through the caches */
    QD_COPY_PAST, /* non-temporal stores: large messages, whose results are not read soon */
    QD_COPY_FAR   /* the same, for messages beyond the reach of the TLB or whose source is in no cache */
} qd_copy_way;
/* The way for a message of this size, where `past_from` bytes and more bypass the caches. */
static inline qd_copy_way qd_comm_copy_way(int64_t message_bytes, int64_t past_from)
{
    return message_bytes < past_from ? QD_COPY_NEAR : message_bytes < 8 << 20 ? QD_COPY_PAST : QD_COPY_FAR;
}

/* memcpy. */
void qd_comm_copy(void *to, const void *from, int64_t bytes, qd_copy_way way);
/* Copies to `count` destinations. */
void qd_comm_spread(void *const *to, int count, const void *from, int64_t bytes, qd_copy_way way);
#define QD_COMM_STREAM_BYTES (1 << 20) /* own parts of this size and more bypass the caches */

#endif
