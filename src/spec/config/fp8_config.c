/* The fp8.* options: what has no effect, and what fp8 does not support. */
#include "spec/config/config.h"

#include <string.h>

qd_status qd_fp8_resolve(const qd_options *o, qd_config *c)
{
    const char *keep = qd_options_string(o, "fp8.keep");
    if (strlen(keep) >= sizeof c->strategy.fp8.keep)
        return QD_FAIL(QD_USAGE, "fp8.keep is longer than %zu characters", sizeof c->strategy.fp8.keep - 1);
    memcpy(c->strategy.fp8.keep, keep, strlen(keep) + 1);
    /* The configuration of a run states all keys, with their defaults. */
    const char *off = c->strategy.fp8.grad != QD_F8E5M2                ? "fp8.grad=e5m2"
                      : c->strategy.fp8.recipe != QD_FP8_RECIPE_TENSOR ? "fp8.recipe=tensor"
                      : c->strategy.fp8.weights != QD_FP8_WEIGHTS_AUTO ? "fp8.weights=auto"
                      : keep[0] != '\0'                                ? "fp8.keep="
                                                                       : NULL;
    if (off && !c->strategy.fp8.on)
        return QD_FAIL(QD_USAGE, "%.*s has no effect without train.precision=fp8: set that, or %s", (int)strcspn(off, "="), off, off);
    if (c->strategy.fp8.on && c->strategy.tensor_pieces > 1)
        return QD_FAIL(QD_UNSUPPORTED, "train.precision=fp8: GEMMs are not cut into pieces: remove parallel.tp_overlap");
    if (c->strategy.fp8.on && strcmp(qd_options_string(o, "data.format"), "preferences") == 0)
        return QD_FAIL(QD_UNSUPPORTED, "train.precision=fp8: the reference model of data.format=preferences computes in bf16, and both "
                                       "must alike: use train.precision=bf16");
    return QD_OK;
}

/* Whether the word names a linear layer of a block, or several. */
static bool names_a_layer(const qd_ledger *l, const char *word)
{
    for (int i = 0; i < l->param_count; i++) {
        const qd_param *p = &l->params[i];
        const qd_module *m = &l->modules[p->module];
        if (m->layer >= 0 && p->expert < 0 && p->shape[1] > 0 && qd_fp8_names(word, l->decls[m->decl].params[i - m->param_begin].suffix))
            return true;
    }
    return false;
}

qd_status qd_fp8_check_layers(const qd_config *c, const qd_ledger *ledger)
{
    char word[64];
    for (const char *at = c->strategy.fp8.on ? c->strategy.fp8.keep : ""; *at;) {
        size_t length = strcspn(at, ", "), kept = length < sizeof word ? length : sizeof word - 1;
        memcpy(word, at, kept);
        word[kept] = '\0';
        if (length > 0 && !names_a_layer(ledger, word))
            return QD_FAIL(QD_USAGE, "fp8.keep: no linear layer of the model's blocks is named '%s'; names are such as attn, attn.q, "
                                     "mlp.up and mlp.down", word);
        at += length;
        at += strspn(at, ", ");
    }
    return QD_OK;
}
