/* A run that outlives its world: what a rank keeps when other ranks are lost or their number
 * changes, and how it continues in the next world. */
#include "train/run/run_state.h"

#include "base/error.h"
#include "comm/guard.h"
#include "train/ranks/long_work.h"
#include "train/elastic/handover.h"

#include <stdio.h>
#include <stdlib.h>

struct qd_kept {
    qd_rank_run s;
};

/* Ranks that are not to blame for the end of their world. */
static bool stays(const qd_rank_run *s, qd_status status)
{
    if (qd_saver_is_stuck(s->saver))
        return false;
    return status == QD_REMOTE || status == QD_TIMEOUT || (status == QD_SYSTEM && qd_comm_guard_found(s->world)) ||
           (status == QD_OK && s->rests);
}

/* Frees everything but the trainer, what it refers to and what marks its state; releases the
 * folder. */
static void rest(qd_rank_run *s)
{
    qd_saver_abandon(s->saver);
    qd_saver_destroy(s->saver);
    qd_metrics_destroy(s->metrics);
    qd_recorder_destroy(s->recorder);
    qd_samples_destroy(s->samples);
    s->saver = NULL;
    s->metrics = NULL;
    s->recorder = NULL;
    s->samples = NULL;
}

qd_status qd_run_rank(const qd_run *run, qd_comm *world, qd_kept **kept)
{
    qd_kept *k = calloc(1, sizeof *k);
    if (!k)
        return QD_FAIL(QD_NO_MEMORY, "no memory for a rank");
    k->s = qd_rank_run_of(run, world);
    qd_status status = qd_rank_run_live(&k->s);
    if (kept)
        *kept = NULL;
    if (kept && stays(&k->s, status)) {
        rest(&k->s);
        *kept = k;
    } else {
        qd_kept_destroy(k);
    }
    return status;
}

void qd_kept_destroy(qd_kept *kept)
{
    if (!kept)
        return;
    qd_rank_run_close(&kept->s);
    free(kept);
}

/* A step that was skipped is not followed again: what led to it is not known in the next world.
 * GPUs may still be computing for a world that has ended. */
int64_t qd_kept_step(const qd_kept *kept)
{
    const qd_rank_run *s = &kept->s;
    if (!s->started || s->output.torn || !qd_device_get_caps(qd_trainer_device(s->trainer))->host_memory)
        return -1;
    const int64_t step = qd_trainer_position(s->trainer).step;
    return s->followed == step || !s->output.skipped ? step : -1;
}

int64_t qd_kept_last(const qd_kept *kept)
{
    return kept->s.started ? qd_trainer_position(kept->s.trainer).step : -1;
}

qd_status qd_kept_covers(const qd_kept *kept, uint64_t left, bool *complete)
{
    return qd_handover_covers(kept->s.trainer, left, complete);
}

qd_status qd_kept_write(qd_kept *kept, int fd, uint64_t left, bool *complete)
{
    const qd_rank_run *s = &kept->s;
    qd_handover_facts facts = {.position = qd_trainer_position(s->trainer), .kept = s->kept, .saving = s->saving,
                               .followed = s->followed == qd_trainer_position(s->trainer).step, .skipped = s->skipped,
                               .rollbacks = s->rollbacks, .other_validation = s->other_validation, .output = s->output,
                               .seconds = s->seconds};
    snprintf(facts.base, sizeof facts.base, "%s", s->base);
    *complete = false;
    if (s->replicas)
        QD_TRY(qd_replicas_mark(s->replicas, facts.marks));
    return qd_handover_write(fd, s->trainer, left, &facts, complete);
}

/* Each part of the state comes from one rank: if that is the one with a flipped bit, all would get
 * it, and no comparison would find it any more. */
static qd_status check_replicas(const qd_rank_run *s)
{
    const qd_handover *h = s->run->handover;
    if (!qd_handover_differs(h))
        return QD_OK;
    return QD_FAIL(QD_DIFFERENT, "the state after step %lld is not handed over: ranks that hold the same part of it differ there",
                   (long long)qd_handover_get_facts(h)->position.step);
}

static qd_status load(void *state)
{
    const qd_rank_run *s = state;
    return qd_handover_load(s->run->handover, s->trainer);
}

qd_status qd_run_take_over(qd_rank_run *s, qd_position *at)
{
    const qd_handover_facts *facts = qd_handover_get_facts(s->run->handover);
    QD_TRY(qd_rank_agree(s, check_replicas(s)));
    QD_TRY(qd_handover_is_gathered(s->run->handover) ? load(s) : qd_rank_agree(s, qd_long_work_run_all(s->control, load, s)));
    *at = facts->position;
    s->followed = facts->followed ? at->step : at->step - 1;
    qd_trainer_set_position(s->trainer, (qd_position){s->followed, at->next_sample});
    s->kept = facts->kept;
    s->saving = facts->saving;
    s->skipped = facts->skipped;
    s->rollbacks = facts->rollbacks;
    s->other_validation = facts->other_validation != 0;
    s->output = facts->output;
    s->seconds = facts->seconds;
    snprintf(s->base, sizeof s->base, "%s", facts->base);
    return QD_OK;
}

/* A checkpoint that was being written when the world ended is lost: it is written now. */
qd_status qd_run_catch_up(qd_rank_run *s)
{
    if (s->followed < qd_trainer_position(s->trainer).step)
        return qd_rank_run_follow(s);
    s->end.steps = qd_trainer_position(s->trainer).step;
    s->end.loss = s->output.loss;
    return s->saver && s->saving > s->kept ? qd_rank_run_checkpoint(s) : QD_OK;
}
