/* The train.on_spike and train.spike_* options. */
#include "spec/config/config.h"

qd_status qd_spikes_resolve(const qd_options *o, qd_config *c)
{
    const qd_spike_config s = {.action = (qd_spike_action)qd_options_enum(o, "train.on_spike"),
                               .norm = qd_options_float(o, "train.spike_norm"),
                               .loss = qd_options_float(o, "train.spike_loss"),
                               .window = qd_options_int(o, "train.spike_window")};
    c->spikes = s;
    if (s.action != QD_SPIKE_IGNORE && s.norm == 0.0 && s.loss == 0.0)
        return QD_FAIL(QD_USAGE, "train.on_spike has no effect without limits: set train.spike_norm or train.spike_loss");
    if (s.norm > 0.0 && s.norm < 1.0)
        return QD_FAIL(QD_USAGE, "train.spike_norm is %g: half of all steps have a larger norm than their median, so it must be at least 1",
                       s.norm);
    if (s.action != QD_SPIKE_ROLLBACK)
        return QD_OK;
    if (c->run_dir[0] == '\0' || !c->save)
        return QD_FAIL(QD_USAGE, "train.on_spike=rollback continues from checkpoints: it needs run.dir, and run.save must not be false");
    if (qd_config_by_epochs(o))
        return QD_FAIL(QD_USAGE, "train.on_spike=rollback leaves batches out, and train.epochs promises each sample: set train.steps, or "
                                 "train.on_spike=skip");
    return QD_OK;
}
