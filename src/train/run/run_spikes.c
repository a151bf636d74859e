/* Spikes of a run (train.on_spike): their history, what happens to them, and spikes.jsonl. */
#include "train/run/run_state.h"

#include "base/error.h"
#include "train/record/starts.h"
#include "train/ranks/common.h"

#include <inttypes.h>
#include <stdio.h>

/* Rank 0 reads the history, which it has written. */
qd_status qd_run_spikes_restore(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    qd_spikes *p = &s->spikes;
    qd_run_file path;
    if (!p->norms)
        return QD_OK;
    QD_TRY(qd_run_path(c, "metrics.jsonl", path));
    const bool reads = qd_comm_rank(s->world) == 0 && c->run_dir[0] != '\0';
    p->count = 0;
    QD_TRY(qd_rank_agree(s, reads ? qd_spikes_restore(path, qd_trainer_position(s->trainer).step, p) : QD_OK));
    QD_TRY(qd_comm_broadcast(s->control, &p->count, 1, QD_I64, 0, NULL));
    QD_TRY(qd_comm_broadcast(s->control, p->norms, p->config->window, QD_F64, 0, NULL));
    return qd_comm_broadcast(s->control, p->losses, p->config->window, QD_F64, 0, NULL);
}

qd_status qd_run_spikes_open(qd_rank_run *s)
{
    const qd_config *c = &s->run->config;
    QD_TRY(qd_rank_agree(s, qd_spikes_open(&c->spikes, &s->spikes)));
    return c->resume ? qd_run_spikes_restore(s) : QD_OK;
}

/* A journal that cannot be written is a warning. Rank 0. */
static void record(qd_rank_run *s, const qd_step_output *output, int64_t back_to)
{
    const qd_config *c = &s->run->config;
    const qd_position at = qd_trainer_position(s->trainer);
    qd_run_file path;
    if (!s->metrics)
        return;
    const qd_spike_record line = {.step = at.step, .first_sample = at.next_sample - c->global_batch, .samples = c->global_batch,
                                  .back_to = back_to, .loss = output->loss, .norm = output->grad_norm,
                                  .limits = qd_spikes_limits(&s->spikes)};
    if (qd_run_path(c, "spikes.jsonl", path) == QD_OK && qd_spikes_write(path, &line) == QD_OK)
        return;
    qd_rank_note(s, qd_error_message());
    qd_error_clear();
}

/* The state of the last checkpoint, with the batches that come after the spike: those in between
 * are left out, because one of them, or all of them together, led there. */
static qd_status go_back(qd_rank_run *s, const char *why)
{
    enum { MOST = 20 };
    const qd_config *c = &s->run->config;
    const qd_position spike = qd_trainer_position(s->trainer);
    const int64_t kept = s->kept;
    const int rollbacks = s->rollbacks + 1;
    qd_run_file root, folder, path;
    char text[320];
    bool begun;
    if (rollbacks > MOST)
        return QD_FAIL(QD_NOT_FINITE, "step %lld: %s; the run has gone back to the checkpoint of step %lld %d times", (long long)spike.step,
                       why, (long long)kept, MOST);
    QD_TRY(qd_run_path(c, "checkpoints", root));
    if (snprintf(folder, sizeof folder, "%.*s/step-%012" PRId64, PATH_MAX - 40, root, kept) >= (int)sizeof folder)
        return QD_FAIL(QD_USAGE, "run.dir is too long");
    snprintf(text, sizeof text, "step %lld: %s; %lld sequences are left out", (long long)spike.step, why,
             (long long)(spike.step - kept) * (long long)c->global_batch);
    qd_rank_note(s, text);
    QD_TRY(qd_run_load(s, folder, &begun));
    qd_trainer_set_position(s->trainer, (qd_position){kept, spike.next_sample});
    s->kept = s->saving = kept;
    s->rollbacks = rollbacks;
    QD_TRY(qd_run_path(c, "starts.jsonl", path));
    return qd_rank_agree(s, s->metrics ? qd_starts_note(path, kept, qd_trainer_program(s->trainer)) : QD_OK);
}

qd_status qd_run_spike(qd_rank_run *s, const qd_step_output *output, bool *went_back)
{
    const qd_spike_action action = s->spikes.config->action;
    const int64_t step = qd_trainer_position(s->trainer).step;
    char why[160];
    *went_back = false;
    qd_spikes_describe(&s->spikes, output, why, sizeof why);
    if (action == QD_SPIKE_ROLLBACK)
        QD_TRY(qd_rank_run_settle(s)); /* the checkpoint that is being written may be the one to go back to */
    const bool back = action == QD_SPIKE_ROLLBACK && s->kept >= 0;
    record(s, output, back ? s->kept : -1);
    if (action == QD_SPIKE_STOP) { /* a resumed run begins with this step */
        const qd_position at = qd_trainer_position(s->trainer);
        qd_trainer_set_position(s->trainer, (qd_position){step - 1, at.next_sample - s->run->config.global_batch});
        return QD_FAIL(QD_NOT_FINITE, "step %lld: %s; the weights are those of step %lld", (long long)step, why, (long long)(step - 1));
    }
    if (!back)
        return QD_OK;
    *went_back = true;
    return go_back(s, why);
}
