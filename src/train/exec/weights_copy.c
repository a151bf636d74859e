/* Copies boxes of tensors into whole tensors and back. See weights_copy.h. */
#include "train/exec/weights_copy.h"

#include "spec/layout/pieces.h"
#include "train/exec/state.h"

#include <stdlib.h>
#include <string.h>

struct qd_weights_copy {
    const qd_ledger *ledger;
    float **tensors; /* per parameter; NULL: tied to another */
};

qd_status qd_weights_copy_create(const qd_ledger *ledger, qd_weights_copy **copy)
{
    qd_weights_copy *c = calloc(1, sizeof *c);
    bool good = c && (c->tensors = calloc((size_t)ledger->param_count, sizeof *c->tensors)) != NULL;
    if (good)
        c->ledger = ledger;
    for (int i = 0; good && i < ledger->param_count; i++) {
        const qd_param *p = &ledger->params[i];
        if (p->tied_to < 0)
            good = (c->tensors[i] = malloc((size_t)(p->shape[0] * p->shape[1]) * sizeof **c->tensors)) != NULL;
    }
    if (!good) {
        qd_weights_copy_destroy(c);
        return QD_FAIL(QD_NO_MEMORY, "no memory for a copy of all weights in one place");
    }
    *copy = c;
    return QD_OK;
}

void qd_weights_copy_destroy(qd_weights_copy *c)
{
    if (!c)
        return;
    for (int i = 0; c->ledger && i < c->ledger->param_count; i++)
        free(c->tensors[i]);
    free(c->tensors);
    free(c);
}

/* values: (box) to or from its place in the whole tensor. */
static void move_box(float *tensor, int64_t cols, const qd_atom *box, float *values, bool in)
{
    for (int64_t row = 0; row < box->length[0]; row++) {
        float *place = tensor + (box->begin[0] + row) * cols + box->begin[1], *value = values + row * box->length[1];
        size_t bytes = (size_t)box->length[1] * sizeof *value;
        if (in)
            memcpy(place, value, bytes);
        else
            memcpy(value, place, bytes);
    }
}

static qd_status add_pieces(qd_weights_copy *c, qd_trainer *trainer, const qd_state_pieces *pieces, float *values)
{
    int read = -1;
    for (int i = 0; i < pieces->count; i++) {
        const qd_state_piece *piece = &pieces->list[i];
        qd_atom held = qd_trainer_holding(trainer, piece->param, QD_TENSOR_VALUE).box;
        if (read != piece->param) /* pieces of one tensor follow each other */
            QD_TRY(qd_trainer_get(trainer, piece->param, QD_TENSOR_VALUE, values));
        read = piece->param;
        move_box(c->tensors[piece->param], c->ledger->params[piece->param].shape[1], &piece->box,
                 values + (piece->box.begin[0] - held.begin[0]) * held.length[1], true);
    }
    return QD_OK;
}

qd_status qd_weights_copy_add(qd_weights_copy *c, qd_trainer *trainer)
{
    qd_arena *arena = NULL;
    qd_state_pieces pieces;
    QD_TRY(qd_arena_create(&arena));
    float *values = malloc((size_t)qd_trainer_largest(trainer) * sizeof *values);
    qd_status status = values ? qd_pieces_plan(qd_trainer_program(trainer), 1u << QD_CKPT_VALUE | QD_PIECES_OMITTED, arena, &pieces)
                              : QD_FAIL(QD_NO_MEMORY, "no memory to read the weights");
    if (status == QD_OK)
        status = add_pieces(c, trainer, &pieces, values);
    free(values);
    qd_arena_destroy(arena);
    return status;
}

static qd_status read_box(void *context, const qd_param *param, qd_ckpt_kind kind, const qd_atom *box, float *out)
{
    const qd_weights_copy *c = context;
    int i = qd_ledger_find(c->ledger, param->name);
    (void)kind; /* weights alone are asked for */
    if (i < 0 || !c->tensors[i] || c->ledger->params[i].shape[0] != param->shape[0] || c->ledger->params[i].shape[1] != param->shape[1])
        return QD_FAIL(QD_SYSTEM, "the model that trains has no parameter '%s' of this shape", param->name);
    move_box(c->tensors[i], param->shape[1], box, out, false);
    return QD_OK;
}

static bool has_tensor(void *context, const char *name)
{
    const qd_weights_copy *c = context;
    return qd_ledger_find(c->ledger, name) >= 0;
}

qd_status qd_weights_copy_load(const qd_weights_copy *c, qd_trainer *trainer)
{
    return qd_state_load_weights(trainer, read_box, has_tensor, (void *)(uintptr_t)c);
}
