/* QK-Clip: the largest attention scores of heads (src/train/exec/update.c rescales their
 * weights). */
#ifndef QD_PARALLEL_CLIP_H
#define QD_PARALLEL_CLIP_H

#include "parallel/bind.h"

/* Where attention notes the scores of this rank's heads in a module; NULL: nowhere. */
float *qd_clip_scores(const qd_bound *bound, int module);
/* A host copy of the scores of all heads, to be freed with qd_host_free, and its contents, ordered
 * on the stream. NULL: the step has none. */
qd_status qd_clip_host_scores(const qd_bound *bound, float **scores);
qd_status qd_clip_copy_scores(const qd_bound *bound, qd_stream *stream, float *scores);
/* The largest of such a copy; 0 without any. */
double qd_clip_largest(const qd_program *program, const float *scores);
/* MAXIMA; collective over its group. */
qd_status qd_clip_exchange_scores(const qd_bound *bound, const qd_action *action);
#endif
