/* Copies parameters and optimizer state between a trainer and a checkpoint. */
#include "train/exec/state.h"

#include "train/run/saver.h"

#include <stdlib.h>

static const qd_tensor_kind tensor_of[QD_CKPT_KIND_COUNT] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};

qd_status qd_state_save(qd_trainer *t, qd_comm *world, const char *root, const char *config, int keep)
{
    qd_saver *saver;
    qd_save_report report;
    QD_TRY(qd_saver_create(t, world, root, keep, false, &saver));
    qd_status status = qd_saver_begin(saver, config);
    if (status == QD_OK)
        status = qd_saver_poll(saver, true, &report);
    qd_saver_destroy(saver);
    return status != QD_OK || report.state == QD_SAVE_DONE ? status : QD_FAIL(report.status, "%s", report.message);
}

static const qd_param *owner_of(const qd_program *p, int param)
{
    const int tied = p->ledger->params[param].tied_to;
    return &p->ledger->params[tied >= 0 ? tied : param];
}

static qd_status load_param(qd_trainer *t, qd_state_read read, void *context, int param, qd_ckpt_kind kind, float *values)
{
    qd_holding own = qd_trainer_holding(t, param, tensor_of[kind]);
    if (own.count == 0)
        return QD_OK;
    QD_TRY(read(context, owner_of(qd_trainer_program(t), param), kind, &own.box, values));
    return qd_trainer_put(t, param, tensor_of[kind], values);
}

typedef enum extent { WEIGHTS, EVERYTHING, TOGETHER } extent;

/* TOGETHER: of tensors that this rank does not need, `read` gets an empty box. */
static qd_status load(qd_trainer *t, qd_state_read read, qd_state_has has, void *context, extent what)
{
    const bool weights_only = what == WEIGHTS;
    const qd_program *p = qd_trainer_program(t);
    int64_t largest = qd_trainer_largest(t);
    float *values = malloc((size_t)largest * sizeof *values);
    if (!values)
        return QD_FAIL(QD_NO_MEMORY, "no memory to load weights");
    qd_status status = QD_OK;
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT && status == QD_OK; kind++) {
        if (kind != QD_CKPT_VALUE && (weights_only || !qd_trainer_holds(t, tensor_of[kind])))
            continue;
        for (int i = 0; i < p->ledger->param_count && status == QD_OK; i++)
            if (weights_only && p->ledger->params[i].adapter && !(has && has(context, p->ledger->params[i].name)))
                continue;
            else if ((kind == QD_CKPT_VALUE ? qd_storage_has(p->ledger, &p->storage, i) : p->ledger->params[i].tied_to < 0) &&
                     (what != TOGETHER || qd_trainer_holding(t, i, tensor_of[kind]).count > 0))
                status = load_param(t, read, context, i, (qd_ckpt_kind)kind, values);
            else if (what == TOGETHER)
                status = read(context, owner_of(p, i), (qd_ckpt_kind)kind, &(qd_atom){0}, values);
    }
    free(values);
    return status;
}

qd_status qd_state_load_weights(qd_trainer *t, qd_state_read read, qd_state_has has, void *context)
{
    return load(t, read, has, context, WEIGHTS);
}

qd_status qd_state_load_from(qd_trainer *t, qd_state_read read, void *context)
{
    return load(t, read, NULL, context, EVERYTHING);
}

qd_status qd_state_load_together(qd_trainer *t, qd_state_read read, void *context)
{
    return load(t, read, NULL, context, TOGETHER);
}

static qd_status read_checkpoint(void *context, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    return qd_checkpoint_read(context, param, kind, box, out);
}

static bool holds_tensor(void *context, const char *name)
{
    return qd_checkpoint_holds(context, name);
}

qd_status qd_state_load(qd_trainer *t, qd_checkpoint *c, bool weights_only)
{
    const qd_ckpt_meta *meta = qd_checkpoint_meta(c);
    QD_TRY(qd_checkpoint_attach(c, qd_trainer_program(t)->ledger));
    QD_TRY(load(t, read_checkpoint, holds_tensor, c, weights_only ? WEIGHTS : EVERYTHING));
    if (!weights_only)
        qd_trainer_set_position(t, (qd_position){meta->step, meta->next_sample});
    return QD_OK;
}
