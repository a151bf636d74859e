/* Searches for faster GEMM algorithms between the first steps of a run. The search before the first
 * step has a time limit (run.tuning_seconds), so that training begins soon; what it leaves is found
 * here, one GEMM at a time, when the rest of the run is long enough to gain from it. */
#include "train/run/run_state.h"

#include "base/clock.h"

#include <stdio.h>

/* Searches take 10 to 30 s in all and gain 0 to 3 % of a step. */
static const double worth_seconds = 300;
/* At most this share of the time since the first search is spent on searching. */
static const double share = 0.5;

bool qd_run_tuning_due(qd_rank_run *s, int64_t step, double step_seconds)
{
    enum { SETTLED = 2 }; /* steps of this process after which their time is known */
    qd_run_tuning *t = &s->tuning;
    const qd_config *c = &s->run->config;
    const double now = qd_clock_now();
    if (t->done || qd_comm_rank(s->control) != 0 || qd_device_get_caps(qd_trainer_device(s->trainer))->host_memory)
        return false;
    if (++t->steps < SETTLED || (double)(c->steps - step) * step_seconds < worth_seconds)
        return false;
    t->begin = t->searches == 0 ? now : t->begin;
    return t->seconds <= share * (now - t->begin);
}

qd_status qd_run_tune_more(qd_rank_run *s)
{
    qd_run_tuning *t = &s->tuning;
    int left = 0;
    const double from = qd_clock_now();
    QD_TRY(qd_trainer_tune_more(s->trainer, &left));
    t->seconds += qd_clock_now() - from;
    t->searches++;
    t->done = left == 0;
    if (!t->done || qd_comm_rank(s->control) != 0)
        return QD_OK;
    char text[128];
    snprintf(text, sizeof text, "all GEMMs are tuned: %d searches between steps took %.1f s", t->searches, t->seconds);
    qd_rank_note(s, text);
    return QD_OK;
}
