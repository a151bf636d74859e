/* Each rank checks its weights and its contributions to the sums; the ranks then agree on the
 * likeliest cause. */
#include "train/exec/faults/nonfinite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Causes in ascending order of likelihood: a non-finite weight makes the loss and all gradients
 * non-finite too. */
typedef enum cause { CAUSE_NONE, CAUSE_GRADIENT, CAUSE_LOSS, CAUSE_WEIGHT } cause;

/* The first non-finite weight of this rank, or -1. */
static qd_status find_weight(qd_trainer *t, int *param)
{
    const qd_program *p = qd_trainer_program(t);
    qd_status status = QD_OK;
    int64_t largest = qd_trainer_largest(t);
    *param = -1;
    float *values = malloc((size_t)largest * sizeof *values);
    if (!values)
        return QD_FAIL(QD_NO_MEMORY, "no memory to check the weights");
    for (int i = 0; i < p->ledger->param_count && status == QD_OK && *param < 0; i++) {
        if (p->ledger->params[i].tied_to >= 0)
            continue;
        status = qd_trainer_get(t, i, QD_TENSOR_VALUE, values);
        int64_t count = qd_trainer_holding(t, i, QD_TENSOR_VALUE).count;
        for (int64_t k = 0; k < count && status == QD_OK; k++)
            if (!isfinite(values[k]))
                *param = i;
    }
    free(values);
    return status;
}

static void describe(const qd_ledger *ledger, int64_t vote, int size, const char *seen, qd_step_output *output)
{
    cause found = (cause)(vote >> 56);
    int rank = size - (int)(vote >> 28 & 0xfffffff), param = (int)(vote & 0xfffffff) - 1;
    const char *name = param >= 0 ? ledger->params[param].name : "";
    char *text = output->not_finite;
    const size_t room = sizeof output->not_finite;
    switch (found) {
    case CAUSE_WEIGHT: snprintf(text, room, "rank %d: its weight %s is not finite", rank, name); break;
    case CAUSE_LOSS: snprintf(text, room, "rank %d: its loss is not a finite number", rank); break;
    case CAUSE_GRADIENT: snprintf(text, room, "rank %d: its gradient of %s is not finite", rank, name); break;
    case CAUSE_NONE: snprintf(text, room, "%.110s, but the contribution of every rank is finite", seen); break;
    }
}

qd_status qd_nonfinite_explain(qd_trainer *t, qd_interpreter *interpreter, qd_comm *world, const qd_step_input *input,
                               qd_step_output *output)
{
    const qd_ledger *ledger = qd_trainer_program(t)->ledger;
    int rank = qd_comm_rank(world), size = qd_comm_size(world), weight = -1, param;
    qd_nonfinite_finding finding = {.gradient = -1};
    char seen[sizeof output->not_finite];
    qd_step_input again = *input;
    qd_step_output ignored;
    snprintf(seen, sizeof seen, "%s", output->not_finite);
    QD_TRY(find_weight(t, &weight));
    if (size > 1) {
        again.look = &finding;
        again.trace = NULL;
        again.profile = NULL;
        again.cpu_seconds = NULL;
        QD_TRY(qd_interpret(interpreter, &again, &ignored));
    }
    cause found = weight >= 0 ? CAUSE_WEIGHT : finding.loss ? CAUSE_LOSS : finding.gradient >= 0 ? CAUSE_GRADIENT : CAUSE_NONE;
    if (size == 1 && found == CAUSE_NONE) {
        snprintf(output->not_finite, sizeof output->not_finite, "rank 0: %.140s", seen);
        return QD_OK;
    }
    param = found == CAUSE_WEIGHT ? weight : found == CAUSE_GRADIENT ? finding.gradient : -1;
    /* The likeliest cause, then the lowest rank. */
    int64_t vote = found == CAUSE_NONE ? 0 : ((int64_t)found << 56) | ((int64_t)(size - rank) << 28) | (param + 1);
    QD_TRY(qd_comm_all_reduce(world, &vote, &vote, 1, QD_I64, QD_MAX, NULL));
    describe(ledger, vote, size, seen, output);
    return QD_OK;
}
