#include "train/state.h"

#include "train/long_work.h"

#include <stdio.h>
#include <stdlib.h>

static const qd_tensor_kind tensor_of[QD_CKPT_KIND_COUNT] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};

static qd_status fetch(void *context, int param, qd_ckpt_kind kind, float *out)
{
    qd_trainer *t = context;
    const qd_param *p = &qd_trainer_program(t)->ledger->params[param];
    return qd_trainer_read(t, p->name, tensor_of[kind], out, p->shape[0] * p->shape[1]);
}

static unsigned kinds_held(const qd_trainer *t)
{
    unsigned kinds = 0;
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        if (qd_trainer_holds(t, tensor_of[kind]))
            kinds |= 1u << kind;
    return kinds;
}

typedef struct writing {
    qd_trainer *trainer;
    const char *root, *config;
    int keep;
} writing;

static qd_status write_state(void *context)
{
    const writing *w = context;
    qd_position position = qd_trainer_position(w->trainer);
    const qd_ckpt_meta meta = {.step = position.step, .next_sample = position.next_sample, .seed = qd_trainer_seed(w->trainer),
                               .config = w->config};
    return qd_store_save(w->root, qd_trainer_program(w->trainer)->ledger, &meta, kinds_held(w->trainer), w->keep, fetch, w->trainer);
}

qd_status qd_state_save(qd_trainer *t, qd_comm *world, const char *root, const char *config, int keep)
{
    enum { MESSAGE = 512 };
    struct {
        int64_t status;
        char message[MESSAGE];
    } outcome = {0};
    writing w = {t, root, config, keep};
    /* Replicated over dp, every tensor is whole on rank 0. */
    outcome.status = qd_long_work_run(world, write_state, &w);
    if (outcome.status != QD_OK)
        snprintf(outcome.message, MESSAGE, "%s", qd_error_message());
    if (outcome.status == QD_REMOTE || outcome.status == QD_TIMEOUT || outcome.status == QD_MISMATCH)
        return QD_FAIL((qd_status)outcome.status, "%s", outcome.message);
    QD_TRY(qd_comm_broadcast(world, &outcome, sizeof outcome, QD_U8, 0, NULL));
    return outcome.status == QD_OK ? QD_OK : QD_FAIL((qd_status)outcome.status, "%s", outcome.message);
}

static qd_status load_param(qd_trainer *t, qd_checkpoint *c, int param, qd_ckpt_kind kind, float *values)
{
    const qd_program *p = qd_trainer_program(t);
    qd_atom box = qd_ledger_atom(p->ledger, param, p->rank);
    QD_TRY(qd_checkpoint_read(c, &p->ledger->params[param], kind, &box, values));
    return qd_trainer_write(t, p->ledger->params[param].name, tensor_of[kind], values, p->storage.count[param]);
}

qd_status qd_state_load(qd_trainer *t, qd_checkpoint *c, bool weights_only)
{
    const qd_program *p = qd_trainer_program(t);
    int64_t largest = 1;
    for (int i = 0; i < p->ledger->param_count; i++)
        largest = p->storage.count[i] > largest ? p->storage.count[i] : largest;
    float *values = malloc((size_t)largest * sizeof *values);
    if (!values)
        return QD_FAIL(QD_NO_MEMORY, "no memory to load a checkpoint");
    qd_status status = QD_OK;
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT && status == QD_OK; kind++) {
        if (kind != QD_CKPT_VALUE && (weights_only || !qd_trainer_holds(t, tensor_of[kind])))
            continue;
        for (int i = 0; i < p->ledger->param_count && status == QD_OK; i++)
            if (p->ledger->params[i].tied_to < 0)
                status = load_param(t, c, i, (qd_ckpt_kind)kind, values);
    }
    free(values);
    if (status == QD_OK && !weights_only) {
        const qd_ckpt_meta *meta = qd_checkpoint_meta(c);
        qd_trainer_set_position(t, (qd_position){meta->step, meta->next_sample});
    }
    return status;
}
