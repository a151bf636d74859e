#include "train/state.h"

#include "train/long_work.h"

#include <stdio.h>
#include <stdlib.h>

static const qd_tensor_kind tensor_of[QD_CKPT_KIND_COUNT] = {QD_TENSOR_VALUE, QD_TENSOR_MOMENT1, QD_TENSOR_MOMENT2};

typedef struct writing {
    qd_trainer *trainer;
    const char *root, *config;
    int keep;
    int fetched; /* tensors so far */
} writing;

static qd_status fetch(void *context, int param, qd_ckpt_kind kind, float *out)
{
    writing *w = context;
    const qd_param *p = &qd_trainer_program(w->trainer)->ledger->params[param];
    w->fetched++;
    return qd_trainer_read(w->trainer, p->name, tensor_of[kind], out, p->shape[0] * p->shape[1]);
}

static unsigned kinds_held(const qd_trainer *t)
{
    unsigned kinds = 0;
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        if (qd_trainer_holds(t, tensor_of[kind]))
            kinds |= 1u << kind;
    return kinds;
}

static qd_status write_state(void *context)
{
    writing *w = context;
    qd_position position = qd_trainer_position(w->trainer);
    const qd_ckpt_meta meta = {.step = position.step, .next_sample = position.next_sample, .seed = qd_trainer_seed(w->trainer),
                               .config = w->config};
    return qd_store_save(w->root, qd_trainer_program(w->trainer)->ledger, &meta, kinds_held(w->trainer), w->keep, fetch, w);
}

/* Where ranks hold parts, reading a tensor is collective: the others take part in the reads that rank 0's writing makes, which
 * go by kind, then by parameter. Rank 0 makes up for those that a failure left out. */
static qd_status read_along(writing *w, float *values)
{
    const qd_ledger *l = qd_trainer_program(w->trainer)->ledger;
    unsigned kinds = kinds_held(w->trainer);
    int done = w->fetched, number = 0;
    for (int kind = 0; kind < QD_CKPT_KIND_COUNT; kind++)
        for (int i = 0; i < l->param_count; i++)
            if (l->params[i].tied_to < 0 && (kinds & 1u << kind) && number++ >= done)
                QD_TRY(fetch(w, i, (qd_ckpt_kind)kind, values));
    return QD_OK;
}

static qd_status save_parts(writing *w, qd_comm *world, qd_status *written)
{
    const qd_program *p = qd_trainer_program(w->trainer);
    int64_t largest = 1;
    for (int i = 0; i < p->ledger->param_count; i++)
        largest = p->storage.count[i] > largest ? p->storage.count[i] : largest;
    float *values = malloc((size_t)largest * sizeof *values);
    if (!values)
        return QD_FAIL(QD_NO_MEMORY, "no memory to save a checkpoint");
    char message[512] = "";
    *written = qd_comm_rank(world) == 0 ? write_state(w) : QD_OK;
    if (*written != QD_OK)
        snprintf(message, sizeof message, "%s", qd_error_message());
    qd_status status = read_along(w, values);
    free(values);
    if (status == QD_OK && *written != QD_OK)
        *written = QD_FAIL(*written, "%s", message);
    return status;
}

qd_status qd_state_save(qd_trainer *t, qd_comm *world, const char *root, const char *config, int keep)
{
    enum { MESSAGE = 512 };
    struct {
        int64_t status;
        char message[MESSAGE];
    } outcome = {0};
    writing w = {.trainer = t, .root = root, .config = config, .keep = keep};
    if (qd_trainer_program(t)->storage.parts > 1) {
        qd_status written = QD_OK;
        QD_TRY(save_parts(&w, world, &written));
        outcome.status = written;
    } else { /* every tensor is whole on rank 0 */
        outcome.status = qd_long_work_run(world, write_state, &w);
    }
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
    qd_holding own = qd_trainer_holding(t, param, tensor_of[kind]);
    if (own.count == 0)
        return QD_OK;
    QD_TRY(qd_checkpoint_read(c, &p->ledger->params[param], kind, &own.box, values));
    return qd_trainer_put(t, param, tensor_of[kind], values);
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
