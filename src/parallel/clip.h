/* QK-Clip: the largest attention scores of heads, and the rescaling of their weights. In host
 * memory: the program refuses it on other devices. */
#ifndef QD_PARALLEL_CLIP_H
#define QD_PARALLEL_CLIP_H

#include "parallel/bind.h"

/* Where attention notes the scores of this rank's heads in a module; NULL: nowhere. */
float *qd_clip_scores(const qd_bound *bound, int module);
/* The largest score of all heads, 0 without any: after MAXIMA. */
double qd_clip_largest(const qd_bound *bound);
/* MAXIMA; collective over its group. */
qd_status qd_clip_exchange(const qd_bound *bound, const qd_action *action);
/* CLIP: rescales what this rank owns of a module's query and key weights. limit: train.qk_clip. */
void qd_clip_module(const qd_bound *bound, const qd_action *action, double limit);
#endif
