/* The dpo.* options: the loss of runs on preferences (data.format=preferences). */
#include "spec/config/config.h"

#include <string.h>

static const qd_preference_kind kinds[] = {QD_PREFERENCE_SIGMOID, QD_PREFERENCE_ROBUST, QD_PREFERENCE_HINGE, QD_PREFERENCE_IPO};

qd_status qd_preference_resolve(const qd_options *o, qd_config *c)
{
    const qd_preference own = {.kind = kinds[qd_options_enum(o, "dpo.loss")], .beta = qd_options_float(o, "dpo.beta"),
                               .smoothing = qd_options_float(o, "dpo.label_smoothing")};
    qd_preference *p = &c->strategy.preference;
    *p = c->data.pairs ? own : (qd_preference){0};
    if (!c->data.pairs) { /* the configuration of a run states all keys, with their defaults */
        const char *set = own.kind != kinds[0]   ? "dpo.loss"
                          : own.beta != 0.1      ? "dpo.beta"
                          : own.smoothing != 0.0 ? "dpo.label_smoothing"
                                                 : NULL;
        return set ? QD_FAIL(QD_USAGE, "%s has no effect without data.format=preferences", set) : QD_OK;
    }
    if (p->smoothing > 0.0 && p->kind != QD_PREFERENCE_SIGMOID && p->kind != QD_PREFERENCE_ROBUST)
        return QD_FAIL(QD_USAGE, "dpo.label_smoothing has no effect on dpo.loss=%s: set it to 0", qd_options_string(o, "dpo.loss"));
    if (qd_model_ahead(&c->model) > 0)
        return QD_FAIL(QD_UNSUPPORTED, "data.format=preferences does not train model.mtp_modules: set it to 0");
    /* The update multiplies gradients by tokens per pair, those of auxiliary losses too. */
    const char *extra = c->model.moe.experts == 0      ? NULL
                        : c->model.moe.aux_loss > 0.0 ? "model.aux_loss"
                        : c->model.moe.z_loss > 0.0   ? "model.z_loss"
                                                      : NULL;
    if (extra)
        return QD_FAIL(QD_UNSUPPORTED, "data.format=preferences: losses are means over pairs, and %s is a mean over tokens: set it to 0",
                       extra);
    if (c->model.position == QD_POSITION_LEARNED)
        return QD_FAIL(QD_UNSUPPORTED, "data.format=preferences packs two completions into a sequence, and learned positions "
                                       "count from its start: only models with rotary positions are supported");
    return QD_OK;
}
