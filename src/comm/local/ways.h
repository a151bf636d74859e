/* Which way local collectives move data: sizes and copy kernels that suit the processor. One table
 * for a world, in its shared header, so that all ranks choose alike. No choice changes a result:
 * sums follow one tree whichever way is taken.
 *
 * Written as text, "name=value …", the table goes into the user's cache folder and into
 * qd_comm_config.ways; a text may set any part of it. */
#ifndef QD_COMM_LOCAL_WAYS_H
#define QD_COMM_LOCAL_WAYS_H

#include "comm/copy.h"

#include <quadrille/comm.h>
#include <stddef.h>

/* Bytes of messages are those of the whole message. All members are int64_t: ways.c lists them. */
typedef struct qd_local_ways {
    /* Results bypass the caches when the buffers of an operation, those of all ranks together, have
     * at least stream_bytes and its message at least stream_from; -1: by kind (collective.c). */
    int64_t stream_bytes, stream_from;
    int64_t stream_copy;  /* qd_copy_way of such results */
    int64_t far_copy;     /* and of messages from far_bytes on, or whose source is in no cache */
    int64_t far_bytes;
    int64_t common_from;  /* what a rank sends to others in an all-to-all whose chunks any rank copies */
    int64_t pass_from;    /* messages that take one pass between shared buffers; smaller ones, and direct all-reduces, go
                             through the lanes */
    int64_t rooted_from;  /* instead of pass_from for a gather or scatter, where no more ranks than cores run */
    int64_t placed_from;  /* the same for what a rank sends in an all-to-all, where no more ranks than cores run */
    int64_t reach_from;   /* ordinary memory of processes: messages that go by system call, … */
    int64_t reach_most;   /* … up to this size; larger ones through the ring. -1: by kind (collective.c) */
    int64_t send_placed_from, send_reach_from; /* the same for send and receive */
    int64_t send_share_from;                   /* messages that both sides copy */
} qd_local_ways;

/* For a machine that was not measured. */
qd_local_ways qd_local_ways_default(void);
/* Overwrites what the text sets. QD_USAGE names an unknown name or a value out of range; then
 * `ways` is unchanged. text NULL or empty: nothing happens. */
qd_status qd_local_ways_read(const char *text, qd_local_ways *ways);
/* size: QD_LOCAL_WAYS_MOST is enough. */
void qd_local_ways_write(const qd_local_ways *ways, char *text, size_t size);
/* A number that differs between tables and between versions of this table. */
uint64_t qd_local_ways_mark(const qd_local_ways *ways);

/* How to write the results of an operation with buffers of `touched` bytes in all. from: the limit
 * of its kind. */
static inline qd_copy_way qd_local_ways_copy(const qd_local_ways *ways, int64_t message, int64_t from, int64_t touched)
{
    if (touched < ways->stream_bytes || message < (ways->stream_from >= 0 ? ways->stream_from : from)) return QD_COPY_NEAR;
    return (qd_copy_way)(message < ways->far_bytes ? ways->stream_copy : ways->far_copy);
}

#endif
