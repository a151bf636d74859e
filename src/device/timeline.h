/* When pieces of a stream's work began and ended. On devices that compute later than they are
 * asked, a pair of events per piece, read when all has run; elsewhere the clock. */
#ifndef QD_DEVICE_TIMELINE_H
#define QD_DEVICE_TIMELINE_H

#include "device/device.h"

typedef struct qd_timeline qd_timeline;

qd_status qd_timeline_create(qd_stream *stream, qd_timeline **timeline);
void qd_timeline_destroy(qd_timeline *timeline); /* NULL is legal */

/* The stream is idle for a moment: from here on its times are those of the clock. Before the first
 * piece, and after each collect. beside (NULL: none): a timeline of another stream of the device
 * that was started before. Times of the two can be compared to the resolution of the device's
 * events; times that were told by the clock alone are off by what the host needs to wake up. */
qd_status qd_timeline_start(qd_timeline *timeline, const qd_timeline *beside);

/* A piece with a number of the caller's. Pieces may contain others, and may come from several
 * threads. */
qd_status qd_timeline_begin(qd_timeline *timeline, int id, int *piece);
qd_status qd_timeline_end(qd_timeline *timeline, int piece);

/* Waits for the stream, tells every piece (seconds of qd_clock_now), and forgets them. */
typedef void (*qd_timeline_visitor)(void *context, int id, double begin, double end);
qd_status qd_timeline_collect(qd_timeline *timeline, qd_timeline_visitor visit, void *context);
#endif
