/* Which ops of a block run again in its backward pass, derived from the lists alone. Running an op
 * again on the same inputs is bit-identical, so no choice made here changes a result. */
#include "spec/passes/passes.h"

static bool is_read_backward(const qd_class_writer *w, int slot)
{
    return qd_class_read_backward(w, slot) < w->op_count;
}

/* Whether op `index` alone writes a slot. */
static bool is_only_writer(const qd_class_writer *w, int slot, int index)
{
    return qd_class_next(w, slot, QD_WRITES, 0) == index && qd_class_next(w, slot, QD_WRITES, index + 1) == w->op_count;
}

/* The largest magnitude of a tensor costs a pass over it. The size of a plan of nodes does not
 * follow its rows, so ranks with different numbers of rows would choose differently, and ranks that
 * share a result must have the same ops. */
static bool never_runs_again(qd_op_kind kind)
{
    return kind == QD_OP_AMAX || kind == QD_OP_ACTIVATION_AMAX || kind == QD_OP_NODE_PLAN;
}

/* Whether recomputing op `index` frees more bytes than keeping its inputs takes. No other op may
 * write its results. */
static bool pays(const qd_class_writer *w, int index)
{
    const qd_op *op = &w->ops[index];
    int64_t saved = 0, cost = 0;
    if (op->phase != QD_PHASE_FORWARD || op->once || op->flops > 0.0 || qd_op_communicates(op) || never_runs_again(op->kind))
        return false;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        if (op->slot[j] < 0)
            continue;
        const qd_slot *slot = &w->slots[op->slot[j]];
        bool kept = is_read_backward(w, op->slot[j]);
        if (qd_op_writes(op, j)) {
            if (slot->kind != QD_SLOT_LOCAL || qd_op_reads(op, j) || !is_only_writer(w, op->slot[j], index))
                return false;
            saved += kept ? qd_slot_bytes(slot) : 0;
        } else if (slot->kind == QD_SLOT_LOCAL) {
            if (qd_class_next(w, op->slot[j], QD_WRITES, index) < w->op_count) /* overwritten since */
                return false;
            cost += kept ? 0 : qd_slot_bytes(slot);
        }
    }
    return saved > cost;
}

/* Runs op `index` again right before the first reader of its results. The results of the second run
 * get their own slots, which the backward pass reads instead; those of phase F then end with phase
 * F, and lifetimes follow as for any other slot. */
static void run_again(qd_class_writer *w, int index)
{
    qd_op copy = w->ops[index];
    copy.phase = QD_PHASE_INPUT;
    copy.again = true;
    int at = w->op_count;
    for (int j = 0; j < QD_OP_SLOTS; j++) {
        if (!qd_op_writes(&copy, j))
            continue;
        int slot = copy.slot[j], reader = qd_class_read_backward(w, slot);
        at = reader < at ? reader : at;
        copy.slot[j] = (int16_t)qd_class_like(w, w->slots[slot].name, slot);
        qd_class_replace(w, slot, copy.slot[j], true);
    }
    qd_class_keep(w, &copy);
    qd_class_move(w, w->op_count - 1, at);
}

/* Keys and values of latent attention are expanded from far fewer numbers: the GEMMs that do so,
 * and the op that joins their results, run again, as DeepSeek V3 was trained. Not where heads were
 * exchanged for rows in between (ulysses). */
static void expand_again(qd_class_writer *w)
{
    for (int i = 0; i < w->op_count; i++) {
        const qd_op join = w->ops[i];
        if (join.kind != QD_OP_LATENT_QKV || join.phase != QD_PHASE_FORWARD || !is_read_backward(w, join.slot[QD_LATENT_QKV_QKV]))
            continue;
        const int parts[] = {join.slot[QD_LATENT_QKV_Q], join.slot[QD_LATENT_QKV_KV]};
        run_again(w, i);
        for (int k = 0; k < 2; k++) {
            int gemm = qd_class_definition(w, parts[k], i);
            if (gemm >= 0 && w->ops[gemm].kind == QD_OP_LINEAR && is_only_writer(w, parts[k], gemm))
                run_again(w, gemm);
        }
    }
}

/* Whether the backward pass, or an op of phase F after `index` that runs again, reads a slot. */
static bool is_needed(const qd_class_writer *w, int slot, int index)
{
    int reader = index;
    do
        reader = qd_class_next(w, slot, QD_READS, reader + 1);
    while (reader < w->op_count && w->ops[reader].phase == QD_PHASE_FORWARD && !w->ops[reader].again);
    return reader < w->op_count;
}

/* Marks the ops of phase F that run again. */
static void mark_needed(qd_class_writer *w)
{
    for (int i = w->op_count - 1; i >= 0; i--) {
        qd_op *op = &w->ops[i];
        for (int j = 0; j < QD_OP_SLOTS && op->phase == QD_PHASE_FORWARD && !op->once; j++)
            op->again = op->again || (qd_op_writes(op, j) && is_needed(w, op->slot[j], i));
        for (int j = 0; j < QD_OP_SLOTS && op->again; j++)
            if (qd_op_writes(op, j) && w->slots[op->slot[j]].kind != QD_SLOT_LOCAL)
                QD_CLASS_FAIL(w, QD_SYSTEM, "%s cannot be run again: it writes '%s'", qd_op_name(op->kind), w->slots[op->slot[j]].name);
    }
}

void qd_pass_recompute(qd_class_writer *w)
{
    if (w->out->recompute == QD_RECOMPUTE_FULL)
        mark_needed(w);
    if (w->out->recompute != QD_RECOMPUTE_SELECTIVE)
        return;
    expand_again(w);
    for (int i = 0; i < w->op_count && !w->wrong; i++)
        if (pays(w, i))
            run_again(w, i);
}
