/* Copying, as the backends do it. */
#ifndef QD_COMM_COPY_H
#define QD_COMM_COPY_H

#include <stdbool.h>
#include <stdint.h>

/* memcpy. Past the caches when `large`: for results of huge messages, which are not read again soon. */
void qd_comm_copy(void *to, const void *from, int64_t bytes, bool large);
#define QD_COMM_STREAM_BYTES (1 << 20) /* own parts from this size on are large */

#endif
