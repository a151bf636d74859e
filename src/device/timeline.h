/* When pieces of a stream's work began and ended. Asynchronous devices record a pair of events per
 * piece, read once all work has completed; on the CPU the clock is used. */
#ifndef QD_DEVICE_TIMELINE_H
#define QD_DEVICE_TIMELINE_H

#include "device/device.h"

typedef struct qd_timeline qd_timeline;

qd_status qd_timeline_create(qd_stream *stream, qd_timeline **timeline);
void qd_timeline_destroy(qd_timeline *timeline); /* NULL is legal */

/* Waits until the stream is idle and relates its times to the clock. Call it before the first piece
 * and after each collect. reference (may be NULL): a timeline of another stream of the device that
 * was started earlier. Times of both are then comparable to the resolution of the device's events;
 * without it, they are off by the time in which the host wakes up. */
qd_status qd_timeline_start(qd_timeline *timeline, const qd_timeline *reference);

/* id is the caller's. Pieces may nest, and several threads may record them. */
qd_status qd_timeline_begin(qd_timeline *timeline, int id, int *piece);
qd_status qd_timeline_end(qd_timeline *timeline, int piece);

/* Waits for the stream, calls visit for every piece (seconds of qd_clock_now) and clears them. */
typedef void (*qd_timeline_visitor)(void *context, int id, double begin, double end);
qd_status qd_timeline_collect(qd_timeline *timeline, qd_timeline_visitor visit, void *context);
#endif
